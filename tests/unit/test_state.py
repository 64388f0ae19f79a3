# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""One question to a host: each cause leads to its group, on a host made of files and this very process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    checks,
    deployment,
    host,
    http,
    ids,
    models,
    pairing,
    plan,
    process,
    record,
    state,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, write_json

PAIRS = Path(__file__).resolve().parents[2] / "canary" / "pairs" / "cpu"
PYTHON = {"tag": "cp311", "platform": "linux_x86_64", "version": "3.11.2", "path": "/usr/bin/python3", "glibc": "2.36"}
PIN = {"commit": "a" * 40, "series": []}
CANARY, PROMPTS = {"target": "1", "drafter": "2"}, [{"q": "a", "a": "b"}]
INPUTS: dict[str, Any] = {
    "dflash_accept_unknown": [], "dflash_accept_floor": 2.0, "dflash_accept_min_drafts": 200,
    "dflash_accept_canary_floor": 6.0, "dflash_accept_canary_min_drafts": 48, "dflash_accept_url": "",
    "dflash_serve_num_speculative_tokens": 0, "dflash_serve_host": "127.0.0.1", "dflash_serve_port": 8000,
    "dflash_serve_served_model_name": "", "dflash_service_user": "nobody", "vllm_build_device": "cpu",
    "vllm_build_mode": "source", "vllm_build_precompiled_wheel": "", "vllm_build_precompiled_base": "",
    "vllm_toolchain_cuda": "13", "vllm_toolchain_python": "python3", "vllm_release_exclude": [],
    "vllm_release_extra_index_urls": [],
}
COMMIT, WHEEL = "c" * 40, "d" * 64
LAYER, RELEASE, SITE = "1" * 16, "2" * 16, "venv/lib/python3.11/site-packages/"


def place(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Host:
    """A host that is proven, unchanged and alive; a test then harms it."""

    def __init__(self, root: Path, tmp: Path) -> None:
        self.root, self.inputs = root, {**INPUTS, "dflash_root": str(root)}
        self.pin, self.canary, self.prompts = dict(PIN), dict(CANARY), [dict(item) for item in PROMPTS]
        self.identity = {"machine_id": "m", "driver": "580.1", "gpus": ["GPU-1"]}
        self.healthy, self.python, self.runs_release = True, dict(PYTHON), True
        self.layer, self.release = root / "layers" / LAYER, root / "releases" / RELEASE
        self.models = {}
        for role, folder in (("target", "target"), ("drafter", "drafter_full")):
            place(tmp / role / "config.json", (PAIRS / folder / "config.json").read_text())
            place(tmp / role / "model.safetensors", "weights of the " + role)
            described = models.describe(str(tmp / role), role)
            self.models[role] = dict(described, source="controller")
            for name in described["stat"]:
                place(root / "models" / models.folder_name(described) / name, (tmp / role / name).read_text())
        self.install()
        self.instance = deployment.Instance(str(root), "main")
        self.id = self.deploy()

    def install(self) -> None:
        place(self.layer / SITE / "torch/__init__.py", "")
        place(self.release / SITE / "vllm/__init__.py", "version = 1\n")
        place(self.release / SITE / "vllm/core.py", "on = True\n")
        manifest = {
            "kind": "release", "release_id": RELEASE, "layer_id": LAYER, "commit": COMMIT,
            "wheel_sha256": WHEEL,
            "build_id": ids.build_id(plan.build_spec(self.inputs, self.pin, PYTHON)),
            "requirements_spec": plan.requirements_spec(self.inputs, PYTHON),
        }
        write_json(str(self.layer / "manifest.json"), {"kind": "layer", "layer_id": LAYER})
        write_json(str(self.layer / "stat.json"), record.make_stat(str(self.layer), False))
        write_json(str(self.release / "manifest.json"), manifest)
        write_json(str(self.release / "stat.json"), record.make_stat(str(self.release), True))
        write_json(str(self.release / "build.json"), {"kind": "build", "commit": COMMIT, "wheel": {"sha256": WHEEL}})

    def deploy(self) -> str:
        staged = {role: state.located(model, str(self.root), None) for role, model in self.models.items()}
        pair = pairing.examine(staged["target"]["config"], staged["drafter"]["config"], None, "cpu")
        for model in staged.values():
            model["stat"] = models.listing(model["folder"])
        manifest = read_json(str(self.release / "manifest.json"))
        name, rendered = deployment.wanted(self.inputs, self.instance, manifest, staged, pair)
        deployment.stage(
            self.instance, name, rendered, dict(staged, taps=pair["taps"], k=pair["k"]), str(self.release)
        )
        deployment.switch(self.instance, name)
        proof = {
            "schema": 1, "ok": True, "checks": [], "proven_at": "now", "acceptance": {"acceptance_length": 7.5},
            "judged": plan.judged(self.inputs, self.canary, self.prompts),
            "checks_version": checks.version(),
            "binds": dict(self.identity, release_id=RELEASE, deployment_id=name),
        }
        deployment.prove(self.instance, name, proof)
        self.run(deployment_id=name)
        return name

    def run(self, **change: Any) -> None:
        path = os.path.join(self.instance.path, "run.json")
        write_json(path, {**(read_json(path) or process.identity(os.getpid()) or {}), **change})

    @property
    def folder(self) -> Path:
        return Path(self.instance.folder(self.id))

    def model(self, role: str) -> Path:
        return self.root / "models" / models.folder_name(self.models[role])

    def assess(self) -> dict[str, Any]:
        return state.assess(
            self.inputs, "main", self.pin, self.models["target"], self.models["drafter"], self.canary, self.prompts
        )


@pytest.fixture
def one(tmp_path, monkeypatch):
    root = tmp_path / "d"
    monkeypatch.setattr(deployment.launch, "SOCKET_BASE_MAX", 200)  # a test's folder may be long
    found = Host(root, tmp_path / "controller")
    monkeypatch.setattr(host, "identity", lambda: dict(found.identity))
    monkeypatch.setattr(host, "python", lambda _name, _account: dict(found.python))
    monkeypatch.setattr(http, "healthy", lambda *_address: found.healthy)
    monkeypatch.setattr(process, "holds_files_below", lambda _pid, _folder: found.runs_release)
    return found


def test_proven_unchanged_and_alive(one):
    answer = one.assess()
    assert (answer["group"], answer["causes"]) == ("unchanged", [])
    assert answer["current"] == answer["deployment_id"] == one.id and answer["previous"] == ""
    assert answer["release"]["release_id"] == RELEASE and answer["has_release"] is True
    assert answer["build"] == {"kind": "build", "commit": COMMIT, "wheel": {"sha256": WHEEL}}
    assert answer["build_id"] == answer["release"]["build_id"]
    assert answer["proof"]["ok"] is True and answer["last_good"] == 7.5
    assert answer["serving"]["base_url"] == "http://127.0.0.1:8000"
    assert answer["pair"]["k"] == 7
    assert answer["serving"]["k"] == 7
    assert answer["process"]["pid"] == os.getpid() and answer["host"] == one.identity
    json.dumps(answer)  # it travels


def test_asking_changes_nothing(one):
    def everything() -> dict[str, tuple[int, int]]:
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in one.root.rglob("*")}

    before = everything()
    one.assess()
    assert everything() == before


def keep_time(path: Path, text: str) -> None:
    """Other bytes of the same length, and the time put back."""
    info = path.stat()
    assert len(text) == info.st_size
    path.write_text(text)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("8000", "9000"))


def reprove(one: Host, **change: Any) -> None:
    path = str(one.folder / "proof.json")
    write_json(path, {**read_json(path), **change})


def amend(one: Host, **change: Any) -> None:
    path = str(one.release / "manifest.json")
    write_json(path, {**read_json(path), **change})


def new_drafter(one: Host) -> None:
    one.models["drafter"] = dict(one.models["drafter"], revision="f" * 16)


CASES = [
    # ---- bytes: the release is not whole, or another one is wanted
    ("another pin", lambda o: o.pin.update(commit="b" * 40), "todo", "no release of build"),
    ("another layer", lambda o: o.inputs.update(vllm_release_exclude=["x"]), "todo", "no release of build"),
    ("a newer Python", lambda o: o.python.update(version="3.11.9"), "todo", "no release of build"),
    ("release gone", lambda o: (o.release / "manifest.json").unlink(), "todo", "no release of build"),
    ("release renamed", lambda o: o.release.rename(o.release.with_name("3" * 16)), "todo", "no release of build"),
    ("layer interrupted", lambda o: (o.layer / "manifest.json").unlink(), "todo", "layer %s has no manifest" % LAYER),
    ("stat lost", lambda o: (o.release / "stat.json").unlink(), "todo", "release %s has no manifest" % RELEASE),
    ("stat empty", lambda o: write_json(str(o.layer / "stat.json"), {"files": {}}), "todo", "has an empty stat table"),
    ("build manifest lost", lambda o: (o.release / "build.json").unlink(), "todo", "lost its build manifest"),
    ("a changed byte", lambda o: keep_time(o.release / SITE / "vllm/core.py", "on = Trve\n"), "todo",
     "release %s is damaged: %svllm/core.py is changed" % (RELEASE, SITE)),
    ("a touched file", lambda o: os.utime(o.release / SITE / "vllm/core.py", (1, 1)), "todo",
     "vllm/core.py is changed"),
    ("a file lost", lambda o: (o.release / SITE / "vllm/core.py").unlink(), "todo", "vllm/core.py is missing"),
    ("a file more", lambda o: place(o.release / SITE / "vllm/new.py", ""), "todo", "vllm/new.py is"),
    ("the layer", lambda o: place(o.layer / SITE / "torch/__init__.py", "x"), "todo",
     "layer %s is damaged: %storch/__init__.py is changed" % (LAYER, SITE)),
    ("two files", lambda o: [place(o.layer / SITE / n, "") for n in ("a.py", "b.py")], "todo",
     "a.py is extra (and 1 more)"),
    # ---- inputs: what is wanted is not what is there
    ("never deployed", lambda o: os.unlink(os.path.join(o.instance.path, "current")), "todo",
     "nothing is deployed yet"),
    ("another port", lambda o: o.inputs.update(dflash_serve_port=9000), "todo", "changed: launch configuration"),
    ("another K", lambda o: o.inputs.update(dflash_serve_num_speculative_tokens=3), "todo", "changed: launch config"),
    ("another drafter", new_drafter, "todo", "changed: drafter"),
    ("edited serve.yaml", lambda o: edit(o.folder / "serve.yaml"), "todo", "serve.yaml was changed on the host"),
    ("edited argv.json", lambda o: edit(o.folder / "argv.json"), "todo", "argv.json was changed on the host"),
    ("serve.yaml lost", lambda o: (o.folder / "serve.yaml").unlink(), "todo", "serve.yaml was changed on the host"),
    ("changed weights", lambda o: place(o.model("target") / "model.safetensors", "x"), "todo", "files of the target"),
    ("touched weights", lambda o: os.utime(o.model("drafter") / "model.safetensors", (1, 1)), "todo",
     "files of the drafter were changed"),
    ("a weight file more", lambda o: place(o.model("drafter") / "b", ""), "todo", "files of the drafter were changed"),
    ("model lost", lambda o: o.model("target").rename(o.root / "x"), "todo", "files of the target were changed"),
    ("models.json lost", lambda o: (o.folder / "models.json").unlink(), "todo", "files of the target were changed"),
    ("missing proof", lambda o: (o.folder / "proof.json").unlink(), "reprove", "the deployment is not proven"),
    ("broken proof", lambda o: (o.folder / "proof.json").write_text("{"), "reprove", "the deployment is not proven"),
    ("other checks", lambda o: reprove(o, checks_version="0" * 16), "reprove", "the proof was made by other checks"),
    ("failed proof", lambda o: reprove(o, ok=False), "reprove", "the deployment is not proven"),
    # ---- process: the same, but nobody serves it
    ("never started", lambda o: os.unlink(os.path.join(o.instance.path, "run.json")), "restart", "is not running"),
    ("broken run.json", lambda o: place(Path(o.instance.path, "run.json"), "{"), "restart", "is not running"),
    ("dead process", lambda o: o.run(pid=2**22 + 1), "restart", "the server is not running"),
    ("reused pid", lambda o: o.run(start_ticks=1), "restart", "the server is not running"),
    ("rebooted", lambda o: o.run(boot_id="b"), "restart", "the server is not running"),
    ("another serves", lambda o: o.run(deployment_id="x"), "restart", "the running server is another deployment, x"),
    ("forged", lambda o: setattr(o, "runs_release", False), "restart", "does not run this release"),
    ("maps closed", lambda o: setattr(o, "runs_release", None), "unchanged", ""),
    ("other build", lambda o: amend(o, commit="e" * 40), "todo", "tell of different builds"),
    ("hangs", lambda o: setattr(o, "healthy", False), "restart", "the server does not answer"),
    # ---- proof: serves, but was judged on another host or by something else
    ("changed driver", lambda o: o.identity.update(driver="590.1"), "rejudge", "driver changed since the proof"),
    ("another GPU", lambda o: o.identity.update(gpus=["GPU-2"]), "rejudge", "gpus changed since the proof"),
    ("cloned host", lambda o: o.identity.update(machine_id="n"), "rejudge", "machine id changed since the proof"),
    ("changed floor", lambda o: o.inputs.update(dflash_accept_floor=3.0), "rejudge", "floors or prompts of the gate"),
    ("changed prompts", lambda o: o.prompts[0].update(q="c"), "rejudge", "floors or prompts of the gate changed"),
    ("changed canary", lambda o: o.canary.update(drafter="3"), "rejudge", "floors or prompts of the gate changed"),
    ("accepted unknown", lambda o: o.inputs.update(dflash_accept_unknown=["x.y"]), "rejudge", "floors or prompts of"),
    # ---- nothing of these makes work
    ("new timeout", lambda o: o.inputs.update(dflash_serve_stop_timeout=5), "unchanged", ""),
    ("a newer glibc", lambda o: o.python.update(glibc="2.41"), "unchanged", ""),
    ("another controller path", lambda o: o.models["target"].update(path="/x", stat={}), "unchanged", ""),
    ("a cache of Python's", lambda o: place(o.release / SITE / "vllm/__pycache__/core.pyc", ""), "unchanged", ""),
]


@pytest.mark.parametrize(("harm", "group", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_cause_leads_to_its_group(one, harm, group, text):
    harm(one)
    answer = one.assess()
    kinds = {"todo": {"bytes", "inputs"}, "reprove": {"build_proof"}, "restart": {"process"}, "rejudge": {"proof"}}
    assert answer["group"] == group, answer["causes"]
    assert {item["kind"] for item in answer["causes"]} <= kinds.get(group, set())
    assert bool(answer["causes"]) == bool(text)
    assert not text or text in answer["causes"][0]["text"]
    assert answer["has_release"] == (not any(item["kind"] == "bytes" for item in answer["causes"]))
    json.dumps(answer)


@pytest.mark.parametrize(
    ("harms", "group", "causes"),
    [
        (["another port", "dead process", "changed driver"], "todo", 1),  # a new start brings its own proof
        (["dead process", "changed driver"], "restart", 1),
        (["missing proof", "dead process"], "reprove", 2),
        (["changed driver", "another GPU", "changed floor"], "rejudge", 3),
        (["a changed byte", "another drafter"], "todo", 2),
        (["a changed byte", "edited serve.yaml", "changed weights"], "todo", 3),
    ],
)
def test_the_farthest_cause_wins(one, harms, group, causes):
    for name, harm, _group, _text in CASES:
        if name in harms:
            harm(one)
    answer = one.assess()
    assert answer["group"] == group
    assert len(answer["causes"]) == causes, answer["causes"]


def test_a_new_release_is_named_as_what_changed(one):
    one.release.rename(one.release.with_name("3" * 16))
    one.release = one.release.with_name("3" * 16)
    manifest = read_json(str(one.release / "manifest.json"))
    write_json(str(one.release / "manifest.json"), {**manifest, "release_id": "3" * 16})
    answer = one.assess()
    assert [item["text"] for item in answer["causes"]] == ["changed: release"]
    assert answer["deployment_id"] not in ("", one.id)


@pytest.mark.parametrize(
    ("change", "value"), [("", 7.5), ("k", 0.0), ("target", 0.0), ("proof", 0.0), ("never", 0.0), ("port", 7.5)]
)
def test_the_last_good_acceptance_belongs_to_this_pair_with_this_k(one, change, value):
    if change == "k":
        one.inputs["dflash_serve_num_speculative_tokens"] = 3
    elif change == "target":
        one.models["target"] = dict(one.models["target"], revision="f" * 16)
    elif change == "proof":
        reprove(one, ok=False)
    elif change == "never":
        reprove(one, acceptance={})
    elif change == "port":
        one.inputs["dflash_serve_port"] = 9000
    assert one.assess()["last_good"] == value


def test_an_empty_host_needs_everything(one):
    one.root.rename(one.root.with_name("gone"))
    answer = one.assess()
    assert (answer["group"], answer["has_release"], answer["release"]) == ("todo", False, None)
    assert (answer["current"], answer["deployment_id"], answer["proof"], answer["serving"]) == ("", "", None, {})
    assert len(answer["causes"]) == 1


def test_a_pair_that_is_none_is_refused_at_once(one):
    one.models["drafter"] = dict(one.models["drafter"], config={**one.models["drafter"]["config"], "hidden_size": 32})
    with pytest.raises(DflashError, match=r"target target and drafter drafter are not a pair: pair\.hidden_size fail"):
        one.assess()


# ---------------------------------------------------------------- parts
def test_a_model_on_the_host_is_described_there_and_remembered(one, monkeypatch):
    given = {"source": "host", "path": str(one.model("target")), "name": "t", "revision": "", "config": None}
    found = state.located(given, "/r", None)
    assert found["folder"] == found["path"] == str(one.model("target")) and found["source"] == "host"
    assert found["revision"] == one.models["target"]["revision"] and found["config"]["hidden_size"]
    monkeypatch.setattr(models, "sha256_file", lambda _path: pytest.fail("a file was read"))
    assert state.located(given, "/r", found)["revision"] == found["revision"]
    with pytest.raises(DflashError, match="no model folder"):
        state.located({**given, "path": "/nowhere"}, "/r", None)


def test_a_model_of_the_controller_lies_below_the_root(one):
    found = state.located(one.models["target"], "/r", None)
    assert found["folder"] == "/r/models/target@" + one.models["target"]["revision"]


def test_python_is_asked_as_the_service_account_once_there_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "python", lambda _name, account: asked.append(account))
    me = accounts.caller()
    monkeypatch.setattr(accounts, "worker", lambda user: accounts.Account(user, 7, 7))
    state.ask_python("python3", "dflash")

    def nobody(_user):
        raise DflashError("There is no account")

    monkeypatch.setattr(accounts, "worker", nobody)
    state.ask_python("python3", "dflash")
    assert asked == [accounts.Account("dflash", 7, 7), me]
