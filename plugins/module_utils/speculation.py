# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of ``speculative_config`` under which an acceptance length proves nothing, or the text is another."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Tuple

METHOD = "rejection_sample_method"

#: Ways of verification that keep the target's distribution: 0.20 and 0.21 call them strict and probabilistic,
#: 0.22.0 and newer standard, later releases add block.
LOSSLESS_METHODS = ("strict", "probabilistic", "standard", "block")

#: Ways that do not: what each does instead.
OTHER_METHODS = {
    "synthetic": "accepts draft tokens by a stated rate, whatever the target says",
    "fly": "accepts draft tokens that the target did not choose",
}

#: Keys that only serve such a way (the last two: the sampler of old releases, and what forks kept of it).
LOSSY_KEYS = {
    "synthetic_acceptance_rates": "synthetic",
    "synthetic_acceptance_length": "synthetic",
    "synthetic_acceptance_rate": "synthetic",
    "fly_window_size": "fly",
    "fly_entropy_threshold": "fly",
    "fly_entropy_top_k": "fly",
    "posterior_threshold": "typical acceptance",
    "posterior_alpha": "typical acceptance",
}

#: The key by which old releases chose the sampler.
OLD_METHOD = "acceptance_method"
OLD_LOSSLESS = ("rejection_sampler",)


def lossy(config: Mapping[str, Any]) -> Optional[Tuple[str, str]]:
    """The key that makes verification synthetic or lossy, and why; None where verification keeps the target's text.

    A way of verification that nobody knows is no proof either, so that it is named too.
    """
    for key, known in ((METHOD, LOSSLESS_METHODS), (OLD_METHOD, OLD_LOSSLESS)):
        chosen = config.get(key)
        if chosen is not None and str(chosen) not in known:
            does = OTHER_METHODS.get(str(chosen), "is not known to keep the target's text")
            return key, "%s %s" % (chosen, does)
    for key in sorted(LOSSY_KEYS):
        if config.get(key) is not None:
            return key, "it belongs to %s verification" % LOSSY_KEYS[key]
    return None
