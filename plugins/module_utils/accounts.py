# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Who runs what: an account by name, and child processes that run as it and as nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


@dataclass(frozen=True)
class Account:
    """An account of this host."""

    name: str
    uid: int
    gid: int

    @property
    def is_root(self) -> bool:
        return self.uid == 0


def caller() -> Account:
    """The account that runs this process."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Account(name, uid, os.getegid())


def worker(user: Optional[str]) -> Account:
    """The account that clone, build, probes and server run as.

    Called by root it is ``user``, which must exist and must not be root.  Called by anyone else it
    is the caller: an ordinary account cannot become another one.
    """
    me = caller()
    if not me.is_root:
        return me
    if not user:
        raise DflashError(
            "This runs as root and no account is named for what must not run as root",
            "dflash_service_user", "Name an unprivileged account in dflash_service_user.",
        )
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise DflashError(
            "There is no account %s on this host" % user,
            "dflash_service_user", "Create it, or name another unprivileged account.",
        ) from None
    if entry.pw_uid == 0:
        raise DflashError(
            "Foreign code never runs as root, and %s is root" % user,
            "dflash_service_user", "Name an unprivileged account in dflash_service_user.",
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def drop_to(account: Account) -> Dict[str, Any]:
    """Arguments for ``subprocess`` that make the child run as ``account``; empty where it does already."""
    if account.uid == os.geteuid():
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def owner_of(account: Account) -> Optional[Tuple[int, int]]:
    """``(uid, gid)`` to give a file to, or None where the file is the account's already."""
    return None if account.uid == os.geteuid() else (account.uid, account.gid)


@contextlib.contextmanager
def acting_as(account: Account) -> Iterator[None]:
    """Files are made, read and renamed as ``account`` inside; a folder of its own then holds no trap for root."""
    if account.uid == os.geteuid():
        yield
        return
    groups = os.getgroups()
    gid = os.getegid()
    os.setgroups([])
    os.setegid(account.gid)
    os.seteuid(account.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def as_child(account: Account, act: Callable[[], Any]) -> Any:
    """Run ``act`` in a forked child that is ``account`` for good; gives what it returns (a JSON value).

    For work that writes files and starts programs: unlike ``acting_as`` nothing of root is left to
    regain.  DflashError passes through; anything else becomes one.
    """
    if account.uid == os.geteuid():
        return act()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setresgid(account.gid, account.gid, account.gid)
            os.setresuid(account.uid, account.uid, account.uid)
            os.umask(0o022)
            os.chdir("/")
            try:
                answer = {"value": act()}
            except DflashError as error:
                answer = {"error": [error.what, error.where, error.fix]}
            except OSError as error:
                answer = {"error": ["%s: %s" % (error.strerror or error, error.filename or ""), None, None]}
            with os.fdopen(writer, "w", encoding="utf-8") as handle:
                json.dump(answer, handle)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as handle:
        text = handle.read()
    _pid, status = os.waitpid(pid, 0)
    if status or not text:
        raise DflashError("A step that runs as %s ended without an answer (status %d)" % (account.name, status))
    answer = json.loads(text)
    if "error" in answer:
        raise DflashError(*answer["error"])
    return answer["value"]


def make_folder(path: str, account: Optional[Account] = None, mode: int = 0o755) -> bool:
    """A folder of ``account`` (default: the caller); says whether it was made or changed."""
    changed = False
    try:
        os.makedirs(path, mode)
        changed = True
    except FileExistsError:
        pass
    stat = os.stat(path)
    if stat.st_mode & 0o7777 != mode and os.geteuid() in (0, stat.st_uid):
        os.chmod(path, mode)
        changed = True
    owner = owner_of(account) if account else None
    if owner and (stat.st_uid, stat.st_gid) != owner:
        os.chown(path, owner[0], owner[1])
        changed = True
    return changed


def can_run(python: str, account: Account) -> bool:
    """Whether ``account`` can run this interpreter, and it is the one it claims to be."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", "import venv, sys; print(sys.version_info[0])"], capture_output=True, cwd="/",
            timeout=30, stdin=subprocess.DEVNULL, **drop_to(account),
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and done.stdout.strip() == b"3"


def find_python(account: Account, wanted: Iterable[str] = ()) -> str:
    """The first interpreter that ``account`` can run: a user's own Python often lies under a closed home."""
    import sys  # only here: the rest of the file does not depend on which Python runs it

    seen: List[str] = []
    for name in [*wanted, sys.executable, "/usr/bin/python3", "/usr/libexec/platform-python", "python3"]:
        path = shutil.which(name) if name else None
        if not path or path in seen:
            continue
        seen.append(path)
        if can_run(path, account):
            return path
    raise DflashError(
        "No Python that the account %s can run (tried %s)" % (account.name, ", ".join(seen) or "nothing"),
        "dflash_toolchain", "Install the distribution's python3 and python3-venv.",
    )


def run(argv: Sequence[str], account: Account, env: Mapping[str, str], cwd: str = "/",
        timeout: Optional[float] = None) -> subprocess.CompletedProcess[str]:
    """Run to the end as ``account`` with exactly this environment; output is text, stdin is closed."""
    return subprocess.run(
        list(argv), env=dict(env), cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", check=False, **drop_to(account),
    )
