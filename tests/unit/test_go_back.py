# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What serves after a failed gate is left alone only where it is right to: the role's expression, run by Ansible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from ansible_collections.dflash.fleet.plugins.module_utils.checks import make

REPO = Path(__file__).resolve().parents[2]
FACT = "_dflash_rollout_left_alone"

JUDGED: dict[str, Any] = {
    "__dflash_rollout_begun": {"failed": False, "changed": False},
    "_dflash_rollout_group": "rejudge",
    "__dflash_plan_state": {"proof": {"ok": True, "acceptance": {"floor": 2.0, "canary_floor": 6.0}}},
    "_dflash_accept_measured": {"acceptance_length": 7.9},
    "_dflash_accept_checks": [make("serving.canary_al", "fail", ">= 8.0", 7.9)],
    "_dflash_rollout_failure": {"checks": [make("serving.canary_al", "fail", ">= 8.0", 7.9)]},
    "__dflash_serve_check": {"pid": 7},
    "__dflash_accept_after": {"ok": True, "pid": 7},
}
DIED = {"_dflash_rollout_failure": {"checks": [make("serving.canary_al", "pass")]}}

#: case: (what differs from a proven server that misses a raised floor, whether it is left alone)
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "a floor was raised": ({}, True),
    "the instance belongs to another run": ({"__dflash_rollout_begun": {"failed": True}}, True),
    "below the floor it was proven with": ({"_dflash_accept_measured": {"acceptance_length": 1.0}}, False),
    "the canary below its old floor": ({"_dflash_accept_checks": [make("serving.canary_al", "fail", "", 1.0)]}, False),
    "the text is wrong": ({"_dflash_rollout_failure": {"checks": [make("serving.text", "fail")]}}, False),
    "it ended and every check had passed": ({**DIED, "__dflash_accept_after": {"ok": False, "pid": None}}, False),
    "it ended and a floor was missed too": ({"__dflash_accept_after": {"ok": False, "pid": None}}, False),
    "another process answers now": ({"__dflash_accept_after": {"ok": True, "pid": 8}}, False),
    "it was never proven": ({"__dflash_plan_state": {"proof": None}}, False),
    "a start was judged": ({"_dflash_rollout_group": "restart"}, False),
    "nothing was switched yet": ({"_dflash_rollout_group": "todo"}, True),
    "the candidate was switched to": ({"_dflash_rollout_group": "todo", "__dflash_rollout_switched": {}}, False),
}


def test_what_is_left_alone(tmp_path: Path) -> None:
    tasks = yaml.safe_load((REPO / "roles/dflash_rollout/tasks/go_back.yml").read_text(encoding="utf-8"))
    (task,) = [item for item in tasks if FACT in item.get("ansible.builtin.set_fact", {})]
    plays = []
    for name, (change, _alone) in CASES.items():
        show = {"ansible.builtin.debug": {"msg": "case %s=%s=" % (name, "{{ %s | bool }}" % FACT)}}
        plays.append({"hosts": "localhost", "connection": "local", "gather_facts": False,
                      "vars": {**JUDGED, **change}, "tasks": [task, show]})
    path = tmp_path / "cases.yml"
    path.write_text(json.dumps(plays), encoding="utf-8")
    done = subprocess.run([str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", str(path)],
                          env=dict(os.environ, ANSIBLE_CONFIG=str(REPO / "ansible.cfg")), cwd=REPO, text=True,
                          capture_output=True, timeout=120, check=False)
    said = {}
    for line in " ".join(done.stdout.split()).split("case ")[1:]:
        name, answer = line.split("=")[:2]
        said[name] = answer == "True"
    assert said == {name: alone for name, (_change, alone) in CASES.items()}, done.stdout + done.stderr
