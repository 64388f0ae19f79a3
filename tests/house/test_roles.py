# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Every role declares what it takes, twice and alike: defaults and argument specs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import house

CLOSED = {
    "dflash_common", "dflash_plan", "dflash_preflight", "vllm_source", "vllm_toolchain", "vllm_build", "vllm_release",
    "vllm_verify", "dflash_models", "dflash_serve", "dflash_accept", "dflash_rollout", "dflash_report",
}
SHARED = {
    "dflash_root", "dflash_instances", "dflash_become", "dflash_service_user", "dflash_accept_unknown",
    "dflash_allow_unknown_vars", "dflash_proxy", "dflash_ca_bundle",
}
TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "path": (str,), "bool": (bool,), "int": (int,), "float": (float, int), "list": (list,),
    "dict": (dict,),
}


def fits(option: dict[str, Any], value: Any) -> bool:
    """Whether a default is of the declared type, elements and choices included."""
    kind = option["type"]
    if isinstance(value, bool) and kind != "bool":
        return False
    if not isinstance(value, TYPES[kind]):
        return False
    if "choices" in option and value not in option["choices"]:
        return False
    element = option.get("elements")
    if kind == "list" and element not in (None, "raw"):
        return all(isinstance(item, TYPES[element]) for item in value)
    return True


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and true are three things."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def test_roles_are_the_closed_list() -> None:
    assert set(house.ROLES) == CLOSED


@pytest.mark.parametrize("role", house.ROLES)
def test_defaults_and_argument_specs_agree(role: str) -> None:
    given, declared = house.defaults(role), house.options(role)
    assert set(given) == set(declared)
    wrong = [name for name in given if not same(given[name], declared[name]["default"])]
    assert wrong == []


@pytest.mark.parametrize("role", house.ROLES)
def test_defaults_have_the_declared_type(role: str) -> None:
    declared = house.options(role)
    assert [name for name in declared if not fits(declared[name], declared[name]["default"])] == []
    assert [name for name in declared if not declared[name].get("description")] == []


@pytest.mark.parametrize("role", house.ROLES)
def test_variables_bear_the_roles_name(role: str) -> None:
    names = set(house.defaults(role))
    if role == house.SHARED_ROLE:
        assert names - SHARED == {name for name in names if name.startswith(role + "_")}
    else:
        assert [name for name in names if not name.startswith(role + "_")] == []


def test_no_variable_is_declared_twice() -> None:
    count = Counter(name for role in house.ROLES for name in house.defaults(role))
    assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize("role", house.ROLES)
def test_every_variable_is_read_somewhere(role: str) -> None:
    """A variable that no code reads is a promise that nobody keeps."""
    code = "\n".join(
        house.text(name) or "" for name in house.files()
        if name.startswith(("roles/", "playbooks/", "plugins/")) and "/defaults/" not in name and "/meta/" not in name
    )
    assert [name for name in house.defaults(role) if name not in code] == []
