# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the capability probes share: files, answers, refusals, following a value.

Part of a child's program, after ``probe_code.py``.
"""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any, Dict, List, Optional, Set

from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import (
    NotFound,
    Source,
    Stub,
    Undecided,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import binds, last_name

#: Errors by which vLLM itself refuses a configuration; anything else means that the probe does not know.
REFUSALS = (NotImplementedError, ValueError, AssertionError)

Answer = Dict[str, Any]


class Refused(Exception):
    """The code under test refuses: its words, and the exception."""


class Files:
    def __init__(self, texts: Dict[str, str], parsed: Dict[str, Source]) -> None:
        self.texts = texts
        self.parsed = parsed

    def source(self, path: str, known: Dict[str, Any]) -> Source:
        if path not in self.texts:
            raise NotFound("no file %s" % path)
        if path not in self.parsed:
            self.parsed[path] = Source(self.texts[path], path)
        self.parsed[path].known = known
        return self.parsed[path]

    def parsable(self, path: str) -> Optional[Source]:
        """A file that came along, parsed; None where it did not, or is no Python."""
        return next((source for source in self.all() if source.path == path), None)

    def all(self) -> List[Source]:
        """Every file that came along, parsed; those that are no Python are left out."""
        for path in sorted(self.texts):
            if path not in self.parsed:
                try:
                    self.parsed[path] = Source(self.texts[path], path)
                except SyntaxError:
                    continue
        return [self.parsed[path] for path in sorted(self.parsed)]


def ask(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call cut code; its own refusals become ``Refused``."""
    try:
        return function(*args, **kwargs)
    except REFUSALS as error:
        raise Refused(str(error), error) from error


def function(name: str, like: ast.FunctionDef, body: List[ast.stmt]) -> ast.FunctionDef:
    """A function with the parameters of ``like`` (all by position) and another body."""
    if "odd" in vars(like):
        raise Undecided(vars(like)["odd"])
    new = copy.copy(like)
    new.args = copy.deepcopy(like.args)
    new.name, new.body, new.decorator_list = name, list(body), []
    new.args.args = new.args.posonlyargs + new.args.args + new.args.kwonlyargs
    new.args.posonlyargs, new.args.kwonlyargs = [], []
    new.args.defaults, new.args.kw_defaults, new.args.vararg, new.args.kwarg = [], [], None, None
    new.lineno = body[0].lineno
    return ast.fix_missing_locations(new)


def translated(files: Files, place: Dict[str, str], raw: Dict[str, Any], config: Dict[str, Any]) -> Dict[str, Any]:
    """A drafter of the speculators dialect as this tree's own function translates it; ``config`` has the rest."""
    space = files.source(place["file"], {}).load([place["function"]])
    own: Dict[str, Any] = {}
    ask(space[place["function"]], copy.deepcopy(raw), own)
    return dict(config, **own)


def answer(status: str, expected: Any, actual: Any, evidence: Any) -> Answer:
    return {"status": status, "expected": expected, "actual": actual, "evidence": evidence}


def short(error: BaseException) -> str:
    return ("%s: %s" % (type(error).__name__, error))[:300]


def plain(value: Any) -> Any:
    """A value as JSON; stubs and objects by their kind."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return "<%s>" % type(value).__name__


def fill(function: Any, values: Dict[str, Any]) -> Dict[str, Any]:
    """Keyword arguments for ``function``: described ones, and a stub for each that has no default."""
    filled = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in values:
            filled[name] = values[name]
        elif parameter.default is parameter.empty:
            filled[name] = Stub(name)
    return filled


# ------------------------------------------------------------------ following a value


def key_of(node: ast.AST) -> Optional[str]:
    """``name`` or ``self.name`` as one string; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return "%s.%s" % (node.value.id, node.attr)
    return None


def _reads(node: ast.AST) -> Set[str]:
    return {key for key in (key_of(item) for item in ast.walk(node)) if key}


def backward(body: List[ast.stmt], wanted: Set[str]) -> List[ast.stmt]:
    """The statements that decide the values of ``wanted`` (plain names and attributes of names), in order."""
    while True:
        before = len(wanted)
        kept = _filter(body, wanted)
        for stmt in kept:
            wanted |= _reads(stmt)
        if len(wanted) == before:
            return kept


def _filter(body: List[ast.stmt], wanted: Set[str]) -> List[ast.stmt]:
    out: List[ast.stmt] = []
    for stmt in body:
        if isinstance(stmt, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
            flat = [part for target in targets for part in getattr(target, "elts", [target])]
            if any(key_of(target) in wanted for target in flat):
                out.append(stmt)
        elif isinstance(stmt, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            fields = {
                name: _filter(getattr(stmt, name), wanted)
                for name in ("body", "orelse", "finalbody")
                if getattr(stmt, name, None)
            }
            walrus = any(isinstance(item, ast.NamedExpr) and item.target.id in wanted for item in ast.walk(stmt))
            if any(fields.values()) or (walrus and isinstance(stmt, ast.If)):
                part = copy.copy(stmt)
                for name, kept in fields.items():
                    setattr(part, name, kept or ([ast.Pass()] if name == "body" else []))
                out.append(ast.fix_missing_locations(part))
        elif isinstance(stmt, (ast.Import, ast.ImportFrom)) and set(binds(stmt)) & wanted:
            out.append(stmt)
    return out


def calls(node: ast.AST, name: str) -> List[ast.Call]:
    """Calls of ``name`` (plain or as an attribute) inside ``node``."""
    return [item for item in ast.walk(node) if isinstance(item, ast.Call) and last_name(item) == name]
