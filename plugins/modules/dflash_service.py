#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the server of one instance."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_service
short_description: Starts or stops the server of an instance
version_added: "0.1.0"
description:
  - Makes the server of one deployment the one that runs for an instance, or ends it.
  - Works through systemd, or through supervisor where no systemd runs.
  - A start first ends every process that is left of the instance, empties its socket folder, and removes shared
    memory that nobody maps. The service manager's own restarts go the same way.
  - A stop waits for the drain, then kills, and fails when a process of the instance is left.
  - Returns once the server's process is recorded, not once it is ready; that is what
    M(dflash.fleet.dflash_serve_check) is for.
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
  state:
    description:
      - V(started) makes the server of O(deployment) run, and replaces that of another deployment.
      - V(restarted) does so even when it runs already.
      - V(stopped) ends it, and also keeps it from coming up with the host.
    type: str
    choices: [started, stopped, restarted]
    default: started
  deployment:
    description: Id of the deployment to start. Required unless O(state=stopped).
    type: str
  user:
    description:
      - Account that the server runs as, when this module runs as root. It must exist and must not be root.
      - Ignored when this module runs as another account; then the server runs as that one.
    type: str
  autostart:
    description: Whether the server comes up with the host, and again after a crash where the manager can do that.
    type: bool
    default: true
  stop_timeout:
    description: Seconds for the drain before the server is killed.
    type: int
    default: 60
  manager:
    description: The service manager.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
extends_documentation_fragment:
  - dflash.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
"""

EXAMPLES = r"""
- name: Start what was staged
  dflash.fleet.dflash_service:
    root: /opt/dflash
    deployment: 3f1c9a0e5b7d2468
    user: dflash

- name: Serve the canary pair beside it, for this test only
  dflash.fleet.dflash_service:
    root: /opt/dflash
    instance: main.canary
    deployment: 9b2d7c4416e8fa03
    user: dflash
    autostart: false

- name: End it
  dflash.fleet.dflash_service:
    root: /opt/dflash
    instance: main.canary
    state: stopped
    user: dflash
"""

RETURN = r"""
state:
  description: V(started) when the server's process lives, else V(stopped).
  returned: always
  type: str
pid:
  description: Process id of the server.
  returned: when it lives
  type: int
deployment:
  description: Id of the deployment that the living server was started for.
  returned: when it lives
  type: str
started_at:
  description: Seconds since 1970 at the start.
  returned: when it lives
  type: int
log:
  description: Path of the server's log.
  returned: always
  type: str
manager:
  description: The service manager in use, V(systemd) or V(supervisor).
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import launcher, process, server
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "instance": {"type": "str", "default": "main"},
            "state": {"type": "str", "choices": ["started", "stopped", "restarted"], "default": "started"},
            "deployment": {"type": "str"},
            "user": {"type": "str"},
            "autostart": {"type": "bool", "default": True},
            "stop_timeout": {"type": "int", "default": 60},
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor"], "default": "auto"},
        },
        required_if=[("state", "started", ["deployment"]), ("state", "restarted", ["deployment"])],
        supports_check_mode=True,
    )
    options = module.params
    try:
        one = server.Server(
            options["root"], options["instance"], options["user"],
            {"launcher.py": server.source(launcher), "process.py": server.source(process)},
            options["manager"], options["stop_timeout"],
        )
        found = server.act(one, options["state"], options["deployment"], options["autostart"], module.check_mode)
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    except OSError as error:
        module.fail_json(msg="The server cannot be handled: %s" % error)
    module.exit_json(**found)


if __name__ == "__main__":
    main()
