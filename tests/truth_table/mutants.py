# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Changes to real releases: names kept and behaviour broken, or all renamed and right.

Written by replacing short texts, so that nothing of vLLM is kept here.  ``differs`` names the checks whose
answer is no longer the release's own; every other check must answer as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUNNER = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
MODEL = "model_executor/models/qwen3_dflash.py"
MODEL_2 = "model_executor/models/qwen3_dflash2.py"
REGISTRY = "model_executor/models/registry.py"
PROPOSER = "v1/spec_decode/dflash.py"
BASE = "v1/spec_decode/llm_base_proposer.py"
SPECULATOR = "v1/worker/gpu/spec_decode/dflash/speculator.py"
SPECULATOR_2 = "v1/worker/gpu/spec_decode/dflash2/speculator.py"
HEADS = "v1/worker/gpu/spec_decode/dflash/utils.py"
HEADS_EAGLE = "v1/worker/gpu/spec_decode/eagle/utils.py"
CHOICE = "v1/worker/gpu/spec_decode/__init__.py"
CONFIG = "config/speculative.py"
VLLM = "config/vllm.py"
SCHEDULER = "v1/core/sched/scheduler.py"
MANAGER = "v1/core/kv_cache_manager.py"

TAKE = "(dflash_config.get("
SHIFT_V1 = "i + 1 for i in " + TAKE
SHIFT_V2 = "[i + 1 for i in " + TAKE
FIRST_V1 = (
    "        if not (self.speculative_config and self.speculative_config.draft_model_config):\n            return None"
)
FIRST_V2 = "    if not (spec_config and spec_config.draft_model_config):\n        return None"
GUARD = "            and not get_current_vllm_config().use_v2_model_runner\n"
FAIL, PASS, UNKNOWN = "fail", "pass", "unknown"
OFF_V1, OFF_V2 = {"layer_offset.v1": FAIL}, {"layer_offset.v2": FAIL}
ALL_WINDOWS = {"swa.uniform.v1": FAIL, "swa.uniform.v2": FAIL, "swa.mixed.v2": FAIL, "mixed_guard": FAIL}
MIXED = {"swa.mixed.v2": FAIL, "mixed_guard": FAIL}
RULE = {"cache_rule.opt_in": FAIL}
SLOT = {"lookahead_slot": FAIL}
HEAD_V2 = {"lm_head_sharing.v2": FAIL}
HEAD_V1 = {"lm_head_sharing.v1": FAIL}
TWO = {"dflash2_files": FAIL}


@dataclass
class Mutant:
    """One changed release."""

    name: str
    kind: str
    changes: dict[str, list[tuple[str, str]]]
    differs: dict[str, str] = field(default_factory=dict)
    release: str = "0.32.0"
    moves: dict[str, str] = field(default_factory=dict)
    short: bool = False


def one(
    name: str, kind: str, path: str, old: str, new: str, differs: dict[str, str] | None = None, **more: Any
) -> Mutant:
    """A mutant with one replacement."""
    return Mutant(name, kind, {path: [(old, new)]}, differs or {}, **more)


MUTANTS: list[Mutant] = [
    Mutant("nothing changed", "right", {}, short=True),
    # ------------------------------------------------------------------ layer offset, V1
    one("shift deleted", "deletion", RUNNER, SHIFT_V1, "i for i in " + TAKE, OFF_V1, short=True),
    one("shift by two", "off by one", RUNNER, SHIFT_V1, "i + 2 for i in " + TAKE, OFF_V1),
    one("none from the function", "early return", RUNNER, FIRST_V1, "        return None\n" + FIRST_V1, OFF_V1),
    one("dict is no tuple", "condition never true", RUNNER, "isinstance(dflash_config, dict)",
        "isinstance(dflash_config, tuple)", OFF_V1),
    one("first tap dropped by the user", "value unused", RUNNER, "set_aux_hidden_state_layers(aux_layers)",
        "set_aux_hidden_state_layers(aux_layers[1:])", OFF_V1, short=True),
    one("shifted back by the user", "value unused", RUNNER, "set_aux_hidden_state_layers(aux_layers)",
        "set_aux_hidden_state_layers(tuple(i - 1 for i in aux_layers))", OFF_V1),
    one("defaults instead", "value unused", RUNNER, "        if aux_layers:\n", "        if not aux_layers:\n", OFF_V1),
    one("user returns first", "early return", RUNNER,
        "        # Try to get auxiliary layers from speculative config,\n",
        "        return\n", OFF_V1, short=True),
    one("taps overwritten", "value unused", RUNNER, "        self.model.set_aux_hidden_state_layers(aux_layers)",
        "        self.model.set_aux_hidden_state_layers(aux_layers)\n"
        "        self.model.set_aux_hidden_state_layers((0, 1))", OFF_V1, short=True),
    one("setup never called", "deletion", RUNNER, "self._setup_eagle3_aux_hidden_state_outputs()", "pass", OFF_V1),
    one("shift by index", "wrong layer index", RUNNER, SHIFT_V1, "i + 1 for i, _ in enumerate" + TAKE, OFF_V1),
    one("shift in another spelling", "other spelling", RUNNER, SHIFT_V1, "1 - -i for i in " + TAKE, short=True),
    one("loop variable", "other spelling", RUNNER, SHIFT_V1, "one + 1 for one in " + TAKE),
    one("function renamed", "renamed", RUNNER, "_get_eagle3_aux_layers_from_config", "_taps", short=True),
    Mutant("runner moved", "renamed", {}, moves={RUNNER: "v1/worker/runner/gpu.py"}),
    one("renamed and wrong", "deletion", RUNNER, SHIFT_V1, "i for i in " + TAKE, OFF_V1,
        moves={RUNNER: "v1/worker/runner/gpu.py"}),
    # ------------------------------------------------------------------ layer offset, V2
    one("shift deleted, V2", "deletion", RUNNER_V2, SHIFT_V2, "[i for i in " + TAKE, OFF_V2, short=True),
    one("shift down, V2", "off by one", RUNNER_V2, SHIFT_V2, "[i - 1 for i in " + TAKE, OFF_V2),
    one("none from the function, V2", "early return", RUNNER_V2, FIRST_V2, "    return None\n" + FIRST_V2, OFF_V2),
    one("branch never taken, V2", "condition never true", RUNNER_V2,
        "if dflash_config and isinstance(dflash_config, dict)",
        "if not dflash_config and isinstance(dflash_config, dict)", OFF_V2),
    one("taps not handed on, V2", "value unused", RUNNER_V2, "eagle3_model.set_aux_hidden_state_layers(aux_layers)",
        "eagle3_model.set_aux_hidden_state_layers(eagle3_model.get_eagle3_default_aux_hidden_state_layers())", OFF_V2,
        short=True),
    one("early return of the user, V2", "early return", RUNNER_V2, "    eagle3_model = cast(SupportsEagle3, model)\n",
        "    return\n    eagle3_model = cast(SupportsEagle3, model)\n", OFF_V2),
    one("renamed, V2", "renamed", RUNNER_V2, "get_eagle3_aux_layers_from_config", "read_taps", short=True),
    Mutant("moved, V2", "renamed", {}, moves={RUNNER_V2: "v1/worker/gpu/spec_decode/taps.py"}),
    # ------------------------------------------------------------------ sliding windows
    one("window not passed", "deletion", MODEL, "per_layer_sliding_window=sliding_window,", "", ALL_WINDOWS,
        short=True),
    one("none passed", "value unused", MODEL, "per_layer_sliding_window=sliding_window,",
        "per_layer_sliding_window=None,", ALL_WINDOWS),
    one("layer drops it", "value unused", MODEL,
        "            sliding_window=sliding_window,\n            causal=causal,",
        "            causal=causal,", ALL_WINDOWS),
    one("window off by one", "off by one", MODEL, "per_layer_sliding_window=sliding_window,",
        "per_layer_sliding_window=sliding_window and sliding_window - 1,", ALL_WINDOWS),
    one("one window for all", "wrong layer index", MODEL, "is_sliding = layer_types[layer_idx]",
        "is_sliding = layer_types[0]", MIXED, short=True),
    one("model counts wrong", "wrong layer index", MODEL, "layer_idx=layer_idx,", "layer_idx=0,",
        {**MIXED, **TWO}, short=True),
    one("never sliding", "condition never true", MODEL, "is_sliding = layer_types[layer_idx] == _SLIDING_ATTENTION",
        "is_sliding = layer_types[layer_idx] == 'sliding'", ALL_WINDOWS),
    one("resolver returns early", "early return", MODEL, "    # ``use_swa`` forces SWA on every layer",
        "    return None, False\n    # ``use_swa`` forces SWA on every layer", ALL_WINDOWS),
    one("V1 guard deleted", "deletion", MODEL, GUARD, "            and False\n", short=True),
    Mutant("both guards deleted", "deletion", {
        MODEL: [(GUARD, "            and False\n")],
        VLLM: [("unsupported.append(\"mixed sliding/full dflash drafts\")", "pass")],
    }, {"mixed_guard": FAIL}, short=True),
    one("causality dropped by V2", "value unused", SPECULATOR, "causal=self._group_causal", "causal=False",
        {"swa.uniform.v2": FAIL, **MIXED}, short=True),
    one("layers not asked, V2", "condition never true", SPECULATOR, 'hasattr(self.model, "get_draft_attn_causal")',
        'hasattr(self.model, "get_draft_attn_cause")', MIXED),
    one("causality dropped by V1", "value unused", PROPOSER, "causal=self.dflash_causal", "causal=False",
        {"swa.uniform.v1": FAIL}),
    one("V1 asks the wrong way round", "off by one", PROPOSER, "self.dflash_causal = not dflash_has_any_non_causal(",
        "self.dflash_causal = dflash_has_any_non_causal(", {"swa.uniform.v1": FAIL}),
    one("causality turned", "deletion", MODEL, "        self.causal = causal\n", "        self.causal = not causal\n",
        {"swa.uniform.v2": FAIL, **MIXED}),
    Mutant("model's classes renamed", "renamed", {
        MODEL: [("DFlashQwen3DecoderLayer", "DraftLayer"), ("DFlashQwen3Attention", "DraftAttention"),
                ("DFlashQwen3Model", "DraftModel"), ("_resolve_layer_attention", "_window_of")],
        MODEL_2: [("DFlashQwen3DecoderLayer", "DraftLayer"), ("DFlashQwen3Model", "DraftModel")],
    }, {"dflash2_files": FAIL}, short=True),
    one("window in another spelling", "other spelling", MODEL, "per_layer_sliding_window=sliding_window,",
        "**{'per_layer_sliding_window': sliding_window or None},", short=True),
    # ------------------------------------------------------------------ tail block
    Mutant("option removed", "deletion", {CONFIG: [
        ("    disable_eagle_block_drop: bool = False\n", ""), (" and not self.disable_eagle_block_drop", "")]},
        RULE, short=True),
    one("option ignored", "deletion", CONFIG, " and not self.disable_eagle_block_drop", "", RULE),
    one("option never true", "condition never true", CONFIG, " and not self.disable_eagle_block_drop",
        " and not (self.disable_eagle_block_drop and self.method is None)", RULE),
    one("rule returns early", "early return", CONFIG, "        return self.use_eagle() and not self.disable_eagle",
        "        return self.use_eagle()\n        return self.use_eagle() and not self.disable_eagle", RULE),
    one("scheduler takes the other value", "value unused", SCHEDULER, "use_eagle=self.use_eagle_block_drop",
        "use_eagle=self.use_eagle", RULE, short=True),
    one("manager takes none", "value unused", MANAGER,
        "            use_eagle=self.use_eagle,", "            use_eagle=True,",
        RULE, short=True),
    one("nobody drops", "off by one", CONFIG, "        return self.use_eagle() and not self.disable_eagle",
        "        return False and not self.disable_eagle", RULE),
    Mutant("rule renamed", "renamed", {
        CONFIG: [("use_eagle_block_drop", "requires_eagle_cache_drop")],
        SCHEDULER: [("use_eagle_block_drop", "requires_eagle_cache_drop")]}, short=True),
    Mutant("keyword renamed", "renamed", {
        SCHEDULER: [("use_eagle=self.use_eagle_block_drop", "drop_tail=self.use_eagle_block_drop")],
        MANAGER: [("        use_eagle: bool = False,", "        drop_tail: bool = False,"),
                  ("self.use_eagle = use_eagle", "self.use_eagle = drop_tail")]}, short=True),
    one("rule in another spelling", "other spelling", CONFIG,
        "        return self.use_eagle() and not self.disable_eagle_block_drop",
        "        return False if self.disable_eagle_block_drop else self.use_eagle()"),
    one("default lost", "deletion", CONFIG, "not (self.use_dflash() or self.use_dspark())", "not self.use_dspark()",
        {"cache_rule.default": FAIL}, release="0.33.0"),
    one("default by a name that is none", "condition never true", CONFIG, 'return self.method == "dflash"',
        'return self.method == "DFlash"', {"cache_rule.default": FAIL, **SLOT, **OFF_V1}, release="0.33.0"),
    one("the default kept for a fork's reason", "other spelling", CONFIG,
        "self.use_eagle() and not (self.use_dflash() or self.use_dspark())",
        "self.method not in ('dflash', 'dspark') and self.use_eagle()", release="0.33.0"),
    # ------------------------------------------------------------------ lookahead slot
    one("slot deleted", "deletion", VLLM, "            return self.num_speculative_tokens + 1\n",
        "            return self.num_speculative_tokens\n", SLOT, short=True),
    one("two slots", "off by one", VLLM, "            return self.num_speculative_tokens + 1\n",
        "            return self.num_speculative_tokens + 2\n", SLOT),
    one("never DFlash", "condition never true", VLLM, "if speculative_config.use_dflash() or dspark_fill_in:",
        "if dspark_fill_in:", SLOT),
    one("scheduler hands another number", "value unused", SCHEDULER, "num_lookahead_tokens=self.num_lookahead_tokens,",
        "num_lookahead_tokens=self.num_spec_tokens,", SLOT, short=True),
    one("scheduler returns to its own count", "value unused", SCHEDULER,
        "self.num_lookahead_tokens = vllm_config.num_lookahead_tokens",
        "self.num_lookahead_tokens = vllm_config.num_lookahead_tokens - 1", SLOT),
    one("slot in another spelling", "other spelling", VLLM, "            return self.num_speculative_tokens + 1\n",
        "            return sum((1, self.num_speculative_tokens))\n"),
    Mutant("property renamed", "renamed", {
        VLLM: [("def num_lookahead_tokens(", "def draft_slots(")],
        SCHEDULER: [("vllm_config.num_lookahead_tokens", "vllm_config.draft_slots")]}, short=True),
    # ------------------------------------------------------------------ head of a nested target
    one("outer head only, V2", "deletion", HEADS_EAGLE, 'getattr(target_language_model, "lm_head", None) or getattr(',
        "None or getattr(", HEAD_V2, short=True),
    one("head not set, V2", "value unused", HEADS, "        dflash_model.lm_head = target_lm_head",
        "        unused = target_lm_head", HEAD_V2),
    one("never shared, V2", "condition never true", HEADS, "        target_lm_head is not None\n",
        "        target_lm_head is None\n", HEAD_V2),
    one("outer model, V1", "wrong layer index", BASE, "self._maybe_share_lm_head(target_language_model)",
        "self._maybe_share_lm_head(target_model)", HEAD_V1, short=True),
    one("shares nothing, V1", "early return", BASE, "        share_lm_head = False\n", "        return\n", HEAD_V1),
    one("head not set, V1", "value unused", BASE, "            self.model.lm_head = target_language_model.lm_head",
        "            unused = target_language_model.lm_head", HEAD_V1),
    Mutant("head's helper renamed, V2", "renamed", {
        HEADS: [("get_target_lm_head", "head_of")], HEADS_EAGLE: [("get_target_lm_head", "head_of")]}, short=True),
    # ------------------------------------------------------------------ DFlash2
    one("hook reverted", "deletion", MODEL, "                self.decoder_layer_cls(\n",
        "                DFlashQwen3DecoderLayer(\n", TWO, short=True),
    one("hook not set", "value unused", MODEL_2, "    decoder_layer_cls = DFlash2Qwen3DecoderLayer\n", "", TWO),
    one("speculator not chosen", "condition never true", CHOICE,
        'if "DFlash2DraftModel" in speculative_config.draft_model_config.architectures:', "if False:", TWO),
    one("registered as the first", "value unused", REGISTRY, '"DFlash2DraftModel": ("qwen3_dflash2", ',
        '"DFlash2DraftModel": ("qwen3_dflash", ', TWO),
    Mutant("speculator's file lost", "deletion", {}, TWO, moves={SPECULATOR_2: ""}, short=True),
    Mutant("model's file lost", "deletion", {}, TWO, moves={MODEL_2: ""}),
]
