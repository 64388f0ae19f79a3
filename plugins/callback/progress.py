# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Shows how far long work is, instead of a retry that looks like a failure."""

from __future__ import annotations

import time
from typing import Any, Dict

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: progress
type: aggregate
short_description: Shows the step, percent and estimate of builds and starting servers
version_added: "0.1.0"
author:
  - The dflash.fleet authors (@dflash)
description:
  - Builds and starting servers are polled by short modules under C(until). Ansible announces each poll as a failure
    that is retried; this callback shows the step that the module reported instead, one line at each change and at
    least one a minute.
  - It stands beside any stdout callback and touches no other output. Enable it with C(callbacks_enabled).
requirements:
  - enable in configuration
"""

#: Seconds after which a line is shown although nothing changed.
HEARTBEAT = 60.0
#: How the default stdout callback begins the announcement of a retry.
ANNOUNCEMENT = "FAILED - RETRYING: "


def line(result: Dict[str, Any]) -> str:
    """One line for the result of a poll, or an empty string for results of other modules."""
    if result.get("step"):
        text = "build: %s" % result["step"]
        if result.get("percent") is not None:
            text += ", %d %%" % result["percent"]
        if result.get("eta_s"):
            text += ", about %d s left" % result["eta_s"]
        return text
    if "ready" in result and "dead" in result:
        return "server: %s" % (result.get("progress") or "loading")
    return ""


class CallbackModule(CallbackBase):
    """The callback; see DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "dflash.fleet.progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown: Dict[str, Any] = {}
        self._ours: Dict[str, bool] = {}
        self._show = self._display.display
        self._display.display = self._filtered

    def _filtered(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass everything on but the announcements of polls that are ours."""
        text = str(msg)
        if text.startswith(ANNOUNCEMENT) and any(": %s (" % name in text for name in self._ours):
            return None
        return self._show(msg, *args, **kwargs)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Remember the names of tasks that poll our modules."""
        if str(task.action) in ("dflash.fleet.vllm_build_job", "dflash.fleet.dflash_serve_check"):
            self._ours[str(task.get_name()).rsplit(" : ", 1)[-1]] = True
            self._ours[str(task.get_name())] = True

    def v2_runner_retry(self, result: Any) -> None:
        """Show the step when it changed, or a heartbeat."""
        host, text = str(result._host.get_name()), line(result._result)
        if not text:
            return
        seen = self._shown.get(host)
        key = text.split(",", 1)[0]
        now = time.monotonic()
        if seen is None or seen[0] != key or now - seen[1] >= HEARTBEAT or self._moved(seen[2], result._result):
            self._shown[host] = (key, now, result._result.get("percent"))
            self._show("  [%s] %s" % (host, text))

    @staticmethod
    def _moved(before: Any, result: Dict[str, Any]) -> bool:
        percent = result.get("percent")
        return percent is not None and (before is None or percent - before >= 10)
