# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Run the real functions of a whole vLLM tree under an interpreter that has torch for CPU, and print their values.

    PYTHON -P measure.py TREE

``measured.json`` keeps what this printed; the table's expectations are compared with it in a test.  It proves the
functions alone: that their answers are used is what the probes follow.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

IDS = [1, 16, 31, 46, 61]
MIXED = ["sliding_attention"] * 4 + ["full_attention"]
UNIFORM = ["sliding_attention"] * 5


def config(layers: list[str]) -> Any:
    """The drafter that stands for all."""
    return SimpleNamespace(
        dflash_config={"target_layer_ids": IDS}, model_type="qwen3", layer_types=layers, sliding_window=2048,
        num_hidden_layers=5,
    )


def speculative(method: str, **given: Any) -> Any:
    """A configuration with a method, made without its validation."""
    made = importlib.import_module("vllm.config.speculative").SpeculativeConfig
    spec = made.__new__(made)
    for name, value in {"method": method, "disable_eagle_block_drop": False, **given}.items():
        object.__setattr__(spec, name, value)
    return spec


def offset_v1() -> Any:
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config(MIXED)), method="dflash")
    got = runner._get_eagle3_aux_layers_from_config(SimpleNamespace(speculative_config=spec))
    return list(got) if got else None


def offset_v2() -> Any:
    utils = importlib.import_module("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config(MIXED)), method="dflash")
    got = utils.get_eagle3_aux_layers_from_config(spec)
    return list(got) if got else None


def windows(layers: list[str], v2: bool) -> Any:
    model = importlib.import_module("vllm.model_executor.models.qwen3_dflash")
    if not hasattr(model, "_resolve_layer_attention"):
        return "no resolver"
    model.get_current_vllm_config = lambda: SimpleNamespace(use_v2_model_runner=v2)  # type: ignore[attr-defined]
    return [list(model._resolve_layer_attention(config(layers), index)) for index in range(5)]


def drops(method: str, option: bool) -> Any:
    spec = speculative(method, disable_eagle_block_drop=option)
    for name in ("use_eagle_block_drop", "use_eagle"):
        if hasattr(type(spec), name):
            return getattr(spec, name)()
    return None


def slots() -> Any:
    owner = importlib.import_module("vllm.config.vllm").VllmConfig
    spec = speculative("dflash", num_speculative_tokens=15)
    given = SimpleNamespace(speculative_config=spec, num_speculative_tokens=15)
    return vars(owner)["num_lookahead_tokens"].fget(given)


QUESTIONS: dict[str, Callable[[], Any]] = {
    "layer_offset.v1": offset_v1,
    "layer_offset.v2": offset_v2,
    "swa.uniform.v1": lambda: windows(UNIFORM, False),
    "swa.uniform.v2": lambda: windows(UNIFORM, True),
    "swa.mixed.v1": lambda: windows(MIXED, False),
    "swa.mixed.v2": lambda: windows(MIXED, True),
    "cache_rule.default": lambda: {"dflash": drops("dflash", False), "eagle3": drops("eagle3", False)},
    "cache_rule.opt_in": lambda: {"dflash": drops("dflash", True), "eagle3": drops("eagle3", False)},
    "lookahead_slot": slots,
}


def main(tree: str) -> int:
    """Print the values as one line of JSON; a question that a tree cannot answer is left out."""
    sys.path.insert(0, tree)
    for name in ("gguf", "gguf.constants", "gguf.quants"):  # old releases import this for a file format
        sys.modules.setdefault(name, mock.MagicMock(__path__=[]))
    vllm = importlib.import_module("vllm")
    if not str(vllm.__file__).startswith(tree):
        raise SystemExit("vllm came from %s" % vllm.__file__)
    found = {}
    for name, ask in QUESTIONS.items():
        try:
            found[name] = ask()
        except NotImplementedError as error:
            found[name] = type(error).__name__
        except (ImportError, KeyError, AttributeError) as error:
            print("%s: %s: %s" % (name, type(error).__name__, error), file=sys.stderr)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
