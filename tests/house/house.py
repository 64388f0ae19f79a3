# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the house tests share: the files of the checkout, and the roles' declarations."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (REPO / "roles").iterdir() if path.is_dir())

#: Variables that bear no role's name; every role may read them.
SHARED_ROLE = "dflash_common"


@lru_cache(maxsize=1)
def files() -> tuple[str, ...]:
    """Files of the checkout as git sees them: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout.decode().split("\0")
    present = {name for name in names if name and (REPO / name).is_file() and not (REPO / name).is_symlink()}
    return tuple(sorted(present))


def text(name: str) -> str | None:
    """A file's text, or None for binary data."""
    data = (REPO / name).read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def load(path: Path) -> Any:
    """The value of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def defaults(role: str) -> dict[str, Any]:
    """Defaults of a role."""
    return load(REPO / "roles" / role / "defaults/main.yml") or {}


def options(role: str) -> dict[str, dict[str, Any]]:
    """Options of a role's main argument spec."""
    return load(REPO / "roles" / role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options") or {}


def all_variables() -> set[str]:
    """Every variable that some role declares."""
    return {name for role in ROLES for name in defaults(role)}
