#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_pin
short_description: Pin a ref of a vLLM repository to one commit
description:
  - Answers which commit a tag, branch, commit or pull request head means, and keeps the answer in a lock file.
  - The lock wins. A ref that the lock knows is never resolved again, so a second run needs no network.
  - Also reads a series of patches that are stacked on that commit.
  - Runs on the controller only; no connection to the host is made.
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
extends_documentation_fragment:
  - dflash.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  repo:
    description:
      - URL or path of the git repository.
      - A URL with a password in it is refused; use a credential helper or C(~/.netrc).
    type: str
    required: true
  ref:
    description:
      - A tag, a branch, a full commit, or a ref such as V(refs/pull/40898/head).
      - A full commit of 40 digits stands for itself; it needs neither network nor lock.
    type: str
    required: true
  lock_file:
    description:
      - The lock file on the controller. It is made when it is needed.
    type: path
    required: true
  series:
    description:
      - Patch files on the controller, in the order in which they are applied.
    type: list
    elements: path
    default: []
  update:
    description:
      - Resolve the ref again although the lock knows it, and write what it means now.
      - Also needed when a ref that the lock knows shall come from another repository.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Pin the release
  dflash.fleet.vllm_pin:
    repo: https://github.com/vllm-project/vllm.git
    ref: v0.33.0
    lock_file: "{{ playbook_dir }}/dflash.lock.json"
  register: pinned

- name: Take over what the branch means today, with a patch on top
  dflash.fleet.vllm_pin:
    repo: https://github.com/vllm-project/vllm.git
    ref: main
    lock_file: "{{ playbook_dir }}/dflash.lock.json"
    series:
      - patches/0001-keep-the-window.patch
    update: true
"""

RETURN = r"""
pin:
  description: What the ref is pinned to.
  returned: success
  type: dict
  contains:
    repo:
      description: The repository as it was named.
      type: str
      returned: success
    ref:
      description: The ref as it was named.
      type: str
      returned: success
    commit:
      description: The commit, 40 digits.
      type: str
      returned: success
    resolved_at:
      description: When the ref was resolved to this commit, in UTC.
      type: str
      returned: success
    series:
      description: The patches in order, each with C(name), C(sha256) and C(text).
      type: list
      elements: dict
      returned: success
moved:
  description: The new commit when O(update) found that the ref means another one than the lock said, else null.
  returned: success
  type: str
what:
  description: What is wrong, in one sentence.
  returned: failure
  type: str
where:
  description: The repository, file or variable that it is about.
  returned: failure
  type: str
fix:
  description: What mends it.
  returned: failure
  type: str
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """The work is done by the action plugin of the same name."""
    module = AnsibleModule(
        argument_spec={
            "repo": {"type": "str", "required": True},
            "ref": {"type": "str", "required": True},
            "lock_file": {"type": "path", "required": True},
            "series": {"type": "list", "elements": "path", "default": []},
            "update": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    module.fail_json(msg="dflash.fleet.vllm_pin runs on the controller, through its action plugin. Name it in full.")


if __name__ == "__main__":
    main()
