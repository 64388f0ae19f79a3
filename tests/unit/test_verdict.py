# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From what each host left behind to one verdict, one recap and one exit code."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import schema, verdict, vocabulary
from ansible_collections.dflash.fleet.plugins.module_utils.checks import make, settle

ID, OTHER, COMMIT, SHA = "0" * 16, "f" * 16, "a" * 40, "0" * 64
PIN = {"commit": COMMIT, "series": [{"name": "p", "sha256": SHA, "text": "diff"}], "ref": "v1"}
AL = {"acceptance_length": 7.5, "per_position": [0.9, 0.8], "drafts": 200}
OLD = make("serving.al", "pass", ">= 2", 7.5)
GOOD, BAD = make("serving.canary_al", "pass"), make("serving.canary_al", "fail", ">= 6", 1.0)
BUILD = make("identity.commit", "fail")


def state(group: str = "todo", **more: Any) -> dict[str, Any]:
    return {
        "group": group, "build_id": ID, "current": OTHER, "deployment_id": ID, "causes": [{"kind": "x", "text": "why"}],
        "release": {"release_id": ID, "commit": COMMIT}, "proof": {"ok": True, "checks": [OLD], "acceptance": AL},
        **more,
    }


def entry(seen: dict[str, Any], predict: bool = False) -> dict[str, Any]:
    """The entry, which always fits into a verdict."""
    found = verdict.host_entry(seen, predict)
    assert schema.errors(verdict.build({"a": found}, predict, "s", "f"), schema.SCHEMAS["verdict"]) == []
    return found


# ---------------------------------------------------------------- one host
@pytest.mark.parametrize(
    ("seen", "predict", "word"),
    [
        ({}, False, "not_reached"),
        ({}, True, "not_reached"),
        ({"state": None, "pin": None, "verify": None, "outcome": None}, False, "not_reached"),
        ({"state": state("unchanged")}, False, "unchanged"),
        ({"state": state("unchanged")}, True, "unchanged"),
        ({"state": state("todo")}, False, "not_reached"),
        ({"state": state("todo")}, True, "would_change"),
        ({"state": state("restart")}, True, "would_change"),
        ({"state": state("rejudge")}, True, "would_change"),
        # left the play on the way: nobody knows what became of it, unless there was nothing to do
        ({"state": state("todo"), "lost": True}, False, "lost"),
        ({"state": state("todo"), "lost": True}, True, "lost"),
        ({"lost": True}, False, "lost"),
        ({"state": state("unchanged"), "lost": True}, False, "unchanged"),
        ({"state": state("todo"), "lost": True, "outcome": {"state": "proven"}}, False, "proven"),
        # what a role says counts before all else
        *[({"state": state("todo"), "outcome": {"state": word}}, False, word) for word in vocabulary.HOST_STATES],
        ({"state": state("unchanged"), "outcome": {"state": "refused"}}, True, "refused"),
    ],
)
def test_the_state_of_a_host(seen, predict, word):
    assert entry(seen, predict)["state"] == word


@pytest.mark.parametrize(
    ("word", "outcome", "predict", "found"),
    [
        ("unchanged", {}, False, [OLD]),
        ("would_change", {}, True, []),
        ("not_reached", {}, False, []),
        ("proven", {"checks": [GOOD]}, False, [GOOD]),
        ("proven", {}, False, []),
        # what stands against it: its own checks, else those of the installed build
        ("rolled_back", {"checks": [BAD]}, False, [BAD]),
        ("rolled_back", {}, False, [BUILD]),
        ("stopped", {}, False, [BUILD]),
        ("refused", {}, False, [BUILD]),
        ("refused", {"checks": [BAD]}, False, [BAD]),
        ("unreachable", {}, False, []),
        ("lost", {}, False, []),
    ],
)
def test_checks_of_a_host(word, outcome, predict, found):
    group = "unchanged" if word == "unchanged" else "todo"
    told = {} if word in ("unchanged", "would_change", "not_reached") else {"state": word, **outcome}
    made = entry({"state": state(group), "verify": {"checks": [BUILD]}, "outcome": told}, predict)
    assert made["state"] == word
    assert made["checks"] == found


@pytest.mark.parametrize(
    ("word", "acceptance", "value"),
    [
        ("unchanged", None, 7.5),  # proven then, and nothing has changed
        ("would_change", None, 7.5),
        ("proven", {"acceptance_length": 6.0, "per_position": [0.5], "drafts": 50}, 6.0),
        ("rolled_back", {"acceptance_length": 1.0, "per_position": [], "drafts": 50}, 1.0),
        ("rolled_back", {}, None),  # never that of the deployment before
        ("refused", None, None),
        ("stopped", None, None),
        ("not_reached", None, None),
    ],
)
def test_acceptance_of_a_host(word, acceptance, value):
    told = {} if word in ("unchanged", "would_change", "not_reached") else {"state": word, "acceptance": acceptance}
    group = "unchanged" if word == "unchanged" else "todo"
    made = entry({"state": state(group), "outcome": told}, word == "would_change")
    assert made["state"] == word and made["acceptance_length"] == value
    assert made["drafts"] == (None if value is None else 200 if value == 7.5 else 50)
    assert made["per_position"] == {7.5: [0.9, 0.8], 6.0: [0.5]}.get(value, [])


def test_a_host_is_told_whole():
    outcome = {
        "state": "proven", "phase": "roll_out", "changed": True, "release": {"release_id": OTHER, "commit": "b" * 40},
        "deployment_id": OTHER, "serves": OTHER, "reason": "r", "fix": "f",
    }
    made = entry({"state": state(), "pin": PIN, "outcome": outcome})
    assert made["release_id"] == OTHER and made["commit"] == "b" * 40 and made["deployment_id"] == OTHER
    assert made["build_id"] == ID and made["pin"] == COMMIT and made["series"] == [{"name": "p", "sha256": SHA}]
    assert made["serves"] == OTHER and made["changed"] is True and made["phase"] == "roll_out"
    assert made["reason"] == "r" and made["fix"] == "f" and made["causes"] == ["why"]
    before = entry({"state": state(), "pin": PIN})
    assert before["release_id"] == ID and before["commit"] == COMMIT and before["deployment_id"] == ID
    assert before["changed"] is False and before["reason"] == "" and before["phase"] == ""


@pytest.mark.parametrize(
    ("outcome", "serves"),
    [
        ({}, OTHER), ({"state": "refused"}, OTHER), ({"state": "stopped"}, ""),
        ({"state": "rolled_back", "serves": ID}, ID),
        ({"state": "stopped", "serves": ""}, ""), ({"state": "proven", "serves": ID}, ID),
    ],
)
def test_what_a_host_serves(outcome, serves):
    assert entry({"state": state(), "outcome": outcome})["serves"] == serves


# ---------------------------------------------------------------- exit
def host(word: str, phase: str = "") -> dict[str, Any]:
    return {**entry({"outcome": {"state": word, "phase": phase}})}


OF_STATE = {
    "unchanged": [], "would_change": [], "proven": [], "removed": [], "not_reached": ["gate_or_build"],
    "degraded": ["gate_or_build"],
    "rolled_back": ["gate_or_build"], "refused": ["gate_or_build"], "stopped": ["gate_or_build"],
    "unreachable": ["unreachable_or_lost"], "lost": ["unreachable_or_lost"],
}


def test_every_host_state_has_its_cause():
    assert set(OF_STATE) == set(vocabulary.HOST_STATES)
    for word, causes in OF_STATE.items():
        assert verdict.exit_causes({"a": host(word)}) == causes, word


@pytest.mark.parametrize(
    ("phase", "causes"),
    [
        ("plan", ["input"]), ("preflight", ["input"]), ("build", ["gate_or_build"]), ("distribute", ["gate_or_build"]),
        ("prove_build", ["gate_or_build"]), ("roll_out", ["gate_or_build"]), ("", ["gate_or_build"]),
    ],
)
def test_the_cause_of_a_refusal_is_its_phase(phase, causes):
    assert verdict.exit_causes({"a": host("refused", phase)}) == causes
    assert verdict.exit_causes({"a": host("rolled_back", phase)}) == ["gate_or_build"]


@pytest.mark.parametrize(
    ("hosts", "causes", "code"),
    [
        ([("proven", ""), ("unchanged", "")], [], 0),
        ([("proven", ""), ("rolled_back", "")], ["gate_or_build"], 2),
        ([("refused", "plan"), ("not_reached", "")], ["input"], 3),
        ([("refused", "preflight"), ("refused", "build")], ["gate_or_build", "input"], 2),
        ([("unreachable", ""), ("refused", "plan")], ["input", "unreachable_or_lost"], 4),
        ([("lost", ""), ("stopped", ""), ("refused", "plan")], ["gate_or_build", "input", "unreachable_or_lost"], 4),
        ([("degraded", ""), ("proven", "")], ["gate_or_build"], 2),
    ],
)
def test_causes_of_several_hosts(hosts, causes, code):
    found = verdict.exit_causes({str(number): host(*item) for number, item in enumerate(hosts)})
    assert found == causes
    assert verdict.exit_code(found) == code


@pytest.mark.parametrize(
    ("causes", "code"),
    [
        ([], 0), (["ok"], 0), (["gate_or_build"], 2), (["input"], 3), (["unreachable_or_lost"], 4), (["cancelled"], 5),
        (["gate_or_build", "input"], 2), (["input", "unreachable_or_lost"], 4),
        (["gate_or_build", "unreachable_or_lost"], 4),
        (["gate_or_build", "input", "unreachable_or_lost"], 4), (["input", "cancelled"], 5),
        (["gate_or_build", "input", "unreachable_or_lost", "cancelled"], 5), (["ok", "input"], 3),
    ],
)
def test_of_several_causes_five_then_four_two_three(causes, code):
    assert verdict.exit_code(causes) == verdict.exit_code(causes[::-1]) == code


# ---------------------------------------------------------------- a run
@pytest.mark.parametrize(
    ("words", "state_of_run"),
    [
        (["proven", "unchanged", "would_change", "removed"], "ok"),
        *[(["proven", word],
         "failed") for word in sorted(set(vocabulary.HOST_STATES) - set(vocabulary.OK_HOST_STATES))],
        ([], "failed"),  # nothing was asked, so nothing is well
    ],
)
def test_the_state_of_a_run(words, state_of_run):
    made = verdict.build({word: host(word) for word in words}, False, "s", "f")
    assert made["state"] == state_of_run
    schema.require(made, "verdict", "here")


def test_changed_counts_hosts():
    hosts = {name: {**host("proven"), "changed": name != "b"} for name in "abc"}
    made = verdict.build(hosts, True, "s", "f")
    assert made["changed"] == 2 and made["check_mode"] is True
    assert (made["started_at"], made["finished_at"], made["hosts"]) == ("s", "f", hosts)


# ---------------------------------------------------------------- recap
def recap(seen: dict[str, Any], predict: bool = False) -> list[str]:
    return verdict.recap(verdict.build({"gpu1": entry(seen, predict)}, predict, "s", "f"), "/v.json", "again")


def test_recap_of_a_good_run():
    assert recap({"state": state("unchanged"), "pin": PIN}) == [
        "run ok, 0 of 1 hosts changed",
        "gpu1             unchanged    AL 7.50 (per position 0.90 0.80; 200 drafts)",
        "  build 000000000000, release 000000000000, deployment 000000000000, commit aaaaaaaaaaaa",
        "verdict: /v.json",
    ]


def test_recap_of_a_roll_back():
    covered = settle([make("capability.layer_offset.v1", "unknown"), GOOD])
    outcome = {
        "state": "rolled_back", "serves": OTHER, "reason": "a required check failed", "fix": "mend it", "changed": True,
        "checks": [
            *covered, make("serving.al", "fail", ">= 2", 1.0, hint="low"), make("ext.elf", "fail", level="advisory"),
            make("capability.swa.mixed.v1", "unknown", level="advisory"), make("serving.text", "unknown", hint="ask"),
        ],
    }
    lines = recap({"state": state(), "outcome": outcome})
    assert lines[0] == "run failed, 1 of 1 hosts changed"
    assert lines[1] == "gpu1             rolled_back  AL -"
    assert lines[3:] == [
        "  because: why",
        "  reason: a required check failed",
        "  serving.al fail: expected >= 2, found 1.0. low",
        "  serving.text unknown. ask",
        "  settled by behaviour, not by code: capability.layer_offset.v1",
        "  serves again: deployment " + OTHER,
        "  fix: mend it",
        "verdict: /v.json",
        "when mended, run: again",
    ]


@pytest.mark.parametrize(
    ("seen", "predict", "last"),
    [
        ({"state": state("todo")}, True, "to carry it out, run: again"),
        ({"state": state("unchanged")}, True, "verdict: /v.json"),
        ({"outcome": {"state": "refused"}}, True, "when mended, run: again"),
        ({"outcome": {"state": "proven"}}, False, "verdict: /v.json"),
        ({}, False, "when mended, run: again"),
    ],
)
def test_the_last_line_is_what_to_do_next(seen, predict, last):
    assert recap(seen, predict)[-1] == last


def test_recap_names_hosts_in_order_and_a_prediction_as_one():
    made = verdict.build({"b": host("proven"), "a": host("lost")}, True, "s", "f")
    lines = verdict.recap(made, "/v.json", "again")
    assert [line.split()[0] for line in lines[1:3]] == ["a", "b"]
    assert lines[0].startswith("run failed, 0 of 2 hosts changed, ")


# ---------------------------------------------------------------- native, and a diagnosis
def test_recap_says_what_is_native_and_what_the_pin_contains():
    build = {
        "native": {"base": "v1", "commit": COMMIT, "count": 0, "files": [], "says": "python only"},
        "requires_commits": [{"ref": "v0", "commit": COMMIT}, {"ref": "refs/pull/7/head", "commit": COMMIT}],
    }
    for seen in ({"state": state("unchanged", build=build)}, {"state": state(), "build": build,
                                                             "outcome": {"state": "proven"}}):
        lines = recap(seen)
        assert lines[3:5] == ["  native: python only since v1", "  contains: v0, refs/pull/7/head"]
    assert not any("native" in line for line in recap({"state": state("unchanged", build={"native": None})}))


def test_a_diagnosis_is_told_by_its_own_checks_and_not_by_a_proof():
    seen = {
        "state": state("unchanged"),
        "outcome": {"state": "unchanged", "phase": "verify", "checks": [BUILD], "build": {"build_id": OTHER},
                    "pin": {"commit": COMMIT}, "subject": "/p"},
    }
    made = entry(seen)
    assert made["state"] == "unchanged" and made["checks"] == [BUILD] and made["subject"] == "/p"
    assert entry({"outcome": seen["outcome"]})["build_id"] == OTHER and made["pin"] == COMMIT


@pytest.mark.parametrize(("phase", "code"), [("inputs", 3), ("verify", 2)])
def test_a_diagnosis_that_refuses_has_a_code(phase, code):
    assert verdict.exit_code(verdict.exit_causes({"a": host("refused", phase)})) == code


def test_recap_of_a_diagnosis_leaves_the_checks_to_the_table():
    outcome = {"state": "refused", "phase": "verify", "checks": [BUILD], "reason": "why", "fix": "mend"}
    assert recap({"outcome": outcome})[1:3] == ["gpu1             refused", "  reason: why"]
    assert recap({"outcome": outcome})[3] == "verdict: /v.json"
    assert "  fix: mend" in recap({"outcome": {**outcome, "checks": []}})
