# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Writes on the way: what code sets again between a configuration and its reader.  Part of a child's program, after
``probe_follow.py``.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import ask, backward, calls, key_of
from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import Loose, Source, Undecided
from ansible_collections.dflash.fleet.plugins.module_utils.probe_follow import (
    attribute,
    call_cut,
    evaluate,
    paths_to,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import last_name, names_in

#: What a drafter's windows and causality are read from.
WINDOW_KEYS = {
    "dflash_config",
    "is_causal",
    "layer_types",
    "num_hidden_layers",
    "sliding_window",
    "use_sliding_window",
}


def writes(method: ast.AST, names: Set[str], own: bool = False) -> Iterator[ast.AST]:
    """What sets an attribute of these names, on ``self`` alone where ``own``, else on anything but ``self``."""
    for item in ast.walk(method):
        if isinstance(item, ast.Attribute) and not isinstance(item.ctx, ast.Load) and item.attr in names:
            if (key_of(item) == "self." + item.attr) is own:
                yield item
        elif isinstance(item, ast.Call) and last_name(item) == "setattr" and len(item.args) == 3:
            named, plain_self = item.args[1], key_of(item.args[0]) == "self"
            if plain_self is own and (not isinstance(named, ast.Constant) or named.value in names):
                yield item


def _way(method: ast.FunctionDef, write: ast.AST) -> Tuple[ast.stmt, List[Tuple[ast.expr, bool]]]:
    """The innermost statement of a write, and the tests that lead there."""

    def wanted(node: ast.AST) -> bool:
        return any(item is write for item in ast.walk(node))

    block, index, tests = paths_to(method.body, wanted)[-1]
    return block[index], tests


def in_configuration(
    source: Source, cls: str, names: Set[str], described: Dict[str, Any], config: Any = None
) -> List[str]:
    """Run the writes of a configuration's methods that this deployment meets; where each is.

    ``described`` are the attributes of the configuration itself.  With ``config``, the writes are to the drafter's
    configuration and change it; without, they are to ``self``, and only those that change a value are told.
    """
    met = []
    for owner, method in source.functions():
        if owner != cls:
            continue
        for write in writes(method, names, own=config is None):
            stmt, tests = _way(method, write)
            asked = {item.attr for test, _ in tests for item in ast.walk(test) if isinstance(item, ast.Attribute)}
            used = set().union(*[names_in(test) for test, _ in tests], names_in(stmt)) - {cls}
            space = source.load([*sorted(used), cls], only={cls: asked})
            made = space[cls].__new__(space[cls])
            vars(made).update({"model": "drafter", "num_speculative_tokens": 15}, **described)
            given = {"self": made}
            if config is not None:
                given.update(hf_config=config)
                vars(made).update(draft_model_config=Loose(hf_config=config))
            open_tests = []
            for test, outcome in tests:
                try:
                    if bool(evaluate(source, method, test, space, given)) is not outcome:
                        break
                except (Undecided, NameError, AttributeError):
                    open_tests.append(test)
            else:
                before = dict(vars(made))
                ask(call_cut, source, method, [stmt], space, given)
                if config is None and all(vars(made).get(name) == before.get(name) for name in names):
                    continue
                if open_tests:
                    raise Undecided("test of a write in %s.%s (line %d)" % (cls, method.name, stmt.lineno))
                met.append("%s:%d %s.%s" % (source.path, stmt.lineno, cls, method.name))
    return met


def before_layers(source: Source, model: str, config: Any, vllm_config: Any) -> None:
    """Run what the model and the class around it write to the drafter's configuration before layers are built."""
    outer = [name for name, stmt in source.top.items() if isinstance(stmt, ast.ClassDef) and model in names_in(stmt)]
    for cls in [name for name in outer if name != model] + [model]:
        for owner, method in source.functions():
            if owner != cls or method.name != "__init__":
                continue
            for index, stmt in enumerate(method.body):
                if calls(stmt, "model_cls") or calls(stmt, model) or _sets_layers(stmt):
                    break
                if any(True for _write in writes(stmt, WINDOW_KEYS)):
                    reads = {key for item in ast.walk(stmt) for key in [key_of(item)] if key}
                    body = backward(method.body[:index], reads) + [stmt]
                    used = set().union(*[names_in(part) for part in body])
                    space = source.load(sorted(used - {cls, model}))
                    given = {"self": Loose(config=config), "vllm_config": vllm_config}
                    ask(call_cut, source, method, body, space, given)


def _sets_layers(stmt: ast.stmt) -> bool:
    return any(key_of(item) == "self.layers" for item in ast.walk(stmt))


def after_construction(source: Source, cls: str, made: str, owner: Any, given: Dict[str, Any]) -> None:
    """Undecided where a class writes below what it made (``self.<made>``) in a case that may be this one."""
    for found, method in source.functions():
        if found != cls:
            continue
        for item in ast.walk(method):
            if not isinstance(item, (ast.Attribute, ast.Subscript)) or isinstance(item.ctx, ast.Load):
                continue
            chain = _chain(item)
            if chain[:2] != ["self", made] or not any("eagle" in name or "drop" in name for name in chain[2:]):
                continue
            stmt, tests = _way(method, item)
            if not any(_denied(source, cls, method, test, owner, given) is outcome for test, outcome in tests):
                raise Undecided("write to %s (line %d)" % (".".join(chain), stmt.lineno))


def _denied(source: Source, cls: str, method: ast.FunctionDef, test: ast.expr, owner: Any, given: Any) -> Any:
    """The opposite of a test's outcome; None where it cannot be decided."""
    try:
        for item in ast.walk(test):
            key = key_of(item)
            if key and key.startswith("self.") and key[5:] not in vars(owner):
                attribute(source, cls, key[5:], owner, given)
        return not evaluate(source, method, test, source.load([]), given)
    except Exception:  # foreign code: whatever it raises, nothing is denied
        return None


def _chain(node: ast.AST) -> List[str]:
    """``self.a.b[0].c`` as its names."""
    names: List[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    return [getattr(node, "id", ""), *names]
