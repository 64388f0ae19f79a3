# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A second clone beside the first, driven by the other supported ansible-core, while the first serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import harness
import pytest


@pytest.fixture(scope="module")
def second(demo: harness.Clone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Clone]:
    """A fresh clone with a root and a port of its own; removed afterwards."""
    path = tmp_path_factory.mktemp("second") / "clone"
    subprocess.run(["git", "clone", "-q", str(harness.REPO), str(path)], check=True)
    # CI makes both environments once; elsewhere the clone is driven by the environment at hand.
    venv = os.environ.get("DFLASH_SECOND_VENV") or str(harness.REPO / ".venv")
    port = path / "inventory/group_vars/all/local.yml"
    port.write_text(f"---\ndflash_serve_port: {harness.free_port()}\n", encoding="utf-8")
    clone = harness.Clone(path, venv)
    assert clone.root != demo.root
    yield clone
    clone.tool("python", "demo/run.py", "--down")
    for folder in (clone.root, clone.root + "-demo"):
        subprocess.run(["rm", "-rf", folder], check=True)


def test_two_runs_at_once_start_one_build(second: harness.Clone) -> None:
    """Two controllers, one host, the same build id: one attempt, one wheel."""
    made = second.tool("python", "demo/source.py", f"{second.root}-demo/vllm.git")
    assert made.code == 0
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: second.playbook("tests/e2e/build_only.yml"), range(2)))
    built = [re.findall(r"built ([0-9a-f]{64}) in attempt\s+(\d+)", run.output) for run in runs]
    assert [run.code for run in runs] == [0, 0]
    assert built[0] == built[1] and built[0][0][1] == "1"
    assert second.builds_started() == 1


def test_both_clones_are_proven_side_by_side(demo: harness.Clone, second: harness.Clone) -> None:
    """Each serves on its own port from its own root; the first is not touched by the second."""
    first = demo.server()
    assert second.demo().code == 0
    host = second.host()
    assert host["state"] == "proven" and host["acceptance_length"] > 7
    assert demo.server() == first and demo.alive() and second.alive()
    assert second.demo().code == 0
    assert second.host()["state"] == "unchanged"
    assert demo.demo().code == 0
    assert demo.host()["state"] == "unchanged"


def test_a_break_under_the_other_ansible(second: harness.Clone) -> None:
    """The same refusal under the other ansible-core."""
    version = second.tool("ansible", "--version").output
    if os.environ.get("DFLASH_SECOND_VENV"):
        assert "core 2.21" in version and sys.version_info[:2] == (3, 11)
    assert second.demo("layer_offset").code == 0
    host = second.host()
    assert host["state"] == "refused"
    assert harness.against(host["checks"]) == ["capability.layer_offset.v1"]
    assert second.demo().code == 0
    assert second.host()["state"] == "unchanged"


def test_down_leaves_no_process(second: harness.Clone) -> None:
    """The server of the clone is stopped with all its children, and nobody else's."""
    assert second.tool("python", "demo/run.py", "--down").code == 0
    assert harness.members(second) == []
    left = subprocess.run(["pgrep", "-af", second.root + "/"], capture_output=True, text=True, check=False).stdout
    assert left == "", left
