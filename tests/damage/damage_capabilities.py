# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Damages of deciding lines, each for one capability: what a fork loses in a merge."""

from __future__ import annotations

from collections.abc import Callable

from damage_cases import Case, edit
from damage_lab import Lab

RUNNER_V1 = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
MODEL = "model_executor/models/qwen3_dflash.py"
CONFIG = "config/speculative.py"

RESOLVED = "    return sliding_window, _dflash_layer_causal(config, layer_idx)\n"
V2 = "get_current_vllm_config().use_v2_model_runner"


def window_lost(when: str) -> Callable[[Lab], None]:
    return edit(MODEL, RESOLVED, f"    if {when}:\n        sliding_window = None\n" + RESOLVED)


def guards_deleted(lab: Lab) -> None:
    lab.line(MODEL, "0 < num_sliding < len(layer_types)\n", "False\n")
    lab.line(
        "config/vllm.py",
        "        if self._dflash_needs_multi_kv_group():\n            unsupported",
        "        if False:\n            unsupported",
    )


def gone(lab: Lab, name: str) -> None:
    lab.remove(lab.package / name)
    lab.record(lab.package / name)


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "block_size": 16,
    "layer_types": ["full_attention"] * 5,
    "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
CAPABILITIES = [
    Case(
        "shift lost",
        "capability.layer_offset.v1",
        edit(
            RUNNER_V1,
            'i + 1 for i in (dflash_config.get("target_layer_ids")',
            'i for i in (dflash_config.get("target_layer_ids")',
        ),
        ["[1, 16, 31, 46, 61]"],
    ),
    Case(
        "shift by two",
        "capability.layer_offset.v2",
        edit(RUNNER_V2, "[i + 1 for i in (dflash_config.get", "[i + 2 for i in (dflash_config.get"),
        ["[3, 18, 33, 48, 63]"],
    ),
    Case(
        "window lost on V1", "capability.swa.uniform.v1", window_lost(f"is_sliding and not {V2}"), ["windows", "None"]
    ),
    Case(
        "window lost on V2",
        "capability.swa.uniform.v2",
        window_lost(f"layer_types is not None and num_sliding == len(layer_types) and {V2}"),
        ["windows", "None"],
    ),
    Case(
        "mixed windows lost on V2",
        "capability.swa.mixed.v2",
        window_lost(f"layer_types is not None and num_sliding < len(layer_types) and {V2}"),
        ["windows", "None"],
        {"capability.mixed_guard"},
    ),
    Case(
        "no option",
        "capability.cache_rule.opt_in",
        edit(CONFIG, "self.use_eagle() and not self.disable_eagle_block_drop", "self.use_eagle()"),
        ["'dflash': True"],
    ),
    Case(
        "no slot more",
        "capability.lookahead_slot",
        edit(
            "config/vllm.py",
            "            return self.num_speculative_tokens + 1\n",
            "            return self.num_speculative_tokens\n",
        ),
        ["'dflash'"],
    ),
    Case("both guards are deleted", "capability.mixed_guard", guards_deleted, ["v1"], {"capability.swa.mixed.v1"}),
    Case(
        "the head is never shared",
        "capability.lm_head_sharing.v1",
        edit(
            "v1/spec_decode/llm_base_proposer.py",
            'if share_lm_head and hasattr(target_language_model, "lm_head"):',
            'if False and hasattr(target_language_model, "lm_head"):',
        ),
        ["nested"],
    ),
    Case(
        "a file of DFlash2 is lost",
        "capability.dflash2_files",
        lambda lab: gone(lab, "model_executor/models/qwen3_dflash2.py"),
        ["qwen3_dflash2"],
        drafter=DFLASH2,
    ),
    Case(
        "the head of a nested target is not found",
        "capability.lm_head_sharing.v2",
        edit(
            "v1/worker/gpu/spec_decode/eagle/utils.py",
            'getattr(target_language_model, "lm_head", None) or getattr(',
            "getattr(",
        ),
        ["nested"],
    ),
]
