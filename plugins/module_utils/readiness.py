# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Is the instance's server ready, and is what answers on its port really that server?"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Sequence
from urllib.parse import urlsplit

from ansible_collections.dflash.fleet.plugins.module_utils import checks, http, launch, log_watch, process
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json

#: Seconds between two looks while waiting.
POLL_S = 0.5


class Probe:
    """One look at an instance's server, or a wait for it."""

    def __init__(
        self, root: str, instance: str, deployment: str, base_url: str, served_name: str, key: Optional[str] = None,
        taps: Sequence[int] = (), ready_timeout: float = 1800.0,
    ) -> None:
        self.root, self.instance, self.deployment = root, instance, deployment
        self.path = launch.instance_dir(root, instance)
        self.log = launch.log_path(root, instance)
        self.served_name, self.taps, self.ready_timeout = served_name, list(taps), ready_timeout
        self.base_url = base_url
        self.client = http.Client(base_url, key)
        self.reason = ""

    def run(self) -> Dict[str, Any]:
        """What the launcher recorded."""
        found = read_json(os.path.join(self.path, "run.json"))
        return found if isinstance(found, dict) else {}

    def lives(self, run: Dict[str, Any]) -> bool:
        """Whether the recorded process lives."""
        return process.alive(run.get("pid"), run.get("start_ticks"), run.get("boot_id"))

    def token(self) -> str:
        """"" when the server is well, names the model and gives one real token; else what it lacks."""
        try:
            health = self.client.get("/health", 5.0)
            if health.status != 200:
                return "/health answers %d" % health.status
            models = self.client.get("/v1/models", 5.0)
            if models.status in (401, 403):
                return "the API key is refused (HTTP %d)" % models.status
            value = models.json()
            names = [str(m.get("id")) for m in value.get("data", [])] if isinstance(value, dict) else []
            if self.served_name not in names:
                return "it serves %s, not %s" % (", ".join(names) or "no model", self.served_name)
            return self._one_token()
        except http.NoAnswer as error:
            return str(error)

    def _one_token(self) -> str:
        chat = {"model": self.served_name, "messages": [{"role": "user", "content": "Hello"}]}
        plain = {"model": self.served_name, "prompt": "Hello"}
        answer = http.Answer(0, "")
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", plain)):
            answer = self.client.post(path, dict(body, max_tokens=1, temperature=0), 60.0)
            value = answer.json()
            usage = value.get("usage") if isinstance(value, dict) else None
            if answer.status == 200 and isinstance(usage, dict) and usage.get("completion_tokens"):
                return ""
            if answer.status != 400:
                break  # 400: this model has no chat template, so it is asked plainly
        return "it gives no token: %s" % answer.complaint()

    def look(self) -> Dict[str, Any]:
        """``{ready, dead, late, pid, elapsed_s, progress, reason}`` now."""
        run = self.run()
        lives = self.lives(run)
        ours = run.get("deployment_id") == self.deployment
        elapsed = process.age(int(run["pid"])) if lives else None
        reason = self.token() if lives and ours else ""
        if not lives:
            reason = "its process is not running"
        elif not ours:
            reason = "the deployment that runs is %s" % run.get("deployment_id")
        ready = not reason
        late = bool(not ready and lives and elapsed is not None and elapsed > self.ready_timeout)
        return {
            "ready": ready, "dead": not lives or not ours, "late": late, "pid": run.get("pid") if lives else None,
            "elapsed_s": None if elapsed is None else round(elapsed, 1), "reason": reason,
            "progress": "" if ready else log_watch.last_line(log_watch.tail(self.log)),
        }

    def wait(self) -> Dict[str, Any]:
        """Look until it is ready, dead or late."""
        limit = time.monotonic() + self.ready_timeout
        while True:
            found = self.look()
            if found["ready"] or found["dead"] or found["late"] or time.monotonic() > limit:
                if not found["ready"] and not found["dead"]:
                    found["late"] = True
                return found
            time.sleep(POLL_S)

    # ---- checks
    def judge(self, found: Dict[str, Any]) -> List[checks.Check]:
        """The checks of the serving process, for a look that is final: ready, dead or late."""
        out = [self.ready_check(found)]
        if found["ready"]:
            out.append(self.process_check())
            if self.taps:
                out.append(self.aux_check())
        return out

    def ready_check(self, found: Dict[str, Any]) -> checks.Check:
        """``serving.ready``: one real token in time; an early death is told by its first error."""
        expected = "%s gives one token within %d s" % (self.served_name, self.ready_timeout)
        evidence: Dict[str, Any] = {"base_url": self.base_url, "elapsed_s": found["elapsed_s"], "log": self.log}
        if found["ready"]:
            return checks.make("serving.ready", "pass", expected, "after %s s" % found["elapsed_s"], evidence=evidence)
        error = log_watch.first_error(log_watch.section(self.log, self.run()))
        evidence.update(first_error=error["line"], last_line=found["progress"])
        hint = " ".join(filter(None, (
            error["meaning"], "First error: %s." % error["line"].rstrip(".") if error["line"] else "", error["fix"],
        ))) or ("Read %s." % self.log)
        actual = found["reason"]
        if found["late"]:
            actual = "not ready after %s s: %s" % (found["elapsed_s"], found["reason"])
            if not error["line"]:
                hint = "It was at: %s. Raise dflash_serve_ready_timeout if that is progress." % (
                    found["progress"] or "(no log)"
                )
        return checks.make("serving.ready", "fail", expected, actual, hint=hint, evidence=evidence)

    def process_check(self) -> checks.Check:
        """``serving.process``: who listens is this instance's, and runs this deployment's release."""
        run = self.run()
        release = os.path.realpath(os.path.join(self.path, "deployments", self.deployment, "release"))
        expected = "a process of deployment %s, from %s" % (self.deployment, release)
        port = urlsplit(self.base_url).port or (443 if self.base_url.startswith("https:") else 80)
        members = process.members(self.path, run or None)
        pids = [item.pid for item in members]
        listeners = process.listener_pids(port, pids)
        evidence: Dict[str, Any] = {
            "port": port, "pid": run.get("pid"), "listeners": sorted(listeners), "release": release,
            "processes": ["%d %s" % (item.pid, item.name) for item in members],
        }
        if not self.lives(run) or run.get("deployment_id") != self.deployment:
            return checks.make(
                "serving.process", "fail", expected, "the recorded process is gone or of another deployment",
                evidence=evidence,
            )
        if not listeners:
            others = sorted(process.listener_pids(port))
            if not others and process.port_is_listened_on(port):
                return checks.make(
                    "serving.process", "unknown", expected, "port %d is held by a process of another account" % port,
                    evidence=evidence,
                )
            return checks.make(
                "serving.process", "fail", expected,
                "port %d is held by %s" % (port, ", ".join("process %d" % pid for pid in others) or "nobody"),
                evidence=evidence,
            )
        holds = {pid: process.holds_files_below(pid, release) for pid in pids}
        evidence["from_release"] = sorted(pid for pid, held in holds.items() if held)
        if any(holds.values()):
            return checks.make(
                "serving.process", "pass", expected, "process %d" % sorted(listeners)[0], evidence=evidence,
            )
        closed = all(held is None for held in holds.values())
        return checks.make(
            "serving.process", "unknown" if closed else "fail", expected,
            "its memory maps cannot be read" if closed else "no file of that release is in use", evidence=evidence,
        )

    def aux_check(self) -> checks.Check:
        """``serving.aux_layers`` from this process's part of the log."""
        run = self.run()
        return log_watch.aux_check(
            log_watch.section(self.log, run), self.taps, [item.pid for item in process.members(self.path, run or None)],
        )
