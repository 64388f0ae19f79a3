# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The fast path's one question: is this host proven, unchanged and alive; and if not, what is missing?

Reads the host, changes nothing.  The answer sorts the host into one group, and every later play
runs over groups, so that an unchanged host meets no further task.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    checks,
    host,
    http,
    ids,
    models,
    pairing,
    plan,
    process,
    record,
)
from ansible_collections.dflash.fleet.plugins.module_utils.deployment import Instance, edited, serving, wanted
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json

#: Cause kinds by the group they lead to; the first group with a cause wins.
GROUPS: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("todo", ("inputs", "bytes")),
    ("reprove", ("build_proof",)),
    ("restart", ("process",)),
    ("rejudge", ("proof",)),
)


def cause(kind: str, text: str) -> Dict[str, str]:
    """One reason why the host is not unchanged."""
    return {"kind": kind, "text": text}


def find_release(root: str, build_id: str, requirements_spec: str) -> Optional[Dict[str, Any]]:
    """Manifest of the installed release of this build and these requirements, or None."""
    base = os.path.join(root, "releases")
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        manifest: Optional[Dict[str, Any]] = read_json(os.path.join(base, name, "manifest.json"))
        if (
            manifest
            and manifest.get("build_id") == build_id
            and manifest.get("requirements_spec") == requirements_spec
            and manifest.get("release_id") == name
        ):
            return manifest
    return None


def damage(root: str, manifest: Mapping[str, Any]) -> str:
    """What is wrong with the files of a release and its layer, in one sentence; empty when nothing is."""
    for kind, name in (("layer", manifest["layer_id"]), ("release", manifest["release_id"])):
        folder = os.path.join(root, kind + "s", name)
        stat = read_json(os.path.join(folder, "stat.json"))
        if not isinstance(stat, dict) or read_json(os.path.join(folder, "manifest.json")) is None:
            return "%s %s has no manifest: its installation was interrupted" % (kind, name)
        found = record.compare_stat(folder, stat)
        for word in ("missing", "rehashed", "changed", "extra"):
            if found[word]:
                return "%s %s is damaged: %s is %s%s" % (
                    kind,
                    name,
                    found[word][0],
                    word if word != "rehashed" else "changed",
                    " (and %d more)" % (len(found[word]) - 1) if len(found[word]) > 1 else "",
                )
        if not found["ok"]:
            return "%s %s has an empty stat table" % (kind, name)
    return ""


def located(model: Mapping[str, Any], root: str, remembered: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """The model with the folder the server reads: copied below the root, or where it lies on the host."""
    if model["source"] == "host":
        described = models.describe(model["path"], model["name"], dict(remembered) if remembered else None)
        return dict(described, source="host", folder=described["path"])
    return dict(model, folder=os.path.join(root, "models", models.folder_name(dict(model))))


def ask_python(name: str, user: str) -> Dict[str, Any]:
    """``host.python`` as the service account; before that account exists, as the caller."""
    try:
        account = accounts.worker(user)
    except DflashError:
        account = accounts.caller()
    return host.python(name, account)


def assess(
    inputs: Mapping[str, Any],
    instance_name: str,
    pin: Mapping[str, Any],
    target: Mapping[str, Any],
    drafter: Mapping[str, Any],
    canary: Mapping[str, str],
    prompts: List[Dict[str, str]],
) -> Dict[str, Any]:
    """Everything a run needs to know of this host.  Raises ``DflashError`` for what makes a deployment impossible.

    Returns ``{group, causes, build_id, build_spec, requirements_spec, python, release, build,
    deployment_id, rendered, models, pair, current, previous, proof, process, has_release}``.
    """
    root = inputs["dflash_root"]
    instance = Instance(root, instance_name)
    current = instance.pointed("current")
    staged = read_json(os.path.join(instance.folder(current), "models.json")) if current else None
    staged = {
        key: value for key, value in _mapping(staged).items()
        if key not in ("target", "drafter") or isinstance(value, dict)
    }
    python = ask_python(inputs["vllm_toolchain_python"], inputs["dflash_service_user"])
    spec = plan.build_spec(inputs, pin, python)
    build_id = ids.build_id(spec)
    requirements = plan.requirements_spec(inputs, python)
    pair_of = {
        "target": located(target, root, staged.get("target")),
        "drafter": located(drafter, root, staged.get("drafter")),
    }
    pair = pairing.examine(
        pair_of["target"]["config"],
        pair_of["drafter"]["config"],
        inputs["dflash_serve_num_speculative_tokens"] or None,
        inputs["vllm_build_device"],
    )
    blocking = checks.blocking(pair["checks"], inputs["dflash_accept_unknown"])
    if blocking:
        raise DflashError(
            "target %s and drafter %s are not a pair: %s"
            % (target["name"], drafter["name"], "; ".join(checks.sentence(item) for item in blocking))
        )
    if inputs["dflash_accept_floor"] > pair["k"] + 1:
        raise DflashError(
            "an acceptance length of %s cannot be reached with %d draft tokens"
            % (inputs["dflash_accept_floor"], pair["k"]),
            "dflash_accept_floor", "set it to at most %d, and well below that" % (pair["k"] + 1))
    answer: Dict[str, Any] = {
        "build_id": build_id,
        "build_spec": spec,
        "requirements_spec": requirements,
        "python": python,
        "pair": pair,
        "models": pair_of,
        "current": current,
        "previous": instance.pointed("previous"),
        "proof": instance.proof(current),
        "release": None,
        "build": None,
        "deployment_id": "",
        "rendered": None,
        "judged": plan.judged(inputs, canary, prompts),
        "host": host.identity(),
        "process": _mapping(read_json(os.path.join(instance.path, "run.json"))),
        "free_port": host.free_port(),
        "serving": serving(instance, current),
        "last_good": 0.0,
    }
    answer["last_good"] = _last_good(answer, staged)
    causes = _bytes(answer, root, build_id, requirements)
    if answer["release"]:
        answer["deployment_id"], answer["rendered"] = wanted(inputs, instance, answer["release"], pair_of, pair)
        causes += _inputs(answer, instance, staged)
    if not causes:
        causes += _build_proof(answer) + _process(answer, inputs)
    if not causes:
        causes += _proof(answer)
    answer["has_release"] = bool(answer["release"]) and not any(item["kind"] == "bytes" for item in causes)
    answer["causes"] = causes
    answer["group"] = next((group for group, kinds in GROUPS if any(c["kind"] in kinds for c in causes)), "unchanged")
    return answer


def _mapping(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _last_good(answer: Mapping[str, Any], staged: Mapping[str, Any]) -> float:
    """Acceptance length that this pair had here with this K, or 0."""
    proof = answer["proof"] or {}
    same = all(
        (staged.get(role) or {}).get("revision") == model["revision"] for role, model in answer["models"].items()
    )
    if not proof.get("ok") or not same or staged.get("k") != answer["pair"]["k"]:
        return 0.0
    return float(proof["acceptance"].get("acceptance_length") or 0.0)


def _bytes(answer: Dict[str, Any], root: str, build_id: str, requirements: str) -> List[Dict[str, str]]:
    release = find_release(root, build_id, requirements)
    if release is None:
        return [cause("bytes", "no release of build %s is installed" % build_id)]
    answer["release"] = release
    answer["build"] = read_json(os.path.join(root, "releases", release["release_id"], "build.json"))
    found = damage(root, release)
    build = _mapping(answer["build"])
    made = (build.get("commit"), _mapping(build.get("wheel")).get("sha256"))
    if not found and not build:
        found = "release %s lost its build manifest" % release["release_id"]
    elif not found and made != (release.get("commit"), release.get("wheel_sha256")):
        found = "release %s and its build manifest tell of different builds" % release["release_id"]
    return [cause("bytes", found)] if found else []


def _inputs(answer: Dict[str, Any], instance: Instance, staged: Mapping[str, Any]) -> List[Dict[str, str]]:
    current, wanted = answer["current"], answer["deployment_id"]
    if not current:
        return [cause("inputs", "nothing is deployed yet")]
    if current != wanted:
        changed = []
        link = os.path.join(instance.folder(current), "release")
        if os.path.basename(os.path.realpath(link)) != answer["release"]["release_id"]:
            changed.append("release")
        for role, model in answer["models"].items():
            if (staged.get(role) or {}).get("revision") != model["revision"]:
                changed.append(role)
        return [cause("inputs", "changed: %s" % (", ".join(changed) or "launch configuration"))]
    found = [
        cause("inputs", "%s was changed on the host" % name)
        for name in edited(instance.folder(current), answer["rendered"])
    ]
    for role, model in answer["models"].items():
        try:
            same = models.listing(model["folder"]) == (staged.get(role) or {}).get("stat")
        except DflashError:
            same = False
        if not same:
            found.append(cause("inputs", "files of the %s were changed on the host" % role))
    return found


def _build_proof(answer: Mapping[str, Any]) -> List[Dict[str, str]]:
    """Without a proof, or by one of other checks than today's, nothing is known of the build: prove it again."""
    proof = answer["proof"] or {}
    if not proof.get("ok"):
        return [cause("build_proof", "the deployment is not proven")]
    if proof.get("checks_version") != checks.version():
        return [cause("build_proof", "the proof was made by other checks than today's")]
    return []


def _process(answer: Dict[str, Any], inputs: Mapping[str, Any]) -> List[Dict[str, str]]:
    run = answer["process"]
    if not process.alive(run.get("pid"), run.get("start_ticks"), run.get("boot_id")):
        return [cause("process", "the server is not running")]
    if run.get("deployment_id") != answer["current"]:
        return [cause("process", "the running server is another deployment, %s" % run.get("deployment_id"))]
    release = os.path.join(inputs["dflash_root"], "releases", answer["release"]["release_id"])
    if process.holds_files_below(run["pid"], release) is False:
        return [cause("process", "process %s, recorded as the server, does not run this release" % run["pid"])]
    if not http.healthy(inputs["dflash_serve_host"], inputs["dflash_serve_port"]):
        return [cause("process", "the server does not answer")]
    return []


def _proof(answer: Dict[str, Any]) -> List[Dict[str, str]]:
    proof = answer["proof"]
    found = [
        cause("proof", "%s changed since the proof" % name.replace("_", " "))
        for name, value in answer["host"].items()
        if proof["binds"].get(name) != value
    ]
    if proof.get("judged") != answer["judged"]:
        found.append(cause("proof", "floors or prompts of the gate changed"))
    return found
