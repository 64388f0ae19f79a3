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
    description: Predicts under C(--check) whether it would change something, and changes nothing.
  diff_mode:
    description: Shows under C(--diff) what it changes.
"""

    INFO = r"""
options: {}
attributes:
  check_mode:
    description: Predicts under C(--check) whether it would change something, and changes nothing.
    support: full
    details:
      - This module only reads, so it runs under C(--check) as ever.
  diff_mode:
    description: Shows under C(--diff) what it changes.
    support: N/A
    details:
      - This module changes nothing.
"""
