# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Deployments of an instance on a host: staged whole, switched by one link, gone back by one link.

``current`` and ``previous`` point to deployments, never to releases, so that going back restores
configuration and models too.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import ids, launch, process, schema, schemas
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, switch_link, write_atomic, write_json

#: Files of a deployment that are rendered; the other files in its folder are facts about it.
RENDERED = ("serve.yaml", "argv.json")


class Instance:
    """Folders of one named server on a host."""

    def __init__(self, root: str, name: str) -> None:
        self.root = root
        self.name = name
        self.path = os.path.join(root, "instances", name)

    def folder(self, deployment: str) -> str:
        """Folder of a deployment."""
        return os.path.join(self.path, "deployments", deployment)

    def pointed(self, link: str) -> str:
        """Id of the deployment that ``current`` or ``previous`` points to, or an empty string."""
        try:
            return os.path.basename(os.readlink(os.path.join(self.path, link)))
        except OSError:
            return ""

    def proof(self, deployment: str) -> Optional[Dict[str, Any]]:
        """The proof of a deployment, or None where there is none that follows the schema."""
        found = read_json(os.path.join(self.folder(deployment), "proof.json")) if deployment else None
        return found if found is not None and not schema.errors(found, schemas.SCHEMAS["proof"]) else None

    def proven(self, deployment: str) -> bool:
        """Whether the deployment is there, whole, and was proven once on this host."""
        proof = self.proof(deployment)
        return bool(proof and proof.get("ok")) and os.path.exists(os.path.join(self.folder(deployment), "release"))


def now() -> str:
    """UTC time to the second, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def wanted(
    inputs: Mapping[str, Any],
    instance: Instance,
    release: Mapping[str, Any],
    models: Mapping[str, Any],
    pair: Mapping[str, Any],
) -> Tuple[str, Dict[str, str]]:
    """``(deployment id, rendered files)`` of a release with these inputs and models.

    ``models`` is ``{target, drafter}``, each with ``name``, ``revision`` and ``folder``; ``pair`` is what
    ``pairing.examine`` says of them.  Raises ``DflashError`` for what must not be served.
    """
    rendered = launch.render(
        inputs,
        root=instance.root,
        instance=instance.name,
        release_dir=os.path.join(instance.root, "releases", release["release_id"]),
        layer_dir=os.path.join(instance.root, "layers", release["layer_id"]),
        target_dir=models["target"]["folder"],
        drafter_dir=models["drafter"]["folder"],
        k=pair["k"],
        served_name=inputs["dflash_serve_served_model_name"] or models["target"]["name"],
        runner=pair["runner"],
    )
    revisions = {role: "%s@%s" % (model["name"], model["revision"]) for role, model in models.items()}
    return ids.deployment_id(release["release_id"], rendered, revisions, instance.name), rendered


def serving(instance: Instance, deployment: str) -> Dict[str, Any]:
    """How a staged deployment is reached and what it must show; empty without one.

    ``{base_url, served_name, taps, k, target, drafter}``, the last two as revisions.
    """
    argv = read_json(os.path.join(instance.folder(deployment), "argv.json")) if deployment else None
    staged = read_json(os.path.join(instance.folder(deployment), "models.json")) if deployment else None
    if not isinstance(argv, dict) or not isinstance(staged, dict):
        return {}
    try:
        return {
            "base_url": argv["base_url"],
            "served_name": argv["served_name"],
            "taps": staged["taps"],
            "k": staged["k"],
            "target": staged["target"]["revision"],
            "drafter": staged["drafter"]["revision"],
        }
    except (KeyError, TypeError):  # edited on the host; it is staged anew
        return {}


def edited(folder: str, rendered: Mapping[str, str]) -> List[str]:
    """Names of rendered files whose text on the host is not what was rendered."""
    wrong = []
    for name in RENDERED:
        try:
            with open(os.path.join(folder, name), "rb") as handle:
                same = handle.read() == rendered[name].encode("utf-8")
        except OSError:
            same = False
        if not same:
            wrong.append(name)
    return wrong


def stage(
    instance: Instance,
    deployment: str,
    rendered: Mapping[str, str],
    models: Mapping[str, Any],
    release: str,
    write: bool = True,
) -> bool:
    """Write the deployment's folder; says whether anything differs from what is there.

    A proof of a deployment whose files had to be mended no longer stands and is removed.
    """
    folder = instance.folder(deployment)
    link = os.path.join(folder, "release")
    wrong = edited(folder, rendered)
    models_differ = read_json(os.path.join(folder, "models.json")) != models
    link_differs = not os.path.islink(link) or os.readlink(link) != release
    changed = bool(wrong or models_differ or link_differs)
    if changed and write:
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(os.path.join(folder, "proof.json")):
            os.unlink(os.path.join(folder, "proof.json"))
        for name in wrong:
            write_atomic(os.path.join(folder, name), rendered[name])
        write_json(os.path.join(folder, "models.json"), models)
        switch_link(link, release)
    return changed


#: Seconds after which a rollout of another controller that was never ended counts as dead.
LEASE = 3600.0


def begin(instance: Instance, run: Mapping[str, Any], machine: str) -> None:
    """Take the instance for one run.  Raises ``DflashError`` while another run that lives has it.

    ``run`` is ``{machine_id, pid, start_ticks, boot_id}`` of the controller's process; ``machine`` is this host's
    id.  A controller on this host is asked whether it lives; of another one only the age is known.
    """
    os.makedirs(instance.path, exist_ok=True)
    path = os.path.join(instance.path, "rollout.json")
    with open(path + ".lock", "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        held = read_json(path)
        if isinstance(held, dict) and held.get("run") != dict(run):
            other = held.get("run") or {}
            if other.get("machine_id") == machine:
                alive = process.alive(other.get("pid"), other.get("start_ticks"), other.get("boot_id"))
            else:
                alive = time.time() - float(held.get("taken") or 0) < LEASE
            if alive:
                raise DflashError(
                    "another run is rolling this instance over since %s (process %s of its controller)"
                    % (held.get("at"), other.get("pid")),
                    instance.path,
                    "wait for it to end, then run again",
                )
        write_json(path, {"run": dict(run), "at": now(), "taken": time.time()})


def end(instance: Instance, run: Mapping[str, Any]) -> bool:
    """Give the instance free, if it is this run's; says whether it was."""
    path = os.path.join(instance.path, "rollout.json")
    held = read_json(path)
    if not isinstance(held, dict) or held.get("run") != dict(run):
        return False
    _unlink(path)
    return True


def switch(instance: Instance, deployment: str) -> bool:
    """Point ``current`` to ``deployment``; what was proven there becomes ``previous``.

    What both links were is kept in ``switch.json`` until the proof, so that ``revert`` puts back
    exactly that, also after a killed run.
    """
    before = origin = instance.pointed("current")
    if before == deployment:
        return False
    older = instance.pointed("previous")
    record = switched(instance)
    if record.get("from") == before or (record.get("to") == before and not instance.proven(before)):
        # A run was killed between its switch and its proof: what both links were before it still counts.
        origin, older = record.get("from", ""), record.get("previous", "")
    write_json(
        os.path.join(instance.path, "switch.json"),
        {"from": origin, "previous": older, "to": deployment, "at": now()},
    )
    behind = older if origin == deployment else origin
    if instance.proven(behind):
        switch_link(os.path.join(instance.path, "previous"), os.path.join("deployments", behind))
    elif origin == deployment:
        _unlink(os.path.join(instance.path, "previous"))
    switch_link(os.path.join(instance.path, "current"), os.path.join("deployments", deployment))
    return True


def switched(instance: Instance) -> Dict[str, Any]:
    """The record of a switch that was neither proven nor reverted; empty without one."""
    record = read_json(os.path.join(instance.path, "switch.json"))
    return record if isinstance(record, dict) else {}


def fallback(instance: Instance) -> str:
    """The deployment to go back to when the current one fails: proven before, and not the current one; or empty."""
    current = instance.pointed("current")
    record = switched(instance)
    candidates = [record.get("from", "")] if record.get("to") == current else []
    for candidate in candidates + [instance.pointed("previous")]:
        if candidate and candidate != current and instance.proven(candidate):
            return str(candidate)
    return ""


def revert(instance: Instance, candidate: str = "") -> Dict[str, str]:
    """Point ``current`` back to what served before the switch: ``{left, current}``.

    ``previous`` becomes what it was before the failed attempt; a failed candidate is never linked.
    With nothing proven to go back to, ``current`` is removed and ``current`` in the answer is empty.
    """
    failed = instance.pointed("current")
    if candidate and failed != candidate:
        raise DflashError(
            "another run rolled this instance over meanwhile: current is %s, not %s" % (failed or "nothing", candidate),
            instance.path,
            "run the deployment again",
        )
    target = fallback(instance)
    record = switched(instance)
    if target:
        switch_link(os.path.join(instance.path, "current"), os.path.join("deployments", target))
        older = record.get("previous", "") if record.get("to") == failed else ""
        if older not in ("", target, failed) and instance.proven(older):
            switch_link(os.path.join(instance.path, "previous"), os.path.join("deployments", older))
        else:
            _unlink(os.path.join(instance.path, "previous"))
    else:
        _unlink(os.path.join(instance.path, "current"))
    _unlink(os.path.join(instance.path, "switch.json"))
    return {"left": failed, "current": target}


def _unlink(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def prove(instance: Instance, deployment: str, proof: Mapping[str, Any]) -> None:
    """Write the proof (validated) of a deployment.  Raises ``DflashError`` when it does not follow its schema."""
    folder = instance.folder(deployment)
    if not os.path.isdir(folder):
        raise DflashError("there is no such deployment", folder, "run the deployment again")
    schema.require(proof, "proof", os.path.join(folder, "proof.json"))
    write_json(os.path.join(folder, "proof.json"), proof)
    if proof["ok"] and instance.pointed("current") == deployment:
        _unlink(os.path.join(instance.path, "switch.json"))
