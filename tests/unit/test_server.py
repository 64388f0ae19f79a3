# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A server of an instance from start to end: real launcher, real processes, a service manager of a few lines."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    launcher,
    log_watch,
    process,
    readiness,
    server,
    service,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

# Stands for vLLM: an API server that answers, and an engine that forgets its environment and outlives it.
PROGRAM = r"""#!%(python)s -I
import http.server, json, os, signal, subprocess, sys, time
config = dict(line.split(": ", 1) for line in open(sys.argv[3]).read().splitlines() if ": " in line)
if config["mode"] == "dies":
    print("INFO 11-30 18:00:00 [x.py:1] Permission denied, only a remark", flush=True)
    print("(EngineCore pid=%%d) ERROR 11-30 18:00:00 [core.py:1] ValueError: no such thing" %% os.getpid(), flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")
engine = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(120)"], env={})
pairs = {"secret": os.environ.get("VLLM_API_KEY"), "marker": os.environ.get("DFLASH_INSTANCE"),
         "path": os.environ.get("PATH"), "extra": os.environ.get("LEAKED"), "engine": engine.pid, "cwd": os.getcwd()}
print("SEEN " + json.dumps(pairs), flush=True)
line = "(Worker pid=%%d) INFO 11-30 18:00:00 [x.py:1] Using auxiliary layers from speculative config: (2, 4)"
print(line %% os.getpid(), flush=True)
open(os.path.join(os.environ["TMPDIR"], "socket-%%d" %% os.getpid()), "w").close()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.reply({"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply({"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1}})

def end(*_):
    engine.terminate(); engine.wait(); os._exit(0)
signal.signal(signal.SIGTERM, end)
if config["mode"] == "loads":
    print("INFO 11-30 18:00:00 [x.py:1] Loading weights", flush=True)
    time.sleep(120)
http.server.ThreadingHTTPServer(("127.0.0.1", int(config["port"])), Handler).serve_forever()
"""


class Manager(service.Manager):
    """Runs programs as children of the test."""

    kind = "test"

    def __init__(self, root: str, account: accounts.Account) -> None:
        super().__init__(root, account)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.programs: dict[str, service.Program] = {}
        self.removed: list[str] = []

    def ensure_ready(self) -> bool:
        return False

    def status(self, name: str) -> dict[str, Any]:
        child = self.children.get(name)
        if child is None:
            return {"state": service.ABSENT, "pid": None, "detail": ""}
        code = child.poll()
        state = service.RUNNING if code is None else service.STOPPED if code == 0 else service.FAILED
        return {"state": state, "pid": child.pid, "detail": ""}

    def stop(self, name: str, timeout: float | None = None) -> bool:
        child = self.children.get(name)
        if child is None or child.poll() is not None:
            return False
        child.terminate()
        child.wait(timeout)
        return True

    def remove(self, name: str) -> bool:
        self.stop(name)
        self.removed.append(name)
        return self.children.pop(name, None) is not None

    def _launch(self, program: service.Program, path: str) -> None:
        self.programs[program.name] = program
        environment = {"PATH": "/usr/bin:/bin", "LEAKED": "yes", "TZ": "UTC"}
        self.children[program.name] = subprocess.Popen(
            ["/bin/sh", path], env=environment, cwd="/", start_new_session=True, **accounts.drop_to(self.account),
        )


class Place:
    """A root folder with one instance and its staged deployments."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.account = accounts.worker("nobody")
        self.python = accounts.find_python(self.account)
        self.manager = Manager(root, self.account)
        self.port = 0
        sources = {"launcher.py": server.source(launcher), "process.py": server.source(process)}
        self.server = server.Server(
            root, "main", "nobody", sources, stop_timeout=3, manager=self.manager,
        )

    def stage(self, name: str, mode: str = "serves") -> str:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        release = Path(self.root, "releases", "r-" + name)
        (release / "venv" / "bin").mkdir(parents=True)
        shutil.copy(os.path.realpath(self.python), release / "venv" / "bin" / "python")
        program = release / "venv" / "bin" / "vllm"
        program.write_text(PROGRAM % {"python": release / "venv" / "bin" / "python"})
        program.chmod(0o755)
        folder = Path(self.root, "instances", "main", "deployments", name)
        folder.mkdir(parents=True)
        (folder / "release").symlink_to(release)
        (folder / "serve.yaml").write_text("mode: %s\nport: %d\n" % (mode, self.port))
        run = os.path.join(self.root, "instances", "main", "run")
        (folder / "argv.json").write_text(json.dumps({
            "argv": [str(program), "serve", "--config", launcher.DEPLOYMENT + "/serve.yaml"], "cwd": run,
            "env": {"DFLASH_INSTANCE": os.path.join(self.root, "instances", "main"), "TMPDIR": run, "PATH": "/bin",
                    "HOME": os.path.join(self.root, "cache", "r")},
            "env_file": os.path.join(self.root, "etc", "main.env"),
        }))
        return name

    def probe(self, deployment: str, **more: Any) -> readiness.Probe:
        options: dict[str, Any] = {"taps": [2, 4], "ready_timeout": 10, **more}
        return readiness.Probe(self.root, "main", deployment, "http://127.0.0.1:%d" % self.port, "m", **options)

    def seen(self) -> dict[str, Any]:
        text = log_watch.section(self.server.log, self.server.run())
        wait(lambda: "SEEN " in log_watch.section(self.server.log, self.server.run()), text)
        text = log_watch.section(self.server.log, self.server.run())
        return dict(json.loads(text.split("SEEN ", 1)[1].split("\n", 1)[0]))


def wait(condition: Callable[[], Any], what: str = "", seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen: " + what
        time.sleep(0.02)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # A folder that the service account can reach; the tests' own temporary folder is closed to it.
    root = tempfile.mkdtemp(prefix="dflash-test-", dir="/var/tmp")
    os.chmod(root, 0o755)
    monkeypatch.setattr(readiness, "POLL_S", 0.05)
    monkeypatch.setattr(server, "RECORD_S", 10.0)
    here = Place(root)
    yield here
    for child in here.manager.children.values():
        if child.poll() is None:
            child.kill()
        child.wait()
    process.end(here.server.members, 0.5)
    shutil.rmtree(root)


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


def test_another_release_than_the_deployments_is_not_the_process(place: Place) -> None:
    place.stage("d1")
    place.server.start("d1")
    assert place.probe("d1").wait()["ready"]
    link = Path(place.root, "instances", "main", "deployments", "d1", "release")
    other = Path(place.root, "releases", "other")
    other.mkdir()
    link.unlink()
    link.symlink_to(other)
    item = place.probe("d1").process_check()
    assert (item["status"], item["actual"]) == ("fail", "no file of that release is in use")


def test_a_stranger_on_the_port_is_not_the_process(place: Place) -> None:
    import socket

    place.stage("d1", "loads")
    place.server.start("d1")
    with socket.create_server(("127.0.0.1", place.port)):
        item = place.probe("d1").process_check()
    assert item["status"] == "fail"
    assert "port %d is held by process %d" % (place.port, os.getpid()) in item["actual"]
    item = place.probe("d1").process_check()
    assert item["actual"] == "port %d is held by nobody" % place.port


def test_an_early_death_is_told_by_its_first_error(place: Place) -> None:
    place.stage("d1", "dies")
    try:
        place.server.start("d1")
    except DflashError:
        pass  # it may be dead before it was seen alive
    found = place.probe("d1").wait()
    assert (found["ready"], found["dead"]) == (False, True)
    item = place.probe("d1").judge(found)[0]
    assert item["status"] == "fail"
    assert item["evidence"]["first_error"] == "ValueError: no such thing"
    assert "First error: ValueError: no such thing." in item["hint"]


def test_a_server_that_loads_is_not_ready_and_then_late(place: Place) -> None:
    place.stage("d1", "loads")
    place.server.start("d1")
    wait(lambda: place.probe("d1").look()["progress"] == "Loading weights", "progress")
    found = place.probe("d1").look()
    assert (found["ready"], found["dead"], found["late"]) == (False, False, False)
    assert found["reason"] == "Connection refused"
    time.sleep(0.4)
    probe = place.probe("d1", ready_timeout=0.3)
    late = probe.wait()
    assert late["late"]
    item = probe.judge(late)[0]
    assert item["status"] == "fail"
    assert "It was at: Loading weights." in item["hint"]


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
