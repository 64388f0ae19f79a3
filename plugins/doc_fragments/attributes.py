# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What every module of the collection says about check mode and diff mode.

A module extends ``dflash.fleet.attributes`` and states ``support`` for each attribute itself;
one that only reads extends ``dflash.fleet.attributes.info`` and has nothing to add.
"""

from __future__ import annotations


class ModuleDocFragment:
    """Fragments ``dflash.fleet.attributes`` and ``dflash.fleet.attributes.info``."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
"""

    INFO = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
    support: full
    details:
      - This module only reads; it runs the same in check mode.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
    support: N/A
    details:
      - This module changes nothing.
"""
