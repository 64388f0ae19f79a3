# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which facts of a host stand against a deployment; and that they are gathered in one go."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import accounts, checks, host, preflight, process, vocabulary
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

PYTHON = {"path": "/usr/bin/python3", "version": "3.11.2", "glibc": "2.36", "venv": True}
FACTS: dict[str, Any] = {
    "system": "Linux", "machine": "x86_64", "os": "Debian", "python": PYTHON, "python_error": "", "account": "dflash",
    "root": "/opt/dflash", "root_problem": "", "mount_options": ["rw", "relatime"],
    "cpu_flags": ["sse", "avx2", "avx512f"],
    "tools": ["git", "gcc", "cc"], "headers": True, "memory_gib": 32.0, "disk_gib": 100.0, "port": 8000,
    "port_holder": None,
    "source_repo": "https://example.org/r", "source_problem": "", "compute_capabilities": ["9.0", "9.0"],
    "driver": "580.65.06",
}


def judge(device: str = "cuda", **change: Any) -> dict[str, dict[str, Any]]:
    found = preflight.judge({**FACTS, **change}, device, 60.0, 16.0)
    assert len({item["id"] for item in found}) == len(found)
    return {item["id"]: item for item in found}


def test_a_good_host_passes_every_check_of_its_device():
    every = {name for name in vocabulary.CHECKS if name.startswith("host.")}
    cuda, cpu = judge(), judge("cpu")
    assert set(cuda) == every - {"host.cpu_flags"}
    assert set(cpu) == every - {"host.gpu", "host.driver", "host.headers"}
    assert set(judge(source_repo="")) == set(cuda) - {"host.source"}  # no build, no repository
    for item in [*cuda.values(), *cpu.values()]:
        assert item["status"] == "pass" and item["hint"] == "" and item["level"] == "required", item


CASES = [
    # id, device, facts, what is found
    ("host.platform", "cpu", {"machine": "aarch64"}, "Linux aarch64, glibc 2.36"),
    ("host.platform", "cpu", {"system": "Darwin"}, "Darwin x86_64, glibc 2.36"),
    ("host.platform", "cpu", {"python": {**PYTHON, "glibc": "2.27"}}, "Linux x86_64, glibc 2.27"),
    ("host.platform", "cpu", {"python": {**PYTHON, "glibc": ""}}, "Linux x86_64, glibc unknown"),  # musl
    ("host.root", "cpu", {"root_problem": "belongs to uid 7"}, "belongs to uid 7"),
    ("host.root", "cpu", {"root": "/" + "r" * 40}, "41 characters long"),
    ("host.root", "cpu", {"mount_options": ["rw", "noexec"]}, "on a mount with noexec"),
    ("host.python", "cpu", {"python": None, "python_error": "there is no Python python3"},
     "there is no Python python3"),
    ("host.python", "cpu", {"python": {**PYTHON, "venv": False}}, "/usr/bin/python3 3.11.2, without venv"),
    ("host.tools", "cpu", {"tools": ["gcc"]}, "gcc"),
    ("host.tools", "cuda", {"tools": []}, "none"),
    ("host.cpu_flags", "cpu", {"cpu_flags": ["sse", "avx"]}, "avx"),
    ("host.cpu_flags", "cpu", {"cpu_flags": []}, "none"),
    ("host.memory", "cpu", {"memory_gib": 15.9}, "15.9 GiB"),
    ("host.disk", "cpu", {"disk_gib": 59.9}, "59.9 GiB"),
    ("host.port", "cpu", {"port_holder": "pid 7 (nginx)"}, "pid 7 (nginx)"),
    ("host.source", "cpu", {"source_problem": "fatal: no"}, "fatal: no"),
    ("host.gpu", "cuda", {"compute_capabilities": []}, "none"),
    ("host.gpu", "cuda", {"compute_capabilities": ["9.0", "7.0"]}, "9.0, 7.0"),
    ("host.driver", "cuda", {"driver": ""}, "none"),
    ("host.driver", "cuda", {"driver": "579.99"}, "579.99"),
    ("host.headers", "cuda", {"headers": False}, "compiler there, Python.h missing"),
    ("host.headers", "cuda", {"tools": ["git"]}, "compiler missing, Python.h there"),
]


@pytest.mark.parametrize(("check_id", "device", "change", "actual"), CASES)
def test_each_failure_is_one_check_with_what_was_found(check_id, device, change, actual):
    found = judge(device, **change)
    failed = [name for name, item in found.items() if item["status"] != "pass"]
    assert check_id in failed and set(failed) <= {check_id, "host.headers"}
    assert found[check_id]["status"] == "fail" and found[check_id]["actual"] == actual
    assert found[check_id]["hint"] == vocabulary.CHECKS[check_id]["remedy"]
    assert checks.blocking(found.values())


def test_every_check_can_fail():
    assert {case[0] for case in CASES} == {name for name in vocabulary.CHECKS if name.startswith("host.")}


@pytest.mark.parametrize(
    ("device", "change"),
    [
        ("cpu", {"python": {**PYTHON, "glibc": "2.28"}}),
        ("cpu", {"root": "/" + "r" * 39}),
        ("cpu", {"memory_gib": 16.0, "disk_gib": 60.0}),
        ("cpu", {"compute_capabilities": [], "driver": "", "headers": False}),
        ("cuda", {"cpu_flags": []}),
        ("cuda", {"compute_capabilities": ["7.5"], "driver": "580.1"}),
        ("cuda", {"tools": ["git", "cc"]}),
        ("cuda", {"driver": "1000.2"}),
    ],
)
def test_what_just_suffices(device, change):
    assert {item["status"] for item in judge(device, **change).values()} == {"pass"}


def test_without_python_the_platform_is_judged_by_the_rest():
    assert judge(python=None, python_error="none")["host.platform"]["status"] == "pass"
    assert judge(python=None, python_error="none", machine="arm64")["host.platform"]["status"] == "fail"


def test_bounds_are_those_that_were_given():
    found = {item["id"]: item for item in preflight.judge(FACTS, "cpu", 100.5, 32.5)}
    assert found["host.disk"]["status"] == found["host.memory"]["status"] == "fail"
    assert found["host.disk"]["expected"] == ">= 100.5 GiB at /opt/dflash"


# ---------------------------------------------------------------- root
@pytest.fixture
def open_folder(tmp_path, monkeypatch):
    """A folder whose parents let the service account pass."""
    monkeypatch.setattr(preflight, "_parents", lambda path: [path, os.path.dirname(path)])
    tmp_path.chmod(0o755)
    return tmp_path


def test_a_root_that_can_be_made_or_used(open_folder):
    assert preflight.root_problem(str(open_folder / "d")) == ""
    (open_folder / "d").mkdir(mode=0o755)
    assert preflight.root_problem(str(open_folder / "d")) == ""


def test_a_root_that_cannot_be_used(open_folder, monkeypatch):
    (open_folder / "d").mkdir(mode=0o755)
    (open_folder / "link").symlink_to("d")
    assert preflight.root_problem(str(open_folder / "link")).endswith("link is a symbolic link")
    with monkeypatch.context() as patch:
        patch.setattr(preflight.os, "geteuid", lambda: 54321)
        assert "belongs to uid %d, not to this account (uid 54321)" % os.getuid() in preflight.root_problem(
            str(open_folder / "d")
        )
    with monkeypatch.context() as patch:
        patch.setattr(preflight.os, "access", lambda _path, _mode: False)
        assert "no permission in %s" % open_folder in preflight.root_problem(str(open_folder / "new" / "d"))


@pytest.mark.parametrize(("uid", "told"), [(0, True), (None, False)])
def test_a_closed_folder_is_a_problem_for_the_account_that_root_drops_to(open_folder, monkeypatch, uid, told):
    (open_folder / "d").mkdir(mode=0o750)
    (open_folder / "d").chmod(0o750)
    owner = os.stat(open_folder / "d").st_uid
    real = os.stat
    if uid is None:  # an ordinary account uses what is its own
        monkeypatch.setattr(preflight.os, "geteuid", lambda: 54321)
        monkeypatch.setattr(
            preflight.os, "stat",
            lambda path, **more: os.stat_result((real(path).st_mode, 0, 0, 1, 54321, 0, 0, 0, 0, 0)),
        )
    elif owner:
        pytest.skip("needs root")
    problem = preflight.root_problem(str(open_folder / "d"))
    assert ("the service account cannot enter %s (mode 750)" % (open_folder / "d") == problem) == told
    assert bool(problem) == told


def test_every_parent_counts():
    assert preflight._parents("/a/b/c") == ["/a/b/c", "/a/b", "/a"]


# ---------------------------------------------------------------- source
@pytest.fixture
def answer(monkeypatch):
    """What git does instead, and how it was called."""
    seen: dict[str, Any] = {"returncode": 0, "stderr": "", "error": None}

    def run(argv, **options):
        if seen["error"]:
            raise seen["error"]
        with open(os.path.join(options["env"]["HOME"], ".gitconfig"), encoding="utf-8") as handle:
            seen.update(argv=argv, options=options, config=handle.read())
        return subprocess.CompletedProcess(argv, seen["returncode"], "", seen["stderr"])

    monkeypatch.setattr(preflight.subprocess, "run", run)
    return seen


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"returncode": 128, "stderr": "\nfatal: not found\nmore\n"}, "fatal: not found"),
        ({"returncode": 1}, "git ls-remote failed"),
        ({"error": subprocess.TimeoutExpired("git", 3)}, "no answer within 3 s"),
        ({"error": PermissionError(13, "Permission denied")}, "Permission denied"),
    ],
)
def test_what_git_says_of_the_repository(answer, change, problem):
    answer.update(change)
    assert problem in preflight.source_problem("r", accounts.caller(), 3.0)
    assert bool(problem) == bool(preflight.source_problem("r", accounts.caller(), 3.0))


def test_git_is_asked_without_the_callers_secrets_and_never_waits_for_a_person(answer, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setenv("GIT_SSL_CAINFO", "/ca")
    assert preflight.source_problem("https://example.org/r", accounts.caller(), 3.0) == ""
    env = answer["options"]["env"]
    assert env["https_proxy"] == "http://proxy" and env["GIT_SSL_CAINFO"] == "/ca" and env["GIT_TERMINAL_PROMPT"] == "0"
    assert "AWS_SECRET_ACCESS_KEY" not in env and env["HOME"] != os.environ.get("HOME")
    assert answer["argv"][1:] == ["ls-remote", "--quiet", "--heads", "https://example.org/r"]
    assert answer["options"]["timeout"] == 3.0 and "directory = *" in answer["config"]
    assert not os.path.exists(env["HOME"])


def test_without_git_nothing_can_be_asked(monkeypatch):
    monkeypatch.setattr(preflight.shutil, "which", lambda *_args, **_more: None)
    assert preflight.source_problem("r", accounts.caller(), 3.0) == "git is not installed"


# ---------------------------------------------------------------- gather
@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(host, "python", lambda _name, _account: dict(PYTHON))
    monkeypatch.setattr(host, "compute_capabilities", list)
    monkeypatch.setattr(preflight, "source_problem", lambda *_args: "asked")
    monkeypatch.setattr(accounts, "worker", lambda _user: accounts.caller())


def test_facts_of_this_host_can_be_judged(quiet, tmp_path):
    facts = preflight.gather(str(tmp_path), "nobody", "python3", "127.0.0.1", host.free_port(), "main")
    assert set(FACTS) <= set(facts)
    assert facts["port_holder"] is None and facts["source_problem"] == "" and facts["missing_account"] == ""
    assert {item["id"] for item in preflight.judge(facts, "cpu", 0.0, 0.0)} >= {"host.root", "host.port"}


def test_the_repository_is_asked_for_only_where_a_build_is_needed(quiet, tmp_path):
    facts = preflight.gather(str(tmp_path), "nobody", "python3", "127.0.0.1", host.free_port(), "main", "https://r")
    assert facts["source_problem"] == "asked"


def test_a_missing_account_or_python_is_a_fact_and_no_end(quiet, tmp_path, monkeypatch):
    def refuse(*_args):
        raise DflashError("there is none")

    monkeypatch.setattr(accounts, "worker", refuse)
    monkeypatch.setattr(host, "python", refuse)
    facts = preflight.gather(str(tmp_path), "ghost", "python9", "127.0.0.1", host.free_port(), "main")
    assert facts["missing_account"] == facts["python_error"] == "there is none"
    assert facts["python"] is None and facts["account"] == accounts.caller().name


@pytest.mark.parametrize("own", [True, False])
def test_a_port_that_the_instance_holds_itself_is_free(quiet, tmp_path, monkeypatch, own):
    me = process.stat(os.getpid())
    monkeypatch.setattr(process, "members", lambda folder: [me] if own and folder.endswith("/instances/main") else [])
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        facts = preflight.gather(str(tmp_path), "nobody", "python3", "127.0.0.1", port, "main")
    assert bool(facts["port_holder"]) == (not own)
    if not own:
        assert facts["port_holder"].startswith("pid %d (" % os.getpid())
