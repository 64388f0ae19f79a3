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
    # The function that reads the ids, and the call that takes its answer (``sink``).
    "capability.layer_offset.v1": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "v1/worker/gpu_model_runner.py",
            "class": "GPUModelRunner",
            "function": "_get_eagle3_aux_layers_from_config",
            "sink": "set_aux_hidden_state_layers",
        }
    ],
    "capability.layer_offset.v2": [
        {
            "releases": "0.20.1 to 0.33.0; with DFlash from 0.24.0",
            "file": "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
            "class": None,
            "function": "get_eagle3_aux_layers_from_config",
            "sink": "set_aux_hidden_state_layers",
        }
    ],
    # The layer that is built per draft layer, and the keyword by which the attention learns its window.
    # ``metadata``: the closed pull request's way; its layers do not know their causality, the proposer gives it.
    "capability.swa.v1": [
        {
            "releases": "0.20.0 to 0.33.0",
            "file": "model_executor/models/qwen3_dflash.py",
            "layer": "DFlashQwen3DecoderLayer",
            "model": "DFlashQwen3Model",
            "attention": "Attention",
            "keyword": "per_layer_sliding_window",
            "metadata": {
                "file": "v1/spec_decode/dflash.py",
                "class": "DFlashProposer",
                "method": "build_per_group_and_layer_attn_metadata",
                "names": "sliding_attention_layer_names",
            },
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
}

#: The function that turns a drafter's configuration of the speculators dialect into vLLM's.
SPECULATORS: Dict[str, str] = {
    "releases": "0.20.0 to 0.33.0",
    "file": "transformers_utils/configs/speculators/algos.py",
    "function": "update_dflash",
}

#: A tree without any of these has no DFlash for that runner.
RUNNER_FILES: Dict[str, List[str]] = {
    "v1": ["v1/spec_decode/dflash.py"],
    "v2": ["v1/worker/gpu/spec_decode/dflash/speculator.py", "v1/worker/gpu/spec_decode/dflash/__init__.py"],
}
