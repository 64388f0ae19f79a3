# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The proof of an installed release: a small venv over a small layer, damaged in every way that a check is for."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_tree as tree

from ansible_collections.dflash.fleet.plugins.module_utils import capabilities, checks, child, loading, proof, record
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

INFO = "vllm-0.32.1.dev2+g0123abcde.cpu.dist-info"
COMMIT = "0123abcde" + "0" * 31
TORCH = """
class version:
    cuda = None
__version__ = "2.13.0+cpu"
_names = ["aten::add"]
class _C:
    @staticmethod
    def _dispatch_get_all_op_names():
        return list(_names)
class ops:
    @staticmethod
    def load_library(path):
        _names.append("_C::" + path)
"""


def listed(site: Path, names: list[str]) -> str:
    lines = []
    for name in names:
        data = (site / name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append("%s,sha256=%s,%d" % (name, digest, len(data)))
    return "\n".join([*lines, INFO + "/RECORD,,"]) + "\n"


@pytest.fixture(scope="module")
def right() -> Iterator[Path]:
    """A root folder with one layer (a pretended torch) and one release; readable by the account that probes run as."""
    root = Path(tempfile.mkdtemp(prefix="dflash-proof-", dir="/var/tmp"))
    os.chmod(root, 0o755)
    python = child.any_python(None)
    # Of the interpreter that will load it, which a virtual environment's own folders do not tell.
    said = subprocess.run(
        [python, "-I", "-c", "import sys, sysconfig; print('python%d.%d' % sys.version_info[:2]);"
         "print(sysconfig.get_config_var('DESTSHARED'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    name, libraries = said[:2]
    layer, release = root / "layers" / "lay", root / "releases" / "rel"
    deps, site = (folder / "venv" / "lib" / name / "site-packages" for folder in (layer, release))
    (deps / "torch").mkdir(parents=True)
    (deps / "torch" / "__init__.py").write_text(TORCH)
    (deps / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = None\n")
    (deps / "numpy-2.0.dist-info").mkdir()
    (deps / "numpy-2.0.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 2.0\n\n")
    (release / "venv" / "bin").mkdir(parents=True)
    (release / "venv" / "bin" / "python").symlink_to(python)
    (release / "venv" / "pyvenv.cfg").write_text("home = %s\n" % os.path.dirname(os.path.realpath(python)))
    package = tree.write(site)
    (package / "platforms").mkdir()
    (package / "platforms" / "cpu.py").write_text(
        "class CpuPlatform:\n    @classmethod\n    def import_kernels(cls):\n        import vllm._C_AVX2\n"
    )
    library = next(path for path in sorted(Path(libraries).glob("*.so")))
    for variant in ("_C", "_C_AVX2"):
        shutil.copy(library, package / (variant + ".abi3.so"))
    (site / "layer.pth").write_text("import site; site.addsitedir(%r)\n" % str(deps))
    (site / INFO).mkdir()
    (site / INFO / "METADATA").write_text(
        "Name: vllm\nVersion: 0.32.1.dev2+g0123abcde.cpu\nRequires-Dist: numpy\n"
        "Requires-Dist: absent; python_version<'3'\n"
        "Requires-Dist: extra-only; extra == 'audio'\n\n"
    )
    names = [
        os.path.relpath(path, site) for path in sorted(site.rglob("*")) if path.is_file() and path.suffix != ".pth"
    ]
    (site / INFO / "RECORD").write_text(listed(site, names))
    (layer / "stat.json").write_text(json.dumps(record.make_stat(str(layer), vllm=False)))
    (release / "manifest.json").write_text(json.dumps({"release_id": "rel", "layer_id": "lay", "wheel_sha256": "aa"}))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def root(right: Path) -> Iterator[Path]:
    """A copy that a test may damage.  The layer is found beside the release, so both are copied."""
    copy = Path(tempfile.mkdtemp(prefix="dflash-proof-", dir="/var/tmp"))
    os.chmod(copy, 0o755)
    shutil.copytree(right, copy, symlinks=True, dirs_exist_ok=True)
    for path in copy.rglob("layer.pth"):
        path.write_text(path.read_text().replace(str(right), str(copy)))
    layer = copy / "layers" / "lay"
    (layer / "stat.json").write_text(json.dumps(record.make_stat(str(layer), vllm=False)))
    yield copy
    shutil.rmtree(copy)


def manifest() -> dict[str, Any]:
    return {
        "commit": COMMIT,
        "version": "0.32.1.dev2+g0123abcde.cpu",
        "package_version": "0.32.1.dev2+g0123abcde",
        "wheel": {"sha256": "aa"},
        "extensions": [{"module": "vllm._C", "required": True}, {"module": "vllm._C_AVX2", "required": True}],
    }


def inspect(root: Path, **changes: Any) -> list[checks.Check]:
    wish = proof.Wish(
        drafter=capabilities.generic("uniform"),
        manifest=manifest(),
        speculative_config={"disable_eagle_block_drop": True},
    )._replace(**changes)
    return proof.inspect_release(str(root / "releases" / "rel"), wish)[0]


def site_of(root: Path, what: str = "releases/rel") -> Path:
    return Path(record.site_packages(str(root / what)) or "")


def record_anew(root: Path) -> None:
    """What a build of changed source leaves: RECORD agrees with the files."""
    site = site_of(root)
    names = [line.split(",")[0] for line in (site / INFO / "RECORD").read_text().splitlines()[:-1]]
    (site / INFO / "RECORD").write_text(listed(site, names))


def test_a_right_release(root: Path) -> None:
    found = inspect(root)
    assert [item["id"] for item in checks.blocking(found)] == []
    ids = [item["id"] for item in found]
    assert len(ids) == len(set(ids))
    assert ids == [
        "identity.commit",
        "identity.version",
        "identity.wheel",
        "complete.distribution",
        "complete.leftovers",
        "complete.shadow",
        "complete.owners",
        "complete.extensions",
        "ext.elf",
        "ext.needed",
        "ext.abi",
        "ext.cuda_major",
        "complete.layer",
        "complete.extra_files",
        "complete.record",
        "complete.requirements",
        "capability.layer_offset.v1",
        "capability.layer_offset.v2",
        "capability.swa.uniform.v1",
        "capability.swa.uniform.v2",
        "capability.swa.mixed.v1",
        "capability.swa.mixed.v2",
        "capability.cache_rule.default",
        "capability.cache_rule.opt_in",
        "capability.lookahead_slot",
        "capability.mixed_guard",
        "capability.lm_head_sharing.v1",
        "capability.lm_head_sharing.v2",
        "ext.import:vllm._C",
        "ext.ops:vllm._C",
    ]
    by_id = {item["id"]: item for item in found}
    assert by_id["ext.import:vllm._C"]["evidence"]["variant"] == "vllm._C_AVX2"
    assert by_id["capability.swa.mixed.v1"]["level"] == "advisory"
    assert by_id["complete.requirements"]["status"] == "pass"


def cut(root: Path) -> None:
    os.truncate(site_of(root) / "vllm" / "_C.abi3.so", 3000)


def empty(root: Path) -> None:
    os.truncate(site_of(root) / "vllm" / "_C_AVX2.abi3.so", 0)


def lost(root: Path) -> None:
    (site_of(root) / "vllm" / "_C_AVX2.abi3.so").unlink()


def shift_lost(root: Path) -> None:
    path = site_of(root) / "vllm" / tree.RUNNER_V1
    path.write_text(path.read_text().replace("number + 1", "number"))
    record_anew(root)


def option_lost(root: Path) -> None:
    path = site_of(root) / "vllm" / tree.CONFIG
    path.write_text(path.read_text().replace(" and not self.disable_eagle_block_drop", ""))
    record_anew(root)


def edited(root: Path) -> None:
    path = site_of(root) / "vllm" / tree.MANAGER
    path.write_text(path.read_text() + "# touched\n")


def added(root: Path) -> None:
    (site_of(root) / "vllm" / "sitecustom.py").write_text("")


def layer_touched(root: Path) -> None:
    (site_of(root, "layers/lay") / "torch" / "extra.py").write_text("")


def half_removed(root: Path) -> None:
    (site_of(root) / "~llm-0.32.0.dist-info").mkdir()


def two(root: Path) -> None:
    shutil.copytree(site_of(root) / INFO, site_of(root, "layers/lay") / "vllm-0.31.0.dist-info")
    (root / "layers" / "lay" / "stat.json").write_text(
        json.dumps(record.make_stat(str(root / "layers" / "lay"), vllm=False))
    )


def unlisted(root: Path) -> None:
    shutil.rmtree(site_of(root) / INFO)


def other_wheel(root: Path) -> None:
    (root / "releases" / "rel" / "manifest.json").write_text(json.dumps({"layer_id": "lay", "wheel_sha256": "bb"}))


def other_commit(root: Path) -> None:
    path = site_of(root) / "vllm" / "_version.py"
    path.write_text(path.read_text().replace("commit_id = 'g0123abcde'", "commit_id = 'gfedcba987'"))
    record_anew(root)


@pytest.mark.parametrize(
    "damage, against, said",
    [
        (cut, ["ext.elf", "complete.record", "ext.ops:vllm._C"], "vllm/_C.abi3.so is truncated"),
        (empty, ["ext.elf", "complete.record", "ext.import:vllm._C"], "vllm/_C_AVX2.abi3.so is empty"),
        (lost, ["complete.extensions", "complete.record", "ext.import:vllm._C"], "missing: vllm._C_AVX2"),
        (shift_lost, ["capability.layer_offset.v1"], "[1, 16, 31, 46, 61]"),
        (option_lost, ["capability.cache_rule.opt_in"], "'dflash': True"),
        (edited, ["complete.record"], "vllm/v1/core/kv_cache_manager.py: "),
        (added, ["complete.extra_files"], "vllm/sitecustom.py"),
        (layer_touched, ["complete.layer"], "torch/extra.py"),
        (half_removed, ["complete.leftovers"], "site-packages/~llm-0.32.0.dist-info"),
        (unlisted, ["complete.distribution"], "0 distributions in the folder"),
        (two, ["complete.distribution"], "the interpreter sees 2 distributions"),
        (other_wheel, ["identity.wheel"], "bb"),
        (other_commit, ["identity.commit"], "fedcba987"),
    ],
)
def test_each_damage_is_named_by_its_checks_and_no_other(
    root: Path, damage: Callable[[Path], None], against: list[str], said: str
) -> None:
    damage(root)
    found = checks.blocking(inspect(root))
    assert [item["id"] for item in found] == against
    assert said in str(found[0]["actual"])


def test_a_broken_torch_is_named(root: Path) -> None:
    path = site_of(root, "layers/lay") / "torch" / "__init__.py"
    path.write_text("raise ImportError('libtorch_cpu.so: file too short')\n")
    (root / "layers" / "lay" / "stat.json").write_text(
        json.dumps(record.make_stat(str(root / "layers" / "lay"), vllm=False))
    )
    found = checks.blocking(inspect(root))
    assert found[0]["id"] == "ext.import:vllm._C"
    assert [checks.base_id(item["id"]) for item in found] == ["ext.import", "ext.ops"]
    assert found[0]["actual"] == "torch does not import: ImportError: libtorch_cpu.so: file too short"


def test_a_missing_requirement_is_only_told(root: Path) -> None:
    shutil.rmtree(site_of(root, "layers/lay") / "numpy-2.0.dist-info")
    by_id = {item["id"]: item for item in inspect(root)}
    assert (by_id["complete.requirements"]["level"], by_id["complete.requirements"]["actual"]) == (
        "advisory",
        ["numpy"],
    )


def test_no_capability_is_required_without_a_drafter(root: Path) -> None:
    shift_lost(root)
    assert checks.blocking(inspect(root, drafter=None)) == []


def test_a_tree_is_told_without_being_imported(tmp_path: Path) -> None:
    package = tree.write(tmp_path)
    (package / "__init__.py").write_text("raise SystemExit\n")
    found, said = proof.inspect_tree(str(tmp_path), proof.Wish())
    assert [item["id"] for item in found][:2] == ["identity.commit", "identity.version"]
    assert len(found) == 14
    assert said["commit_id"] == "g0123abcde"
    assert checks.blocking(found) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda empty_folder: proof.inspect_tree(empty_folder, proof.Wish()),
        lambda empty_folder: proof.inspect_release(empty_folder, proof.Wish()),
        lambda empty_folder: proof.inspect_python(empty_folder + "/bin/python", proof.Wish()),
        lambda empty_folder: proof.load_drafter(empty_folder),
    ],
)
def test_arguments_that_name_nothing_are_refused(tmp_path: Path, call: Callable[[str], object]) -> None:
    with pytest.raises(DflashError):
        call(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"dflash_config": [1]}', '{"num_hidden_layers": "five"}'])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DflashError):
        proof.load_drafter(str(tmp_path))


def test_a_library_without_operators_is_damaged() -> None:
    result = {"ok": True, "ops": 0, "signal": 0, "namespaces": {}, "seconds": 0.1}
    found = loading._operators("vllm._C_AVX2", "/x/_C_AVX2.abi3.so", result, {}, "required")
    assert (found["status"], found["actual"]) == ("fail", "_C_AVX2.abi3.so: it registers no operator")
    assert loading._operators("vllm._C_AVX2", "/x/a.so", {**result, "ops": 3}, {}, "required")["status"] == "pass"


def test_a_host_without_driver_does_not_refuse_a_cuda_library() -> None:
    result = {
        "ok": False,
        "error": "libcuda.so.1: cannot open shared object file: No such file or directory",
        "ops": 0,
        "signal": 0,
        "namespaces": {},
        "seconds": 0.1,
    }
    found = loading._import("vllm._C", None, "/x/_C.abi3.so", result, {}, "required")
    assert (found["status"], found["level"]) == ("unknown", "advisory")


@pytest.mark.parametrize(
    ("config", "nested"),
    [
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({}, False),
    ],
)
def test_the_head_of_a_nested_target_is_required(tmp_path, config, nested):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert proof.load_nested(str(tmp_path)) is nested
    package = tree.write(tmp_path / "tree")
    wish = proof.Wish(drafter=capabilities.generic("full"), nested_target=proof.load_nested(str(tmp_path)))
    found, _said = proof.inspect_tree(str(package.parent), wish)
    levels = {item["id"]: item["level"] for item in found}
    assert levels["capability.lm_head_sharing.v1"] == ("required" if nested else "advisory")


def test_a_target_without_a_configuration_is_refused(tmp_path):
    assert proof.load_nested(None) is False
    with pytest.raises(DflashError, match=r"config\.json of a target"):
        proof.load_nested(str(tmp_path))
