# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What RECORD and the stat table see of damaged files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import record


def line(site: Path, path: str) -> str:
    data = (site / path).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return "%s,sha256=%s,%d" % (path, digest, len(data))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A release folder with a small distribution named vllm whose RECORD is right."""
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    info = site / "vllm-0.32.1.dist-info"
    (site / "vllm" / "__pycache__").mkdir(parents=True)
    info.mkdir()
    (site / "vllm" / "__init__.py").write_text("X = 1\n")
    (site / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF" + bytes(3 << 20))
    (site / "vllm" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"cache")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\n\nBody: no\n")
    lines = [line(site, path) for path in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm-0.32.1.dist-info/METADATA")]
    lines += ["vllm/__pycache__/__init__.cpython-311.pyc,sha256=AAAA,1", "vllm-0.32.1.dist-info/RECORD,,"]
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return tmp_path


def site_of(root: Path) -> Path:
    return Path(record.site_packages(str(root)) or "")


def damage(root: Path, kind: str) -> None:
    package = site_of(root) / "vllm"
    if kind == "cut":
        os.truncate(package / "_C.abi3.so", 100)
    elif kind == "lost":
        (package / "__init__.py").unlink()
    elif kind == "flipped":
        path = package / "__init__.py"
        before = os.stat(path)
        path.write_text("X = 2\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif kind == "added":
        (package / "extra.py").write_text("")


def test_a_right_installation_has_no_problem(release: Path) -> None:
    site = str(site_of(release))
    assert record.distributions(site) == [record.Distribution("vllm", "0.32.1", "vllm-0.32.1.dist-info")]
    assert record.verify(site, "vllm-0.32.1.dist-info") == []
    assert record.verify_site(site) == {"ok": True, "distributions": 1, "files": 5, "problems": []}
    assert record.unknown_files(site, "vllm", ["vllm-0.32.1.dist-info"]) == []


@pytest.mark.parametrize(
    "kind, path, problem",
    [
        ("cut", "vllm/_C.abi3.so", "100 bytes, recorded 3145732"),
        ("lost", "vllm/__init__.py", "missing"),
        ("flipped", "vllm/__init__.py", "another content"),
    ],
)
def test_record_names_the_file(release: Path, kind: str, path: str, problem: str) -> None:
    damage(release, kind)
    assert record.verify(str(site_of(release)), "vllm-0.32.1.dist-info") == [{"path": path, "problem": problem}]


def test_an_added_file_is_known_by_no_record(release: Path) -> None:
    damage(release, "added")
    found = record.unknown_files(str(site_of(release)), "vllm", ["vllm-0.32.1.dist-info"])
    assert found == ["vllm/extra.py"]


def test_a_distribution_without_record_is_a_problem(release: Path) -> None:
    site = site_of(release)
    (site / "vllm-0.32.1.dist-info" / "RECORD").unlink()
    assert record.verify(str(site), "vllm-0.32.1.dist-info") is None
    assert record.verify_site(str(site))["ok"] is False


@pytest.mark.parametrize(
    "kind, where",
    [
        ("cut", "changed"),
        ("lost", "missing"),
        ("added", "extra"),
        ("flipped", "rehashed"),
    ],
)
def test_the_fast_path_sees_each_damage(release: Path, kind: str, where: str) -> None:
    stat = json.loads(json.dumps(record.make_stat(str(release), vllm=True)))
    assert record.compare_stat(str(release), stat)["ok"] is True
    damage(release, kind)
    found = record.compare_stat(str(release), stat)
    assert found["ok"] is False
    assert [path.rsplit("/", 1)[1] for path in found[where]] == [
        {"cut": "_C.abi3.so", "lost": "__init__.py", "added": "extra.py", "flipped": "__init__.py"}[kind]
    ]


def test_a_flipped_byte_with_its_time_put_back_needs_the_hashes(release: Path) -> None:
    stat = record.make_stat(str(release), vllm=True)
    damage(release, "flipped")
    assert record.compare_stat(str(release), stat, hashes=False)["ok"] is True
    assert record.compare_stat(str(release), stat)["ok"] is False


def test_interpreters_may_write_caches(release: Path) -> None:
    stat = record.make_stat(str(release), vllm=True)
    (site_of(release) / "vllm" / "__pycache__" / "new.pyc").write_bytes(b"x")
    assert record.compare_stat(str(release), stat)["ok"] is True


def test_an_empty_stat_proves_nothing(release: Path) -> None:
    assert record.compare_stat(str(release), {})["ok"] is False


def test_leftovers_of_an_interrupted_pip(release: Path) -> None:
    (site_of(release) / "~llm").mkdir()
    assert record.leftovers(str(site_of(release))) == ["~llm"]
