# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a deployment is called, what lies in its folder, and how it is reached."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import deployment
from ansible_collections.dflash.fleet.plugins.module_utils.deployment import Instance
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, write_json

TEXTS = {"serve.yaml": "port: 1\n", "argv.json": "{}\n"}


PROOF: dict[str, Any] = {
    "schema": 1, "ok": True, "checks": [], "judged": "", "acceptance": {}, "proven_at": "now",
    "binds": {"release_id": "", "deployment_id": "", "machine_id": "m", "driver": "", "gpus": []},
}


class Killed(Exception):
    """The run ends here."""


@pytest.fixture
def instance(tmp_path):
    return Instance(str(tmp_path), "main")


def stage(instance: Instance, write: bool = True) -> bool:
    return deployment.stage(instance, "A", TEXTS, {"k": 7}, os.path.join(instance.root, "releases", "r"), write)


def passed(instance: Instance) -> str:
    """The deployment is staged and has a proof; its folder."""
    stage(instance)
    write_json(instance.folder("A") + "/proof.json", PROOF)
    return instance.folder("A")


# ---------------------------------------------------------------- stage
def test_staging_writes_once(instance):
    assert stage(instance, write=False) is True
    assert not os.path.exists(instance.path)
    assert stage(instance) is True
    folder = passed(instance)
    assert sorted(os.listdir(folder)) == ["argv.json", "models.json", "proof.json", "release", "serve.yaml"]
    assert deployment.edited(folder, TEXTS) == []
    assert read_json(folder + "/models.json") == {"k": 7}
    assert os.readlink(folder + "/release") == os.path.join(instance.root, "releases", "r")
    assert stage(instance) is False
    assert instance.proof("A") == PROOF


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("name", ["serve.yaml", "argv.json", "models.json", "release"])
def test_what_differs_is_mended_and_no_longer_proven(instance, name, gone):
    path = os.path.join(passed(instance), name)
    os.unlink(path)
    if not gone and name == "release":
        os.symlink("/elsewhere", path)
    elif not gone:
        write_json(path, {"other": 1})
    assert stage(instance, write=False) is True
    assert instance.proof("A")  # check mode writes nothing
    assert stage(instance) is True
    assert instance.proof("A") is None
    assert stage(instance) is False


def test_no_proof_outlives_a_staging_that_was_killed(instance, monkeypatch):
    os.unlink(os.path.join(passed(instance), "serve.yaml"))

    def dies(*_args):
        raise Killed

    monkeypatch.setattr(deployment, "write_atomic", dies)
    with pytest.raises(Killed):
        stage(instance)
    assert instance.proof("A") is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(TEXTS["serve.yaml"], []), ("port: 2\n", ["serve.yaml"]), ("port: 1", ["serve.yaml"]), (None, ["serve.yaml"])],
)
def test_edited_names_the_files(tmp_path, text, wrong):
    (tmp_path / "argv.json").write_text(TEXTS["argv.json"])
    if text is not None:
        (tmp_path / "serve.yaml").write_text(text)
    assert deployment.edited(str(tmp_path), TEXTS) == wrong
    (tmp_path / "argv.json").unlink()
    assert deployment.edited(str(tmp_path), TEXTS) == [*wrong, "argv.json"]


# ---------------------------------------------------------------- id and address
INPUTS: dict[str, Any] = {
    "dflash_serve_port": 8000, "vllm_build_device": "cpu", "dflash_serve_served_model_name": "",
}
MODELS = {role: {"name": role, "revision": "1", "folder": "/m/" + role} for role in ("target", "drafter")}
RELEASE = {"release_id": "r" * 16, "layer_id": "l" * 16}
PAIR = {"k": 7, "runner": "v1"}


def wanted(inputs=(), models=(), release=(), pair=(), name="main"):
    instance = Instance("/var/tmp/d", name)
    release, models, pair = {**RELEASE, **dict(release)}, {**MODELS, **dict(models)}, {**PAIR, **dict(pair)}
    return deployment.wanted({**INPUTS, **dict(inputs)}, instance, release, models, pair)


def test_a_deployment_runs_its_own_release_and_layer():
    _name, rendered = wanted()
    argv = json.loads(rendered["argv.json"])
    assert argv["release"] == "/var/tmp/d/releases/" + "r" * 16
    assert "/var/tmp/d/layers/%s/venv/bin" % ("l" * 16) in argv["env"]["PATH"]
    assert argv["served_name"] == "target"
    assert "num_speculative_tokens: 7" in rendered["serve.yaml"]
    assert "/m/target" in rendered["serve.yaml"] and "/m/drafter" in rendered["serve.yaml"]
    assert "VLLM_USE_V2_MODEL_RUNNER" not in argv["env"]
    assert json.loads(wanted(pair={"runner": "v2"})[1]["argv.json"])["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    named = json.loads(wanted({"dflash_serve_served_model_name": "chat"})[1]["argv.json"])
    assert named["served_name"] == "chat"


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"dflash_serve_port": 8001}},
        {"inputs": {"dflash_serve_engine_args": {"max-num-seqs": 1}}},
        {"models": {"target": {**MODELS["target"], "revision": "2"}}},
        {"models": {"drafter": {**MODELS["drafter"], "revision": "2"}}},
        {"release": {"release_id": "q" * 16}},
        {"pair": {"k": 6}},
        {"name": "second"},
    ],
)
def test_whatever_is_served_otherwise_is_another_deployment(change):
    assert wanted(**change)[0] != wanted()[0]


def test_what_is_served_the_same_is_the_same_deployment():
    assert wanted()[0] == wanted({"dflash_accept_floor": 3.0, "dflash_serve_stop_timeout": 5})[0]


def test_how_a_staged_deployment_is_reached(instance):
    assert deployment.serving(instance, "") == {} == deployment.serving(instance, "A")
    staged = {**MODELS, "taps": [2, 4], "k": 7}
    deployment.stage(instance, "A", wanted()[1], staged, "/r")
    assert deployment.serving(instance, "A") == {
        "base_url": "http://127.0.0.1:8000", "served_name": "target", "taps": [2, 4], "k": 7,
        "target": "1", "drafter": "1",
    }
    os.unlink(os.path.join(instance.folder("A"), "models.json"))
    assert deployment.serving(instance, "A") == {}
