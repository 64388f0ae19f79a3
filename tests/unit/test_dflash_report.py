# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict is written and the recap printed, whatever a run left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import action_stub
import pytest

from ansible_collections.dflash.fleet.plugins.action import dflash_report
from ansible_collections.dflash.fleet.plugins.module_utils import schema
from ansible_collections.dflash.fleet.plugins.module_utils.checks import make

ID, SHA = "0" * 16, "0" * 64
UNCHANGED = {"__dflash_plan_state": {"group": "unchanged", "build_id": ID, "current": ID, "proof": {"ok": True}}}
TODO = {"__dflash_plan_state": {"group": "todo", "build_id": ID, "causes": []}}
REFUSED = {"__dflash_outcome": {"state": "refused", "phase": "plan", "reason": "no pin", "fix": "name one"}}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Runs the plugin over hosts; its report folder is the first host's."""
    monkeypatch.setattr(dflash_report.context, "CLIARGS", {"args": ("deploy_dflash.yml",)})

    def run(
        hosts: dict[str, Any], check_mode: bool = False, gone: str = "", **args: Any
    ) -> tuple[dict[str, Any], list[str]]:
        typed = {"__dflash_plan_inputs": {"report_dir": str(tmp_path), "started": 1700000000.0}}
        hostvars = {name: {**typed, **seen} for name, seen in hosts.items()}
        made = action_stub.plugin(dflash_report.ActionModule, check_mode, **args)
        names = list(hosts)
        found = made.run(
            task_vars={
                "ansible_play_hosts_all": names, "hostvars": hostvars,
                "ansible_play_hosts": [name for name in names if name != gone],
            }
        )
        return found, made._display.lines

    return run


@pytest.mark.parametrize(
    ("hosts", "check_mode", "state", "causes", "code"),
    [
        ({"a": UNCHANGED}, False, "ok", [], 0),
        ({"a": UNCHANGED, "b": TODO}, True, "ok", [], 0),
        ({"a": REFUSED, "b": TODO}, False, "failed", ["input"], 3),
        ({"a": UNCHANGED, "b": {"__dflash_outcome": {"state": "lost"}}}, False, "failed", ["unreachable_or_lost"], 4),
        ({"a": {"__dflash_outcome": {"state": "rolled_back"}}}, False, "failed", ["gate_or_build"], 2),
    ],
)
def test_every_host_comes_to_one_verdict(report, tmp_path, hosts, check_mode, state, causes, code):
    found, lines = report(hosts, check_mode)
    assert (found["verdict"]["state"], found["causes"], found["code"]) == (state, causes, code)
    assert set(found["verdict"]["hosts"]) == set(hosts) and found["verdict"]["check_mode"] is check_mode
    assert found["changed"] is False and "failed" not in found
    assert json.loads(Path(found["path"]).read_text()) == found["verdict"]
    assert schema.require(found["verdict"], "verdict", "") and lines[0].startswith("run " + state)
    assert found["verdict"]["started_at"] == "2023-11-14T22:13:20Z" <= found["verdict"]["finished_at"]


def test_what_each_module_left_is_found(report):
    series = [{"name": "p", "sha256": SHA, "text": "x"}]
    seen = {
        **TODO, "__vllm_source_pin": {"pin": {"commit": "a" * 40, "series": series}},
        "__vllm_verify_build": {"checks": [make("ext.elf", "fail")]}, "__dflash_outcome": {"state": "stopped"},
    }
    entry = report({"a": seen})[0]["verdict"]["hosts"]["a"]
    assert entry["pin"] == "a" * 40 and entry["series"] == [{"name": "p", "sha256": SHA}]
    assert entry["state"] == "stopped" and entry["build_id"] == ID and entry["checks"][0]["id"] == "ext.elf"


def test_a_skipped_pin_and_a_host_that_was_never_asked(report):
    found = report({"a": {"__vllm_source_pin": {"skipped": True}}, "b": {"__vllm_source_pin": None}})[0]
    assert {entry["state"] for entry in found["verdict"]["hosts"].values()} == {"not_reached"}
    assert {entry["pin"] for entry in found["verdict"]["hosts"].values()} == {""}


def test_a_host_that_left_the_play_is_lost(report):
    found = report({"a": TODO, "b": TODO, "c": UNCHANGED}, gone="b")[0]
    states = {name: entry["state"] for name, entry in found["verdict"]["hosts"].items()}
    assert states == {"a": "not_reached", "b": "lost", "c": "unchanged"}
    assert (found["causes"], found["code"]) == (["unreachable_or_lost"], 4)


@pytest.mark.parametrize(("predict", "state"),
 [(True, "would_change"), ("yes", "would_change"), (False, "not_reached")])
def test_a_plan_predicts_without_check_mode(report, predict, state):
    found = report({"a": TODO}, predict=predict)[0]
    assert found["verdict"]["hosts"]["a"]["state"] == state
    assert found["verdict"]["check_mode"] is bool(predict)


# ---------------------------------------------------------------- files
def test_a_run_never_writes_over_another_and_latest_is_the_last(report, tmp_path):
    paths = [report({"a": UNCHANGED})[0]["path"] for _ in range(3)]
    assert [os.path.relpath(path, tmp_path) for path in paths] == [
        "20231114T221320Z/verdict.json", "20231114T221320Z-1/verdict.json", "20231114T221320Z-2/verdict.json",
    ]
    assert os.readlink(tmp_path / "latest") == "20231114T221320Z-2"


def test_without_inputs_it_is_written_below_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dflash_report.context, "CLIARGS", {})
    made = action_stub.plugin(dflash_report.ActionModule)
    found = made.run(
        task_vars={"ansible_play_hosts_all": ["a"], "ansible_play_hosts": ["a"], "hostvars": {"a": {}}}
    )
    assert Path(found["path"]).parent.parent == tmp_path / "runs" and Path(found["path"]).name == "verdict.json"


def test_a_verdict_that_cannot_be_written_is_told(report, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dflash_report, "write_json", full)
    found, lines = report({"a": UNCHANGED})
    assert found["failed"] is True and "the verdict could not be written: " in found["msg"] and lines == []


def test_a_verdict_that_breaks_its_schema_is_not_written(report, tmp_path):
    found, _lines = report({"a": {"__dflash_outcome": {"state": "splendid"}}})
    assert found["failed"] is True and "not a valid verdict" in found["msg"]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- terminal
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "?[2Jgone"), ("\x07bell", "?bell"), ("a\rb", "a?b"), ("a\x7fb", "a?b"), ("a\x9bb", "a?b"),
        ("a\x00b", "a?b"), ("a\tb", "a\tb"), ("grün", "grün"),
    ],
)
def test_a_host_cannot_command_the_terminal(report, text, shown):
    _found, lines = report({"a": {"__dflash_outcome": {"state": "refused", "reason": text}}})
    assert "  reason: " + shown in lines
    assert not any(mark in line for line in lines for mark in "\x1b\r\x07\x00")


@pytest.mark.parametrize(
    ("args", "command"),
    [
        ({}, "ansible-playbook deploy_dflash.yml"),
        ({"args": ("deploy_dflash.yml",), "inventory": ("inv",)}, "ansible-playbook deploy_dflash.yml -i inv"),
        ({"args": ("plan_dflash.yml",), "inventory": ("a", "b")}, "ansible-playbook deploy_dflash.yml -i a -i b"),
        ({"args": ("verify_dflash.yml",)}, "ansible-playbook verify_dflash.yml"),
        ({"inventory": ("gpu1,",)}, "ansible-playbook deploy_dflash.yml -i gpu1,"),
        ({"subset": "gpu1:&x"}, "ansible-playbook deploy_dflash.yml --limit 'gpu1:&x'"),
        (
            {"extra_vars": ("a=b c", "@f.yml"), "subset": None},
            "ansible-playbook deploy_dflash.yml -e 'a=b c' -e @f.yml",
        ),
        ({"check": True, "diff": True}, "ansible-playbook deploy_dflash.yml"),
    ],
)
def test_the_command_that_resumes(monkeypatch, args, command):
    monkeypatch.setattr(dflash_report.context, "CLIARGS", args)
    assert dflash_report.ActionModule._resume() == command


def test_an_inventory_is_named_as_seen_from_here(monkeypatch, tmp_path):
    (tmp_path / "inv").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dflash_report.context, "CLIARGS", {"inventory": (str(tmp_path / "inv"),)})
    assert dflash_report.ActionModule._resume() == "ansible-playbook deploy_dflash.yml -i inv"


# ---------------------------------------------------------------- a diagnosis, and a build of this run
def test_a_diagnosis_is_printed_as_a_table_without_control_characters(report, tmp_path, monkeypatch):
    bad = make("complete.record", "fail", "as recorded", "\x1b[2J vllm/_C.so: changed")
    outcome = {"state": "refused", "phase": "verify", "checks": [bad], "subject": "/opt/venv/bin/python"}
    found, lines = report({"a": {"__dflash_outcome": outcome, "__vllm_verify_inputs": {"report_dir": "/none"}}})
    assert lines[0] == "a: /opt/venv/bin/python" and "FAIL     complete.record" in lines[2]
    assert "run failed, 0 of 1 hosts changed" in lines and not any("\x1b" in line for line in lines)
    assert (found["causes"], found["code"]) == (["gate_or_build"], 2)


def test_what_the_builder_made_is_told_for_every_host_of_that_build(report):
    native = {"base": "v1", "commit": "a" * 40, "count": 0, "files": [], "says": "python only"}
    job = {"manifest": {"build_id": ID, "native": native, "requires_commits": []}}
    other = {"__dflash_plan_state": {"group": "todo", "build_id": "1" * 16, "causes": []}}
    hosts = report({"a": TODO, "b": {**TODO, "__vllm_build_job": job}, "c": other})[0]["verdict"]["hosts"]
    assert [hosts[name]["native"] for name in "abc"] == [native, native, None]
