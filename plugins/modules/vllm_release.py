#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_release
short_description: Install a built vLLM as a read-only release over a read-only layer
description:
  - A layer is a virtual environment of everything but vLLM, named by a hash over its requirements lock and Python.
    A release is a thin virtual environment with vLLM alone over a layer. A new build with unchanged requirements costs
    its own size, not that of torch.
  - Both are verified file by file after the installation and never changed afterwards. What was damaged since, or was
    never finished, is installed anew under the same id.
  - Packages are installed by hash only, and wheels only. Called by root, the installation itself runs as O(user), and
    the result belongs to root.
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
  root:
    description:
      - The root folder of the product on the host.
    type: path
    required: true
  build:
    description:
      - The manifest of the build, as M(dflash.fleet.vllm_build_job) returns it.
    type: dict
    required: true
  lock:
    description:
      - The text of the build's requirements lock.
    type: str
    required: true
  python:
    description:
      - Path of the Python interpreter on the host that the environments are made with.
    type: path
    required: true
  wheel:
    description:
      - Path of the wheel on the host. Its hash must be the one in O(build).
    type: path
    required: true
  requirements_spec:
    description:
      - Hash of what shapes the layer beside the wheel's own requirements. It is recorded in the release's manifest.
    type: str
    default: ''
  extra_index_urls:
    description:
      - Package indexes beside the configured one that the locked requirements may come from.
    type: list
    elements: str
    default: []
  user:
    description:
      - The unprivileged account that installs, when the caller is root. Ignored for other callers.
    type: str
  state:
    description:
      - The only state there is. Releases are removed by the playbook that prunes.
    type: str
    choices: [present]
    default: present
"""

EXAMPLES = r"""
- name: Install the release
  dflash.fleet.vllm_release:
    root: /opt/dflash
    user: dflash
    build: "{{ job.manifest }}"
    lock: "{{ job.lock }}"
    python: /usr/bin/python3.12
    wheel: "{{ job.wheel_path }}"
  register: release
"""

RETURN = r"""
release_id:
  description: The id of the release.
  returned: success
  type: str
layer_id:
  description: The id of the layer.
  returned: success
  type: str
path:
  description: The folder of the release.
  returned: success
  type: str
layer_path:
  description: The folder of the layer.
  returned: success
  type: str
python:
  description: The interpreter of the release.
  returned: success
  type: str
manifest:
  description: The manifest of the release; null in check mode.
  returned: success
  type: dict
repaired:
  description: What was damaged and was installed anew, each with C(kind), C(id) and C(why).
  returned: success
  type: list
  elements: dict
seconds:
  description: Seconds that the installation of C(layer) and C(release) took; 0 for what was there.
  returned: success
  type: dict
bytes_added:
  description: Bytes on disk that were added.
  returned: success
  type: int
what:
  description: What is wrong, in one sentence.
  returned: failure
  type: str
where:
  description: What it is about; often the path of the log.
  returned: failure
  type: str
fix:
  description: What mends it.
  returned: failure
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import release
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "build": {"type": "dict", "required": True},
    "lock": {"type": "str", "required": True},
    "python": {"type": "path", "required": True},
    "wheel": {"type": "path", "required": True},
    "extra_index_urls": {"type": "list", "elements": "str", "default": []},
    "requirements_spec": {"type": "str", "default": ""},
    "user": {"type": "str"},
    "state": {"type": "str", "choices": ["present"], "default": "present"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    asked = module.params
    try:
        answer = release.present(asked["root"], asked["user"], asked["build"], asked["lock"], asked["python"],
                                 asked["wheel"], asked["requirements_spec"], os.environ, module.check_mode,
                                 asked["extra_index_urls"])
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    except (OSError, KeyError) as error:
        what = "The release cannot be installed: %r" % error
        module.fail_json(msg=what, what=what, where=asked["root"], fix=None)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
