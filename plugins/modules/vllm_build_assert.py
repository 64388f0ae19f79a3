#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Proves that an installed vLLM is the build that was made, whole, and able to serve a drafter."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_build_assert
short_description: Proves that an installed vLLM is the build that was made, and fits its drafter
version_added: "0.1.0"
description:
  - Answers the same checks as M(dflash.fleet.vllm_build_info) for an installation, compares its identity with the
    manifest of the build, and fails when a required check does not pass.
  - Needs no GPU. A capability that cannot be found in the code (C(unknown)) does not fail here when the canary pair can
    settle it later, or when O(accept_unknown) names it.
  - Never changes anything.
author:
  - The dflash.fleet authors (@dflash)
options:
  release:
    description: Folder of an installed release, C(<root>/releases/<id>).
    type: path
  python:
    description: Interpreter whose vLLM is proven, where it is not a release of this collection.
    type: path
  manifest:
    description: The manifest of the build. Without it the identity is told, not compared.
    type: dict
    default: {}
  drafter:
    description: Folder with the C(config.json) of the drafter that will be served. Without it no capability is
      required.
    type: path
  target:
    description: Folder with the C(config.json) of the target model. Where that nests its language model
      (C(*ForConditionalGeneration)), the sharing of its head is required too.
    type: path
  speculative_config:
    description: Further keys of the speculative configuration that the server is started with, such as
      C(disable_eagle_block_drop).
    type: dict
    default: {}
  device:
    description: What the build is for.
    type: str
    choices: [cpu, cuda]
    default: cpu
  runner:
    description: The model runner that will serve; V(auto) finds those that may.
    type: str
    choices: [auto, v1, v2]
    default: auto
  accept_unknown:
    description: Ids of checks whose V(unknown) is accepted. A V(fail) never is.
    type: list
    elements: str
    default: []
  user:
    description: Account that runs foreign code when the module runs as root. It is never root.
    type: str
    default: nobody
  deadline:
    description: Seconds that a child process may take.
    type: int
    default: 120
extends_documentation_fragment:
  - dflash.fleet.attributes
  - dflash.fleet.attributes.info
seealso:
  - module: dflash.fleet.vllm_build_info
"""

EXAMPLES = r"""
- name: Prove a release before anything is switched to it
  dflash.fleet.vllm_build_assert:
    release: /opt/dflash/releases/0123456789abcdef
    manifest: "{{ lookup('ansible.builtin.file', 'manifest.json') | from_json }}"
    drafter: /opt/dflash/models/drafter@main
    speculative_config:
      disable_eagle_block_drop: true
    user: dflash
"""

RETURN = r"""
ok:
  description: Whether no required check stands against the build.
  returned: always
  type: bool
checks:
  description: The checks, cheapest first; their keys are those of M(dflash.fleet.vllm_build_info).
  returned: always
  type: list
  elements: dict
blocking:
  description: Ids of the required checks that did not pass.
  returned: always
  type: list
  elements: str
identity:
  description: Distribution, versions, recorded commit and origin.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import checks, proof
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Arguments in, checks out; fails when the build is not proven."""
    module = AnsibleModule(
        argument_spec={
            "release": {"type": "path"},
            "python": {"type": "path"},
            "manifest": {"type": "dict", "default": {}},
            "drafter": {"type": "path"},
            "target": {"type": "path"},
            "speculative_config": {"type": "dict", "default": {}},
            "device": {"type": "str", "choices": ["cpu", "cuda"], "default": "cpu"},
            "runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
            "accept_unknown": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "default": "nobody"},
            "deadline": {"type": "int", "default": 120},
        },
        required_one_of=[("python", "release")],
        mutually_exclusive=[("python", "release")],
        supports_check_mode=True,
    )
    params = module.params
    try:
        wish = proof.Wish(
            drafter=proof.load_drafter(params["drafter"]),
            speculative_config=params["speculative_config"],
            device=params["device"],
            runner=params["runner"],
            manifest=params["manifest"] or None,
            user=params["user"],
            deadline=params["deadline"],
            nested_target=proof.load_nested(params["target"]),
        )
        found, said = proof.inspect(None, params["python"], params["release"], wish)
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    against = checks.blocking(found, params["accept_unknown"], may_be_covered=True)
    answer = {"ok": not against, "checks": found, "blocking": [item["id"] for item in against], "identity": said}
    if against:
        where = params["release"] or params["python"]
        module.fail_json(
            msg="The build is not proven [%s]: %s" % (where, " | ".join(checks.sentence(item) for item in against)),
            what="The build is not proven: %s." % ", ".join(answer["blocking"]),
            where=where,
            fix=against[0]["hint"],
            **answer,
        )
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
