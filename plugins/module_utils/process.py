# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to an instance, whether they live, and how to end every one of them.

This file stands alone (standard library, no import of the collection): it is also put on the host
beside ``launcher.py``, which runs where the collection is not installed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

#: The environment variable that every process of an instance inherits; its value is the instance's folder.
MARKER = "DFLASH_INSTANCE"
INIT = 1
SHM = "/dev/shm"
#: Python's shared memory and its named semaphores.
SHM_PREFIXES = ("psm_", "sem.mp-")


class Stat(NamedTuple):
    """What ``/proc/<pid>/stat`` and its owner say of one process."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    terminal: int
    start_ticks: int
    uid: int


def boot_id() -> str:
    """The kernel's identity of this boot, "" where it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def stat(pid: int) -> Optional[Stat]:
    """The process's facts, or None when there is none.  The name may hold blanks and brackets."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as handle:
            text = handle.read()
        owner = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    head, _bracket, tail = text.rpartition(")")
    fields = tail.split()
    # Field 3 of the manual page (state) is fields[0]; start time is field 22.
    parent, group, terminal, ticks = (int(fields[place]) for place in (1, 2, 4, 19))
    return Stat(pid, head.partition("(")[2], fields[0], parent, group, terminal, ticks, owner)


def start_ticks(pid: int) -> Optional[int]:
    """Clock ticks between boot and the start of the process, or None when there is no such process."""
    found = stat(pid)
    return None if found is None else found.start_ticks


def alive(pid: Optional[int], ticks: Optional[int], boot: Optional[str]) -> bool:
    """Does exactly this process live?  A reused pid, a zombie and another boot all mean no."""
    if not isinstance(pid, int) or not isinstance(ticks, int) or pid <= 0 or boot != boot_id():
        return False
    found = stat(pid)
    return found is not None and found.state not in ("Z", "X", "x") and found.start_ticks == ticks


def age(pid: int) -> Optional[float]:
    """Seconds since the process started, or None when there is none; no clock change matters."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    with open("/proc/uptime", encoding="ascii") as handle:
        uptime = float(handle.read().split()[0])
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def identity(pid: int) -> Optional[Dict[str, object]]:
    """``{pid, start_ticks, boot_id}`` of a process, or None when there is none."""
    ticks = start_ticks(pid)
    return None if ticks is None else {"pid": pid, "start_ticks": ticks, "boot_id": boot_id()}


def table() -> Dict[int, Stat]:
    """Every process that can be seen and is not a zombie."""
    out = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = stat(int(name))
            if found is not None and found.state not in ("Z", "X", "x"):
                out[found.pid] = found
    return out


def marker(pid: int) -> Optional[str]:
    """The instance folder that the process was started for, None where its environment does not say or is closed.

    A process that rewrites its title overwrites its environment too, hence the other signs in ``members``.
    """
    try:
        with open("/proc/%d/environ" % pid, "rb") as handle:
            entries = handle.read().split(b"\0")
    except OSError:
        return None
    wanted = MARKER.encode("ascii") + b"="
    for entry in entries:
        if entry.startswith(wanted):
            return os.fsdecode(entry[len(wanted):])
    return None


def working_folder(pid: int) -> Optional[str]:
    """The process's working folder, None where it cannot be read."""
    try:
        return os.readlink("/proc/%d/cwd" % pid)
    except OSError:
        return None


def _ancestors(pid: int, processes: Dict[int, Stat]) -> Set[int]:
    out: Set[int] = set()
    while pid in processes and pid not in out:
        out.add(pid)
        pid = processes[pid].parent
    return out


def members(
    instance: str, leader: Optional[Dict[str, object]] = None, uid: Optional[int] = None, spare: Iterable[int] = (),
) -> List[Stat]:
    """All living processes of an instance, the oldest first.

    ``instance`` is the instance's folder.  A process is a member when its environment names the
    folder, when it works in the folder's ``run/`` and has no terminal (a shell there is a person
    looking around), when it is in the process group of ``leader`` (``{pid, start_ticks, boot_id}``
    as written in run.json), or when it descends from a member.
    One that names another instance is none.  ``uid`` restricts to that account: run.json is
    written by the service account, so a root caller must not act on whatever pid it names.
    ``spare`` and the caller with its ancestors are never members.
    """
    # Init, the kernel's threads and what was started from outside a container have group 0 and are nobody's.
    processes = {pid: item for pid, item in table().items() if pid > INIT and item.group > 0}
    folder = os.path.realpath(instance)
    run_folder = os.path.join(folder, "run")
    outside = set(spare) | _ancestors(os.getpid(), processes)
    group = _group(leader, processes)
    chosen: Set[int] = set()
    foreign: Set[int] = set()
    for pid, found in processes.items():
        if pid in outside or (uid is not None and found.uid != uid):
            continue
        named = marker(pid)
        if named is not None:
            (chosen if os.path.realpath(named) == folder else foreign).add(pid)
        elif (group is not None and found.group == group) or (not found.terminal and working_folder(pid) == run_folder):
            chosen.add(pid)
    grown = True
    while grown:
        grown = False
        for pid, found in processes.items():
            if pid in chosen or pid in outside or pid in foreign or (uid is not None and found.uid != uid):
                continue
            if found.parent in chosen:
                chosen.add(pid)
                grown = True
    return sorted((processes[pid] for pid in chosen), key=lambda item: (item.start_ticks, item.pid))


def _group(leader: Optional[Dict[str, object]], processes: Dict[int, Stat]) -> Optional[int]:
    """The process group of a recorded leader, None when it cannot be the recorded one any more."""
    if not leader or leader.get("boot_id") != boot_id():
        return None
    try:
        pid, ticks = int(str(leader["pid"])), int(str(leader["start_ticks"]))
    except (KeyError, ValueError):
        return None
    found = processes.get(pid)
    if found is not None and found.start_ticks != ticks:
        return None  # the number was given to another process; the kernel does so only when the group is gone
    return pid if pid > INIT else None


def send(item: Stat, number: int) -> bool:
    """Signal exactly this process, never another that got its number; says whether it was there."""
    if item.pid <= INIT:
        return False
    opener = getattr(os, "pidfd_open", None)
    sender = getattr(signal, "pidfd_send_signal", None)
    try:
        if opener is None or sender is None:
            if start_ticks(item.pid) == item.start_ticks:
                os.kill(item.pid, number)
                return True
            return False
        handle = opener(item.pid)
        try:
            if start_ticks(item.pid) != item.start_ticks:
                return False
            sender(handle, number)
            return True
        finally:
            os.close(handle)
    except ProcessLookupError:
        return False
    except OSError:
        # pidfd is refused in some sandboxes: fall back to the number, checked just before.
        if start_ticks(item.pid) != item.start_ticks:
            return False
        try:
            os.kill(item.pid, number)
        except OSError:
            return False
        return True


def end(find: Callable[[], List[Stat]], timeout: float, kill_wait: float = 10.0) -> Tuple[int, List[Stat]]:
    """End every process that ``find`` returns: TERM to the oldest, a wait for its drain, TERM to the rest, KILL.

    The oldest is the server, which drains and ends its own children; a signal to an engine would
    cut the requests it still answers.  Returns how many there were and those that nothing could
    end (a process in uninterruptible sleep): then only a reboot helps.
    """
    found = find()
    seen = {(item.pid, item.start_ticks) for item in found}
    if not found:
        return 0, []
    send(found[0], signal.SIGTERM)
    leader = (found[0].pid, found[0].start_ticks)
    limit = time.monotonic() + timeout
    told_all: Optional[float] = None
    while found and time.monotonic() < limit:
        found = find()
        now = {(item.pid, item.start_ticks) for item in found}
        seen |= now
        if found and leader not in now and told_all is None:
            told_all = time.monotonic()
            for item in found:
                send(item, signal.SIGTERM)
        if found and told_all is not None and time.monotonic() - told_all > min(5.0, timeout):
            break
        if found:
            time.sleep(0.1)
    limit = time.monotonic() + kill_wait
    while found and time.monotonic() < limit:
        for item in found:
            send(item, signal.SIGKILL)
        time.sleep(0.05)
        found = find()
        seen |= {(item.pid, item.start_ticks) for item in found}
    return len(seen), found


def empty_folder(path: str) -> int:
    """Remove what lies in a folder, not the folder; symbolic links are removed, never followed.  Counts entries."""
    count = 0
    for entry in sorted(os.scandir(path), key=lambda item: item.name):
        if entry.is_dir(follow_symlinks=False):
            empty_folder(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)
        count += 1
    return count


def mapped_inodes(folder: str = SHM) -> Set[int]:
    """Inodes below ``folder`` that a living process maps or holds open, as far as this account may look.

    Inodes and not names: a named semaphore is mapped under a temporary name before it is linked to its own.
    """
    inodes: Set[int] = set()
    prefix = folder + "/"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/maps" % name, encoding="utf-8", errors="replace") as handle:
                inodes.update(int(line.split(None, 5)[4]) for line in handle if prefix in line)
            for number in os.listdir("/proc/%s/fd" % name):
                place = "/proc/%s/fd/%s" % (name, number)
                if os.readlink(place).startswith(prefix):
                    inodes.add(os.stat(place).st_ino)
        except OSError:
            continue
    return inodes


def remove_stale_shared_memory(uid: int, folder: str = SHM) -> List[str]:
    """Remove the account's shared memory that no living process maps (SIGKILL leaves 400 MB each); names it."""
    own: Dict[str, int] = {}
    try:
        for entry in os.scandir(folder):
            if entry.name.startswith(SHM_PREFIXES) and entry.is_file(follow_symlinks=False):
                info = entry.stat(follow_symlinks=False)
                if info.st_uid == uid:
                    own[entry.name] = info.st_ino
    except OSError:
        return []
    if not own:
        return []
    used = mapped_inodes(folder)
    gone = []
    for name in sorted(name for name, inode in own.items() if inode not in used):
        try:
            os.unlink(os.path.join(folder, name))
            gone.append(name)
        except OSError:
            continue
    return gone


def holds_files_below(pid: int, folder: str) -> Optional[bool]:
    """Does the process map a file below ``folder``?  None where its maps cannot be read."""
    prefix = os.path.realpath(folder) + "/"
    try:
        with open("/proc/%d/maps" % pid, encoding="utf-8", errors="replace") as handle:
            return any(prefix in line for line in handle)
    except OSError:
        return None


def listener_pids(port: int, candidates: Optional[Iterable[int]] = None) -> Set[int]:
    """Processes that hold a listening TCP socket of the port; ``candidates`` limits who is looked at."""
    inodes = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as handle:
                lines = handle.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % fields[9])
    out: Set[int] = set()
    if not inodes:
        return out
    for pid in list(candidates) if candidates is not None else [int(n) for n in os.listdir("/proc") if n.isdigit()]:
        try:
            for name in os.listdir("/proc/%d/fd" % pid):
                if os.readlink("/proc/%d/fd/%s" % (pid, name)) in inodes:
                    out.add(pid)
                    break
        except OSError:
            continue
    return out


def port_is_listened_on(port: int) -> bool:
    """Does anybody listen on this TCP port?  Needs no right to look into other processes."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as handle:
                for line in handle.read().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                        return True
        except OSError:
            continue
    return False
