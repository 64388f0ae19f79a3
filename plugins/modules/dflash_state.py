#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Is this host proven, unchanged and alive; and if not, what is missing?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_state
short_description: Answers in one round trip whether a host is proven and unchanged
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - The fast path's one question. Compares the wanted deployment with what is installed, served and proven on the
    host, file by file (sizes, times, inodes of everything, hashes of vLLM's own files), and names every cause of a
    difference.
  - Reads only. The groups are V(unchanged), V(rejudge) (the gate must judge again), V(restart) (the process must be
    started), V(reprove) (the build must be proven again) and V(todo).
extends_documentation_fragment:
  - dflash.fleet.attributes.info
options:
  inputs:
    description: Typed inputs, as M(dflash.fleet.dflash_inputs) returns them.
    type: dict
    required: true
  instance:
    description: Name of the instance.
    type: str
    default: main
  pin:
    description: The pin, as M(dflash.fleet.vllm_pin) returns it.
    type: dict
    required: true
  target:
    description: The target, as M(dflash.fleet.dflash_inputs) returns it.
    type: dict
    required: true
  drafter:
    description: The drafter, as M(dflash.fleet.dflash_inputs) returns it.
    type: dict
    required: true
  canary:
    description: Revisions of the canary pair by role.
    type: dict
    default: {}
  prompts:
    description: Prompts of the gate.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Ask the host
  dflash.fleet.dflash_state:
    inputs: "{{ typed.inputs }}"
    pin: "{{ resolved.pin }}"
    target: "{{ typed.target }}"
    drafter: "{{ typed.drafter }}"
  register: state
"""

RETURN = r"""
group:
  description: V(unchanged), V(rejudge), V(restart), V(reprove) or V(todo).
  type: str
  returned: success
causes:
  description: Why the host is not unchanged, as a list of kind and text.
  type: list
  elements: dict
  returned: success
build_id:
  description: Id of the build that this host needs.
  type: str
  returned: success
deployment_id:
  description: Id of the wanted deployment, empty while its release is not installed.
  type: str
  returned: success
release:
  description: Manifest of the installed release of this build, or none.
  type: dict
  returned: success
pair:
  description: What target and drafter say of each other (taps, K, layer types, checks).
  type: dict
  returned: success
current:
  description: Id of the current deployment, or empty.
  type: str
  returned: success
proof:
  description: The proof of the current deployment, or none.
  type: dict
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import state
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Assess and answer."""
    module = AnsibleModule(
        supports_check_mode=True,
        argument_spec={
            "inputs": {"type": "dict", "required": True},
            "instance": {"type": "str", "default": "main"},
            "pin": {"type": "dict", "required": True},
            "target": {"type": "dict", "required": True},
            "drafter": {"type": "dict", "required": True},
            "canary": {"type": "dict", "default": {}},
            "prompts": {"type": "list", "elements": "dict", "default": []},
        },
    )
    given = module.params
    try:
        answer = state.assess(
            given["inputs"],
            given["instance"],
            given["pin"],
            given["target"],
            given["drafter"],
            given["canary"],
            given["prompts"],
        )
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
