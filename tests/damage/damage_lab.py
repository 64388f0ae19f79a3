# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A copy of the release that the demo proved, which tests damage and put right again; the original is only read.

The copy lies in a root of its own beside hard links of its layer.  Nothing is ever written into a file: a damaged
file is a new one under the old name, so what shares the old one's bytes keeps them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from ansible_collections.dflash.fleet.plugins.module_utils import capabilities, checks, loading, proof, record

REPO = Path(__file__).resolve().parent.parent.parent
LOADED = re.compile(r"^ext\.(import|ops):")
OPT_IN = {"disable_eagle_block_drop": True}


def default_root() -> Path:
    """``dflash_root`` of this checkout's inventory, as its group_vars say; another by DFLASH_TEST_ROOT."""
    given = os.environ.get("DFLASH_TEST_ROOT")
    name = hashlib.sha1(os.path.realpath(REPO / "inventory").encode(), usedforsecurity=False).hexdigest()[:8]
    return Path(given) if given else Path(f"/var/tmp/dflash-{name}")


def proven_release(root: Path) -> Path | None:
    """The release of a deployment that is current and proven."""
    for instance in sorted((root / "instances").glob("*")):
        current = instance / "current"
        if (current / "proof.json").is_file() and json.loads((current / "proof.json").read_text())["ok"]:
            return (current / "release").resolve()
    return None


class Lab:
    """One scratch root with a release and its layer."""

    def __init__(self, release: Path) -> None:
        self.original = release
        self.root = Path(tempfile.mkdtemp(prefix="dflash-damage-", dir="/var/tmp"))
        self.root.chmod(0o755)
        self.attic = self.root / "attic"
        self.attic.mkdir()
        self.release = self.root / "releases" / release.name
        self.manifest = dict(json.loads((release / "build.json").read_text()))
        layer = release.parent.parent / "layers" / json.loads((release / "manifest.json").read_text())["layer_id"]
        self.layer = self.root / "layers" / layer.name
        for folder in (self.release, self.layer):
            folder.parent.mkdir()
        subprocess.run(["cp", "-a", "--reflink=auto", str(release), str(self.release)], check=True)
        subprocess.run(["cp", "-al", str(layer), str(self.layer)], check=True)
        if os.geteuid():
            subprocess.run(["chmod", "-R", "u+w", str(self.release)], check=True)
            subprocess.run(["find", str(self.layer), "-type", "d", "-exec", "chmod", "u+w", "{}", "+"], check=True)
        self.site = Path(str(record.site_packages(str(self.release))))
        self.package = self.site / "vllm"
        self.deps = Path(str(record.site_packages(str(self.layer))))
        self.info = next(self.site.glob("vllm*.dist-info"))
        self.python = self.release / "venv" / "bin" / "python"
        for path in self.site.glob("*.pth"):
            path.chmod(0o644)
            path.write_text(path.read_text().replace(str(layer), str(self.layer)))
        self.undo: list[tuple[Path, Path | None]] = []
        self.known: dict[str, dict[str, checks.Check]] = {}

    def close(self) -> None:
        shutil.rmtree(self.root)

    # ------------------------------------------------------------------ asking

    def inspect(self, loads: bool = True, runs: bool = True, **wish: Any) -> dict[str, checks.Check]:
        """All checks of the copy by id.

        ``loads`` false: a damage that no library can feel, so none is loaded anew; ``runs`` false: one that changes
        no deciding function, so none is run anew.  Both keep this stage within its two minutes.
        """
        asked = proof.Wish(manifest=self.manifest, speculative_config=OPT_IN)._replace(**wish)
        loaded = [item for name, item in self.right().items() if LOADED.match(name)] if not loads else []
        answered = [item for name, item in self.right().items() if name.startswith("capability.")] if not runs else []
        with ExitStack() as instead:
            if not loads:
                instead.enter_context(mock.patch.object(loading, "examine", lambda *_a, **_k: loaded))
            if not runs:
                instead.enter_context(mock.patch.object(capabilities, "examine", lambda *_a, **_k: answered))
            return {item["id"]: item for item in proof.inspect_release(str(self.release), asked)[0]}

    def right(self, **wish: Any) -> dict[str, checks.Check]:
        """The same of the undamaged copy."""
        key = json.dumps(wish, sort_keys=True, default=str)
        if key not in self.known:
            assert not self.undo
            self.known[key] = self.inspect(**wish)
        return self.known[key]

    # ------------------------------------------------------------------ damaging

    def _aside(self, path: Path) -> None:
        kept = None
        if os.path.lexists(path):
            kept = self.attic / str(len(self.undo))
            path.rename(kept)
        self.undo.append((path, kept))

    def put(self, path: Path, data: bytes | str, keep_time: bool = False) -> None:
        """A new file under an old name, or one more file."""
        before = path.stat() if path.exists() else None
        missing = [folder for folder in path.parents if not folder.exists()]
        if missing:
            self._aside(missing[-1])
            path.parent.mkdir(parents=True)
        self._aside(path)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.chmod(before.st_mode & 0o777 if before else 0o644)
        if before and keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def remove(self, path: Path) -> None:
        self._aside(path)

    def link(self, path: Path, target: str) -> None:
        self._aside(path)
        path.symlink_to(target)

    def folder(self, path: Path) -> None:
        self._aside(path)
        path.mkdir(parents=True)

    def line(self, name: str, old: str, new: str) -> None:
        """Change a line of a source file, as a commit would: RECORD goes with it."""
        path = self.package / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} holds {text.count(old)} times {old!r}"
        self.put(path, text.replace(old, new))
        self.record(path)

    def record(self, *paths: Path) -> None:
        """Make RECORD say what files are now; a file that is gone is left out."""
        names = {os.path.relpath(path, self.site): path for path in paths}
        rows = list(csv.reader(io.StringIO((self.info / "RECORD").read_text())))
        out = []
        for row in rows:
            path = names.get(row[0])
            if path is None:
                out.append(row)
            elif path.exists():
                data = path.read_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                out.append([row[0], "sha256=" + digest, str(len(data))])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(out)
        self.put(self.info / "RECORD", text.getvalue())

    def restore(self) -> None:
        """Everything as it was: same names, same inodes, same times."""
        for path, kept in reversed(self.undo):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
            if kept is not None:
                kept.rename(path)
        self.undo.clear()
