# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From a wheel's and a tree's own requirements to a lock with hashes."""

from __future__ import annotations

import zipfile

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import requirements
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

HASH = "0" * 63 + "1"

#: As the 0.32.0 CPU wheel states them.
STATED = [
    'six>=1.16.0; python_version > "3.11"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "s390x"',
    'torch==2.13.0; platform_system == "Darwin"',
    'torchaudio; platform_machine != "s390x"',
    "fastapi[standard]<0.137.0,>=0.133.0",
    'triton @ https://example.org/triton-3.8.0-cp311-cp311-linux_x86_64.whl ; python_version == "3.11"',
    'pandas; extra == "bench"',
    'scipy; extra == "audio"',
]


def test_what_is_resolved_and_what_is_left_out():
    lines, left_out = requirements.wanted(STATED, ["TorchAudio"])
    assert lines == sorted([STATED[0], STATED[1], STATED[2], STATED[4]])
    assert left_out == sorted([STATED[3], STATED[5]])


def test_a_torch_of_ones_own_replaces_the_stated_one():
    lines, _left_out = requirements.wanted(STATED, [], "torch==2.13.0")
    assert [line for line in lines if requirements.name_of(line) == "torch"] == ["torch==2.13.0"]


@pytest.mark.parametrize(
    ("layout", "device", "lines"),
    [
        (
            {
                "requirements/build/cpu.txt": "cmake>=3.26 # why\n-r extra.txt\n--extra-index-url https://x\n\n# no\n",
                "requirements/build/extra.txt": "torch==2.13.0+cpu; \\\n platform_machine == 'x86_64'\n",
                "pyproject.toml": '[build-system]\nrequires = ["old"]\n',
            },
            "cpu",
            ["cmake>=3.26", "torch==2.13.0+cpu;   platform_machine == 'x86_64'"],
        ),
        ({"requirements/build.txt": "ninja\n"}, "cuda", ["ninja"]),
        (
            {
                "pyproject.toml": '[project]\nname = "v"\n[build-system]\n# why\nrequires = [\n'
                "  \"cmake>=3\",\n  # no\n  'torch == 2.11.0',\n"
                '  "x[y]",\n]\nbuild-backend = "b"\n[tool.x]\nrequires = ["never"]\n'
            },
            "cuda",
            ["cmake>=3", "torch == 2.11.0", "x[y]"],
        ),
    ],
)
def test_what_a_tree_says_its_build_needs(tmp_path, layout, device, lines):
    for name, text in layout.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert requirements.build_requirements(str(tmp_path), device) == lines


def test_a_tree_that_says_nothing_is_refused(tmp_path):
    with pytest.raises(DflashError):
        requirements.build_requirements(str(tmp_path), "cpu")


def item(name, version, **archive):
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": "https://x/y", "archive_info": archive},
    }


def test_the_lock_is_sorted_and_has_every_hash():
    report = {
        "install": [
            item("Zlib_NG", "1.0", hash="sha256=" + HASH),
            item("attrs", "2", hashes={"sha256": HASH}),
            item("torchaudio", "3", hashes={"sha256": HASH}),
        ]
    }
    text = requirements.lock_text(report, ["https://i"], ["torchaudio"])
    assert text == "--extra-index-url https://i\nattrs==2 --hash=sha256:%s\nzlib-ng==1.0 --hash=sha256:%s\n" % (
        HASH,
        HASH,
    )
    assert [entry["name"] for entry in requirements.parse_lock(text)] == ["attrs", "zlib-ng"]


def test_a_file_of_a_wheel_folder_is_hashed_here(tmp_path):
    path = tmp_path / "a +b-1-py3-none-any.whl"
    path.write_bytes(b"x")
    entry = item("ab", "1")
    entry["download_info"]["url"] = "file://" + str(path).replace(" ", "%20")
    assert requirements.digest_of(entry) == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


def test_an_index_without_hashes_is_refused():
    with pytest.raises(DflashError):
        requirements.lock_text({"install": [item("a", "1")]})


@pytest.mark.parametrize("line", ["a==1", "a>=1 --hash=sha256:" + HASH, "a @ https://x", "-e ."])
def test_a_lock_line_without_hash_is_refused(line):
    with pytest.raises(DflashError):
        requirements.parse_lock(line + "\n")


def test_a_password_in_an_index_is_refused():
    with pytest.raises(DflashError) as caught:
        requirements.index_options(["https://me:secret@x/simple"])
    assert "secret" not in str(caught.value)


def test_the_cache_key_depends_on_every_input():
    base = (["a"], ["u"], "3.11.2", "linux", ["x"])
    keys = {requirements.cache_key(*base)}
    for place, value in enumerate((["b"], ["v"], "3.11.3", "other", ["y"])):
        changed = list(base)
        changed[place] = value
        keys.add(requirements.cache_key(*changed))
    assert len(keys) == 6


def test_metadata_is_read_from_the_wheel(tmp_path):
    wheel = tmp_path / "v-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "v-1.dist-info/METADATA", "Name: v\nVersion: 1\nRequires-Dist: a\nRequires-Dist: b\n\nRequires-Dist: c\n"
        )
    assert requirements.metadata_of(str(wheel))["Requires-Dist"] == ["a", "b"]
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(DflashError):
        requirements.metadata_of(str(wheel))
