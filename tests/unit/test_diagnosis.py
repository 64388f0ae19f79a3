# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What there is to look at on a host, what it comes to, and the table that a person reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import vllm_tree

from ansible_collections.dflash.fleet.plugins.module_utils import child, diagnosis, launch, proof
from ansible_collections.dflash.fleet.plugins.module_utils.checks import make
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ID, DEPLOYED, COMMIT, SHA = "0" * 16, "d" * 16, "a" * 40, "0" * 64
BUILD = {
    "schema": 1, "kind": "build", "build_id": ID, "pin": COMMIT, "series": [], "commit": COMMIT, "mode": "source",
    "device": "cpu", "python": "3.11.2", "python_tag": "cp311", "platform": "linux_x86_64", "version": "1",
    "package_version": "1", "requirements_sha256": SHA, "wheel": {"name": "w", "sha256": SHA, "size": 1},
    "extensions": [],
}
RELEASE = {
    "schema": 1, "kind": "release", "release_id": ID, "build_id": ID, "layer_id": ID, "requirements_spec": ID,
    "wheel_sha256": SHA, "commit": COMMIT, "version": "1", "installed_at": "t",
}
SERVE = {
    "dtype": "float32", "model": "/m", "speculative-config": {
        "disable_eagle_block_drop": True, "method": "dflash", "model": "/d", "num_speculative_tokens": 7,
    },
    "zz": {"disable_eagle_block_drop": False},
}


# ---------------------------------------------------------------- what is deployed
@pytest.fixture
def root(tmp_path):
    """A root with one deployment, and a proof beside it that says all is well."""
    release = tmp_path / "releases" / ID
    folder = tmp_path / "instances" / "main" / "deployments" / DEPLOYED
    release.mkdir(parents=True)
    folder.mkdir(parents=True)
    (release / "build.json").write_text(json.dumps(BUILD))
    (release / "manifest.json").write_text(json.dumps(RELEASE))
    (folder / "release").symlink_to(release)
    (folder / "serve.yaml").write_text(launch.to_yaml(SERVE, "serve.yaml"))
    (folder / "models.json").write_text(json.dumps({"drafter": {"folder": "/d"}, "target": {"folder": "/t"}}))
    (folder / "argv.json").write_text(json.dumps({"env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}))
    (folder / "proof.json").write_text('{"ok": true}')
    (tmp_path / "instances" / "main" / "current").symlink_to("deployments/" + DEPLOYED)
    return tmp_path


def test_what_is_deployed_is_told_by_its_links_and_its_launch(root):
    assert diagnosis.deployed(str(root), "main") == {
        "release": str(root / "releases" / ID), "deployment_id": DEPLOYED, "build": BUILD,
        "manifest": RELEASE, "drafter": "/d", "target": "/t", "runner": "v2",
        "speculative_config": SERVE["speculative-config"],
    }


def test_a_proof_is_never_opened(root, monkeypatch):
    opened = []
    real = diagnosis.files.read_json
    monkeypatch.setattr(
        diagnosis.files, "read_json", lambda path: opened.append(os.path.basename(path)) or real(path),
    )
    diagnosis.deployed(str(root), "main")
    assert sorted(opened) == ["argv.json", "build.json", "manifest.json", "models.json"]


def test_a_deployment_without_its_side_files_can_still_be_looked_at(root):
    for name in ("serve.yaml", "models.json", "argv.json"):
        (root / "instances/main/deployments" / DEPLOYED / name).unlink()
    found = diagnosis.deployed(str(root), "main")
    assert (found["drafter"], found["runner"], found["speculative_config"]) == ("", "auto", {})


def test_nothing_deployed_and_a_release_that_is_gone_are_one_line(root):
    with pytest.raises(DflashError, match="Nothing is deployed as instance chat"):
        diagnosis.deployed(str(root), "chat")
    shutil.rmtree(root / "releases" / ID)
    with pytest.raises(DflashError, match="is gone"):
        diagnosis.deployed(str(root), "main")


@pytest.mark.parametrize("text", [None, "[]", "{}", '{"kind": "build"}', "no json"])
@pytest.mark.parametrize("name", ["build", "manifest"])
def test_a_release_that_does_not_say_what_it_has_to_be_is_refused(root, name, text):
    path = root / "releases" / ID / (name + ".json")
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(DflashError, match="has no whole %s.json" % name):
        diagnosis.deployed(str(root), "main")


# ---------------------------------------------------------------- the device
def site(folder: Path, version: str = "0.30.0", library: str = "_C.abi3.so", torch: str = "") -> str:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / library).write_bytes(b"")
    info = folder / ("vllm-%s.dist-info" % version)
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm\nVersion: %s\n" % version)
    if torch:
        (folder / "torch").mkdir()
        (folder / "torch" / "version.py").write_text("cuda: Optional[str] = %s\n" % torch)
    return str(folder)


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        ({"library": "_C_AVX2.abi3.so"}, "cpu"),
        ({"version": "0.30.0+cpu"}, "cpu"),
        ({"version": "0.32.1.dev2+ga1b79e929.cpu"}, "cpu"),
        ({"torch": "None"}, "cpu"),
        ({"torch": "'12.8'"}, "cuda"),
        ({"version": "0.30.0+cpuless", "torch": "'13.0'"}, "cuda"),
        ({}, "cuda"),
    ],
)
def test_the_device_is_told_by_what_is_there(tmp_path, shape, device):
    assert diagnosis.device_of([site(tmp_path / "s", **shape)]) == device


# ---------------------------------------------------------------- an interpreter that nobody else may run
@pytest.fixture
def closed(tmp_path):
    """A virtual environment in a folder that only its owner can enter, as below /root."""
    home = tmp_path / "home"
    python = home / "ml-env" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/python3")
    place = Path(site(home / "ml-env" / "lib" / "python3.11" / "site-packages", library="_C_AVX2.abi3.so"))
    vllm_tree.write(place)
    home.chmod(0o700)
    return python


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")
def test_an_interpreter_below_a_closed_folder_is_told_from_its_files(closed):
    reason = diagnosis.closed_to(str(closed), "nobody")
    assert reason.startswith("the account nobody cannot run %s: " % closed) and reason.endswith(" is closed to it")
    found, said = diagnosis.by_files(str(closed), reason, proof.Wish(device="auto", user="nobody"))
    assert said["version"] == "0.30.0" and said["device"] == "cpu"
    imports = [item for item in found if item["id"] == "ext.import:vllm"]
    assert [(item["status"], item["level"], item["actual"]) for item in imports] == [("unknown", "required", reason)]
    assert {"identity.version", "complete.record"} <= {item["id"] for item in found}


def test_an_interpreter_that_runs_is_not_closed_and_one_that_is_not_there_is_no_matter_here(tmp_path):
    assert diagnosis.closed_to("/usr/bin/python3", "nobody") == ""
    assert diagnosis.closed_to(str(tmp_path / "python"), "nobody") == ""


def test_without_vllm_beside_it_a_closed_interpreter_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "can_run", lambda *_args: False)
    with pytest.raises(DflashError, match="No vLLM can be looked at: why"):
        diagnosis.by_files(str(tmp_path / "bin" / "python"), "why", proof.Wish())


# ---------------------------------------------------------------- what it comes to
GOOD, BAD = make("complete.record", "pass", "a", "a"), make("ext.elf", "fail", "whole files", "cut", hint="Again.")
MAYBE = make("capability.layer_offset.v1", "unknown", [2], None)
ASIDE = make("capability.cache_rule.default", "fail", False, True, level="advisory")


@pytest.mark.parametrize(
    ("found", "accepted", "state", "reason"),
    [
        ([GOOD], [], "unchanged", ""),
        ([GOOD, ASIDE], [], "unchanged", ""),
        ([GOOD, BAD], [], "refused", "a required check failed: ext.elf"),
        ([GOOD, BAD], ["ext.elf"], "refused", "a required check failed: ext.elf"),  # a fail is never accepted
        # the canary that could settle it does not run here, so an unknown stands
        ([GOOD, MAYBE], [], "refused", "a required check has no answer: capability.layer_offset.v1"),
        ([GOOD, MAYBE], ["capability.layer_offset.v1"], "unchanged", ""),
        ([BAD, MAYBE], [], "refused", "a required check failed: ext.elf, capability.layer_offset.v1"),
    ],
)
def test_the_state_of_a_diagnosed_host(found, accepted, state, reason):
    made = diagnosis.outcome({"checks": found, "subject": "/p"}, accepted)
    assert (made["state"], made["reason"], made["phase"], made["changed"]) == (state, reason, "verify", False)
    assert made["checks"] == found and made["subject"] == "/p"


def test_ids_of_what_is_deployed_are_told():
    build = {"build_id": ID, "pin": "a" * 40, "series": []}
    told = {"build": build, "manifest": {"release_id": ID}, "deployment_id": "d"}
    made = diagnosis.outcome({"checks": [GOOD], "deployed": told})
    assert made["pin"]["commit"] == "a" * 40 and made["release"]["release_id"] == ID and made["deployment_id"] == "d"


# ---------------------------------------------------------------- the table
def table(*found: Any, **more: Any) -> list[str]:
    identity = {"distribution": "vllm", "version": "0.30.0", "commit_id": "gabc"}
    return diagnosis.table("gpu1", {"checks": list(found), "subject": "/p", "identity": identity, **more})


def test_the_table_goes_from_what_it_is_to_what_it_does():
    ids = ("capability.swa.mixed.v2", "ext.import:x", "ext.elf", "complete.record", "identity.commit", "ext.ops:x")
    lines = table(*[make(name, "pass", 1, 1) for name in ids], device="cuda")
    assert lines[0] == "gpu1: /p (vllm, 0.30.0, gabc, cuda)"
    assert [line.strip() for line in lines if line.startswith("  ") and line[2] != " "][:5] == list(diagnosis.ORDER)
    assert lines[-1] == "  every required check passes"


def test_what_did_not_pass_has_expected_found_and_remedy():
    lines = table(GOOD, BAD, ASIDE)
    at = next(number for number, line in enumerate(lines) if "FAIL     ext.elf" in line)
    assert [line.split(None, 1) for line in lines[at + 1 : at + 4]] == [
        ["expected", "whole files"], ["found", "cut"], ["remedy", "Again."],
    ]
    assert "  1 stand against it: ext.elf" in lines
    assert "  1 advisory findings: capability.cache_rule.default" in lines
    assert "every required check passes" not in "\n".join(lines)


def test_without_a_drafter_the_table_says_that_no_capability_decides():
    assert "vllm_verify_drafter" in table(GOOD, ASIDE)[-1]
    assert not any("vllm_verify_drafter" in line for line in table(GOOD, MAYBE))


def test_an_accepted_unknown_is_marked():
    lines = table(MAYBE, accepted_unknown=["capability.layer_offset.v1"])
    assert any("capability.layer_offset.v1 (accepted)" in line for line in lines)
    assert lines[-1] == "  every required check passes"


def test_lines_stay_readable():
    long = make("complete.record", "fail", "x " * 900, ["y" * 30] * 90)
    assert max(len(line) for line in table(long, make("ext.elf", "pass", 1, "z" * 500))) <= diagnosis.WIDTH
