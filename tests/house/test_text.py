# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What no file may hold, and how long a file may be."""

from __future__ import annotations

import re
from pathlib import PurePath

import house

#: Written in pieces, so that this file is not found by its own search.
HOSTS = [".".join(parts) for parts in (
    ("pypi", "org"), ("python" + "hosted", "org"), ("deb", "debian", "org"), ("npm" + "js", "org"),
    ("npm" + "js", "com"), ("download", "pytorch", "org"),
)]
MACHINE = ["/" + "/".join(parts) + "/" for parts in (
    ("work",), ("farm",), ("root",), ("opt", "wheels"), ("opt", "pypi"), ("opt", "pypi-more"), ("var", "tmp", "lab"),
)]
#: What people write and read, as against data and locks.
WRITTEN = {".py", ".yml", ".yaml", ".sh", ".md", ".toml", ".j2", ".cfg", ".patch"}
MADE = {"docs/variables.md", "docs/checks.md"}
LONGEST = 400


def lines_with(words: list[str]) -> list[str]:
    """``path:line`` of each line that holds one of the words."""
    pattern = re.compile("|".join(rf"(?<![\w/.-]){re.escape(word)}" if word.startswith("/") else re.escape(word)
                                  for word in words))
    found = []
    for name in house.files():
        for number, line in enumerate((house.text(name) or "").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    return found


def test_no_package_host_is_named() -> None:
    assert lines_with(HOSTS) == []


def test_no_path_of_one_machine_is_named() -> None:
    assert lines_with(MACHINE) == []


def test_the_search_would_find_one() -> None:
    pattern = re.escape(HOSTS[0])
    assert re.search(pattern, "https://" + "pypi" + ".org/simple")


def test_no_file_is_longer_than_a_reader_likes() -> None:
    long = {
        name: len((house.text(name) or "").splitlines()) for name in house.files()
        if PurePath(name).suffix in WRITTEN and name not in MADE and not name.startswith("canary/pairs/")
    }
    assert {name: count for name, count in long.items() if count > LONGEST} == {}


def test_code_says_under_which_licence_it_is() -> None:
    missing = [
        name for name in house.files()
        if name.endswith((".py", ".sh")) and "SPDX-License-Identifier: Apache-2.0" not in (house.text(name) or "")[:400]
        and house.text(name)
    ]
    assert missing == []


def test_hidden_settings_of_linters_skip_nothing() -> None:
    lint = house.load(house.REPO / ".ansible-lint")
    assert lint["profile"] == "production" and lint["strict"] is True and lint["offline"] is True
    assert not {"skip_list", "warn_list", "mock_modules", "mock_roles"} & set(lint)
    assert [name for name in house.files() if name.endswith(".ansible-lint-ignore")] == []
    noqa = [name for name in house.files() if name.endswith(".yml") and "# noqa" in (house.text(name) or "")]
    assert noqa == []
