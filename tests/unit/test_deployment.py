# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Staged whole, switched by one link, gone back by one link: over all histories of a host."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.dflash.fleet.plugins.module_utils import deployment, process
from ansible_collections.dflash.fleet.plugins.module_utils.deployment import Instance
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, write_json

ID = "0123456789abcdef"
TEXTS = {"serve.yaml": "port: 1\n", "argv.json": "{}\n"}


def proof(ok: bool = True) -> dict[str, Any]:
    return {
        "schema": 1, "ok": ok, "checks": [], "judged": "", "acceptance": {}, "proven_at": "now",
        "binds": {"release_id": ID, "deployment_id": ID, "machine_id": "m", "driver": "", "gpus": []},
    }


class Killed(Exception):
    """The run ends here."""


class Host:
    """A host that is rolled over as the role does it: stage, switch, then proof or revert."""

    def __init__(self, root: Any) -> None:
        self.root = str(root)
        self.instance = Instance(self.root, "main")
        os.makedirs(self.instance.path, exist_ok=True)

    def stage(self, name: str) -> bool:
        release = os.path.join(self.root, "releases", name)
        os.makedirs(release, exist_ok=True)
        return deployment.stage(self.instance, name, TEXTS, {"k": name}, release)

    def go(self, name: str, outcome: str) -> None:
        """``+`` passes its gate, ``-`` fails it, ``?`` dies before it is judged, ``!``: the run is killed."""
        self.stage(name)
        deployment.switch(self.instance, name)
        if outcome == "!":
            return
        if outcome != "?":
            deployment.prove(self.instance, name, proof(outcome == "+"))
        if outcome != "+":
            done = deployment.revert(self.instance)
            assert done == {"left": name, "current": self.pointed("current")}
            assert self.pointed("current") != name
            if done["current"]:
                deployment.prove(self.instance, done["current"], proof())

    def pointed(self, link: str) -> str:
        return self.instance.pointed(link)

    def links(self) -> str:
        return "%s %s" % (self.pointed("current") or ".", self.pointed("previous") or ".")

    def by_hand(self, word: str) -> None:
        """``~previous`` and ``~current`` lose a link, ``~A`` its folder, ``~A.proof`` and ``~A.release`` that."""
        target = word[1:]
        folder = os.path.join(self.instance.path, "deployments", target.split(".")[0])
        if target in ("previous", "current"):
            os.unlink(os.path.join(self.instance.path, target))
        elif target.endswith(".proof"):
            os.unlink(os.path.join(folder, "proof.json"))
        elif target.endswith(".release"):
            os.rmdir(os.path.join(self.root, "releases", target.split(".")[0]))
        else:
            os.rename(folder, folder + ".gone")

    def play(self, history: str) -> str:
        for word in history.split():
            if word.startswith("~"):
                self.by_hand(word)
            else:
                self.go(word[0], word[1])
        return self.links()


@pytest.mark.parametrize(
    ("history", "links"),
    [
        # the first
        ("A+", "A ."),
        ("A-", ". ."),
        ("A?", ". ."),
        ("A+ A+", "A ."),
        # the second
        ("A+ B+", "B A"),
        ("A+ B-", "A ."),
        ("A+ B?", "A ."),
        ("A- B+", "B ."),
        ("A- B-", ". ."),
        # the third: a failure leaves previous as it was
        ("A+ B+ C+", "C B"),
        ("A+ B+ C-", "B A"),
        ("A+ B+ C? D-", "B A"),
        ("A+ B- C+", "C A"),
        ("A+ B+ C- C+", "C B"),
        # to and fro
        ("A+ B+ A+", "A B"),
        ("A+ B+ A+ B+", "B A"),
        ("A+ B+ A-", "B ."),  # A is no longer proven
        # what was proven fails when it is judged again
        ("A+ B+ B-", "A ."),
        ("A+ B+ B?", "A ."),
        ("A+ A-", ". ."),
        ("A+ B+ C+ C-", "B ."),
        # killed between switch and proof, then the same again
        ("A! A+", "A ."),
        ("A! A-", ". ."),
        ("A+ B! B+", "B A"),
        ("A+ B! B-", "A ."),
        ("A+ B! B?", "A ."),
        ("A+ B+ C! C+", "C B"),
        ("A+ B+ C! C-", "B A"),
        ("A+ B+ C! C! C-", "B A"),
        # killed between switch and proof, then another
        ("A! B+", "B ."),
        ("A! B-", ". ."),
        ("A+ B! C+", "C A"),
        ("A+ B! C-", "A ."),
        ("A+ B+ C! D+", "D B"),
        # links and files removed by hand
        ("A+ B+ ~previous C+", "C B"),
        ("A+ B+ ~previous C-", "B ."),
        ("A+ B+ ~A C-", "B ."),
        ("A+ B+ ~A.proof C-", "B ."),
        ("A+ B+ ~A.release C-", "B ."),
        ("A+ B! ~previous B-", "A ."),
        ("A+ B! ~previous B+", "B ."),
        ("A+ B! ~A B-", ". A"),  # the link is left; nothing proven is behind it
        ("A+ B! ~A.proof B-", ". A"),
        ("A+ ~current B-", ". ."),
        ("A+ B+ ~current C-", "A ."),
        ("A+ B+ ~current B+", "B A"),
        ("A+ ~A.proof B-", ". ."),
        ("A+ B+ ~B.proof C-", "A ."),
        ("A+ B+ ~B.proof C+", "C A"),
        ("A+ B+ ~A B-", ". A"),
    ],
)
def test_histories(tmp_path, history, links):
    host = Host(tmp_path)
    assert host.play(history) == links
    if history[-1] != "!":
        assert not os.path.exists(os.path.join(host.instance.path, "switch.json"))


@pytest.mark.parametrize("step", ["write_json", "switch_link 1", "switch_link 2"])
@pytest.mark.parametrize(("outcome", "current"), [("+", "C"), ("-", "B")])
def test_killed_within_the_switch(tmp_path, monkeypatch, step, outcome, current):
    """Whichever step the kill hits, what serves is the old or the new one, and the next run ends well."""
    host = Host(tmp_path)
    host.play("A+ B+")
    name, _blank, count = step.partition(" ")
    act, calls = getattr(deployment, name), []

    def dies(*args):
        calls.append(args)
        if len(calls) == int(count or 1):
            raise Killed
        return act(*args)

    host.stage("C")
    with monkeypatch.context() as patch:
        patch.setattr(deployment, name, dies)
        with pytest.raises(Killed):
            deployment.switch(host.instance, "C")
    assert host.pointed("current") == "B"
    assert host.instance.proven("B")
    host.play("C" + outcome)
    assert host.pointed("current") == current
    assert host.instance.proven(current)
    assert host.pointed("previous") == "B" or outcome == "-"


STEPS = st.lists(st.tuples(st.sampled_from("ABCD"), st.sampled_from("+-")), max_size=8)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_any_history_of_whole_runs(tmp_path_factory, steps):
    host = Host(tmp_path_factory.mktemp("h"))
    current, previous = "", ""
    for name, outcome in steps:
        host.go(name, outcome)
        if outcome == "+":
            current, previous = name, (previous if current in ("", name) else current)
        elif name == current:
            current, previous = previous, ""
        elif name == previous:
            previous = ""
        assert (host.pointed("current"), host.pointed("previous")) == (current, previous)
        for linked in (current, previous):
            assert not linked or host.instance.proven(linked)
        assert name not in (current, previous) or outcome == "+"


def test_a_switch_to_what_is_current_touches_nothing(tmp_path):
    host = Host(tmp_path)
    host.play("A+ B+")
    assert deployment.switch(host.instance, "B") is False
    assert host.links() == "B A"
    assert not os.path.exists(os.path.join(host.instance.path, "switch.json"))
    host.stage("C")
    assert deployment.switch(host.instance, "C") is True
    record = read_json(os.path.join(host.instance.path, "switch.json"))
    assert (record["from"], record["previous"], record["to"]) == ("B", "A", "C")


def test_links_are_relative_so_that_a_root_can_be_moved(tmp_path):
    host = Host(tmp_path)
    host.play("A+ B+")
    for link, name in (("current", "B"), ("previous", "A")):
        assert os.readlink(os.path.join(host.instance.path, link)) == "deployments/" + name


# ---------------------------------------------------------------- fallback
@pytest.mark.parametrize(
    ("history", "name"),
    [
        ("A+", ""), ("A!", ""), ("A+ B!", "A"), ("A+ B+", "A"), ("A+ B+ C!", "B"), ("A+ B! ~A", ""),
        ("A+ B+ ~previous", ""), ("A+ B! ~previous", "A"), ("A+ B+ ~A.proof", ""), ("A+ B+ C! ~B.proof", ""),
        ("A+ B+ ~B.proof C!", "A"),
    ],
)
def test_what_a_host_would_go_back_to(tmp_path, history, name):
    host = Host(tmp_path)
    host.play(history)
    assert deployment.fallback(host.instance) == name


def test_a_record_of_another_switch_does_not_count(tmp_path):
    host = Host(tmp_path)
    host.play("A+ B+ C+")
    path = os.path.join(host.instance.path, "switch.json")
    for before, to, name in (("A", "C", "A"), ("A", "D", "B"), ("C", "C", "B")):
        with open(path, "w") as handle:
            json.dump({"from": before, "previous": "A", "to": to}, handle)
        assert deployment.fallback(host.instance) == name
    with open(path, "w") as handle:
        json.dump({"from": "A", "previous": "A", "to": "D"}, handle)
    assert deployment.revert(host.instance) == {"left": "C", "current": "B"}
    assert host.links() == "B ."


# ---------------------------------------------------------------- proof
@pytest.mark.parametrize(
    ("change", "proven"),
    [("", True), ("~A.proof", False), ("~A.release", False), ("~A", False), ("not ok", False), ("other", False)],
)
def test_proven_means_there_whole_and_once_passed(tmp_path, change, proven):
    host = Host(tmp_path)
    host.play("A+ " + change if change.startswith("~") else "A+")
    if change == "not ok":
        deployment.prove(host.instance, "A", proof(False))
    assert host.instance.proven("B" if change == "other" else "A") is proven
    assert host.instance.proven("") is False and host.instance.proof("") is None


def test_a_proof_follows_its_schema_or_is_not_written(tmp_path):
    host = Host(tmp_path)
    host.stage("A")
    with pytest.raises(DflashError, match="not a valid proof"):
        deployment.prove(host.instance, "A", {**proof(), "schema": 2})
    with pytest.raises(DflashError, match="no such deployment"):
        deployment.prove(host.instance, "B", proof())
    assert host.instance.proof("A") is None


def test_the_way_back_is_kept_until_the_current_one_is_proven(tmp_path):
    host = Host(tmp_path)
    host.play("A+ B!")
    path = os.path.join(host.instance.path, "switch.json")
    deployment.prove(host.instance, "A", proof())
    assert os.path.exists(path)
    deployment.prove(host.instance, "B", proof(False))
    assert os.path.exists(path)
    deployment.prove(host.instance, "B", proof())
    assert not os.path.exists(path)


# ---------------------------------------------------------------- one run at a time
ALIVE = {**(process.identity(os.getpid()) or {}), "machine_id": "m"}
DEAD = {**ALIVE, "start_ticks": 1}
AFAR = {**ALIVE, "machine_id": "another"}


@pytest.mark.parametrize(
    ("holder", "age", "taken"),
    [
        (None, 0, True),
        (ALIVE, 0, False),  # a controller on this host that lives
        (DEAD, 0, True),  # one that was killed
        (AFAR, 60, False),  # one elsewhere: only its age is known
        (AFAR, 7200, True),
    ],
)
def test_an_instance_belongs_to_one_run(tmp_path, holder, age, taken):
    instance = deployment.Instance(str(tmp_path), "main")
    mine = {**ALIVE, "pid": 1, "start_ticks": 2}
    if holder:
        os.makedirs(instance.path)
        held = {"run": holder, "at": "then", "taken": time.time() - age}
        write_json(os.path.join(instance.path, "rollout.json"), held)
    if not taken:
        with pytest.raises(DflashError, match="another run is rolling this instance over since then"):
            deployment.begin(instance, mine, "m")
        assert not deployment.end(instance, mine)
        return
    deployment.begin(instance, mine, "m")
    deployment.begin(instance, mine, "m")  # the same run goes on
    assert deployment.end(instance, mine) and not deployment.end(instance, mine)


def test_only_ones_own_candidate_is_left(tmp_path):
    instance = deployment.Instance(str(tmp_path), "main")
    os.makedirs(instance.path)
    os.symlink("deployments/theirs", os.path.join(instance.path, "current"))
    with pytest.raises(DflashError, match="meanwhile: current is theirs, not mine"):
        deployment.revert(instance, "mine")
    assert instance.pointed("current") == "theirs"
