# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs by the facts of published configurations: which fit, which cannot, and what is not stated."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import pairing

S, F = "sliding_attention", "full_attention"
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936},
    "qwen3-8b": {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936},
    "qwen3.5-4b": {"text_config": {"hidden_size": 2560, "num_hidden_layers": 32, "vocab_size": 248320}},
    "qwen3.6-27b": {"text_config": {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}},
    "gpt-oss-20b": {"hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088},
    "mimo": {"hidden_size": 4096, "num_hidden_layers": 48, "vocab_size": 152576},
    "gemma": {"text_config": {"hidden_size": 5376, "num_hidden_layers": 60, "vocab_size": 262144}},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "hidden_size": 2560,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "num_hidden_layers": 5,
        "layer_types": [F] * 5, "num_target_layers": 36, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "qwen3.5-4b": {  # block size inside dflash_config
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 6,
        "dflash_config": {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
        "layer_types": [S] * 5 + [F], "sliding_window": 4096, "use_sliding_window": True, "num_target_layers": 32,
        "vocab_size": 248320,
    },
    "qwen3.6-27b": {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 5,
        "block_size": 16, "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "layer_types": [S] * 4 + [F], "sliding_window": 2048, "use_sliding_window": True, "num_target_layers": 64,
        "vocab_size": 248320,
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 5,
        "dflash_config": {"block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
        "layer_types": [S] * 5, "sliding_window": 2048, "use_sliding_window": True, "vocab_size": 248320,
    },
    "mimo": {  # no architecture, no layer_types, block size stated twice, first and last layer read
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 5, "block_size": 8, "sliding_window": 1024,
        "vocab_size": 152576, "num_target_layers": 48,
        "dflash_config": {
            "target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151675, "block_size": 8, "use_swa": True,
            "swa_window_size": 1024,
        },
    },
    "gemma-speculators": {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8, "mask_token_id": 4,
        "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58], "draft_vocab_size": 32000, "target_hidden_size": None,
        "transformer_layer_config": {
            "hidden_size": 5376, "model_type": "llama", "num_hidden_layers": 5, "vocab_size": 262144,
        },
    },
    "qwen3-8b-speculators": {
        "speculators_model_type": "dflash", "block_size": 8, "mask_token_id": 151669, "draft_vocab_size": 32000,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "transformer_layer_config": {
            "model_type": "qwen3", "num_hidden_layers": 5, "hidden_size": 4096, "vocab_size": 151936,
        },
    },
}


def examine(target: str, drafter: str, change: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """``change`` replaces keys of the drafter; a dotted key reaches inside, a value of ... removes."""
    config = copy.deepcopy(DRAFTERS[drafter])
    for key, value in (change or {}).items():
        place = config
        *outer, last = key.split(".")
        for part in outer:
            place = place[part]
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    options.setdefault("device", "cuda")
    return pairing.examine(TARGETS[target], config, **options)


def status(found: dict[str, Any], check_id: str) -> str:
    return str(next(c["status"] for c in found["checks"] if c["id"] == check_id))


@pytest.mark.parametrize(
    ("target", "drafter", "k", "taps", "runner", "needs", "window"),
    [
        ("qwen3-4b", "qwen3-4b", 15, [2, 10, 18, 26, 34], "auto", [], None),
        ("qwen3.5-4b", "qwen3.5-4b", 15, [2, 6, 10, 14, 18, 22, 26, 30], "v2", ["v2_runner", "swa_mixed"], 4096),
        ("qwen3.6-27b", "qwen3.6-27b", 15, [2, 17, 32, 47, 62], "v2", ["v2_runner", "swa_mixed"], 2048),
        ("qwen3.6-27b", "dflash2", 7, [6, 20, 34, 48, 62], "v2", ["v2_runner", "swa_uniform", "dflash2"], 2048),
        ("mimo", "mimo", 7, [1, 12, 24, 36, 48], "auto", ["swa_uniform"], 1024),
        ("gemma", "gemma-speculators", 7, [1, 17, 29, 47, 58], "auto", [], None),
        ("qwen3-8b", "qwen3-8b-speculators", 7, [2, 10, 18, 26, 34], "auto", [], None),
    ],
)
def test_pairs_that_belong_together(
    target: str, drafter: str, k: int, taps: list[int], runner: str, needs: list[str], window: int | None,
) -> None:
    found = examine(target, drafter)
    assert found["message"] == ""
    assert found["ok"]
    assert (found["k"], found["taps"], found["runner"]) == (k, taps, runner)
    assert (found["needs"], found["window"]) == (needs, window)
    assert found["target_layer_ids"] == [tap - 1 for tap in taps]
    assert [c["id"] for c in found["checks"]] == [
        "pair.architecture", "pair.hidden_size", "pair.layers", "pair.vocab", "pair.block_size", "pair.runner",
    ]


@pytest.mark.parametrize(
    ("target", "drafter", "check_id", "numbers"),
    [
        ("qwen3-8b", "qwen3-4b", "pair.hidden_size", ["4096", "2560"]),
        ("qwen3.5-4b", "qwen3-4b", "pair.layers", ["32", "[34]", "33"]),
        ("qwen3.5-4b", "qwen3-4b", "pair.vocab", ["248320", "151936"]),
        ("qwen3-4b", "qwen3.5-4b", "pair.layers", ["36", "32"]),  # every tap lies inside, the depth is another
        ("gpt-oss-20b", "qwen3-4b", "pair.hidden_size", ["2880", "2560"]),
    ],
)
def test_impossible_pairs_tell_the_wrong_numbers(
    target: str, drafter: str, check_id: str, numbers: list[str],
) -> None:
    found = examine(target, drafter)
    assert not found["ok"]
    assert status(found, check_id) == "fail"
    for number in numbers:
        assert number in found["message"]


@pytest.mark.parametrize(
    ("drafter", "change", "check_id", "words"),
    [
        ("qwen3-4b", {"dflash_config.target_layer_ids": [1, 36]}, "pair.layers", "[37]"),
        ("qwen3-4b", {"dflash_config.target_layer_ids": [-1, 3]}, "pair.layers", "[0]"),
        ("qwen3-4b", {"dflash_config.mask_token_id": 151936}, "pair.vocab", "0 to 151935, found mask token 151936"),
        ("qwen3-4b", {"draft_vocab_size": 200000}, "pair.vocab", "200000"),
        ("qwen3-4b", {"target_hidden_size": 16384}, "pair.hidden_size", "16384"),
        ("qwen3-4b", {"layer_types": [F] * 4}, "pair.architecture", "5 layer types for 5 layers, found 4"),
        ("qwen3-4b", {"layer_types": [S] * 5}, "pair.architecture", "without a sliding_window"),
        ("qwen3-4b", {"layer_types": [S] * 5, "sliding_window": 64}, "pair.architecture", "use_sliding_window false"),
        ("qwen3-4b", {"architectures": ["Qwen3DSparkModel"]}, "pair.architecture", "DSpark"),
        ("qwen3-4b", {"dflash_config.projector_type": "domino"}, "pair.architecture", "domino"),
        ("qwen3-4b", {"architectures": ["Qwen3ForCausalLM"], "dflash_config": ...}, "pair.architecture", "Qwen3For"),
        ("qwen3-4b", {"speculators_model_type": "eagle3"}, "pair.architecture", "method eagle3"),
    ],
)
def test_what_cannot_be(drafter: str, change: dict[str, Any], check_id: str, words: str) -> None:
    found = examine("qwen3-4b", drafter, change)
    assert status(found, check_id) == "fail"
    assert words in found["message"]
    assert not found["ok"]


@pytest.mark.parametrize(
    ("change", "check_id"),
    [
        ({"hidden_size": ...}, "pair.hidden_size"),
        ({"dflash_config.target_layer_ids": ...}, "pair.layers"),
        ({"dflash_config.mask_token_id": ...}, "pair.vocab"),
        ({"vocab_size": ...}, "pair.vocab"),
        ({"block_size": ...}, "pair.block_size"),
        ({"dflash_config.block_size": 8}, "pair.block_size"),  # 16 outside, 8 inside
        ({"layer_types": ..., "model_type": ..., "use_sliding_window": ...}, "pair.runner"),
        ({"layer_types": ["chunked_attention"] * 5}, "pair.runner"),
        ({"layer_types": ..., "sliding_window": 2048, "use_sliding_window": True}, "pair.runner"),
        ({"dflash_config": ...}, "pair.architecture"),
        ({"architectures": ["SomethingNew"]}, "pair.architecture"),
    ],
)
def test_what_is_not_stated_is_unknown_and_nothing_else_suffers(change: dict[str, Any], check_id: str) -> None:
    found = examine("qwen3-4b", "qwen3-4b", change)
    assert status(found, check_id) == "unknown"
    assert not found["ok"]
    assert check_id in found["message"]
    assert not [c for c in found["checks"] if c["status"] == "fail"]


def test_a_target_that_states_nothing() -> None:
    found = pairing.examine({}, DRAFTERS["qwen3-4b"], device="cuda")
    assert {c["id"] for c in found["checks"] if c["status"] == "unknown"} == {
        "pair.hidden_size", "pair.layers", "pair.vocab",
    }


@pytest.mark.parametrize(("k", "expected"), [(1, "pass"), (15, "pass"), (16, "fail"), (17, "fail"), (-1, "fail")])
def test_number_of_speculative_tokens(k: int, expected: str) -> None:
    found = examine("qwen3-4b", "qwen3-4b", k=k)
    assert status(found, "pair.block_size") == expected
    assert found["k"] == k
    if k == 16:
        assert "num_speculative_tokens to 15: a block counts the known token" in found["message"]


def test_anchored_drafters_may_use_the_whole_block() -> None:
    assert status(examine("qwen3-4b", "qwen3-4b", {"sample_from_anchor": True}, k=16), "pair.block_size") == "pass"


def test_a_speculators_checkpoint_proposes_its_own_number() -> None:
    change = {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}}
    assert examine("qwen3-8b", "qwen3-8b-speculators", change)["k"] == 5
    assert examine("qwen3-8b", "qwen3-8b-speculators", change, k=3)["k"] == 3


@pytest.mark.parametrize(
    ("target", "drafter", "options", "expected", "runner"),
    [
        ("qwen3.6-27b", "qwen3.6-27b", {"device": "cpu"}, "fail", "v1"),
        ("qwen3.6-27b", "qwen3.6-27b", {"device": "cuda", "runner": "v1"}, "fail", "v2"),
        ("qwen3.6-27b", "qwen3.6-27b", {"device": "cuda", "runner": "v2"}, "pass", "v2"),
        ("qwen3.6-27b", "dflash2", {"device": "cpu"}, "fail", "v1"),
        ("mimo", "mimo", {"device": "cpu"}, "pass", "v1"),
        ("qwen3-4b", "qwen3-4b", {"device": "cpu"}, "pass", "v1"),
        ("qwen3-4b", "qwen3-4b", {"device": "cpu", "runner": "v2"}, "fail", "v1"),
        ("qwen3-4b", "qwen3-4b", {"device": "cuda", "runner": "v1"}, "pass", "v1"),
    ],
)
def test_runner(target: str, drafter: str, options: dict[str, Any], expected: str, runner: str) -> None:
    found = examine(target, drafter, **options)
    assert (status(found, "pair.runner"), found["runner"]) == (expected, runner)


def test_strange_values_are_not_numbers() -> None:
    change = {"hidden_size": "2560", "dflash_config.target_layer_ids": [True, 3], "block_size": 16.0}
    found = examine("qwen3-4b", "qwen3-4b", change)
    for check_id in ("pair.hidden_size", "pair.layers", "pair.block_size"):
        assert status(found, check_id) == "unknown"
