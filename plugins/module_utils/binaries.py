# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Are the compiled extensions all there, whole, and made for this host?  Read from files; nothing is loaded."""

from __future__ import annotations

import ast
import glob
import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import checks, elf, extensions, files, record

#: NVIDIA's libraries as distributions; the suffix is their CUDA major version.
CUDA_PACKAGE = re.compile(r"^nvidia-.*-cu(\d+)$")
#: A version's suffix for a toolkit that is not upstream's default: ``+cu129``, ``.cu132``.
CUDA_SUFFIX = re.compile(r"[+.]cu(\d{2})\d")
#: Come with the driver, not with an installation.
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
TOOLKITS = ("/usr/local/cuda",)


class Place(NamedTuple):
    """What stands around the extensions; the default is a folder of which nothing else is known."""

    sites: Sequence[str] = ()
    python: str = ""
    installed: Sequence[str] = ()
    torch_cuda: Optional[str] = None
    #: The package's version, whose suffix may name a toolkit.
    version: str = ""
    #: The toolkit that the build's manifest names.
    built_with: Optional[str] = None
    #: Compute capabilities of the host's GPUs; empty where there is no driver.
    gpus: Sequence[str] = ()
    toolkits: Sequence[str] = TOOLKITS
    #: The extensions will serve on this host (an installation), or are looked at only (a tree).
    serves_here: bool = True


def examine(
    package: str,
    compiled: Mapping[str, str],
    expected: Sequence[extensions.Expected],
    device: str,
    level: str,
    place: Optional[Place] = None,
    certain: bool = True,
) -> List[checks.Check]:
    """All file checks of the extensions.  ``certain`` is false where ``expected`` is guessed by a number."""
    place = place or Place()
    read = {name: elf.read(path) for name, path in compiled.items()}
    names = {name: os.path.relpath(path, os.path.dirname(package)) for name, path in compiled.items()}
    out = [_extensions(package, compiled, expected, level, certain), _whole(read, names, level)]
    whole = {name: item for name, item in read.items() if not item.problem}
    if compiled:
        places = _places(place)
        if place.serves_here:
            # Where an import can tell, it tells; without a driver the files have to.
            own = level if device == "cuda" and not place.gpus else "advisory"
            out.append(_needed(whole, compiled, names, places, own))
        out.append(_abi(whole, compiled, names, places, level if place.serves_here else "advisory"))
    if device != "cuda":
        return out + [checks.make("ext.cuda_major", "skip", level="advisory", evidence="no CUDA build")]
    out.append(_cuda_major(whole, names, place, level))
    if compiled:
        out.append(_architectures(compiled, whole, names, place, level))
    return out


def _extensions(
    package: str, compiled: Mapping[str, str], expected: Sequence[extensions.Expected], level: str, certain: bool
) -> checks.Check:
    wanted = [item.module for item in expected if item.required]
    missing = [name for name in wanted if name not in compiled]
    evidence = {
        "package": package,
        "absent_optional": [item.module for item in expected if not item.required and item.module not in compiled],
    }
    if not wanted:
        return checks.make(
            "complete.extensions",
            "unknown",
            None,
            sorted(compiled),
            level=level,
            evidence=evidence,
            hint="Neither manifest nor source nor release data say which extensions belong here.",
        )
    if missing and not certain:
        return checks.make(
            "complete.extensions",
            "unknown",
            wanted,
            "missing: %s" % ", ".join(missing),
            level=level,
            evidence=evidence,
            hint="The list is that of the release with the nearest number, and this is not that release: "
            "name the build's manifest, or keep setup.py beside the package.",
        )
    return checks.make(
        "complete.extensions",
        "fail" if missing else "pass",
        wanted,
        "missing: %s" % ", ".join(missing) if missing else sorted(compiled),
        level=level,
        evidence=evidence,
    )


def _whole(read: Mapping[str, elf.Elf], names: Mapping[str, str], level: str) -> checks.Check:
    broken = ["%s %s" % (names[name], item.problem) for name, item in read.items() if item.problem]
    return checks.make(
        "ext.elf",
        "fail" if broken else "pass",
        "whole files",
        "; ".join(broken) or "whole files",
        level=level,
        evidence={name: item.size for name, item in read.items()},
    )


def _places(place: Place) -> List[str]:
    """Where the loader looks after the library's own folders: packages that bring libraries, then the system."""
    out: List[str] = []
    for site in place.sites:
        out.append(os.path.join(site, "torch", "lib"))
        out += sorted(glob.glob(os.path.join(glob.escape(site), "nvidia", "*", "lib")))
        out += sorted(glob.glob(os.path.join(glob.escape(site), "*.libs")))
    if place.python:
        out.append(os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(place.python))), "lib"))
    return out + elf.system_folders()


def _needed(
    whole: Mapping[str, elf.Elf],
    compiled: Mapping[str, str],
    names: Mapping[str, str],
    places: Sequence[str],
    level: str,
) -> checks.Check:
    missing: Dict[str, List[str]] = {}
    for name, item in whole.items():
        own = elf.folders(compiled[name], item)
        for library in item.needed:
            if library not in DRIVER_LIBRARIES and not elf.find(library, [*own, *places]):
                missing.setdefault(library, []).append(names[name])
    said = "; ".join("%s for %s" % (library, ", ".join(users)) for library, users in sorted(missing.items()))
    return checks.make(
        "ext.needed",
        "fail" if missing else "pass",
        "all found",
        said or "all found",
        level=level,
        evidence={"searched": list(places)} if missing else None,
    )


def _abi(
    whole: Mapping[str, elf.Elf],
    compiled: Mapping[str, str],
    names: Mapping[str, str],
    places: Sequence[str],
    level: str,
) -> checks.Check:
    here: Dict[str, Dict[str, str]] = {}
    problems: List[str] = []
    unclear: List[str] = []
    newest: Dict[str, str] = {}
    for name, item in whole.items():
        wanted = elf.newest(version for asked in item.versions.values() for version in asked)
        own = elf.folders(compiled[name], item)
        for family, version in wanted.items():
            library = "libc.so.6" if family == "GLIBC" else "libstdc++.so.6"
            path = elf.find(library, [*own, *places])
            if path and path not in here:
                here[path] = elf.newest(elf.read(path).defines)
            found = here.get(path or "", {}).get(family)
            newest[family] = max(newest.get(family, ""), version, key=elf.number)
            if found is None:
                unclear.append("%s asks %s of %s, which does not tell" % (names[name], family, path or library))
            elif elf.number(found) < elf.number(version):
                problems.append("%s asks for %s_%s, %s has %s" % (names[name], family, version, path, found))
    status = "fail" if problems else "unknown" if unclear else "pass"
    return checks.make(
        "ext.abi",
        status,
        "symbol versions that this host has",
        "; ".join(problems or unclear) or newest,
        level=level,
        evidence={"newest": newest, "host": here},
    )


def _cuda_major(whole: Mapping[str, elf.Elf], names: Mapping[str, str], place: Place, level: str) -> checks.Check:
    """Everything that names a CUDA major version must name the same."""
    said: Dict[str, List[str]] = {}

    def note(major: str, who: str) -> None:
        said.setdefault(major, []).append(who)

    for name, item in whole.items():
        for major in elf.cuda_majors(item.needed):
            note(major, names[name])
    if place.torch_cuda:
        note(place.torch_cuda.split(".")[0], "torch")
    for name in sorted({record.normal_name(item) for item in place.installed}):
        match = CUDA_PACKAGE.match(name)
        if match:
            note(match.group(1), name)
    suffix = CUDA_SUFFIX.search(place.version)
    if suffix:
        note(suffix.group(1), "version %s" % place.version)
    if place.built_with:
        note(place.built_with.split(".")[0], "the build's toolkit")
    for folder in place.toolkits:
        version = toolkit_version(folder)
        if version and place.serves_here:
            note(version.split(".")[0], folder)
    status = "pass" if len(said) == 1 else "fail" if said else "unknown"
    # The odd ones out are named; the many need no names.
    order = sorted(said, key=lambda major: len(said[major]))
    actual: Any = list(said)
    if len(said) > 1:
        actual = "; ".join("CUDA %s: %s" % (major, ", ".join(said[major][:5])) for major in order)
    return checks.make("ext.cuda_major", status, "one CUDA major version", actual, level=level, evidence=said)


def toolkit_version(folder: str) -> Optional[str]:
    """The version of a CUDA toolkit by its own file, or None."""
    said = files.read_json(os.path.join(folder, "version.json"))
    value = (said.get("cuda") or {}).get("version") if isinstance(said, dict) else None
    return value if isinstance(value, str) else None


def _architectures(
    compiled: Mapping[str, str], whole: Mapping[str, elf.Elf], names: Mapping[str, str], place: Place, level: str
) -> checks.Check:
    """Each extension with GPU code must have code for every GPU of this host; without one it is only told."""
    found = {name: elf.architectures(compiled[name]) for name in whole}
    holding = {name: archs for name, archs in found.items() if archs}
    evidence = {"architectures": {names[name]: archs for name, archs in found.items()}, "gpus": list(place.gpus)}
    if not holding:
        return checks.make(
            "ext.arch",
            "unknown",
            None,
            None,
            level="advisory",
            evidence=evidence,
            hint="No extension tells which GPUs it was compiled for.",
        )
    told = sorted({arch for archs in holding.values() for arch in archs})
    if not place.gpus:
        return checks.make(
            "ext.arch",
            "unknown",
            "code for this host's GPUs",
            told,
            level="advisory",
            evidence=evidence,
            hint="There is no GPU here to compare with.",
        )
    lacking = [
        "%s holds no code for capability %s" % (names[name], gpu)
        for gpu in sorted(set(place.gpus))
        for name, archs in holding.items()
        if not runs_on(archs, gpu)
    ]
    # One kernel library for a newer generation (flash-attention 3) is no fault: some extension must fit each GPU.
    bare = [gpu for gpu in sorted(set(place.gpus)) if not any(runs_on(archs, gpu) for archs in holding.values())]
    return checks.make(
        "ext.arch",
        "fail" if bare else "pass",
        "code for capability %s" % ", ".join(sorted(set(place.gpus))),
        "; ".join(lacking) if bare else told,
        level=level,
        evidence=evidence,
    )


def runs_on(archs: Sequence[str], capability: str) -> bool:
    """Is there machine code of the same generation, or code that the driver compiles for this GPU?"""
    parts = elf.number(capability)
    wanted = parts[0] * 10 + (parts[1] if len(parts) > 1 else 0)
    for arch in archs:
        kind, _sep, text = arch.partition("_")
        value = int(text)
        if value <= wanted and (kind == "compute" or value // 10 == wanted // 10):
            return True
    return False


def torch_cuda(sites: Sequence[str]) -> Optional[str]:
    """The CUDA version that torch was built for, from its version file (not run); None for a CPU torch."""
    for site in sites:
        try:
            with open(os.path.join(site, "torch", "version.py"), encoding="utf-8") as handle:
                tree = ast.parse(handle.read())
        except (OSError, SyntaxError, ValueError):
            continue
        for stmt in tree.body:
            target: Any = None
            if isinstance(stmt, ast.AnnAssign):
                target = stmt.target
            elif isinstance(stmt, ast.Assign):
                target = stmt.targets[0]
            value = getattr(stmt, "value", None)
            if getattr(target, "id", "") == "cuda" and isinstance(value, ast.Constant):
                return str(value.value) if value.value else None
    return None
