#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Can the deployment work on this host?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_host_info
short_description: Asks a host whether a deployment can work there
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - Gathers what preflight needs in one round trip and judges it. Changes nothing and does not fail for what it finds.
extends_documentation_fragment:
  - dflash.fleet.attributes.info
options:
  root:
    description: The root folder that is or will be used.
    type: path
    required: true
  user:
    description: Account that builds and serves when the caller is root.
    type: str
    default: dflash
  python:
    description: Python of the build and the layer, by name or absolute path.
    type: str
    default: python3
  address:
    description: Address that the server binds.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server binds. A port held by the instance itself counts as free.
    type: int
    default: 8000
  instance:
    description: Name of the instance.
    type: str
    default: main
  device:
    description: Device that vLLM is built for.
    type: str
    choices: [cuda, cpu]
    default: cuda
  disk_gib:
    description: Free space wanted under the root, in GiB.
    type: float
    default: 60.0
  memory_gib:
    description: Available memory wanted, in GiB.
    type: float
    default: 16.0
  source_repo:
    description: Repository that the host must reach. Empty when it will not build.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Ask the host
  dflash.fleet.dflash_host_info:
    root: /opt/dflash
    device: cuda
  register: preflight

- name: Show what stands against a deployment
  ansible.builtin.debug:
    msg: "{{ preflight.checks | rejectattr('status', 'equalto', 'pass') }}"
"""

RETURN = r"""
ok:
  description: Whether no required check failed.
  type: bool
  returned: always
checks:
  description: The checks of the stage host (see C(docs/checks.md)).
  type: list
  elements: dict
  returned: always
facts:
  description: What was gathered (platform, python, memory_gib, disk_gib, driver, gpus, service_manager and more).
  type: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import checks, preflight
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Gather, judge, answer."""
    module = AnsibleModule(supports_check_mode=True, argument_spec={
        "root": {"type": "path", "required": True},
        "user": {"type": "str", "default": "dflash"},
        "python": {"type": "str", "default": "python3"},
        "address": {"type": "str", "default": "127.0.0.1"},
        "port": {"type": "int", "default": 8000},
        "instance": {"type": "str", "default": "main"},
        "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
        "disk_gib": {"type": "float", "default": 60.0},
        "memory_gib": {"type": "float", "default": 16.0},
        "source_repo": {"type": "str", "default": ""},
    })
    given = module.params
    try:
        facts = preflight.gather(given["root"], given["user"], given["python"], given["address"], given["port"],
                                 given["instance"], given["source_repo"])
        found = preflight.judge(facts, given["device"], given["disk_gib"], given["memory_gib"])
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, facts=facts, **checks.result(found))


if __name__ == "__main__":
    main()
