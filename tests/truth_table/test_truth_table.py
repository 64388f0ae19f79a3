# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What real releases can do, what real code that was broken can not, and what the probes must not be fooled by."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import trees

from ansible_collections.dflash.fleet.plugins.module_utils import (
    capabilities,
    child,
    extensions,
    identity,
    probe_native,
)

MUTATED = "0.32.0"
RUNNER = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
MODEL = "model_executor/models/qwen3_dflash.py"
CONFIG = "config/speculative.py"
SCHEDULER = "v1/core/sched/scheduler.py"
WINDOWS = ("swa.uniform.v1", "swa.uniform.v2", "swa.mixed.v2")
TAKE = "(dflash_config.get("
FIRST = '        layer_ids = getattr(hf_config, "eagle_aux'

#: name: ({file: [(text, other text)]}, what is no longer what it was)
MUTANTS: dict[str, tuple[dict[str, list[tuple[str, str]]], dict[str, str]]] = {
    "nothing changed": ({}, {}),
    "comments and names only": ({RUNNER: [("i + 1 for i in " + TAKE, "one + 1 for one in " + TAKE)]}, {}),
    "another spelling": ({RUNNER: [("i + 1 for i in " + TAKE, "1 - -i for i in " + TAKE)]}, {}),
    "shift deleted": ({RUNNER: [("i + 1 for i in " + TAKE, "i for i in " + TAKE)]}, {"layer_offset.v1": "fail"}),
    "shift deleted, V2": (
        {RUNNER_V2: [("[i + 1 for i in " + TAKE, "[i for i in " + TAKE)]},
        {"layer_offset.v2": "fail"},
    ),
    "shift by two": ({RUNNER: [("i + 1 for i in " + TAKE, "i + 2 for i in " + TAKE)]}, {"layer_offset.v1": "fail"}),
    "early return": ({RUNNER: [(FIRST, "        return None\n" + FIRST)]}, {"layer_offset.v1": "fail"}),
    "condition never true": (
        {RUNNER: [("isinstance(dflash_config, dict)", "isinstance(dflash_config, tuple)")]},
        {"layer_offset.v1": "fail"},
    ),
    "taps dropped by their user": (
        {RUNNER: [("set_aux_hidden_state_layers(aux_layers)", "set_aux_hidden_state_layers(aux_layers[1:])")]},
        {"layer_offset.v1": "fail"},
    ),
    "renamed": ({RUNNER: [("_get_eagle3_aux_layers_from_config", "_taps")]}, {"layer_offset.v1": "unknown"}),
    "window not passed": ({MODEL: [("per_layer_sliding_window=sliding_window,", "")]}, dict.fromkeys(WINDOWS, "fail")),
    "window computed, None passed": (
        {MODEL: [("per_layer_sliding_window=sliding_window,", "per_layer_sliding_window=None,")]},
        dict.fromkeys(WINDOWS, "fail"),
    ),
    "one window for all": (
        {MODEL: [("is_sliding = layer_types[layer_idx]", "is_sliding = layer_types[0]")]},
        {"swa.mixed.v2": "fail"},
    ),
    "option removed": (
        {
            CONFIG: [
                ("    disable_eagle_block_drop: bool = False\n", ""),
                (" and not self.disable_eagle_block_drop", ""),
            ]
        },
        {"cache_rule.opt_in": "fail"},
    ),
    "option ignored": ({CONFIG: [(" and not self.disable_eagle_block_drop", "")]}, {"cache_rule.opt_in": "fail"}),
    "option ignored by the scheduler": (
        {SCHEDULER: [("use_eagle=self.use_eagle_block_drop", "use_eagle=self.use_eagle")]},
        {"cache_rule.opt_in": "fail"},
    ),
}


def statuses(folder: Path) -> dict[str, str]:
    found = capabilities.examine(str(folder / "vllm"), child.any_python(None), None, set())
    return {item["id"].replace("capability.", ""): item["status"] for item in found}


def expected(version: str) -> dict[str, str]:
    ids = [case["id"].replace("capability.", "") for case in capabilities.cases(None)]
    return {name: "pass" if name in trees.RELEASES[version]["pass"] else "fail" for name in ids}


def test_what_a_release_can_do(version: str) -> None:
    assert statuses(trees.tree(version)) == expected(version)


def test_release_data_agrees_with_its_source(version: str) -> None:
    setup = (trees.tree(version) / "setup.py").read_text(encoding="utf-8")
    for device in ("cpu", "cuda"):
        built = {item.module for item in extensions.from_setup(setup, device) if item.required}
        assert {item.module for item in extensions.from_release(version, device)} <= built


def test_a_release_picks_its_variant_by_the_processor(version: str) -> None:
    text = (trees.tree(version) / "vllm" / "platforms" / "cpu.py").read_text(encoding="utf-8")
    picked = []
    for avx512, bf16 in ((True, True), (True, False), (False, False)):
        cpu = SimpleNamespace(_is_avx512_supported=lambda a=avx512: a, _is_avx512_bf16_supported=lambda b=bf16: b)
        picked.append(probe_native.variant(text, SimpleNamespace(cpu=cpu)))
    assert picked == ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2"]


def test_a_drafter_of_the_speculators_dialect_is_translated_by_the_release(version: str) -> None:
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
    found = capabilities.examine(str(trees.tree(version) / "vllm"), child.any_python(None), drafter, set())
    assert (found[0]["id"], found[0]["status"]) == ("capability.layer_offset.v1", "pass")
    assert found[0]["actual"] == [2, 17]


def test_a_release_says_its_version_and_commit(version: str) -> None:
    said = identity.package_version(str(trees.tree(version) / "vllm"))
    assert said["version"] == version
    assert (said["commit_id"] or "").startswith("g")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_release_is_told_from_a_right_one(tmp_path: Path, name: str) -> None:
    changes, differs = MUTANTS[name]
    shutil.copytree(trees.tree(MUTATED), tmp_path / "tree")
    for path, replacements in changes.items():
        file = tmp_path / "tree" / "vllm" / path
        text = file.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text, "%r is no longer in %s" % (old, path)
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    assert statuses(tmp_path / "tree") == {**expected(MUTATED), **differs}
