# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Target and drafter in plain torch, with the parameter names and the maths of the checkpoints that vLLM loads.

Target: Qwen3 (Qwen3 technical report, arXiv:2505.09388): pre-norm decoder layers, grouped-query attention with an RMS
norm on each head's query and key, rotary positions (arXiv:2104.09864, half-split form), SwiGLU (arXiv:2002.05202).

Drafter: DFlash (block diffusion drafting): one block of a known token and masks. Each layer attends from the block to
the target's hidden states, which `fc` and `hidden_norm` turn into one vector for each context token, and to the block
itself. It has no embedding and no head of its own: vLLM shares the target's, and so does the training here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that target and drafter have in common, and the number of the target's layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding of [batch, length, heads, dim] at positions [batch, length]."""
    half = heads.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    angle = positions[..., None].float() * frequency
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention from some positions to others under a mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(
        self, source: torch.Tensor, source_at: torch.Tensor, seen: torch.Tensor, seen_at: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from `source` to `seen`, each with its positions; without a mask, causally."""
        shape = self.shape
        query = self.q_proj(source).unflatten(-1, (-1, shape.head_dim))
        key = self.k_proj(seen).unflatten(-1, (-1, shape.head_dim))
        value = self.v_proj(seen).unflatten(-1, (-1, shape.head_dim))
        query = rotate(self.q_norm(query), source_at, shape.rope_theta)
        key = rotate(self.k_norm(key), seen_at, shape.rope_theta)
        groups = shape.num_attention_heads // shape.num_key_value_heads
        key, value = (heads.repeat_interleave(groups, dim=2).transpose(1, 2) for heads in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's second half."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """One layer; in the drafter it also sees a context that is no part of its own stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, at: torch.Tensor, mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None, context_at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the stream itself, or to the context followed by the stream."""
        source = self.input_layernorm(hidden)
        seen, seen_at = source, at
        if context is not None and context_at is not None:
            seen, seen_at = torch.cat([context, source], dim=1), torch.cat([context_at, at], dim=1)
        hidden = hidden + self.self_attn(source, at, seen, seen_at, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TargetBody(nn.Module):
    """The part that checkpoints call `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Target(nn.Module):
    """The model served."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = TargetBody(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def hidden_states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What goes into each layer, and last what comes out of the last: entry i + 1 is the output of layer i."""
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = [self.model.embed_tokens(tokens)]
        for layer in self.model.layers:
            states.append(layer(states[-1], at))
        return states

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        return self.lm_head(self.model.norm(self.hidden_states(tokens)[-1]))


class Drafter(nn.Module):
    """The model that drafts a block from the target's hidden states."""

    def __init__(self, shape: Shape, layer_types: Sequence[str], taps: int) -> None:
        super().__init__()
        self.layer_types = tuple(layer_types)
        self.fc = nn.Linear(shape.hidden_size * taps, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in layer_types)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05 if name.startswith("fc") else 0.02)

    def forward(
        self, features: torch.Tensor, features_at: torch.Tensor, block: torch.Tensor, block_at: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Final hidden states of the block; one mask for each layer, over context and block."""
        context = self.hidden_norm(self.fc(features))
        hidden = block
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, block_at, mask, context, features_at)
        return self.norm(hidden)
