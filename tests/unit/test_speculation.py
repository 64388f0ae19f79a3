# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which settings make an acceptance length mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import speculation


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rejection_sample_method": None, "synthetic_acceptance_rates": None},
        {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"},
        {"rejection_sample_method": "strict"},
        {"rejection_sample_method": "probabilistic"},
        {"rejection_sample_method": "block", "disable_eagle_block_drop": True},
        {"acceptance_method": "rejection_sampler"},
    ],
)
def test_verification_that_keeps_the_targets_text(config: dict[str, Any]) -> None:
    assert speculation.lossy(config) is None


@pytest.mark.parametrize(
    "config, key, why",
    [
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method", "by a stated rate"),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method", "did not choose"),
        ({"rejection_sample_method": "relaxed"}, "rejection_sample_method", "not known"),
        ({"synthetic_acceptance_rates": [0.9, 0.8]}, "synthetic_acceptance_rates", "synthetic"),
        ({"synthetic_acceptance_length": 6.5}, "synthetic_acceptance_length", "synthetic"),
        ({"fly_entropy_threshold": 0}, "fly_entropy_threshold", "fly"),
        ({"acceptance_method": "typical_acceptance_sampler"}, "acceptance_method", "not known"),
        ({"posterior_alpha": 0.3}, "posterior_alpha", "typical"),
    ],
)
def test_verification_that_does_not(config: dict[str, Any], key: str, why: str) -> None:
    found = speculation.lossy(dict(config, num_speculative_tokens=7))
    assert found is not None
    assert found[0] == key
    assert why in found[1]
