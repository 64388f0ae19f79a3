# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A log spans processes, and its end is rarely the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import log_watch

V1 = "(Worker pid=11622) INFO 11-30 18:13:39 [runner.py:5243] Using auxiliary layers from speculative config: %s"
V2 = "(EngineCore_DP0 pid=77) INFO 11-30 18:13:39 [eagle3_utils.py:27] Using Eagle3 auxiliary layers from config: %s"
DEFAULTS = "(EngineCore pid=77) INFO 11-30 18:13:39 [eagle3_utils.py:30] Using Eagle3 auxiliary layers from model: %s"


def run(pid: int, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "start_ticks": pid * 10, "boot_id": "b", **more}


def launch_line(pid: int) -> str:
    return log_watch.LOG_LINE + json.dumps(run(pid))


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_section_begins_behind_its_own_launch_and_ends_never(tmp_path: Path) -> None:
    log = write(tmp_path / "log", launch_line(1), "old", launch_line(2), "new", "newer")
    assert log_watch.section(log, run(2)) == "new\nnewer\n"
    assert log_watch.section(log, run(3)) == ""
    assert log_watch.section(log, run(2, start_ticks=21)) == "", "the same number, another process"
    assert log_watch.section(str(tmp_path / "none"), run(2)) == ""


def test_an_offset_is_used_and_not_trusted(tmp_path: Path) -> None:
    log = write(tmp_path / "log", launch_line(1), "old", launch_line(2), "new")
    offset = len(launch_line(1)) + 5
    for value in (offset, 0, 10**9, -1, None, "x"):
        assert log_watch.section(log, run(2, log_offset=value)) == "new\n"
    assert log_watch.section(log, run(1, log_offset=offset)).startswith("old")


def test_a_long_log_keeps_its_start_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watch, "HEAD", 20)
    monkeypatch.setattr(log_watch, "TAIL", 10)
    log = write(tmp_path / "log", launch_line(1), "the first words", "x" * 1000, "the end")
    text = log_watch.section(log, run(1))
    assert "the first words" in text
    assert text.endswith("the end\n")
    assert len(text) < 40


@pytest.mark.parametrize(
    ("lines", "status", "actual"),
    [
        ([V1 % "(2, 4)"], "pass", "layers [2, 4]"),
        ([V2 % "(2, 4)", V2 % "(2, 4)"], "pass", "layers [2, 4]"),
        ([V1 % "(1, 3)"], "fail", "layers [1, 3]"),
        ([V1 % "(2, 4)", V1 % "(1, 3)"], "fail", "layers [1, 3]"),
        ([DEFAULTS % "(2, 4)"], "fail", "layers [2, 4], from the model"),
        (["nothing of the kind"], "unknown", "no such line in the log of this process"),
        ([V1 % "(2, 3)"], "fail", "layers [2, 3]"),
    ],
)
def test_auxiliary_layers(lines: list[str], status: str, actual: str) -> None:
    found = log_watch.aux_check("\n".join(lines), [2, 4])
    assert (found["status"], found["actual"]) == (status, actual)


def test_an_unshifted_line_is_called_so() -> None:
    assert "one layer too early" in log_watch.aux_check(V1 % "(1, 3)", [2, 4])["hint"]
    assert "one layer too early" not in log_watch.aux_check(V1 % "(2, 3)", [2, 4])["hint"]


def test_lines_of_other_processes_do_not_count() -> None:
    assert log_watch.aux_check(V1 % "(2, 4)", [2, 4], pids=[11622])["status"] == "pass"
    assert log_watch.aux_check(V1 % "(2, 4)", [2, 4], pids=[1])["status"] == "unknown"
    assert log_watch.aux_layers(V1 % "(2, 4)") == [log_watch.Aux("Worker", 11622, "speculative config", [2, 4])]


ENGINE = "(EngineCore pid=5) ERROR 11-30 18:13:39 [core.py:1411] %s"


@pytest.mark.parametrize(
    ("lines", "line", "meaning"),
    [
        (
            [ENGINE % "Traceback (most recent call last):", ENGINE % "ValueError: the first", "RuntimeError: later"],
            "ValueError: the first", "",
        ),
        (
            ["RuntimeError: Engine core initialization failed.", ENGINE % "OSError: [Errno 98] Address already in use"],
            "OSError: [Errno 98] Address already in use", "Another process holds the port.",
        ),
        (
            [ENGINE % "NotImplementedError: DFlash drafters with mixed sliding/full attention require the V2 runner"],
            "NotImplementedError: DFlash drafters with mixed sliding/full attention require the V2 runner",
            "A drafter of mixed layers needs the V2 runner.",
        ),
        # A warning that the server lives well with is no cause of its death.
        (
            ["(Worker pid=1) WARNING 11-30 18:20:00 [x.py:1] Model Runner V2 requires Triton; using the V1 model runner"
             " instead.", "torch.OutOfMemoryError: CUDA out of memory."],
            "torch.OutOfMemoryError: CUDA out of memory.", "The GPU's memory does not suffice.",
        ),
        (
            ["pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig", "no_such_key",
             "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1, input_type=int]",
             "    For further information visit https://example.org"],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig: no_such_key: "
            "Unexpected keyword argument",
            "This vLLM does not know one of the configuration's keys.",
        ),
        (
            ["ValidationError: 1 validation error for VllmConfig",
             "  Value error, Model Runner V1 does not support: mixed sliding/full dflash drafts [type=value_error]"],
            "ValidationError: 1 validation error for VllmConfig: Value error, Model Runner V1 does not support: "
            "mixed sliding/full dflash drafts",
            "A drafter of mixed layers needs the V2 runner.",
        ),
        (["vllm: error: unrecognized arguments: --no-such"], "vllm: error: unrecognized arguments: --no-such",
         "This vLLM does not know one of the options."),
        ([ENGINE % "something went wrong"], "something went wrong", ""),
        (["(APIServer pid=1) INFO 11-30 18:20:00 [x.py:1] ValueError: quoted in a message", "fine"], "", ""),
        ([launch_line(1), ""], "", ""),
    ],
)
def test_first_error(lines: list[str], line: str, meaning: str) -> None:
    found = log_watch.first_error("\n".join(lines))
    assert (found["line"], found["meaning"]) == (line, meaning)


def test_every_known_death_says_what_to_do() -> None:
    assert all(pattern and meaning.endswith(".") and fix.endswith(".") for pattern, meaning, fix in log_watch.DEATHS)


def test_last_line() -> None:
    loading = "(Worker pid=1) INFO 11-30 18:13:40 [l.py:1] Loading weights"
    text = "\n".join([V1 % "(2, 4)", loading, "  ", launch_line(1)])
    assert log_watch.last_line(text) == "Loading weights"
    assert log_watch.last_line("") == ""
