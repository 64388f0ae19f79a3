# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Every check id of the stages build and host has a damage that fails it."""

from __future__ import annotations

import re
from pathlib import Path

from damage_capabilities import CAPABILITIES
from damage_cases import BUILD

from ansible_collections.dflash.fleet.plugins.module_utils import checks, vocabulary

#: Fail on this release by its nature, which a test of their own shows.
BY_NATURE = {"capability.cache_rule.default", "capability.swa.mixed.v1"}


def test_every_check_has_a_damage() -> None:
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_stage.py"))
    # The checks that have a function of their own name themselves in an assertion.
    named = set(re.findall(r'"((?:host|pair|ext|complete|capability)\.[a-z0-9_.]+)(?::|")', texts))
    covered = {checks.base_id(case.fails) for case in [*BUILD, *CAPABILITIES]} | BY_NATURE
    wanted = {name for name, entry in vocabulary.CHECKS.items() if entry["stage"] in ("build", "host")}
    own = {"ext.ops", "ext.cuda_major", "ext.arch", "complete.requirements", "complete.dependencies"}
    assert own <= named | {"complete.dependencies"}
    assert (
        sorted(name for name in wanted - covered - own if name not in named or not name.startswith(("host.", "pair.")))
        == []
    )
