#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_build_job
short_description: Start, join, watch or cancel the build of a vLLM wheel
description:
  - The build runs detached from Ansible, under the host's service manager. Killing the controller, the
    connection or the play loses nothing.
  - The build is named by a hash over its specification. V(start) starts it once, joins it where it
    runs, and changes nothing where it is done.
  - Every call returns at once. Poll with V(status) until RV(state) is neither V(absent) nor V(running).
  - The build never runs as root. Called by root it runs as O(user), with a home folder of its own to which the
    caller's settings of pip, git and certificates are passed on.
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
extends_documentation_fragment:
  - dflash.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
options:
  action:
    description:
      - V(start) the build or join it, ask for its V(status), or V(cancel) it with all its processes.
    type: str
    choices: [start, status, cancel]
    default: status
  root:
    description:
      - The root folder of the product on the host.
    type: path
    required: true
  spec:
    description:
      - All that makes the wheel. The build id is a hash of it.
      - Keys are C(pin), C(series) (hashes), C(mode) (V(source) or V(precompiled)), C(device), C(python_tag),
        C(platform), C(torch), C(cuda), C(architectures), C(precompiled) (C(requirement) and C(base)), C(exclude),
        C(index) (C(extra_index_urls)) and C(flags) (environment variables of the build).
    type: dict
    required: true
  series:
    description:
      - The patches in order, each with C(name), C(sha256) and C(text), as M(dflash.fleet.vllm_pin) returns them.
    type: list
    elements: dict
    default: []
  origin:
    description:
      - What the build needs and its id does not depend on.
      - Keys are C(repo), C(ref), C(python) (path of the interpreter), and if wished C(jobs) (compilers at a time) and
        C(cuda_home). Needed for O(action=start).
    type: dict
    default: {}
  user:
    description:
      - The unprivileged account that builds, when the caller is root. Ignored for other callers.
    type: str
  timeout:
    description:
      - Seconds to wait for a cancelled build to end before it is killed.
    type: int
    default: 30
  service_manager:
    description:
      - What runs the build. V(auto) takes systemd where it runs, else supervisor.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
"""

EXAMPLES = r"""
- name: Start the build, or join it
  dflash.fleet.vllm_build_job:
    action: start
    root: /opt/dflash
    user: dflash-build
    spec: "{{ build_spec }}"
    series: "{{ pinned.pin.series }}"
    origin:
      repo: "{{ pinned.pin.repo }}"
      ref: "{{ pinned.pin.ref }}"
      python: /usr/bin/python3.12

- name: Wait for it
  dflash.fleet.vllm_build_job:
    root: /opt/dflash
    user: dflash-build
    spec: "{{ build_spec }}"
  register: job
  until: job.state not in ["running", "absent"]
  retries: 2880
  delay: 10
"""

RETURN = r"""
build_id:
  description: The id of the build.
  returned: success
  type: str
state:
  description:
    - V(absent), V(running), V(done), V(failed) or V(cancelled). A build whose process died is V(failed) at once.
  returned: success
  type: str
joined:
  description: Whether O(action=start) met a build that ran already.
  returned: when O(action=start)
  type: bool
step:
  description: The step it is in, or ended in.
  returned: success
  type: str
percent:
  description: How much is done, by how long the steps took last time and by what the compiler says.
  returned: success
  type: int
eta_s:
  description: Seconds left, as far as that can be known.
  returned: success
  type: int
elapsed_s:
  description: Seconds since this attempt began.
  returned: success
  type: int
attempt:
  description: The number of this attempt.
  returned: success
  type: int
seconds:
  description: Seconds that each finished step of this attempt took.
  returned: success
  type: dict
log:
  description: Path of the log on the host. It is never cut.
  returned: success
  type: str
error:
  description: Why it failed, with C(step), C(line) (the first line of the log that says why) and C(hint); else null.
  returned: success
  type: dict
manifest:
  description: The manifest of the build when it is done, else null.
  returned: success
  type: dict
lock:
  description: Text of the requirements lock when it is done.
  returned: success
  type: str
wheel_path:
  description: Path of the wheel on the host when it is done.
  returned: success
  type: str
what:
  description: What is wrong, in one sentence.
  returned: failure
  type: str
where:
  description: What it is about.
  returned: failure
  type: str
fix:
  description: What mends it.
  returned: failure
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import build_control, ids
from ansible_collections.dflash.fleet.plugins.module_utils.accounts import worker
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ARGUMENTS = {
    "action": {"type": "str", "choices": ["start", "status", "cancel"], "default": "status"},
    "root": {"type": "path", "required": True},
    "spec": {"type": "dict", "required": True},
    "series": {"type": "list", "elements": "dict", "default": []},
    "origin": {"type": "dict", "default": {}},
    "user": {"type": "str"},
    "timeout": {"type": "int", "default": 30},
    "service_manager": {"type": "str", "choices": ["auto", "systemd", "supervisor"], "default": "auto"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    asked = module.params
    root, spec, user = asked["root"], asked["spec"], asked["user"]
    try:
        account = worker(user)
        if asked["action"] == "status":
            answer = dict(build_control.status(root, ids.build_id(spec), account), changed=False)
        elif module.check_mode:
            answer = build_control.plan(root, spec, account)
            running = answer["state"] == "running"
            answer["changed"] = answer.pop("would_start") if asked["action"] == "start" else running
            answer["joined"] = running
        elif asked["action"] == "start":
            missing = [key for key in ("repo", "ref", "python") if not asked["origin"].get(key)]
            if missing:
                what = "origin lacks %s" % ", ".join(missing)
                raise DflashError(what, "vllm_build_job", "Give repo, ref and python.")
            answer = build_control.start(root, spec, asked["series"], asked["origin"], user, os.environ,
                                         asked["service_manager"])
        else:
            answer = build_control.cancel(root, spec, user, asked["timeout"], asked["service_manager"])
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    except OSError as error:
        module.fail_json(msg="The host refuses: %s" % error, what=str(error), where=error.filename, fix=None)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
