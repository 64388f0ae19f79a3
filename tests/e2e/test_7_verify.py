# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The diagnosis as one command: read-only, on any interpreter, and no earlier proof is evidence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest

AREAS = {"identity", "complete", "ext", "capability"}
SIDE_FILES = ("serve.yaml", "models.json", "argv.json")


@pytest.fixture
def untouched(demo: harness.Clone) -> Iterator[harness.Clone]:
    """Whatever a diagnosis does, files and server are the same after it."""
    before, server = harness.snapshot(demo.root), demo.server()
    yield demo
    assert harness.snapshot(demo.root) == before
    assert demo.server() == server and demo.alive()


def stranger(clone: harness.Clone, folder: Path, **extra: Any) -> harness.Run:
    """The command of somebody who has never used the rest: no inventory, no variables but these."""
    return harness.command(
        [
            str(clone.venv / "bin" / "ansible-playbook"), str(clone.path / "verify_dflash.yml"), "-i", "gpu1,",
            "-e", "ansible_connection=local", "-e", json.dumps({"dflash_report_dir": str(folder / "runs"), **extra}),
        ],
        clone.path,
        PATH=f"{clone.venv}/bin:{os.environ['PATH']}",
    )


def told(folder: Path) -> dict[str, Any]:
    """gpu1 in the verdict that was just written."""
    verdict = json.loads((folder / "runs" / "latest" / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["changed"] == 0
    return dict(verdict["hosts"]["gpu1"])


@pytest.fixture
def copy(demo: harness.Clone) -> Iterator[Path]:
    """A root with a copy of the served release, over the same layers, and the demo's own good proof beside it."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-verify-", dir="/var/tmp"))
    folder.chmod(0o755)
    release = demo.release()
    (folder / "layers").symlink_to(Path(demo.root) / "layers")
    (folder / "releases").mkdir()
    subprocess.run(["cp", "-a", "--reflink=auto", str(release), str(folder / "releases")], check=True)
    current = (demo.instance() / "current").resolve()
    deployed = folder / "instances" / "main" / "deployments" / current.name
    deployed.mkdir(parents=True)
    for name in SIDE_FILES:
        shutil.copy(current / name, deployed / name)
    (deployed / "proof.json").write_bytes((current / "proof.json").read_bytes())
    (deployed / "release").symlink_to(folder / "releases" / release.name)
    (deployed.parent.parent / "current").symlink_to(f"deployments/{current.name}")
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def package(root: Path) -> Path:
    """The vllm package of the one release below a root."""
    return next(root.glob("releases/*/venv/lib/python3*/site-packages/vllm"))


def test_what_is_served_is_told_and_nothing_is_touched(untouched: harness.Clone, tmp_path: Path) -> None:
    """The current release, its drafter and its launch are found on the host."""
    run = untouched.playbook("verify_dflash.yml", dflash_report_dir=str(tmp_path))
    host = untouched.host(tmp_path)
    assert run.code == 0 and host["state"] == "unchanged" and run.recap()["changed"] == 0
    assert {item["id"].split(".")[0] for item in host["checks"]} == AREAS
    required = {item["id"] for item in host["checks"] if item["level"] == "required"}
    assert {"identity.commit", "complete.record", "capability.layer_offset.v1"} <= required
    assert host["release_id"] == untouched.release().name and host["phase"] == "verify"
    assert "every required check passes" in run.output


def test_any_interpreter_needs_no_inventory_and_no_models(untouched: harness.Clone, tmp_path: Path) -> None:
    """One variable, as for the separate environment of a stranger."""
    run = stranger(untouched, tmp_path, vllm_verify_python=str(untouched.release() / "venv/bin/python"))
    host = told(tmp_path)
    assert run.code == 0 and host["state"] == "unchanged"
    assert {item["id"].split(".")[0] for item in host["checks"]} == AREAS
    assert {item["level"] for item in host["checks"] if item["id"].startswith("capability.")} == {"advisory"}
    for word in ("identity", "completeness", "binaries", "imports", "capabilities"):
        assert f"\n  {word}\n" in run.output


def test_a_drafter_makes_its_capabilities_decide(untouched: harness.Clone, tmp_path: Path) -> None:
    """A mixed drafter cannot be served by the runner that a CPU host has."""
    run = stranger(
        untouched, tmp_path, vllm_verify_python=str(untouched.release() / "venv/bin/python"),
        vllm_verify_drafter=str(untouched.path / "canary/pairs/gpu/drafter_mixed"),
        dflash_serve_speculative_config={"disable_eagle_block_drop": True},
    )
    host = told(tmp_path)
    assert run.code == 2 and host["state"] == "refused" and host["phase"] == "verify"
    assert harness.against(host["checks"]) == ["capability.swa.mixed.v1"]


def test_a_proof_is_no_evidence(demo: harness.Clone, copy: Path, tmp_path: Path) -> None:
    """The proof beside it says that all is well; a byte of a library, a file and a line say otherwise."""
    assert stranger(demo, tmp_path, dflash_root=str(copy)).code == 0
    assert told(tmp_path)["state"] == "unchanged"
    vllm = package(copy)
    library, lost, line = vllm / "_C_AVX2.abi3.so", vllm / "envs.py", vllm / "v1/worker/gpu_model_runner.py"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 0xFF
    text = line.read_text(encoding="utf-8")
    assert text.count("i + 1 for i in") == 1
    for path in (library, lost, line):
        path.chmod(0o644)
        path.parent.chmod(0o755)
    library.write_bytes(data)
    lost.unlink()
    line.write_text(text.replace("i + 1 for i in", "i + 0 for i in"), encoding="utf-8")
    run = stranger(demo, tmp_path, dflash_root=str(copy))
    host = told(tmp_path)
    found = harness.by_id(host["checks"])
    assert run.code == 2 and host["state"] == "refused" and host["phase"] == "verify"
    assert {"complete.record", "capability.layer_offset.v1"} <= set(harness.against(host["checks"]))
    for name in ("_C_AVX2.abi3.so", "envs.py", "gpu_model_runner.py"):
        assert name in json.dumps(found["complete.record"])
    assert found["capability.layer_offset.v1"]["actual"] == [1, 3]
    assert json.loads(next(copy.glob("instances/main/deployments/*/proof.json")).read_text())["ok"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused the interpreter of a folder of its own")
def test_an_interpreter_that_only_root_can_reach_is_told_from_its_files(
    untouched: harness.Clone, tmp_path: Path
) -> None:
    """An environment below a closed folder: probes never run as root, so imports stay unknown and may be accepted."""
    tmp_path.chmod(0o700)
    (tmp_path / "ml-env").symlink_to(untouched.release() / "venv")
    python = str(tmp_path / "ml-env/bin/python")
    assert stranger(untouched, tmp_path, vllm_verify_python=python).code == 2
    host = told(tmp_path)
    assert harness.against(host["checks"]) == ["ext.import:vllm"] and "is closed to it" in json.dumps(host["checks"])
    assert stranger(
        untouched, tmp_path, vllm_verify_python=python, dflash_accept_unknown=["ext.import:vllm"]
    ).code == 0


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"vllm_verify_pyhton": "/x"}, "unknown variable vllm_verify_pyhton: did you mean vllm_verify_python?"),
        ({"vllm_verify_python": "python3"}, "vllm_verify_python must be an absolute path on the host"),
        ({"vllm_verify_python": "/nowhere/python"}, "There is no such interpreter. [/nowhere/python]"),
        ({"dflash_root": "/nowhere"}, "Nothing is deployed as instance main on this host [/nowhere]"),
        ({"vllm_verify_python": "/p", "vllm_verify_tree": "/t"}, "are both set: name one of them"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line(
    demo: harness.Clone, tmp_path: Path, extra: dict[str, Any], sentence: str
) -> None:
    """Said by the recap, in the verdict, and without a traceback."""
    run = stranger(demo, tmp_path, **extra)
    assert run.code == 2 and "Traceback" not in run.output
    assert sentence in told(tmp_path)["reason"] and sentence in " ".join(run.output.split())


def test_a_tree_that_is_not_installed_has_checks(demo: harness.Clone, tmp_path: Path) -> None:
    """The module alone, on a clone of the demo's repository."""
    tree = tmp_path / "vllm"
    subprocess.run(
        ["git", "-c", "safe.directory=*", "clone", "-q", "--depth", "1", "-b", "v0.32.0",
         f"file://{demo.root}-demo/vllm.git", str(tree)],
        check=True,
    )
    tmp_path.chmod(0o755)
    run = demo.tool(
        "ansible", "localhost", "-m", "dflash.fleet.vllm_build_info", "-a", f"tree={tree}",
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )
    answer = json.loads(run.output.split("=>", 1)[1])
    found = harness.by_id(answer["checks"])
    assert answer["changed"] is False and answer["ok"] is True
    assert found["capability.layer_offset.v1"]["actual"] == [2, 17, 32, 47, 62]
    assert found["capability.cache_rule.default"]["status"] == "fail"
    assert found["capability.cache_rule.opt_in"]["status"] == "pass"
    assert {item["id"].split(".")[0] for item in answer["checks"]} >= {"identity", "capability"}
    assert {item["level"] for item in answer["checks"] if item["id"].startswith("capability.")} == {"advisory"}
