# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Do the compiled extensions load: checks from what ``probe_native`` saw."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import (
    checks,
    child,
    elf,
    extensions,
    load_errors,
    probe_code,
    probe_native,
    probe_syntax,
)

#: Seconds for one extension; a good one takes less than one.
ONE_DEADLINE = 60
ILLEGAL = 4
#: The loader's word for a host without NVIDIA driver: the build may be right.
NO_DRIVER = "driver_missing"
#: Symbols of the driver's library as extensions name them.
DRIVER_SYMBOL = r"cu[A-Z]\w*$"


def examine(
    python: str,
    package: str,
    compiled: Mapping[str, str],
    expected: Sequence[extensions.Expected],
    device: str,
    *,
    user: Optional[str],
    deadline: float,
    level: str,
) -> List[checks.Check]:
    """One check per expected extension (and per optional one that is there), each loaded in a process of its own.

    On CPU hosts ``ext.import:vllm._C`` stands for the variant that this tree picks on this processor; the
    other variants answer ``ext.ops:<module>``.
    """
    required = {item.module: item.required for item in expected}
    listed = [name for name in required if required[name] or name in compiled]
    listed += [name for name in compiled if name not in required and name in extensions.CPU_VARIANTS]
    one = min(ONE_DEADLINE, deadline)
    payload = {
        "extensions": [{"module": name, "path": compiled[name]} for name in listed if name in compiled],
        "deadline": one,
        "platform_source": _platform(package) if device == "cpu" else "",
        "driver_symbols": _driver_symbols(compiled.values()) if device == "cuda" else [],
    }
    patience = deadline + 2 * one + len(listed)
    outcome = child.run(python, [probe_syntax, probe_code, probe_native], payload, user=user, deadline=patience)
    seen: Dict[str, Any] = (
        outcome.value if outcome.ok else {"torch_error": outcome.reason, "results": [], "variant": None}
    )
    results = {item["module"]: item for item in seen["results"]}
    chosen = _chosen(seen["variant"], listed) if device == "cpu" else None
    out: List[checks.Check] = []
    for name in listed:
        own_level = level if required.get(name, True) else "advisory"
        if device == "cpu" and name in extensions.CPU_VARIANTS:
            if name == chosen:
                out.insert(0, _import("vllm._C", name, compiled.get(name), results.get(name), seen, own_level))
            else:
                out.append(_operators(name, compiled.get(name), results.get(name), seen, own_level))
        else:
            out.append(_import(name, None, compiled.get(name), results.get(name), seen, own_level))
    return out


def _driver_symbols(paths: Iterable[str]) -> List[str]:
    """What the extensions take from the driver's library: a stub of it must define these."""
    return sorted({name for path in paths for name in elf.undefined(path, DRIVER_SYMBOL)})


def _platform(package: str) -> str:
    try:
        with open(os.path.join(package, "platforms", "cpu.py"), encoding="utf-8") as handle:
            return handle.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _chosen(variant: Optional[str], listed: Sequence[str]) -> Optional[str]:
    """The variant that the tree picks; by the processor's flags where the tree's choice cannot be run."""
    if variant in listed:
        return variant
    flags = _cpu_flags()
    wanted = "vllm._C" if "avx512_bf16" in flags else "vllm._C_AVX512" if "avx512f" in flags else "vllm._C_AVX2"
    return wanted if wanted in listed else next((name for name in listed if name in extensions.CPU_VARIANTS), None)


def _cpu_flags() -> List[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            return next((line.partition(":")[2].split() for line in handle if line.startswith("flags")), [])
    except OSError:
        return []


def _evidence(
    path: Optional[str], result: Optional[Mapping[str, Any]], seen: Mapping[str, Any], variant: Optional[str]
) -> Dict[str, Any]:
    evidence: Dict[str, Any] = {"path": path, "torch": seen.get("torch")}
    if variant:
        evidence["variant"] = variant
    if result:
        evidence.update(operators=result["ops"], namespaces=result["namespaces"], seconds=result["seconds"])
        if result.get("stub"):
            evidence["driver"] = result["stub"]
    return evidence


def _trouble(path: Optional[str], result: Optional[Mapping[str, Any]], seen: Mapping[str, Any]) -> str:
    """What went wrong, with the file's name; empty when the extension loaded."""
    if path is None:
        return "the file is missing"
    if result is None:
        return "torch does not import: %s" % seen.get("torch_error")
    if result["ok"]:
        return ""
    return "%s: %s" % (os.path.basename(path), child.death(result["signal"]) if result["signal"] else result["error"])


def _import(
    name: str,
    variant: Optional[str],
    path: Optional[str],
    result: Optional[Mapping[str, Any]],
    seen: Mapping[str, Any],
    level: str,
) -> checks.Check:
    trouble = _trouble(path, result, seen)
    evidence = _evidence(path, result, seen, variant)
    if not trouble:
        said = "imports"
        if result and result.get("stub"):
            said = "imports over a stub of the driver's library, %d operators" % result["ops"]
        return checks.make("ext.import:" + name, "pass", "imports", said, level=level, evidence=evidence)
    cause = load_errors.classify(trouble)
    evidence["cause"] = cause.word
    if cause.word == NO_DRIVER or (result and result.get("stub") and _stub_lacks(trouble)):
        return checks.make(
            "ext.import:" + name,
            "unknown",
            "imports",
            trouble,
            level="advisory",
            evidence=evidence,
            hint=cause.remedy if cause.word == NO_DRIVER else load_errors.KNOWN[0][2],
        )
    return checks.make(
        "ext.import:" + name, "fail", "imports", trouble, level=level, evidence=evidence, hint=cause.remedy
    )


def _stub_lacks(trouble: str) -> bool:
    """A symbol of the driver that the stub does not define says nothing about the build."""
    return bool(re.search(r"undefined symbol: " + DRIVER_SYMBOL[:-1], trouble))


def _operators(
    name: str, path: Optional[str], result: Optional[Mapping[str, Any]], seen: Mapping[str, Any], level: str
) -> checks.Check:
    trouble = _trouble(path, result, seen)
    evidence = _evidence(path, result, seen, None)
    if result and result["signal"] == ILLEGAL:
        return checks.make(
            "ext.ops:" + name,
            "unknown",
            "operators",
            trouble,
            level="advisory",
            evidence=evidence,
            hint="This processor cannot run the variant, and does not need it.",
        )
    hint = None
    if not trouble and result and not result["ops"]:
        trouble = "%s: it registers no operator" % os.path.basename(str(path))
    if trouble:
        cause = load_errors.classify(trouble)
        evidence["cause"], hint = cause.word, cause.remedy
    return checks.make(
        "ext.ops:" + name,
        "fail" if trouble else "pass",
        "operators",
        trouble or "%d operators" % (result or {}).get("ops", 0),
        level=level,
        evidence=evidence,
        hint=hint,
    )
