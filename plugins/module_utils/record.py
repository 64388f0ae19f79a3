# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What an installation says about its own files, and whether the files still say the same.

Two depths: ``RECORD`` (every distribution, hashes, slow) and the stat table (sizes, times and inodes
of everything, hashes of vLLM's own files, fast).  Files below ``__pycache__`` are left out of both:
an interpreter may write them after the installation.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

CHUNK = 1 << 20
CACHE = "__pycache__"
#: Folders and files that pip leaves when it was interrupted, or that mark a bare venv.
LEFTOVER = "~"
#: How many paths a finding names before it only counts.
SHOWN = 20
SIZE = re.compile(r"^[0-9]{1,18}\Z")
VLLM_DISTRIBUTION = re.compile(r"^vllm(_cpu)?-[^/]+\.(dist|egg)-info$")


class Distribution(NamedTuple):
    """One ``*.dist-info`` folder of a site-packages folder."""

    name: str
    version: str
    folder: str


class Entry(NamedTuple):
    """One line of ``RECORD``; ``digest`` is hex SHA-256, or empty where the line has none."""

    path: str
    digest: str
    size: Optional[int]


def normal_name(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(root: str) -> Optional[str]:
    """The site-packages folder of a layer, release or venv folder, or None."""
    for base in (os.path.join(root, "venv"), root):
        lib = os.path.join(base, "lib")
        for name in sorted(os.listdir(lib)) if os.path.isdir(lib) else []:
            site = os.path.join(lib, name, "site-packages")
            if name.startswith("python") and os.path.isdir(site):
                return site
    return None


def distributions(site: str) -> List[Distribution]:
    """All distributions whose metadata lies in ``site``, by name.

    A ``dist-info`` folder without readable METADATA is listed with its folder's name and an empty version.
    """
    found = []
    for folder in sorted(os.listdir(site)) if os.path.isdir(site) else []:
        if not folder.endswith(".dist-info"):
            continue
        fields = metadata(site, folder)
        name = fields.get("Name", [folder.split("-", 1)[0]])[0]
        found.append(Distribution(name, fields.get("Version", [""])[0], folder))
    return found


def metadata(site: str, folder: str) -> Dict[str, List[str]]:
    """The header fields of a distribution's METADATA; empty where it is absent."""
    fields: Dict[str, List[str]] = {}
    try:
        with open(os.path.join(site, folder, "METADATA"), encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if not line.strip():
                    break
                key, sep, value = line.partition(":")
                if sep and not line[0].isspace():
                    fields.setdefault(key, []).append(value.strip())
    except OSError:
        pass
    return fields


def entries(site: str, folder: str) -> Optional[List[Entry]]:
    """The lines of a distribution's RECORD, or None where there is no RECORD."""
    out = []
    try:
        with open(os.path.join(site, folder, "RECORD"), encoding="utf-8", newline="") as handle:
            for row in csv.reader(handle):
                if not row:
                    continue
                path, digest, size = (row + ["", ""])[:3]
                out.append(Entry(path, _hex(digest), int(size) if SIZE.match(size) else None))
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    return out


def paths_below(site: str, folder: str, prefix: str) -> List[str]:
    """Paths of RECORD that begin with ``prefix``; the lines of other packages cost next to nothing."""
    try:
        with open(os.path.join(site, folder, "RECORD"), encoding="utf-8", newline="") as handle:
            text = handle.read()
    except (OSError, UnicodeDecodeError):
        return []
    if prefix not in text:
        return []
    lines = (line for line in text.splitlines() if prefix in line)
    out = []
    try:
        for row in csv.reader(lines):
            if row and os.path.normpath(row[0]).startswith(prefix):
                out.append(os.path.normpath(row[0]))
    except csv.Error:
        pass
    return out


def _hex(field: str) -> str:
    """Hex of a RECORD hash field (``sha256=`` and URL-safe base64 without padding); empty for others."""
    algorithm, _sep, text = field.partition("=")
    if algorithm != "sha256" or not text:
        return ""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except ValueError:
        return ""


def digest_file(path: str) -> str:
    """Hex SHA-256 of a file; the lock of the interpreter is free while it works.  Raises ``OSError``."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as handle:
        while True:
            count = handle.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])


def hash_files(root: str, paths: Iterable[str], workers: int = 0) -> Dict[str, str]:
    """Hex SHA-256 of files below ``root``, in threads; the largest files first.  Unreadable ones are left out."""

    def size(path: str) -> int:
        try:
            return os.stat(os.path.join(root, path)).st_size
        except (OSError, ValueError):
            return -1

    def one(path: str) -> Tuple[str, str]:
        try:
            return path, digest_file(os.path.join(root, path))
        except (OSError, ValueError):
            return path, ""

    ordered = sorted(paths, key=size, reverse=True)
    with ThreadPoolExecutor(max_workers=workers or min(8, os.cpu_count() or 1)) as pool:
        return {path: digest for path, digest in pool.map(one, ordered) if digest}


def verify(site: str, folder: str, workers: int = 0) -> Optional[List[Dict[str, str]]]:
    """What differs from RECORD: ``[{path, problem}]``, sizes before hashes; None where there is no RECORD.

    A file whose size differs is not read: the size says enough.
    """
    listed = entries(site, folder)
    if listed is None:
        return None
    wrong: List[Dict[str, str]] = []
    to_hash: Dict[str, str] = {}
    for entry in listed:
        if not entry.digest or CACHE in entry.path.split("/"):
            continue
        try:
            size = os.stat(os.path.join(site, entry.path)).st_size
        except (OSError, ValueError):  # a path with a zero byte names nothing
            wrong.append({"path": entry.path, "problem": "missing"})
            continue
        if entry.size is not None and size != entry.size:
            said = "%d bytes" % size if size else "empty"
            wrong.append({"path": entry.path, "problem": "%s, recorded %d" % (said, entry.size)})
        else:
            to_hash[entry.path] = entry.digest
    for path, digest in hash_files(site, to_hash, workers).items():
        if digest != to_hash.pop(path):
            wrong.append({"path": path, "problem": "another content"})
    wrong.extend({"path": path, "problem": "unreadable"} for path in to_hash)
    return sorted(wrong, key=lambda item: item["path"])


def verify_site(site: str, workers: int = 0) -> Dict[str, Any]:
    """``verify`` of every distribution in a site-packages folder: ``{ok, distributions, files, problems}``.

    ``problems`` is ``[{distribution, path, problem}]``; a distribution without RECORD is a problem.
    """
    problems: List[Dict[str, str]] = []
    files = 0
    found = distributions(site)
    for item in found:
        wrong = verify(site, item.folder, workers)
        if wrong is None:
            wrong = [{"path": item.folder + "/RECORD", "problem": "missing"}]
        files += len(entries(site, item.folder) or [])
        problems.extend(dict(entry, distribution=item.name) for entry in wrong)
    return {"ok": not problems, "distributions": len(found), "files": files, "problems": problems}


def unknown_files(site: str, package: str, folders: Iterable[str]) -> List[str]:
    """Importable files below ``site/package`` that no RECORD of ``folders`` names."""
    known: Set[str] = set()
    for folder in folders:
        known.update(os.path.normpath(entry.path) for entry in entries(site, folder) or [])
    suffixes = (".py", ".so", ".pyd", ".pth", ".pyc")
    return [path for path in _walk(site, package) if path.endswith(suffixes) and path not in known]


def leftovers(site: str) -> List[str]:
    """Names that an interrupted pip leaves in a site-packages folder (``~llm``, ``~llm-0.1.dist-info``)."""
    return sorted(name for name in os.listdir(site) if name.startswith(LEFTOVER)) if os.path.isdir(site) else []


def _walk(root: str, below: str = "") -> Iterator[str]:
    """Relative paths of files and links below ``root/below``, without ``__pycache__``."""
    stack = [below]
    while stack:
        folder = stack.pop()
        try:
            listing = list(os.scandir(os.path.join(root, folder)))
        except OSError:
            continue
        for item in listing:
            path = os.path.join(folder, item.name) if folder else item.name
            if item.is_dir(follow_symlinks=False):
                if item.name != CACHE:
                    stack.append(path)
            else:
                yield path


def stat_table(root: str) -> Dict[str, List[int]]:
    """``{path: [size, mtime_ns, inode]}`` of every file below ``root/venv`` (or ``root`` where there is no venv).

    Paths are relative to ``root``.  A symbolic link counts as itself, never as what it points to.
    """
    table = {}
    for path in _walk(root, "venv" if os.path.isdir(os.path.join(root, "venv")) else ""):
        try:
            info = os.lstat(os.path.join(root, path))
        except OSError:
            continue
        table[path] = [info.st_size, info.st_mtime_ns, info.st_ino]
    return table


def hash_vllm(root: str, workers: int = 0) -> Dict[str, str]:
    """``{path: sha256}`` of the files of vLLM's package and metadata in a release, layer or venv folder.

    Paths are relative to ``root``.  Empty where no vLLM lies there.
    """
    site = site_packages(root)
    if site is None:
        return {}
    prefix = os.path.relpath(site, root)
    paths: List[str] = []
    for name in sorted(os.listdir(site)):
        if name == "vllm" or VLLM_DISTRIBUTION.match(name):
            paths.extend(_walk(root, os.path.join(prefix, name)))
    return hash_files(root, paths, workers)


def compare_stat(root: str, stat: Mapping[str, Any], hashes: bool = True) -> Dict[str, Any]:
    """Compare a folder with its ``stat.json``: ``{ok, missing, changed, extra, rehashed}``, lists of paths.

    ``hashes``: also hash vLLM's own files where ``stat`` has hashes of them (a flipped byte whose time
    was put back passes the stat table).  ``rehashed`` holds the paths whose content differs.
    """
    recorded = stat.get("files") or {}
    found = stat_table(root) if recorded else {}
    missing = sorted(path for path in recorded if path not in found)
    extra = sorted(path for path in found if path not in recorded)
    changed = sorted(path for path, value in recorded.items() if path in found and list(value) != found[path])
    rehashed: List[str] = []
    if hashes and stat.get("vllm"):
        now = hash_vllm(root)
        wanted = stat["vllm"]
        rehashed = sorted(path for path in set(wanted) | set(now) if wanted.get(path) != now.get(path))
    return {
        "ok": bool(recorded or stat.get("vllm")) and not (missing or extra or changed or rehashed),
        "missing": missing,
        "changed": changed,
        "extra": extra,
        "rehashed": rehashed,
    }


def make_stat(root: str, vllm: bool) -> Dict[str, Any]:
    """What ``stat.json`` of a layer (``vllm`` false) or of a release holds."""
    stat: Dict[str, Any] = {"files": stat_table(root)}
    if vllm:
        stat["vllm"] = hash_vllm(root)
    return stat
