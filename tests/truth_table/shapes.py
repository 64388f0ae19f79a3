# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Forks by hand: a tree of our own words in the shape that a fork has, right or wrong on purpose.

The closed pull request's shape follows what third parties' copies of it name; the rest are ways in which a fork
restructures what upstream keeps in one place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))

import vllm_tree as base

#: What the tree without changes answers.
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
    "dflash2_files": "fail",
}
V2 = ("layer_offset.v2", "swa.uniform.v2", "swa.mixed.v2", "lm_head_sharing.v2")


@dataclass
class Shape:
    """One fork: replacements in our tree, files of its own, files that it lacks."""

    name: str
    changes: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    differs: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the tree; returns its ``vllm`` folder."""
        package = base.write(folder, self.changes, self.without)
        for path, text in self.files.items():
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            (package / path).write_text(text, encoding="utf-8")
        return package


#: The closed pull request: V1 alone, layers that know their type, causality from the proposer, no tail drop.
PROPOSER_40898 = '''
class DFlashProposer(SpecDecodeBaseProposer):
    def set_inputs_first_pass(self, common):
        return CommonAttentionMetadata(common.slots, causal=False)

    def build_per_group_and_layer_attn_metadata(self, cad, draft_index=0):
        groups, layers = super().build_per_group_and_layer_attn_metadata(cad, draft_index)
        sliding = self.model.sliding_attention_layer_names
        for group in self.draft_attn_groups:
            ours = sliding & set(group.layer_names)
            if not ours:
                continue
            changed = cad.replace(causal=True)
            built = group.get_metadata_builder().build_for_drafting(common_attn_metadata=changed)
            for name in ours:
                layers[name] = built
        return groups, layers
'''
MODEL_40898 = '''
from torch import nn
from vllm.model_executor.layers.attention import Attention

_DFLASH_VALID_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def _get_dflash_layer_types(config) -> tuple[str, ...]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ("full_attention",) * config.num_hidden_layers
    if set(kinds) - _DFLASH_VALID_LAYER_TYPES:
        raise ValueError("unknown layer type")
    return tuple(kinds)


class DFlashQwen3Attention(nn.Module):
    def __init__(self, hidden_size, sliding_window=None, prefix=""):
        super().__init__()
        self.attn = Attention(hidden_size, per_layer_sliding_window=sliding_window, prefix=prefix)
        self.attn.sliding_window = None


class DFlashQwen3DecoderLayer(nn.Module):
    def __init__(self, vllm_config, *, config, layer_idx, layer_type="full_attention", prefix=""):
        super().__init__()
        self.layer_type = layer_type
        window = config.sliding_window if layer_type == "sliding_attention" else None
        self.self_attn = DFlashQwen3Attention(config.hidden_size, sliding_window=window, prefix=prefix)


class DFlashQwen3Model(nn.Module):
    def __init__(self, *, vllm_config, start_layer_id=0, prefix=""):
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.layer_types = _get_dflash_layer_types(self.config)
        self.layers = nn.ModuleList(
            [
                DFlashQwen3DecoderLayer(
                    vllm_config, config=self.config, layer_idx=i, layer_type=self.layer_types[i], prefix=f"layers.{i}"
                )
                for i in range(self.config.num_hidden_layers)
            ]
        )
'''
NO_V2 = (base.SPECULATOR, base.HEADS_V2, base.RUNNER_V2)
DROPS = {
    base.CONFIG: {
        "    disable_eagle_block_drop: bool = False\n": "",
        "use_eagle_block_drop": "requires_eagle_cache_drop",
        "return self.use_eagle() and not self.disable_eagle_block_drop": (
            'return self.use_eagle() and self.method != "dflash"'
        ),
    },
    base.SCHEDULER: {"use_eagle_block_drop": "requires_eagle_cache_drop"},
}
FORK = {
    **dict.fromkeys(V2, "skip"),
    "swa.mixed.v1": "pass",
    "cache_rule.default": "pass",
    "cache_rule.opt_in": "fail",
}


def closed_pull_request(name: str, model: str = MODEL_40898, proposer: str = PROPOSER_40898, **differs: str) -> Shape:
    """The closed pull request's shape."""
    files = {base.MODEL: model, base.PROPOSER: proposer}
    return Shape(name, DROPS, files, NO_V2, {**FORK, **{key.replace("__", "."): differs[key] for key in differs}})


SHAPES = [
    Shape("our own tree"),
    closed_pull_request("closed pull request"),
    closed_pull_request(
        "closed pull request, causality not given",
        proposer=PROPOSER_40898.replace("causal=True", "causal=False"),
        swa__uniform__v1="fail", swa__mixed__v1="fail", mixed_guard="fail",
    ),
    closed_pull_request(
        "closed pull request, window not given",
        model=MODEL_40898.replace("sliding_window=window, ", ""),
        swa__uniform__v1="fail", swa__mixed__v1="fail", mixed_guard="fail",
    ),
    closed_pull_request(
        "closed pull request, one type for all",
        model=MODEL_40898.replace("self.layer_types[i]", "self.layer_types[-1]"),
        swa__uniform__v1="pass", swa__mixed__v1="fail", mixed_guard="fail",
    ),
    Shape("the fork's name for the rule", DROPS, differs={"cache_rule.default": "pass", "cache_rule.opt_in": "fail"}),
    Shape(
        "the fork's name, computed and not used",
        {**DROPS, base.SCHEDULER: {**DROPS[base.SCHEDULER], "=self.drops,": "=self.use_eagle,"}},
        differs={"cache_rule.opt_in": "fail"},
    ),
    Shape(
        "window by its place among the arguments",
        {base.MODEL: {
            "Attention(hidden_size, per_layer_sliding_window=sliding_window,": (
                "Attention(hidden_size, 64, 1.0, None, sliding_window,"
            ),
        }},
        files={
            "model_executor/layers/attention/__init__.py": (
                "from vllm.model_executor.layers.attention.attention import Attention\n"
            ),
            "model_executor/layers/attention/attention.py": (
                "class Attention:\n    def __init__(self, heads, size, scale, cache=None, "
                "per_layer_sliding_window=None, prefix=''):\n        self.window = per_layer_sliding_window\n"
            ),
        },
    ),
    Shape(
        "everything renamed and right",
        {
            base.RUNNER_V1: {"_get_eagle3_aux_layers_from_config": "_read_taps", "GPUModelRunner": "Runner"},
            base.RUNNER_V2: {"get_eagle3_aux_layers_from_config": "read_taps", "install_taps": "set_taps"},
            base.MODEL: {
                "DFlashQwen3Attention": "DraftAttention",
                "DFlashQwen3DecoderLayer": "DraftLayer",
                "DFlashQwen3Model": "Draft",
                "_resolve": "_window",
            },
            base.SCHEDULER: {"Scheduler": "Planner", "self.drops": "self.cuts", "use_eagle=self": "cut=self"},
            base.MANAGER: {"use_eagle: bool": "cut: bool", "self.use_eagle = use_eagle": "self.use_eagle = cut"},
            base.SPECULATOR: {"DFlashSpeculator": "DraftSpeculator"},
            base.PROPOSER: {"DFlashProposer": "DraftProposer"},
        },
    ),
    Shape(
        "everything renamed and wrong",
        {
            base.RUNNER_V1: {"_get_eagle3_aux_layers_from_config": "_read_taps", "number + 1": "number"},
            base.RUNNER_V2: {"get_eagle3_aux_layers_from_config": "read_taps", "number + 1": "number"},
            base.MODEL: {"DFlashQwen3DecoderLayer": "DraftLayer", "sliding_window=window, ": ""},
            base.SCHEDULER: {"use_eagle=self.drops": "cut=self.use_eagle"},
            base.MANAGER: {"use_eagle: bool": "cut: bool", "self.use_eagle = use_eagle": "self.use_eagle = cut"},
        },
        differs={
            "layer_offset.v1": "fail",
            "layer_offset.v2": "fail",
            "swa.uniform.v1": "fail",
            "swa.uniform.v2": "fail",
            "swa.mixed.v2": "fail",
            "mixed_guard": "fail",
            "cache_rule.opt_in": "fail",
        },
    ),
    Shape(
        "ids read in a file of their own",
        {
            base.RUNNER_V2: {
                "from vllm.config import SpeculativeConfig\n": (
                    "from vllm.config import SpeculativeConfig\n"
                    "from vllm.v1.worker.gpu.spec_decode.taps import read as get_eagle3_aux_layers_from_config\n"
                ),
                base.FILES[base.RUNNER_V2][base.FILES[base.RUNNER_V2].index("\n\ndef get_eagle3"):]: "\n",
            }
        },
        files={
            "v1/worker/gpu/spec_decode/taps.py": (
                "def read(spec_config):\n    config = spec_config.draft_model_config.hf_config\n"
                '    ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)\n'
                '    return tuple(ids or [n + 1 for n in config.dflash_config["target_layer_ids"]])\n'
            )
        },
    ),
    Shape(
        "ids by another call",
        {base.RUNNER_V1: {"set_aux_hidden_state_layers": "tap"}},
        differs={"layer_offset.v1": "unknown"},
    ),
    Shape(
        "layers made by the helper",
        {
            base.MODEL: {
                "count = config.num_hidden_layers": "from vllm.model_executor.models.utils import make_layers",
                "self.layers = [DFlashQwen3DecoderLayer(None, config=config, layer_idx=i) for i in range(count)]": (
                    "_s, _e, self.layers = make_layers(config.num_hidden_layers, lambda prefix: "
                    "DFlashQwen3DecoderLayer(None, config=config, layer_idx=extract_layer_index(prefix)), 'layers')"
                ),
            }
        },
    ),
    Shape(
        "layers appended one by one",
        {
            base.MODEL: {
                "self.layers = [DFlashQwen3DecoderLayer(None, config=config, layer_idx=i) for i in range(count)]": (
                    "self.layers = []\n        for i in range(count):\n"
                    "            self.layers += [DFlashQwen3DecoderLayer(None, config=config, layer_idx=i)]"
                ),
            }
        },
    ),
]
#: The only rows of forks and mutants that may answer unknown, and why.
UNKNOWN = {
    ("ids by another call", "layer_offset.v1"): "the model's own interface has another name: nothing says what it is",
}
