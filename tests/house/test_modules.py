# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Every module and role explains itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import house

CLOSED = {
    "dflash_inputs", "dflash_host_info", "vllm_pin", "vllm_build_job", "vllm_build_info", "vllm_build_assert",
    "vllm_release", "dflash_pair_info", "dflash_serve_check", "dflash_acceptance", "dflash_state",
    "dflash_service", "dflash_deployment", "dflash_report",
}
MODULES = sorted(path.stem for path in (house.REPO / "plugins/modules").glob("*.py"))


def ansible_doc(*arguments: str) -> dict[str, Any]:
    """What ansible-doc says, as data; run from the checkout."""
    environment = {**os.environ, "ANSIBLE_CONFIG": str(house.REPO / "ansible.cfg")}
    command = [str(Path(sys.executable).parent / "ansible-doc"), "--json", *arguments]
    done = subprocess.run(command, cwd=house.REPO, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # ansible-core 2.21 warns about a collection inside itself; what it says of ours counts.
    said = [line for line in done.stderr.splitlines() if "_protomatter" not in line]
    assert not any("[WARNING]" in line or "[ERROR]" in line for line in said), done.stderr
    return json.loads(done.stdout)


@lru_cache(maxsize=1)
def shown() -> dict[str, Any]:
    """All modules in one call."""
    return ansible_doc("-t", "module", *[f"dflash.fleet.{name}" for name in MODULES]) if MODULES else {}


def blocks(name: str) -> dict[str, str]:
    """The documentation texts that stand in a module file."""
    tree = ast.parse((house.REPO / f"plugins/modules/{name}.py").read_text())
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found[node.targets[0].id] = node.value.value
    return found


def test_modules_are_the_closed_list() -> None:
    assert set(MODULES) == CLOSED


@pytest.mark.parametrize("name", MODULES)
def test_module_is_documented(name: str) -> None:
    found = blocks(name)
    assert {"DOCUMENTATION", "EXAMPLES", "RETURN"} <= set(found)
    head = yaml.safe_load(found["DOCUMENTATION"])
    assert head["module"] == name
    assert head["version_added"] == "0.1.0"
    assert head["short_description"] and head["description"] and head["author"]
    assert any(item.startswith("dflash.fleet.attributes") for item in head.get("extends_documentation_fragment", []))
    examples = yaml.safe_load(found["EXAMPLES"])
    assert any(f"dflash.fleet.{name}" in task for task in examples)
    assert yaml.safe_load(found["RETURN"])


@pytest.mark.parametrize("name", MODULES)
def test_ansible_doc_shows_the_module(name: str) -> None:
    doc = shown()[f"dflash.fleet.{name}"]["doc"]
    for option, entry in (doc.get("options") or {}).items():
        assert entry.get("description") and entry.get("type"), option
    for attribute in ("check_mode", "diff_mode"):
        assert doc["attributes"][attribute]["support"] in ("full", "partial", "none", "N/A"), attribute


def test_ansible_doc_shows_every_role() -> None:
    names = [f"dflash.fleet.{role}" for role in house.ROLES]
    listed = ansible_doc("-t", "role", *names)
    assert set(names) <= set(listed)
    for name in names:
        assert listed[name]["entry_points"]["main"]["short_description"]
