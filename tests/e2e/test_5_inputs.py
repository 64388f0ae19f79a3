# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Bad input gets one clear line, before anything is touched."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("misspelt", {"vllm_source_reff": "main"}, "unknown variable vllm_source_reff: did you mean vllm_source_ref?"),
    ("unknown in our prefix", {"dflash_serve_gpus": 2}, "unknown variable dflash_serve_gpus"),
    ("wrong type", {"dflash_serve_port": "http"}, "dflash_serve_port must be a whole number"),
    ("out of range", {"dflash_serve_port": 70000}, "dflash_serve_port must be between 1 and 65535"),
    ("not a mapping", {"dflash_serve_engine_args": "dtype=float32"}, "dflash_serve_engine_args must be a mapping"),
    ("wrong choice", {"vllm_build_mode": "precompild"}, "did you mean precompiled?"),
    (
        "missing model",
        {"dflash_models_drafter": {"path": "/nowhere/drafter"}},
        "there is no model folder [/nowhere/drafter]",
    ),
    (
        "key of a model",
        {"dflash_models_target": {"pth": "canary/pairs/cpu/target"}},
        "dflash_models_target has no key pth: did you mean path?",
    ),
    (
        "too many draft tokens",
        {"dflash_serve_num_speculative_tokens": 8},
        "expected 1 to 7 speculative tokens (block size 8), found 8",
    ),
    ("open address", {"dflash_serve_host": "0.0.0.0"}, "without an API key"),
    ("missing patch", {"vllm_source_series": ["demo/series/none.patch"]}, "demo/series/none.patch"),
    ("ref that does not exist", {"vllm_source_ref": "v0.32.1", "vllm_source_lock_file": ".demo/none.json"}, "v0.32.1"),
    (
        "no network",
        {"vllm_source_repo": "https://127.0.0.1:9/vllm.git", "vllm_source_lock_file": ".demo/none.json"},
        "127.0.0.1:9",
    ),
    ("no such Python", {"vllm_toolchain_python": "python3.99"}, "there is no Python python3.99"),
    (
        "too little disk",
        {"dflash_preflight_disk_gib": 90000, "vllm_source_series": []},
        "host.disk fail: expected >= 90000.0 GiB",
    ),
    ("root too long", {"dflash_root": "/var/tmp/" + "x" * 60}, "at most 40"),
    ("two instances", {"dflash_instances": {"a": {}, "b": {}}}, "exactly one instance"),
]


@pytest.fixture
def untouched(demo: harness.Clone) -> Iterator[harness.Clone]:
    """The host is the same after the test as before it."""
    before, server = harness.snapshot(demo.root), demo.server()
    yield demo
    assert harness.snapshot(demo.root) == before
    assert demo.server() == server and demo.alive()


def refused(clone: harness.Clone, sentence: str, reports: Path, **extra: Any) -> dict[str, Any]:
    """Run and expect a refusal that says the sentence, with no traceback anywhere."""
    run = clone.playbook("deploy_dflash.yml", **{"dflash_report_dir": str(reports), **extra})
    assert run.code != 0
    assert "Traceback" not in run.output
    flat = " ".join(run.output.split())
    assert sentence in flat, sentence
    assert "localhost refused" in flat
    return run.recap()


@pytest.mark.parametrize(("extra", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_refused(untouched: harness.Clone, tmp_path: Path, extra: dict[str, Any], sentence: str) -> None:
    """One line that says what is wrong and what mends it."""
    refused(untouched, sentence, tmp_path, **extra)


def test_a_taken_port_names_its_holder(untouched: harness.Clone, tmp_path: Path) -> None:
    """The process that holds the port is told, by number and name."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refused(
            untouched,
            f"host.port fail: expected port {port} free, found pid {os.getpid()}",
            tmp_path,
            dflash_serve_port=port,
        )


def test_a_python_that_the_service_account_cannot_run(untouched: harness.Clone, tmp_path: Path) -> None:
    """An interpreter below a closed folder answers for root and not for the account that serves."""
    closed = tmp_path / "closed"
    closed.mkdir()
    link = closed / "python3.11"
    link.symlink_to(os.path.realpath(sys.executable))
    closed.chmod(0o700 if os.geteuid() == 0 else 0o000)
    refused(untouched, "cannot run the Python", tmp_path / "runs", vllm_toolchain_python=str(link))


def test_foreign_variables_only_warn(untouched: harness.Clone, tmp_path: Path) -> None:
    """Other roles own names that begin like ours; they are told once and stop nothing."""
    run = untouched.playbook("deploy_dflash.yml", dflash_report_dir=str(tmp_path), vllm_exporter_port=9400)
    assert run.code == 0
    assert "variable vllm_exporter_port is not one of dflash.fleet" in " ".join(run.output.split())
    assert untouched.host(tmp_path)["state"] == "unchanged"


def test_extra_vars_are_text_and_coerced(untouched: harness.Clone, tmp_path: Path) -> None:
    """`-e key=value` gives text; the same value changes nothing."""
    run = untouched.playbook(
        "deploy_dflash.yml",
        "-e",
        f"dflash_report_dir={tmp_path}",
        "-e",
        "dflash_serve_stop_timeout=20",
        "-e",
        "dflash_serve_trust_remote_code=no",
        "-e",
        "dflash_accept_floor=2.0",
    )
    assert run.code == 0 and untouched.host(tmp_path)["state"] == "unchanged"
