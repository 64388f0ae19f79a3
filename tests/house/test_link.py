# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The committed link through which the collection is found, and what happens where it was lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import house

LINK = "collections/ansible_collections/dflash/fleet"
PLAYBOOKS = sorted(path.name for path in house.REPO.glob("*_dflash.yml"))


def test_link_is_committed_as_a_link() -> None:
    listed = subprocess.run(["git", "ls-files", "-s", LINK], cwd=house.REPO, capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("120000 ")
    assert (house.REPO / LINK).readlink() == Path("../../..")
    assert (house.REPO / LINK).resolve() == house.REPO


def test_there_are_entry_playbooks() -> None:
    assert "deploy_dflash.yml" in PLAYBOOKS


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The checkout as an archive without links leaves it: the link is a text file that holds its target."""
    for name in house.files():
        if name.startswith(("canary/pairs/", "docs/", "tests/")):
            continue
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((house.REPO / name).read_bytes())
    (tmp_path / LINK).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / LINK).write_text("../../..")
    return tmp_path


def run(folder: Path, playbook: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook there, with only that folder's configuration."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment.pop("PYTHONPATH", None)
    # A home without collections: an installed copy of the collection must not answer instead.
    environment.update(HOME=str(folder), ANSIBLE_NOCOLOR="1")
    command = [str(Path(sys.executable).parent / "ansible-playbook"), playbook, "-i", "inventory"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_missing_link_is_answered_with_one_line_that_names_the_fix(unpacked: Path, playbook: str) -> None:
    done = run(unpacked, playbook)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    # Ansible repeats the sentence, folded, in the task's result; the error itself is one line.
    lines = [line for line in said.splitlines() if line.startswith("[ERROR]:")]
    assert len(lines) == 1, said
    assert LINK in lines[0] and "Fix: ln -s" in lines[0]
    assert "Traceback" not in said


def test_the_named_fix_mends_it(unpacked: Path) -> None:
    """What the line says to type makes the collection known."""
    done = run(unpacked, "deploy_dflash.yml")
    line = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("[ERROR]:"))
    fix = line[line.index("ln -s"):].split("`")[0].rstrip('."\'')
    assert fix.startswith("ln -sfn ../../.. "), line
    subprocess.run(["bash", "-c", fix], cwd=unpacked, check=True)
    assert (unpacked / LINK).resolve() == unpacked.resolve()
