# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Supervisor as service manager: for containers and rented boxes where no systemd runs."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import shlex
import shutil
import socket
import subprocess
import time
import xmlrpc.client
from typing import Any, Dict, Iterator, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import service
from ansible_collections.dflash.fleet.plugins.module_utils.accounts import find_python, make_folder
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import write_atomic

#: The library, exactly: its wheel runs as root where root calls, so the hash is part of the pin.
#: Source: the package index's own record of the release's wheel.
VERSION = "4.3.0"
SHA256 = "0bcb763fddafba410f35cbde226aa7f8514b9fb82eb05a0c85f6588d1c13f8db"
#: A unix socket's path may have 107 bytes, and supervisor adds its process id to it while binding.
SOCKET_PATH_MAX = 96
NO_FILE, BAD_NAME, NOT_RUNNING, ALREADY_STARTED, ALREADY_ADDED = 20, 10, 70, 60, 90
GONE = (BAD_NAME, NOT_RUNNING)
UP = ("STARTING", "RUNNING", "STOPPING", "BACKOFF")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__()
        self._path, self._timeout = path, timeout

    def make_connection(self, host: Any) -> _Connection:
        return _Connection(self._path, self._timeout)


class Supervisor(service.Manager):
    """One supervisord per root, of the account that deploys; it drops to each program's own account."""

    kind = "supervisor"

    def __init__(self, root: str, account: Any) -> None:
        super().__init__(root, account)
        self.socket = os.path.join(root, "run", "supervisor.sock")
        self.config = os.path.join(root, "etc", "supervisord.conf")
        self.folder = os.path.join(root, "etc", "supervisor.d")
        self.venv = os.path.join(root, "tools", "supervisor-" + VERSION)
        if len(os.fsencode(self.socket)) > SOCKET_PATH_MAX:
            raise DflashError(
                "The root folder's path is too long for the service manager's socket (%d of %d bytes)"
                % (len(os.fsencode(self.socket)), SOCKET_PATH_MAX), self.socket, "Choose a shorter dflash_root.",
            )

    # ------------------------------------------------------------------ the daemon
    def _rpc(self, timeout: float = 10.0) -> Any:
        transport = _Transport(self.socket, timeout)
        return xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=transport, allow_none=True).supervisor

    def alive(self) -> bool:
        try:
            return bool(self._rpc(5.0).getState()["statename"] == "RUNNING")
        except (OSError, xmlrpc.client.Error, http.client.HTTPException):
            return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_folder(os.path.join(self.root, "run"))
        with open(os.path.join(self.root, "run", "supervisor.lock"), "w", encoding="ascii") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def ensure_ready(self) -> bool:
        if self.alive():
            return False
        with self._locked():
            if self.alive():
                return False
            self._install()
            self._write_config()
            self._start_daemon()
        return True

    def _install(self) -> None:
        if os.path.exists(os.path.join(self.venv, "bin", "supervisord")):
            return
        make_folder(os.path.dirname(self.venv))
        temporary = self.venv + ".new"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.venv, ignore_errors=True)
        python = find_python(self.account)
        requirements = temporary + ".txt"
        write_atomic(requirements, "supervisor==%s --hash=sha256:%s\n" % (VERSION, SHA256))
        pip = [os.path.join(temporary, "bin", "python"), "-I", "-m", "pip", "--disable-pip-version-check", "install",
               "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", requirements]
        for argv in ([python, "-I", "-m", "venv", temporary], pip):
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", check=False)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                raise DflashError(
                    "The service manager could not be installed: %s" % lines[-1], " ".join(argv[:4]),
                    "Check the network and pip's configuration (pip config list); python3-venv must be installed.",
                )
        os.unlink(requirements)
        # Moved as a folder; its scripts are never used by name, only `python -m supervisor.supervisord`.
        os.rename(temporary, self.venv)

    def _write_config(self) -> None:
        for name in ("etc", "log"):
            if not os.path.isdir(os.path.join(self.root, name)):
                make_folder(os.path.join(self.root, name))
        make_folder(self.folder)
        text = [
            "[unix_http_server]", "file=" + self.socket, "chmod=0700",
            "[supervisord]", "logfile=%s/run/supervisord.log" % self.root, "logfile_maxbytes=1MB", "logfile_backups=1",
            "pidfile=%s/run/supervisord.pid" % self.root, "childlogdir=%s/run" % self.root, "nodaemon=false",
            "directory=/", "umask=022",
        ]
        if os.geteuid() == 0:
            text.append("user=root")
        text += [
            "[rpcinterface:supervisor]",
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
            "[include]", "files = %s/*.conf" % self.folder,
        ]
        write_atomic(self.config, "\n".join(text).replace("%", "%%") + "\n")
        lines = ["#!/bin/sh", "# For a container's entry point: brings back what is to run after a restart.",
                 "exec %s" % " ".join(shlex.quote(word) for word in self._daemon())]
        write_atomic(os.path.join(self.root, "etc", "start-services"), "\n".join(lines) + "\n", 0o755)

    def _daemon(self) -> List[str]:
        return [os.path.join(self.venv, "bin", "python"), "-I", "-m", "supervisor.supervisord", "-c", self.config]

    def _start_daemon(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        argv = self._daemon()
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run(
            argv, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True, timeout=60, check=False,
        )
        deadline = time.monotonic() + 20
        while not self.alive():
            if done.returncode or time.monotonic() > deadline:
                lines = (done.stderr or "").strip().splitlines() or ["no reason given"]
                raise DflashError(
                    "The service manager did not start: %s" % lines[-1], self.config,
                    "Read %s/run/supervisord.log." % self.root,
                )
            time.sleep(0.1)

    # ------------------------------------------------------------------ programs
    def _program_config(self, program: service.Program, path: str) -> str:
        lines = [
            "[program:%s]" % program.name, "command=/bin/sh %s" % path, "directory=/",
            "autostart=%s" % ("true" if program.autostart else "false"), "autorestart=false", "startsecs=0",
            "startretries=0", "exitcodes=0", "stopsignal=TERM", "stopwaitsecs=%d" % program.stop_timeout,
            "stopasgroup=true", "killasgroup=true", "redirect_stderr=true",
            "stdout_logfile=%s/run/%s.out" % (self.root, program.name), "stdout_logfile_maxbytes=64KB",
            "stdout_logfile_backups=0",
        ]
        if os.geteuid() == 0:
            lines.append("user=" + self.account.name)
        return "\n".join(lines).replace("%", "%%") + "\n"

    def _config_path(self, name: str) -> str:
        return os.path.join(self.folder, name + ".conf")

    def _launch(self, program: service.Program, path: str) -> None:
        make_folder(self.folder)
        with self._locked():
            write_atomic(self._config_path(program.name), self._program_config(program, path))
            self._reload()
            try:
                self._rpc(30.0).startProcess(program.name, False)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode != ALREADY_STARTED:
                    raise DflashError(
                        "The service manager cannot start %s: %s" % (program.name, fault.faultString), path,
                        "Read %s/run/supervisord.log." % self.root,
                    ) from None

    def _reload(self) -> None:
        """Take over changed program files, without touching programs whose file did not change."""
        rpc = self._rpc(30.0)
        added, changed, removed = rpc.reloadConfig()[0]
        for name in [*changed, *removed]:
            with contextlib.suppress(xmlrpc.client.Fault):
                rpc.stopProcessGroup(name)
            with contextlib.suppress(xmlrpc.client.Fault):
                rpc.removeProcessGroup(name)
        for name in [*changed, *added]:
            try:
                rpc.addProcessGroup(name)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode != ALREADY_ADDED:
                    what = "The service manager refuses %s: %s" % (name, fault.faultString)
                    raise DflashError(what, self.folder) from None

    def _info(self, name: str) -> Optional[Dict[str, Any]]:
        try:
            return dict(self._rpc().getProcessInfo(name))
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in GONE:
                return None
            what = "The service manager cannot answer for %s: %s" % (name, fault.faultString)
            raise DflashError(what, self.socket) from None
        except (OSError, http.client.HTTPException):
            return None

    def status(self, name: str) -> Dict[str, Any]:
        info = self._info(name)
        if info is None:
            return {"state": service.ABSENT, "pid": None, "detail": ""}
        return {"state": state_of(info), "pid": int(info["pid"]) or None, "detail": str(info["description"])}

    def stop(self, name: str, timeout: Optional[float] = None) -> bool:
        info = self._info(name)
        if info is None or state_of(info) != service.RUNNING:
            return False
        rpc = self._rpc(30.0)
        with contextlib.suppress(xmlrpc.client.Fault):
            rpc.stopProcess(name, False)
        deadline = time.monotonic() + (timeout if timeout is not None else self._stop_wait(name) + 10)
        killed = False
        while True:
            info = self._info(name)
            if info is None or state_of(info) != service.RUNNING:
                return True
            if time.monotonic() > deadline:
                if killed:
                    raise DflashError(
                        "%s does not die (process %s)" % (name, info["pid"]), self.socket,
                        "A process that ignores SIGKILL waits for a device: restart the host.",
                    )
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(info["pid"]), 9)
                killed, deadline = True, time.monotonic() + 10
            time.sleep(0.1)

    def _stop_wait(self, name: str) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(self._config_path(name), encoding="utf-8") as handle:
                return float(handle.read().split("stopwaitsecs=", 1)[1].split("\n", 1)[0])
        return 30.0

    def remove(self, name: str) -> bool:
        known = os.path.exists(self._config_path(name))
        self.stop(name)
        if known:
            os.unlink(self._config_path(name))
            if self.alive():
                with self._locked():
                    self._reload()
        self._forget_script(name)
        return known

    def shut_down(self) -> bool:
        """Stop the daemon and all its programs; for removing a root folder."""
        if not self.alive():
            return False
        self._rpc(30.0).shutdown()
        deadline = time.monotonic() + 60
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        return True


def state_of(info: Dict[str, Any]) -> str:
    """Supervisor's word for a process in ours."""
    name = info["statename"]
    if name in UP:
        return service.RUNNING
    if name == "STOPPED" or (name == "EXITED" and not info["exitstatus"]):
        return service.STOPPED
    return service.FAILED


def program_names(folder: str) -> List[str]:
    """Programs that this root's supervisor knows, from their files."""
    if not os.path.isdir(folder):
        return []
    return sorted(name[:-5] for name in os.listdir(folder) if name.endswith(".conf"))
