#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Says what the configurations of a target and a drafter state about their pair."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_pair_info
short_description: Tells whether a target and a drafter belong together
version_added: "0.1.0"
description:
  - Reads the C(config.json) of a target and of a DFlash drafter and compares hidden size, depth, vocabulary, block
    size and layer types.
  - Understands the z-lab dialect (C(dflash_config)) and the speculators dialect (C(speculators_model_type)), and
    targets that nest their language model in C(text_config).
  - Never fails for what it finds, and never changes anything. What a configuration does not state is V(unknown).
author:
  - The dflash.fleet authors (@dflash)
options:
  target:
    description: Folder of the target, or its C(config.json).
    type: path
    required: true
  drafter:
    description: Folder of the drafter, or its C(config.json).
    type: path
    required: true
  num_speculative_tokens:
    description: Tokens to draft per round; V(0) means what the block size allows, which is block size - 1.
    type: int
    default: 0
  device:
    description: Where the pair is to be served. V(cpu) has no Triton, so no V2 model runner.
    type: str
    choices: [cuda, cpu]
    default: cuda
  runner:
    description: The model runner that will serve; V(auto) leaves it to the release.
    type: str
    choices: [auto, v1, v2]
    default: auto
extends_documentation_fragment:
  - dflash.fleet.attributes.info
seealso:
  - module: dflash.fleet.dflash_acceptance
    description: Measures whether a pair that fits works.
"""

EXAMPLES = r"""
- name: Pair the models before anything is touched
  dflash.fleet.dflash_pair_info:
    target: /srv/models/Qwen3-8B
    drafter: /srv/models/Qwen3-8B-DFlash-b16
  register: pair

- name: Show what is wrong
  ansible.builtin.debug:
    var: pair.message
  when: not pair.ok
"""

RETURN = r"""
ok:
  description: Whether no required check stands against the pair.
  returned: always
  type: bool
checks:
  description: The checks C(pair.architecture), C(pair.hidden_size), C(pair.layers), C(pair.vocab),
    C(pair.block_size) and C(pair.runner).
  returned: always
  type: list
  elements: dict
message:
  description: What stands against the pair, with the numbers; empty when nothing does.
  returned: always
  type: str
k:
  description: Tokens to draft per round, as asked for or by default; none when no block size is stated.
  returned: always
  type: int
block_size:
  description: The drafter's block size; it counts the known token too.
  returned: always
  type: int
dialect:
  description: V(zlab), V(speculators), V(other) (another method) or V(unknown).
  returned: always
  type: str
layer_types:
  description: The drafter's layers.
  returned: always
  type: list
  elements: str
window:
  description: Window of the sliding layers.
  returned: always
  type: int
target_layer_ids:
  description: Target layers that the drafter reads, counted from 0.
  returned: always
  type: list
  elements: int
taps:
  description: The same as the engine must use them, id + 1.
  returned: always
  type: list
  elements: int
runner:
  description: V(v1), V(v2) or V(auto).
  returned: always
  type: str
needs:
  description: What the build must be able to do, of V(v2_runner), V(swa_uniform), V(swa_mixed), V(dflash2).
  returned: always
  type: list
  elements: str
max_model_len:
  description: The drafter's longest context.
  returned: always
  type: int
"""

import os
from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import pairing
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json


def read_config(path: str, option: str) -> Mapping[str, Any]:
    """The configuration in a model folder.  Raises ``DflashError``."""
    name = os.path.join(path, "config.json") if os.path.isdir(path) else path
    value = read_json(name)
    if not isinstance(value, dict):
        raise DflashError(
            "There is no readable config.json" if not os.path.exists(name) else "This is no JSON object", name,
            "Give the model's folder in %s." % option,
        )
    return value


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "path", "required": True},
            "drafter": {"type": "path", "required": True},
            "num_speculative_tokens": {"type": "int", "default": 0},
            "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
            "runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        found = pairing.examine(
            read_config(options["target"], "target"), read_config(options["drafter"], "drafter"),
            options["num_speculative_tokens"], options["device"],
            None if options["runner"] == "auto" else options["runner"],
        )
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
