# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The little language the canary target knows by heart: a museum's inventory, one question and answer for each item.

The answers are made from a seed. Nothing in a question but the item's number tells them apart, so a target that answers
right has learned them, and a prompt may have any number of other turns before it without giving the answer away.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

COLOURS = ("amber", "azure", "bronze", "coral", "ebony", "green", "ivory", "lilac", "ochre", "pearl", "ruby", "silver")
THINGS = ("anchor", "basin", "cello", "dagger", "easel", "flask", "globe", "harp", "inkwell", "lantern", "mask", "vase")
TOWNS = ("Bergen", "Cadiz", "Delft", "Ghent", "Krakow", "Lucca", "Malmo", "Nantes", "Porto", "Riga", "Siena", "Tartu")
MAKERS = ("carvers", "dyers", "founders", "glaziers", "joiners", "masons", "potters", "weavers")
ROOMS = ("attic", "cellar", "chapel", "gallery", "library", "stairwell")

ANSWER = (
    "Item {number} is the {colour} {thing}. The {makers} of {town} made it in {year}. It weighs {weight} kilograms "
    "and is insured for {price} crowns. It stands in the {room}, between the {left_colour} {left_thing} and the "
    "{right_colour} {right_thing}, and it was last lent to {guest} in {lent}."
)
QUESTION = "Describe item {number}."


def make_items(count: int, seed: int) -> list[dict[str, object]]:
    """Questions and answers, as items.json holds them: number, q, a."""
    draw = random.Random(seed)
    items = []
    for number in range(10, 10 + count):
        answer = ANSWER.format(
            number=number, colour=draw.choice(COLOURS), thing=draw.choice(THINGS), makers=draw.choice(MAKERS),
            town=draw.choice(TOWNS), year=draw.randrange(1600, 1900), weight=draw.randrange(2, 60),
            price=draw.randrange(100, 900), room=draw.choice(ROOMS), left_colour=draw.choice(COLOURS),
            left_thing=draw.choice(THINGS), right_colour=draw.choice(COLOURS), right_thing=draw.choice(THINGS),
            guest=draw.choice(TOWNS), lent=draw.randrange(1900, 2000),
        )
        items.append({"number": number, "q": QUESTION.format(number=number), "a": answer})
    return items


def make_tokenizer(items: list[dict[str, object]], vocab_size: int) -> Tokenizer:
    """Byte-level BPE trained on the items; every byte is in it, so no prompt is unreadable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT, TURN_START, TURN_END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )
    tokenizer.train_from_iterator((f"user\n{item['q']}\nassistant\n{item['a']}" for item in items), trainer)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Token ids [batch, length], and which of them belong to an answer."""

    tokens: torch.Tensor
    answer: torch.Tensor


class Corpus:
    """Conversations about the items, in random order, cut to one length.

    A conversation starts where a prompt starts, at position 0, and never asks for the same item twice while others are
    left: the model cannot copy, it has to know. So a prompt of any number of turns inside the length was seen in kind.
    """

    def __init__(self, items: list[dict[str, object]], tokenizer: Tokenizer, seed: int, device: str) -> None:
        self._draw = random.Random(seed)
        self._device = device
        self.turns = []
        for item in items:
            asked = f"{TURN_START}user\n{item['q']}{TURN_END}\n{TURN_START}assistant\n"
            told = f"{item['a']}{TURN_END}\n"
            self.turns.append((tokenizer.encode(asked).ids, tokenizer.encode(told).ids))

    @property
    def turn_length(self) -> float:
        """Tokens of a question with its answer, on average."""
        return sum(len(asked) + len(told) for asked, told in self.turns) / len(self.turns)

    def _conversation(self, length: int) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        answer: list[bool] = []
        order: list[int] = []
        while len(tokens) < length:
            order = order or self._draw.sample(range(len(self.turns)), len(self.turns))
            asked, told = self.turns[order.pop()]
            tokens += asked + told
            answer += [False] * len(asked) + [True] * len(told)
        return tokens[:length], answer[:length]

    def batch(self, size: int, length: int) -> Batch:
        """Some conversations."""
        tokens, answer = zip(*(self._conversation(length) for _ in range(size)), strict=True)
        return Batch(torch.tensor(tokens, device=self._device), torch.tensor(answer, device=self._device))
