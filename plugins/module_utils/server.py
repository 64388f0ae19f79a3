# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Start and stop the one server of an instance, through the host's service manager and the launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    http,
    launch,
    log_watch,
    process,
    service,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, write_atomic

#: Seconds between the service manager's start and the launcher's record of the server.
RECORD_S = 40.0
#: A log that is larger at a start is put aside, once: the log before it goes.
LOG_MAX = 64 << 20
#: Seconds for the memory of GPUs to come back after a stop, and the change (MiB) that is none.
GPU_S = 30.0
GPU_STEP = 64


def service_name(instance: str) -> str:
    """What the service manager calls the instance's server."""
    return "dflash-%s" % instance


class Server:
    """The server of one instance.  ``sources`` are the texts of ``launcher.py`` and ``process.py``."""

    def __init__(
        self, root: str, instance: str, user: Optional[str], sources: Dict[str, str], kind: str = "auto",
        stop_timeout: int = 60, manager: Optional[service.Manager] = None,
    ) -> None:
        self.root, self.instance, self.sources, self.stop_timeout = root, instance, sources, stop_timeout
        self.path = launch.instance_dir(root, instance)
        self.run_dir = launch.run_dir(root, instance)
        self.account = accounts.worker(user)
        self.manager = manager or service.manager(root, user, kind)
        self.name = service_name(instance)
        self.log = launch.log_path(root, instance)
        self.env_file = launch.env_file(root, instance)

    # ---- questions
    def run(self) -> Dict[str, Any]:
        """What the launcher recorded of the process that served last."""
        found = read_json(os.path.join(self.path, "run.json"))
        return found if isinstance(found, dict) else {}

    def members(self) -> List[process.Stat]:
        """Living processes of the instance; only the service account's, whatever run.json says."""
        return process.members(self.path, self.run() or None, self.account.uid)

    def serves(self) -> str:
        """The deployment whose server lives, or ""."""
        run = self.run()
        if process.alive(run.get("pid"), run.get("start_ticks"), run.get("boot_id")):
            return str(run.get("deployment_id") or "")
        return ""

    def deployment_dir(self, deployment: str) -> str:
        """The folder of a deployment.  Raises ``DflashError`` when it is not staged here."""
        path = os.path.join(self.path, "deployments", deployment)
        if not deployment or not os.path.isfile(os.path.join(path, "argv.json")):
            raise DflashError(
                "The deployment %s is not staged on this host" % (deployment or "(none named)"), path,
                "Run deploy_dflash.yml.",
            )
        return path

    def up(self, deployment: str) -> bool:
        """Does the service manager run exactly this deployment's server, with this API key, and does it live?"""
        if self.serves() != deployment or self.manager.status(self.name)["state"] != service.RUNNING:
            return False
        secrets = self._secrets(self._argv(deployment))
        return secrets is None or (os.path.isfile(self.env_file) and _text(self.env_file) == secrets)

    # ---- acts
    def start(self, deployment: str, autostart: bool = True) -> Dict[str, Any]:
        """Make the server of ``deployment`` the one that runs.  Returns as soon as its process is recorded.

        Another server of the instance, and whatever is left of one, is ended first.
        """
        folder = self.deployment_dir(deployment)
        argv_json = self._argv(deployment)
        if self.up(deployment):
            return self.state(False)
        secrets = self._secrets(argv_json)
        self._halt()
        self._prepare(argv_json, secrets)
        before = self.run()
        self.manager.remove(self.name)
        self.manager.start(service.Program(
            name=self.name, argv=[accounts.find_python(self.account), "-I", self._file("launcher.py"), folder],
            user=self.account.name, cwd="/", env={}, log=self.log, stop_timeout=self.stop_timeout,
            autostart=autostart, restart=autostart,
        ))
        return self._recorded(deployment, before)

    def stop(self) -> Dict[str, Any]:
        """End the server and everything that belongs to it; forget it at the service manager.

        Raises ``DflashError`` when a process survives.
        """
        changed = self._halt()
        self.manager.remove(self.name)
        if os.path.lexists(self.env_file):
            os.unlink(self.env_file)
        return self.state(changed)

    def _halt(self) -> bool:
        was = bool(self.members())
        known = self.manager.stop(self.name, self.stop_timeout + 10.0)
        if not was and not known and not self.members():
            return False
        if os.path.isfile(self._file("launcher.py")):
            self._clean()
        left = self.members()
        if left:
            process.end(self.members, 2.0)
            left = self.members()
        if left:
            raise DflashError(
                "Processes %s of instance %s do not end (%s)" % (
                    ", ".join(str(item.pid) for item in left), self.instance,
                    ", ".join(sorted({"%s in state %s" % (item.name, item.state) for item in left})),
                ), self.path, "A process in state D waits for a device that does not answer: reboot the host.",
            )
        settle(gpu_memory)
        return True

    def _clean(self) -> None:
        """Clean as the service account: root never walks a folder that this account can change."""
        argv = [accounts.find_python(self.account), "-I", self._file("launcher.py"), "--clean", self.path]
        try:
            done = accounts.run(argv, self.account, {"PATH": launch.SYSTEM_PATH, "LANG": "C.UTF-8"}, timeout=120)
        except subprocess.SubprocessError as error:
            raise DflashError("The instance cannot be cleaned: %s" % error, self.path) from None
        if done.returncode:
            raise DflashError("The instance cannot be cleaned: %s" % done.stderr.strip()[-300:], self.path)

    def _argv(self, deployment: str) -> Dict[str, Any]:
        path = os.path.join(self.deployment_dir(deployment), "argv.json")
        found = read_json(path)
        if not isinstance(found, dict) or not os.access(found["argv"][0], os.X_OK):
            raise DflashError(
                "The deployment's program cannot be run", path, "Run deploy_dflash.yml: the release is installed anew.",
            )
        return found

    def _secrets(self, argv_json: Dict[str, Any]) -> Optional[str]:
        """What the env file must hold; None when the deployment wants no key, whatever lies there."""
        key = http.read_key(argv_json.get("api_key_file"))
        return None if key is None else "VLLM_API_KEY=%s\n" % key

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _prepare(self, argv_json: Dict[str, Any], secrets: Optional[str]) -> None:
        """Folders and files that the launcher and the server write, given to their account."""
        accounts.make_folder(self.path)
        accounts.make_folder(self.run_dir, self.account, 0o700)
        accounts.make_folder(os.path.join(self.root, "cache"))
        accounts.make_folder(argv_json["env"]["HOME"], self.account, 0o700)
        for name, text in sorted(self.sources.items()):
            path = self._file(name)
            if not os.path.isfile(path) or _text(path) != text:
                write_atomic(path, text)
        if not os.path.isdir(os.path.dirname(self.log)):
            accounts.make_folder(os.path.dirname(self.log))
        if os.path.isfile(self.log) and os.path.getsize(self.log) > LOG_MAX:
            os.replace(self.log, self.log + ".1")
        for path in (self._file("run.json"), self.log):
            self._own(path)
        if secrets is not None:
            if not os.path.isdir(os.path.dirname(self.env_file)):
                accounts.make_folder(os.path.dirname(self.env_file))
            write_atomic(self.env_file, secrets, 0o600, accounts.owner_of(self.account))

    def _own(self, path: str) -> None:
        """An empty file of the service account where there is none: the folder is not its own."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            owner = accounts.owner_of(self.account)
            if owner and os.fstat(handle).st_uid != owner[0]:
                os.fchown(handle, owner[0], owner[1])
        finally:
            os.close(handle)

    def _recorded(self, deployment: str, before: Dict[str, Any]) -> Dict[str, Any]:
        limit = time.monotonic() + RECORD_S
        while time.monotonic() < limit:
            run = self.run()
            if run and run != before and run.get("deployment_id") == deployment:
                found = self.state(True)
                if found["pid"]:
                    return found
                break
            status = self.manager.status(self.name)
            if status["state"] in (service.FAILED, service.STOPPED, service.ABSENT) and self.run() == before:
                time.sleep(0.3)  # it may have been asked before the manager began
                if self.manager.status(self.name)["state"] not in (service.RUNNING,) and self.run() == before:
                    break
            time.sleep(0.1)
        said = log_watch.last_line(log_watch.tail(self.log))
        raise DflashError(
            "The server's launcher did not come up: %s" % (said or "it said nothing"), self.log,
            "Mend what it names and deploy again.",
        )

    def state(self, changed: bool) -> Dict[str, Any]:
        """The answer of ``dflash_service``."""
        run = self.run()
        lives = process.alive(run.get("pid"), run.get("start_ticks"), run.get("boot_id"))
        return {
            "changed": changed, "state": "started" if lives else "stopped",
            "pid": run.get("pid") if lives else None, "deployment": run.get("deployment_id") if lives else None,
            "started_at": run.get("started_at") if lives else None, "log": self.log,
            "manager": self.manager.kind,
        }


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def act(server: Server, state: str, deployment: str, autostart: bool, check_mode: bool) -> Dict[str, Any]:
    """What ``dflash_service`` does; under check mode, what it would."""
    if state == "stopped":
        if check_mode:
            return dict(server.state(bool(server.members())))
        return server.stop()
    server.deployment_dir(deployment)
    if check_mode:
        return dict(server.state(state == "restarted" or not server.up(deployment)))
    if state == "restarted":
        server.stop()
        return dict(server.start(deployment, autostart), changed=True)
    return server.start(deployment, autostart)


def gpu_memory() -> Optional[int]:
    """MiB in use on all GPUs together, None where there is no driver to ask."""
    tool = shutil.which("nvidia-smi", path=launch.SYSTEM_PATH)
    if not tool:
        return None
    try:
        done = subprocess.run(
            [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True,
            timeout=20, stdin=subprocess.DEVNULL, check=True,
        )
        return sum(int(line) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def settle(measure: Callable[[], Optional[int]], timeout: float = GPU_S, step: float = 0.5) -> None:
    """Wait until memory is given back: the driver frees it some time after the last process died."""
    limit = time.monotonic() + timeout
    last = measure()
    while last is not None and time.monotonic() < limit:
        time.sleep(step)
        now = measure()
        if now is None or last - now < GPU_STEP:
            return
        last = now


def source(module: ModuleType) -> str:
    """The text of a module of this collection, also inside the archive that Ansible sends to a host."""
    loader = module.__loader__
    text = loader.get_source(module.__name__) if loader is not None and hasattr(loader, "get_source") else None
    if not text:
        raise DflashError("The source of %s cannot be read" % module.__name__)
    return str(text)
