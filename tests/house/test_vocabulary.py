# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The closed list of check ids and the code name the same ids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import house
from ansible_collections.dflash.fleet.plugins.module_utils import symbols, vocabulary

CHECKS = set(vocabulary.CHECKS)
AREAS = sorted({name.split(".")[0] for name in CHECKS})
#: A literal that is an id, perhaps with an object, perhaps with a gap that a format fills.
ID = re.compile(rf"^(?:{'|'.join(AREAS)})\.[a-z][a-z0-9_]*(?:\.(?:[a-z0-9_]+|%s|\{{\w*\}}))*(?::.*)?$", re.DOTALL)
WORD = re.compile(rf"\b(?:{'|'.join(AREAS)})\.[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\b")
GAP = re.compile(r"%s|\{\w*\}")


def python_literals() -> Iterator[tuple[str, str]]:
    """``(file, literal)`` of each text in the plugins that has the form of an id."""
    for name in house.files():
        if not name.startswith("plugins/") or not name.endswith(".py") or name.endswith("/vocabulary.py"):
            continue
        for node in ast.walk(ast.parse(house.text(name) or "")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ID.match(node.value):
                yield name, node.value
            elif isinstance(node, ast.JoinedStr):
                value = "".join(part.value if isinstance(part, ast.Constant) else "%s" for part in node.values)
                if ID.match(value):
                    yield name, value


def yaml_words() -> Iterator[tuple[str, str]]:
    """``(file, id)`` of each id in quotes in roles and playbooks."""
    for name in house.files():
        if name.startswith(("roles/", "playbooks/")) and name.endswith((".yml", ".j2")) and "/meta/" not in name:
            for quoted in re.findall(r"[\"']([^\"']+)[\"']", house.text(name) or ""):
                if WORD.fullmatch(quoted):
                    yield name, quoted


def meant(literal: str) -> set[str]:
    """The ids of the vocabulary that a literal stands for."""
    base = literal.split(":", 1)[0]
    if not GAP.search(base):
        return {base} & CHECKS
    pattern = re.compile("[a-z0-9_]+".join(re.escape(part) for part in GAP.split(base)))
    return {name for name in CHECKS if pattern.fullmatch(name)}


def families() -> set[str]:
    """Keys of the symbols file; one may stand for several ids, whose words it then holds in their order."""
    found = set()
    for key in symbols.SYMBOLS:
        for name in CHECKS:
            words = iter(name.split("."))
            if all(word in words for word in key.split(".")):
                found.add(key)
    return found


def test_every_id_in_code_is_in_the_vocabulary() -> None:
    known = families()
    strange = [
        f"{name}: {literal}" for name, literal in [*python_literals(), *yaml_words()]
        if not meant(literal) and literal not in known
    ]
    assert strange == []


def test_symbols_belong_to_checks() -> None:
    assert set(symbols.SYMBOLS) - families() == set()


def test_every_id_of_the_vocabulary_is_used_in_code() -> None:
    used: set[str] = set()
    for _, literal in [*python_literals(), *yaml_words()]:
        used |= meant(literal)
    assert sorted(CHECKS - used) == []


def test_entries_are_whole() -> None:
    for name, entry in vocabulary.CHECKS.items():
        assert set(entry) <= {"stage", "required_when", "question", "remedy", "covered_by", "object"}, name
        assert entry["stage"] in vocabulary.CHECK_STAGES, name
        assert entry["question"].endswith("?") and entry["remedy"].endswith("."), name
        assert entry.get("covered_by") is None or entry["covered_by"] in CHECKS, name


def test_exit_codes_and_states_hang_together() -> None:
    assert set(vocabulary.OK_HOST_STATES) <= set(vocabulary.HOST_STATES)
    assert set(vocabulary.EXIT_ORDER) == set(vocabulary.EXIT_CODES.values()) - {0}
