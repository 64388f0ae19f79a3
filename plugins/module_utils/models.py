# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Model folders: their revision by content, remembered by size, mtime and inode."""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, sha256_file, short_hash

#: Version control and hub caches inside a model folder are not the model.
IGNORED = (".git", ".cache")


def listing(path: str) -> Dict[str, List[int]]:
    """``{relative path: [size, mtime in ns, inode]}`` of the regular files in a model folder.

    Raises ``DflashError`` when there is no such folder or it cannot be read.
    """
    if not os.path.isdir(path):
        raise DflashError(
            "there is no model folder", path, "check the path in dflash_models_target or dflash_models_drafter"
        )
    found: Dict[str, List[int]] = {}

    def unreadable(error: OSError) -> None:
        raise DflashError("a folder of the model cannot be read: %s" % error.strerror, error.filename) from error

    for base, folders, files in os.walk(path, onerror=unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in IGNORED)
        for name in sorted(files):
            full = os.path.join(base, name)
            try:
                info = os.stat(full)
            except OSError as error:
                raise DflashError("a file of the model cannot be read: %s" % error.strerror, full) from error
            if not stat.S_ISREG(info.st_mode):
                raise DflashError("a model holds files and folders only", full, "remove it")
            found[os.path.relpath(full, path)] = [info.st_size, info.st_mtime_ns, info.st_ino]
    return found


def config(path: str) -> Dict[str, Any]:
    """The model's ``config.json``.  Raises ``DflashError`` when it is absent or not a JSON object."""
    value = read_json(os.path.join(path, "config.json"))
    if not isinstance(value, dict):
        raise DflashError(
            "the model folder has no readable config.json",
            path,
            "point the variable at the folder of one model, as a hub snapshot has it",
        )
    return value


def describe(path: str, name: str = "", known: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """``{name, path, revision, stat, config}`` of a model folder.

    ``revision`` is 16 hex digits over names and contents of all files, so that equal content has
    one name wherever it lies.  ``known`` is what an earlier call returned: when sizes, times and
    inodes are the same, its revision is taken over and nothing is read.
    """
    path = os.path.abspath(path)
    seen = listing(path)
    model_config = config(path)
    if known and known.get("stat") == seen and known.get("path") == path and known.get("revision"):
        revision = known["revision"]
    else:
        try:
            revision = short_hash([[item, sha256_file(os.path.join(path, item))] for item in sorted(seen)])
        except OSError as error:
            raise DflashError("a file of the model cannot be read: %s" % error.strerror, error.filename) from error
    return {
        "name": name or os.path.basename(path),
        "path": path,
        "revision": revision,
        "stat": seen,
        "config": model_config,
    }


def folder_name(model: Dict[str, Any]) -> str:
    """Name of the model's folder on a host: ``<name>@<revision>``."""
    return "%s@%s" % (model["name"], model["revision"])
