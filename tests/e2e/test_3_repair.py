# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What changed on the host by hand is found and mended, and nothing else is done again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import harness

from ansible_collections.dflash.fleet.plugins.module_utils import process


def test_one_changed_byte_of_the_release_is_repaired(proven: harness.Clone) -> None:
    """Size and times as they were, one byte another: found by its hash, installed anew under the same id."""
    release, builds = proven.release(), proven.builds_started()
    package = next(release.glob("venv/lib/python*/site-packages/vllm"))
    victim = package / "entrypoints" / "utils.py"
    victim = victim if victim.exists() else next(package.glob("entrypoints/*.py"))
    times = os.stat(victim)
    text = victim.read_bytes()
    with harness.unsealed(victim):
        place = text.index(b"#")
        victim.write_bytes(text[: place + 2] + bytes([text[place + 2] ^ 1]) + text[place + 3 :])
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    # The installation needs a folder for its job on the host; without one Ansible loses the host in the middle.
    lost = proven.playbook("deploy_dflash.yml", ansible_remote_tmp="/dev/null/none")
    assert lost.code != 0 and proven.host()["state"] == "lost" and proven.alive()
    run = proven.playbook()
    assert run.code == 0
    host = proven.host()
    assert host["state"] == "proven"
    assert any("is damaged" in text and victim.name in text for text in host["causes"]), host["causes"]
    assert victim.read_bytes() == text and proven.release() == release
    assert proven.builds_started() == builds, "the wheel was there: nothing had to be built"


def test_one_changed_byte_of_the_configuration_is_repaired(proven: harness.Clone) -> None:
    """serve.yaml edited by hand is written anew, and the server that may have read it is started again."""
    path = proven.instance() / "current" / "serve.yaml"
    text, pid = path.read_text(encoding="utf-8"), proven.server()["pid"]
    path.write_text(text + "# edited\n", encoding="utf-8")
    assert proven.playbook().code == 0
    host = proven.host()
    assert host["state"] == "proven" and host["causes"] == ["serve.yaml was changed on the host"]
    assert path.read_text(encoding="utf-8") == text and proven.server()["pid"] != pid


def test_a_killed_service_is_started_again(proven: harness.Clone) -> None:
    """TERM to the whole group: the next run starts it, judges it, and does nothing else."""
    proof = (proven.instance() / "current" / "proof.json").read_text(encoding="utf-8")
    os.killpg(proven.server()["pid"], signal.SIGTERM)
    _wait_for(lambda: not proven.alive())
    run = proven.playbook()
    assert run.code == 0
    host = proven.host()
    assert host["state"] == "proven" and host["causes"] == ["the server is not running"]
    for untouched in ("vllm_release : Install", "vllm_verify : Assert", "vllm_build : Start"):
        assert untouched not in run.output
    # The build was not proven again, and its checks are still in the proof.
    assert "capability.layer_offset.v1" in proof
    assert "capability.layer_offset.v1" in harness.by_id(host["checks"])


def test_an_engine_without_its_server_is_ended_first(proven: harness.Clone) -> None:
    """KILL of the API server alone leaves engine and worker alive; they are gone before the next server starts."""
    before = {item.pid for item in harness.members(proven)}
    harness.kill_api_server(proven)
    _wait_for(lambda: not proven.alive())
    assert {item.pid for item in harness.members(proven)} & before, "nothing outlived the server, so nothing is shown"
    assert proven.playbook().code == 0
    assert proven.host()["state"] == "proven"
    assert not {item.pid for item in harness.members(proven)} & before
    assert not before & set(process.table())


def test_a_changed_floor_judges_again_without_a_restart(proven: harness.Clone) -> None:
    """Only the gate runs; the process stays."""
    pid = proven.server()["pid"]
    assert proven.playbook(dflash_accept_floor=3.5).code == 0
    host = proven.host()
    assert host["state"] == "proven" and host["causes"] == ["floors or prompts of the gate changed"]
    assert proven.server()["pid"] == pid


def test_a_floor_that_is_too_high_takes_nothing_down(proven: harness.Clone) -> None:
    """What serves keeps its process and its proof; the next plain run has nothing to do."""
    pid, proof = proven.server()["pid"], (proven.instance() / "current" / "proof.json").read_text(encoding="utf-8")
    assert proven.playbook(dflash_accept_canary_floor=8).code != 0
    host = proven.host()
    assert host["state"] == "refused" and harness.against(host["checks"]) == ["serving.canary_al"]
    assert proven.server()["pid"] == pid and proven.alive()
    assert (proven.instance() / "current" / "proof.json").read_text(encoding="utf-8") == proof
    assert proven.playbook().code == 0
    assert proven.host()["state"] == "unchanged"


def test_a_second_run_keeps_off_a_rollout(proven: harness.Clone) -> None:
    """Two runs with different inputs: one rolls over, the other is refused and touches nothing."""
    def deploy(length: int) -> harness.Run:
        return proven.playbook(dflash_serve_engine_args={"dtype": "float32", "max-model-len": length},
                               dflash_report_dir=f".demo/runs-{length}")

    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip((1001, 1002), pool.map(deploy, (1001, 1002)), strict=True))
    states = {length: proven.host(proven.path / f".demo/runs-{length}") for length in runs}
    assert sorted(host["state"] for host in states.values()) == ["proven", "refused"]
    refused = next(host for host in states.values() if host["state"] == "refused")
    assert "another run is rolling this instance over" in refused["reason"]
    served = next(host for host in states.values() if host["state"] == "proven")
    assert proven.server()["deployment_id"] == served["deployment_id"] and proven.alive()
    # Back to what the clone's inventory says.
    assert proven.playbook().code == 0
    assert proven.host()["state"] == "proven"


def _wait_for(true: Callable[[], bool], timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
