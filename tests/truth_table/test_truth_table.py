# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The short form of the truth table, and what else real releases say.  ``make truth-table`` runs the whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mutants
import pytest
import shapes
import table
import trees
import unseen

from ansible_collections.dflash.fleet.plugins.module_utils import (
    capabilities,
    child,
    extensions,
    identity,
    probe_native,
    vocabulary,
)

MUTANTS = [*mutants.MUTANTS, *unseen.UNSEEN]
KINDS = {
    "decorator",
    "rebinding",
    "written on the way",
    "deletion",
    "off by one",
    "early return",
    "condition never true",
    "value unused",
    "wrong layer index",
    "other spelling",
    "renamed",
}


def test_the_short_form_has_no_false_pass_no_false_alarm_and_no_unknown_that_is_not_listed() -> None:
    changed = [item for item in MUTANTS if item.short]
    found = list(table.rows([trees.DEMO], changed, shapes.SHAPES))
    assert table.complaints(found) == []
    assert len(found) == len(trees.EXPECTED) * (1 + len(changed) + len(shapes.SHAPES))


def test_every_answer_is_expected_with_a_reason() -> None:
    asked = {case["id"] for case in capabilities.cases(capabilities.read_drafter(table.SECOND))}
    assert {"capability." + name for name in trees.EXPECTED} == asked
    assert asked == {name for name in vocabulary.CHECKS if name.startswith("capability.")}
    for steps in trees.EXPECTED.values():
        assert steps[0]["since"] == next(iter(trees.RELEASES))
        assert all(step["why"] and step["status"] in ("pass", "fail", "skip") for step in steps)
        assert [step["since"] for step in steps] == sorted((step["since"] for step in steps), key=trees.key)


def test_a_skip_is_of_a_runner_without_dflash_alone() -> None:
    skipped = {name for name, steps in trees.EXPECTED.items() if any(step["status"] == "skip" for step in steps)}
    assert skipped == set(shapes.V2)
    for name in skipped:
        assert [step["since"] for step in trees.EXPECTED[name]][:2] == ["0.20.0", "0.24.0"]
        assert [step["status"] for step in trees.EXPECTED[name]].count("skip") == 1


def test_every_kind_of_mutant_is_there_for_every_part() -> None:
    assert {item.kind for item in MUTANTS} == KINDS | {"right"}
    names = [item.name for item in MUTANTS]
    assert len(names) == len(set(names))
    broken = {check for item in MUTANTS for check, status in item.differs.items() if status == "fail"}
    assert set(trees.EXPECTED) - broken == {"swa.mixed.v1"}  # no release serves one: nothing can be broken


def test_what_running_the_real_functions_gave_is_what_is_expected() -> None:
    for version, values in trees.MEASURED["releases"].items():
        expected = trees.expected(version)
        for check, value in values.items():
            said = "pass" if value == trees.MEASURED["right"][check] else "fail"
            status = expected[check]["status"]
            if status != "skip":
                assert said == status, (version, check, value)


def test_release_data_agrees_with_its_source() -> None:
    setup = (trees.tree(trees.DEMO) / "setup.py").read_text(encoding="utf-8")
    for device in ("cpu", "cuda"):
        built = {item.module for item in extensions.from_setup(setup, device) if item.required}
        assert {item.module for item in extensions.from_release(trees.DEMO, device)} <= built


def test_a_release_picks_its_variant_by_the_processor() -> None:
    text = (trees.tree(trees.DEMO) / "vllm" / "platforms" / "cpu.py").read_text(encoding="utf-8")
    picked = []
    for avx512, bf16 in ((True, True), (True, False), (False, False)):
        cpu = SimpleNamespace(_is_avx512_supported=lambda a=avx512: a, _is_avx512_bf16_supported=lambda b=bf16: b)
        picked.append(probe_native.variant(text, SimpleNamespace(cpu=cpu)))
    assert picked == ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2"]


def test_a_drafter_of_the_speculators_dialect_is_translated_by_the_release() -> None:
    drafter = capabilities.read_drafter(
        {
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [2, 17],
            "mask_token_id": 1,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "layer_types": ["full_attention"] * 2,
            },
        }
    )
    found = capabilities.examine(str(trees.tree(trees.DEMO) / "vllm"), child.any_python(None), drafter, set())
    assert (found[0]["id"], found[0]["status"]) == ("capability.layer_offset.v1", "pass")
    assert found[0]["actual"] == [2, 17]


def test_a_release_says_its_version_and_commit() -> None:
    said = identity.package_version(str(trees.tree(trees.DEMO) / "vllm"))
    assert said["version"] == trees.DEMO
    assert (said["commit_id"] or "").startswith("g")


@pytest.mark.parametrize("name", sorted({path for item in MUTANTS for path in item.changes}))
def test_a_mutant_changes_a_file_that_is_read(name: str) -> None:
    assert (trees.tree(trees.DEMO) / "vllm" / Path(name)).is_file()
