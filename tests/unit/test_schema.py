# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A host without any library validates what the published schemas say: the same as a library that knows them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ansible_collections.dflash.fleet.plugins.module_utils import schema, schemas
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

SHA, COMMIT, ID = "0" * 64, "a" * 40, "0123456789abcdef"
CHECK = {
    "id": "ext.import:vllm._C", "level": "required", "stage": "build", "status": "pass", "expected": None,
    "actual": {"any": 1}, "hint": "", "evidence": [],
}
HOST = {
    "state": "proven", "build_id": ID, "release_id": ID, "deployment_id": "", "pin": COMMIT, "series": [],
    "commit": "", "acceptance_length": 7.5, "per_position": [0.9, 1], "checks": [CHECK],
}
BUILD = {
    "schema": 1, "kind": "build", "build_id": ID, "pin": COMMIT, "series": [{"name": "p", "sha256": SHA}],
    "commit": COMMIT, "mode": "source", "device": "cpu", "python": "3.11.2", "python_tag": "cp311",
    "platform": "linux_x86_64", "wheel": {"name": "w", "sha256": SHA, "size": 3}, "version": "1",
    "package_version": "1",
    "extensions": [{"module": "vllm._C", "path": "vllm/_C.so", "required": True}], "requirements_sha256": SHA,
}
LAYER = {
    "schema": 1, "kind": "layer", "layer_id": ID, "python": "3.11.2", "requirements_sha256": SHA,
    "distributions": [{"name": "torch", "version": "2"}], "installed_at": "now",
}
RELEASE = {
    "schema": 1, "kind": "release", "release_id": ID, "build_id": ID, "layer_id": ID, "requirements_spec": ID,
    "wheel_sha256": SHA, "commit": COMMIT, "version": "1", "installed_at": "now",
}
PROOF = {
    "schema": 1, "ok": True, "checks": [CHECK], "judged": "", "acceptance": {}, "proven_at": "now",
    "binds": {"release_id": ID, "deployment_id": ID, "machine_id": "m", "driver": "", "gpus": ["GPU-1"]},
}
PIN = {"repo": "r", "ref": "v1", "commit": COMMIT, "resolved_at": "now"}
GOOD: dict[str, list[dict[str, Any]]] = {
    "lock": [{"schema": 1, "pins": [PIN]}, {"schema": 1, "pins": []}],
    "manifest": [BUILD, LAYER, RELEASE],
    "proof": [PROOF],
    "verdict": [{"schema": 1, "state": "ok", "changed": 1, "hosts": {"a": HOST, "b": HOST}}],
}


# ---------------------------------------------------------------- the library agrees
ODD = st.sampled_from([None, True, False, 1.0, 1, "", "x", "A" * 40, "a" * 39, ID + "\n", SHA, 0, 2, -1, 0.5, [], [0],
 ["x"], {}, {"a": 1}])


@st.composite
def nearly(draw: Any, value: Any, odds: int = 12) -> Any:
    """``value`` with parts dropped, doubled or replaced by something odd, here and there."""
    if draw(st.integers(1, odds)) == odds:
        return draw(ODD)
    if isinstance(value, dict):
        out = {key: draw(nearly(item, odds)) for key, item in value.items() if draw(st.integers(1, 30)) < 30}
        if draw(st.integers(1, odds)) == odds:
            out[draw(st.sampled_from(["hint", "covered_by", "fix", "more"]))] = draw(ODD)
        return out
    if isinstance(value, list):
        return [draw(nearly(item, odds)) for item in value for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2])))]
    return value


@pytest.mark.parametrize("name", sorted(schemas.SCHEMAS))
def test_the_published_schema_is_one(name):
    Draft202012Validator.check_schema(schemas.SCHEMAS[name])
    for value in GOOD[name]:
        assert schema.errors(value, schemas.SCHEMAS[name]) == []
        assert Draft202012Validator(schemas.SCHEMAS[name]).is_valid(value)


@pytest.mark.parametrize("name", sorted(schemas.SCHEMAS))
@settings(max_examples=120, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_library_finds_as_much_as_we_do(name, data):
    value = data.draw(nearly(data.draw(st.sampled_from(GOOD[name])), data.draw(st.sampled_from([12, 60]))))
    ours = schema.errors(value, schemas.SCHEMAS[name])
    theirs = list(Draft202012Validator(schemas.SCHEMAS[name]).iter_errors(value))
    if name == "manifest":  # one of several forms: the library counts that as one error
        assert bool(ours) == bool(theirs), (ours, theirs)
    else:
        assert len(ours) == len(theirs), (ours, theirs)


def keywords(part: Any) -> set[str]:
    """Every keyword of a schema, at any depth."""
    found = set(part)
    for key in ("items", "additionalProperties"):
        if key in part:
            found |= keywords(part[key])
    for inner in list(part.get("properties", {}).values()) + part.get("oneOf", []):
        found |= keywords(inner)
    return found


@pytest.mark.parametrize("name", sorted(schemas.SCHEMAS))
def test_schemas_use_only_what_is_understood(name):
    assert keywords(schemas.SCHEMAS[name]) <= schema.KEYWORDS


# ---------------------------------------------------------------- each keyword
NO_B = "$.b is int, not null"


@pytest.mark.parametrize(
    ("part", "value", "found"),
    [
        ({}, object(), []),
        ({"type": "string"}, "", []),
        ({"type": "string"}, 1, ["$ is int, not string"]),
        ({"type": ["number", "null"]}, None, []),
        ({"type": ["number", "null"]}, "1", ["$ is str, not number or null"]),
        ({"type": "number"}, 1, []),
        ({"type": "number"}, 1.5, []),
        ({"type": "number"}, True, ["$ is bool, not number"]),
        ({"type": "integer"}, False, ["$ is bool, not integer"]),
        ({"type": "integer"}, 1.5, ["$ is float, not integer"]),
        ({"type": "boolean"}, 0, ["$ is int, not boolean"]),
        ({"type": "array"}, {}, ["$ is dict, not array"]),
        ({"type": "object"}, [], ["$ is list, not object"]),
        ({"enum": ["a", "b"]}, "c", ["$ is 'c', not one of a, b"]),
        ({"enum": [1]}, 2, ["$ is 2, not one of 1"]),
        ({"pattern": "^a+$"}, "aa", []),
        ({"pattern": "^a+$"}, "ab", ["$ is 'ab', which does not match ^a+$"]),
        ({"pattern": "^a+$"}, 1, []),  # a pattern is for text
        ({"pattern": "b"}, "abc", []),
        ({"required": ["a", "b"]}, {"a": None}, ["$ lacks b"]),
        ({"required": ["a"]}, [], []),
        ({"properties": {"a": {"type": "null"}}}, {"b": 1}, []),
        ({"properties": {"a": {"type": "null"}}}, {"a": 1}, ["$.a is int, not null"]),
        ({"additionalProperties": {"type": "null"}, "properties": {"a": {}}}, {"a": 1, "b": 1}, [NO_B]),
        ({"items": {"type": "null"}}, [None, 1, 2], ["$[1] is int, not null", "$[2] is int, not null"]),
        ({"items": {"properties": {"a": {"enum": [1]}}}}, [{"a": 2}], ["$[0].a is 2, not one of 1"]),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, "", []),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, 1, ["$ is int, not null"]),
        ({"oneOf": [{}, {"type": "string"}]}, "", ["$ matches more than one form"]),
        # of several forms the nearest one speaks
        ({"oneOf": [{"required": ["a", "b"]}, {"required": ["a"]}]}, {}, ["$ lacks a"]),
    ],
)
def test_keywords(part, value, found):
    assert schema.errors(value, part) == found


@pytest.mark.parametrize("part", [{"minimum": 1}, {"properties": {"a": {"maxLength": 1}}}, {"items": {"const": 1}}])
def test_a_keyword_that_is_not_understood_is_an_error_of_ours(part):
    with pytest.raises(KeyError, match="not supported"):
        schema.errors({"a": 1} if "properties" in part else [1], part)


# ---------------------------------------------------------------- require
def test_what_follows_its_schema_is_given_back():
    assert schema.require(PROOF, "proof", "/p") is PROOF


def test_the_first_departures_are_told_with_the_place():
    with pytest.raises(DflashError) as caught:
        schema.require({"schema": 2, "ok": 1}, "proof", "/p/proof.json")
    text = str(caught.value)
    assert text.startswith("not a valid proof: ") and "[/p/proof.json]" in text
    assert text.count("$") == 3


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("lock", {"pins": [{**PIN, "commit": "a" * 39}]}, "$.pins[0].commit"),
        ("proof", {"checks": [{**CHECK, "status": "good"}]}, "$.checks[0].status"),
        ("proof", {"checks": [{**CHECK, "id": "Nothing"}]}, "$.checks[0].id"),
        ("proof", {"binds": {**PROOF["binds"], "release_id": "x"}}, "$.binds.release_id"),
        ("verdict", {"state": "good"}, "$.state"),
        ("verdict", {"hosts": {"a": {**HOST, "state": "fine"}}}, "$.hosts.a.state"),
        ("verdict", {"hosts": {"a": {**HOST, "pin": "v1"}}}, "$.hosts.a.pin"),
        ("verdict", {"hosts": {"a": {**HOST, "per_position": ["x"]}}}, "$.hosts.a.per_position[0]"),
    ],
)
def test_what_must_not_be_written(name, change, where):
    with pytest.raises(DflashError) as caught:
        schema.require({**GOOD[name][0], **change}, name, "here")
    assert where + " " in str(caught.value)


@pytest.mark.parametrize("good", [BUILD, LAYER, RELEASE])
def test_a_manifest_lacks_nothing(good):
    for key in good:
        with pytest.raises(DflashError, match="not a valid manifest"):
            schema.require({name: item for name, item in good.items() if name != key}, "manifest", "here")
