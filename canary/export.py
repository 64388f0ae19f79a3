# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Write target and drafter as the folders vLLM loads: config, weights, tokenizer with its chat template."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from language import CHAT_TEMPLATE, END_OF_TEXT, MASK, TURN_END
from losses import Wiring
from model import FULL, SLIDING, Drafter, Shape, Target

POSITIONS = 4096


def write_json(path: pathlib.Path, data: object) -> None:
    """Write one JSON file, readable in a diff."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def write_weights(folder: pathlib.Path, module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Write the parameters under their own names."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in module.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # it is written for its owner alone, and the account that serves is another


def shape_config(shape: Shape, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, object]:
    """What the config files of target and drafter have in common."""
    return {
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": POSITIONS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def write_target(folder: pathlib.Path, target: Target, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    """Write the target with tokenizer, chat template and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = target.shape
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        **shape_config(shape, tokenizer, dtype),
        "num_hidden_layers": shape.num_hidden_layers,
        "layer_types": [FULL] * shape.num_hidden_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_hidden_layers,
    }
    write_json(folder / "config.json", config)
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder, target, dtype)


def write_drafter(
    folder: pathlib.Path, drafter: Drafter, wiring: Wiring, block: int, shape: Shape, tokenizer: Tokenizer,
    dtype: torch.dtype,
) -> None:
    """Write the drafter; its wiring is in the config, zero-based as drafters' authors publish it."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = len(wiring.layer_types)
    slides = SLIDING in wiring.layer_types
    config = {
        "architectures": ["DFlashDraftModel"],
        **shape_config(shape, tokenizer, dtype),
        "num_hidden_layers": layers,
        "block_size": block,
        "dflash_config": {
            "mask_token_id": tokenizer.token_to_id(MASK),
            "target_layer_ids": list(wiring.ids),
        },
        "num_target_layers": shape.num_hidden_layers,
        "layer_types": list(wiring.layer_types),
        "use_sliding_window": slides,
        "sliding_window": wiring.window if slides else None,
        "max_window_layers": 0 if slides else layers,
    }
    write_json(folder / "config.json", config)
    write_weights(folder, drafter, dtype)


def read_target(folder: pathlib.Path, shape: Shape, device: str) -> Target:
    """The target as it was written, rounding included."""
    target = Target(shape)
    target.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return target.to(device).eval().requires_grad_(False)
