# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a build needs to know of its host: forecasts, leftovers of an earlier attempt, how much fits."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json

STEPS = ["source", "env", "wheel", "natives", "requirements", "manifest"]
#: Marks every process of a build: compilers get process groups of their own and outlive a killed job.
MARKER = "DFLASH_BUILD"
#: Seconds a step takes where nothing was built before, by mode.
FIRST_GUESS = {
    "source": {"source": 30.0, "env": 120.0, "wheel": 5400.0, "natives": 1.0, "requirements": 60.0, "manifest": 2.0},
    "precompiled": {"source": 10.0, "env": 30.0, "wheel": 20.0, "natives": 12.0, "requirements": 30.0, "manifest": 2.0},
}
#: Memory one compiler may take, with the largest kernels in flight.
GIB_PER_JOB = 6


def utc(when: Optional[float] = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def expected_path(root: str) -> str:
    return os.path.join(root, "buildenv", "seconds.json")


def expected_seconds(root: str, mode: str, device: str) -> Dict[str, float]:
    """How long each step takes: as it was last time here, else a guess."""
    guess = dict(FIRST_GUESS.get(mode, FIRST_GUESS["source"]))
    last = (read_json(expected_path(root)) or {}).get("%s-%s" % (mode, device), {})
    guess.update({name: float(value) for name, value in last.items() if name in guess})
    return guess


def strays(build_id: str) -> List[int]:
    """Processes of this build that outlived their job."""
    wanted = ("%s=%s" % (MARKER, build_id)).encode("ascii")
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open("/proc/%s/environ" % name, "rb") as handle:
                    if wanted in handle.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def end_strays(build_id: str) -> int:
    """Kill them, before anything is built beside them; counts."""
    count = 0
    for pid in strays(build_id):
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except OSError:
            continue
    return count


def compiler_jobs() -> int:
    """Compilers at a time that fit memory and processors."""
    available = 0
    try:
        with open("/proc/meminfo", encoding="ascii") as handle:
            match = re.search(r"^MemAvailable:\s+(\d+) kB", handle.read(), re.MULTILINE)
        available = int(match.group(1)) >> 20 if match else 0
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, available // GIB_PER_JOB)) if available else max(1, cores // 2)
