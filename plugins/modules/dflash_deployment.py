#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which deployment does an instance serve?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_deployment
short_description: Stages, switches, reverts and proves deployments of an instance
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - Keeps C(<root>/instances/<name>/deployments/) and its links C(current) and C(previous). Starts and stops nothing;
    that is M(dflash.fleet.dflash_service).
extends_documentation_fragment:
  - dflash.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  action:
    description:
      - V(begin) takes the instance for this run and V(end) gives it free. V(stage) writes the deployment's folder.
      - V(switch) points C(current) to it. V(revert) goes back to what was proven before. V(prove) writes its proof.
    type: str
    choices: [begin, end, stage, switch, revert, prove]
    required: true
  root:
    description: The root folder.
    type: path
    required: true
  instance:
    description: Name of the instance.
    type: str
    default: main
  run:
    description: The controller's process (machine_id, pid, start_ticks, boot_id), for V(begin) and V(end).
    type: dict
    default: {}
  keep_proven:
    description: For V(prove), leave a proof that holds where it is when this one does not.
    type: bool
    default: false
  deployment:
    description: Id of the deployment. For V(revert) the one that is left, so that another run's is never left.
    type: str
    default: ""
  inputs:
    description: Typed inputs, for V(stage).
    type: dict
    default: {}
  release:
    description: Manifest of the release, for V(stage) and V(prove).
    type: dict
    default: {}
  target:
    description: The target, for V(stage).
    type: dict
    default: {}
  drafter:
    description: The drafter, for V(stage).
    type: dict
    default: {}
  checks:
    description: Checks of all stages, for V(prove).
    type: list
    elements: dict
    default: []
  acceptance:
    description: What the gate measured (acceptance_length, per_position, drafts), for V(prove).
    type: dict
    default: {}
  judged:
    description: Hash of what the gate judged by, for V(prove). Empty keeps that of the proof before.
    type: str
    default: ""
  accept_unknown:
    description: Check ids whose unknown the operator accepted, for V(prove).
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Go back to what was proven before
  dflash.fleet.dflash_deployment:
    action: revert
    root: /opt/dflash
    instance: main
  register: reverted
"""

RETURN = r"""
deployment_id:
  description: Id of the deployment that was staged, switched to, gone back to or proven. Empty when there is none.
  type: str
  returned: success
left:
  description: Id of the deployment that was left, for V(revert).
  type: str
  returned: when action is revert
ok:
  description: Whether the proof holds, for V(prove).
  type: bool
  returned: when action is prove
proof:
  description: The proof that was written, for V(prove).
  type: dict
  returned: when action is prove
release:
  description: Manifest of the release of the deployment gone back to, for V(revert).
  type: dict
  returned: when action is revert
serving:
  description: How the deployment is reached and what it must show (base_url, served_name, taps, k).
  type: dict
  returned: when action is stage or revert
"""

import os
from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import checks, deployment, host, models, pairing
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json
from ansible_collections.dflash.fleet.plugins.module_utils.state import located


def stage(instance: deployment.Instance, given: Dict[str, Any], write: bool) -> Dict[str, Any]:
    """Render and write; the id is a function of what is written."""
    inputs, release = given["inputs"], given["release"]
    pair_of = {}
    for role in ("target", "drafter"):
        model = located(given[role], instance.root, None)
        seen = models.listing(model["folder"])
        pair_of[role] = {"name": model["name"], "revision": model["revision"], "path": model["path"],
                         "folder": model["folder"], "stat": seen, "config": model["config"]}
    pair = pairing.examine(pair_of["target"]["config"], pair_of["drafter"]["config"],
                           inputs["dflash_serve_num_speculative_tokens"] or None, inputs["vllm_build_device"])
    name, rendered = deployment.wanted(inputs, instance, release, pair_of, pair)
    if given["deployment"] and given["deployment"] != name:
        raise DflashError("the deployment staged is %s, not the %s that was planned" % (name, given["deployment"]),
                          instance.path, "run the deployment again")
    changed = deployment.stage(instance, name, rendered, dict(pair_of, taps=pair["taps"], k=pair["k"]),
                               os.path.join(instance.root, "releases", release["release_id"]), write)
    return {"changed": changed, "deployment_id": name, "serving": deployment.serving(instance, name),
            "diff": {"before": "", "after": rendered["serve.yaml"]} if changed else {"before": "", "after": ""}}


def revert(instance: deployment.Instance, candidate: str, write: bool) -> Dict[str, Any]:
    """Go back, and say what is gone back to, so that it can be proven again."""
    if not write:
        return {"changed": True, "deployment_id": deployment.fallback(instance), "left": instance.pointed("current")}
    done = deployment.revert(instance, candidate)
    folder = instance.folder(done["current"])
    proof = instance.proof(done["current"])
    return {
        "changed": True, "deployment_id": done["current"], "left": done["left"], "proof": proof,
        "release": read_json(os.path.join(folder, "release", "manifest.json")) if done["current"] else None,
        "serving": deployment.serving(instance, done["current"]),
    }


def prove(instance: deployment.Instance, given: Dict[str, Any], write: bool) -> Dict[str, Any]:
    """Write the proof.  Checks that did not run again are taken over from the proof before."""
    before = instance.proof(given["deployment"]) or {}
    again = {item["id"] for item in given["checks"]}
    kept = [item for item in before.get("checks", []) if item["id"] not in again]
    found = checks.settle(kept + given["checks"])
    outcome = checks.result(found, given["accept_unknown"])
    proof = {
        "schema": 1, "ok": outcome["ok"], "checks": found, "checks_version": checks.version(),
        "binds": dict(host.identity(), release_id=given["release"]["release_id"], deployment_id=given["deployment"]),
        "judged": given["judged"] or before.get("judged", ""), "acceptance": given["acceptance"],
        "accepted_unknown": given["accept_unknown"], "proven_at": deployment.now(),
    }
    if write and (outcome["ok"] or not (given["keep_proven"] and before.get("ok"))):
        deployment.prove(instance, given["deployment"], proof)
    return {"changed": True, "deployment_id": given["deployment"], "ok": outcome["ok"], "proof": proof}


def main() -> None:
    """One act on the deployments of an instance."""
    module = AnsibleModule(supports_check_mode=True, argument_spec={
        "action": {"type": "str", "choices": ["begin", "end", "stage", "switch", "revert", "prove"], "required": True},
        "root": {"type": "path", "required": True},
        "instance": {"type": "str", "default": "main"},
        "run": {"type": "dict", "default": {}},
        "keep_proven": {"type": "bool", "default": False},
        "deployment": {"type": "str", "default": ""},
        "inputs": {"type": "dict", "default": {}},
        "release": {"type": "dict", "default": {}},
        "target": {"type": "dict", "default": {}},
        "drafter": {"type": "dict", "default": {}},
        "checks": {"type": "list", "elements": "dict", "default": []},
        "acceptance": {"type": "dict", "default": {}},
        "judged": {"type": "str", "default": ""},
        "accept_unknown": {"type": "list", "elements": "str", "default": []},
    })
    given = module.params
    instance = deployment.Instance(given["root"], given["instance"])
    write = not module.check_mode
    try:
        if given["action"] == "begin":
            if write:
                deployment.begin(instance, given["run"], host.machine_id())
            answer = {"changed": False, "deployment_id": instance.pointed("current")}
        elif given["action"] == "end":
            if write:
                deployment.end(instance, given["run"])
            answer = {"changed": False, "deployment_id": instance.pointed("current")}
        elif given["action"] == "stage":
            answer = stage(instance, given, write)
        elif given["action"] == "revert":
            answer = revert(instance, given["deployment"], write)
        elif given["action"] == "prove":
            answer = prove(instance, given, write)
        else:
            before = instance.pointed("current")
            changed = deployment.switch(instance, given["deployment"]) if write else before != given["deployment"]
            answer = {"changed": changed, "deployment_id": given["deployment"],
                      "diff": {"before": before + "\n", "after": given["deployment"] + "\n"}}
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.strerror, error.filename))
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
