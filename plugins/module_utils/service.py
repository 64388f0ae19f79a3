# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Service managers: one way to start, stop and ask for a program, whatever runs programs on a host.

Every manager starts the same small shell script, which sets the environment, changes folder, sends
output to the log and becomes the program.  So no argument, JSON text or percent sign ever passes
through the quoting rules of a unit file.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.accounts import Account, make_folder, worker
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import write_atomic

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
RUNNING, STOPPED, FAILED, ABSENT = "running", "stopped", "failed", "absent"


@dataclass(frozen=True)
class Program:
    """What to run.

    ``user``: account, when the caller is root; ``log``: file that the program itself opens, so its
    folder belongs to that account; ``autostart``: also after a reboot or when the manager comes up
    (without it the program is a job: it runs once); ``restart``: the manager may start it again
    after a crash, for programs that clean up behind a predecessor themselves.
    """

    name: str
    argv: List[str]
    user: Optional[str] = None
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    log: str = "/dev/null"
    stop_timeout: int = 30
    autostart: bool = False
    restart: bool = False


def script(program: Program) -> str:
    """The shell script that becomes the program.  Raises DflashError for what a shell cannot carry."""
    lines = ["#!/bin/sh", "# Written by dflash.fleet; overwritten at every start.", "umask 022"]
    for name in sorted(program.env):
        if not VARIABLE.match(name):
            raise DflashError("%r cannot be the name of an environment variable" % name, program.name)
        lines.append("export %s=%s" % (name, shlex.quote(str(program.env[name]))))
    if any("\0" in str(word) for word in [*program.argv, *program.env.values()]):
        raise DflashError("An argument holds a null byte", program.name)
    lines.append("cd %s || exit 72" % shlex.quote(program.cwd))
    lines.append("exec </dev/null >>%s 2>&1" % shlex.quote(program.log))
    lines.append("exec %s" % " ".join(shlex.quote(str(word)) for word in program.argv))
    return "\n".join(lines) + "\n"


class Manager:
    """The interface; ``kind`` says which one it is."""

    kind = "none"

    def __init__(self, root: str, account: Account) -> None:
        self.root = root
        self.account = account

    # ---- what a manager must answer
    def ensure_ready(self) -> bool:
        """Make the manager able to take programs; says whether anything had to be changed."""
        raise NotImplementedError

    def status(self, name: str) -> Dict[str, Any]:
        """``{"state": running|stopped|failed|absent, "pid": int or None, "detail": text}``."""
        raise NotImplementedError

    def stop(self, name: str, timeout: Optional[float] = None) -> bool:
        """Stop the program and everything in its process group; says whether it ran.

        After ``timeout`` seconds (default: the program's own ``stop_timeout``) the group is killed.
        """
        raise NotImplementedError

    def remove(self, name: str) -> bool:
        """Stop the program and forget it; says whether it was known."""
        raise NotImplementedError

    def _launch(self, program: Program, path: str) -> None:
        raise NotImplementedError

    # ---- common to all
    def start(self, program: Program) -> bool:
        """Start the program unless it runs; says whether it was started.  Detached from the caller."""
        if not NAME.match(program.name):
            raise DflashError("%r cannot be the name of a service" % program.name)
        self.ensure_ready()
        if self.status(program.name)["state"] == RUNNING:
            return False
        self._launch(program, self._write_script(program))
        return True

    def script_path(self, name: str) -> str:
        return os.path.join(self.root, "etc", "services", name + ".sh")

    def _write_script(self, program: Program) -> str:
        path = self.script_path(program.name)
        make_folder(os.path.dirname(path))
        owner = (0, self.account.gid) if os.geteuid() == 0 else None
        write_atomic(path, script(program), 0o750, owner)
        return path

    def _forget_script(self, name: str) -> None:
        if os.path.exists(self.script_path(name)):
            os.unlink(self.script_path(name))


def detect(account_is_root: bool, uid: int) -> str:
    """``systemd`` where it runs and this caller may use it, else ``supervisor``."""
    if not os.path.isdir("/run/systemd/system"):
        return "supervisor"
    if account_is_root:
        return "systemd"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or "/run/user/%d" % uid
    lingers = os.path.isdir(runtime) and os.path.exists(os.path.join(runtime, "systemd", "private"))
    return "systemd" if lingers else "supervisor"


def manager(root: str, user: Optional[str] = None, kind: str = "auto") -> Manager:
    """The service manager of this host: ``auto``, ``systemd`` or ``supervisor``.

    Called by root, programs run as ``user`` (who must not be root); else as the caller.
    """
    from ansible_collections.dflash.fleet.plugins.module_utils.service_supervisor import Supervisor
    from ansible_collections.dflash.fleet.plugins.module_utils.service_systemd import Systemd

    account = worker(user)
    if kind == "auto":
        kind = detect(os.geteuid() == 0, os.geteuid())
    if kind == "systemd":
        return Systemd(root, account)
    if kind == "supervisor":
        return Supervisor(root, account)
    raise DflashError(
        "There is no service manager %r" % kind, "dflash_service_manager", "Use auto, systemd or supervisor."
    )
