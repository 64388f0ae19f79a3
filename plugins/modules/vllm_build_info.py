#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Tells what a vLLM tree or installation is, whether it is whole, and what it can do for DFlash drafters."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_build_info
short_description: Tells what a vLLM is, whether it is whole, and what it can do for DFlash
version_added: "0.1.0"
description:
  - Answers the checks of the build stage for a source tree, a virtual environment or a release of this collection.
  - A capability is found by running the code that decides it, cut out of the tree, on stand-ins for all else, and by
    following its answer to the code that uses it; never by the version number and never by searching for names.
  - Without O(drafter) every capability is answered for the drafter that stands for all (four sliding layers and a full
    one, and its all-sliding form), and none is required.
  - Never fails for what it finds, and never changes anything. Fails only for arguments that name nothing.
author:
  - The dflash.fleet authors (@dflash)
options:
  tree:
    description: Folder that holds C(vllm/), for example an unpacked source archive or a clone. Nothing of it is
      imported.
    type: path
  python:
    description: Interpreter whose vLLM is looked at.
    type: path
  release:
    description: Folder of an installed release, C(<root>/releases/<id>).
    type: path
  drafter:
    description: Folder with the C(config.json) of a drafter; what it needs is required then.
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
  - module: dflash.fleet.vllm_build_assert
"""

EXAMPLES = r"""
- name: See what an unpacked release can do
  dflash.fleet.vllm_build_info:
    tree: /usr/src/vllm-0.32.0
  register: told

- name: See whether an environment suits a drafter
  dflash.fleet.vllm_build_info:
    python: /opt/venv/bin/python
    drafter: /models/Qwen3-8B-DFlash-b16
    speculative_config:
      disable_eagle_block_drop: true
"""

RETURN = r"""
ok:
  description: Whether no required check stands against it. An C(unknown) that a later stage can settle does not.
  returned: success
  type: bool
checks:
  description: The checks, cheapest first.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Name of the check.
      type: str
    level:
      description: V(required) or V(advisory).
      type: str
    stage:
      description: Always V(build).
      type: str
    status:
      description: V(pass), V(fail), V(unknown) or V(skip).
      type: str
    expected:
      description: What was expected.
      type: raw
    actual:
      description: What was found.
      type: raw
    hint:
      description: What mends it.
      type: str
    evidence:
      description: What lets a sceptic repeat the finding.
      type: raw
identity:
  description: Distribution, versions, recorded commit and origin.
  returned: success
  type: dict
  sample:
    kind: installed
    distribution: vllm
    version: 0.32.1.dev2+g22b257388.cpu
    package_version: 0.32.1.dev2+g22b257388
    commit_id: g22b257388
    head:
    direct_url:
    path: /opt/dflash/releases/0123456789abcdef/venv/lib/python3.11/site-packages
    python: 3.11.2
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import checks, proof
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Arguments in, checks out."""
    module = AnsibleModule(
        argument_spec={
            "tree": {"type": "path"},
            "python": {"type": "path"},
            "release": {"type": "path"},
            "drafter": {"type": "path"},
            "speculative_config": {"type": "dict", "default": {}},
            "device": {"type": "str", "choices": ["cpu", "cuda"], "default": "cpu"},
            "runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
            "user": {"type": "str", "default": "nobody"},
            "deadline": {"type": "int", "default": 120},
        },
        required_one_of=[("tree", "python", "release")],
        mutually_exclusive=[("tree", "python", "release")],
        supports_check_mode=True,
    )
    params = module.params
    try:
        wish = proof.Wish(
            drafter=proof.load_drafter(params["drafter"]),
            speculative_config=params["speculative_config"],
            device=params["device"],
            runner=params["runner"],
            user=params["user"],
            deadline=params["deadline"],
        )
        found, said = proof.inspect(params["tree"], params["python"], params["release"], wish)
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, identity=said, **checks.result(found, may_be_covered=True))


if __name__ == "__main__":
    main()
