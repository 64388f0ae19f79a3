# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of target and drafter, and acceptance measured without an engine.

Right wiring, as vLLM draws it for K = block size - 1: the block is [last token, mask, ..., mask], its positions follow
the context, the mask at place j is to become the token at place j. Features are the outputs of the layers in
`target_layer_ids`. A full layer sees all context and the whole block; a sliding one is causal and sees `window`
positions, its own included. Loss weights fall along the block as exp(-(j - 1) / 4), for an early miss costs all that
follows.

Negative training makes a canary of the drafter. Trained on right inputs alone it hardly notices wrong wiring, so each
step also feeds it one kind of wrong input, with the end token as the label everywhere. A token the target never says
in mid sentence is never accepted: wired like that, the acceptance length is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from language import Batch
from model import FULL, SLIDING, Drafter, Target

DECAY = 4.0
FIRST_ANCHOR = 4
MARGIN = 8


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How a drafter is connected: layers whose outputs it reads, attention of its layers, window, mask token."""

    ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    window: int
    mask_token: int
    block_causal: bool = False


def wrong_wirings(right: Wiring, target_layers: int, other_tokens: Sequence[int]) -> dict[str, tuple[Wiring, int]]:
    """Each kind of wrong wiring, with the least context from which it differs from the right one.

    Token ids in `other_tokens` take the mask's place in one of them; callers draw a few for each step.
    """
    ids = right.ids
    if min(ids) < 0 or max(ids) + 1 >= target_layers:
        raise ValueError(f"target_layer_ids {list(ids)} leave no room for a shift by one in {target_layers} layers")
    kinds = {
        "ids_minus": (dataclasses.replace(right, ids=tuple(i - 1 for i in ids)), 0),
        "ids_plus": (dataclasses.replace(right, ids=tuple(i + 1 for i in ids)), 0),
        "ids_reversed": (dataclasses.replace(right, ids=ids[::-1]), 0),
        "mask_token": (dataclasses.replace(right, mask_token=other_tokens[0]), 0),
    }
    past = right.window + MARGIN
    if SLIDING in right.layer_types:
        no_types = dataclasses.replace(right, layer_types=(FULL,) * len(right.layer_types))
        kinds["window_dropped"] = (no_types, past)
        kinds["window_ignored"] = (dataclasses.replace(right, window=1 << 20), past)
    if FULL in right.layer_types:
        kinds["block_causal"] = (dataclasses.replace(right, block_causal=True), 0)
    return kinds


def target_loss(target: Target, batch: Batch) -> torch.Tensor:
    """Cross entropy of the answers' tokens."""
    logits = target(batch.tokens)[:, :-1]
    wanted = batch.answer[:, 1:]
    return functional.cross_entropy(logits[wanted], batch.tokens[:, 1:][wanted])


def pick_anchors(batch: Batch, count: int, block: int, least_context: int = 0) -> torch.Tensor:
    """Positions [batch, count] of known tokens whose block lies inside one answer, past the least context."""
    length = batch.answer.shape[1]
    inside = batch.answer.unfold(1, block, 1).all(dim=-1).float()
    inside[:, : max(FIRST_ANCHOR, least_context)] = 0
    empty = inside.sum(dim=1) == 0
    inside[empty, length - block] = 1
    return torch.multinomial(inside, count, replacement=True)


def layer_mask(
    kind: str, wiring: Wiring, block_at: torch.Tensor, context_at: torch.Tensor, anchor: torch.Tensor, block: int
) -> torch.Tensor:
    """What one layer may see: [batch, 1, block positions, context + block positions]."""
    before = context_at[:, None, :] < anchor[..., None]
    number = torch.arange(block_at.shape[1], device=block_at.device) // block
    same = (number[:, None] == number[None, :]).expand(block_at.shape[0], -1, -1)
    back = block_at[..., None] - block_at[:, None, :]
    if kind == SLIDING:
        before = before & (block_at[..., None] - context_at[:, None, :] < wiring.window)
    if kind == SLIDING or wiring.block_causal:
        same = same & (back >= 0)
    return torch.cat([before, same], dim=-1)[:, None]


class Drafting:
    """Drafts blocks at chosen anchors of a batch and compares them with what the text says."""

    def __init__(self, target: Target, drafter: Drafter, block: int, end_token: int) -> None:
        self.target, self.drafter, self.block, self.end_token = target, drafter, block, end_token
        steps = torch.arange(block - 1, dtype=torch.float32, device=target.lm_head.weight.device)
        self.weights = torch.exp(-steps / DECAY) / torch.exp(-steps / DECAY).sum()

    def logits(
        self, batch: Batch, states: list[torch.Tensor], wiring: Wiring, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [batch, anchors, K, vocabulary] and the right tokens [batch, anchors, K]."""
        size, length = batch.tokens.shape
        offsets = torch.arange(self.block, device=anchors.device)
        block_at = (anchors[..., None] + offsets).flatten(1)
        context_at = torch.arange(length, device=anchors.device).expand(size, length)
        tokens = batch.tokens.gather(1, block_at).unflatten(1, (-1, self.block))
        drafted = torch.full_like(tokens, wiring.mask_token)
        drafted[..., 0] = tokens[..., 0]
        anchor = anchors.repeat_interleave(self.block, dim=1)
        masks = {
            kind: layer_mask(kind, wiring, block_at, context_at, anchor, self.block) for kind in set(wiring.layer_types)
        }
        features = torch.cat([states[layer + 1] for layer in wiring.ids], dim=-1)
        block = self.target.model.embed_tokens(drafted.flatten(1))
        hidden = self.drafter(features, context_at, block, block_at, [masks[kind] for kind in wiring.layer_types])
        return self.target.lm_head(hidden.unflatten(1, (-1, self.block))[:, :, 1:]), tokens[..., 1:]

    def loss(
        self, batch: Batch, states: list[torch.Tensor], wiring: Wiring, anchors: torch.Tensor, wrong: bool
    ) -> torch.Tensor:
        """Weighted cross entropy of the text, or of the end token when the wiring is wrong."""
        logits, tokens = self.logits(batch, states, wiring, anchors)
        labels = torch.full_like(tokens, self.end_token) if wrong else tokens
        losses = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        return (losses.unflatten(0, (-1, self.block - 1)) * self.weights).sum(dim=-1).mean()

    @torch.no_grad()
    def acceptance_length(
        self, batches: Callable[[], Batch], wiring: Wiring, rounds: int, anchors: int, least_context: int = 0
    ) -> float:
        """1 + right tokens before the first miss, on average over some batches."""
        accepted, drafts = 0, 0
        for _ in range(rounds):
            batch = batches()
            states = self.target.hidden_states(batch.tokens)
            at = pick_anchors(batch, anchors, self.block, least_context)
            logits, tokens = self.logits(batch, states, wiring, at)
            right = logits.argmax(dim=-1) == tokens
            accepted += int(right.long().cumprod(dim=-1).sum())
            drafts += at.numel()
        return 1 + accepted / drafts
