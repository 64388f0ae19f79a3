# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Runs on the controller: the lock file and the patches lie there, and no host needs to be reachable."""

from __future__ import annotations

import json
from typing import Any, Dict, Optional

from ansible.plugins.action import ActionBase

from ansible_collections.dflash.fleet.plugins.module_utils import lock
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ARGUMENTS: Dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "ref": {"type": "str", "required": True},
    "lock_file": {"type": "path", "required": True},
    "series": {"type": "list", "elements": "path", "default": []},
    "update": {"type": "bool", "default": False},
}


def plain(value: Any) -> Any:
    """The value without the marks that the controller puts on text."""
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class ActionModule(ActionBase):
    """Resolves a ref against the lock."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False
    _requires_connection = False

    def run(self, tmp: Optional[str] = None, task_vars: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        result: Dict[str, Any] = super().run(tmp, task_vars or {})
        _validation, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            series = lock.read_series([self._loader.path_dwim(str(path)) for path in arguments["series"]])
            found = lock.pin(
                plain(arguments["repo"]), plain(arguments["ref"]),
                self._loader.path_dwim(plain(arguments["lock_file"])), arguments["update"], self._task.check_mode,
            )
        except DflashError as error:
            result.update(failed=True, msg=str(error), what=error.what, where=error.where, fix=error.fix)
            return result
        result.update(changed=found["changed"], pin=dict(found["pin"], series=series), moved=found["moved"])
        if self._task.diff and found["changed"]:
            result["diff"] = {
                "before_header": arguments["lock_file"], "after_header": arguments["lock_file"],
                "before": json.dumps(found["before"], indent=2, sort_keys=True) + "\n",
                "after": json.dumps(found["after"], indent=2, sort_keys=True) + "\n",
            }
        return result
