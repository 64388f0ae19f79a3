# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The main job on real parts: proven, then unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request

import harness

from ansible_collections.dflash.fleet.plugins.module_utils import schema


def test_the_demo_is_proven(demo: harness.Clone) -> None:
    """The verdict holds what a sceptic asks for: ids, commit, acceptance from counters, every required check passed."""
    host = demo.host()
    assert host["state"] in ("proven", "unchanged")
    assert host["acceptance_length"] > 7
    assert len(host["per_position"]) == 7
    assert harness.against(host["checks"]) == []
    found = harness.by_id(host["checks"])
    required = [name for name, item in found.items() if item["level"] == "required"]
    for wanted in (
        "identity.commit",
        "complete.record",
        "complete.distribution",
        "ext.import:vllm._C",
        "capability.layer_offset.v1",
        "capability.cache_rule.opt_in",
        "pair.hidden_size",
        "serving.process",
        "serving.canary_al",
        "serving.text",
        "serving.al",
    ):
        assert wanted in required and found[wanted]["status"] == "pass", wanted
    assert found["serving.aux_layers"]["status"] == "pass" and found["serving.aux_layers"]["level"] == "advisory"
    assert found["complete.requirements"]["level"] == "advisory"
    # The excluded packages are told, not hidden.
    assert "torchvision" in json.dumps(found["complete.requirements"])
    schema.require(demo.verdict(), "verdict", "verdict.json")
    schema.require(
        json.loads((demo.instance() / "current" / "proof.json").read_text(encoding="utf-8")), "proof", "proof"
    )


def test_the_commit_is_pin_and_series(demo: harness.Clone) -> None:
    """The installed package records the build commit, which is the pin with two patches on top."""
    host = demo.host()
    lock = json.loads((demo.path / "dflash.lock.json").read_text(encoding="utf-8"))
    schema.require(lock, "lock", "lock")
    assert [pin["commit"] for pin in lock["pins"] if pin["ref"] == "v0.32.0"] == [host["pin"]]
    assert len(host["series"]) == 2 and host["commit"] != host["pin"]
    version = next((demo.release() / "venv").glob("lib/python*/site-packages/vllm/_version.py")).read_text(
        encoding="utf-8"
    )
    recorded = re.findall(r"commit_id[^\n]*'g([0-9a-f]+)'", version)
    assert recorded and host["commit"].startswith(recorded[0])


def host_commit(demo: harness.Clone) -> str:
    """The build commit of the newest verdict."""
    return str(demo.host()["commit"])


def test_the_server_is_what_was_proven(demo: harness.Clone) -> None:
    """It answers by HTTP, runs from the release, as an account that is not root, and names its deployment."""
    argv = json.loads((demo.instance() / "current" / "argv.json").read_text(encoding="utf-8"))
    with urllib.request.urlopen(argv["base_url"] + "/version", timeout=10) as answer:
        version = json.load(answer)["version"]
    release = json.loads((demo.release() / "manifest.json").read_text(encoding="utf-8"))
    # The metadata has a suffix (.cpu) that the package's own version was written without.
    assert release["version"].startswith(version) and host_commit(demo)[:8] in version
    run = demo.server()
    assert run["deployment_id"] == demo.host()["deployment_id"]
    assert all(item.uid != 0 for item in harness.members(demo)), "a process of the server runs as root"


def test_what_is_installed_is_read_only_and_copied(demo: harness.Clone) -> None:
    """Nobody writes into a release; no file of it is shared with a cache or another release by hard link."""
    for folder in (demo.release() / "venv", *(harness.Path(demo.root) / "layers").glob("*/venv")):
        for base, _folders, files in os.walk(folder):
            for name in files:
                info = os.lstat(os.path.join(base, name))
                assert info.st_nlink == 1, os.path.join(base, name)
                assert os.path.islink(os.path.join(base, name)) or not info.st_mode & 0o222, os.path.join(base, name)


def test_a_second_run_changes_nothing(demo: harness.Clone) -> None:
    """Unchanged, changed=0, under ten seconds, and not one file below the root is touched."""
    before, pid = harness.snapshot(demo.root), demo.server()["pid"]
    run = demo.demo()
    assert run.code == 0
    host = demo.host()
    assert host["state"] == "unchanged" and demo.verdict()["changed"] == 0
    assert run.recap()["changed"] == 0
    assert run.seconds < 10, run.seconds
    assert harness.snapshot(demo.root) == before and demo.server()["pid"] == pid


def test_check_mode_tells_and_writes_nothing(demo: harness.Clone) -> None:
    """A changed K would change the host; the prediction touches nothing and leaves the lock alone."""
    before = harness.snapshot(demo.root)
    run = demo.playbook("deploy_dflash.yml", "--check", dflash_serve_num_speculative_tokens=5)
    assert run.code == 0
    host = demo.host()
    assert host["state"] == "would_change" and host["causes"] == ["changed: launch configuration"]
    assert harness.snapshot(demo.root) == before
    assert demo.playbook("deploy_dflash.yml", "--check").code == 0
    assert demo.host()["state"] == "unchanged"


def test_another_series_adds_its_own_size_alone(demo: harness.Clone) -> None:
    """Every release stands on the one layer that these requirements make."""
    layers = list((harness.Path(demo.root) / "layers").glob("*/manifest.json"))
    assert len(layers) == 1
    use = subprocess.run(
        ["du", "-sm", str(layers[0].parent), str(demo.release())], capture_output=True, text=True, check=True
    )
    layer, release = (int(line.split()[0]) for line in use.stdout.splitlines())
    assert release < layer / 3, (layer, release)


def test_molecule_finds_it_idempotent(demo: harness.Clone, tmp_path: harness.Path) -> None:
    """The scenario converges on the same host, changes nothing the second time, and reads the verdict."""
    run = demo.tool("molecule", "test", ANSIBLE_HOME=str(tmp_path), NO_COLOR="1")
    assert run.code == 0
    assert "verify: Completed successfully" in run.output or "Executed: Successful" in run.output
    assert demo.host()["state"] == "unchanged"
