# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters: read from ``/metrics``, summed over engines, and compared between two moments.

The exposition holds a ``_created`` gauge (seconds since 1970) beside each counter; summing names by
prefix would add it.  Only the exact ``_total`` names are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, Optional, Tuple

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
REQUESTS = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
#: When the counter was made: another value means another process, even where the counts rose past the old ones.
CREATED = "vllm:spec_decode_num_drafts_created"

SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z")
LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
ESCAPE = re.compile(r"\\(.)")


class CounterReset(Exception):
    """A counter is lower than before: the server was started anew between the two moments."""


def samples(text: str) -> Iterator[Tuple[str, Dict[str, str], float]]:
    """``(name, labels, value)`` of every sample; lines that are none are passed over."""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = SAMPLE.match(line)
        if not found:
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        labels = {
            name: ESCAPE.sub(lambda m: "\n" if m.group(1) == "n" else m.group(1), quoted)
            for name, quoted in LABEL.findall(found.group(2) or "")
        }
        yield found.group(1), labels, value


@dataclass
class Snapshot:
    """The counters of a server at one moment, or the difference of two moments."""

    drafts: Optional[float] = None
    draft_tokens: float = 0.0
    accepted: float = 0.0
    per_position: Dict[int, float] = field(default_factory=dict)
    requests: float = 0.0
    running: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    created: float = 0.0
    engines: int = 0
    is_vllm: bool = False

    @property
    def speculates(self) -> bool:
        """Whether the server counts drafts at all (it does when it was started with a drafter and with statistics)."""
        return self.drafts is not None

    @property
    def acceptance_length(self) -> Optional[float]:
        """1 + accepted tokens per draft: the target's own token counts.  None without a draft, never 1.0."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None

    @property
    def rates(self) -> Dict[int, float]:
        """By position in the draft, the share of drafts whose token there was accepted."""
        return {pos: n / self.drafts for pos, n in sorted(self.per_position.items())} if self.drafts else {}


def parse(text: str) -> Snapshot:
    """The sums over all engines and models of a server."""
    out = Snapshot()
    engines = set()
    sums = {DRAFT_TOKENS: "draft_tokens", ACCEPTED: "accepted", REQUESTS: "requests", RUNNING: "running",
            WAITING: "running", PREFIX_QUERIES: "prefix_queries", PREFIX_HITS: "prefix_hits"}
    for name, labels, value in samples(text):
        out.is_vllm = out.is_vllm or name.startswith("vllm:")
        if name == DRAFTS:
            out.drafts = (out.drafts or 0.0) + value
            engines.add(labels.get("engine", ""))
        elif name == PER_POSITION:
            position = labels.get("position", "")
            if position.isdigit():
                out.per_position[int(position)] = out.per_position.get(int(position), 0.0) + value
        elif name == CREATED:
            out.created += value
        elif name in sums:
            setattr(out, sums[name], getattr(out, sums[name]) + value)
    out.engines = len(engines)
    return out


def difference(before: Snapshot, after: Snapshot) -> Snapshot:
    """What happened between two moments.  Raises ``CounterReset`` when the server was started anew."""
    if before.created != after.created:
        raise CounterReset("its counters are new ones")
    out = Snapshot(
        drafts=None if after.drafts is None else after.drafts - (before.drafts or 0.0),
        running=after.running, created=after.created, engines=after.engines, is_vllm=after.is_vllm,
        per_position={
            pos: value - before.per_position.get(pos, 0.0) for pos, value in sorted(after.per_position.items())
        },
    )
    for name in ("draft_tokens", "accepted", "requests", "prefix_queries", "prefix_hits"):
        setattr(out, name, getattr(after, name) - getattr(before, name))
    low: Dict[str, Any] = {"drafts": out.drafts or 0.0, "accepted": out.accepted, "requests": out.requests}
    for name, value in low.items():
        if value < 0:
            raise CounterReset("the counter of %s went down" % name)
    return out
