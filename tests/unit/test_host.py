# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a host says of itself, read from the files and tools of many hosts."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import accounts, host
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


@pytest.fixture
def files(monkeypatch):
    """Files of another host, by path; what is not named is absent."""
    found: dict[str, str] = {}
    monkeypatch.setattr(host, "_text", lambda path: found.get(path, ""))
    return found


# ---------------------------------------------------------------- Python
def test_this_python_is_asked(tmp_path):
    found = host.python(sys.executable, accounts.caller())
    assert found["path"] == sys.executable
    assert found["version"] == platform.python_version()
    assert found["tag"] == "cp%d%d" % sys.version_info[:2]
    assert found["platform"] == "linux_x86_64"
    assert found["glibc"] == os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    assert found["venv"] is True


def script(folder: Any, text: str, name: str = "python9") -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("output", "glibc", "venv"),
    [
        ("3.9.1\ncp39\nlinux_x86_64\nglibc 2.28\nvenv\n", "2.28", True),
        ("3.9.1\ncp39\nlinux_x86_64\nglibc 2.28\n", "2.28", False),  # a distribution's Python without python3-venv
        ("3.9.1\ncp39\nlinux_x86_64\n \nvenv\n", "", True),  # musl
    ],
)
def test_what_another_python_answers(tmp_path, output, glibc, venv):
    path = script(tmp_path, "printf %%s '%s'\necho noise >&2\nexit 1\n" % output)
    assert host.python(path, accounts.caller()) == {
        "path": path, "version": "3.9.1", "tag": "cp39", "platform": "linux_x86_64", "glibc": glibc, "venv": venv,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo first >&2; echo 'pyenv: not installed' >&2; exit 127",
         "cannot run the Python {path}: pyenv: not installed"),
        ("exit 1", "cannot run the Python {path}: no answer"),
        ("echo 3.9.1", "cannot run the Python {path}: no answer"),
    ],
)
def test_a_python_that_does_not_run(tmp_path, text, sentence):
    path = script(tmp_path, text)
    with pytest.raises(DflashError) as caught:
        host.python(path, accounts.caller())
    assert sentence.format(path=path) in caught.value.what and caught.value.where == path
    assert "python9-venv" in caught.value.fix and "vllm_toolchain_python" in caught.value.fix


def test_a_python_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(DflashError, match="there is no Python /nowhere/python9") as caught:
        host.python("/nowhere/python9", accounts.caller())
    assert caught.value.where == "/nowhere/python9"
    with pytest.raises(DflashError, match="there is no Python python99") as caught:
        host.python("python99", accounts.caller())
    assert caught.value.where == host.SEARCH
    monkeypatch.setattr(host, "SEARCH", str(tmp_path))
    script(tmp_path, "printf '3.9.1\\ncp39\\nl\\nglibc 2.28\\n'")
    assert host.python("python9", accounts.caller())["path"] == str(tmp_path / "python9")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), subprocess.TimeoutExpired("python", 60)])
def test_a_python_that_the_account_cannot_start(tmp_path, monkeypatch, error):
    seen: dict[str, Any] = {}

    def run(argv, **options):
        seen.update(options, argv=argv)
        raise error

    monkeypatch.setattr(host.subprocess, "run", run)
    with pytest.raises(DflashError, match="the account dflash cannot run the Python"):
        host.python(script(tmp_path, ""), accounts.Account("dflash", 4242, 4243))
    assert (seen["user"], seen["group"], seen["extra_groups"]) == (4242, 4243, [])
    assert seen["argv"][1] == "-I" and seen["cwd"] == "/"  # nothing of the caller's folder or environment answers


# ---------------------------------------------------------------- GPUs
@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", ""),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x@y)  Tue\n",
         "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82  Wed\nGCC version:  gcc version 12.2.0\n", "470.82"),
        ("GCC version:  gcc version 12.2.0 (Debian)\n", ""),
    ],
)
def test_driver(files, text, version):
    files["/proc/driver/nvidia/version"] = text
    assert host.driver() == version


def test_gpus_and_their_partitions(files, monkeypatch):
    cards = ["/proc/driver/nvidia/gpus/0000:%s:00.0/information" % bus for bus in ("0b", "0a", "0c")]
    files.update({cards[1]: "Model: H200\nGPU UUID: \t GPU-a\nBus\n", cards[0]: "GPU UUID: GPU-b\n",
     cards[2]: "Model: x\n"})
    parts = ["/proc/driver/nvidia/capabilities/gpu0/mig/gi%d" % number for number in (2, 1)]
    monkeypatch.setattr(host.glob, "glob", lambda pattern: list(cards if "/gpus/" in pattern else parts))
    assert host.gpus() == ["GPU-a", "GPU-b", "mig:gpu0/mig/gi1", "mig:gpu0/mig/gi2"]


def test_a_host_without_gpus(files, monkeypatch):
    monkeypatch.setattr(host.glob, "glob", lambda _pattern: [])
    assert host.gpus() == []
    files["/etc/machine-id"] = "abc\n"
    assert host.identity() == {"machine_id": "abc", "driver": "", "gpus": []}
    del files["/etc/machine-id"]
    assert host.identity()["machine_id"] == socket.gethostname()


@pytest.mark.parametrize(
    ("tool", "output", "found"),
    [
        (None, "", []),
        ("nvidia-smi", "9.0\n9.0\n", ["9.0", "9.0"]),
        ("nvidia-smi", "12.0 \n\n", ["12.0"]),
        ("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ("nvidia-smi", OSError("no"), []),
        ("nvidia-smi", subprocess.TimeoutExpired("nvidia-smi", 60), []),
    ],
)
def test_compute_capabilities(monkeypatch, tool, output, found):
    def run(argv, **_options):
        assert argv[0] == tool
        if isinstance(output, Exception):
            raise output
        return subprocess.CompletedProcess(argv, 9, output, "")

    monkeypatch.setattr(host.shutil, "which", lambda _name: tool)
    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.compute_capabilities() == found


# ---------------------------------------------------------------- processor, memory, disk
def test_cpu_flags_are_those_of_the_first_processor(files):
    assert host.cpu_flags() == []
    files["/proc/cpuinfo"] = "processor: 0\nvmx flags\t: vnmi\nflags\t\t: fpu avx2\n\nprocessor: 1\nflags\t: fpu\n"
    assert host.cpu_flags() == ["fpu", "avx2"]


MEMINFO = "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "gib"),
    [
        (MEMINFO, "", "", 4.0),
        (MEMINFO, "max\n", "1073741824\n", 4.0),
        (MEMINFO, "3221225472\n", "1073741824\n", 2.0),  # a container's limit, less what it has taken
        (MEMINFO, "3221225472\n", "", 3.0),
        (MEMINFO, "34359738368\n", "0\n", 4.0),  # a limit above what the machine has
        ("", "", "", 0.0),
    ],
)
def test_memory(files, meminfo, limit, used, gib):
    files.update(
        {"/proc/meminfo": meminfo, "/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": used}
    )
    assert host.memory_gib() == gib


def test_disk_is_measured_where_the_root_will_be(tmp_path, monkeypatch):
    asked = []

    def statvfs(path):
        asked.append(path)
        return type("Info", (), {"f_bavail": 3 << 18, "f_bfree": 9 << 18, "f_frsize": 4096})

    monkeypatch.setattr(host.os, "statvfs", statvfs)
    assert host.disk_gib(str(tmp_path / "a" / "b")) == 3.0
    assert asked == [str(tmp_path)]


@pytest.mark.parametrize(("path", "parent"), [("/", "/"), ("/nowhere/at/all", "/"), ("/proc/self/none", "/proc/self")])
def test_existing_parent(path, parent):
    assert host.existing_parent(path) == parent


MOUNTS = """\
/dev/a / ext4 rw,relatime 0 0
/dev/b {0}/srv ext4 rw,noexec 0 0
/dev/c {0}/srv/my\\040data xfs ro 0 0
/dev/d {0}/over ext4 rw 0 0
tmpfs {0}/over tmpfs rw,nosuid 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/none", ["rw", "relatime"]),
        ("{0}/srv", ["rw", "noexec"]),
        ("{0}/srv/deep/er", ["rw", "noexec"]),
        ("{0}/srv/my data/d", ["ro"]),
        ("{0}/srv2", ["rw", "relatime"]),  # begins alike, is another folder
        ("{0}/over", ["rw", "nosuid"]),  # the later mount lies on top
        ("{0}/link/d", ["rw", "noexec"]),
    ],
)
def test_mount_options(files, tmp_path, path, options):
    for name in ("srv/my data", "srv2", "over"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("srv")
    files["/proc/self/mounts"] = MOUNTS.format(tmp_path)
    assert host.mount_options(path.format(tmp_path)) == options


# ---------------------------------------------------------------- ports
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_who_holds_a_port(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no " + address)
        port = server.getsockname()[1]
        server.listen()
        assert host.port_holder(address, port).startswith("pid %d (" % os.getpid())
    assert host.port_holder(address, port) is None


def test_a_port_that_nobody_seems_to_hold_is_still_taken(monkeypatch):
    monkeypatch.setattr(host.process, "listener_pids", lambda _port: set())
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert host.port_holder("127.0.0.1", server.getsockname()[1]) == "Address already in use"


def test_a_free_port_can_be_bound():
    assert host.port_holder("127.0.0.1", host.free_port()) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n', "Debian GNU/Linux 12 (bookworm)"),
        ("PRETTY_NAME=Alpine\n", "Alpine"),
        ("", ""),
    ],
)
def test_system(files, text, name):
    files["/etc/os-release"] = text
    assert host.system() == {"system": platform.system(), "machine": platform.machine(), "os": name}


def test_what_cannot_be_read_is_empty(tmp_path):
    (tmp_path / "f").write_bytes(b"a\xff\n")
    assert host._text(str(tmp_path / "f")) == "a\ufffd\n"
    assert host._text(str(tmp_path / "none")) == host._text(str(tmp_path)) == ""
