# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A poll is shown as progress and not as a failure; everything else is shown as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.callback.default import CallbackModule as Default

from ansible_collections.dflash.fleet.plugins.callback import progress


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ({"step": "wheel"}, "build: wheel"),
        ({"step": "wheel", "percent": 40}, "build: wheel, 40 %"),
        ({"step": "wheel", "percent": 0, "eta_s": 0}, "build: wheel, 0 %"),
        ({"step": "wheel", "percent": 40, "eta_s": 61.9}, "build: wheel, 40 %, about 61 s left"),
        ({"step": "wheel", "percent": None, "eta_s": 10}, "build: wheel, about 10 s left"),
        ({"ready": False, "dead": False}, "server: loading"),
        ({"ready": False, "dead": False, "progress": "weights 3/4"}, "server: weights 3/4"),
        ({"ready": False, "dead": True, "progress": None}, "server: loading"),
        # of other modules
        ({}, ""),
        ({"step": None}, ""),
        ({"step": ""}, ""),
        ({"ready": True}, ""),
        ({"dead": True}, ""),
        ({"msg": "failed", "percent": 3}, ""),
    ],
)
def test_line(result, line):
    assert progress.line(result) == line


class Display:
    """A terminal that keeps what it was given."""

    verbosity = 0

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.more: list[Any] = []

    def display(self, msg: Any, *args: Any, **kwargs: Any) -> str:
        self.lines.append(msg)
        self.more.append((args, kwargs))
        return "shown"


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def terminal():
    return Display()


@pytest.fixture
def callback(terminal):
    return progress.CallbackModule(display=terminal)


def task(name: str, action: str) -> Any:
    return SimpleNamespace(action=action, get_name=lambda: name)


def retry(callback: Any, host: str = "gpu1", **result: Any) -> None:
    callback.v2_runner_retry(SimpleNamespace(_host=SimpleNamespace(get_name=lambda: host), _result=result))


# ---------------------------------------------------------------- the filter
BUILD, CHECK = "dflash.fleet.vllm_build_job", "dflash.fleet.dflash_serve_check"


def announce(name: str, host: str = "gpu1") -> str:
    return "FAILED - RETRYING: [%s]: %s (99 retries left)." % (host, name)


@pytest.mark.parametrize(
    ("name", "action", "message", "shown"),
    [
        # our polls
        ("dflash.fleet.vllm_build : Wait for the wheel", BUILD, announce("Wait for the wheel"), False),
        ("dflash.fleet.vllm_build : Wait", BUILD, announce("dflash.fleet.vllm_build : Wait"), False),
        ("Wait for the server", CHECK, announce("Wait for the server"), False),
        # anybody else's
        ("Wait for the wheel", BUILD, announce("Wait for the disk"), True),
        ("Wait for the wheel", "ansible.builtin.uri", announce("Wait for the wheel"), True),
        ("Wait for the wheel", "vllm_build_job", announce("Wait for the wheel"), True),
        ("Wait", BUILD, announce("Wait for the disk"), True),
        # what merely names a poll of ours
        ("Wait", BUILD, "fatal: [gpu1]: FAILED! => Wait (", True),
        ("Wait", BUILD, "TASK [vllm_build : Wait (long)]", True),
        ("Wait", BUILD, "note: FAILED - RETRYING: [gpu1]: Wait (99 retries left).", True),
        ("Wait", BUILD, "", True),
    ],
)
def test_only_announcements_of_our_polls_are_hidden(callback, terminal, name, action, message, shown):
    callback.v2_playbook_on_task_start(task(name, action), False)
    terminal.display(message, color="red", stderr=True)
    assert terminal.lines == ([message] if shown else [])
    assert terminal.more == ([((), {"color": "red", "stderr": True})] if shown else [])


def test_before_any_poll_nothing_is_hidden(callback, terminal):
    terminal.display(announce("Wait"))
    assert terminal.lines == [announce("Wait")]


def test_what_is_passed_on_answers_as_before(callback, terminal):
    assert terminal.display("x") == "shown"
    assert terminal.display(None) == "shown"


def test_the_default_output_announces_in_the_words_that_are_filtered(callback, terminal, monkeypatch):
    """If Ansible changes its words, this fails, and not a person's terminal."""
    other = Default()
    other._display = terminal
    monkeypatch.setattr(other, "host_label", lambda _result: "gpu1")
    monkeypatch.setattr(other, "_run_is_verbose", lambda _result, verbosity=0: False)
    result = SimpleNamespace(task_name="r : Wait", task="", result={"retries": 100, "attempts": 1})
    other.v2_runner_retry(result)
    assert terminal.lines == [announce("r : Wait")]
    callback.v2_playbook_on_task_start(task("r : Wait", BUILD), False)
    other.v2_runner_retry(result)
    assert len(terminal.lines) == 1


# ---------------------------------------------------------------- what is shown instead
@pytest.mark.parametrize(
    ("polls", "lines"),
    [
        # (seconds since the last poll, result)
        ([(0, {"step": "env"})], ["build: env"]),
        ([(0, {"step": "env"}), (10, {"step": "env"}), (10, {"step": "env"})], ["build: env"]),
        ([(0, {"step": "env"}), (10, {"step": "wheel"})], ["build: env", "build: wheel"]),
        # at least one a minute
        ([(0, {"step": "env"}), (59, {"step": "env"}), (1, {"step": "env"})], ["build: env"] * 2),
        ([(0, {"step": "env"}), (60, {"step": "env"}), (59, {"step": "env"})], ["build: env"] * 2),
        # ten percent are worth a line, less are not
        ([(0, {"step": "w", "percent": 1}), (5, {"step": "w", "percent": 10})], ["build: w, 1 %"]),
        ([(0, {"step": "w", "percent": 1}), (5, {"step": "w", "percent": 11})], ["build: w, 1 %", "build: w, 11 %"]),
        ([(0, {"step": "w"}), (5, {"step": "w", "percent": 0})], ["build: w", "build: w, 0 %"]),
        ([(0, {"step": "w", "percent": 5}), (5, {"step": "w", "percent": None})], ["build: w, 5 %"]),
        # small steps add up
        (
            [(0, {"step": "w", "percent": 0}), (5, {"step": "w", "percent": 6}), (5, {"step": "w", "percent": 12})],
            ["build: w, 0 %", "build: w, 12 %"],
        ),
        ([(0, {"step": "w", "eta_s": 90}), (5, {"step": "w", "eta_s": 85})], ["build: w, about 90 s left"]),
        ([(0, {"ready": False, "dead": False}), (5, {"ready": False, "dead": False})], ["server: loading"]),
        ([(0, {"msg": "of another module"})], []),
    ],
)
def test_a_line_at_each_change_and_one_a_minute(callback, terminal, clock, polls, lines):
    for seconds, result in polls:
        clock.seconds += seconds
        retry(callback, **result)
    assert terminal.lines == ["  [gpu1] " + line for line in lines]


def test_each_host_has_its_own_progress(callback, terminal, clock):
    for host in ("a", "b", "a"):
        retry(callback, host, step="env")
    assert terminal.lines == ["  [a] build: env", "  [b] build: env"]


def test_it_must_be_enabled_and_stands_beside_any_output():
    assert progress.CallbackModule.CALLBACK_NEEDS_ENABLED is True
    assert progress.CallbackModule.CALLBACK_TYPE == "aggregate"
    assert progress.CallbackModule.CALLBACK_NAME == "dflash.fleet.progress"
