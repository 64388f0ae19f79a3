# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From a wheel's own requirements to a lock with hashes, resolved once and then kept."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
import zipfile
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import sha256_file, short_hash, write_atomic

NAME = re.compile(r"^\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
LOCK_LINE = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$")
INDEX_LINE = "--extra-index-url "
#: Build requirements of a source tree, newest layout first.
BUILD_FILES = ("requirements/build/{device}.txt", "requirements/{device}-build.txt", "requirements/build.txt",
               "requirements-build.txt")


def normal_name(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(line: str) -> str:
    """The normal name of a requirement line, or an empty text."""
    match = NAME.match(line)
    return normal_name(match.group(1)) if match else ""


def metadata_of(wheel: str) -> Dict[str, List[str]]:
    """The header fields of the wheel's METADATA."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = next(name for name in archive.namelist() if re.match(r"^[^/]+\.dist-info/METADATA$", name))
            text = archive.read(path).decode("utf-8", "replace")
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise DflashError("The wheel cannot be read: %s" % error, wheel, "Build again.") from None
    fields: Dict[str, List[str]] = {}
    for line in re.sub(r"\n[ \t]+", " ", text.partition("\n\n")[0].replace("\r\n", "\n")).split("\n"):
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), []).append(value.strip())
    return fields


def wanted(requires: Iterable[str], exclude: Iterable[str], torch: str = "") -> Tuple[List[str], List[str]]:
    """``(lines to resolve, lines left out)``, both sorted.

    Left out: excluded names, and requirements that point to a URL, which no mirror, wheelhouse or
    index stands for.  Extras are not asked for.  ``torch`` replaces the wheel's own torch.
    """
    excluded = {normal_name(name) for name in exclude}
    keep, out = [], []
    for line in requires:
        marker = line.partition(";")[2]
        if re.search(r"\bextra\s*==", marker):
            continue
        name = name_of(line)
        if name in excluded or re.match(r"^[^;]*@\s*\S+://", line):
            out.append(line)
        elif not (name == "torch" and torch):
            keep.append(line)
    if torch:
        keep.append(torch)
    return sorted(set(keep)), sorted(set(out))


def build_requirements(tree: str, device: str, torch: str = "") -> List[str]:
    """What the source tree says its build needs for this device; its own torch unless ``torch`` is given."""
    lines: Optional[List[str]] = None
    for pattern in BUILD_FILES:
        path = os.path.join(tree, pattern.format(device=device))
        if os.path.exists(path):
            lines = read_requirements(path)
            break
    if lines is None:
        lines = pyproject_requires(os.path.join(tree, "pyproject.toml"))
    if torch:
        lines = [line for line in lines if name_of(line) != "torch"] + [torch]
    return sorted(set(lines))


def read_requirements(path: str, seen: Optional[Set[str]] = None) -> List[str]:
    """The requirement lines of a file and of those that it includes; options and comments are left out."""
    seen = set() if seen is None else seen
    real = os.path.realpath(path)
    if real in seen:
        return []
    seen.add(real)
    out: List[str] = []
    with open(path, encoding="utf-8") as handle:
        text = re.sub(r"\\\n", " ", handle.read())
    for raw in text.split("\n"):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        match = re.match(r"^(?:-r|--requirement)[ =]?(.+)$", line)
        if match:
            out += read_requirements(os.path.join(os.path.dirname(path), match.group(1).strip()), seen)
        elif line and not line.startswith("-"):
            out.append(line)
    return out


def pyproject_requires(path: str) -> List[str]:
    """``build-system.requires`` of a pyproject.toml, read without a TOML library (Python 3.9 and 3.10 have none)."""
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
    except OSError:
        raise DflashError("The source tree says nowhere what its build needs", path) from None
    section = re.search(r"^\[build-system\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = section.group(1) if section else ""
    listed = re.search(r"^requires\s*=\s*\[(.*?)\]\s*$", found, re.MULTILINE | re.DOTALL)
    if not listed:
        raise DflashError("The source tree says nowhere what its build needs", path)
    body = re.sub(r"^\s*#.*$", "", listed.group(1), flags=re.MULTILINE)
    return [match[0] or match[1] for match in re.findall(r'"([^"]*)"|\'([^\']*)\'', body)]


def index_options(urls: Sequence[str]) -> List[str]:
    """Extra indexes as arguments of pip."""
    for url in urls:
        if re.match(r"^[a-z+]+://[^/@]*:[^/@]*@", url):
            raise DflashError(
                "The URL of an index holds a password", "vllm_release_extra_index_urls", "Put it into ~/.netrc.",
            )
    return [word for url in urls for word in ("--extra-index-url", url)]


def digest_of(item: Mapping[str, Any]) -> str:
    """Hex SHA-256 of one entry of pip's report."""
    info = item.get("download_info", {})
    archive = info.get("archive_info", {})
    digest = archive.get("hashes", {}).get("sha256", "")
    if not digest and str(archive.get("hash", "")).startswith("sha256="):
        digest = archive["hash"][len("sha256="):]
    url = urllib.parse.urlsplit(str(info.get("url", "")))
    if not digest and url.scheme == "file":
        digest = sha256_file(urllib.parse.unquote(url.path))
    return str(digest)


def lock_text(report: Mapping[str, Any], urls: Sequence[str] = (), exclude: Iterable[str] = ()) -> str:
    """The lock: ``name==version --hash=sha256:...`` a line, sorted; extra indexes first.

    Excluded names stay out also where another package asks for them.
    """
    lines = []
    excluded = {normal_name(name) for name in exclude}
    for item in report.get("install", []):
        fields = item["metadata"]
        if normal_name(fields["name"]) in excluded:
            continue
        digest = digest_of(item)
        if not re.match(r"^[0-9a-f]{64}$", digest):
            raise DflashError(
                "The index gives no SHA-256 for %s %s" % (fields["name"], fields["version"]), None,
                "Use an index that states hashes, or a folder of wheels (pip's find-links).",
            )
        lines.append("%s==%s --hash=sha256:%s" % (normal_name(fields["name"]), fields["version"], digest))
    return "\n".join([INDEX_LINE + url for url in urls] + sorted(lines)) + "\n"


def parse_lock(text: str) -> List[Dict[str, str]]:
    """``[{name, version, sha256}]`` of a lock.  Raises DflashError for a line that is none."""
    out = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#") or line.startswith(INDEX_LINE):
            continue
        match = LOCK_LINE.match(line)
        if not match:
            raise DflashError("The requirements lock has a line without hash: %r" % line[:80], "requirements.lock")
        out.append({"name": match.group(1), "version": match.group(2), "sha256": match.group(3)})
    return out


def resolve(run: Any, pip: Sequence[str], python: str, lines: Sequence[str], urls: Sequence[str], work: str,
            exclude: Iterable[str] = ()) -> str:
    """Ask pip, without installing, which files satisfy ``lines`` for ``python``; gives the lock's text."""
    given, report = os.path.join(work, "requirements.in"), os.path.join(work, "report.json")
    write_atomic(given, "\n".join(lines) + "\n")
    run([*pip, "--python", python, "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:",
         "--report", report, *index_options(urls), "--requirement", given])
    with open(report, encoding="utf-8") as handle:
        return lock_text(json.load(handle), urls, exclude)


def cache_key(lines: Sequence[str], urls: Sequence[str], python: str, platform: str, exclude: Iterable[str]) -> str:
    """Hash of all that a resolution depends on by itself: with equal inputs the lock is not made again."""
    return short_hash({"lines": list(lines), "urls": list(urls), "python": python, "platform": platform,
                       "exclude": sorted(normal_name(name) for name in exclude)})
