# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The collection that ansible-galaxy builds holds what a user needs, and nothing of this clone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import house

BIN = Path(sys.executable).parent


def ansible(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run an Ansible command with a home and configuration of its own, so that only ``folder`` answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment.pop("PYTHONPATH", None)
    environment.update(ANSIBLE_HOME=str(folder / "home"), ANSIBLE_COLLECTIONS_PATH=str(folder / "installed"),
                       HOME=str(folder), ANSIBLE_NOCOLOR="1")
    line = [str(BIN / command[0]), *command[1:]]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


#: What a clone that was worked in holds beside its files.
LITTER = (
    ".venv/bin/ansible", ".venv-py312/bin/ansible", ".cache/mypy/x", ".demo/x", ".ansible/x", "runs/1/verdict.json",
    "dflash.lock.json", "inventory/group_vars/all/local.yml", "plugins/modules/__pycache__/x.cpython-311.pyc",
    "dflash-fleet-0.0.9.tar.gz", "demo/locks/x.json",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a littered copy of this checkout, and installed into an empty place."""
    folder = tmp_path_factory.mktemp("collection")
    clone = folder / "clone"
    for name in house.files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((house.REPO / name).read_bytes())
    for name in LITTER:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("litter")
    link = clone / "collections/ansible_collections/dflash/fleet"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../..")
    ansible(folder, "ansible-galaxy", "collection", "build", "--output-path", str(folder), str(clone))
    archive = next(folder.glob("dflash-fleet-*.tar.gz"))
    where = str(folder / "installed")
    ansible(folder, "ansible-galaxy", "collection", "install", "--offline", "-p", where, str(archive))
    return folder


def members(folder: Path) -> set[str]:
    """Files in the built archive."""
    with tarfile.open(next(folder.glob("dflash-fleet-*.tar.gz"))) as archive:
        return {member.name for member in archive.getmembers() if not member.isdir()}


def test_archive_holds_the_product(installed: Path) -> None:
    parts = ("roles/", "plugins/", "playbooks/", "meta/", "canary/pairs/")
    wanted = {name for name in house.files() if name.startswith(parts)}
    assert wanted - members(installed) == set()


def test_archive_holds_nothing_of_this_clone(installed: Path) -> None:
    known = set(house.files()) | {"MANIFEST.json", "FILES.json"}
    assert members(installed) - known == set()
    strange = [name for name in members(installed) if name.startswith(("tests/", "collections/", ".ci/"))]
    assert strange == []


def test_installed_collection_answers(installed: Path) -> None:
    listed = ansible(installed, "ansible-doc", "-t", "module", "--list", "dflash.fleet").stdout
    assert "dflash.fleet.dflash_state" in listed
    ansible(installed, "ansible-playbook", "--syntax-check", "-i", "localhost,", "dflash.fleet.deploy_dflash")
