# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Starting, joining, watching and ending a build; the build itself runs detached (``build_job``)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import (
    build_host,
    build_job,
    build_log,
    ids,
    pip_tool,
    process,
    service,
)
from ansible_collections.dflash.fleet.plugins.module_utils.accounts import (
    Account,
    acting_as,
    can_run,
    make_folder,
    worker,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import (
    read_json,
    sha256_file,
    short_hash,
    write_atomic,
    write_json,
)

PACKAGE = "ansible_collections.dflash.fleet.plugins.module_utils"
#: What the detached job imports; a test compares it with what its source says.
JOB_MODULES = ("build_host", "build_job", "build_log", "errors", "extensions", "files", "lock", "native", "pip_tool",
               "process", "requirements", "schema", "schemas", "source", "vocabulary")
#: Its entry point; named here so that the job's code travels to the host with this file.
ENTRY = build_job.main
#: Seconds in which a started job must have said that it lives.
START_GRACE = 60.0
#: Folders that the build account writes to, below the root.
OWN_FOLDERS = ("source", "buildenv", "wheels", "cache/base", "cache/requirements")
TEXT_LIMIT = 8 << 20
#: Names that come from the build account's files: no part of a path may lead elsewhere.
DIGEST, NAME = re.compile(r"^[0-9a-f]{64}$"), re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl$")


def folder_of(root: str, build_id: str) -> str:
    return os.path.join(root, "builds", build_id)


def unit_name(root: str, build_id: str) -> str:
    """The service manager's name of the job; two roots on one host have two."""
    return "dflash-build-%s-%s" % (build_id, short_hash(os.path.realpath(root), 6))


@contextlib.contextmanager
def locked(root: str, build_id: str) -> Iterator[None]:
    """One starter at a time per build id, on this host."""
    make_folder(os.path.join(root, "builds"))
    with open(os.path.join(root, "builds", build_id + ".lock"), "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_series(spec: Mapping[str, Any], series: Sequence[Mapping[str, str]]) -> None:
    """The patches that came are those that the build id was made from."""
    for patch in series:
        digest = hashlib.sha256(patch["text"].encode("utf-8")).hexdigest()
        if digest != patch["sha256"]:
            raise DflashError("The patch %s is not the one that was pinned" % patch["name"], "series", "Pin again.")
    if [patch["sha256"] for patch in series] != list(spec.get("series", [])):
        raise DflashError("The series is not the one that the build id was made from", "series", "Plan again.")


def read_text(path: str) -> str:
    """A small text file, empty where it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read(TEXT_LIMIT)
    except OSError:
        return ""


def finished(root: str, build_id: str, deep: bool = False) -> Optional[Dict[str, Any]]:
    """The manifest of a whole build, or None.  ``deep`` also hashes the wheel."""
    folder = folder_of(root, build_id)
    manifest = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("build_id") != build_id or manifest.get("kind") != "build":
        return None
    wheel = manifest.get("wheel")
    if not isinstance(wheel, dict):
        return None
    if not (DIGEST.match(str(wheel.get("sha256"))) and NAME.match(str(wheel.get("name")))):
        return None
    path = wheel_path(root, manifest)
    lock = os.path.join(folder, "requirements.lock")
    try:
        if os.path.getsize(path) != manifest["wheel"]["size"]:
            return None
        if sha256_file(lock) != manifest["requirements_sha256"]:
            return None
        if deep and sha256_file(path) != manifest["wheel"]["sha256"]:
            return None
    except (OSError, KeyError, TypeError):
        return None
    return manifest


def wheel_path(root: str, manifest: Mapping[str, Any]) -> str:
    """Where the wheel of a build lies, by its hash."""
    return os.path.join(root, "wheels", manifest["wheel"]["sha256"], manifest["wheel"]["name"])


def status(root: str, build_id: str, account: Account) -> Dict[str, Any]:
    """One short answer; reads as the build account, whose files these are."""
    with acting_as(account):
        return _status(root, build_id)


def _status(root: str, build_id: str) -> Dict[str, Any]:
    folder = folder_of(root, build_id)
    log = os.path.join(folder, "build.log")
    answer: Dict[str, Any] = {
        "state": "absent", "build_id": build_id, "step": "", "percent": 0, "eta_s": None, "elapsed_s": 0, "attempt": 0,
        "log": log, "error": None, "manifest": None, "lock": "", "wheel_path": "", "seconds": {},
    }
    state = read_json(os.path.join(folder, "state.json"))
    if not isinstance(state, dict) or state.get("build_id") != build_id:
        return answer
    now = time.time()
    answer.update(
        state=state.get("state", "failed"), step=state.get("step", ""), attempt=state.get("attempt", 0),
        error=state.get("error"), seconds=state.get("step_seconds") or {},
        elapsed_s=int((state.get("finished_at") or now) - (state.get("started_at") or now)),
    )
    if answer["state"] == "done":
        manifest = finished(root, build_id)
        if manifest is None:
            answer.update(state="absent", error={
                "step": "", "line": "What this build made is damaged or gone",
                "hint": "Start it again: it is built anew.",
            })
            return answer
        answer.update(percent=100, eta_s=0, manifest=manifest, wheel_path=wheel_path(root, manifest),
                      lock=read_text(os.path.join(folder, "requirements.lock")))
    elif answer["state"] == "running":
        if state.get("pid"):
            lives = process.alive(state["pid"], state.get("start_ticks"), state.get("boot_id"))
        else:
            fresh = now - float(state.get("started_at") or 0) < START_GRACE
            lives = fresh and state.get("boot_id") == process.boot_id()
        if not lives:
            rebooted = state.get("boot_id") != process.boot_id()
            answer.update(state="failed", error={
                "step": answer["step"],
                "line": "The host was restarted meanwhile" if rebooted else "The build's process is gone (killed?)",
                "hint": "Start it again: finished steps are kept.",
            })
            return answer
        orders = read_json(os.path.join(folder, "job.json")) or {}
        spec = orders.get("spec") or {}
        expected = build_host.expected_seconds(root, spec.get("mode", "source"), spec.get("device", ""))
        share = build_log.compile_share(log, state.get("log_offset", 0)) if answer["step"] == "wheel" else None
        spent = now - float(state.get("step_started_at") or now)
        percent, left = build_log.progress(build_host.STEPS, answer["step"], spent, expected, share)
        answer.update(percent=percent, eta_s=left)
    return answer


def plan(root: str, spec: Mapping[str, Any], account: Account) -> Dict[str, Any]:
    """What a start would meet, without doing anything."""
    answer = status(root, ids.build_id(spec), account)
    answer["would_start"] = answer["state"] not in ("done", "running")
    return answer


def start(root: str, spec: Mapping[str, Any], series: List[Dict[str, str]], origin: Mapping[str, Any],
          user: Optional[str], environ: Mapping[str, str], kind: str = "auto") -> Dict[str, Any]:
    """Start the build, or join it where it runs, or say that it is done: ``status`` with ``changed``."""
    account = worker(user)
    build_id = ids.build_id(spec)
    mode = spec.get("mode")
    if mode not in build_host.FIRST_GUESS or (mode == "precompiled") != bool(spec.get("precompiled")):
        raise DflashError("There is no way to build in mode %r" % mode, "vllm_build_mode",
                          "Use source, or precompiled with a wheel named in vllm_build_precompiled_wheel.")
    check_series(spec, series)
    folder = folder_of(root, build_id)
    with locked(root, build_id):
        answer = status(root, build_id, account)
        if answer["state"] == "running":
            return dict(answer, changed=False, joined=True)
        with acting_as(account):
            whole = finished(root, build_id, deep=True) if answer["state"] == "done" else None
        if whole:
            return dict(answer, changed=False, joined=False)
        if not can_run(origin["python"], account):
            raise DflashError(
                "%s cannot be run by the account %s, or has no venv" % (origin["python"], account.name),
                "vllm_toolchain_python",
                "Install the distribution's python3 and python3-venv packages, or name another.",
            )
        for name in ("cache", "tools"):
            make_folder(os.path.join(root, name))
        places = pip_tool.places(root, account.name)
        for path in (*(os.path.join(root, name) for name in OWN_FOLDERS), *places.values(), folder):
            make_folder(path, account)
        pip_config, git_config = pip_tool.user_pip_config(environ), pip_tool.user_git_config(environ)
        netrc = pip_tool.user_netrc(environ)
        orders = {
            "build_id": build_id, "root": root, "spec": dict(spec), "series": series, "origin": dict(origin),
            "environment": pip_tool.passed_environment(environ), "pip_config": pip_config, "git_config": git_config,
            **places,
        }
        # Read before the change of account: the module's own archive is closed to everybody else.
        code = {name: source_of("%s.%s" % (PACKAGE, name)) for name in JOB_MODULES}
        with acting_as(account):
            script = write_job(folder, orders, code, answer["state"] == "absent")
            # By this file and not by the orders, which stay: the job takes it into memory and removes it.
            pip_tool.write_home(os.path.join(folder, "home"), pip_config, git_config, netrc)
        manager = service.manager(root, user, kind)
        name = unit_name(root, build_id)
        manager.stop(name, 10)
        manager.start(service.Program(
            name=name, argv=[origin["python"], "-I", script], user=account.name, cwd=folder,
            env={build_host.MARKER: build_id, "PATH": pip_tool.PATH, "LANG": "C.UTF-8",
                 "HOME": os.path.join(folder, "home")},
            log=os.path.join(folder, "job.log"), stop_timeout=10,
        ))
        return dict(status(root, build_id, account), changed=True, joined=False)


def write_job(folder: str, orders: Mapping[str, Any], modules: Mapping[str, str], anew: bool) -> str:
    """Put the job's own source, its orders and a first state into the build's folder; gives the script's path."""
    old = read_json(os.path.join(folder, "state.json")) or {}
    code = os.path.join(folder, "job")
    shutil.rmtree(code, ignore_errors=True)
    package = code
    for part in PACKAGE.split("."):
        package = os.path.join(package, part)
        os.makedirs(package)
        write_atomic(os.path.join(package, "__init__.py"), "")
    for name, text in modules.items():
        write_atomic(os.path.join(package, name + ".py"), text)
    script = os.path.join(code, "run.py")
    write_atomic(script, "import sys\nsys.path.insert(0, %r)\nfrom %s.build_job import %s\nsys.exit(%s(%r))\n" % (
        code, PACKAGE, ENTRY.__name__, ENTRY.__name__, folder))
    write_json(os.path.join(folder, "job.json"), orders, 0o600)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "manifest.json"))
    now = time.time()
    write_json(os.path.join(folder, "state.json"), {
        "schema": 1, "build_id": orders["build_id"], "state": "running", "step": "", "error": None, "pid": None,
        "boot_id": process.boot_id(), "started_at": now, "step_started_at": now, "attempt": old.get("attempt", 0),
        "steps": {} if anew else old.get("steps") or {},
    })
    return script


def source_of(name: str) -> str:
    """The source of a module of this collection, also when it was loaded from an archive."""
    spec = importlib.util.find_spec(name)
    loader = spec.loader if spec else None
    text = loader.get_source(name) if hasattr(loader, "get_source") else None  # type: ignore[union-attr]
    if not text:
        raise DflashError("The source of %s is not to be had" % name, name, "Install the collection again.")
    return str(text)


def cancel(root: str, spec: Mapping[str, Any], user: Optional[str], timeout: float = 30.0,
           kind: str = "auto") -> Dict[str, Any]:
    """End the build and all its processes; what is done is kept for a later start."""
    account = worker(user)
    build_id = ids.build_id(spec)
    with locked(root, build_id):
        answer = status(root, build_id, account)
        manager = service.manager(root, user, kind)
        ran = manager.stop(unit_name(root, build_id), timeout)
        with acting_as(account):
            strays = build_host.end_strays(build_id)
            if answer["state"] == "running":
                path = os.path.join(folder_of(root, build_id), "state.json")
                state = read_json(path) or {}
                error = {"step": state.get("step", ""), "line": "Cancelled",
                         "hint": "Start it again: finished steps are kept."}
                state.update(state="cancelled", finished_at=time.time(), error=error)
                write_json(path, state)
        changed = bool(ran or strays or answer["state"] == "running")
        return dict(status(root, build_id, account), changed=changed)
