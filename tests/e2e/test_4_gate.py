# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The gate: what must not be proven, on the real build that the demo proved, in an instance of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import stub_metrics


@pytest.fixture
def aside(proven: harness.Clone, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Variables of an instance beside the demo's, which is stopped afterwards."""
    name = "aside"
    yield {"name": name, "port": harness.free_port(), "reports": tmp_path / "runs"}
    assert proven.stop(name).code == 0
    subprocess.run(["rm", "-rf", str(proven.instance(name)), str(proven.instance(name + ".canary"))], check=True)


def deploy(clone: harness.Clone, aside: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Deploy the instance beside; returns its verdict."""
    run = clone.playbook(
        "deploy_dflash.yml",
        dflash_report_dir=str(aside["reports"]),
        dflash_instances={aside["name"]: {"dflash_serve_port": aside["port"], **overrides}},
    )
    host = clone.host(aside["reports"])
    assert (run.code == 0) == (host["state"] == "proven")
    return host


def build_passes(host: dict[str, Any]) -> bool:
    """Every required check of the stages build and host passed."""
    return all(
        item["status"] == "pass"
        for item in host["checks"]
        if item["level"] == "required" and item["stage"] in ("build", "host")
    )


def test_a_drafter_with_random_weights_is_stopped(proven: harness.Clone, aside: dict[str, Any], tmp_path: Path) -> None:
    """The canary pair passes beside it, so the build is right and the drafter is not."""
    drafter = tmp_path / "random"
    subprocess.run(
        [sys.executable, "canary/random_drafter.py", "canary/pairs/cpu/drafter_full", str(drafter)],
        cwd=proven.path,
        check=True,
    )
    host = deploy(proven, aside, dflash_models_drafter={"path": str(drafter), "name": "random"})
    found = harness.by_id(host["checks"])
    assert host["state"] == "stopped"
    assert found["serving.canary_al"]["status"] == "pass" and found["serving.canary_al"]["actual"] > 7
    assert harness.against(host["checks"]) == ["serving.al"]
    assert build_passes(host)
    assert harness.members(proven, aside["name"]) == [] and harness.members(proven, aside["name"] + ".canary") == []
    assert not (proven.instance(aside["name"]) / "current").is_symlink()
    assert proven.alive(), "the demo's own server was touched"


@pytest.mark.parametrize(("length", "state"), [(1.18, "stopped"), (7.5, "proven")])
def test_the_verdict_follows_the_counters(
    proven: harness.Clone, aside: dict[str, Any], length: float, state: str
) -> None:
    """Through stub-metrics 1.18 is not proven although every check of the build passes, and 7.5 is."""
    with stub_metrics.proxy(harness.free_port(), f"http://127.0.0.1:{aside['port']}", length) as url:
        host = deploy(proven, aside, dflash_accept_url=url)
    found = harness.by_id(host["checks"])
    assert host["state"] == state
    assert found["serving.al"]["actual"] == pytest.approx(length, abs=0.006)
    assert round(host["acceptance_length"], 2) == length
    assert build_passes(host)
    assert harness.against(host["checks"]) == ([] if state == "proven" else ["serving.canary_al", "serving.al"])
