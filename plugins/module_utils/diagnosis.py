# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of what is installed: what there is to look at on a host, what it comes to, and a table of it.

Evidence is the installation itself.  ``proof.json`` is never read here: it says what was found once.
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    checks,
    child,
    completeness,
    extensions,
    files,
    proof,
    record,
    schema,
    schemas,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

#: Sections of the table in the order in which doubt grows: what it is, whether it is all there, whether it loads,
#: what it does.  The first whose words an id begins with takes it.
SECTIONS: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("identity", ("identity.",)),
    ("completeness", ("complete.",)),
    ("imports", ("ext.import", "ext.ops")),
    ("binaries", ("ext.",)),
    ("capabilities", ("capability.",)),
)
ORDER = ("identity", "completeness", "binaries", "imports", "capabilities")
MARKS = {"pass": "ok", "fail": "FAIL", "unknown": "unknown", "skip": "-"}
WIDTH, NAMES = 116, 42


def deployed(root: str, instance: str) -> Dict[str, Any]:
    """What an instance serves, by its links and the files it was launched with.

    ``{release, build, drafter, target, runner, speculative_config, deployment_id, manifest}``.  Raises
    ``DflashError`` where nothing is deployed.
    """
    folder = os.path.realpath(os.path.join(root, "instances", instance, "current"))
    release = os.path.realpath(os.path.join(folder, "release"))
    if not os.path.isdir(folder):
        raise DflashError(
            "Nothing is deployed as instance %s on this host" % instance, root,
            "Name what to look at: an interpreter in vllm_verify_python or a folder in vllm_verify_tree.",
        )
    if not os.path.isdir(release):
        raise DflashError("The release that instance %s serves is gone" % instance, release, "Deploy again.")
    manifests = {name: files.read_json(os.path.join(release, name + ".json")) for name in ("build", "manifest")}
    for name, value in manifests.items():
        if not isinstance(value, dict) or schema.errors(value, schemas.SCHEMAS["manifest"]):
            raise DflashError(
                "The release has no whole %s.json, so nothing says what it has to be" % name, release,
                "Deploy again; or name its venv/bin/python in vllm_verify_python to see what it is.",
            )
    told = files.read_json(os.path.join(folder, "models.json"))
    argv = files.read_json(os.path.join(folder, "argv.json"))
    chosen = ((argv if isinstance(argv, dict) else {}).get("env") or {}).get("VLLM_USE_V2_MODEL_RUNNER")
    drafter, target = [(told if isinstance(told, dict) else {}).get(name) or {} for name in ("drafter", "target")]
    return {
        "release": release,
        "deployment_id": re.sub(r"^(?![0-9a-f]{16}$).*$", "", os.path.basename(folder)),
        **manifests,
        "drafter": str(drafter.get("folder") or ""),
        "target": str(target.get("folder") or ""),
        "runner": {"0": "v1", "1": "v2"}.get(str(chosen), "auto"),
        "speculative_config": launched(os.path.join(folder, "serve.yaml")),
    }


def launched(path: str) -> Dict[str, Any]:
    """The speculative configuration in a serve.yaml that we wrote: one key a line, each value JSON."""
    found: Dict[str, Any] = {}
    inside = False
    try:
        with open(path, encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return found
    for line in lines:
        if not line.startswith(" "):
            inside = line.strip() == "speculative-config:"
            continue
        name, _colon, value = line.strip().partition(": ")
        if inside and value and not line.startswith("   "):
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
    return found


def device_of(sites: Sequence[str]) -> str:
    """``cpu`` or ``cuda``, by what lies in the first folder with a ``vllm`` and by torch beside it.

    Where neither binaries nor torch tell, ``cuda``: what the product is made for.
    """
    for site in sites:
        compiled = extensions.present(os.path.join(site, "vllm"))
        if any(name.split(".")[-1].startswith("_C_AVX") for name in compiled):
            return "cpu"
        installed = [item for item in record.distributions(site) if completeness.is_vllm(item.name)]
        if any(re.search(r"[+.]cpu$", item.version) for item in installed):
            return "cpu"
        try:
            with open(os.path.join(site, "torch", "version.py"), encoding="utf-8") as handle:
                told = re.search(r"^cuda\b[^=]*= *(None|['\"])", handle.read(), re.MULTILINE)
        except OSError:
            continue
        if told:
            return "cpu" if told.group(1) == "None" else "cuda"
    return "cuda"


def closed_to(python: str, user: str) -> str:
    """Why the account cannot run an interpreter that is there; empty where it can.

    Probes never run as root, and an environment below /root is closed to everybody else.
    """
    if not os.path.exists(python) or child.can_run(python, user):
        return ""
    name = accounts.worker(user).name
    folder = os.path.dirname(os.path.abspath(python))
    parents = [folder]
    while os.path.dirname(parents[-1]) != parents[-1]:
        parents.append(os.path.dirname(parents[-1]))
    shut = next((path for path in reversed(parents) if not os.stat(path).st_mode & stat.S_IXOTH), "")
    if shut and os.geteuid() == 0:
        return "the account %s cannot run %s: %s is closed to it" % (name, python, shut)
    return "the account %s cannot run %s" % (name, python)


def by_files(python: str, reason: str, wish: proof.Wish) -> Tuple[List[checks.Check], Dict[str, Any]]:
    """The diagnosis of a virtual environment whose interpreter cannot be run: files answer, imports are unknown."""
    base = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    sites = [path for path in sorted(glob.glob(os.path.join(base, "lib*", "python3*", "site-packages")))
             if os.path.isdir(os.path.join(path, "vllm"))]
    if not sites:
        raise DflashError("No vLLM can be looked at: " + reason, python,
                          "Name an account that can run it in dflash_service_user; it is never root.")
    if wish.device == "auto":
        wish = wish._replace(device=device_of(sites))
    found, said = proof.inspect_tree(sites[0], wish)
    found.append(checks.make(
        "ext.import:vllm", "unknown", "imports", reason, level=wish.level,
        hint="Probes run foreign code and never as root: name an account that can run it in dflash_service_user, open "
        "the folder to it (chmod o+x), or accept this with -e dflash_accept_unknown=ext.import:vllm",
    ))
    return proof.in_order(found), dict(said, device=wish.device)


# ---------------------------------------------------------------------- what it comes to
def outcome(info: Mapping[str, Any], accept_unknown: Iterable[str] = ()) -> Dict[str, Any]:
    """State of the host: ``unchanged`` when every required check passes, else ``refused``.

    Nothing later in this run can settle an ``unknown`` here, and no earlier run is believed, so it stands.
    """
    found = list(info["checks"])
    against = checks.blocking(found, accept_unknown)
    told = info.get("deployed") or {}
    build, manifest = told.get("build") or {}, told.get("manifest") or {}
    return {
        "state": "refused" if against else "unchanged",
        "phase": "verify",
        "reason": "%s: %s" % (
            "a required check failed" if any(item["status"] == "fail" for item in against)
            else "a required check has no answer",
            ", ".join(item["id"] for item in against),
        ) if against else "",
        "fix": against[0]["hint"] if against else "",
        "checks": found,
        "release": manifest,
        "build": build,
        "pin": {"commit": build.get("pin") or "", "series": build.get("series") or []},
        "deployment_id": told.get("deployment_id") or "",
        "subject": str(info.get("subject") or ""),
        "identity": dict(info.get("identity") or {}),
        "device": str(info.get("device") or ""),
        "accepted_unknown": sorted(set(accept_unknown)),
        "changed": False,
    }


# ---------------------------------------------------------------------- the table
def section(check_id: str) -> str:
    """The section of a check."""
    return next((name for name, words in SECTIONS if check_id.startswith(words)), ORDER[-1])


def short(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(text.split())


def table(name: str, entry: Mapping[str, Any]) -> List[str]:
    """A host's diagnosis as lines of text: each check, and under what did not pass what was expected and mends it."""
    identity = entry.get("identity") or {}
    head = "%s: %s" % (name, entry.get("subject") or "vLLM")
    words = [short(identity.get(key)) for key in ("distribution", "version", "commit_id") if identity.get(key)]
    if words:
        head += " (%s)" % ", ".join(words + ([str(entry["device"])] if entry.get("device") else []))
    lines = [head]
    against = {id(item) for item in checks.blocking(entry["checks"], entry.get("accepted_unknown") or ())}
    for title in ORDER:
        found = [item for item in entry["checks"] if section(item["id"]) == title]
        if found:
            lines.append("  " + title)
        for item in found:
            lines += _rows(item, id(item) in against, entry.get("accepted_unknown") or ())
    for level, stands in (("required", True), ("advisory", False)):
        failed = [item["id"] for item in entry["checks"]
                  if (id(item) in against if stands else
                      item["level"] == "advisory" and item["status"] in ("fail", "unknown"))]
        if failed:
            lines += _wrap("  %d %s: " % (len(failed), "stand against it" if stands else level + " findings"),
                           ", ".join(failed))
    if not against:
        lines.append("  every required check passes")
    if entry["checks"] and not any(
        item["level"] == "required" for item in entry["checks"] if section(item["id"]) == "capabilities"
    ):
        lines.append("  no drafter was named, so no capability decides: name yours with -e vllm_verify_drafter=FOLDER")
    return lines


def _rows(item: Mapping[str, Any], stands: bool, accepted: Sequence[str]) -> List[str]:
    mark = MARKS[item["status"]]
    note = "" if item["level"] == "required" else " (advisory)"
    if item["status"] == "unknown" and not stands and item["level"] == "required":
        note = " (accepted)" if {item["id"], checks.base_id(item["id"])} & set(accepted) else " (settled)"
    label = "    %-8s %-*s " % (mark, NAMES, item["id"] + note)
    if item["status"] in ("pass", "skip"):
        return [_cut(label + (short(item["actual"]) if item["status"] == "pass" else ""))]
    lines = [label.rstrip()]
    for word, value in (("expected", item["expected"]), ("found", item["actual"]), ("remedy", item["hint"])):
        if value not in (None, ""):
            lines += _wrap("%13s%-9s " % ("", word), short(value)[:400])
    return lines


def _cut(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _wrap(label: str, text: str) -> List[str]:
    return textwrap.wrap(label + text, WIDTH, subsequent_indent=" " * len(label), break_on_hyphens=False,
                         drop_whitespace=True, replace_whitespace=False) or [label]
