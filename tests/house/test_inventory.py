# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The inventory of the clone is this machine and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import house

INVENTORY = house.REPO / "inventory"


def test_hosts_file_names_exactly_localhost() -> None:
    assert house.load(INVENTORY / "hosts.yml") == {
        "all": {
            "hosts": {
                "localhost": {
                    "ansible_connection": "local",
                    "ansible_python_interpreter": "/usr/bin/python3",
                }
            }
        }
    }


def test_ansible_sees_exactly_localhost() -> None:
    command = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", "inventory", "--list"]
    done = subprocess.run(command, cwd=house.REPO, capture_output=True, text=True, check=True)
    hosts = set()
    for name, group in json.loads(done.stdout).items():
        if name != "_meta":
            hosts.update(group.get("hosts", []))
    assert hosts == {"localhost"}


def test_nothing_else_lies_below_the_inventory() -> None:
    """Ansible loads every file below an inventory folder, but sub-folders without their group_vars."""
    found = {name for name in house.files() if name.startswith("inventory/")}
    allowed = {"inventory/hosts.yml", "inventory/group_vars/all/main.yml"}
    assert found - allowed == set()
    assert "inventory/hosts.yml" in found


def test_variables_of_the_local_inventory_exist() -> None:
    given = house.load(INVENTORY / "group_vars/all/main.yml") or {}
    assert {name for name in given if not name.startswith("_")} - house.all_variables() == set()


def test_port_of_this_clone_is_ignored_by_git() -> None:
    done = subprocess.run(["git", "check-ignore", "-q", "inventory/group_vars/all/local.yml"], cwd=house.REPO)
    assert done.returncode == 0
