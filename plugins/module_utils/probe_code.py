# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Cut the deciding code out of a source file and run it on stubs.

This file is the program of a child process (see ``child.py``): standard library only, no import of
its neighbours.  It takes source text, never imports the code it judges, and gives that code a short
list of builtins.  What the cut code touches and nobody described is a ``Stub``: it answers every
attribute and every call, notes the call in ``LOG``, and refuses to decide anything (``Undecided``),
so that an answer can only come from the code under test and from what the probe stated.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import functools
import itertools
import math
import operator
import typing
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import (
    ALLOWED_BUILTINS,
    KEPT_DECORATORS,
    binds,
    changes,
    inert,
    last_name,
    names_in,
    narrow,
)

#: Calls on stubs in order: (dotted name, positional arguments, keyword arguments).
LOG: List[Tuple[str, Tuple[Any, ...], Dict[str, Any]]] = []

REAL_MODULES = {
    "copy": copy,
    "collections": collections,
    "functools": functools,
    "itertools": itertools,
    "math": math,
    "operator": operator,
    "typing": typing,
}


class Undecided(Exception):
    """The code under test asked a stub for a decision."""


class NotFound(Exception):
    """A name, class or call that the probe looks for is not in the source."""


class Loose:
    """Base of cut classes and of described objects: what is not described is a stub."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name)


class Strict:
    """A described object that has nothing beyond its description, like a parsed ``config.json``."""

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def _refuse(what: str) -> Callable[..., Any]:
    def method(self: Stub, *args: Any) -> Any:
        raise Undecided("%s of %s" % (what, self._stub_name))

    return method


class Stub:
    """Stands for everything that nobody described."""

    def __init__(self, name: str) -> None:
        self.__dict__["_stub_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub("%s.%s" % (self._stub_name, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LOG.append((self._stub_name, args, kwargs))
        return Stub(self._stub_name + "()")

    def __mro_entries__(self, bases: Tuple[Any, ...]) -> Tuple[type, ...]:
        name = self._stub_name

        class Logged(Loose):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if args or kwargs:
                    LOG.append((name, args, kwargs))

        return (Logged,)

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Stub:
        return self

    __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __or__
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __mod__ = __getitem__ = __or__

    def __neg__(self) -> Stub:
        return self

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    __bool__ = _refuse("truth")
    __len__ = _refuse("length")
    __iter__ = _refuse("items")
    __contains__ = _refuse("membership")
    __index__ = __int__ = __float__ = _refuse("number")
    __lt__ = __le__ = __gt__ = __ge__ = _refuse("order")
    __eq__ = _refuse("equality")
    __ne__ = _refuse("equality")
    __hash__ = object.__hash__


class _Clean(ast.NodeTransformer):
    """Drops annotations and inert decorators; turns every import into a binding of stubs."""

    def __init__(self, here: Set[str]) -> None:
        self.here = here

    def _function(self, node: Any) -> Any:
        node.returns = None
        for arg in itertools.chain(
            node.args.posonlyargs,
            node.args.args,
            node.args.kwonlyargs,
            filter(None, [node.args.vararg, node.args.kwarg]),
        ):
            arg.annotation = None
        node.decorator_list = [d for d in node.decorator_list if not inert(d, self.here)]
        for decorator in node.decorator_list:
            if last_name(decorator) == "cached_property":
                node.decorator_list = [ast.copy_location(ast.Name("property", ast.Load()), node)]
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.decorator_list = [d for d in node.decorator_list if not inert(d, self.here)]
        node.keywords = []
        node.bases = [base for base in node.bases if not isinstance(base, ast.Subscript)]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _import(self, node: Any) -> Any:
        out = []
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            dotted = alias.name if isinstance(node, ast.Import) else "%s.%s" % (node.module or "", alias.name)
            call = ast.Call(ast.Name("__dflash_import__", ast.Load()), [ast.Constant(dotted), ast.Constant(bound)], [])
            out.append(ast.copy_location(ast.Assign([ast.Name(bound, ast.Store())], call), node))
        return [ast.fix_missing_locations(item) for item in out]

    visit_Import = visit_ImportFrom = _import


class Source:
    """One parsed file: finds definitions, cuts them with what they need, and loads the cut."""

    def __init__(self, text: str, path: str, known: Optional[Dict[str, Any]] = None) -> None:
        self.path = path
        self.known = dict(known or {})
        self.tree = ast.parse(text, path)
        #: Compiled statements, and classes that were narrowed, by identity; what they came from is kept alive.
        self._compiled: Dict[int, Tuple[ast.stmt, Any, Set[str]]] = {}
        self._narrowed: Dict[Tuple[str, Tuple[str, ...]], List[ast.stmt]] = {}
        #: What followers remember about this file.
        self.memory: Dict[Any, Any] = {}
        self.top: Dict[str, ast.stmt] = {}
        #: All that binds a name or changes what it names, in order; the attributes that are changed so.
        self.every: Dict[str, List[ast.stmt]] = {}
        self.changed: Dict[str, Dict[int, Set[str]]] = {}
        for stmt in self.tree.body:
            for name in binds(stmt):
                self.top[name] = stmt
                self.every.setdefault(name, []).append(stmt)
            for name, attr in changes(stmt):
                self.changed.setdefault(name, {}).setdefault(id(stmt), set()).add(attr)
                if stmt not in self.every.setdefault(name, []):
                    self.every[name].append(stmt)
        imports = (ast.Import, ast.ImportFrom)
        self.here = {name for name, stmt in self.top.items() if not isinstance(stmt, imports)}
        for cls, method in self.functions():
            self._note(cls, method)

    def _note(self, cls: Optional[str], method: ast.FunctionDef) -> None:
        """Mark a function that is not what runs under its name: its parts must not be run for it."""
        holder = self.top.get(cls or method.name)
        attrs = {attr for found in self.changed.get(cls or "", {}).values() for attr in found}
        decorators = list(method.decorator_list) + (getattr(holder, "decorator_list", []) if cls else [])
        odd = [d for d in decorators if last_name(d) not in KEPT_DECORATORS and not inert(d, self.here)]
        if odd:
            vars(method)["odd"] = "decorator of %s" % last_name(odd[0])
        elif method not in getattr(holder, "body", []) and holder is not method:
            vars(method)["odd"] = "rebinding of %s" % (cls or method.name)
        elif attrs & {method.name, "*"}:
            vars(method)["odd"] = "change of %s.%s" % (cls, method.name)

    def find(self, name: str) -> ast.stmt:
        if name not in self.top:
            raise NotFound("%s has no %s" % (self.path, name))
        return self.top[name]

    def method(self, cls: str, name: str) -> ast.FunctionDef:
        for item in getattr(self.find(cls), "body", []):
            if isinstance(item, ast.FunctionDef) and item.name == name:
                return item
        raise NotFound("%s has no %s.%s" % (self.path, cls, name))

    def functions(self) -> Iterable[Tuple[Optional[str], ast.FunctionDef]]:
        """Every function with the name of its class (None at the top)."""
        for stmt in self.tree.body:
            if isinstance(stmt, ast.FunctionDef):
                yield None, stmt
            elif isinstance(stmt, ast.ClassDef):
                methods = [item for item in stmt.body if isinstance(item, ast.FunctionDef)]
                for index, item in enumerate(methods):
                    later = [other for other in methods[index + 1 :] if other.name == item.name]
                    decorators = [other.decorator_list for other in later]
                    if all(found and last_name(found[0]) == "setter" for found in decorators):
                        yield stmt.name, item

    def load(
        self, wanted: Iterable[str], only: Optional[Dict[str, Set[str]]] = None, base: type = Loose
    ) -> Dict[str, Any]:
        """Run the definitions of ``wanted`` and, transitively, of the names of this file that they use.

        ``only`` narrows classes to some methods (and those they call on ``self``).  Assignments at the top
        that fail on stubs leave a stub behind.  ``base`` takes the place of a narrowed class's foreign bases.
        """
        keep: List[ast.stmt] = []
        todo = list(wanted)
        seen: Set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen or name not in self.top:
                continue
            seen.add(name)
            for stmt in self._all_of(name, (only or {}).get(name)):
                if not any(getattr(stmt, "lineno", 0) == getattr(kept, "lineno", -1) for kept in keep):
                    keep.append(stmt)
                todo.extend(names_in(stmt) & set(self.top))
        keep.sort(key=lambda stmt: stmt.lineno)
        space: Dict[str, Any] = {
            "__name__": "cut",
            "__builtins__": {n: getattr(builtins, n) for n in ALLOWED_BUILTINS if hasattr(builtins, n)},
            "__dflash_import__": self._import,
            "__loose__": base,
            "print": Stub("print"),
        }
        for stmt in keep:
            self.run(stmt, space)
        return space

    def _all_of(self, name: str, methods: Optional[Set[str]]) -> List[ast.stmt]:
        """What makes a name in order: its definitions, a class narrowed to ``methods``, and what changes it."""
        stmts = self.every[name]
        if methods is None:
            return stmts
        key = (name, tuple(sorted(methods)))
        if key not in self._narrowed:
            classes = {name for name, value in self.top.items() if isinstance(value, ast.ClassDef)}
            changed = self.changed.get(name, {})
            wanted, size, out = set(methods), -1, []  # type: Set[str], int, List[ast.stmt]
            while size != len(wanted):
                size, out = len(wanted), []
                for stmt in stmts:
                    if isinstance(stmt, ast.ClassDef):
                        out.append(narrow(stmt, wanted, classes))
                        reached = {item.attr for item in ast.walk(out[-1]) if isinstance(item, ast.Attribute)} | wanted
                    elif id(stmt) not in changed:
                        out.append(stmt)
                    elif changed[id(stmt)] & (reached | {"*"}):
                        out.append(stmt)
                        new = [self.top[n] for n in names_in(stmt) if isinstance(self.top.get(n), ast.FunctionDef)]
                        wanted |= {i.attr for f in new for i in ast.walk(f) if isinstance(i, ast.Attribute)}
            self._narrowed[key] = out
        return self._narrowed[key]

    def _import(self, dotted: str, bound: str) -> Any:
        LOG.append(("import", (dotted,), {}))
        for key in (dotted, bound):
            if key in self.known:
                return self.known[key]
        head, _sep, tail = dotted.partition(".")
        if head in REAL_MODULES:
            return getattr(REAL_MODULES[head], tail, Stub(bound)) if tail else REAL_MODULES[head]
        return Stub(bound)

    def run(self, stmt: ast.stmt, space: Dict[str, Any]) -> None:
        """Execute one statement of this file in ``space``; names that nobody bound become stubs."""
        if id(stmt) not in self._compiled:
            clean = ast.Module(body=[copy.deepcopy(stmt)], type_ignores=[])
            clean = ast.fix_missing_locations(_Clean(self.here).visit(clean))
            self._compiled[id(stmt)] = (stmt, compile(clean, self.path, "exec"), names_in(clean))
        _stmt, code, names = self._compiled[id(stmt)]
        for name in names - set(space):
            if name not in space["__builtins__"] and name not in self.top:
                space[name] = self.known.get(name, Stub(name))
        try:
            exec(code, space)  # the purpose of this child
        except Undecided:
            for name in binds(stmt):
                space[name] = Stub(name)
