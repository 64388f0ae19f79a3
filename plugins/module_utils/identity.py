# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a vLLM says that it is: version, commit, origin; and whether that is what was built."""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import checks, files, record

#: The commit in a version: ``0.1.dev16016+g3cfc8f8b7``.
HASH = re.compile(r"[+.]g([0-9a-f]{7,40})(?=[.+]|$)")
#: What setuptools-scm says where it finds no tag: it counts all commits from the first.
NO_TAG = re.compile(r"^0\.(?:0|1)(?:\.0)?\.dev(\d+)")
RELEASE = re.compile(r"^\d+\.\d+\.\d+(?:\.post\d+)?$")
#: Shorter ones name too many commits.
SHORTEST = 7

#: One sentence for each way in which names of a build disagree, and for each oddity that is none.
WHY: Dict[str, str] = {
    # disagreements
    "dirty": "The version carries a date: the tree had uncommitted changes when it was built, so no commit "
    "names what was built. Commit them, or put them in vllm_source_series, and build again.",
    "version_and_commit_id": "The version names one commit and vllm/_version.py another: the files of two builds are "
    "mixed. Install one wheel anew.",
    "origin_and_commit_id": "The installer asked for one commit and the build inside is of another: an older wheel "
    "from a cache answered. Install again without cache.",
    "head_moved": "The clone stands at another commit than the one that vllm/_version.py was written at: the tree "
    "moved on after its last build. Build again, or read the tree at that commit.",
    "same_number": "The version's number is the expected one and the commit is not: two builds share a number, "
    "as a wheel with a build tag does. Only the commit tells them apart.",
    "other_commit": "What is installed was built from another commit than the pin with its series: build again.",
    "no_commit": "This build records no commit: its version is a plain number, as at a tag without git or with a "
    "pretended version. Only the hash of its wheel names it.",
    "given_hash": "The version names a commit and the tool that wrote vllm/_version.py knew none: the version was "
    "given (SETUPTOOLS_SCM_PRETEND_VERSION), not computed, and proves nothing.",
    "mixed": "The metadata and vllm/_version.py state versions that cannot come from one build: one installation was "
    "laid over another. Install one wheel anew.",
    "no_version_file": "There is no readable vllm/_version.py: the package is not one that was built, "
    "or not all of it.",
    "pretend": "The build computed a version with a commit, the installation states a plain number: it was given "
    "(SETUPTOOLS_SCM_PRETEND_VERSION), not computed. Build again without it.",
    "suffix": "The same source, built for another device or toolkit: the suffix differs. Install the wheel of "
    "this build.",
    "other_build": "The installed version is not the one that the build recorded: another build is installed.",
    # oddities that are right
    "suffix_in_metadata": "The suffix stands in the metadata only, because it is added after vllm/_version.py is "
    "written.",
    "no_tags": "The number counts all commits because the clone had no tags; it says nothing about age, only the "
    "commit does.",
    "foreign_tag": "A tag of the fork stood nearer than the release that the source comes from: the number is the "
    "fork's, only the commit says what this is.",
    "by_wheel": "The version names no commit; the wheel's hash is the one that the build of the commit recorded.",
}

DIRTY = re.compile(r"[+.]d\d{8}$|[+.]d\d{8}\.")
HEX40 = re.compile(r"^[0-9a-f]{40}$")


def package_version(package: str) -> Dict[str, Any]:
    """``{version, commit_id, commit_unset}`` from ``_version.py``, read from its syntax tree; None where not said.

    ``commit_unset``: the file has the field and the tool that wrote it knew no commit.
    """
    found: Dict[str, Any] = {"version": None, "commit_id": None, "commit_unset": False}
    try:
        with open(os.path.join(package, "_version.py"), encoding="utf-8") as handle:
            tree = ast.parse(handle.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for stmt in tree.body:
        if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Constant):
            continue
        names = [getattr(target, "id", "") for target in stmt.targets]
        value = stmt.value.value
        if isinstance(value, str):
            found.update((name, value) for name in names if name in ("version", "commit_id"))
        elif value is None and "commit_id" in names:
            found["commit_unset"] = True
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
        "commit_unset": said["commit_unset"],
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
        "commit_unset": said["commit_unset"],
        "head": None,
        "direct_url": origin if isinstance(origin, dict) else None,
        "build_tag": build_tag(site, found.folder) if found else None,
    }


def build_tag(site: str, folder: str) -> Optional[str]:
    """The build tag of the wheel that was installed (``vllm-0.32.0-1-...whl``), or None."""
    try:
        with open(os.path.join(site, folder, "WHEEL"), encoding="utf-8", errors="replace") as handle:
            return next((line.partition(":")[2].strip() for line in handle if line.startswith("Build:")), None)
    except OSError:
        return None


def judge(
    identity: Mapping[str, Any],
    manifest: Optional[Mapping[str, Any]] = None,
    release: Optional[Mapping[str, Any]] = None,
    level: str = "required",
) -> List[checks.Check]:
    """The identity checks.  ``manifest`` is the build's, ``release`` the release's; without them it only tells."""
    by_wheel = bool(release and release.get("wheel_sha256")) and (
        ((manifest or {}).get("wheel") or {}).get("sha256") == (release or {}).get("wheel_sha256")
    )
    out = [_commit(identity, manifest, by_wheel, level), _version(identity, manifest, level)]
    if release is not None:
        out.append(_wheel(manifest, release, level))
    return out


def named_commits(identity: Mapping[str, Any]) -> Dict[str, str]:
    """What each place says that the commit is: ``{"version": ..., "direct_url.json": ...}``."""
    said = str(identity["commit_id"] or "")
    found = HASH.search(str(identity["version"] or identity["package_version"] or ""))
    vcs = (identity["direct_url"] or {}).get("vcs_info")
    origin = vcs.get("commit_id") if isinstance(vcs, dict) else None
    names = {
        "vllm/_version.py": said[1:] if said.startswith("g") else said,
        "version": found.group(1) if found else "",
        "direct_url.json": str(origin or ""),
    }
    return {place: text for place, text in names.items() if re.match(r"^[0-9a-f]{%d,64}$" % SHORTEST, text)}


def _alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _commit(
    identity: Mapping[str, Any], manifest: Optional[Mapping[str, Any]], by_wheel: bool, level: str
) -> checks.Check:
    version = str(identity["version"] or identity["package_version"] or "")
    names = named_commits(identity)
    expected = (manifest or {}).get("commit") or identity["head"]
    evidence: Dict[str, Any] = {
        "commit_id": identity["commit_id"],
        "head": identity["head"],
        "version": version,
        "direct_url": identity["direct_url"],
        "named": names,
    }
    if identity.get("build_tag"):
        evidence["build_tag"] = identity["build_tag"]

    def say(status: str, actual: Any, word: str = "", own: str = level) -> checks.Check:
        if word:
            evidence["because"] = word
        return checks.make(
            "identity.commit",
            status,
            expected,
            actual,
            level=own,
            evidence=evidence,
            hint=WHY[word] if word and status != "pass" else None,
        )

    if DIRTY.search(version):
        return say("fail", "%s: the tree had uncommitted changes" % version, "dirty")
    inside = names.get("vllm/_version.py") or names.get("version")
    if not _alike(names.get("vllm/_version.py", ""), names.get("version", "")):
        return say("fail", _told(names, "version", "vllm/_version.py"), "version_and_commit_id")
    if not _alike(names.get("direct_url.json", ""), inside or ""):
        return say("fail", _told(names, "direct_url.json", "vllm/_version.py", "version"), "origin_and_commit_id")
    actual = max(names.values(), key=len, default="")
    if not actual and identity["head"] and identity["kind"] == "tree" and not identity["package_version"]:
        actual = str(identity["head"])  # a clone that was never built
    if list(names) == ["version"] and identity.get("commit_unset") and not by_wheel:
        disagrees = expected and not _alike(str(expected), actual)
        return say("fail" if disagrees else "unknown", actual, "given_hash")
    if not actual:
        return say("pass", expected, "by_wheel") if by_wheel and expected else say("unknown", None, "no_commit")
    if not expected:
        return say("pass", actual, own="advisory")
    if _alike(str(expected), actual):
        return say("pass", actual)
    word = "other_commit"
    if not (manifest or {}).get("commit"):
        word = "head_moved"
    elif version and version in ((manifest or {}).get("version"), (manifest or {}).get("package_version")):
        word = "same_number"
    return say("fail", actual, word)


def _told(names: Mapping[str, str], *places: str) -> str:
    return ", ".join("%s says %s" % (place, names[place]) for place in places if place in names)


def _version(identity: Mapping[str, Any], manifest: Optional[Mapping[str, Any]], level: str) -> checks.Check:
    """``_version.py`` is written before the suffix of the device is added: metadata may be longer, never other."""
    package, metadata = identity["package_version"], identity["version"]
    evidence: Dict[str, Any] = {"package": package, "metadata": metadata}

    def say(status: str, expected: Any, actual: Any, word: str = "") -> checks.Check:
        if word:
            evidence["because"] = word
        hint = WHY[word] if word else None
        return checks.make("identity.version", status, expected, actual, level=level, evidence=evidence, hint=hint)

    if package is None and identity["kind"] == "tree":
        return checks.make("identity.version", "skip", level="advisory", evidence="a source tree that was never built")
    if package is None:
        return say("fail", "a version in vllm/_version.py", None, "no_version_file")
    if metadata is not None and not _longer(metadata, package):
        return say("fail", metadata, package, "mixed")
    for key, value in (("version", metadata), ("package_version", package)):
        wanted = (manifest or {}).get(key)
        if wanted and value is not None and wanted != value:
            return say("fail", wanted, value, _difference(str(wanted), str(value)))
    told = _oddities(package, metadata, manifest)
    if told:
        evidence["told"] = {word: WHY[word] for word in told}
    return say("pass", (manifest or {}).get("version"), metadata or package)


def _difference(wanted: str, found: str) -> str:
    """Why an installed version is not the recorded one."""
    if HASH.search(wanted) and RELEASE.match(found.partition("+")[0]) and not HASH.search(found):
        return "pretend"
    return "suffix" if _stem(wanted) == _stem(found) else "other_build"


def _stem(version: str) -> str:
    """A version without what names a device or toolkit."""
    return re.sub(r"[+.](cpu|cu\d+|rocm\d*|precompiled|empty)(?=[.+]|$)", "", version)


def _oddities(package: str, metadata: Optional[str], manifest: Optional[Mapping[str, Any]]) -> List[str]:
    out = []
    if metadata is not None and metadata != package:
        out.append("suffix_in_metadata")
    if NO_TAG.match(package):
        return out + ["no_tags"]
    nearest = str(((manifest or {}).get("nearest") or {}).get("nearest") or "")
    base, ours = (tuple(int(part) for part in re.findall(r"\d+", text)[:3]) for text in (nearest, package))
    if len(base) == 3 and ours != base and ours != base[:2] + (base[2] + 1,):
        out.append("foreign_tag")
    return out


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
