# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Checks and results: the one shape in which every part of the product says what it found."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import vocabulary
from ansible_collections.dflash.fleet.plugins.module_utils.files import short_hash

Check = Dict[str, Any]


def base_id(check_id: str) -> str:
    """The id without its object: ``ext.import:vllm._C`` is ``ext.import``."""
    return check_id.split(":", 1)[0]


def version() -> str:
    """Hash of the checks that exist and when each is required: a proof by other checks does not stand for these."""
    rules = {name: [entry["stage"], entry["required_when"], entry.get("covered_by", "")]
             for name, entry in vocabulary.CHECKS.items()}
    return short_hash(rules)


def make(
    check_id: str,
    status: str,
    expected: Any = None,
    actual: Any = None,
    *,
    level: str = "required",
    hint: Optional[str] = None,
    evidence: Any = None,
) -> Check:
    """One check.  Raises ``KeyError`` for an id and ``ValueError`` for a status or level outside the vocabulary.

    ``hint`` defaults to the vocabulary's remedy where the check did not pass.  ``evidence`` is any
    JSON value that lets a sceptic repeat the finding (paths, counts, quoted output).
    """
    entry = vocabulary.CHECKS[base_id(check_id)]
    if bool(entry.get("object")) != (":" in check_id):
        raise KeyError(check_id)
    if status not in vocabulary.CHECK_STATUSES:
        raise ValueError("status %r of %s" % (status, check_id))
    if level not in vocabulary.CHECK_LEVELS:
        raise ValueError("level %r of %s" % (level, check_id))
    if hint is None:
        hint = "" if status in ("pass", "skip") else entry["remedy"]
    return {
        "id": check_id, "level": level, "stage": entry["stage"], "status": status,
        "expected": expected, "actual": actual, "hint": hint, "evidence": evidence,
    }


def settle(checks: List[Check], final: bool = True) -> List[Check]:
    """Apply the cover rule: an ``unknown`` whose covering check passed is settled by behaviour.

    The check keeps its status (the code could not be read) and gains ``covered_by``; it then no
    longer counts against the result.  With ``final`` false nothing is decided yet, so nothing changes.
    """
    if not final:
        return checks
    passed = {c["id"] for c in checks if c["status"] == "pass"}
    for item in checks:
        cover = vocabulary.CHECKS[base_id(item["id"])].get("covered_by")
        if item["status"] == "unknown" and cover in passed:
            item["covered_by"] = cover
            item["hint"] = "settled by %s: by behaviour, not by code" % cover
    return checks


def blocking(checks: Iterable[Check], accept_unknown: Iterable[str] = (), may_be_covered: bool = False) -> List[Check]:
    """The required checks that stand against the result.

    ``accept_unknown`` holds ids whose ``unknown`` the operator took upon himself; it never turns a
    ``fail``.  ``may_be_covered``: a later stage can still settle this one's unknowns, so a coverable
    ``unknown`` does not block yet.
    """
    accepted = set(accept_unknown)
    out = []
    for item in checks:
        if item["level"] != "required" or item["status"] in ("pass", "skip"):
            continue
        if item["status"] == "unknown":
            if item["id"] in accepted or base_id(item["id"]) in accepted or item.get("covered_by"):
                continue
            if may_be_covered and vocabulary.CHECKS[base_id(item["id"])].get("covered_by"):
                continue
        out.append(item)
    return out


def result(checks: List[Check], accept_unknown: Iterable[str] = (), may_be_covered: bool = False) -> Dict[str, Any]:
    """``{ok, checks}``: what a module returns and a proof holds."""
    return {"ok": not blocking(checks, accept_unknown, may_be_covered), "checks": checks}


def sentence(item: Check) -> str:
    """One line for a terminal: id, what was expected, what was found, what mends it."""
    text = "%s %s" % (item["id"], item["status"])
    if item["expected"] is not None or item["actual"] is not None:
        text += ": expected %s, found %s" % (item["expected"], item["actual"])
    if item["hint"]:
        text += ". " + item["hint"]
    return text
