# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which vLLM an interpreter takes: one distribution, from its own files, with no other in its way."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import checks, completeness, files, record


def distribution(
    site: str, installed: Sequence[record.Distribution], seen: Optional[Mapping[str, Any]], reason: str, level: str
) -> checks.Check:
    """Exactly one distribution, whole, and the interpreter takes the package from it."""
    evidence: Dict[str, Any] = {
        "site": site,
        "distributions": ["%s %s" % (item.name, item.version) for item in installed],
    }
    expected = "one vllm distribution in %s" % site
    if seen is not None:
        evidence.update(origin=seen["origin"], python=seen["version"])
    problem, hint = _trouble(site, installed, seen, reason)
    return checks.make(
        "complete.distribution",
        "fail" if problem else "pass",
        expected,
        problem or expected,
        level=level,
        hint=hint,
        evidence=evidence,
    )


def _trouble(
    site: str, installed: Sequence[record.Distribution], seen: Optional[Mapping[str, Any]], reason: str
) -> Tuple[str, Optional[str]]:
    """What is wrong with the one distribution, and what mends it where that is not the usual."""
    package = os.path.join(site, "vllm")
    editable = editable_source(site, installed, seen)
    if editable:
        return (
            "an editable installation: the package is %s, which no RECORD covers and anyone may edit" % editable,
            "Install a wheel of the commit instead of pip install -e.",
        )
    if os.path.isdir(package) and not os.path.isfile(os.path.join(package, "__init__.py")):
        what = "empty" if not os.listdir(package) else "without __init__.py"
        return (
            "%s is %s: it imports as a namespace package that holds nothing, and the import succeeds" % (package, what),
            "An installer was killed between removing and copying: install again.",
        )
    if not installed:
        if os.path.isdir(package):
            return (
                "0 distributions in the folder, but the package %s: "
                "its files were copied and the installation never ended" % package,
                None,
            )
        return "0 distributions in the folder, and no vllm package", "Install vllm for this interpreter."
    if len(installed) > 1:
        names = ", ".join("%s %s" % (item.name, item.version) for item in installed)
        return "%d distributions in the folder: %s" % (len(installed), names), None
    if not os.path.isdir(package):
        return "%s is listed and has no package %s" % (installed[0].folder, package), None
    if seen is None:
        return "the interpreter gives no answer: %s" % reason, None
    everywhere = {os.path.realpath(item["folder"]) for item in seen["distributions"]}
    if len(everywhere) != 1:
        return "the interpreter sees %d distributions: %s" % (len(everywhere), ", ".join(sorted(everywhere))), None
    if os.path.realpath(seen["origin"] or "") != os.path.realpath(os.path.join(package, "__init__.py")):
        return "import takes vllm from %s" % seen["origin"], "Something stands before the installation on the path."
    return "", None


def editable_source(
    site: str, installed: Sequence[record.Distribution], seen: Optional[Mapping[str, Any]] = None
) -> Optional[str]:
    """Where an editable installation takes the package from; None where the installation is not editable.

    Three forms: a ``.pth`` file with a folder, a finder module that a ``.pth`` file starts, ``direct_url.json``.
    """
    homes = {site} | {os.path.dirname(str(item["folder"])) for item in (seen or {}).get("distributions", [])}
    for home in sorted(homes):
        for item in installed if home == site else record.distributions(home):
            if not completeness.is_vllm(item.name):
                continue
            url = files.read_json(os.path.join(home, item.folder, "direct_url.json"))
            if isinstance(url, dict) and (url.get("dir_info") or {}).get("editable"):
                return str(url.get("url") or "elsewhere").replace("file://", "")
        for name in sorted(os.listdir(home)) if os.path.isdir(home) else []:
            if re.match(r"__editable__\.vllm[-_].*\.pth$", name):
                return _first_line(os.path.join(home, name)) or name
            if re.match(r"__editable___vllm_.*_finder\.py$", name):
                return name
            if re.match(r"vllm.*\.egg-link$", name):
                return _first_line(os.path.join(home, name)) or name
    return None


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.readline().strip()[:300]
    except OSError:
        return ""


def leftovers(site: str, level: str) -> checks.Check:
    """What an interrupted pip leaves."""
    left = record.leftovers(site)
    return checks.make(
        "complete.leftovers",
        "fail" if left else "pass",
        "none",
        [os.path.join(site, name) for name in completeness.shown(left)] or "none",
        level=level if any("llm" in name for name in left) or not left else "advisory",
    )


def shadow(site: str, seen: Optional[Mapping[str, Any]], elsewhere: Sequence[str], level: str) -> checks.Check:
    """Second ``vllm`` packages: on the interpreter's own path, or where a careless start would find them first.

    ``elsewhere``: folders that only some starts put on the path (working folder, ``PYTHONPATH``): told, not failed.
    """
    own = os.path.realpath(site)
    on_path = [path for path in (seen or {}).get("path", []) if path and os.path.realpath(path) != own]
    # The source of an editable installation is the package itself.
    origin = os.path.realpath(str((seen or {}).get("origin") or ""))
    inside = [path for path in map(_package_in, on_path) if path and not origin.startswith(os.path.realpath(path))]
    outside = [
        path
        for path in map(_package_in, elsewhere)
        if path and os.path.realpath(os.path.dirname(path)) != own and path not in inside
    ]
    return checks.make(
        "complete.shadow",
        "fail" if inside or outside else "pass",
        "no other vllm package",
        "; ".join(
            ["%s is on the path" % path for path in inside]
            + ["%s answers when Python is started there" % path for path in outside]
        )
        or "no other vllm package",
        level=level if inside or not outside else "advisory",
        evidence={"taken": (seen or {}).get("origin")},
    )


def _package_in(folder: str) -> Optional[str]:
    """The ``vllm`` that Python would find in a folder: a package, a namespace folder with code, or a module."""
    for name in ("vllm/__init__.py", "vllm.py"):
        if os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name.partition("/")[0])
    path = os.path.join(folder, "vllm")
    return path if folder and os.path.isdir(path) else None


def started_from() -> List[str]:
    """Folders that a careless start puts before the installation: the working folder and ``PYTHONPATH``."""
    out = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        out.append(os.getcwd())
    except OSError:
        pass
    return out


def owners(site: str, level: str) -> checks.Check:
    """Files below ``vllm/`` that the RECORDs of two distributions name."""
    names: Dict[str, List[str]] = {}
    for item in record.distributions(site):
        for path in record.paths_below(site, item.folder, "vllm/"):
            names.setdefault(path, []).append("%s %s" % (item.name, item.version))
    twice = sorted(path for path, who in names.items() if len(who) > 1)
    said = "one owner for each file"
    if twice:
        more = " and %d more files" % (len(twice) - 1) if len(twice) > 1 else ""
        said = "%s belongs to %s%s" % (twice[0], " and ".join(names[twice[0]]), more)
    return checks.make(
        "complete.owners",
        "fail" if twice else "pass",
        "one owner for each file",
        said,
        level=level,
        evidence={"count": len(twice), "files": completeness.shown(twice)},
    )
