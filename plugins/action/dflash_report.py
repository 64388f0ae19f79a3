# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Runs on the controller, once: writes the verdict and prints the recap."""

from __future__ import annotations

import os
import re
import shlex
import time
from typing import Any, Dict

from ansible import context
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from ansible_collections.dflash.fleet.plugins.action.dflash_inputs import plain
from ansible_collections.dflash.fleet.plugins.module_utils import diagnosis, schema, verdict
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import switch_link, write_json

#: Control characters of a terminal; what came from a host is printed without them.
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

SEEN = {
    "pin": "__vllm_source_pin",
    "state": "__dflash_plan_state",
    "verify": "__vllm_verify_build",
    "outcome": "__dflash_outcome",
    "job": "__vllm_build_job",
}


class ActionModule(ActionBase):
    """See the module of the same name for the documentation."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> Dict[str, Any]:
        """Collect every host's results, write, print."""
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        entries: Dict[str, Any] = {}
        found: Dict[str, Dict[str, Any]] = {}
        built: Dict[str, Any] = {}
        predict = self._task.check_mode or boolean(self._task.args.get("predict", False))
        report_dir = ""
        starts = [time.time()]
        for name in task_vars["ansible_play_hosts_all"]:
            seen_by = task_vars["hostvars"][name]
            seen = {
                key: plain(self._templar.template(seen_by[var])) if var in seen_by else {} for key, var in SEEN.items()
            }
            seen["lost"] = name not in task_vars["ansible_play_hosts"]
            seen["pin"] = (seen["pin"] or {}).get("pin")
            manifest = (seen.pop("job") or {}).get("manifest") or {}
            built[str(manifest.get("build_id") or "")] = manifest
            found[str(name)] = seen
            typed = seen_by.get("__dflash_plan_inputs") or seen_by.get("__vllm_verify_inputs") or {}
            seen["notes"] = plain(typed.get("notes") or [])
            starts.append(float(typed.get("started") or time.time()))
            report_dir = report_dir or str(typed.get("report_dir") or "")
        for name, seen in found.items():
            # What a builder made in this run is told for every host that has it.
            seen["build"] = built.get(str((seen["state"] or {}).get("build_id") or "none"))
            entries[name] = verdict.host_entry(seen, predict)
        started = min(starts)
        outcome = verdict.build(entries, predict, self._utc(started), self._utc(time.time()))
        try:
            path = self._write(outcome, report_dir or os.path.join(os.getcwd(), "runs"), started)
        except (DflashError, OSError) as error:
            return dict(result, failed=True, msg="the verdict could not be written: %s" % error)
        for name, entry in sorted(entries.items()):
            for line in diagnosis.table(name, entry) if entry["phase"] == "verify" and entry["checks"] else []:
                self._display.display(CONTROL.sub("?", line))
        for line in verdict.recap(outcome, path, self._resume()):
            self._display.display(CONTROL.sub("?", line))
        causes = verdict.exit_causes(entries)
        return dict(result, changed=False, verdict=outcome, path=path, causes=causes, code=verdict.exit_code(causes))

    @staticmethod
    def _utc(moment: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))

    @staticmethod
    def _write(outcome: Dict[str, Any], report_dir: str, started: float) -> str:
        schema.require(outcome, "verdict", report_dir)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started))
        for attempt in range(100):
            folder = os.path.join(report_dir, stamp if not attempt else "%s-%d" % (stamp, attempt))
            try:
                os.makedirs(folder)
                break
            except FileExistsError:
                continue
        path = os.path.join(folder, "verdict.json")
        write_json(path, outcome)
        switch_link(os.path.join(report_dir, "latest"), os.path.basename(folder))
        return path

    @staticmethod
    def _resume() -> str:
        """The command that was given, without what only this run wanted to see."""
        args = context.CLIARGS
        books = [book.replace("plan_dflash", "deploy_dflash") for book in args.get("args") or ["deploy_dflash.yml"]]
        words = ["ansible-playbook", *books]
        for source in args.get("inventory") or []:
            words += ["-i", os.path.relpath(source) if os.path.exists(source) else source]
        if args.get("subset"):
            words += ["--limit", args["subset"]]
        for extra in args.get("extra_vars") or []:
            words += ["-e", extra]
        return " ".join(shlex.quote(str(word)) for word in words)
