# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which hosts a phase runs over, and who builds for whom."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import checks, diagnosis, plan

#: Groups of hosts that a phase visits, made by ``group_by`` while the run goes on.
VISITED: Dict[str, List[str]] = {
    "preflight": ["dflash_todo", "dflash_restart"],
    "build": ["dflash_builder"],
    "distribute": ["dflash_todo"],
    "prove_build": ["dflash_todo", "dflash_reprove"],
    "roll_out": ["dflash_todo", "dflash_reprove", "dflash_restart", "dflash_rejudge"],
}


def phase_hosts(groups: Mapping[str, List[str]], phase: str) -> List[str]:
    """Hosts that a phase visits, in the inventory's order, without the refused ones.

    Refusals of plan and preflight stop every host (``dflash_stop``); later ones only the host itself.
    """
    if groups.get("dflash_stop"):
        return []
    visited = {str(name) for group in VISITED[phase] for name in groups.get(group, [])}
    refused = {str(name) for name in groups.get("dflash_refused", [])}
    return [str(name) for name in groups.get("all", []) if str(name) in visited - refused]


def builders(hostvars: Mapping[str, Any], groups: Mapping[str, List[str]]) -> Dict[str, str]:
    """``{build id: inventory name of its builder}`` for the hosts that have work to do."""
    hosts = {}
    for name in groups.get("dflash_todo", []):
        state = hostvars[name]["__dflash_plan_state"]
        inputs = hostvars[name]["__dflash_plan_inputs"]["inputs"]
        hosts[str(name)] = {
            "build_id": str(state["build_id"]),
            "glibc": str(state["python"]["glibc"]),
            "has_release": bool(state["has_release"]),
            "build_host": str(inputs["vllm_build_host"]),
        }
    return plan.builders(hosts)


def against(found: List[Dict[str, Any]], accept_unknown: Sequence[str] = ()) -> List[str]:
    """One sentence for each required check that stands against a result."""
    return [checks.sentence(item) for item in checks.blocking(found, accept_unknown, may_be_covered=True)]


def against_ids(found: List[Dict[str, Any]]) -> List[str]:
    """Ids of the required checks that stand against a result."""
    return [item["id"] for item in checks.blocking(found)]


class FilterModule:
    """Filters of dflash.fleet."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "phase_hosts": phase_hosts,
            "builders": builders,
            "against": against,
            "against_ids": against_ids,
            "diagnosed": diagnosis.outcome,
        }
