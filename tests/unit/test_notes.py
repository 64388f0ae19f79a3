# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator takes upon himself is told in the recap, and only what exists can be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.dflash.fleet.plugins.module_utils import inputs, verdict

DECLARED: dict[str, Any] = {}
for spec in sorted(Path(__file__).resolve().parents[2].glob("roles/*/meta/argument_specs.yml")):
    DECLARED.update(yaml.safe_load(spec.read_text(encoding="utf-8"))["argument_specs"]["main"].get("options") or {})


def values(**given: Any) -> dict[str, Any]:
    """All inputs with their defaults and a few given ones."""
    merged, errors = inputs.merge(DECLARED, given)
    assert errors == []
    return merged


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({}, []),
        ({"dflash_accept_floor": 2.0, "dflash_accept_canary_floor": 7}, []),
        ({"dflash_accept_floor": 1.5}, ["dflash_accept_floor is lowered to 1.5 (default 2.0)"]),
        ({"dflash_accept_min_drafts": 10}, ["dflash_accept_min_drafts is lowered to 10 (default 200)"]),
        ({"dflash_accept_unknown": ["capability.swa.mixed.v2"]}, ["unknown is accepted for capability.swa.mixed.v2"]),
        (
            {"dflash_serve_allow_open_address": True},
            ["dflash_serve_allow_open_address: anybody who reaches the port is answered"],
        ),
        ({"dflash_serve_allow_open_address": True, "dflash_serve_api_key_file": "/etc/key"}, []),
    ],
)
def test_notes(given: dict[str, Any], notes: list[str]) -> None:
    assert inputs.notes(values(**given), DECLARED) == notes


def test_notes_stand_in_the_recap() -> None:
    entry = verdict.host_entry({"state": {"group": "unchanged"}, "notes": ["a floor is lowered"]}, False)
    made = verdict.build({"one": entry}, False, "", "")
    assert "  note: a floor is lowered" in verdict.recap(made, "path", "command")


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        ("capability.swa.mixed.v2", ""),
        ("ext.import:vllm._C", ""),
        ("capability.swa.mixed.v3", "did you mean capability.swa.mixed.v2?"),
        ("nonsense", "docs/checks.md lists them"),
    ],
)
def test_only_check_ids_can_be_accepted(check: str, sentence: str) -> None:
    found = [
        text for text in inputs.combinations(values(dflash_accept_unknown=[check])) if "dflash_accept_unknown" in text
    ]
    assert (found == []) == (sentence == "")
    assert all(sentence in text for text in found)
