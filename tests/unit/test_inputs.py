# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Every variable typed once, unknown names answered, impossible combinations refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.dflash.fleet.plugins.module_utils import inputs

REPO = Path(__file__).resolve().parents[2]
SPECS = sorted(REPO.glob("roles/*/meta/argument_specs.yml"))
ROLES = [path.parent.parent.name for path in SPECS]
DECLARED: dict[str, Any] = {}
for spec in SPECS:
    DECLARED.update(yaml.safe_load(spec.read_text())["argument_specs"]["main"].get("options") or {})

quick = settings(max_examples=80, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
#: Letters that make near names likely.
names = st.text("abc_", max_size=8)


# ---------------------------------------------------------------- likeness
@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("", "abc", 3),
        ("abc", "abd", 1),  # another letter
        ("abc", "abcd", 1),  # one more
        ("abc", "ac", 1),  # one less
        ("abc", "acb", 1),  # neighbours swapped
        ("abc", "cba", 2),  # not neighbours
        ("ca", "abc", 3),  # a swapped pair is not edited again
        ("dflash_root", "dflash_roots", 1),
        ("dflash_root", "dfalsh_rot", 2),
    ],
)
def test_distance(left, right, distance):
    assert inputs.distance(left, right) == distance


@quick
@given(names, names)
def test_distance_is_the_same_both_ways_and_within_its_bounds(left, right):
    found = inputs.distance(left, right)
    assert found == inputs.distance(right, left)
    assert abs(len(left) - len(right)) <= found <= max(len(left), len(right))
    assert (found == 0) == (left == right)


@quick
@given(names, st.integers(0, 8))
def test_one_swap_of_neighbours_is_one(text, place):
    place = min(place, max(0, len(text) - 2))
    swapped = text[:place] + text[place : place + 2][::-1] + text[place + 2 :]
    assert inputs.distance(text, swapped) == (text != swapped)


# ---------------------------------------------------------------- unknown names
@pytest.mark.parametrize(
    ("name", "error", "warning"),
    [
        # misspelt: inside a role's own prefix
        ("dflash_serve_prt", "did you mean dflash_serve_port?", ""),
        ("dflash_serve_something_new", "unknown variable dflash_serve_something_new", ""),
        ("vllm_build_mod", "did you mean vllm_build_mode?", ""),
        # transposed, added, lost: near a known name although outside every role's prefix
        ("dflahs_root", "did you mean dflash_root?", ""),
        ("dflash_roto", "did you mean dflash_root?", ""),
        ("vlm_build_mode", "did you mean vllm_build_mode?", ""),
        ("xdflash_rootx", "did you mean dflash_root?", ""),
        # three away is nobody's business
        ("xxdflash_rootx", "", ""),
        # other people's roles own these
        ("vllm_exporter_port", "", "variable vllm_exporter_port is not one of dflash.fleet"),
        ("dflash_dashboards", "", "variable dflash_dashboards is not one of dflash.fleet"),
        # a role's name alone is no prefix of its variables
        ("dflash_serverless", "", "variable dflash_serverless is not one"),
        # nothing to do with us
        ("ansible_host", "", ""),
        ("http_proxy", "", ""),
        ("__dflash_outcome", "", ""),
        ("_dflash_serve_x", "", ""),
        ("_dflash_root", "", ""),  # one away from ours, but somebody's own
        # known, and what the operator allows
        ("dflash_root", "", ""),
        ("dflash_serve_of_others", "", ""),
    ],
)
def test_unknown_names(name, error, warning):
    errors, warnings = inputs.unknown_names([name, "dflash_root"], DECLARED, ROLES, ["dflash_serve_of_others"])
    assert len(errors) == bool(error) and len(warnings) == bool(warning), (errors, warnings)
    assert error in "".join(errors) and warning in "".join(warnings)


def test_a_far_unknown_name_of_a_role_still_gets_the_most_similar_one():
    errors, _warnings = inputs.unknown_names(["dflash_serve_speculative_configuration"], DECLARED, ROLES)
    assert "did you mean dflash_serve_speculative_config?" in errors[0]
    assert "dflash_allow_unknown_vars" in errors[0]
    assert inputs.unknown_names(["dflash_serve_x"], [], ["dflash_serve"])[0] == [
        "unknown variable dflash_serve_x (others' variables are named in dflash_allow_unknown_vars)"
    ]


def test_answers_come_in_the_order_of_names():
    errors, _warnings = inputs.unknown_names(["vllm_build_z", "dflash_serve_z", "dflash_accept_z"], DECLARED, ROLES)
    assert [error.split()[2].rstrip(":") for error in errors] == ["dflash_accept_z", "dflash_serve_z", "vllm_build_z"]


# ---------------------------------------------------------------- one value
LIST, TEXTS, DICT = {"type": "list"}, {"type": "list", "elements": "str"}, {"type": "dict"}
CHOICE = {"type": "str", "choices": ["source", "precompiled"]}


@pytest.mark.parametrize(
    ("name", "option", "value", "typed"),
    [
        ("x", {"type": "str"}, "", ""),
        ("x", {"type": "str"}, 13, "13"),  # vllm_toolchain_cuda: 13
        ("x", {"type": "str"}, 13.1, "13.1"),
        ("x", {"type": "path"}, "/opt/dflash", "/opt/dflash"),
        ("x", {"type": "bool"}, True, True),
        ("x", {"type": "bool"}, "yes", True),
        ("x", {"type": "bool"}, " TRUE ", True),
        ("x", {"type": "bool"}, "on", True),
        ("x", {"type": "bool"}, 1, True),
        ("x", {"type": "bool"}, False, False),
        ("x", {"type": "bool"}, "no", False),
        ("x", {"type": "bool"}, "Off", False),
        ("x", {"type": "bool"}, 0, False),
        ("x", {"type": "int"}, "8000", 8000),  # -e gives text
        ("x", {"type": "int"}, 8000.0, 8000),
        ("x", {"type": "int"}, "-3", -3),
        ("x", {"type": "float"}, "2.5", 2.5),
        ("x", {"type": "float"}, 2, 2.0),
        ("dflash_serve_port", {"type": "int"}, 1, 1),
        ("dflash_serve_port", {"type": "int"}, 65535, 65535),
        ("dflash_accept_floor", {"type": "float"}, "1", 1.0),
        ("x", LIST, [1, "a"], [1, "a"]),
        ("x", LIST, "a, b,,c ", ["a", "b", "c"]),
        ("x", LIST, "", []),
        ("x", LIST, ' [1, "25%"]', [1, "25%"]),
        ("x", TEXTS, '["a"]', ["a"]),
        ("x", DICT, {"a": [1]}, {"a": [1]}),
        ("x", DICT, ' {"a": {"b": null}}', {"a": {"b": None}}),
        ("dflash_models_target", DICT, {"path": "m", "source": "host", "name": "n"}, None),
        ("dflash_models_canary", DICT, {"target": "t", "drafter": "d", "items": "i"}, None),
        ("x", CHOICE, "source", "source"),
    ],
)
def test_values_that_fit(name, option, value, typed):
    found = inputs.coerce(name, option, value)
    typed = value if typed is None else typed
    assert found == typed and type(found) is type(typed)


@pytest.mark.parametrize(
    ("name", "option", "value", "sentence"),
    [
        ("x", {"type": "str"}, None, "x must be text, not NoneType None"),
        ("x", {"type": "str"}, True, "x must be text"),
        ("x", {"type": "str"}, ["a"], "x must be text, not list"),
        ("x", {"type": "str"}, {}, "x must be text, not dict"),
        ("x", {"type": "str"}, "a\nb", "x must be one line of text"),
        ("x", {"type": "str"}, "a\0b", "x must be one line of text"),
        ("x", {"type": "path"}, "opt/dflash", "x must be an absolute path, not 'opt/dflash'"),
        ("x", {"type": "path"}, "", "absolute path"),
        ("x", {"type": "path"}, "/opt\n/dflash", "one line"),
        ("x", {"type": "bool"}, "maybe", "x must be true or false, not str 'maybe'"),
        ("x", {"type": "bool"}, None, "true or false"),
        ("x", {"type": "bool"}, 2, "true or false"),
        ("x", {"type": "bool"}, [], "true or false"),
        ("x", {"type": "int"}, "8x", "x must be a whole number, not str '8x'"),
        ("x", {"type": "int"}, 1.5, "a whole number"),
        ("x", {"type": "int"}, True, "x must be a whole number, not bool True"),
        ("x", {"type": "int"}, None, "a whole number"),
        ("x", {"type": "int"}, "", "a whole number"),
        ("x", {"type": "float"}, "nan", "x must be a number, not str 'nan'"),
        ("x", {"type": "float"}, [2], "a number"),
        ("dflash_serve_port", {"type": "int"}, 0, "dflash_serve_port must be between 1 and 65535, not 0"),
        ("dflash_serve_port", {"type": "int"}, "65536", "between 1 and 65535, not 65536"),
        ("dflash_accept_floor", {"type": "float"}, 0.99, "between 1.0 and 256.0"),
        ("dflash_accept_floor", {"type": "float"}, "inf", "between 1.0 and 256.0"),
        ("x", LIST, 3, "x must be a list, not int 3"),
        ("x", LIST, {"a": 1}, "x must be a list, not dict"),
        ("x", LIST, "[1,", "x must be a list; its JSON is broken: "),
        ("x", TEXTS, ["a", 1], "every item of x must be text, not int 1"),
        ("x", DICT, "a=1", "x must be a mapping, not str 'a=1'"),
        ("x", DICT, "{a: 1}", "x must be a mapping; its JSON is broken"),
        ("x", DICT, [1], "a mapping"),
        ("x", DICT, None, "a mapping"),
        ("dflash_models_target", DICT, {"paht": "m"}, "dflash_models_target has no key paht: did you mean path?"),
        ("dflash_models_target", DICT, {"zzz": "m"}, "no key zzz; its keys are path, source, name"),
        ("dflash_models_drafter", DICT, {"path": 1}, "dflash_models_drafter.path must be text, not int 1"),
        ("dflash_models_canary", DICT, {"path": "m"}, "dflash_models_canary has no key path"),
        ("x", CHOICE, "sauce", "x must be one of source, precompiled, not 'sauce': did you mean source?"),
        ("x", CHOICE, "zzz", "x must be one of source, precompiled, not 'zzz'"),
    ],
)
def test_values_that_do_not_fit_are_named(name, option, value, sentence):
    with pytest.raises(ValueError, match=r"\w") as caught:
        inputs.coerce(name, option, value)
    assert sentence in str(caught.value)


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400)])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text("ab[{,1\n") | st.sampled_from(["inf", "1e400", "[" * 5000,
 "{\"a\":" * 5000])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3), max_leaves=5
)
OPTIONS = {
    "str": str, "path": str, "bool": bool, "int": int, "float": float, "list": list, "dict": dict,
}


@settings(quick, max_examples=200)
@given(st.sampled_from(sorted(OPTIONS)), VALUES | VALUES.map(json.dumps))
def test_any_json_value_gets_its_type_or_one_sentence(kind, value):
    option = {"type": kind}
    try:
        typed = inputs.coerce("x", option, value)
    except ValueError as error:
        assert "x" in str(error)
    else:
        assert type(typed) is OPTIONS[kind]
        assert inputs.coerce("x", option, typed) == typed


@settings(quick, max_examples=100)
@given(st.sampled_from(sorted(DECLARED)), VALUES)
def test_any_json_value_for_any_variable_is_typed_or_refused_by_name(name, value):
    try:
        inputs.coerce(name, DECLARED[name], value)
    except ValueError as error:
        assert name in str(error)


# ---------------------------------------------------------------- all values
def test_every_declared_default_has_its_declared_type():
    values, errors = inputs.merge(DECLARED, {})
    assert errors == []
    assert values == {name: option["default"] for name, option in DECLARED.items()}
    assert set(inputs.RANGES) | set(inputs.KEYS) <= set(DECLARED)


def test_merge_says_all_errors_and_goes_on_with_defaults():
    values, errors = inputs.merge(
        DECLARED, {"dflash_serve_port": "no", "dflash_root": "/srv/d", "vllm_build_mode": "x", "not_declared": 1}
    )
    assert values["dflash_serve_port"] == 8000 and values["dflash_root"] == "/srv/d"
    assert "not_declared" not in values
    assert len(errors) == 2 and "dflash_serve_port" in errors[0] and "vllm_build_mode" in errors[1]


@pytest.mark.parametrize(
    ("instances", "name", "sentences"),
    [
        ({"main": {}}, "main", []),
        ({"a-b_9": {"dflash_serve_port": "9000"}}, "a-b_9", []),
        ({}, "", ["exactly one instance in this version, not 0"]),
        ({"a": {}, "b": {}}, "", ["exactly one instance in this version, not 2"]),
        ({"Main": {}}, "Main", ["instance name 'Main' must be at most 16 of a-z"]),
        ({"-a": {}}, "-a", ["instance name '-a'"]),
        ({"a" * 17: {}}, "a" * 17, ["at most 16"]),
        ({"main": None}, "main", ["dflash_instances.main must be a mapping of variables"]),
        ({"main": {"dflash_serve_prt": 1}}, "main",
         ["unknown variable dflash_serve_prt: did you mean dflash_serve_port?"]),
        ({"main": {"dflash_root": "/x"}}, "main", ["has an unknown variable dflash_root"]),  # not an instance's to say
        ({"main": {"dflash_serve_port": 0}}, "main", ["dflash_instances.main: dflash_serve_port must be between"]),
        ({"main": {"dflash_serve_port": 0, "zz": 1}}, "main", ["dflash_serve_port", "unknown variable zz"]),
    ],
)
def test_instances(instances, name, sentences):
    values = dict(inputs.merge(DECLARED, {})[0], dflash_instances=instances)
    merged, found, errors = inputs.apply_instance(values, DECLARED)
    assert found == name
    assert len(errors) == len(sentences)
    for sentence, error in zip(sentences, errors, strict=True):
        assert sentence in error
    assert merged["dflash_serve_port"] == (9000 if name == "a-b_9" else 8000)
    assert values["dflash_serve_port"] == 8000  # what was given is left as it was


GOOD: dict[str, Any] = {
    "vllm_build_mode": "precompiled", "vllm_build_device": "cpu", "vllm_build_precompiled_wheel": "w==1",
    "vllm_build_precompiled_base": "v1", "dflash_models_target": {"path": "t"}, "dflash_models_drafter": {"path": "d"},
}


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({}, []),
        ({"vllm_build_mode": "source"}, ["vllm_build_mode source is not available"]),
        ({"vllm_build_device": "cuda"}, ["works for vllm_build_device cpu in this version, not cuda"]),
        ({"vllm_build_precompiled_wheel": ""}, ["vllm_build_precompiled_wheel is required"]),
        ({"vllm_build_precompiled_base": ""}, ["vllm_build_precompiled_base is required"]),
        ({"dflash_models_target": {}}, ["dflash_models_target is required"]),
        ({"dflash_models_drafter": {"path": ""}}, ["dflash_models_drafter is required"]),
        ({"dflash_models_drafter": {"path": "d", "source": "hub"}}, ["source must be controller or host, not 'hub'"]),
        ({"dflash_models_target": {"path": "/t", "source": "host"}}, []),
        ({"dflash_models_canary": {"target": "t"}}, ["dflash_models_canary needs all of target, drafter, items"]),
        ({"dflash_models_canary": {"target": "t", "drafter": "d", "items": "i"}}, []),
        ({"dflash_root": "/a/" + "r" * 37}, []),
        ({"dflash_root": "/"}, ["dflash_root must be a folder of its own"]),
        ({"dflash_root": "/etc"}, ["dflash_root must be a folder of its own"]),
        ({"dflash_root": "/opt/../etc"}, ["dflash_root must be a folder of its own"]),
        ({"dflash_root": "/opt/a b"}, ["dflash_root must be a folder of its own"]),
        ({"vllm_build_mode": "precompiled", "vllm_build_device": "cpu", "vllm_build_precompiled_wheel": "w>=1",
          "vllm_build_precompiled_base": "v1"}, ["vllm_build_precompiled_wheel must be name==version"]),
        ({"dflash_root": "/a/" + "r" * 38}, ["dflash_root is 41 characters long"]),
        ({"vllm_source_repo": " "}, ["vllm_source_repo must not be empty"]),
        ({"vllm_source_ref": "--upload-pack=x"}, ["vllm_source_ref must not be empty or begin with a dash"]),
        ({"vllm_toolchain_python": ""}, ["vllm_toolchain_python must not"]),
        ({"dflash_service_user": "-x"}, ["dflash_service_user must not"]),
        ({"vllm_source_requires_commits": ["abc1234", "v0.22.0", "refs/pull/40898/head", "feature/x"]}, []),
        ({"vllm_source_requires_commits": ["-x", "a..b", "a b"]}, ["has '-x'", "has 'a..b'", "has 'a b'"]),
        ({"dflash_serve_environment": {"A": "1", "B": 2, "C": 0.5}}, []),
        ({"dflash_serve_environment": {"A": True}}, ["dflash_serve_environment.A must be text, not True"]),
        ({"dflash_serve_environment": {"A": None}}, ["dflash_serve_environment.A must be text"]),
        ({"dflash_rollout_serial": [1, "5", "25%", "100%"]}, []),
        ({"dflash_rollout_serial": [0]}, ["dflash_rollout_serial has 0"]),
        ({"dflash_rollout_serial": ["0%"]}, ["has '0%'"]),
        ({"dflash_rollout_serial": [1, -1, "x", "%"]}, ["has -1", "has 'x'", "has '%'"]),
        ({"dflash_rollout_serial": [1.5, True]}, ["has 1.5", "has True"]),
    ],
)
def test_combinations(given, sentences):
    values, errors = inputs.merge(DECLARED, {**GOOD, **given})
    assert errors == []
    found = inputs.combinations(values)
    assert len(found) == len(sentences), found
    for sentence, error in zip(sentences, found, strict=True):
        assert sentence in error


# ---------------------------------------------------------------- a diagnosis
@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({}, []),
        ({"vllm_verify_python": "/opt/ml-env/bin/python3", "vllm_verify_drafter": "~/drafter"}, []),
        ({"vllm_verify_tree": "/t"}, []),
        ({"vllm_verify_python": "python3"}, ["vllm_verify_python must be an absolute path on the host, not 'python3'"]),
        ({"vllm_verify_tree": "./t"}, ["vllm_verify_tree must be an absolute path"]),
        ({"vllm_verify_drafter": "d"}, ["vllm_verify_drafter must be an absolute path"]),
        ({"vllm_verify_python": "/p", "vllm_verify_tree": "/t"}, ["both set: name one of them"]),
        ({"dflash_service_user": " "}, ["dflash_service_user must not be empty"]),
    ],
)
def test_a_diagnosis_needs_little(given, sentences):
    values, errors = inputs.merge({name: DECLARED[name] for name in inputs.VERIFY}, given)
    assert errors == []
    found = inputs.verify(values)
    assert len(found) == len(sentences), found
    for sentence, error in zip(sentences, found, strict=True):
        assert sentence in error
