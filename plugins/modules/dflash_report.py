#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of an action plugin; see plugins/action/dflash_report.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_report
short_description: Writes the verdict of a run and prints its recap
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - Collects what the roles left on every host of the play, writes C(runs/<time>/verdict.json) on the controller, points
    C(runs/latest) to it and prints one recap. It runs on the controller and makes no connection.
  - It also writes in check mode, because the prediction is what that run is for.
extends_documentation_fragment:
  - dflash.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
options:
  predict:
    description: The run only planned, so a host that would be worked on is V(would_change). Always so in check mode.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Report
  dflash.fleet.dflash_report:
  run_once: true
  register: report
"""

RETURN = r"""
verdict:
  description: The verdict (see C(docs/schema/verdict.json)).
  type: dict
  returned: success
path:
  description: Where the verdict was written.
  type: str
  returned: success
causes:
  description: Causes of an exit code other than 0.
  type: list
  elements: str
  returned: success
code:
  description: Exit code of the command line for these causes.
  type: int
  returned: success
"""
