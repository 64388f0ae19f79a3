# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the product as a user does: make, ansible-playbook, a look at the verdict.  No stub anywhere in here."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.dflash.fleet.plugins.module_utils import checks, process

REPO = Path(__file__).resolve().parent.parent.parent


@dataclass
class Run:
    """One finished command."""

    code: int
    output: str
    seconds: float

    def recap(self, host: str = "localhost") -> dict[str, int]:
        """Ansible's own counters of a host."""
        line = re.findall(rf"^{host} +: (ok=.*)$", self.output, re.M)[-1]
        return {key: int(value) for key, value in (pair.split("=") for pair in line.split())}


def command(argv: list[str], cwd: Path = REPO, timeout: float = 900, **env: str) -> Run:
    """Run a command; its output is shown when a test fails."""
    begin = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=dict(os.environ, ANSIBLE_CONFIG=str(cwd / "ansible.cfg"), **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    run = Run(done.returncode, done.stdout, time.monotonic() - begin)
    print(f"$ {' '.join(argv)}  # {run.code}, {run.seconds:.1f} s\n{run.output}")
    return run


class Clone:
    """A checkout of the project, its root on this machine, and its verdicts."""

    def __init__(self, path: Path = REPO, venv: str = ".venv", root: str = "") -> None:
        self.path = path
        self.venv = Path(venv) if os.path.isabs(venv) else path / venv
        self.root = root or self.variable("dflash_root")

    def variable(self, name: str) -> str:
        """A variable of localhost, as Ansible evaluates it."""
        run = self.tool(
            "ansible",
            "-i",
            "inventory",
            "localhost",
            "-m",
            "ansible.builtin.debug",
            "-a",
            f"var={name}",
            ANSIBLE_CALLBACK_RESULT_FORMAT="json",
        )
        return str(json.loads(run.output.split("=>", 1)[1])[name])

    def tool(self, name: str, *args: str, timeout: float = 900, **env: str) -> Run:
        """A program of the clone's environment."""
        return command(
            [str(self.venv / "bin" / name), *args],
            self.path,
            timeout,
            PATH=f"{self.venv}/bin:{os.environ['PATH']}",
            **env,
        )

    def playbook(self, name: str = "deploy_dflash.yml", *args: str, timeout: float = 900, **extra: Any) -> Run:
        """``ansible-playbook NAME -i inventory -e {extra}``."""
        more = ["-e", json.dumps(extra)] if extra else []
        return self.tool("ansible-playbook", name, "-i", "inventory", *args, *more, timeout=timeout)

    def demo(self, fault: str = "", timeout: float = 900) -> Run:
        """``make demo [BREAK=fault]``, with the clone's environment."""
        return self.tool("python", "demo/run.py", *(["--break", fault] if fault else []), timeout=timeout)

    def verdict(self, reports: Path | None = None) -> dict[str, Any]:
        """The newest verdict."""
        return dict(
            json.loads(((reports or self.path / "runs") / "latest" / "verdict.json").read_text(encoding="utf-8"))
        )

    def host(self, reports: Path | None = None) -> dict[str, Any]:
        """localhost in the newest verdict."""
        return dict(self.verdict(reports)["hosts"]["localhost"])

    def instance(self, name: str = "main") -> Path:
        """Folder of an instance."""
        return Path(self.root) / "instances" / name

    def server(self, name: str = "main") -> dict[str, Any]:
        """Who serves: run.json of an instance."""
        return dict(json.loads((self.instance(name) / "run.json").read_text(encoding="utf-8")))

    def alive(self, name: str = "main") -> bool:
        """Whether the recorded server lives."""
        run = self.server(name)
        return process.alive(run["pid"], run["start_ticks"], run["boot_id"])

    def release(self, name: str = "main") -> Path:
        """Folder of the release that an instance serves."""
        return (self.instance(name) / "current" / "release").resolve()

    def stop(self, name: str) -> Run:
        """Stop an instance that a test made."""
        return self.tool(
            "ansible",
            "-i",
            "inventory",
            "localhost",
            "-m",
            "dflash.fleet.dflash_service",
            "-a",
            json.dumps({"root": self.root, "instance": name, "user": "nobody", "state": "stopped", "stop_timeout": 10}),
        )

    def builds_started(self) -> int:
        """How many attempts at a build this root has seen."""
        return sum(
            int(json.loads(path.read_text(encoding="utf-8")).get("attempt", 1))
            for path in Path(self.root).glob("builds/*/state.json")
        )


def against(found: list[dict[str, Any]]) -> list[str]:
    """Ids of the required checks that stand against a result, in their order."""
    return [item["id"] for item in checks.blocking(found)]


def by_id(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Checks by id."""
    return {item["id"]: item for item in found}


def free_port() -> int:
    """A TCP port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def snapshot(root: str) -> dict[str, tuple[int, int, int]]:
    """Size, time and inode of everything below a root but logs and caches, to show that nothing was touched."""
    found = {}
    for base, folders, files in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(base, name) not in (f"{root}/cache", f"{root}/log")]
        for name in files:
            info = os.lstat(os.path.join(base, name))
            found[os.path.join(base, name)] = (info.st_size, info.st_mtime_ns, info.st_ino)
    return found


def members(clone: Clone, name: str = "main") -> list[process.Stat]:
    """Living processes of an instance."""
    return process.members(str(clone.instance(name)))


def kill_api_server(clone: Clone) -> None:
    """KILL the API server alone; its engine lives on, as the kernel leaves it."""
    os.kill(clone.server()["pid"], signal.SIGKILL)


@contextmanager
def unsealed(path: Path) -> Iterator[None]:
    """Make a read-only file of a release writable for a moment, times of its folder restored."""
    folder = os.stat(path.parent)
    mode = os.stat(path).st_mode
    os.chmod(path, 0o644)
    yield
    os.chmod(path, mode)
    os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))
