# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The pages say what the data says, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import house
from ansible_collections.dflash.fleet.plugins.module_utils import schemas


def test_generated_pages_are_what_the_data_says() -> None:
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    done = subprocess.run(command, cwd=house.REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_published_schemas_are_those_that_the_code_checks_with() -> None:
    published = {path.stem: json.loads(path.read_text()) for path in (house.REPO / "docs/schema").glob("*.json")}
    assert published == schemas.SCHEMAS
    assert set(published) == {"lock", "manifest", "proof", "verdict"}


def test_links_between_pages_lead_to_files() -> None:
    broken = []
    for name in house.files():
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", house.text(name) or ""):
            if not re.match(r"[a-z]+:", target) and not ((house.REPO / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_pages_name_only_variables_that_exist() -> None:
    known = house.all_variables()
    roles = tuple(role + "_" for role in house.ROLES)
    names = {path.split("/")[-1].split(".")[0] for path in house.files()} | set(house.ROLES)
    strange = []
    for name in house.files():
        if not name.endswith(".md") or name == "CHANGELOG.md":
            continue
        for word in re.findall(r"`((?:dflash|vllm)_[a-z0-9_]+)`", house.text(name) or ""):
            if word.startswith(roles) and word not in known | names:
                strange.append(f"{name}: {word}")
    assert strange == []


def test_targets_named_in_pages_exist() -> None:
    makefile = (house.REPO / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", makefile, re.MULTILINE).group(1).replace("\\", " ").split())
    strange = []
    for name in house.files():
        if name.endswith(".md"):
            for word in re.findall(r"`make ([a-z-]+)", house.text(name) or ""):
                if word not in targets:
                    strange.append(f"{name}: make {word}")
    assert strange == []
