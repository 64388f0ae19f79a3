# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Run one of our own files as a child process: isolated, from a neutral folder, never as root.

The child's program is the source text of modules of this collection, handed over on standard input;
it imports nothing of the collection from disk.  Its answer comes back on a file descriptor of its own,
so that whatever foreign code prints cannot be taken for an answer.
"""

from __future__ import annotations

import functools
import grp
import json
import os
import pwd
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

NEUTRAL_FOLDER = "/"
DEFAULT_USER = "nobody"
#: Searched, in this order, when the interpreter at hand cannot be run by the service account.
PYTHONS = (
    "/usr/bin/python3",
    "/usr/bin/python3.13",
    "/usr/bin/python3.12",
    "/usr/bin/python3.11",
    "/usr/local/bin/python3",
)

_BOOT = """\
import json, os, sys, types
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except Exception:
    pass
job = json.loads(sys.stdin.buffer.read().decode("utf-8"))
answer = os.dup(1)
os.dup2(2, 1)
module = None
for name, text in job["program"]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
value = module.main(job["payload"])
with os.fdopen(answer, "w") as handle:
    json.dump(value, handle)
"""


class Outcome:
    """What became of a child: ``value`` when ``ok``, else ``reason`` in one line."""

    def __init__(self, value: Any, returncode: int, stderr: str, timed_out: bool, deadline: float) -> None:
        self.value = value
        self.returncode = returncode
        self.stderr = stderr
        self.timed_out = timed_out
        self.deadline = deadline
        self.ok = value is not None and returncode == 0

    @property
    def reason(self) -> str:
        """One line on why there is no answer; empty when there is one."""
        if self.ok:
            return ""
        if self.timed_out:
            return "no answer within %d s" % self.deadline
        if self.returncode < 0:
            return death(-self.returncode)
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "exit code %d without a word" % self.returncode


def death(number: int) -> str:
    """A signal in words."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "signal %d" % number
    extra = {
        "SIGBUS": " (a mapped file is shorter than it says: truncated library)",
        "SIGILL": " (built for another processor)",
        "SIGKILL": " (killed, perhaps for memory)",
    }
    return "killed by %s%s" % (name, extra.get(name, ""))


def account(user: Optional[str]) -> Dict[str, Any]:
    """The ``Popen`` arguments that make a child run as ``user``; empty unless this process is root."""
    if os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam(user or DEFAULT_USER)
    except KeyError:
        raise DflashError(
            "There is no account %r to run probes as." % user, "user", "Create it or name another."
        ) from None
    if entry.pw_uid == 0:
        raise DflashError("Probes run foreign code and never run as root.", "user", "Name an unprivileged account.")
    groups = [item.gr_gid for item in grp.getgrall() if entry.pw_name in item.gr_mem]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


def environment() -> Dict[str, str]:
    """A small environment: nothing of the caller's but locale and the choice of GPUs."""
    kept = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if key in os.environ}
    return dict(kept, PATH="/usr/local/bin:/usr/bin:/bin", HOME=NEUTRAL_FOLDER, LANG="C.UTF-8", OMP_NUM_THREADS="1")


def can_run(python: str, user: Optional[str]) -> bool:
    """Can the account run this interpreter, and is it the one that answers (a venv says its own prefix)?"""
    try:
        done = subprocess.run(
            [python, "-I", "-B", "-c", "pass"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=NEUTRAL_FOLDER,
            env=environment(),
            timeout=30,
            **account(user),
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


@functools.cache
def any_python(user: Optional[str]) -> str:
    """An interpreter that the account can run: this one, or the system's.  Raises ``DflashError``."""
    for candidate in (sys.executable,) + PYTHONS:
        if candidate and os.path.exists(candidate) and can_run(candidate, user):
            return candidate
    raise DflashError(
        "The account %r can run no Python here." % (user or DEFAULT_USER),
        "probes",
        "Install the distribution's python3.",
    )


def source_of(module: ModuleType) -> str:
    """The source text of one of our modules, from disk or from the archive that Ansible sends."""
    loader: Any = getattr(module, "__loader__", None)
    text: Optional[str] = loader.get_source(module.__name__) if hasattr(loader, "get_source") else None
    if text is None:
        raise DflashError("The source of %s is not at hand." % module.__name__, "probes")
    return text


def run(
    python: str, program: Sequence[ModuleType], payload: Any, *, user: Optional[str] = None, deadline: float = 60.0
) -> Outcome:
    """Run the modules of ``program`` in order and return what ``main(payload)`` of the last one returns."""
    job = json.dumps({"program": [[module.__name__, source_of(module)] for module in program], "payload": payload})
    argv: List[str] = [python, "-I", "-B", "-c", _BOOT]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=NEUTRAL_FOLDER,
            env=environment(),
            start_new_session=True,
            **account(user),
        )
    except OSError as error:
        return Outcome(None, 127, "%s: %s" % (python, error.strerror or error), False, deadline)
    timed_out = False
    try:
        out, err = process.communicate(job.encode("utf-8"), timeout=deadline)
    except subprocess.TimeoutExpired:
        timed_out = True
        _kill_group(process.pid)
        process.kill()
        out, err = process.communicate()
    try:
        value = json.loads(out.decode("utf-8", "replace")) if out and not timed_out else None
    except ValueError:
        value = None
    return Outcome(value, process.returncode, err.decode("utf-8", "replace")[-4000:], timed_out, deadline)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
