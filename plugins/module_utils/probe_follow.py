# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Follow a value to its user: blocks around a call, attributes over methods.  Part of a child's program, after
``probe_answer.py``.
"""

from __future__ import annotations

import ast
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import backward, calls, function, key_of
from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import (
    LOG,
    Loose,
    NotFound,
    Source,
    Stub,
    Undecided,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import binds, names_in

#: A block of statements, the place of the one that matters in it, and the tests that lead there with their outcomes.
Path = Tuple[List[ast.stmt], int, List[Tuple[ast.expr, bool]]]


def paths_to(body: List[ast.stmt], wanted: Callable[[ast.AST], bool]) -> List[Path]:
    """The blocks around the first statement that ``wanted`` likes, outermost first."""
    for index, stmt in enumerate(body):
        if not wanted(stmt):
            continue
        found: List[Path] = [(body, index, [])]
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(stmt, field, None)
            if isinstance(inner, list) and any(wanted(item) for item in inner):
                test = [(stmt.test, field == "body")] if isinstance(stmt, ast.If) else []
                found += [(block, at, test + tests) for block, at, tests in paths_to(inner, wanted)]
                break
        return found
    return []


def assigned(body: List[ast.stmt]) -> Set[str]:
    """Plain names that statements bind, at any depth."""
    return {item.id for stmt in body for item in ast.walk(stmt) if isinstance(item, ast.Name) and _stores(item)}


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def run_to(source: Source, method: ast.FunctionDef, sink: str, space: Dict[str, Any], given: Dict[str, Any]) -> bool:
    """Run the statements of ``method`` that lead to its call of ``sink``; False where they do not lead there.

    Statements before the first that decides the argument are run too, so that an early return counts, and left
    out one by one where they ask a stub.  A test around the block that can be decided must let the block run.
    """

    def wanted(node: ast.AST) -> bool:
        return bool(calls(node, sink))

    paths = paths_to(method.body, wanted)
    local = assigned(method.body)
    needs = set()
    for call in calls(paths[-1][0][paths[-1][1]], sink):
        for argument in list(call.args) + [item.value for item in call.keywords]:
            needs |= names_in(argument) & local
    chosen = next(
        (path for path in reversed(paths) if needs <= assigned(path[0][: path[1] + 1])),
        paths[0],
    )
    block, index, tests = chosen
    first = next((i for i, stmt in enumerate(block[:index]) if assigned([stmt]) & needs), index)
    index = max(at for at, stmt in enumerate(block) if wanted(stmt))  # the last call is the one that counts
    for test, outcome in tests:
        try:
            if bool(evaluate(source, method, test, space, given)) is not outcome:
                return False
        except (Undecided, NameError, AttributeError):
            continue
    left_out: Set[int] = set()
    while True:
        body = [stmt for i, stmt in enumerate(block[: index + 1]) if i not in left_out]
        LOG.clear()
        try:
            call_cut(source, method, body, space, given)
            return True
        except (Undecided, NameError, AttributeError) as error:
            line = _line_of(error)
            at = next((i for i, stmt in enumerate(block[:first]) if stmt.lineno <= line <= _last(stmt)), None)
            if at is None or at in left_out:
                raise
            left_out.add(at)


def _last(stmt: ast.stmt) -> int:
    return getattr(stmt, "end_lineno", None) or stmt.lineno


def _line_of(error: BaseException) -> int:
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__follow__":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def evaluate(
    source: Source, like: ast.FunctionDef, node: ast.expr, space: Dict[str, Any], given: Dict[str, Any]
) -> Any:
    """The value of one expression of a method."""
    return call_cut(source, like, [ast.copy_location(ast.Return(node), node)], space, given)


def call_cut(
    source: Source, like: ast.FunctionDef, body: List[ast.stmt], space: Dict[str, Any], given: Dict[str, Any]
) -> Any:
    """Run statements of a method with its parameters: described ones, and stubs."""
    cut = function("__follow__", like, body)
    source.run(cut, space)
    return space["__follow__"](*[given[a.arg] if a.arg in given else Stub(a.arg) for a in cut.args.args])


def attribute(
    source: Source, cls: str, name: str, owner: Any, given: Dict[str, Any], space: Optional[Dict[str, Any]] = None
) -> Any:
    """Run what decides ``self.name`` in the methods of a class; what ``owner`` holds already is taken as it is."""
    known = {"self." + key for key in vars(owner)}
    key = (cls, name, tuple(sorted(known)))
    if key not in source.memory:
        source.memory[key] = _deciding(source, cls, "self." + name, known)
    parts = source.memory[key]
    if not parts:
        raise NotFound("%s sets no %s in %s" % (source.path, name, cls))
    if space is None:
        space = source.load(sorted({item for cut in parts for item in names_in(cut)} - {cls}))
    for cut in parts:
        source.run(cut, space)
        described = dict(given, self=owner)
        space["__follow__"](*[described[a.arg] if a.arg in described else Stub(a.arg) for a in cut.args.args])
    return vars(owner).get(name, Stub(name))


def _deciding(source: Source, cls: str, first: str, known: Set[str]) -> List[ast.FunctionDef]:
    """Per method of a class the statements that decide an attribute, as functions; the constructor's first."""
    methods = [method for found, method in source.functions() if found == cls]
    wanted = {first}
    while True:
        parts: List[Tuple[ast.FunctionDef, List[ast.stmt]]] = []
        before = len(wanted)
        for method in methods:
            kept = backward(method.body, set(wanted))
            if kept:
                parts.append((method, kept))
                reads = {key_of(item) for stmt in kept for item in ast.walk(stmt)}
                wanted |= {key for key in reads if key and key.startswith("self.")} - known
        if len(wanted) == before:
            break
    parts.sort(key=lambda part: part[0].name != "__init__")
    return [function("__follow__", method, kept) for method, kept in parts]


def reached(source: Source, cls: str, method: ast.FunctionDef, owner: Any, given: Dict[str, Any]) -> bool:
    """Does a test on attributes of ``self`` keep all callers from a method?  What the tests read is set on ``owner``.

    Attributes that cannot be decided are left to whoever asks for them.
    """

    def wanted(node: ast.AST) -> bool:
        return bool(calls(node, method.name))

    callers = [item for found, item in source.functions() if found == cls and item is not method and wanted(item)]
    ways = [paths_to(item.body, wanted)[-1][2] for item in callers]
    tests = [item.test for item in ast.walk(method) if isinstance(item, ast.If)]
    tests += [test for way in ways for test, _outcome in way]
    for key in sorted({key_of(item) or "" for test in tests for item in ast.walk(test)}):
        name = key[len("self.") :] if key.startswith("self.") else ""
        if name and name not in vars(owner):
            try:
                attribute(source, cls, name, owner, given)
            except Exception:  # foreign code: what it raises leaves the attribute undecided
                vars(owner).pop(name, None)
    kept = [way for caller, way in zip(callers, ways) if not _barred(source, caller, way, given)]
    return bool(kept) or not callers


def _barred(source: Source, method: ast.FunctionDef, way: List[Tuple[ast.expr, bool]], given: Dict[str, Any]) -> bool:
    for test, outcome in way:
        try:
            if bool(evaluate(source, method, test, source.load([]), given)) is not outcome:
                return True
        except Exception:  # foreign code: what it raises bars nothing
            continue
    return False


_TAKEN = (ast.FunctionDef, ast.Assign, ast.AnnAssign)


def imported(source: Source, others: List[Source]) -> Dict[str, Any]:
    """What ``source`` imports by name from other files that are here: cut out of them and loaded, or the file."""
    found: Dict[str, Any] = {}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            path = (node.module or "").replace("vllm.", "", 1).replace(".", "/")
            for other in others:
                if other is source:
                    continue
                bound = alias.asname or alias.name
                if other.path in (path + ".py", path + "/__init__.py"):
                    if isinstance(other.top.get(alias.name), _TAKEN):
                        found[bound] = other.load([alias.name])[alias.name]
                elif other.path == "%s/%s.py" % (path, alias.name):
                    found[bound] = Module(other)
    return found


class Module:
    """Another file of the tree, as a module whose names are loaded where they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._source.top:
            raise AttributeError(name)
        return self._source.load([name])[name]


def wants(sources: List[Source], error: Undecided) -> List[str]:
    """Files (without ``.py``) of vLLM from which the name that could not decide is imported."""
    name = str(error).rpartition(" of ")[2].split(".")[0].replace("()", "")
    out = []
    for source in sources:
        for item in ast.walk(source.tree):
            if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("vllm.") and name in binds(item):
                path = (item.module or "")[len("vllm.") :].replace(".", "/")
                named = [alias.name for alias in item.names if (alias.asname or alias.name) == name]
                out += [path, *["%s/%s" % (path, one) for one in named]]
    return sorted(set(out))


def class_that(source: Source, test: Callable[[ast.ClassDef], bool]) -> Optional[str]:
    """The first class of a file that passes a test."""
    for name, stmt in source.top.items():
        if isinstance(stmt, ast.ClassDef) and test(stmt):
            return name
    return None


class Group(Loose):
    """``get_pp_group()`` and its like: one process."""

    def __init__(self) -> None:
        super().__init__(world_size=1, is_first_rank=True, is_last_rank=True, rank_in_group=0)
