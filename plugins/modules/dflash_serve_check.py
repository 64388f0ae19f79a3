#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Asks whether an instance's server is ready and is the one it should be."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_serve_check
short_description: Tells whether a server is ready and whether it is this deployment's
version_added: "0.1.0"
description:
  - Ready means that the server names the model and gives one real token.
  - Once it is ready, says whether the process that holds the port belongs to the instance and uses the deployment's
    release, and whether it read the drafter's target layer ids as it must.
  - A server that died is told by the first error in its log.
  - Never fails for what it finds, and never changes anything.
author:
  - The dflash.fleet authors (@dflash)
options:
  root:
    description: The root folder of the deployment on the host.
    type: path
    required: true
  instance:
    description: Name of the instance.
    type: str
    default: main
  deployment:
    description: Id of the deployment that is to serve.
    type: str
    required: true
  base_url:
    description: Address of the server, without C(/v1).
    type: str
    required: true
  served_name:
    description: Name of the model as clients ask for it.
    type: str
    required: true
  api_key_file:
    description: File on the host that holds the API key alone, or as C(VLLM_API_KEY=).
    type: path
  taps:
    description: Layers that the server must read, which are the drafter's target layer ids + 1. Empty asks nothing.
    type: list
    elements: int
    default: []
  ready_timeout:
    description: Seconds from the server's start after which it counts as failed.
    type: int
    default: 1800
  wait:
    description:
      - Whether to wait until the server is ready, dead or late.
      - With V(false) one look is taken, and RV(checks) is empty while the server still loads; poll it in C(until).
    type: bool
    default: true
extends_documentation_fragment:
  - dflash.fleet.attributes.info
"""

EXAMPLES = r"""
- name: Wait for the server
  dflash.fleet.dflash_serve_check:
    root: /opt/dflash
    deployment: 3f1c9a0e5b7d2468
    base_url: http://127.0.0.1:8000
    served_name: qwen3-8b
    taps: [2, 10, 18, 26, 34]
    wait: false
  register: serving
  until: serving.done
  retries: 360
  delay: 5
"""

RETURN = r"""
ok:
  description: Whether the server is ready and no required check stands against it.
  returned: always
  type: bool
ready:
  description: Whether it gave a token.
  returned: always
  type: bool
dead:
  description: Whether its process is gone, or that of another deployment.
  returned: always
  type: bool
done:
  description: Whether looking again can bring nothing new, because it is ready, dead or late.
  returned: always
  type: bool
checks:
  description: The checks C(serving.ready), C(serving.process) and C(serving.aux_layers), once RV(done).
  returned: always
  type: list
  elements: dict
pid:
  description: Process id of the server.
  returned: when it lives
  type: int
elapsed_s:
  description: Seconds since its start.
  returned: when it lives
  type: float
progress:
  description: What the log said last, while it is not ready.
  returned: always
  type: str
reason:
  description: Why it is not ready; empty when it is.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import checks, http, readiness
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "instance": {"type": "str", "default": "main"},
            "deployment": {"type": "str", "required": True},
            "base_url": {"type": "str", "required": True},
            "served_name": {"type": "str", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "taps": {"type": "list", "elements": "int", "default": []},
            "ready_timeout": {"type": "int", "default": 1800},
            "wait": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        probe = readiness.Probe(
            options["root"], options["instance"], options["deployment"], options["base_url"], options["served_name"],
            http.read_key(options["api_key_file"]), options["taps"], options["ready_timeout"],
        )
        found = probe.wait() if options["wait"] else probe.look()
        done = found["ready"] or found["dead"] or found["late"]
        judged = probe.judge(found) if done else []
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    ok = found["ready"] and not checks.blocking(judged)
    module.exit_json(changed=False, ok=ok, done=done, checks=judged, **found)


if __name__ == "__main__":
    main()
