# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A root folder with an instance, a service manager of a few lines, and a program that stands for vLLM."""

from __future__ import annotations

import json
import os
import shutil
import socket
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


