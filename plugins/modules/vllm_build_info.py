#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Tells what a vLLM tree or installation is, whether it is whole, and what it can do for DFlash drafters."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_build_info
short_description: Tells what a vLLM is, whether it is whole, and what it can do for DFlash
version_added: "0.1.0"
description:
  - Answers the checks of the build stage for a source tree, a virtual environment or a release of this collection.
  - A capability is found by running the code that decides it, cut out of the tree, on stand-ins for all else, and by
    following its answer to the code that uses it; never by the version number and never by searching for names.
  - Without O(drafter) every capability is answered for the drafter that stands for all (four sliding layers and a full
    one, and its all-sliding form), and none is required.
  - Never fails for what it finds, and never changes anything. Fails only for arguments that name nothing.
author:
  - The dflash.fleet authors (@dflash)
options:
  tree:
    description: Folder that holds C(vllm/), for example an unpacked source archive or a clone. Nothing of it is
      imported.
    type: path
  python:
    description: Interpreter whose vLLM is looked at.
    type: path
  release:
    description: Folder of an installed release, C(<root>/releases/<id>).
    type: path
  root:
    description:
      - Root folder of a host with a deployment; the release that O(instance) serves now is looked at, and compared with
        its build's manifest. O(drafter), O(target) and O(speculative_config) then default to those of its launch.
      - No proof of an earlier run is read.
    type: path
  instance:
    description: The instance below O(root).
    type: str
    default: main
  drafter:
    description: Folder with the C(config.json) of a drafter; what it needs is required then.
    type: path
  target:
    description: Folder with the C(config.json) of the target model. Where that nests its language model
      (C(*ForConditionalGeneration)), the sharing of its head is required too.
    type: path
  speculative_config:
    description: Further keys of the speculative configuration that the server is started with, such as
      C(disable_eagle_block_drop).
    type: dict
  device:
    description: What the build is for; V(auto) tells it from the binaries and the torch that are there.
    type: str
    choices: [auto, cpu, cuda]
    default: auto
  runner:
    description: The model runner that will serve; V(auto) finds those that may.
    type: str
    choices: [auto, v1, v2]
    default: auto
  user:
    description: Account that runs foreign code when the module runs as root. It is never root.
    type: str
    default: nobody
  deadline:
    description: Seconds that a child process may take.
    type: int
    default: 120
extends_documentation_fragment:
  - dflash.fleet.attributes
  - dflash.fleet.attributes.info
seealso:
  - module: dflash.fleet.vllm_build_assert
"""

EXAMPLES = r"""
- name: See what an unpacked release can do
  dflash.fleet.vllm_build_info:
    tree: /usr/src/vllm-0.32.0
  register: told

- name: See whether an environment suits a drafter
  dflash.fleet.vllm_build_info:
    python: /opt/venv/bin/python
    drafter: /models/Qwen3-8B-DFlash-b16
    speculative_config:
      disable_eagle_block_drop: true
"""

RETURN = r"""
ok:
  description: Whether no required check stands against it. An C(unknown) that a later stage can settle does not.
  returned: success
  type: bool
checks:
  description: The checks, cheapest first.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Name of the check.
      type: str
    level:
      description: V(required) or V(advisory).
      type: str
    stage:
      description: Always V(build).
      type: str
    status:
      description: V(pass), V(fail), V(unknown) or V(skip).
      type: str
    expected:
      description: What was expected.
      type: raw
    actual:
      description: What was found.
      type: raw
    hint:
      description: What mends it.
      type: str
    evidence:
      description: What lets a sceptic repeat the finding.
      type: raw
device:
  description: What the build is for.
  returned: success
  type: str
subject:
  description: What was looked at.
  returned: success
  type: str
deployed:
  description: Deployment id, release manifest and build manifest of what O(root) serves.
  returned: with O(root)
  type: dict
identity:
  description: Distribution, versions, recorded commit and origin.
  returned: success
  type: dict
  sample:
    kind: installed
    distribution: vllm
    version: 0.32.1.dev2+g22b257388.cpu
    package_version: 0.32.1.dev2+g22b257388
    commit_id: g22b257388
    head:
    direct_url:
    path: /opt/dflash/releases/0123456789abcdef/venv/lib/python3.11/site-packages
    python: 3.11.2
"""

from typing import Any, Dict, Optional

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import (
    checks,
    child,
    diagnosis,
    probe_site,
    proof,
    record,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def device_of(params: Dict[str, Any], release: Optional[str]) -> str:
    """The device that is named, or told by what is there."""
    if params["device"] != "auto":
        return str(params["device"])
    if params["tree"]:
        return diagnosis.device_of([params["tree"]])
    if release:
        site = record.site_packages(release)
        return diagnosis.device_of([site] if site else [])
    seen = child.run(params["python"], [probe_site], {}, user=params["user"], deadline=params["deadline"])
    return diagnosis.device_of(seen.value["site"] if seen.ok else [])


def look(params: Dict[str, Any]) -> Dict[str, Any]:
    """Checks and identity of what is named."""
    told = diagnosis.deployed(params["root"], params["instance"]) if params["root"] else {}
    build = told.get("build") or {}
    release = params["release"] or told.get("release")
    config = params["speculative_config"]
    closed = diagnosis.closed_to(params["python"], params["user"]) if params["python"] else ""
    wish = proof.Wish(
        drafter=proof.load_drafter(params["drafter"] or told.get("drafter")),
        speculative_config=config if config is not None else told.get("speculative_config", {}),
        device=params["device"] if closed else build.get("device") or device_of(params, release),
        runner=params["runner"] if params["runner"] != "auto" else told.get("runner", "auto"),
        manifest=build or None,
        user=params["user"],
        deadline=params["deadline"],
        nested_target=proof.load_nested(params["target"] or told.get("target")),
    )
    if closed:
        found, said = diagnosis.by_files(params["python"], closed, wish)
    else:
        found, said = proof.inspect(params["tree"], params["python"], release, wish)
    answer = dict(
        checks.result(found, may_be_covered=True),
        identity=said,
        device=said.get("device") or wish.device,
        subject=params["tree"] or params["python"] or release,
    )
    return dict(answer, deployed=told) if told else answer


def main() -> None:
    """Arguments in, checks out."""
    module = AnsibleModule(
        argument_spec={
            "tree": {"type": "path"},
            "python": {"type": "path"},
            "release": {"type": "path"},
            "root": {"type": "path"},
            "instance": {"type": "str", "default": "main"},
            "drafter": {"type": "path"},
            "target": {"type": "path"},
            "speculative_config": {"type": "dict"},
            "device": {"type": "str", "choices": ["auto", "cpu", "cuda"], "default": "auto"},
            "runner": {"type": "str", "choices": ["auto", "v1", "v2"], "default": "auto"},
            "user": {"type": "str", "default": "nobody"},
            "deadline": {"type": "int", "default": 120},
        },
        required_one_of=[("tree", "python", "release", "root")],
        mutually_exclusive=[("tree", "python", "release", "root")],
        supports_check_mode=True,
    )
    try:
        answer = look(module.params)
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
