# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The deciding files of real vLLM releases, cut out of their archives on the package index and kept in a cache."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible_collections.dflash.fleet.plugins.module_utils import symbols

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO / "demo"))

RELEASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "releases.json").read_text(encoding="utf-8"))
#: What a quick run looks at: before the fixes, the demo's release, and the first with all of them.
SHORT = ("0.20.1", "0.32.0", "0.33.0")


def wanted() -> set[str]:
    """Paths inside a source tree that the probes read."""
    paths = {"setup.py", "vllm/__init__.py", "vllm/_version.py", "vllm/platforms/cpu.py"}
    for found in symbols.RUNNER_FILES.values():
        paths.update("vllm/" + path for path in found)
    paths.add("vllm/" + symbols.SPECULATORS["file"])
    for places in symbols.SYMBOLS.values():
        for place in places:
            files = [
                place["file"],
                place.get("config_file"),
                place.get("manager_file"),
                place.get("metadata", {}).get("file"),
            ]
            paths.update("vllm/" + path for path in files if path)
    return paths


def tree(version: str) -> Path:
    """The folder with the deciding files of a release; fetched once, its archive checked by hash."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash" / "trees"
    folder = base / ("%s-%s" % (version, RELEASES[version]["sha256"][:12]))
    stamp = folder / "paths.json"
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == sorted(wanted()):
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        archive = fetch(version, Path(scratch))
        cut = Path(scratch) / "tree"
        paths = wanted()
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                data = tar.extractfile(member) if member.isfile() and path in paths else None
                if data is not None:
                    (cut / path).parent.mkdir(parents=True, exist_ok=True)
                    (cut / path).write_bytes(data.read())
        (cut / "paths.json").write_text(json.dumps(sorted(paths)), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        cut.rename(folder)
    return folder


def fetch(version: str, folder: Path) -> Path:
    """The release's source archive, from the indexes that pip is configured with."""
    import source  # the demo's command knows how

    source.VERSION, source.ARCHIVE = version, "vllm-%s.tar.gz" % version
    source.ARCHIVE_SHA256 = RELEASES[version]["sha256"]
    return Path(source.fetch_archive(folder))
