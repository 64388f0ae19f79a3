# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the probes read off the syntax of foreign code.  First part of a child's program (see ``child.py``)."""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterable, List, Set, Tuple

_BUILTINS = """
ArithmeticError AssertionError AttributeError BaseException Exception IndexError KeyError LookupError
NameError NotImplementedError RuntimeError StopIteration TypeError ValueError ZeroDivisionError
__build_class__ abs all any bool bytes callable classmethod dict divmod enumerate filter float frozenset
getattr hasattr hash int isinstance issubclass iter len list map max min next object property range repr
reversed round set slice sorted staticmethod str sum super tuple type zip NotImplemented Ellipsis True False
None
"""
ALLOWED_BUILTINS = _BUILTINS.split()
KEPT_DECORATORS = ("property", "staticmethod", "classmethod", "cached_property", "setter")
#: Decorators by which a function keeps its answer; whatever else decorates one is applied, or is a stub.
_INERT = """
abstractmethod cache capture compile config contextmanager dataclass deprecated field_validator final
inference_mode instrument jit lru_cache model_validator njit no_grad overload override register_speculator
support_torch_compile triton_kernel_dispatcher_with_warmup wraps
"""
INERT_DECORATORS = set(_INERT.split())


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def inert(decorator: ast.AST, here: Set[str]) -> bool:
    """Does a decorator leave the answer alone?  One that the file itself defines (``here``) may not."""
    root = next((item.id for item in ast.walk(decorator) if isinstance(item, ast.Name)), "")
    return last_name(decorator) in INERT_DECORATORS and root not in here


def names_in(node: ast.AST) -> Set[str]:
    """Plain names that a piece of code reads."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def binds(stmt: ast.stmt) -> List[str]:
    if isinstance(stmt, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return [stmt.name]
    if isinstance(stmt, ast.Assign):
        return [target.id for target in stmt.targets if isinstance(target, ast.Name)]
    if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
        return [stmt.target.id]
    if isinstance(stmt, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in stmt.names]
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Name):
        return [stmt.target.id]
    if isinstance(stmt, (ast.If, ast.Try, ast.For, ast.While, ast.With)):
        return [name for item in ast.iter_child_nodes(stmt) if isinstance(item, ast.stmt) for name in binds(item)]
    return []


def changes(stmt: ast.AST) -> Iterable[Tuple[str, str]]:
    """Names whose attributes a statement outside of functions sets, each with the attribute (``*`` for any)."""
    if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(stmt, (ast.Attribute, ast.Subscript)) and not isinstance(stmt.ctx, ast.Load):
        root: Any = stmt
        attr = "*"
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            attr = root.attr if isinstance(root, ast.Attribute) else "*"
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name):
            yield root.id, attr
    if isinstance(stmt, ast.Call) and last_name(stmt) in ("setattr", "delattr") and stmt.args:
        named = stmt.args[1] if len(stmt.args) > 1 else None
        attr = str(named.value) if isinstance(named, ast.Constant) else "*"
        for name in names_in(stmt.args[0]):
            yield name, attr
    for item in ast.iter_child_nodes(stmt):
        yield from changes(item)


def narrow(cls: ast.ClassDef, methods: Set[str], here: Set[str]) -> ast.ClassDef:
    """The class with some methods, those they reach, its simple assignments and its bases of this file."""
    by_name: Dict[str, List[ast.stmt]] = {}
    for item in cls.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            by_name.setdefault(item.name, []).append(item)
    todo, reached = list(methods), set()
    while todo:
        name = todo.pop()
        if name in by_name and name not in reached:
            reached.add(name)
            for item in by_name[name]:
                todo.extend(n.attr for n in ast.walk(item) if isinstance(n, ast.Attribute))
    body = [
        item
        for item in cls.body
        if isinstance(item, (ast.Assign, ast.AnnAssign)) or getattr(item, "name", None) in reached
    ]
    narrowed = ast.ClassDef(name=cls.name, bases=[], keywords=[], body=body or [ast.Pass()], decorator_list=[])
    narrowed.decorator_list = cls.decorator_list
    narrowed.bases = [base for base in cls.bases if isinstance(base, ast.Name) and base.id in here]
    narrowed.bases.append(ast.Name("__loose__", ast.Load()))
    if hasattr(cls, "type_params"):  # Python 3.12
        vars(narrowed)["type_params"] = []
    return ast.fix_missing_locations(ast.copy_location(narrowed, cls))
