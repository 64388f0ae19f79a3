# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A server of an instance from start to end: real launcher, real processes."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    process,
    server,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from tests.unit.serve_place import Place, place, wait

__all__ = ["place"]


def test_start_ready_proven_stop(place: Place) -> None:
    place.stage("d1")
    first = place.server.start("d1")
    assert (first["changed"], first["state"], first["deployment"]) == (True, "started", "d1")
    found = place.probe("d1").wait()
    assert found["ready"], found
    judged = place.probe("d1").judge(found)
    assert [(c["id"], c["status"]) for c in judged] == [
        ("serving.ready", "pass"), ("serving.process", "pass"), ("serving.aux_layers", "pass"),
    ]
    seen = place.seen()
    assert seen["marker"] == os.path.join(place.root, "instances", "main")
    assert seen["cwd"] == os.path.join(place.root, "instances", "main", "run")
    assert seen["extra"] is None, "the service manager's environment does not leak into the server"
    again = place.server.start("d1")
    assert (again["changed"], again["pid"]) == (False, first["pid"])
    stopped = place.server.stop()
    assert (stopped["changed"], stopped["state"], stopped["pid"]) == (True, "stopped", None)
    assert place.server.members() == []
    assert seen["engine"] not in process.table()
    assert os.listdir(seen["cwd"]) == []
    assert place.manager.children == {}, "a stopped server must not come up with the host"
    assert place.server.stop()["changed"] is False


def test_the_run_folder_belongs_to_the_service_account_and_nothing_else_does(place: Place) -> None:
    place.stage("d1")
    place.server.start("d1")
    instance = Path(place.root, "instances", "main")
    uid = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
    assert {p.name for p in instance.iterdir() if p.lstat().st_uid == uid} >= {"run", "run.json"}
    assert instance.stat().st_uid == os.geteuid()
    assert (instance / "launcher.py").stat().st_uid == os.geteuid()
    assert (instance / "run").stat().st_mode & 0o777 == 0o700
    run = json.loads((instance / "run.json").read_text())
    assert set(run) >= {"pid", "start_ticks", "boot_id", "deployment_id", "started_at"}
    assert process.alive(run["pid"], run["start_ticks"], run["boot_id"])


def test_an_engine_that_outlived_its_server_is_dead_before_the_next_start(place: Place) -> None:
    place.stage("d1")
    first = place.server.start("d1")
    engine = place.seen()["engine"]
    os.kill(first["pid"], signal.SIGKILL)
    wait(lambda: not place.server.serves())
    assert [item.pid for item in place.server.members()] == [engine]
    assert place.probe("d1").look()["dead"]
    second = place.server.start("d1")
    assert second["changed"]
    assert engine not in process.table()
    assert engine not in [item.pid for item in place.server.members()]
    assert place.seen()["engine"] != engine


def test_the_managers_own_restart_goes_the_same_way(place: Place) -> None:
    place.stage("d1")
    place.server.start("d1")
    engine = place.seen()["engine"]
    child = place.manager.children["dflash-main"]
    child.kill()
    child.wait()
    place.manager._launch(place.manager.programs["dflash-main"], place.manager.script_path("dflash-main"))
    wait(lambda: place.server.serves() == "d1")
    assert place.seen()["engine"] != engine
    assert engine not in process.table()


def test_another_deployment_replaces_the_one_that_runs(place: Place) -> None:
    place.stage("d1")
    place.server.start("d1")
    place.stage("d2")
    assert place.server.start("d2")["deployment"] == "d2"
    assert place.server.serves() == "d2"
    found = place.probe("d1").look()
    assert (found["dead"], found["reason"]) == (True, "the deployment that runs is d2")
    assert place.probe("d2").wait()["ready"]


def test_a_program_that_is_missing_is_told_at_once(place: Place) -> None:
    place.stage("d1")
    os.unlink(os.path.join(place.root, "releases", "r-d1", "venv", "bin", "vllm"))
    with pytest.raises(DflashError, match="program cannot be run"):
        place.server.start("d1")
    with pytest.raises(DflashError, match="d9 is not staged"):
        place.server.start("d9")


def test_a_launcher_that_cannot_start_the_server_says_why(place: Place) -> None:
    place.stage("d1")
    secrets = Path(place.root, "etc", "main.env")
    secrets.parent.mkdir(exist_ok=True)
    secrets.write_text("VLLM_API_KEY=s3cret\n")
    secrets.chmod(0o644)
    with pytest.raises(DflashError) as caught:
        place.server.start("d1")
    assert "others can read it; its mode must be 0600" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    secrets.chmod(0o600)
    os.chown(secrets, place.account.uid, place.account.gid)
    place.server.start("d1")
    assert place.seen()["secret"] == "s3cret"
    argv = Path("/proc/%d/cmdline" % place.server.run()["pid"]).read_text()
    assert "s3cret" not in argv
    place.server.stop()
    assert not secrets.exists()


def test_an_api_key_reaches_the_server_by_file_and_a_new_key_restarts_it(place: Place) -> None:
    place.stage("d1")
    key = Path(place.root, "key")
    path = Path(place.root, "instances", "main", "deployments", "d1", "argv.json")
    path.write_text(json.dumps(dict(json.loads(path.read_text()), api_key_file=str(key))))
    with pytest.raises(DflashError, match="API key cannot be read"):
        place.server.start("d1")
    key.write_text("first\n")
    place.server.start("d1")
    assert place.seen()["secret"] == "first"
    secrets = Path(place.root, "etc", "main.env")
    assert (secrets.stat().st_mode & 0o777, secrets.stat().st_uid) == (0o600, place.account.uid)
    assert place.server.start("d1")["changed"] is False
    key.write_text("second\n")
    assert place.server.start("d1")["changed"] is True
    assert place.seen()["secret"] == "second"


def test_a_stale_launcher_is_replaced(place: Place) -> None:
    place.stage("d1")
    Path(place.root, "instances", "main", "launcher.py").write_text("raise SystemExit(9)\n")
    place.server.start("d1")
    assert place.server.serves() == "d1"


def test_a_run_record_cannot_point_root_at_another_accounts_process(place: Place) -> None:
    """run.json belongs to the service account: a forged one must not make root end what is not its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place.stage("d1")
    place.server.start("d1")
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as victim:
        Path(place.root, "instances", "main", "run.json").write_text(
            json.dumps(dict(process.identity(victim.pid) or {}, deployment_id="d1"))
        )
        assert victim.pid not in [item.pid for item in place.server.members()]
        place.server.stop()
        assert victim.poll() is None
        victim.kill()


def test_a_stop_waits_until_memory_no_longer_falls() -> None:
    readings = [80000, 40000, 900, 890, 1, 1]
    server.settle(lambda: readings.pop(0), step=0)
    assert readings == [1, 1]
    server.settle(lambda: None)
    falling = list(range(10**6, 0, -1000))
    begun = time.monotonic()
    server.settle(lambda: falling.pop(0), timeout=0.05, step=0.01)
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 1000; echo 24", 1024), ("echo '[N/A]'", None), ("echo 5; exit 9", None), ("", 0)],
)
def test_memory_of_all_gpus(
    script: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.launch, "SYSTEM_PATH", str(tmp_path))
    assert server.gpu_memory() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n%s\n" % script)
    tool.chmod(0o755)
    assert server.gpu_memory() == expected


def test_a_large_log_is_put_aside(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOG_MAX", 100)
    place.stage("d1")
    log = Path(place.server.log)
    log.parent.mkdir(exist_ok=True)
    log.write_text("x" * 101)
    place.server.start("d1")
    assert Path(place.server.log + ".1").read_text() == "x" * 101
    assert "x" * 101 not in log.read_text()


def test_check_mode_predicts(place: Place) -> None:
    place.stage("d1")
    assert server.act(place.server, "started", "d1", True, check_mode=True)["changed"] is True
    assert place.server.serves() == ""
    assert server.act(place.server, "stopped", "", True, check_mode=True)["changed"] is False
    place.server.start("d1")
    assert server.act(place.server, "started", "d1", True, check_mode=True)["changed"] is False
    assert server.act(place.server, "restarted", "d1", True, check_mode=True)["changed"] is True
    assert server.act(place.server, "stopped", "", True, check_mode=True)["changed"] is True
    assert place.server.serves() == "d1"


def test_restart_is_another_process(place: Place) -> None:
    place.stage("d1")
    first = place.server.start("d1")
    second = server.act(place.server, "restarted", "d1", False, check_mode=False)
    assert second["changed"] is True
    assert second["pid"] != first["pid"]
    program = place.manager.programs["dflash-main"]
    assert (program.autostart, program.restart, program.stop_timeout) == (False, False, 3)
