# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From what each host left behind to one verdict, one recap and one exit cause.  Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import checks, vocabulary


def host_entry(seen: Mapping[str, Any], predict: bool) -> Dict[str, Any]:
    """One host of the verdict.

    ``seen`` is ``{pin, state, verify, outcome}``: the results of ``vllm_pin``, ``dflash_state`` and
    ``vllm_build_assert``, and the outcome that a role set; each may be missing.  ``lost`` is true for a host
    that was reached and then left the play; ``notes`` are what the operator took upon himself.
    """
    state = seen.get("state") or {}
    outcome = dict(seen.get("outcome") or {})
    pin = seen.get("pin") or outcome.get("pin") or {}
    build = seen.get("build") or outcome.get("build") or state.get("build") or {}
    proof = state.get("proof") or {}
    group = state.get("group", "")
    word = outcome.get("state") or ""
    if not word:
        if group == "unchanged":
            word = "unchanged"
        elif seen.get("lost"):
            word = "lost"
        elif group and predict:
            word = "would_change"
        else:
            word = "not_reached"
    found: List[Dict[str, Any]] = list(outcome.get("checks") or [])
    if word == "unchanged" and not outcome:
        found = list(proof.get("checks") or [])
    elif not found and word in ("refused", "stopped", "rolled_back"):
        found = list((seen.get("verify") or {}).get("checks") or [])
    acceptance = (
        outcome.get("acceptance") or (proof.get("acceptance") if word in ("unchanged", "would_change") else {}) or {}
    )
    release = outcome.get("release") or state.get("release") or {}
    # What a diagnosis tells beside its checks; a deployment has nothing of it.
    more = {key: outcome[key] for key in ("subject", "identity", "device", "accepted_unknown") if key in outcome}
    return {
        "state": word,
        "build_id": state.get("build_id") or build.get("build_id") or "",
        "release_id": release.get("release_id") or "",
        "deployment_id": outcome.get("deployment_id") or state.get("deployment_id") or "",
        "pin": pin.get("commit") or "",
        "series": [{"name": patch["name"], "sha256": patch["sha256"]} for patch in pin.get("series") or []],
        "commit": release.get("commit") or "",
        "acceptance_length": acceptance.get("acceptance_length"),
        "per_position": list(acceptance.get("per_position") or []),
        "drafts": acceptance.get("drafts"),
        "checks": found,
        "reason": str(outcome.get("reason") or ""),
        "fix": str(outcome.get("fix") or ""),
        "phase": str(outcome.get("phase") or ""),
        "causes": [item["text"] for item in state.get("causes") or []],
        "serves": str(outcome.get("serves") or (state.get("current") if word != "stopped" else "") or ""),
        "notes": list(seen.get("notes") or []),
        "changed": bool(outcome.get("changed")),
        "native": build.get("native"),
        "requires_commits": list(build.get("requires_commits") or []),
        **more,
    }


def exit_causes(hosts: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """The causes in ``vocabulary.EXIT_CODES`` that the hosts give; empty when all is well."""
    found = set()
    for entry in hosts.values():
        if entry["state"] in ("unreachable", "lost"):
            found.add("unreachable_or_lost")
        elif entry["state"] == "refused" and entry["phase"] in ("plan", "preflight", "inputs"):
            found.add("input")
        elif entry["state"] not in vocabulary.OK_HOST_STATES and entry["state"] != "not_reached":
            found.add("gate_or_build")
    if not found and not (hosts and all(entry["state"] in vocabulary.OK_HOST_STATES for entry in hosts.values())):
        found.add("gate_or_build")  # nobody says why, but not every host is well
    return sorted(found)


def exit_code(causes: List[str]) -> int:
    """The exit code of the command line for several causes."""
    codes = {vocabulary.EXIT_CODES[cause] for cause in causes}
    return next((code for code in vocabulary.EXIT_ORDER if code in codes), 0)


def build(hosts: Dict[str, Dict[str, Any]], check_mode: bool, started_at: str, finished_at: str) -> Dict[str, Any]:
    """The verdict of a run over the hosts' entries."""
    good = bool(hosts) and all(entry["state"] in vocabulary.OK_HOST_STATES for entry in hosts.values())
    return {
        "schema": 1,
        "state": "ok" if good else "failed",
        "changed": sum(1 for entry in hosts.values() if entry["changed"]),
        "check_mode": check_mode,
        "started_at": started_at,
        "finished_at": finished_at,
        "hosts": hosts,
    }


def _rate(values: List[float]) -> str:
    return " ".join("%.2f" % value for value in values)


def _al(value: Optional[float]) -> str:
    return "-" if value is None else "%.2f" % value


def recap(verdict: Mapping[str, Any], path: str, resume: str) -> List[str]:
    """Lines for a terminal: one a host, then what stands against it, then the next command."""
    only = ", prediction only" if verdict["check_mode"] else ""
    lines = ["run %s, %d of %d hosts changed%s" % (verdict["state"], verdict["changed"], len(verdict["hosts"]), only)]
    for name, entry in sorted(verdict["hosts"].items()):
        told = entry["phase"] == "verify" and bool(entry["checks"])
        line = "%-16s %-12s AL %s" % (name, entry["state"], _al(entry["acceptance_length"]))
        if entry["phase"] in ("verify", "inputs"):
            line = "%-16s %s" % (name, entry["state"])
        if entry["per_position"]:
            line += " (per position %s%s)" % (
                _rate(entry["per_position"]),
                "; %d drafts" % entry["drafts"] if entry.get("drafts") else "",
            )
        lines.append(line)
        ids = [
            "%s %s" % (word, entry[key][:12])
            for word, key in (
                ("build", "build_id"),
                ("release", "release_id"),
                ("deployment", "deployment_id"),
                ("commit", "commit"),
            )
            if entry[key]
        ]
        if ids:
            lines.append("  " + ", ".join(ids))
        if entry.get("native"):
            lines.append("  native: %(says)s since %(base)s" % entry["native"])
        if entry.get("requires_commits"):
            lines.append("  contains: " + ", ".join(item["ref"] for item in entry["requires_commits"]))
        for text in entry["causes"] if entry["state"] != "unchanged" else []:
            lines.append("  because: " + text)
        lines.extend("  note: " + text for text in entry["notes"])
        if entry["reason"]:
            lines.append("  reason: " + entry["reason"])
        for item in checks.blocking(entry["checks"], ()) if not told else []:
            lines.append("  " + checks.sentence(item))
        unknown = [
            item["id"]
            for item in ([] if told else entry["checks"])
            if item["status"] == "unknown"
            and item["level"] == "required"
            and item not in checks.blocking(entry["checks"], ())
        ]
        if unknown:
            lines.append("  settled by behaviour, not by code: " + ", ".join(unknown))
        if entry["state"] == "rolled_back":
            lines.append("  serves again: deployment %s" % entry["serves"])
        if entry["fix"] and not told:
            lines.append("  fix: " + entry["fix"])
    lines.append("verdict: " + path)
    if verdict["state"] != "ok":
        lines.append("when mended, run: " + resume)
    elif verdict["check_mode"] and any(entry["state"] == "would_change" for entry in verdict["hosts"].values()):
        lines.append("to carry it out, run: " + resume)
    return lines
