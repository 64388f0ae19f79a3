# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The targets are the closed list; setup says in one line what is wrong and does nothing twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import house

TARGETS = {
    "setup", "demo", "demo-down", "test", "lint", "sanity", "truth-table", "test-build", "build-real", "test-serving",
    "test-fleet", "hosts", "hosts-down", "bench", "gpu-bundle", "gpu-rehearsal",
}


def database() -> str:
    """What make knows, without running anything."""
    command = ["make", "--no-print-directory", "-pRrq", "-C", str(house.REPO), "setup"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": ""}).stdout


def rules() -> dict[str, list[str]]:
    """Target to prerequisites of every explicit rule."""
    found = {}
    for line in database().splitlines():
        match = re.match(r"^([a-z][a-z-]*):(?!=)\s*(.*)$", line)
        if match:
            found[match.group(1)] = match.group(2).split()
    return found


def test_targets_are_the_closed_list() -> None:
    assert set(rules()) == TARGETS


def test_every_target_makes_the_environment_first() -> None:
    assert {name for name, before in rules().items() if before != ["setup"]} == {"setup"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a clone as setup needs."""
    for name in ("tools", "requirements"):
        shutil.copytree(house.REPO / name, tmp_path / name)
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(house.REPO / name, tmp_path)
    return tmp_path


def setup(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup there."""
    return subprocess.run(
        ["bash", str(clone / "tools/setup.sh")], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_a_python_that_does_not_run_is_named(clone: Path) -> None:
    shim = clone / "python3.11"
    shim.write_text("#!/bin/sh\necho 'command not found in the current version' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = setup(clone, PYTHON=str(shim))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"setup: PYTHON={shim} is not a Python of 3.11 or newer that runs."]
    assert not (clone / ".venv").exists()


def test_setup_end_to_end(clone: Path) -> None:
    """Past broken shims to a Python that runs; once; again with nothing to do; anew for another lock."""
    shims = clone / "shims"
    shims.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    for name in ("dev-py311", "dev-py312"):
        (clone / f"requirements/{name}.lock").write_text("")
    local = clone / "inventory/group_vars/all/local.yml"
    local.parent.mkdir(parents=True)
    local.write_text("---\ndflash_preflight_disk_gib: 20.0\n")
    path = f"{shims}:{os.environ['PATH']}"

    first = setup(clone, PATH=path, PYTHON="")
    assert first.returncode == 0, first.stderr
    assert "making .venv with /usr/bin/python3" in first.stdout
    # What this clone's file held already survives; the port is in the range without chance clients.
    assert set(house.load(local)) == {"dflash_preflight_disk_gib", "dflash_serve_port"}
    assert 20000 <= house.load(local)["dflash_serve_port"] <= 32000

    before, made, start = local.read_text(), (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns, time.monotonic()
    second = setup(clone, PATH=path, PYTHON="")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert time.monotonic() - start < 1
    assert local.read_text() == before
    assert (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns == made

    for name in ("dev-py311", "dev-py312"):
        (clone / f"requirements/{name}.lock").write_text("# changed\n")
    assert "making .venv" in setup(clone, PATH=path, PYTHON="").stdout
    assert local.read_text() == before


def test_setup_installs_only_what_the_lock_names_by_hash(clone: Path) -> None:
    """A package without its hash ends setup, and leaves no environment that looks done."""
    for name in ("dev-py311", "dev-py312"):
        (clone / f"requirements/{name}.lock").write_text("pyyaml==6.0.2\n")
    done = setup(clone, PYTHON="")
    assert done.returncode == 2
    assert "could not be installed" in done.stderr.splitlines()[-1]
    assert not (clone / ".venv/.dflash-setup").exists()
