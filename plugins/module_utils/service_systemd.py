# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""systemd as service manager: system units for root, user units for an account with linger."""

from __future__ import annotations

import os
import subprocess
from typing import Any, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import service
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import write_atomic

UP = ("active", "activating", "deactivating", "reloading")


def unit_text(program: service.Program, path: str, account_name: Optional[str]) -> str:
    """A unit file.  Only paths and numbers stand in it: everything else is in the script."""
    lines = [
        "[Unit]", "Description=dflash.fleet %s" % program.name, "After=network-online.target",
        "StartLimitIntervalSec=600", "StartLimitBurst=3",
        "[Service]", "Type=exec", "ExecStart=/bin/sh %s" % quoted(path), "KillMode=control-group",
        "TimeoutStopSec=%d" % program.stop_timeout, "Restart=%s" % ("on-failure" if program.restart else "no"),
        "RestartSec=5",
    ]
    if account_name:
        lines.append("User=%s" % account_name)
    lines += ["[Install]", "WantedBy=%s" % ("multi-user.target" if account_name else "default.target")]
    return "\n".join(lines) + "\n"


def quoted(path: str) -> str:
    """A path as one word of a unit file's command line."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"%s"' % escaped


def parse_show(text: str) -> Dict[str, str]:
    """``systemctl show`` output: one ``Name=value`` a line."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return dict(pairs)


def state_of(shown: Dict[str, str]) -> Dict[str, Any]:
    """The state of a unit in our words."""
    active, load = shown.get("ActiveState", ""), shown.get("LoadState", "")
    pid = int(shown.get("MainPID") or 0) or None
    detail = " ".join(filter(None, (shown.get("ActiveState"), shown.get("SubState"), shown.get("Result"))))
    if active in UP:
        state = service.RUNNING
    elif active == "failed":
        state = service.FAILED
    elif load == "loaded":
        state = service.STOPPED
    else:
        return {"state": service.ABSENT, "pid": None, "detail": ""}
    return {"state": state, "pid": pid if state == service.RUNNING else None, "detail": detail}


class Systemd(service.Manager):
    """Units of this host's systemd; a program without ``autostart`` is a transient unit."""

    kind = "systemd"

    def __init__(self, root: str, account: Any) -> None:
        super().__init__(root, account)
        self.system = os.geteuid() == 0
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        self.folder = "/etc/systemd/system" if self.system else os.path.join(config, "systemd", "user")

    def _ctl(self, *words: str, tool: str = "systemctl", check: bool = True, timeout: float = 60) -> str:
        argv = [tool, *([] if self.system else ["--user"]), *words]
        env = dict(os.environ, LC_ALL="C", SYSTEMD_PAGER="", SYSTEMD_COLORS="0")
        env.setdefault("XDG_RUNTIME_DIR", "/run/user/%d" % os.geteuid())
        try:
            done = subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                                  timeout=timeout, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DflashError("systemd does not answer: %s" % error, " ".join(argv[:3])) from None
        if check and done.returncode:
            lines = done.stderr.strip().splitlines() or ["exit status %d" % done.returncode]
            raise DflashError("systemd refuses: %s" % lines[0], " ".join(argv[:4]), "Read journalctl -xe on this host.")
        return done.stdout

    def _unit(self, name: str) -> str:
        return name + ".service"

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, self._unit(name))

    def ensure_ready(self) -> bool:
        return False

    def _launch(self, program: service.Program, path: str) -> None:
        unit = self._unit(program.name)
        self._ctl("reset-failed", unit, check=False)
        if program.autostart:
            os.makedirs(self.folder, exist_ok=True)
            text = unit_text(program, path, self.account.name if self.system else None)
            old = None
            if os.path.exists(self._path(program.name)):
                with open(self._path(program.name), encoding="utf-8") as handle:
                    old = handle.read()
            if old != text:
                write_atomic(self._path(program.name), text)
                self._ctl("daemon-reload")
            self._ctl("enable", "--quiet", unit)
            self._ctl("start", "--no-block", unit)
            return
        words: List[str] = [
            "--quiet", "--unit=" + unit, "--service-type=exec", "--description=dflash.fleet " + program.name,
            "--property=KillMode=control-group", "--property=TimeoutStopSec=%d" % program.stop_timeout,
        ]
        if self.system:
            words.append("--property=User=" + self.account.name)
        self._ctl(*words, "/bin/sh", path, tool="systemd-run")

    def status(self, name: str) -> Dict[str, Any]:
        shown = self._ctl("show", "--property=LoadState,ActiveState,SubState,Result,MainPID", self._unit(name))
        return state_of(parse_show(shown))

    def stop(self, name: str, timeout: Optional[float] = None) -> bool:
        if self.status(name)["state"] != service.RUNNING:
            return False
        if timeout is None:
            self._ctl("stop", self._unit(name), timeout=3600)
            return True
        try:
            self._ctl("stop", self._unit(name), timeout=timeout)
        except DflashError:
            self._ctl("kill", "--signal=KILL", self._unit(name), check=False)
            self._ctl("stop", self._unit(name), timeout=60)
        return True

    def remove(self, name: str) -> bool:
        known = bool(self.status(name)["state"] != service.ABSENT)
        self.stop(name)
        self._ctl("reset-failed", self._unit(name), check=False)
        if os.path.exists(self._path(name)):
            self._ctl("disable", "--quiet", self._unit(name), check=False)
            os.unlink(self._path(name))
            self._ctl("daemon-reload")
            known = True
        self._forget_script(name)
        return known
