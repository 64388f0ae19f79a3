# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the probes say of a right tree, of trees with the right words and the wrong deeds, and of renamed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_tree as tree

from ansible_collections.dflash.fleet.plugins.module_utils import capabilities, child, symbols

RIGHT = {
    "layer_offset.v1": "pass",
    "layer_offset.v2": "pass",
    "swa.uniform.v1": "pass",
    "swa.uniform.v2": "pass",
    "swa.mixed.v1": "fail",
    "swa.mixed.v2": "pass",
    "cache_rule.default": "fail",
    "cache_rule.opt_in": "pass",
    "lookahead_slot": "pass",
    "mixed_guard": "pass",
    "lm_head_sharing.v1": "pass",
    "lm_head_sharing.v2": "pass",
}
WINDOWS = ("swa.uniform.v1", "swa.uniform.v2", "swa.mixed.v2")
#: What a tree does wrong with a mixed drafter without refusing it, the guard tells too.
WRONG_WINDOWS = {**dict.fromkeys(WINDOWS, "fail"), "mixed_guard": "fail"}
SHIFT = "[number + 1 for number in own["


def statuses(package: Path, drafter: Any = None, required: set[str] = frozenset()) -> dict[str, str]:
    found = capabilities.examine(str(package), child.any_python(None), drafter, set(required))
    return {item["id"].replace("capability.", ""): item["status"] for item in found}


def test_a_right_tree(tmp_path: Path) -> None:
    assert statuses(tree.write(tmp_path)) == RIGHT


SAME = [
    (
        "shift in another spelling",
        {tree.RUNNER_V1: {SHIFT + '"target_layer_ids"]]': 'list(map(lambda n: 1 + n, own["target_layer_ids"]))'}},
    ),
    (
        "shift by a helper",
        {
            tree.RUNNER_V1: {
                SHIFT + '"target_layer_ids"]]': 'self._up(own["target_layer_ids"])',
                "    def load_model": "    @staticmethod\n    def _up(ids, by=1):\n"
                "        return [n + by for n in ids]\n\n    def load_model",
            }
        },
    ),
    (
        "taps handed over at once",
        {
            tree.RUNNER_V1: {
                "self.model.set_aux_hidden_state_layers(taps)": (
                    "self.model.set_aux_hidden_state_layers(self._get_eagle3_aux_layers_from_config())"
                )
            }
        },
    ),
    (
        "window in another spelling",
        {
            tree.MODEL: {
                "window, causal = _resolve(config, layer_idx)": (
                    "both = _resolve(config, layer_idx)\n        window, causal = both[0], both[1]"
                )
            }
        },
    ),
    ("rule through a local name", {tree.SCHEDULER: {"use_eagle=self.drops": "use_eagle=bool(self.drops)"}}),
]


@pytest.mark.parametrize("changes", [case[1] for case in SAME], ids=[case[0] for case in SAME])
def test_another_spelling_of_the_same_is_right(tmp_path: Path, changes: dict[str, dict[str, str]]) -> None:
    assert statuses(tree.write(tmp_path, changes)) == RIGHT


WRONG = [
    ("shift deleted", {tree.RUNNER_V1: {SHIFT: "[number for number in own["}}, {"layer_offset.v1": "fail"}),
    ("shift deleted, V2", {tree.RUNNER_V2: {"number + 1": "number"}}, {"layer_offset.v2": "fail"}),
    ("shift by two", {tree.RUNNER_V1: {SHIFT: "[number + 2 for number in own["}}, {"layer_offset.v1": "fail"}),
    (
        "early return",
        {tree.RUNNER_V1: {"        config = self.spec": "        return None\n        config = self.spec"}},
        {"layer_offset.v1": "fail"},
    ),
    (
        "a constant",
        {
            tree.RUNNER_V1: {
                "        config = self.spec": "        return (2, 17, 32, 47, 62)\n        config = self.spec"
            }
        },
        {"layer_offset.v1": "fail"},
    ),
    (
        "condition never true",
        {tree.RUNNER_V1: {"isinstance(own, dict)": "isinstance(own, list)"}},
        {"layer_offset.v1": "fail"},
    ),
    (
        "shifted back by the user",
        {
            tree.RUNNER_V1: {
                "set_aux_hidden_state_layers(taps)": "set_aux_hidden_state_layers(tuple(t - 1 for t in taps))"
            }
        },
        {"layer_offset.v1": "fail"},
    ),
    ("defaults instead", {tree.RUNNER_V1: {"if taps:": "if not taps:"}}, {"layer_offset.v1": "fail"}),
    ("renamed", {tree.RUNNER_V1: {"_get_eagle3_aux_layers_from_config": "_taps"}}, {}),
    ("decided elsewhere", {tree.RUNNER_V1: {"if own and": "if envs.SHIFT and"}}, {"layer_offset.v1": "unknown"}),
    (
        "window computed, not passed to the attention",
        {tree.MODEL: {"per_layer_sliding_window=sliding_window, ": ""}},
        WRONG_WINDOWS,
    ),
    (
        "window computed, not passed by the layer",
        {tree.MODEL: {"sliding_window=window, ": ""}},
        WRONG_WINDOWS,
    ),
    (
        "one window for all",
        {tree.MODEL: {"kinds[layer_idx] ==": "kinds[0] =="}},
        {"swa.mixed.v2": "fail", "mixed_guard": "fail"},
    ),
    (
        "causality turned round",
        {tree.MODEL: {"else None, slides": "else None, not slides"}},
        {**WRONG_WINDOWS, "swa.uniform.v1": "pass"},
    ),
    (
        "V1 takes mixed layers",
        {tree.MODEL: {" and not get_current_vllm_config().use_v2_model_runner": " and False"}},
        {"mixed_guard": "fail"},
    ),
    (
        "causality lost",
        {
            tree.MODEL: {
                ", causal: bool = False": ", onward: bool = False",
                "causal=causal": "onward=causal",
                "        self.causal = causal\n": "",
            }
        },
        {"swa.uniform.v2": "unknown", "swa.mixed.v2": "unknown", "mixed_guard": "unknown"},
    ),
    (
        "causality and window lost",
        {
            tree.MODEL: {
                ", causal: bool = False": "",
                "sliding_window=window, causal=causal, ": "",
                "        self.causal = causal\n": "",
            }
        },
        WRONG_WINDOWS,
    ),
    (
        "option removed",
        {
            tree.CONFIG: {
                "    disable_eagle_block_drop: bool = False\n": "",
                " and not self.disable_eagle_block_drop": "",
            }
        },
        {"cache_rule.opt_in": "fail"},
    ),
    ("option ignored", {tree.CONFIG: {" and not self.disable_eagle_block_drop": ""}}, {"cache_rule.opt_in": "fail"}),
    (
        "option ignored by the scheduler",
        {tree.SCHEDULER: {"use_eagle=self.drops": "use_eagle=self.use_eagle"}},
        {"cache_rule.opt_in": "fail"},
    ),
    ("nobody drops", {tree.CONFIG: {"return self.use_eagle() and": "return False and"}}, {"cache_rule.opt_in": "fail"}),
    (
        "the manager drops always",
        {tree.MANAGER: {"use_eagle=self.use_eagle": "use_eagle=True"}},
        {"cache_rule.opt_in": "fail"},
    ),
    (
        "kept by default",
        {tree.CONFIG: {"return self.use_eagle() and": "return self.method != 'dflash' and self.use_eagle() and"}},
        {"cache_rule.default": "pass"},
    ),
    (
        "not Python",
        {tree.CONFIG: {"return self.use_eagle() and": "return ("}},
        {"cache_rule.default": "unknown", "cache_rule.opt_in": "unknown", "lookahead_slot": "unknown"},
    ),
]


@pytest.mark.parametrize("changes, expected", [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_right_words_that_do_the_wrong_thing(
    tmp_path: Path, changes: dict[str, dict[str, str]], expected: dict[str, str]
) -> None:
    assert statuses(tree.write(tmp_path, changes)) == {**RIGHT, **expected}


def test_a_check_without_a_known_place_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(symbols.SYMBOLS, "capability.layer_offset.v1")
    assert statuses(tree.write(tmp_path)) == {**RIGHT, "layer_offset.v1": "unknown"}


V2 = ("layer_offset.v2", "swa.uniform.v2", "swa.mixed.v2", "lm_head_sharing.v2")


def test_a_tree_without_the_v2_runner(tmp_path: Path) -> None:
    """There is nothing to judge; a deployment that needs it is refused all the same."""
    package = tree.write(tmp_path, without=(tree.SPECULATOR, tree.HEADS_V2, tree.RUNNER_V2))
    assert statuses(package) == {**RIGHT, **dict.fromkeys(V2, "skip")}
    found = statuses(package, required={"capability.layer_offset.v2"})
    assert found == {**RIGHT, **dict.fromkeys(V2, "skip"), "layer_offset.v2": "fail"}


def test_layers_that_know_only_their_type_take_causality_from_the_proposer(tmp_path: Path) -> None:
    builder = """class DFlashProposer(Base):
    def set_inputs(self, common):
        return CommonAttentionMetadata(common.slots, causal=False)

    def build_per_group_and_layer_attn_metadata(self, cad, draft_index=0):
        groups, layers = super().build_per_group_and_layer_attn_metadata(cad, draft_index)
        for group in self.draft_attn_groups:
            causal = group.get_metadata_builder().build_for_drafting(common_attn_metadata=cad.replace(causal=True))
            for name in self.model.sliding_attention_layer_names & set(group.layer_names):
                layers[name] = causal
        return groups, layers
"""
    changes = {
        tree.MODEL: {
            "config, layer_idx: int, prefix": "config, layer_idx: int, layer_type: str, prefix",
            "        window, causal = _resolve(config, layer_idx)\n": (
                "        self.layer_type = layer_type\n"
                "        window = config.sliding_window if layer_type == _SLIDING else None\n"
            ),
            " causal=causal,": "",
            ", causal: bool = False": "",
            "        self.causal = causal\n": "",
            "layer_idx=i)": "layer_idx=i, layer_type=config.layer_types[i])",
        },
        tree.PROPOSER: {tree.FILES[tree.PROPOSER]: builder},
    }
    found = statuses(tree.write(tmp_path, changes))
    blind = {"swa.uniform.v2": "unknown", "swa.mixed.v2": "unknown", "mixed_guard": "unknown"}
    assert found == {**RIGHT, "swa.mixed.v1": "pass", **blind}
    changes[tree.PROPOSER] = {tree.FILES[tree.PROPOSER]: builder.replace("causal=True", "causal=False")}
    assert statuses(tree.write(tmp_path, changes))["swa.mixed.v1"] == "fail"


def test_foreign_code_gets_few_builtins(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    changes = {
        tree.RUNNER_V1: {"        config = self.spec": "        open(%r, 'w')\n        config = self.spec" % str(mark)}
    }
    assert statuses(tree.write(tmp_path, changes)) == RIGHT
    assert not mark.exists()


def test_endless_code_meets_the_deadline(tmp_path: Path) -> None:
    package = tree.write(
        tmp_path,
        {
            tree.RUNNER_V1: {
                "        config = self.spec": "        while True:\n            pass\n        config = self.spec"
            }
        },
    )
    found = capabilities.examine(str(package), child.any_python(None), None, set(), deadline=2)
    assert {item["status"] for item in found} == {"unknown"}
    assert found[0]["evidence"] == {"probe": "no answer within 2 s"}


def drafter(**changes: Any) -> capabilities.Drafter:
    raw = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 64,
        "use_sliding_window": True,
        "dflash_config": {"target_layer_ids": [1, 3]},
    }
    raw.update(changes)
    return capabilities.read_drafter(raw)


@pytest.mark.parametrize(
    "changes, kind, expected",
    [
        ({}, "full", [(None, False), (None, False)]),
        ({"layer_types": ["sliding_attention"] * 2}, "uniform", [(64, True), (64, True)]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "mixed", [(64, True), (None, False)]),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, "uniform", [(64, False), (64, False)]),
        (
            {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 32}},
            "uniform",
            [(32, False), (32, False)],
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "uniform",
            [(64, True), (64, True)],
        ),
    ],
)
def test_a_drafter_is_read_as_vllm_reads_it(changes: dict[str, Any], kind: str, expected: Any) -> None:
    found = drafter(**changes)
    assert (found.kind, found.expected) == (kind, expected)


def test_a_drafter_in_the_speculators_dialect_counts_from_one() -> None:
    found = capabilities.read_drafter(
        {
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [2, 4],
            "sliding_window_non_causal": False,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 64,
                "use_sliding_window": True,
            },
        }
    )
    assert found.ids == [1, 3]
    assert found.expected == [(64, True), (64, True)]


@pytest.mark.parametrize(
    "kind, device, runner, options, needed",
    [
        ("full", "cpu", "auto", {}, {"layer_offset.v1", "cache_rule.default"}),
        (
            "uniform",
            "cpu",
            "auto",
            {"disable_eagle_block_drop": True},
            {"layer_offset.v1", "swa.uniform.v1", "cache_rule.opt_in"},
        ),
        ("mixed", "cpu", "auto", {}, {"layer_offset.v1", "swa.mixed.v1", "cache_rule.default", "mixed_guard"}),
        ("mixed", "cuda", "auto", {}, {"layer_offset.v2", "swa.mixed.v2", "cache_rule.default", "mixed_guard"}),
        (
            "uniform",
            "cuda",
            "auto",
            {},
            {"layer_offset.v1", "layer_offset.v2", "swa.uniform.v1", "swa.uniform.v2", "cache_rule.default"},
        ),
        ("full", "cuda", "v2", {}, {"layer_offset.v2", "cache_rule.default"}),
    ],
)
def test_what_a_deployment_needs(
    tmp_path: Path, kind: str, device: str, runner: str, options: dict[str, Any], needed: set[str]
) -> None:
    package = tree.write(tmp_path)
    found = capabilities.required_ids(str(package), device, capabilities.generic(kind), options, runner)
    assert {name.replace("capability.", "") for name in found} == {*needed, "lookahead_slot"}
    assert capabilities.required_ids(str(package), device, None, options, runner) == set()


def test_the_drafters_own_ids_are_asked_for(tmp_path: Path) -> None:
    found = capabilities.examine(
        str(tree.write(tmp_path)), child.any_python(None), drafter(), {"capability.layer_offset.v1"}
    )
    first = found[0]
    assert (first["level"], first["status"], first["expected"], first["actual"]) == ("required", "pass", [2, 4], [2, 4])
    assert {item["level"] for item in found[1:]} == {"advisory"}


def test_a_window_that_transformers_drops_is_refused_by_the_layers(tmp_path: Path) -> None:
    refusing = {
        tree.MODEL: {
            "    slides = kinds": "    if not config.sliding_window:\n        raise ValueError('no window')\n"
            "    slides = kinds"
        }
    }
    package = tree.write(tmp_path, refusing)
    without = drafter(layer_types=["sliding_attention"] * 2, use_sliding_window=False)
    found = {item["id"]: item for item in capabilities.examine(str(package), child.any_python(None), without, set())}
    uniform = found["capability.swa.uniform.v1"]
    assert (uniform["status"], uniform["expected"]) == ("fail", [[64, True], [64, True]])
    assert uniform["actual"] == "refuses: no window"
