# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The scenario loads, and the clone answers for the collection, not a copy of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import house


def test_scenario_loads_and_installs_no_copy(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    environment.update(
        ANSIBLE_HOME=str(tmp_path), HOME=str(tmp_path), NO_COLOR="1",
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    command = ["molecule", "syntax"]
    done = subprocess.run(command, cwd=house.REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("galaxy.yml")) + list(tmp_path.rglob("MANIFEST.json")) == []


def test_scenario_runs_the_main_job_twice_and_reads_the_verdict() -> None:
    scenario = house.load(house.REPO / "molecule/default/molecule.yml")
    assert scenario["scenario"]["test_sequence"] == ["syntax", "prepare", "converge", "idempotence", "verify"]
    converge = house.load(house.REPO / "molecule/default/converge.yml")
    assert [play["ansible.builtin.import_playbook"] for play in converge] == ["../../playbooks/deploy_dflash.yml"]
