# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, hashes, and the folders of a host."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from typing import Any, Optional, Tuple

CHUNK = 1 << 20


def sha256_file(path: str) -> str:
    """Hex SHA-256 of a file's bytes.  Raises ``OSError``."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while True:
            block = handle.read(CHUNK)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def short_hash(value: Any, length: int = 16) -> str:
    """First ``length`` hex digits of the SHA-256 over the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()[:length]


def write_atomic(path: str, text: str, mode: int = 0o644, owner: Optional[Tuple[int, int]] = None) -> None:
    """Write beside the place, sync, rename in: a killed writer leaves the old file or none.

    ``owner`` is ``(uid, gid)`` or None.  Raises ``OSError``.
    """
    folder = os.path.dirname(path) or "."
    fd, temporary = tempfile.mkstemp(prefix=".%s." % os.path.basename(path), dir=folder)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as handle:
            os.fchmod(handle.fileno(), mode)
            if owner is not None:
                os.fchown(handle.fileno(), owner[0], owner[1])
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def write_json(path: str, value: Any, mode: int = 0o644, owner: Optional[Tuple[int, int]] = None) -> None:
    """``write_atomic`` of indented, key-sorted JSON with a final newline."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode, owner)


def read_json(path: str) -> Any:
    """The value in a JSON file, or None where there is no readable, whole JSON file."""
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None


def switch_link(link: str, target: str) -> bool:
    """Point a symbolic link at ``target`` in one step; says whether it pointed elsewhere before."""
    if os.path.islink(link) and os.readlink(link) == target:
        return False
    temporary = "%s.new.%d" % (link, os.getpid())
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(target, temporary)
    try:
        os.replace(temporary, link)
    except OSError:
        os.unlink(temporary)
        raise
    return True
