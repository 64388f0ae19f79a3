# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which hosts a phase visits, and who builds for whom."""

from __future__ import annotations

import pytest

from ansible_collections.dflash.fleet.plugins.filter import phases
from ansible_collections.dflash.fleet.plugins.module_utils.checks import make

ALL = {"all": ["d", "c", "b", "a"], "dflash_todo": ["a", "b"], "dflash_restart": ["c"], "dflash_rejudge": ["d"]}
NOBODY: list[str] = []


@pytest.mark.parametrize(
    ("groups", "phase", "hosts"),
    [
        # in the inventory's order, each host once
        (ALL, "preflight", ["c", "b", "a"]),
        (ALL, "distribute", ["b", "a"]),
        (ALL, "prove_build", ["b", "a"]),
        (ALL, "roll_out", ["d", "c", "b", "a"]),
        ({**ALL, "dflash_restart": ["a", "c"]}, "roll_out", ["d", "c", "b", "a"]),
        # only builders build, whatever they need themselves
        (ALL, "build", NOBODY),
        ({**ALL, "dflash_builder": ["b"]}, "build", ["b"]),
        ({**ALL, "dflash_builder": ["b"]}, "distribute", ["b", "a"]),
        # a refused host is out of every later phase, and only it
        ({**ALL, "dflash_refused": ["a"]}, "distribute", ["b"]),
        ({**ALL, "dflash_refused": ["a", "d"]}, "roll_out", ["c", "b"]),
        ({**ALL, "dflash_builder": ["b"], "dflash_refused": ["b"]}, "build", NOBODY),
        # a refusal before anything was touched stops every host
        ({**ALL, "dflash_refused": ["a"], "dflash_stop": ["a"]}, "preflight", NOBODY),
        ({**ALL, "dflash_builder": ["b"], "dflash_stop": ["a"]}, "build", NOBODY),
        ({**ALL, "dflash_stop": ["a"]}, "roll_out", NOBODY),
        ({**ALL, "dflash_stop": NOBODY}, "distribute", ["b", "a"]),
        # groups that lead nowhere
        ({**ALL, "dflash_unchanged": ["a"], "dflash_todo": ["b"]}, "roll_out", ["d", "c", "b"]),
        ({"all": ["a"], "dflash_would_change": ["a"]}, "roll_out", NOBODY),
        ({"all": ["a"], "dflash_unreachable": ["a"]}, "preflight", NOBODY),
        ({"all": ["a"], "dflash_unchanged": ["a"]}, "roll_out", NOBODY),
        # a limit: who is not in the play is not visited
        ({**ALL, "all": ["a"]}, "roll_out", ["a"]),
        ({}, "roll_out", NOBODY),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_hosts_of_a_phase(groups, phase, hosts, again):
    if again:  # a second play asks the same groups
        phases.phase_hosts(groups, phase)
    assert phases.phase_hosts(groups, phase) == hosts


def test_an_unknown_phase_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        phases.phase_hosts(ALL, "prune")


def variables(build="x", glibc="2.36", has_release=False, build_host=""):
    return {
        "__dflash_plan_state": {"build_id": build, "python": {"glibc": glibc}, "has_release": has_release},
        "__dflash_plan_inputs": {"inputs": {"vllm_build_host": build_host}},
    }


@pytest.mark.parametrize(
    ("todo", "chosen"),
    [
        (["a", "b"], {"x": "b"}),  # the oldest glibc
        (["a"], {"x": "a"}),
        (["a", "c"], {"x": "a", "y": "c"}),
        (["a", "b", "e"], {"x": "a"}),  # named by a host of the class
        (["d"], {}),  # has its release
        ([], {}),
    ],
)
def test_builders_are_chosen_among_hosts_with_work(todo, chosen):
    hostvars = {
        "a": variables(), "b": variables(glibc="2.28"), "c": variables("y"), "d": variables(has_release=True),
        "e": variables(build_host="a"),
    }
    assert phases.builders(hostvars, {"dflash_todo": todo}) == chosen


def test_a_host_that_was_never_asked_has_no_part_in_building():
    assert phases.builders({"a": {}}, {"all": ["a"], "dflash_unreachable": ["a"]}) == {}


@pytest.mark.parametrize(
    ("found", "accepted", "ids"),
    [
        ([make("host.root", "pass")], (), []),
        ([make("host.root", "fail"), make("host.disk", "fail", level="advisory")], (), ["host.root"]),
        ([make("host.root", "unknown")], (), ["host.root"]),
        ([make("host.root", "unknown")], ("host.root",), []),
        ([make("host.root", "fail")], ("host.root",), ["host.root"]),
        ([make("capability.layer_offset.v1", "unknown")], (), []),  # the canary pair may settle it
        ([make("capability.layer_offset.v1", "fail")], (), ["capability.layer_offset.v1"]),
    ],
)
def test_what_stands_against_a_host(found, accepted, ids):
    sentences = phases.against(found, accepted)
    assert [text.split()[0] for text in sentences] == ids
    assert phases.against([]) == []


def test_filters_are_offered_by_name():
    assert phases.FilterModule().filters() == {
        "phase_hosts": phases.phase_hosts, "builders": phases.builders, "against": phases.against,
        "against_ids": phases.against_ids, "diagnosed": phases.diagnosis.outcome,
    }
