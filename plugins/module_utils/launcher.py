# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""``python -I launcher.py <deployment folder>``: the one way in which a server of an instance is started.

``python -I launcher.py --clean <instance folder>`` only ends and cleans.

The service manager starts this, also after a crash, so that no server ever starts beside the
remains of the one before it: engines survive the death of their API server and keep memory and
shared memory.  It ends what is left, cleans, records who will serve, and becomes the server.
It stands alone on the host, with ``process.py`` beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
import time
from types import ModuleType
from typing import Any, Dict, List, Mapping, Tuple

#: Stands in argv.json for the deployment's folder, which is named by a hash over argv.json itself.
DEPLOYMENT = "@DEPLOYMENT@"
#: Begins the log line that divides the log by process.
LOG_LINE = "DFLASH-LAUNCH "
#: What a server keeps of the service manager's environment; all else comes from argv.json and the env file.
INHERITED = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "TZ")


def _process_module() -> ModuleType:
    try:
        from ansible_collections.dflash.fleet.plugins.module_utils import process
        return process
    except ImportError:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "process.py")
        spec = importlib.util.spec_from_file_location("dflash_process", path)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def parse_env_file(text: str) -> Dict[str, str]:
    """``NAME=value`` lines, taken as they are: no quotes, no expansion.  Raises ``ValueError`` naming the line."""
    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().replace("_", "").isalnum():
            raise ValueError("line %d is not NAME=value" % number)
        out[name.strip()] = value
    return out


def read_env_file(path: str) -> Dict[str, str]:
    """Secrets from a file that only its owner can read.  Raises ``ValueError`` when others can, ``OSError``."""
    with open(path, encoding="utf-8") as handle:
        if os.fstat(handle.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError("others can read it; its mode must be 0600")
        return parse_env_file(handle.read())


def command(
    argv_json: Mapping[str, Any], deployment: str, inherited: Mapping[str, str],
) -> Tuple[List[str], Dict[str, str]]:
    """The argument list and the whole environment of the server."""
    argv = [part.replace(DEPLOYMENT, deployment) for part in argv_json["argv"]]
    env = {name: inherited[name] for name in INHERITED if name in inherited}
    env.update({name: value.replace(DEPLOYMENT, deployment) for name, value in argv_json["env"].items()})
    path = argv_json.get("env_file")
    if path and os.path.lexists(path):
        env.update(read_env_file(path))
    if argv_json.get("api_key_file") and not env.get("VLLM_API_KEY"):
        raise ValueError("an API key is wanted and %s holds none: it would serve anybody" % path)
    return argv, env


def write_in_place(path: str, value: Mapping[str, Any]) -> None:
    """Write JSON into an existing file of this account; its folder belongs to root, so no rename is possible."""
    data = (json.dumps(value, sort_keys=True) + "\n").encode("utf-8")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(handle, data, 0)
        os.ftruncate(handle, len(data))
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare(instance: str, leader: Any) -> Dict[str, Any]:
    """End what is left of the instance and clean its run folder and shared memory; says what was found.

    Raises ``RuntimeError`` when a process cannot be ended.
    """
    process = _process_module()
    uid = os.getuid()
    count, left = process.end(lambda: process.members(instance, leader, uid), timeout=5.0)
    if left:
        raise RuntimeError("processes %s of this instance cannot be ended" % ", ".join(str(p.pid) for p in left))
    run_folder = os.path.join(instance, "run")
    os.makedirs(run_folder, mode=0o700, exist_ok=True)
    return {
        "ended": count,
        "run_files": process.empty_folder(run_folder),
        "shared_memory": len(process.remove_stale_shared_memory(uid)),
    }


def read_run(instance: str) -> Any:
    """What run.json says of the process that served last, None where it says nothing."""
    try:
        with open(os.path.join(instance, "run.json"), encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None


def clean(instance: str) -> int:
    """End and clean what is left of an instance, and print what was found as JSON."""
    try:
        print(json.dumps(prepare(instance, read_run(instance)), sort_keys=True))
        return 0
    except (OSError, RuntimeError) as error:
        print(str(error), file=sys.stderr)
        return 3


def main(arguments: List[str]) -> int:
    """Become the server.  Returns only when it cannot: 2 for a wrong call, 3 for what a person must mend."""
    if len(arguments) == 2 and arguments[0] == "--clean":
        return clean(os.path.realpath(arguments[1]))
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: launcher.py <deployment folder> | --clean <instance folder>", file=sys.stderr)
        return 2
    deployment = os.path.realpath(arguments[0])
    instance = os.path.dirname(os.path.dirname(deployment))
    process = _process_module()
    try:
        with open(os.path.join(deployment, "argv.json"), encoding="utf-8") as handle:
            argv_json = json.load(handle)
        leader = read_run(instance)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        found = prepare(instance, leader)
        argv, env = command(argv_json, deployment, os.environ)
        run = {
            "pid": os.getpid(), "start_ticks": process.start_ticks(os.getpid()), "boot_id": process.boot_id(),
            "deployment_id": os.path.basename(deployment), "started_at": int(time.time()),
        }
        here = os.fstat(1)
        if stat.S_ISREG(here.st_mode):
            run["log_offset"] = here.st_size
        write_in_place(os.path.join(instance, "run.json"), run)
        print(LOG_LINE + json.dumps(dict(run, cleaned=found), sort_keys=True), flush=True)
        os.chdir(argv_json["cwd"])
        os.umask(0o077)
        os.execve(argv[0], argv, env)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        print("dflash launcher cannot start %s: %s" % (deployment, error), file=sys.stderr, flush=True)
        return 3
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
