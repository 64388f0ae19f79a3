# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""An id is a function of what makes the thing: equal parts, equal id; one part changed, another id."""

from __future__ import annotations

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import ids

SPEC = {"pin": "a" * 40, "series": [], "mode": "source"}
DEPLOYMENT = ("r", {"serve.yaml": "x", "argv.json": "y"}, {"target": "t@1", "drafter": "d@1"}, "main")


def test_ids_stay_what_they_are():
    """They name folders on hosts: a new release of the collection must find what an older one made."""
    assert ids.build_id(SPEC) == "bc0ef9c899638598"
    assert ids.layer_id("torch==2.11\n", "3.11.2") == "fbc4cf5ad8f7d75c"
    assert ids.release_id("b", "l") == "a53b9bd60b13e2bc"
    assert ids.deployment_id(*DEPLOYMENT) == "7b81eca281727621"


def test_the_order_of_keys_is_no_part_of_a_thing():
    assert ids.build_id(dict(reversed(list(SPEC.items())))) == ids.build_id(SPEC)


@pytest.mark.parametrize("change", [{"pin": "b" * 40}, {"series": ["c"]}, {"mode": "wheel"}, {"new": ""}])
def test_whatever_makes_the_wheel_changes_the_build_id(change):
    assert ids.build_id({**SPEC, **change}) != ids.build_id(SPEC)


def test_kinds_never_share_an_id():
    same = {"a": "b"}
    found = {ids.build_id(same), ids.layer_id("a", "b"), ids.release_id("a", "b")}
    found.add(ids.deployment_id("a", same, same, "b"))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("function", "parts", "others"),
    [
        (ids.layer_id, ("lock", "3.11.2"), ("lock ", "3.11.4")),
        (ids.release_id, ("b", "l"), ("c", "m")),
        (ids.deployment_id, DEPLOYMENT, ("q", {"serve.yaml": "x"}, {"target": "t@2", "drafter": "d@1"}, "second")),
    ],
)
def test_each_part_counts(function, parts, others):
    found = {function(*parts)}
    for place, other in enumerate(others):
        found.add(function(*parts[:place], other, *parts[place + 1 :]))
    assert len(found) == 1 + len(parts)
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in found)
    assert function(*reversed(parts)) not in found
