# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Real child processes: who belongs to an instance, who lives, and that every one can be ended."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import process

SLEEP = "import time; time.sleep(60)"
# A server whose engine outlives it, as vLLM's does: the engine has lost the environment that it inherited.
SERVER = """
import os, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", %r], env={}, start_new_session=%s)
print(engine.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python child in its own process group; ends them all."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *, env: dict[str, str] | None = None, cwd: str = "/") -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=env or {}, cwd=cwd, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def wait(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


def instance(folder: Path, name: str = "main") -> str:
    path = folder / "instances" / name
    (path / "run").mkdir(parents=True)
    return str(path)


def pids(found: list[process.Stat]) -> set[int]:
    return {item.pid for item in found}


def test_alive_is_pid_and_start_and_boot(start: Callable[..., Any]) -> None:
    child = start(SLEEP)
    ticks, boot = process.start_ticks(child.pid), process.boot_id()
    assert process.alive(child.pid, ticks, boot)
    assert not process.alive(child.pid, (ticks or 0) + 1, boot), "another process with this number"
    assert not process.alive(child.pid, ticks, "another-boot")
    assert not process.alive(None, ticks, boot)
    assert process.identity(child.pid) == {"pid": child.pid, "start_ticks": ticks, "boot_id": boot}


def test_a_zombie_is_dead(start: Callable[..., Any]) -> None:
    child = start(SLEEP)
    ticks = process.start_ticks(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    wait(lambda: (process.stat(child.pid) or process.Stat(0, "", "", 0, 0, 0, 0, 0)).state == "Z")
    assert not process.alive(child.pid, ticks, process.boot_id())
    assert child.pid not in process.table()


def test_a_name_with_brackets_and_blanks_is_read(tmp_path: Path) -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); "
    code = name + "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = process.stat(child.pid)
        child.kill()
    assert found is not None
    assert (found.name, found.parent) == ("a) R 1 (b", os.getpid())


def test_members_by_marker_by_folder_and_no_others(tmp_path: Path, start: Callable[..., Any]) -> None:
    mine, other = instance(tmp_path), instance(tmp_path, "main.canary")
    marked = start(SLEEP, env={process.MARKER: mine})
    working = start(SLEEP, cwd=mine + "/run")
    foreign = start(SLEEP, env={process.MARKER: other})
    foreign_but_here = start(SLEEP, env={process.MARKER: other}, cwd=mine + "/run")
    unrelated = start(SLEEP)
    assert pids(process.members(mine)) == {marked.pid, working.pid}
    assert pids(process.members(other)) == {foreign.pid, foreign_but_here.pid}
    assert unrelated.pid not in pids(process.members(mine))
    assert pids(process.members(mine, spare=[marked.pid])) == {working.pid}
    assert process.members(mine, uid=os.getuid() + 1) == []


def test_a_person_who_looks_into_the_run_folder_is_no_member(tmp_path: Path) -> None:
    mine = instance(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(mine + "/run")
        os.execve("/bin/sleep", ["sleep", "60"], {})
    try:
        wait(lambda: process.working_folder(pid) == mine + "/run" and (process.stat(pid) or [""])[1] == "sleep")
        assert process.members(mine) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_an_engine_that_outlives_its_server_is_found_by_group(tmp_path: Path, start: Callable[..., Any]) -> None:
    mine = instance(tmp_path)
    server = start(SERVER % (SLEEP, False), env={process.MARKER: mine})
    engine = int(server.stdout.readline())
    leader = process.identity(server.pid)
    assert pids(process.members(mine, leader)) == {server.pid, engine}
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert pids(process.members(mine, leader)) == {engine}
    stale = dict(leader or {}, boot_id="another-boot")
    assert process.members(mine, stale) == []


def test_an_engine_in_its_own_session_is_found_by_descent(tmp_path: Path, start: Callable[..., Any]) -> None:
    mine = instance(tmp_path)
    server = start(SERVER % (SLEEP, True), env={process.MARKER: mine})
    engine = int(server.stdout.readline())
    assert pids(process.members(mine)) == {server.pid, engine}
    os.kill(engine, signal.SIGKILL)


def test_a_recorded_leader_whose_number_was_given_away_leads_nothing(
    tmp_path: Path, start: Callable[..., Any],
) -> None:
    mine = instance(tmp_path)
    stranger = start(SLEEP)
    leader = dict(process.identity(stranger.pid) or {}, start_ticks=1)
    assert process.members(mine, leader) == []


def test_nothing_is_a_member_without_a_sign(tmp_path: Path) -> None:
    """Kernel threads and init are in group 0, which must not read as the group of no leader."""
    mine = instance(tmp_path)
    assert process.members(mine) == []
    for leader in ({}, {"pid": 0, "start_ticks": 0, "boot_id": process.boot_id()}, {"boot_id": process.boot_id()},
                   dict(process.identity(1) or {}), dict(process.identity(2) or {})):
        assert process.members(mine, leader) == []
    init = process.stat(1)
    assert init is not None
    assert not process.send(init, 0)


def test_the_caller_and_its_ancestors_are_never_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = instance(tmp_path)
    monkeypatch.chdir(mine + "/run")
    assert process.members(mine) == []


def test_end_lets_the_server_drain_and_takes_the_rest(tmp_path: Path, start: Callable[..., Any]) -> None:
    mine = instance(tmp_path)
    drains = tmp_path / "drained"
    code = (
        "import signal,sys,time\n"
        "def drain(*_):\n    time.sleep(0.5); open(%r, 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain); print(1, flush=True); time.sleep(60)\n" % str(drains)
    )
    server = start(code, env={process.MARKER: mine})
    server.stdout.readline()
    time.sleep(0.05)
    deaf_code = "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    deaf = start(deaf_code, env={process.MARKER: mine})
    deaf.stdout.readline()
    count, left = process.end(lambda: process.members(mine), timeout=1.5)
    assert (count, left) == (2, [])
    assert drains.exists()
    assert process.members(mine) == []


def test_end_without_processes_is_nothing() -> None:
    assert process.end(lambda: [], timeout=5) == (0, [])


def test_a_signal_never_reaches_a_process_with_a_reused_number(start: Callable[..., Any]) -> None:
    child = start(SLEEP)
    found = process.stat(child.pid)
    assert found is not None
    assert not process.send(found._replace(start_ticks=found.start_ticks + 1), signal.SIGKILL)
    assert child.poll() is None
    assert process.send(found, signal.SIGKILL)
    child.wait()
    assert not process.send(found, signal.SIGKILL)


def test_a_run_folder_is_emptied_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "sub" / "file").write_text("x")
    (run / "link").symlink_to(outside)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(run / "socket"))
    assert process.empty_folder(str(run)) == 3
    assert list(run.iterdir()) == []
    assert (outside / "precious").exists()


def test_shared_memory_goes_only_when_nobody_maps_it(tmp_path: Path, start: Callable[..., Any]) -> None:
    for name in ("psm_mapped", "psm_open", "psm_stale", "sem.mp-stale", "other"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    hold = (
        "import mmap,os,time\n"
        "a = os.open(%r, os.O_RDWR); m = mmap.mmap(a, 4096); os.close(a)\n"
        "b = open(%r)\n"
        "print(1, flush=True); time.sleep(60)\n" % (str(tmp_path / "psm_mapped"), str(tmp_path / "psm_open"))
    )
    holder = start(hold)
    holder.stdout.readline()
    assert process.remove_stale_shared_memory(os.getuid() + 1, str(tmp_path)) == []
    assert process.remove_stale_shared_memory(os.getuid(), str(tmp_path)) == ["psm_stale", "sem.mp-stale"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "psm_mapped", "psm_open"]


def test_who_listens(start: Callable[..., Any]) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); " + SLEEP
    listener = start(code)
    port = int(listener.stdout.readline())
    bystander = start(SLEEP)
    assert process.listener_pids(port) == {listener.pid}
    assert process.listener_pids(port, [bystander.pid]) == set()
    assert process.port_is_listened_on(port)
    listener.kill()
    listener.wait()
    assert not process.port_is_listened_on(port)


def test_mapped_files_and_age(start: Callable[..., Any]) -> None:
    child = start("import zlib, time; print(1, flush=True); time.sleep(60)")
    child.stdout.readline()
    base = os.path.dirname(os.path.realpath(f"/proc/{child.pid}/exe"))
    assert process.holds_files_below(child.pid, base) is True
    assert process.holds_files_below(child.pid, "/nowhere") is False
    assert process.holds_files_below(2**22 + 1, "/nowhere") is None
    age = process.age(child.pid)
    assert age is not None and 0 <= age < 30
    assert process.age(2**22 + 1) is None
