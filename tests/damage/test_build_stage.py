# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""For every check of the stage build, the damage of a real release that fails it, named with its place."""

from __future__ import annotations

import os

import pytest
from damage_capabilities import CAPABILITIES
from damage_cases import BUILD, Case, flip, new_requirement, no_operators, other_variant
from damage_lab import Lab

from ansible_collections.dflash.fleet.plugins.module_utils import capabilities, checks, completeness, proof, record


@pytest.mark.parametrize(
    "case", [*BUILD, *CAPABILITIES], ids=lambda case: f"{case.fails}-{case.name}".replace(" ", "_")
)
def test_damage_fails_its_check_and_no_other(lab: Lab, case: Case) -> None:
    wish = {"drafter": capabilities.read_drafter(case.drafter)} if case.drafter else {}
    right = lab.right(**wish)
    assert right[case.fails]["status"] in ("pass", "skip"), right[case.fails]
    case.damage(lab)
    loads = case.fails.startswith("ext.") or any(name.startswith("ext.") for name in case.also)
    found = lab.inspect(loads, case.fails.startswith("capability."), **wish)
    changed = {
        name
        for name in {*right, *found}
        if (right.get(name) or {}).get("status") != (found.get(name) or {}).get("status")
    }
    assert case.fails in changed
    assert changed - {case.fails} <= case.also, {name: found.get(name) for name in changed - {case.fails} - case.also}
    assert found[case.fails]["status"] == "fail"
    sentence = checks.sentence(found[case.fails])
    assert [word for word in case.says if word not in sentence] == [], sentence
    assert found[case.fails]["hint"]


def test_a_variant_that_registers_nothing(lab: Lab) -> None:
    name = "vllm." + other_variant(lab)
    case = Case("", "ext.ops:" + name, no_operators, [name.partition(".")[2] + ".abi3.so", "no operator"])
    test_damage_fails_its_check_and_no_other(lab, case)


def test_a_requirement_that_is_missing_is_only_told(lab: Lab) -> None:
    new_requirement(lab)
    found = lab.inspect()["complete.requirements"]
    assert (found["status"], found["level"]) == ("fail", "advisory")
    assert "never-heard-of" in found["actual"]


def test_what_this_release_cannot_do_is_named_as_it_is(lab: Lab) -> None:
    """0.32.0 drops the tail block unless it is told not to, and refuses mixed drafters on V1."""
    right = lab.right()
    assert right["capability.cache_rule.default"]["status"] == "fail"
    assert "use_eagle" in str(right["capability.cache_rule.default"]["evidence"])
    assert right["capability.swa.mixed.v1"]["status"] == "fail"
    assert "V2 model runner" in str(right["capability.swa.mixed.v1"]["actual"])


def test_another_distribution_of_an_interpreter_is_checked_by_hash(lab: Lab) -> None:
    """Where no layer's stat table answers, RECORD does, for every distribution that the interpreter sees."""
    victim = next(lab.deps.glob("regex/__init__.py"), None) or next(lab.deps.glob("filelock/__init__.py"))
    flip(victim, lab)
    found = completeness.dependencies([str(lab.deps)], "required")
    assert found["status"] == "fail"
    assert os.path.relpath(victim, lab.deps) in found["actual"] and "another content" in found["actual"]
    assert found["evidence"]["count"] == 1 and found["evidence"]["distributions"] > 100


def test_the_original_is_as_it_was(lab: Lab) -> None:
    """The last word of this file: what was copied is still what was installed."""
    assert record.verify(str(record.site_packages(str(lab.original))), lab.info.name) == []
    assert not lab.undo
    again = proof.inspect_release(str(lab.release), proof.Wish(manifest=lab.manifest))[0]
    assert [item["id"] for item in checks.blocking(again)] == []
