# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Where vLLM decides what DFlash needs: file, class and function by release.  A literal, nothing else.

Read from the source archives of the releases named in ``releases``.  Per check, the first place whose
file and names are in the tree is used; a check without an entry answers ``unknown``.  Paths are below
the ``vllm`` package.
"""

from __future__ import annotations

from typing import Any, Dict, List

SYMBOLS: Dict[str, List[Dict[str, Any]]] = {
    # The call that takes the ids (``sink``), wherever they come from; ``area``: where it may have moved to.
    "capability.layer_offset.v1": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "v1/worker/gpu_model_runner.py",
            "sink": "set_aux_hidden_state_layers",
            "area": "v1/worker",
            "beside": "v1/worker/gpu",
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
        }
    ],
    "capability.layer_offset.v2": [
        {
            "releases": "0.20.1 to 0.33.0; with DFlash from 0.24.0",
            "file": "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
            "sink": "set_aux_hidden_state_layers",
            "area": "v1/worker/gpu",
        }
    ],
    # The model that builds the draft layers, and the keyword by which an attention learns its window; per runner
    # what gives the attention its causality (``causal=``), and the closed pull request's way (``method``).
    "capability.swa.v1": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "model_executor/models/qwen3_dflash.py",
            "layer": "DFlashQwen3DecoderLayer",
            "model": "DFlashQwen3Model",
            "attention": "Attention",
            "keyword": "per_layer_sliding_window",
            "registry": "model_executor/models/registry.py",
            "architecture": "DFlashDraftModel",
            "v1": {
                "file": "v1/spec_decode/dflash.py",
                "class": "DFlashProposer",
                "method": "build_per_group_and_layer_attn_metadata",
                "names": "sliding_attention_layer_names",
            },
            "v2": {
                "file": "v1/worker/gpu/spec_decode/dflash/speculator.py",
                "class": "DFlashSpeculator",
            },
            "helpers": ["v1/worker/gpu/spec_decode/dflash/utils.py"],
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
        }
    ],
    "capability.swa.v2": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "model_executor/models/qwen3_dflash.py",
            "layer": "DFlashQwen3DecoderLayer",
            "model": "DFlashQwen3Model",
            "attention": "Attention",
            "keyword": "per_layer_sliding_window",
            "registry": "model_executor/models/registry.py",
            "architecture": "DFlashDraftModel",
            "v1": {
                "file": "v1/spec_decode/dflash.py",
                "class": "DFlashProposer",
                "method": "build_per_group_and_layer_attn_metadata",
                "names": "sliding_attention_layer_names",
            },
            "v2": {
                "file": "v1/worker/gpu/spec_decode/dflash/speculator.py",
                "class": "DFlashSpeculator",
            },
            "helpers": ["v1/worker/gpu/spec_decode/dflash/utils.py"],
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
        }
    ],
    "capability.mixed_guard": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "model_executor/models/qwen3_dflash.py",
            "layer": "DFlashQwen3DecoderLayer",
            "model": "DFlashQwen3Model",
            "attention": "Attention",
            "keyword": "per_layer_sliding_window",
            "registry": "model_executor/models/registry.py",
            "architecture": "DFlashDraftModel",
            "v1": {
                "file": "v1/spec_decode/dflash.py",
                "class": "DFlashProposer",
                "method": "build_per_group_and_layer_attn_metadata",
                "names": "sliding_attention_layer_names",
            },
            "v2": {
                "file": "v1/worker/gpu/spec_decode/dflash/speculator.py",
                "class": "DFlashSpeculator",
            },
            "helpers": ["v1/worker/gpu/spec_decode/dflash/utils.py"],
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
        }
    ],
    # The scheduler's call, the manager's call that hands the value on, and the configuration that decides.
    # ``given`` is what the scheduler reads elsewhere: no lookahead hashes (0.33.0), so that only the rule decides.
    "capability.cache_rule": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "v1/core/sched/scheduler.py",
            "class": "Scheduler",
            "call": "KVCacheManager",
            "keyword": "use_eagle",
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
            "option": "disable_eagle_block_drop",
            "manager_file": "v1/core/kv_cache_manager.py",
            "manager_class": "KVCacheManager",
            "manager_call": "get_kv_cache_coordinator",
            "given": {"num_hash_lookahead_tokens": 0},
        }
    ],
    # The scheduler's calls that reserve slots, and the configuration that counts them (its class
    # ``owner_class``, from 0.29.0).
    "capability.lookahead_slot": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "v1/core/sched/scheduler.py",
            "call": "allocate_slots",
            "keyword": "num_lookahead_tokens",
            "config_file": "config/speculative.py",
            "config_class": "SpeculativeConfig",
            "owner_file": "config/vllm.py",
            "owner_class": "VllmConfig",
        }
    ],
    # The code that gives the drafter the target's head.
    "capability.lm_head_sharing.v1": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "v1/spec_decode/llm_base_proposer.py",
            "sink": "_maybe_share_lm_head",
        }
    ],
    "capability.lm_head_sharing.v2": [
        {
            "releases": "0.24.0 to 0.33.0",
            "file": "v1/worker/gpu/spec_decode/dflash/utils.py",
            "loads": "get_model",
            "helpers": ["v1/worker/gpu/spec_decode/eagle/utils.py"],
        }
    ],
    # The second generation: its model with its own layers, and what makes its speculator.
    "capability.dflash2_files": [
        {
            "releases": "0.28.0 to 0.33.0",
            "file": "model_executor/models/qwen3_dflash.py",
            "layer": "DFlashQwen3DecoderLayer",
            "model": "DFlashQwen3Model",
            "attention": "Attention",
            "keyword": "per_layer_sliding_window",
            "own_file": "model_executor/models/qwen3_dflash2.py",
            "own_model": "DFlash2Qwen3Model",
            "own_layer": "DFlash2Qwen3DecoderLayer",
            "registry": "model_executor/models/registry.py",
            "choice_file": "v1/worker/gpu/spec_decode/__init__.py",
            "choice": "init_speculator",
            "speculator_file": "v1/worker/gpu/spec_decode/dflash2/speculator.py",
            "speculator": "DFlash2Speculator",
        }
    ],
}

#: Where the configuration says what the V1 runner cannot do.
GUARD: Dict[str, str] = {
    "releases": "0.29.0 to 0.33.0",
    "file": "config/vllm.py",
    "class": "VllmConfig",
    "test": "_dflash_needs_multi_kv_group",
}

#: The function that turns a drafter's configuration of the speculators dialect into vLLM's.
SPECULATORS: Dict[str, str] = {
    "releases": "0.20.0 to 0.33.0",
    "file": "transformers_utils/configs/speculators/algos.py",
    "function": "update_dflash",
}

#: A tree in which no file of these folders names DFlash has none for that runner.
RUNNER_FOLDERS: Dict[str, List[str]] = {"v1": ["v1/spec_decode"], "v2": ["v1/worker/gpu"]}
