# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The three capability probes: program of a child process, run on top of ``probe_code.py``.

Each probe runs the deciding code, follows its answer to the code that uses it, and asks a control
question whose right answer is known.  An answer is ``{status, expected, actual, evidence}``.
"""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any, Dict, List, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import (
    LOG,
    Loose,
    NotFound,
    Source,
    Strict,
    Stub,
    Undecided,
    backward,
    calls,
    names_in,
)

#: Errors by which vLLM itself refuses a configuration; anything else means that the probe does not know.
REFUSALS = (NotImplementedError, ValueError, AssertionError)

Answer = Dict[str, Any]


class Refused(Exception):
    """The code under test refuses: its words, and the exception."""


def main(payload: Dict[str, Any]) -> List[Answer]:
    """Answer all cases of ``payload``: ``{sources: {path: text}, cases: [{id, kind, places, ...}]}``."""
    probes = {"layer_offset": layer_offset, "swa": swa, "cache_rule": cache_rule}
    answers = []
    parsed: Dict[str, Source] = {}
    for case in payload["cases"]:
        LOG.clear()
        try:
            answer = probes[case["kind"]](_Files(payload["sources"], parsed), case)
        except NotFound as error:
            answer = _answer("unknown", case["expected"], None, {"not_found": str(error)})
        except Undecided as error:
            answer = _answer("unknown", case["expected"], None, {"undecided": str(error)})
        except Refused as error:
            answer = _answer("fail", case["expected"], "refuses: %s" % error.args[0], {"error": _short(error.args[1])})
        except SyntaxError as error:
            answer = _answer("unknown", case["expected"], None, {"cannot_parse": str(error)})
        except Exception as error:  # the code under test is foreign: whatever it raises is an answer
            answer = _answer("unknown", case["expected"], None, {"error": _short(error)})
        answer["id"] = case["id"]
        answers.append(answer)
    return answers


class _Files:
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


def _ask(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call cut code; its own refusals become ``Refused``."""
    try:
        return function(*args, **kwargs)
    except REFUSALS as error:
        raise Refused(str(error), error) from error


def _function(name: str, like: ast.FunctionDef, body: List[ast.stmt]) -> ast.FunctionDef:
    """A function with the parameters of ``like`` (all by position) and another body."""
    new = copy.deepcopy(like)
    new.name, new.body, new.decorator_list = name, copy.deepcopy(body), []
    new.args.args = new.args.posonlyargs + new.args.args + new.args.kwonlyargs
    new.args.posonlyargs, new.args.kwonlyargs = [], []
    new.args.defaults, new.args.kw_defaults, new.args.vararg, new.args.kwarg = [], [], None, None
    new.lineno = body[0].lineno
    return ast.fix_missing_locations(new)


def _answer(status: str, expected: Any, actual: Any, evidence: Any) -> Answer:
    return {"status": status, "expected": expected, "actual": actual, "evidence": evidence}


def _short(error: BaseException) -> str:
    return ("%s: %s" % (type(error).__name__, error))[:300]


def _plain(value: Any) -> Any:
    """A value as JSON; stubs and objects by their kind."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return "<%s>" % type(value).__name__


# ------------------------------------------------------------------ target layer ids

def layer_offset(files: _Files, case: Dict[str, Any]) -> Answer:
    """Run the function that reads the ids for each trial, then the code that hands its answer to the model."""
    place = case["places"][0]
    source = files.source(place["file"], {})
    name, cls = place["function"], place["class"]
    deciding = source.method(cls, name) if cls else source.find(name)
    caller = _caller(source, name, place["sink"], cls)
    evidence: Dict[str, Any] = {"function": "%s:%d %s" % (place["file"], deciding.lineno, name), "trials": []}
    space = source.load([cls or name] + (sorted(names_in(caller)) if caller else []), only={cls: {name}} if cls else None)
    if caller is not None:
        source.run(caller, space)
        evidence["user"] = "%s:%d hands it to %s" % (place["file"], caller.lineno, place["sink"])
    wrong = []
    for trial in case["trials"]:
        spec = Loose(method="dflash", use_eagle=lambda: True, use_dflash=lambda: True,
                     draft_model_config=Loose(hf_config=Strict(**copy.deepcopy(trial["config"]))))
        owner: Any = None
        if cls:
            owner = space[cls].__new__(space[cls])
            owner.speculative_config = spec
            owner.vllm_config = Loose(speculative_config=spec)
            got = _ask(getattr(owner, name))
        else:
            got = _ask(space[name], spec)
        outcome = {"what": trial["what"], "expected": trial["expected"], "function": _plain(got)}
        if caller is not None:
            LOG.clear()
            _ask(space["__follow__"], *[_argument(arg.arg, spec, owner) for arg in caller.args.args])
            sunk = [args for path, args, _kw in LOG if path.split(".")[-1] == place["sink"]]
            used = sunk[-1][0] if sunk and sunk[-1] else None
            outcome["used"] = "the model's own default layers" if isinstance(used, Stub) else _plain(used)
        evidence["trials"].append(outcome)
        if any(outcome[key] != trial["expected"] for key in ("function", "used") if key in outcome):
            wrong.append(outcome)
    first = evidence["trials"][0]
    actual = first.get("used", first["function"])
    if wrong:
        shown = wrong[0]
        return _answer("fail", shown["expected"], shown.get("used", shown["function"]) or "no layers", evidence)
    if caller is None:
        return _answer("unknown", case["expected"], actual, dict(evidence, not_found="nothing hands the ids to the model"))
    return _answer("pass", case["expected"], actual, evidence)


def _argument(name: str, spec: Any, owner: Any) -> Any:
    if name == "self":
        return owner
    return spec if "spec" in name else Stub(name)


def _caller(source: Source, name: str, sink: str, cls: Optional[str]) -> Optional[ast.FunctionDef]:
    """``__follow__``: the statements from the call of ``name`` to the call of ``sink``, or None."""
    for owner, function in source.functions():
        if function.name == name or owner != cls:
            continue
        body = _innermost(function.body, name)
        while body is not None:
            start = next(i for i, stmt in enumerate(body) if calls(stmt, name))
            ends = [i for i, stmt in enumerate(body) if i >= start and calls(stmt, sink)]
            if ends:
                return _function("__follow__", function, body[start:ends[-1] + 1])
            body = None
    return None


def _innermost(body: List[ast.stmt], name: str) -> Optional[List[ast.stmt]]:
    for stmt in body:
        if not calls(stmt, name):
            continue
        for field in ("body", "orelse", "finalbody"):
            inner = _innermost(getattr(stmt, field, []), name)
            if inner is not None:
                return inner
        return body
    return None


# ------------------------------------------------------------------ sliding windows

def swa(files: _Files, case: Dict[str, Any]) -> Answer:
    """Build every draft layer on stubs and note the window that its attention is given, and its causality."""
    place = case["places"][0]
    config = Strict(**copy.deepcopy(case["config"]))
    spec = Loose(method="dflash", draft_model_config=Loose(hf_config=config), num_speculative_tokens=15)
    current = Loose(use_v2_model_runner=case["runner"] == "v2", speculative_config=spec, cache_config=None, quant_config=None)
    source = files.source(place["file"], {
        "get_current_vllm_config": lambda *a, **k: current,
        "get_tensor_model_parallel_world_size": lambda *a, **k: 1,
        "get_tensor_model_parallel_rank": lambda *a, **k: 0,
        "current_platform": _Platform(),
        "maybe_prefix": lambda prefix, name: name,
    })
    layer_class = source.find(place["layer"])
    model = source.top.get(place["model"])
    if model is None or place["layer"] not in names_in(model):
        raise NotFound("%s does not build %s" % (place["model"], place["layer"]))
    space = source.load([place["layer"]])
    _note_causality(space)
    got: List[Tuple[Any, Any]] = []
    for index in range(config.num_hidden_layers):
        LOG.clear()
        layer = _ask(space[place["layer"]], **_fill(space[place["layer"]].__init__, {
            "vllm_config": current, "config": config, "layer_idx": index, "cache_config": None, "quant_config": None,
            "prefix": "model.layers.%d" % index, "layer_type": (case["config"].get("layer_types") or [None] * 99)[index],
        }))
        built = [kwargs for path, _args, kwargs in LOG if path.split(".")[-1] == place["attention"]]
        if not built:
            raise NotFound("%s builds no %s" % (place["layer"], place["attention"]))
        if any(None is not kwargs.get(place["keyword"]) and isinstance(kwargs[place["keyword"]], Stub) for kwargs in built):
            raise Undecided("window of layer %d" % index)
        got.append((built[0].get(place["keyword"]), _causality(layer)))
    kept = all(isinstance(getattr(part, "__dict__", {}).get("causal"), bool)
               for part in vars(layer).values() if _NOTED in getattr(part, "__dict__", {}))
    evidence = {"layer": "%s:%d %s" % (place["file"], layer_class.lineno, place["layer"]),
                "user": "%s(%s=)" % (place["attention"], place["keyword"]),
                "causality": "kept by each layer" if kept else "decided per layer, but the runner takes dflash_config.causal"}
    expected = [tuple(item) for item in case["expected"]]
    if [window for window, _causal in got] != [window for window, _causal in expected]:
        status = "fail"
    elif any(causal is None for _window, causal in got):
        status = "unknown"
    else:
        status = "pass" if got == expected else "fail"
    return _answer(status, case["expected"], _plain(got), evidence)


class _Platform(Loose):
    """A platform that is none of those for which the code has exceptions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *args, **kwargs: False
        return super().__getattr__(name)


#: Where the probe notes the causality that an attention object was built with.
_NOTED = "_dflash_causal"


def _note_causality(space: Dict[str, Any]) -> None:
    """Let every cut class that takes ``causal`` note what it was given."""
    def wrap(cls: Any) -> None:
        original = cls.__init__
        signature = inspect.signature(original)
        if "causal" not in signature.parameters:
            return

        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            self.__dict__[_NOTED] = bound.arguments["causal"]
            original(self, *args, **kwargs)

        cls.__init__ = noting

    for value in list(space.values()):
        if isinstance(value, type) and "__init__" in vars(value):
            wrap(value)


def _causality(layer: Any) -> Optional[bool]:
    """The causality that the layer's attention object keeps, or else was built with; None where there is none."""
    for part in vars(layer).values():
        held = getattr(part, "__dict__", {})
        for key in ("causal", _NOTED):
            if isinstance(held.get(key), bool):
                return held[key]
    return None


def _fill(function: Any, values: Dict[str, Any]) -> Dict[str, Any]:
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


# ------------------------------------------------------------------ tail block of the prefix cache

def cache_rule(files: _Files, case: Dict[str, Any]) -> Answer:
    """Run what decides the scheduler's ``use_eagle=`` for each trial, and check that the manager hands it on."""
    place = case["places"][0]
    config = files.source(place["config_file"], {})
    option_declared = place["option"] in _fields(config.find(place["config_class"]))
    if case.get("needs_option") and not option_declared:
        return _answer("fail", case["expected"], "no option %s" % place["option"],
                       {"class": "%s %s" % (place["config_file"], place["config_class"])})
    scheduler = files.source(place["file"], {})
    decide, reads, line = _argument_of(scheduler, place["class"], place["call"], place["keyword"])
    spec_space = config.load([place["config_class"]], only={place["config_class"]: reads})
    space = scheduler.load(sorted(names_in(decide) - {place["class"]}))
    scheduler.run(decide, space)
    evidence: Dict[str, Any] = {"call": "%s:%d %s(%s=)" % (place["file"], line, place["call"], place["keyword"]), "trials": []}
    wrong = []
    for trial in case["trials"]:
        spec = spec_space[place["config_class"]].__new__(spec_space[place["config_class"]])
        vars(spec).update(method=trial["method"], **trial.get("set", {}))
        vllm_config = Loose(speculative_config=spec, **place["given"])
        owner = Loose(vllm_config=vllm_config)
        given = {"self": owner, "vllm_config": vllm_config}
        got = _ask(space["__decide__"], *[given.get(arg.arg, Stub(arg.arg)) for arg in decide.args.args])
        if isinstance(got, Stub):
            raise Undecided("%s of %s" % (place["keyword"], place["call"]))
        outcome = {"method": trial["method"], "set": trial.get("set", {}), "drops": _plain(got), "expected": trial["expected"]}
        evidence["trials"].append(outcome)
        if bool(got) is not trial["expected"]:
            wrong.append(outcome)
    evidence["handed_on"] = _handed_on(files, place)
    actual = {item["method"]: item["drops"] for item in evidence["trials"]}
    if wrong:
        return _answer("fail", case["expected"], actual, evidence)
    return _answer("pass" if evidence["handed_on"] else "unknown", case["expected"], actual, evidence)


def _fields(cls: ast.stmt) -> Set[str]:
    return {item.target.id for item in getattr(cls, "body", [])
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}


def _argument_of(source: Source, cls: str, call: str, keyword: str) -> Tuple[ast.FunctionDef, Set[str], int]:
    """``__decide__``: the slice of a method that computes one keyword of one call; what it reads; the call's line."""
    for owner, function in source.functions():
        found = calls(function, call) if owner == cls else []
        values = [item.value for one in found for item in one.keywords if item.arg == keyword]
        if not values:
            continue
        index = next(i for i, stmt in enumerate(function.body) if calls(stmt, call))
        wanted = {key for item in ast.walk(values[0]) for key in _keys(item)}
        kept = backward(function.body[:index], wanted)
        body = kept + [ast.copy_location(ast.Return(values[0]), values[0])]
        reads = {item.attr for stmt in body for item in ast.walk(stmt) if isinstance(item, ast.Attribute)}
        return _function("__decide__", function, body), reads, found[0].lineno
    raise NotFound("%s has no %s(%s=) in %s" % (source.path, call, keyword, cls))


def _keys(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return ["%s.%s" % (node.value.id, node.attr)]
    return []


def _handed_on(files: _Files, place: Dict[str, Any]) -> bool:
    """Does the manager give the coordinator the value that it was given (both ways)?"""
    source = files.source(place["manager_file"], {})
    decide, _reads, _line = _argument_of(source, place["manager_class"], place["manager_call"], place["keyword"])
    space = source.load([])
    source.run(decide, space)
    answers = []
    for value in (True, False):
        owner = Loose()
        answers.append(space["__decide__"](*[{"self": owner, place["keyword"]: value}.get(arg.arg, Stub(arg.arg))
                                             for arg in decide.args.args]))
    return answers == [True, False]
