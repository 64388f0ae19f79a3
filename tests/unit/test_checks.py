# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""One shape for everything that is found, and one rule for what stands against a result."""

from __future__ import annotations

import itertools

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import checks, schema, schemas, vocabulary
from ansible_collections.dflash.fleet.plugins.module_utils.checks import make

COVERED, COVER, PLAIN = "capability.layer_offset.v1", "serving.canary_al", "host.root"


@pytest.mark.parametrize(
    ("check_id", "base"),
    [("host.root", "host.root"), ("ext.import:vllm._C", "ext.import"), ("ext.ops:a:b", "ext.ops")],
)
def test_the_id_without_its_object(check_id, base):
    assert checks.base_id(check_id) == base


@pytest.mark.parametrize("check_id", sorted(vocabulary.CHECKS))
def test_every_check_of_the_vocabulary_can_be_made_and_follows_the_schema(check_id):
    entry = vocabulary.CHECKS[check_id]
    name = check_id + (":vllm._C" if entry.get("object") else "")
    for status, level in itertools.product(vocabulary.CHECK_STATUSES, vocabulary.CHECK_LEVELS):
        item = make(name, status, level=level)
        assert schema.errors(item, schemas.CHECK) == []
        assert item["stage"] == entry["stage"] and item["level"] == level and item["status"] == status
        assert item["hint"] == ("" if status in ("pass", "skip") else entry["remedy"])


def test_what_was_found_is_kept_as_it_is():
    item = make("host.disk", "fail", ">= 60", 3, hint="free some", evidence={"path": "/"})
    assert item == {
        "id": "host.disk", "level": "required", "stage": "host", "status": "fail", "expected": ">= 60", "actual": 3,
        "hint": "free some", "evidence": {"path": "/"},
    }
    assert make("host.disk", "fail", hint="")["hint"] == ""


@pytest.mark.parametrize(
    ("check_id", "status", "level", "error"),
    [
        ("host.nothing", "pass", "required", KeyError),
        ("ext.import", "pass", "required", KeyError),  # an object is missing
        ("host.root:x", "pass", "required", KeyError),  # it has none
        ("host.root", "passed", "required", ValueError),
        ("host.root", "pass", "must", ValueError),
    ],
)
def test_words_outside_the_vocabulary_are_refused(check_id, status, level, error):
    with pytest.raises(error, match=r"host|ext"):
        make(check_id, status, level=level)


# ---------------------------------------------------------------- settle
@pytest.mark.parametrize(
    ("covered", "cover", "settled"),
    [
        ("unknown", "pass", True),
        ("unknown", "fail", False),
        ("unknown", "unknown", False),
        ("unknown", "skip", False),
        ("unknown", None, False),
        ("fail", "pass", False),  # behaviour never turns a fail
        ("pass", "pass", False),
    ],
)
def test_behaviour_settles_only_what_is_unknown(covered, cover, settled):
    found = [make(COVERED, covered)] + ([make(COVER, cover)] if cover else [])
    out = checks.settle(found)
    assert out[0]["status"] == covered
    assert out[0].get("covered_by") == (COVER if settled else None)
    assert ("by behaviour, not by code" in out[0]["hint"]) == settled
    assert (out[0] in checks.blocking(out)) == (covered != "pass" and not settled)


def test_nothing_is_settled_before_the_last_stage():
    found = [make(COVERED, "unknown"), make(COVER, "pass")]
    assert "covered_by" not in checks.settle(found, final=False)[0]


def test_what_no_check_covers_stays_open():
    assert "covered_by" not in checks.settle([make(PLAIN, "unknown"), make(COVER, "pass")])[0]


# ---------------------------------------------------------------- blocking
@pytest.mark.parametrize(
    ("check_id", "status", "level", "accepted", "may_be_covered", "blocks"),
    [
        (PLAIN, "pass", "required", (), False, False),
        (PLAIN, "skip", "required", (), False, False),
        (PLAIN, "fail", "required", (), False, True),
        (PLAIN, "unknown", "required", (), False, True),
        (PLAIN, "fail", "advisory", (), False, False),
        (PLAIN, "unknown", "advisory", (), False, False),
        # the operator takes an unknown upon himself, never a fail
        (PLAIN, "unknown", "required", (PLAIN,), False, False),
        (PLAIN, "fail", "required", (PLAIN,), False, True),
        (PLAIN, "unknown", "required", ("host.disk",), False, True),
        ("ext.import:vllm._C", "unknown", "required", ("ext.import",), False, False),
        ("ext.import:vllm._C", "unknown", "required", ("ext.import:vllm._C",), False, False),
        ("ext.import:vllm._C", "unknown", "required", ("ext.import:vllm._moe_C",), False, True),
        # a later stage can still settle it
        (COVERED, "unknown", "required", (), True, False),
        (COVERED, "unknown", "required", (), False, True),
        (COVERED, "fail", "required", (), True, True),
        (PLAIN, "unknown", "required", (), True, True),
    ],
)
def test_what_stands_against_a_result(check_id, status, level, accepted, may_be_covered, blocks):
    item = make(check_id, status, level=level)
    assert checks.blocking([item], accepted, may_be_covered) == ([item] if blocks else [])
    assert checks.result([item], accepted, may_be_covered) == {"ok": not blocks, "checks": [item]}


def test_a_settled_unknown_does_not_block_and_a_settled_fail_does():
    assert checks.blocking([dict(make(COVERED, "unknown"), covered_by=COVER)]) == []
    assert len(checks.blocking([dict(make(COVERED, "fail"), covered_by=COVER)])) == 1


def test_every_blocking_check_is_told_in_order():
    found = [make("host.disk", "fail"), make("host.port", "pass"), make("host.root", "unknown")]
    assert [item["id"] for item in checks.blocking(found)] == ["host.disk", "host.root"]


# ---------------------------------------------------------------- sentence
@pytest.mark.parametrize(
    ("item", "text"),
    [
        (make("host.port", "pass"), "host.port pass"),
        (make("host.port", "pass", "free", "free"), "host.port pass: expected free, found free"),
        (make("host.port", "fail", "free", "held", hint="stop it"),
         "host.port fail: expected free, found held. stop it"),
        (make("host.port", "fail", hint="stop it"), "host.port fail. stop it"),
        (make("host.port", "pass", None, 0), "host.port pass: expected None, found 0"),
    ],
)
def test_sentences(item, text):
    assert checks.sentence(item) == text
