# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a host is: platform, Python, processor, memory, disk, GPUs.  Reads /proc and runs one interpreter."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import socket
import subprocess
from typing import Any, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import process
from ansible_collections.dflash.fleet.plugins.module_utils.accounts import Account, drop_to
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

#: Folders searched for a Python given by name; a service account has no PATH of a login shell.
SEARCH = "/usr/local/bin:/usr/bin:/bin"

QUESTION = (
    "import sys,sysconfig,platform;"
    "print('.'.join(map(str,sys.version_info[:3])));"
    "print('cp%d%d'%sys.version_info[:2]);"
    "print(sysconfig.get_platform().replace('-','_').replace('.','_'));"
    "print(' '.join(platform.libc_ver()));"
    "import venv,ensurepip;print('venv')"
)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def python(name: str, account: Account) -> Dict[str, Any]:
    """``{path, version, tag, platform, glibc, venv}`` of an interpreter, asked as ``account``.

    Raises ``DflashError`` when there is none or the account cannot run it (a pyenv below a closed
    home answers for root and not for the service account).
    """
    path = name if os.path.isabs(name) else shutil.which(name, path=SEARCH)
    fix = "install the distribution's %s and %s-venv, or name another in vllm_toolchain_python" % (
        (os.path.basename(name),) * 2
    )
    if not path or not os.path.exists(path):
        raise DflashError("there is no Python %s" % name, SEARCH if not os.path.isabs(name) else name, fix)
    try:
        done = subprocess.run(
            [path, "-I", "-c", QUESTION],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
            **drop_to(account),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DflashError(
            "the account %s cannot run the Python %s: %s" % (account.name, path, error), path, fix
        ) from error
    lines = done.stdout.split("\n")
    if len(lines) < 4:
        raise DflashError(
            "the account %s cannot run the Python %s: %s"
            % (account.name, path, (done.stderr.strip().splitlines() or ["no answer"])[-1]),
            path,
            fix,
        )
    return {
        "path": path,
        "version": lines[0],
        "tag": lines[1],
        "platform": lines[2],
        "glibc": lines[3].replace("glibc ", "").strip(),
        "venv": "venv" in lines[4:],
    }


def machine_id() -> str:
    """The host's own identity: machine-id where there is one, else its name."""
    return _text("/etc/machine-id").strip() or socket.gethostname()


def driver() -> str:
    """Version of the NVIDIA driver that is loaded, or an empty string."""
    match = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", _text("/proc/driver/nvidia/version"))
    return match.group(1) if match else ""


def gpus() -> List[str]:
    """UUIDs of the GPUs, from the driver's own files (no tool is started), with MIG layouts where there are any."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        match = re.search(r"GPU UUID:\s*(\S+)", _text(path))
        if match:
            found.append(match.group(1))
    layouts = sorted(glob.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*"))
    return found + ["mig:" + path.split("capabilities/", 1)[1] for path in layouts]


def identity() -> Dict[str, Any]:
    """What a proof binds to: ``{machine_id, driver, gpus}``."""
    return {"machine_id": machine_id(), "driver": driver(), "gpus": gpus()}


def cpu_flags() -> List[str]:
    """Instruction set flags of the first processor."""
    match = re.search(r"^flags\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.M)
    return match.group(1).split() if match else []


def memory_gib() -> float:
    """Available memory in GiB, also under a cgroup's limit."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.M)
    available = int(match.group(1)) / 2**20 if match else 0.0
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _text("/sys/fs/cgroup/memory.current").strip()
        available = min(available, (int(limit) - int(used or 0)) / 2**30)
    return available


def existing_parent(path: str) -> str:
    """The nearest folder at or above ``path`` that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


def disk_gib(path: str) -> float:
    """Space that an ordinary account may use at ``path`` (or its nearest parent), in GiB."""
    info = os.statvfs(existing_parent(path))
    return info.f_bavail * info.f_frsize / 2**30


def mount_options(path: str) -> List[str]:
    """Options of the mount that holds ``path``."""
    path = os.path.realpath(existing_parent(path))
    best: List[str] = []
    longest = -1
    for line in _text("/proc/self/mounts").splitlines():
        parts = line.split()
        point = parts[1].replace("\\040", " ") if len(parts) > 3 else ""
        inside = point == "/" or path == point or path.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= longest:
            best, longest = parts[3].split(","), len(point)
    return best


def port_holder(address: str, port: int) -> Optional[str]:
    """``"pid N (name)"`` of what holds a TCP port of this host, or None when it can be bound."""
    address = address.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            return None
        except OSError as error:
            pids = sorted(process.listener_pids(port))
            if not pids:
                return error.strerror or "taken"
            return "pid %d (%s)" % (pids[0], _text("/proc/%d/comm" % pids[0]).strip())


def free_port() -> int:
    """A TCP port of the loopback address that nobody holds now, for a server that lives for minutes."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compute_capabilities() -> List[str]:
    """Compute capabilities that nvidia-smi reports, one a GPU; empty without driver."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if re.match(r"^\d+\.\d+$", line.strip())]


def system() -> Dict[str, str]:
    """``{system, machine, os}``."""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text("/etc/os-release"), re.M)
    return {"system": platform.system(), "machine": platform.machine(), "os": match.group(1) if match else ""}
