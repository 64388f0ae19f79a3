# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The example inventories load, and set only what exists, to values that its declaration admits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import house
from ansible_collections.dflash.fleet.plugins.module_utils import inputs

FOLDER = house.REPO / "examples/inventories"
NAMES = ["air_gap", "fleet", "gpu_local", "multi_gpu", "one_gpu_box", "rented_container"]
DECLARED = {name: option for role in house.ROLES for name, option in house.options(role).items()}


@cache
def loaded(name: str) -> dict[str, Any]:
    """The inventory as Ansible reads it."""
    command = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", str(FOLDER / name), "--list"]
    done = subprocess.run(command, cwd=house.REPO, capture_output=True, text=True, check=True)
    assert "WARNING" not in done.stderr
    return json.loads(done.stdout)


def host_variables(name: str) -> Iterator[tuple[str, str, Any]]:
    """``(host, variable, value)`` as each host sees them."""
    for host, variables in loaded(name)["_meta"]["hostvars"].items():
        for variable, value in variables.items():
            yield host, variable, value


def test_the_examples_are_the_closed_list() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_example_has_hosts_and_is_explained(name: str) -> None:
    assert loaded(name)["_meta"]["hostvars"]
    first = (FOLDER / name / "hosts.yml").read_text().splitlines()
    assert first[0] == "---" and first[1].startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_example_sets_only_variables_that_exist(name: str) -> None:
    strange = {
        variable for _, variable, _ in host_variables(name)
        if not variable.startswith("ansible_") and variable not in DECLARED
    }
    assert strange == set()


@pytest.mark.parametrize("name", NAMES)
def test_example_sets_values_that_are_admitted(name: str) -> None:
    for _, variable, value in host_variables(name):
        if variable in DECLARED:
            inputs.coerce(variable, DECLARED[variable], value)
            if variable == "dflash_instances":
                for overrides in value.values():
                    for inner, given in overrides.items():
                        inputs.coerce(inner, DECLARED[inner], given)


def test_one_example_pins_the_pull_request_with_its_note() -> None:
    holders = [name for name in NAMES if any(value == "refs/pull/40898/head" for _, _, value in host_variables(name))]
    assert len(holders) == 1
    assert "closed" in (FOLDER / holders[0] / "hosts.yml").read_text()
