# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The deciding files of real vLLM releases, cut out of their archives on the package index and kept in a cache.

Nothing of vLLM is kept in this repository.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible_collections.dflash.fleet.plugins.module_utils import symbols
from ansible_collections.dflash.fleet.plugins.module_utils.places import FILE_KEYS

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO / "demo"))

_DATA: dict[str, Any] = json.loads((Path(__file__).parent / "releases.json").read_text(encoding="utf-8"))
#: Every release from 0.20.0 to the newest on the package index, with the hash of its archive; archives that differ
#: only by a build tag are left out.
RELEASES: dict[str, str] = _DATA["releases"]
#: Per check, what is expected since which release, and why; written before the probes ran.
EXPECTED: dict[str, list[dict[str, str]]] = _DATA["expected"]
#: What the releases' real functions answered when they were imported with torch for CPU; see ``measure.py``.
MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))
#: The demo's release: its archive is on this machine wherever the demo ran.
DEMO = "0.32.0"
#: Folders that are taken whole: a probe may look for what moved inside them.
FOLDERS = ("vllm/v1/spec_decode/", "vllm/v1/worker/gpu/")


def key(version: str) -> tuple[int, ...]:
    """A release's number, to be compared."""
    return tuple(int(part) for part in version.split("."))


def expected(version: str) -> dict[str, dict[str, str]]:
    """What is expected of a release: ``{check: {since, status, why}}``."""
    found = {}
    for check, steps in EXPECTED.items():
        found[check] = [step for step in steps if key(step["since"]) <= key(version)][-1]
    return found


def wanted() -> set[str]:
    """Paths inside a source tree that the probes read."""
    paths = {"setup.py", "vllm/__init__.py", "vllm/_version.py", "vllm/platforms/cpu.py"}
    paths.update("vllm/" + place["file"] for place in (symbols.SPECULATORS, symbols.GUARD))
    for places in symbols.SYMBOLS.values():
        for place in places:
            files = [place.get(name) for name in FILE_KEYS] + list(place.get("helpers", []))
            files += [place[name]["file"] for name in ("v1", "v2") if name in place]
            paths.update("vllm/" + path for path in files if path)
    return paths


def _is_wanted(path: str, paths: set[str]) -> bool:
    return path in paths or (path.endswith(".py") and path.startswith(FOLDERS))


def tree(version: str) -> Path:
    """The folder with the deciding files of a release; fetched once, its archive checked by hash."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash" / "trees"
    folder = base / ("%s-%s" % (version, RELEASES[version][:12]))
    stamp = folder / "paths.json"
    listed = sorted([*wanted(), *FOLDERS])
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == listed:
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        cut = Path(scratch) / "tree"
        for path, data in _from_demo(version) or _from_index(version, Path(scratch)):
            (cut / path).parent.mkdir(parents=True, exist_ok=True)
            (cut / path).write_bytes(data)
        (cut / "paths.json").write_text(json.dumps(listed), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        cut.rename(folder)
    return folder


def _members(stream: Any, outer: bool) -> list[tuple[str, bytes]]:
    paths, found = wanted(), []
    with tarfile.open(fileobj=stream) as tar:
        for member in tar:
            path = member.name.partition("/")[2] if outer else member.name
            data = tar.extractfile(member) if member.isfile() and _is_wanted(path, paths) else None
            if data is not None:
                found.append((path, data.read()))
    return found


def _from_demo(version: str) -> list[tuple[str, bytes]]:
    """The files out of the repository that the demo made from the same archive, where there is one."""
    repository = os.environ.get("DFLASH_DEMO_REPOSITORY")
    if version != DEMO or not repository:
        return []
    packed = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", repository, "archive", "v" + version], capture_output=True, check=False
    )
    return _members(io.BytesIO(packed.stdout), outer=False) if packed.returncode == 0 else []


def _from_index(version: str, folder: Path) -> list[tuple[str, bytes]]:
    """The files out of the release's source archive, from the indexes that pip is configured with."""
    archive = Path(os.environ.get("DFLASH_ARCHIVES") or folder) / ("vllm-%s.tar.gz" % version)
    if not archive.is_file() or hashlib.sha256(archive.read_bytes()).hexdigest() != RELEASES[version]:
        archive = fetch(version, folder)
    with archive.open("rb") as stream:
        return _members(stream, outer=True)


def fetch(version: str, folder: Path) -> Path:
    """The release's source archive, its hash checked."""
    import source  # the demo's command knows how

    source.VERSION, source.ARCHIVE = version, "vllm-%s.tar.gz" % version
    source.ARCHIVE_SHA256 = RELEASES[version]
    return Path(source.fetch_archive(folder))
