#!/usr/bin/python
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the acceptance length of a server and judges it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_acceptance
short_description: Measures whether a drafter works
version_added: "0.1.0"
description:
  - Sends real requests, one to four at once, greedy, each with another earlier turn, until enough drafts were counted.
  - The acceptance length is 1 + accepted tokens / drafts, from the difference of the server's own counters, summed
    over its engines. The target's own token counts.
  - Tells apart a server that does not answer, one that does not count, one that does not draft, one whose drafter is
    wired wrongly (not one token accepted), one below its floor, and one with too few drafts to judge.
  - Never fails for what it finds, and never changes anything.
author:
  - The dflash.fleet authors (@dflash)
options:
  base_url:
    description: Address of the server, without C(/v1).
    type: str
    required: true
  metrics_url:
    description: Address of the counters; by default O(base_url) with C(/metrics).
    type: str
  served_name:
    description: Name of the model as clients ask for it.
    type: str
    required: true
  check_id:
    description: The check that the result is given as.
    type: str
    choices: [serving.al, serving.canary_al]
    default: serving.al
  items:
    description: Prompts, each with a question C(q) and, where it is known, its answer C(a).
    type: list
    elements: dict
    required: true
  floor:
    description: The least acceptance length.
    type: float
    required: true
  last_good:
    description: Acceptance length that this host had last; O(last_good_share) of it is a floor too. V(0) is none.
    type: float
    default: 0
  last_good_share:
    description: Share of O(last_good) that must be reached.
    type: float
    default: 0.85
  published:
    description: Published acceptance length under the same conditions; O(published_share) of it is a floor too. V(0)
      is none.
    type: float
    default: 0
  published_share:
    description: Share of O(published) that must be reached.
    type: float
    default: 0.6
  min_drafts:
    description: Drafts below which nothing is judged; the check is then V(unknown).
    type: int
    default: 200
  k:
    description: Tokens drafted per round, as configured.
    type: int
    required: true
  budget_s:
    description: Seconds after which no further request is sent.
    type: int
    default: 300
  concurrency:
    description: The most requests at once. Some faults show only in batches.
    type: int
    default: 4
  api_key_file:
    description: File on the host that holds the API key alone, or as C(VLLM_API_KEY=).
    type: path
  compare_text:
    description: Whether each answer must be the item's, word for word; adds the check C(serving.text).
    type: bool
    default: false
  request:
    description: Further keys of each request, for example C(chat_template_kwargs).
    type: dict
    default: {}
extends_documentation_fragment:
  - dflash.fleet.attributes.info
"""

EXAMPLES = r"""
- name: Ask the canary pair
  dflash.fleet.dflash_acceptance:
    base_url: http://127.0.0.1:8001
    served_name: canary
    check_id: serving.canary_al
    items: "{{ lookup('ansible.builtin.file', 'items.json') | from_json }}"
    floor: 6.0
    min_drafts: 48
    k: 7
    compare_text: true
  register: canary

- name: Measure the real pair, with thinking off
  dflash.fleet.dflash_acceptance:
    base_url: http://127.0.0.1:8000
    served_name: qwen3-8b
    items:
      - q: Janet has 16 eggs and eats 3. How many are left?
      - q: Write a function that reverses a list.
    floor: 2.0
    published: 6.5
    k: 15
    request:
      chat_template_kwargs: {enable_thinking: false}
"""

RETURN = r"""
ok:
  description: Whether no required check stands against the server.
  returned: always
  type: bool
checks:
  description: The check of O(check_id), and C(serving.text) with O(compare_text).
  returned: always
  type: list
  elements: dict
acceptance_length:
  description: 1 + accepted / drafts, to three places; none without a draft.
  returned: always
  type: float
per_position:
  description: By position in the draft, the share of drafts whose token was accepted.
  returned: always
  type: list
  elements: float
drafts:
  description: Rounds of drafting.
  returned: always
  type: int
draft_tokens:
  description: Tokens drafted.
  returned: always
  type: int
accepted:
  description: Drafted tokens that the target accepted.
  returned: always
  type: int
requests:
  description: Requests that were counted, without the one to warm up.
  returned: always
  type: int
floor:
  description: The floor that applied, and where it came from.
  returned: always
  type: dict
foreign:
  description: Signs that others were served meanwhile.
  returned: always
  type: list
  elements: str
seconds:
  description: How long it took.
  returned: always
  type: float
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dflash.fleet.plugins.module_utils import acceptance, checks, http
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "base_url": {"type": "str", "required": True},
            "metrics_url": {"type": "str"},
            "served_name": {"type": "str", "required": True},
            "check_id": {"type": "str", "choices": ["serving.al", "serving.canary_al"], "default": "serving.al"},
            "items": {"type": "list", "elements": "dict", "required": True},
            "floor": {"type": "float", "required": True},
            "last_good": {"type": "float", "default": 0},
            "last_good_share": {"type": "float", "default": 0.85},
            "published": {"type": "float", "default": 0},
            "published_share": {"type": "float", "default": 0.6},
            "min_drafts": {"type": "int", "default": 200},
            "k": {"type": "int", "required": True},
            "budget_s": {"type": "int", "default": 300},
            "concurrency": {"type": "int", "default": 4},
            "api_key_file": {"type": "path", "no_log": False},
            "compare_text": {"type": "bool", "default": False},
            "request": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        found = acceptance.answer(options, http.read_key(options["api_key_file"]))
    except DflashError as error:
        module.fail_json(msg=str(error), what=error.what, where=error.where, fix=error.fix)
    module.exit_json(changed=False, ok=not checks.blocking(found["checks"]), **found)


if __name__ == "__main__":
    main()
