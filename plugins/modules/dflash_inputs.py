#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of an action plugin; see plugins/action/dflash_inputs.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_inputs
short_description: Types and checks every variable of dflash.fleet, once
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - Reads every variable that the roles of this collection declare, coerces each to its declared type, and
    answers misspelt names with the nearest one.
  - Fails with all sentences at once, before any host is touched. It runs on the controller and makes no connection.
  - Describes model folders that lie on the controller (revision by content, config.json).
extends_documentation_fragment:
  - dflash.fleet.attributes.info
options:
  scope:
    description:
      - What the inputs are for. V(verify) types only what a diagnosis needs, so that it can be run without models and
        without a build; names are judged alike.
    type: str
    choices: [deploy, verify]
    default: deploy
"""

EXAMPLES = r"""
- name: Type all inputs
  dflash.fleet.dflash_inputs:
  register: typed
"""

RETURN = r"""
inputs:
  description: Every declared variable, typed, with the instance's overrides applied.
  type: dict
  returned: success
instance:
  description: Name of the instance.
  type: str
  returned: success
series:
  description: Absolute paths of the patches on the controller.
  type: list
  elements: str
  returned: success
lock_file:
  description: Where the lock is kept on the controller.
  type: str
  returned: success
report_dir:
  description: Where runs leave their verdicts on the controller.
  type: str
  returned: success
# With O(scope=verify) what follows is not returned.
target:
  description: The target (source, name, path, revision, config, stat).
  type: dict
  returned: success
drafter:
  description: The drafter, described like the target.
  type: dict
  returned: success
canary:
  description: The canary pair (target, drafter, items).
  type: dict
  returned: success
prompts:
  description: Prompts of the real pair, with the expected answer where it is known.
  type: list
  elements: dict
  returned: success
run:
  description: This run's process on the controller (machine_id, pid, start_ticks, boot_id).
  type: dict
  returned: success
started:
  description: When the inputs were typed, in seconds since the epoch.
  type: float
  returned: success
notes:
  description: What the operator took upon himself (lowered floors, accepted unknowns), for the recap.
  type: list
  elements: str
  returned: success
pair_is_canary:
  description: Whether the instance's pair is the canary pair itself.
  type: bool
  returned: success
errors:
  description: Every sentence that stands against the inputs.
  type: list
  elements: str
  returned: failure
"""
