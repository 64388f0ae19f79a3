# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the capability probes share: files, answers, refusals.  Part of a child's program, after ``probe_code.py``."""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any, Dict, List

from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import NotFound, Source, Stub

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


def ask(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call cut code; its own refusals become ``Refused``."""
    try:
        return function(*args, **kwargs)
    except REFUSALS as error:
        raise Refused(str(error), error) from error


def function(name: str, like: ast.FunctionDef, body: List[ast.stmt]) -> ast.FunctionDef:
    """A function with the parameters of ``like`` (all by position) and another body."""
    new = copy.deepcopy(like)
    new.name, new.body, new.decorator_list = name, copy.deepcopy(body), []
    new.args.args = new.args.posonlyargs + new.args.args + new.args.kwonlyargs
    new.args.posonlyargs, new.args.kwonlyargs = [], []
    new.args.defaults, new.args.kw_defaults, new.args.vararg, new.args.kwarg = [], [], None, None
    new.lineno = body[0].lineno
    return ast.fix_missing_locations(new)


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
