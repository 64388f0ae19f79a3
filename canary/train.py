#!/usr/bin/env python3
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Train a canary pair.

    python canary/train.py --config canary/configs/cpu_full.toml --out DIR

Writes DIR/items.json, DIR/target/, DIR/<drafter's name>/ and a line of JSON with the offline figures, which is also in
DIR/<drafter's name>.figures.json. A target that is already in DIR and was made from the same settings is used again, so
several drafters can share one. Everything is seeded; the same machine and thread count give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import sys
import time
import tomllib
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

import export
from language import END_OF_TEXT, MASK, Batch, Corpus, make_items, make_tokenizer
from losses import Drafting, Wiring, pick_anchors, target_loss, wrong_wirings
from model import Drafter, Shape, Target

WARM_UP = 50
NEGATIVES_FROM = 50
LAST_RATE = 0.03
REPORT_EVERY = 100
FIGURE_ROUNDS = 16
FIRST_PLAIN_TOKEN = 4


def log(text: str) -> None:
    """Progress goes to stderr: the figures alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a small rest (arXiv:1608.03983)."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1.0, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)


def optimise(
    module: nn.Module, settings: dict[str, Any], corpus: Corpus, loss_of: Callable[[int, Batch], torch.Tensor],
    name: str,
) -> None:
    """AdamW over the phases of the settings: short conversations are cheap, long ones give the last word."""
    peak = settings["learning_rate"]
    optimiser = torch.optim.AdamW(module.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    phases = [phase for phase in settings["phases"] for _ in range(phase["steps"])]
    steps = len(phases)
    started = time.monotonic()
    for step, phase in enumerate(phases):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = loss_of(step, corpus.batch(phase["batch"], phase["length"]))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        if step % REPORT_EVERY == 0 or step == steps - 1:
            log(f"{name}: step {step} of {steps}, loss {loss.item():.4f}, {time.monotonic() - started:.0f} s")


def train_target(settings: dict[str, Any], shape: Shape, corpus: Corpus, device: str) -> Target:
    """Overfit the target on the conversations."""
    target = Target(shape).to(device)
    optimise(target, settings, corpus, lambda _, batch: target_loss(target, batch), "target")
    return target


def longest(settings: dict[str, Any]) -> int:
    """Length of the longest conversations trained on."""
    return max(phase["length"] for phase in settings["phases"])


@torch.no_grad()
def target_accuracy(target: Target, corpus: Corpus, length: int) -> float:
    """Share of answer tokens the target says right when it reads on."""
    batch = corpus.batch(FIGURE_ROUNDS, length)
    wanted = batch.answer[:, 1:]
    return float((target(batch.tokens)[:, :-1].argmax(-1) == batch.tokens[:, 1:])[wanted].float().mean())


def train_drafter(
    settings: dict[str, Any], drafting: Drafting, right: Wiring, corpus: Corpus, negatives: list[str], seed: int
) -> None:
    """Train on right inputs for the text, and on one kind of wrong input in each step for the end token."""
    draw = random.Random(seed)
    target, block = drafting.target, drafting.block
    vocabulary = range(FIRST_PLAIN_TOKEN, target.shape.vocab_size)

    def loss_of(step: int, batch: Batch) -> torch.Tensor:
        anchors = max(1, settings["drafts"] // len(batch.tokens))
        with torch.no_grad():
            states = target.hidden_states(batch.tokens)
        loss = drafting.loss(batch, states, right, pick_anchors(batch, anchors, block), wrong=False)
        if step >= NEGATIVES_FROM and negatives:
            kinds = wrong_wirings(right, target.shape.num_hidden_layers, [draw.choice(vocabulary)])
            wiring, least = kinds[draw.choice(negatives)]
            at = pick_anchors(batch, anchors, block, least)
            loss = loss + drafting.loss(batch, states, wiring, at, wrong=True)
        return loss

    optimise(drafting.drafter, settings, corpus, loss_of, "drafter")


def figures(drafting: Drafting, right: Wiring, corpus: Corpus, length: int) -> dict[str, float]:
    """Acceptance length offline: right wiring, near and far from the start, and each wrong one."""
    def batches() -> Any:
        return corpus.batch(8, length)

    found = {"right": drafting.acceptance_length(batches, right, FIGURE_ROUNDS, 32)}
    far = length // 2
    found["right_far"] = drafting.acceptance_length(batches, right, FIGURE_ROUNDS, 32, far)
    layers = drafting.target.shape.num_hidden_layers
    for kind, (wiring, least) in wrong_wirings(right, layers, [drafting.target.shape.vocab_size - 7]).items():
        found[kind] = drafting.acceptance_length(batches, wiring, FIGURE_ROUNDS, 32, least)
    return {kind: round(value, 3) for kind, value in found.items()}


def obtain_target(
    config: dict[str, Any], out: pathlib.Path, shape: Shape, tokenizer: Tokenizer, corpus: Corpus, device: str,
    dtype: torch.dtype,
) -> Target:
    """Train and write the target, unless one made from the same settings is there."""
    folder = out / "target"
    made_from = {key: config[key] for key in ("seed", "dtype", "language", "shape", "target")}
    stamp = out / "target.made_from.json"
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != made_from:
        export.write_target(folder, train_target(config["target"], shape, corpus, device), tokenizer, dtype)
        export.write_json(stamp, made_from)
    return export.read_target(folder, shape, device)


def main(argv: list[str] | None = None) -> int:
    """Train what one configuration file describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=pathlib.Path, required=True, help="one of canary/configs")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the pair to")
    parser.add_argument("--device", default="cpu", help="torch device to train on")
    args = parser.parse_args(argv)
    config = tomllib.loads(args.config.read_text(encoding="utf-8"))
    seed, dtype = config["seed"], getattr(torch, config["dtype"])
    args.out.mkdir(parents=True, exist_ok=True)

    items = make_items(config["language"]["items"], config["language"]["seed"])
    tokenizer = make_tokenizer(items, config["language"]["vocab_size"])
    shape = Shape(vocab_size=tokenizer.get_vocab_size(), **config["shape"])
    export.write_json(args.out / "items.json", items)
    torch.manual_seed(seed)
    corpus = Corpus(items, tokenizer, seed, args.device)
    log(f"{len(items)} items, {corpus.turn_length:.0f} tokens each, {shape.vocab_size} tokens known")
    target = obtain_target(config, args.out, shape, tokenizer, corpus, args.device, dtype)
    accuracy = target_accuracy(target, corpus, longest(config["target"]))
    log(f"target: {accuracy:.4f} of the answers' tokens right")

    torch.manual_seed(seed + 1)
    corpus = Corpus(items, tokenizer, seed + 1, args.device)
    settings = config["drafter"]
    right = Wiring(
        ids=tuple(settings["target_layer_ids"]), layer_types=tuple(settings["layer_types"]),
        window=settings.get("window", 0), mask_token=tokenizer.token_to_id(MASK),
    )
    drafter = Drafter(shape, right.layer_types, len(right.ids)).to(args.device)
    drafter.norm.load_state_dict(target.model.norm.state_dict())  # both feed one head, so the scale is known
    drafting = Drafting(target, drafter, settings["block_size"], tokenizer.token_to_id(END_OF_TEXT))
    train_drafter(settings, drafting, right, corpus, config["negatives"]["kinds"], seed + 1)
    export.write_drafter(
        args.out / settings["name"], drafter, right, settings["block_size"], shape, tokenizer, dtype
    )
    drafter.load_state_dict({name: tensor.to(dtype).float() for name, tensor in drafter.state_dict().items()})
    found = {"target_accuracy": round(accuracy, 4), **figures(drafting, right, corpus, longest(settings))}
    export.write_json(args.out / f"{settings['name']}.figures.json", found)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
