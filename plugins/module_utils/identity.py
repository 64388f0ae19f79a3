# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a vLLM says that it is: version, commit, origin; and whether that is what was built."""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import checks, files, record

DIRTY = re.compile(r"[+.]d\d{8}$|[+.]d\d{8}\.")
HEX40 = re.compile(r"^[0-9a-f]{40}$")


def package_version(package: str) -> Dict[str, Optional[str]]:
    """``{version, commit_id}`` from ``_version.py``, read from its syntax tree; None where not said."""
    found: Dict[str, Optional[str]] = {"version": None, "commit_id": None}
    try:
        with open(os.path.join(package, "_version.py"), encoding="utf-8") as handle:
            tree = ast.parse(handle.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return found
    for stmt in tree.body:
        if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str):
            for target in stmt.targets:
                if getattr(target, "id", "") in found:
                    found[getattr(target, "id", "")] = stmt.value.value
    return found


def git_head(folder: str) -> Optional[str]:
    """The commit that a clone's HEAD names, read from its files (git refuses folders of other owners); or None."""
    git = os.path.join(folder, ".git")
    head = _line(os.path.join(git, "HEAD"))
    if head is None or HEX40.match(head):
        return head
    ref = head.partition("ref: ")[2]
    direct = _line(os.path.join(git, ref)) if ref else None
    if direct:
        return direct
    try:
        with open(os.path.join(git, "packed-refs"), encoding="utf-8") as handle:
            for line in handle:
                if line.rstrip("\n").endswith(" " + ref):
                    return line.split(" ", 1)[0]
    except OSError:
        pass
    return None


def _line(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.readline().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def of_tree(tree: str) -> Dict[str, Any]:
    """Identity of a folder that holds ``vllm/``."""
    said = package_version(os.path.join(tree, "vllm"))
    return {
        "kind": "tree",
        "path": tree,
        "distribution": None,
        "version": None,
        "package_version": said["version"],
        "commit_id": said["commit_id"],
        "head": git_head(tree),
        "direct_url": None,
    }


def of_site(site: str, found: Optional[record.Distribution]) -> Dict[str, Any]:
    """Identity of the vLLM that is installed in a site-packages folder."""
    said = package_version(os.path.join(site, "vllm"))
    origin = files.read_json(os.path.join(site, found.folder, "direct_url.json")) if found else None
    return {
        "kind": "installed",
        "path": site,
        "distribution": found.name if found else None,
        "version": found.version if found else None,
        "package_version": said["version"],
        "commit_id": said["commit_id"],
        "head": None,
        "direct_url": origin,
    }


def judge(
    identity: Mapping[str, Any],
    manifest: Optional[Mapping[str, Any]] = None,
    release: Optional[Mapping[str, Any]] = None,
    level: str = "required",
) -> List[checks.Check]:
    """The identity checks.  ``manifest`` is the build's, ``release`` the release's; without them it only tells."""
    out = [_commit(identity, manifest, level), _version(identity, manifest, level)]
    if release is not None:
        out.append(_wheel(manifest, release, level))
    return out


def _commit(identity: Mapping[str, Any], manifest: Optional[Mapping[str, Any]], level: str) -> checks.Check:
    said = identity["commit_id"] or ""
    short = said[1:] if said.startswith("g") else said
    version = identity["version"] or identity["package_version"] or ""
    evidence = {
        "commit_id": identity["commit_id"],
        "head": identity["head"],
        "version": version,
        "direct_url": identity["direct_url"],
    }
    expected = (manifest or {}).get("commit") or identity["head"]
    if DIRTY.search(version):
        return checks.make(
            "identity.commit",
            "fail",
            expected or "a clean tree",
            "%s: the tree had uncommitted changes" % version,
            level=level,
            evidence=evidence,
        )
    origin = ((identity["direct_url"] or {}).get("vcs_info") or {}).get("commit_id")
    if not short and not origin and identity["head"] and identity["kind"] == "tree":
        short = str(identity["head"])  # a clone that was never built
    if not short and not origin:
        return checks.make(
            "identity.commit",
            "unknown",
            expected,
            None,
            level=level,
            evidence=evidence,
            hint="This build records no commit; only the hash of its wheel names it.",
        )
    actual = origin or short
    if not expected:
        return checks.make("identity.commit", "pass", None, actual, level="advisory", evidence=evidence)
    agrees = all(str(expected).startswith(part) for part in (short, origin) if part)
    return checks.make(
        "identity.commit", "pass" if agrees else "fail", expected, actual, level=level, evidence=evidence
    )


def _version(identity: Mapping[str, Any], manifest: Optional[Mapping[str, Any]], level: str) -> checks.Check:
    """``_version.py`` is written before the suffix of the device is added: metadata may be longer, never other."""
    package, metadata = identity["package_version"], identity["version"]
    evidence = {"package": package, "metadata": metadata}
    if package is None and identity["kind"] == "tree":
        return checks.make("identity.version", "skip", level="advisory", evidence="a source tree that was never built")
    if package is None:
        return checks.make(
            "identity.version", "fail", "a version in vllm/_version.py", None, level=level, evidence=evidence
        )
    if metadata is not None and not _longer(metadata, package):
        return checks.make("identity.version", "fail", metadata, package, level=level, evidence=evidence)
    for key, value in (("version", metadata), ("package_version", package)):
        wanted = (manifest or {}).get(key)
        if wanted and value is not None and wanted != value:
            return checks.make("identity.version", "fail", wanted, value, level=level, evidence=evidence)
    return checks.make(
        "identity.version", "pass", (manifest or {}).get("version"), metadata or package, level=level, evidence=evidence
    )


def _longer(metadata: str, package: str) -> bool:
    return metadata == package or metadata.startswith((package + "+", package + "."))


def _wheel(manifest: Optional[Mapping[str, Any]], release: Mapping[str, Any], level: str) -> checks.Check:
    expected = ((manifest or {}).get("wheel") or {}).get("sha256")
    actual = release.get("wheel_sha256")
    if not expected:
        return checks.make(
            "identity.wheel", "skip", None, actual, level="advisory", evidence="no build manifest to compare with"
        )
    return checks.make(
        "identity.wheel",
        "pass" if expected == actual else "fail",
        expected,
        actual,
        level=level,
        evidence={"release_id": release.get("release_id")},
    )
