# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The diagnostic this project began with: a version string, a few greps, an import.  What each of them proves.

Every question of it is answered as hoped by a tree whose drafter is wired wrongly.  So a text search is not a check
here; it is kept as the list of what a proof must not rest on.  What the version string proves stands in
test_identity_cases.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm_tree as tree
from test_capabilities import statuses

#: question of the diagnostic: (file, pattern, what a hit proves)
GREPS = {
    "the window's words are there": (tree.MODEL, r"sliding_attention|layer_types", "somebody reads the key"),
    "the window has a parameter": (tree.MODEL, r"sliding_window", "it can be passed, not that it is"),
    "a class of the fix is defined": (tree.MODEL, r"class DFlash\w*Attention", "the file is of that era or later"),
    "the shift stands in the runner": (tree.RUNNER_V1, r"\+ 1", "somebody adds one to something"),
    "the rule has its option": (tree.CONFIG, r"disable_eagle_block_drop", "the option exists, not who obeys it"),
}

#: fault put into a tree in which all those words stay: what changes, and the checks that see it
FAULTS = {
    "shift undone by who takes the ids": (
        {tree.RUNNER_V1: {"hidden_state_layers(taps)": "hidden_state_layers(tuple(t - 1 for t in taps))"}},
        ["layer_offset.v1"],
    ),
    "window read and not handed on": (
        {tree.MODEL: {"per_layer_sliding_window=sliding_window, ": ""}},
        ["swa.mixed.v2", "swa.uniform.v1", "swa.uniform.v2"],
    ),
    "option that nobody obeys": ({tree.CONFIG: {" and not self.disable_eagle_block_drop": ""}}, ["cache_rule.opt_in"]),
}


def hits(package: Path) -> dict[str, bool]:
    """What each grep answers about a tree."""
    return {
        name: bool(re.search(pattern, (package / file).read_text(encoding="utf-8")))
        for name, (file, pattern, _proves) in GREPS.items()
    }


@pytest.mark.parametrize(("changes", "seen"), FAULTS.values(), ids=FAULTS)
def test_every_grep_is_satisfied_by_a_tree_that_drafts_wrongly(tmp_path, changes, seen) -> None:
    package = tree.write(tmp_path / "wrong", changes)
    assert all(hits(package).values())
    right, wrong = statuses(tree.write(tmp_path / "right")), statuses(package)
    changed = sorted(name for name in right if right[name] == "pass" and wrong[name] == "fail")
    assert [name for name in seen if name not in changed] == []


def test_a_grep_that_finds_nothing_proves_as_little(tmp_path) -> None:
    """The fork's name of the cache rule is in no release; its absence condemned releases that are right."""
    package = tree.write(tmp_path)
    assert not re.search(r"requires_eagle_cache_drop", (package / tree.CONFIG).read_text(encoding="utf-8"))
    assert statuses(package)["cache_rule.opt_in"] == "pass"
