# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The capability probes: program of a child process, after ``probe_code``, ``probe_answer`` and ``probe_swa``.

Each probe runs the deciding code, follows its answer to the code that uses it, and asks a control
question whose right answer is known.  An answer is ``{status, expected, actual, evidence}``.
"""

from __future__ import annotations

import ast
import copy
from typing import Any, Dict, List, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import (
    Answer,
    Files,
    Refused,
    answer,
    ask,
    backward,
    calls,
    function,
    key_of,
    plain,
    short,
    translated,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import (
    LOG,
    Loose,
    NotFound,
    Source,
    Strict,
    Stub,
    Undecided,
    names_in,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_swa import swa


def main(payload: Dict[str, Any]) -> List[Answer]:
    """Answer all cases of ``payload``: ``{sources: {path: text}, cases: [{id, kind, places, ...}]}``."""
    probes = {"layer_offset": layer_offset, "swa": swa, "cache_rule": cache_rule}
    answers = []
    parsed: Dict[str, Source] = {}
    for case in payload["cases"]:
        LOG.clear()
        try:
            said = probes[case["kind"]](Files(payload["sources"], parsed), case)
        except NotFound as error:
            said = answer("unknown", case["expected"], None, {"not_found": str(error)})
        except Undecided as error:
            said = answer("unknown", case["expected"], None, {"undecided": str(error)})
        except Refused as error:
            said = answer("fail", case["expected"], "refuses: %s" % error.args[0], {"error": short(error.args[1])})
        except SyntaxError as error:
            said = answer("unknown", case["expected"], None, {"cannot_parse": str(error)})
        except Exception as error:  # the code under test is foreign: whatever it raises is an answer
            said = answer("unknown", case["expected"], None, {"error": short(error)})
        answers.append(dict(said, id=case["id"]))
    return answers


# ------------------------------------------------------------------ target layer ids


def layer_offset(files: Files, case: Dict[str, Any]) -> Answer:
    """Run the function that reads the ids for each trial, then the code that hands its answer to the model."""
    place = case["places"][0]
    source = files.source(place["file"], {})
    name, cls = place["function"], place["class"]
    deciding = source.method(cls, name) if cls else source.find(name)
    caller = _caller(source, name, place["sink"], cls)
    evidence: Dict[str, Any] = {"function": "%s:%d %s" % (place["file"], deciding.lineno, name), "trials": []}
    space = source.load(
        [cls or name] + (sorted(names_in(caller)) if caller else []), only={cls: {name}} if cls else None
    )
    if caller is not None:
        source.run(caller, space)
        evidence["user"] = "%s:%d hands it to %s" % (place["file"], caller.lineno, place["sink"])
    wrong = []
    for trial in case["trials"]:
        config = copy.deepcopy(trial["config"])
        if trial.get("raw"):
            config = translated(files, case["translator"], trial["raw"], config)
        spec = Loose(
            method="dflash",
            use_eagle=lambda: True,
            use_dflash=lambda: True,
            draft_model_config=Loose(hf_config=Strict(**config)),
        )
        owner: Any = None
        if cls:
            owner = space[cls].__new__(space[cls])
            owner.speculative_config = spec
            owner.vllm_config = Loose(speculative_config=spec)
            got = ask(getattr(owner, name))
        else:
            got = ask(space[name], spec)
        outcome = {"what": trial["what"], "expected": trial["expected"], "function": plain(got)}
        if caller is not None:
            LOG.clear()
            ask(space["__follow__"], *[_argument(arg.arg, spec, owner) for arg in caller.args.args])
            sunk = [args for path, args, _kw in LOG if path.split(".")[-1] == place["sink"]]
            used = sunk[-1][0] if sunk and sunk[-1] else None
            outcome["used"] = "the model's own default layers" if isinstance(used, Stub) else plain(used)
        evidence["trials"].append(outcome)
        if any(outcome[key] != trial["expected"] for key in ("function", "used") if key in outcome):
            wrong.append(outcome)
    first = evidence["trials"][0]
    actual = first.get("used", first["function"])
    if wrong:
        shown = wrong[0]
        return answer("fail", shown["expected"], shown.get("used", shown["function"]) or "no layers", evidence)
    if caller is None:
        return answer(
            "unknown", case["expected"], actual, dict(evidence, not_found="nothing hands the ids to the model")
        )
    return answer("pass", case["expected"], actual, evidence)


def _argument(name: str, spec: Any, owner: Any) -> Any:
    if name == "self":
        return owner
    return spec if "spec" in name else Stub(name)


def _caller(source: Source, name: str, sink: str, cls: Optional[str]) -> Optional[ast.FunctionDef]:
    """``__follow__``: the statements from the call of ``name`` to the call of ``sink``, or None."""
    for owner, method in source.functions():
        if method.name == name or owner != cls:
            continue
        body = _innermost(method.body, name)
        while body is not None:
            start = next(i for i, stmt in enumerate(body) if calls(stmt, name))
            ends = [i for i, stmt in enumerate(body) if i >= start and calls(stmt, sink)]
            if ends:
                return function("__follow__", method, body[start : ends[-1] + 1])
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


# ------------------------------------------------------------------ tail block of the prefix cache


def cache_rule(files: Files, case: Dict[str, Any]) -> Answer:
    """Run what decides the scheduler's ``use_eagle=`` for each trial, and check that the manager hands it on."""
    place = case["places"][0]
    config = files.source(place["config_file"], {})
    option_declared = place["option"] in _fields(config.find(place["config_class"]))
    if case.get("needs_option") and not option_declared:
        return answer(
            "fail",
            case["expected"],
            "no option %s" % place["option"],
            {"class": "%s %s" % (place["config_file"], place["config_class"])},
        )
    scheduler = files.source(place["file"], {})
    decide, reads, line = _argument_of(scheduler, place["class"], place["call"], place["keyword"])
    spec_space = config.load([place["config_class"]], only={place["config_class"]: reads})
    space = scheduler.load(sorted(names_in(decide) - {place["class"]}))
    scheduler.run(decide, space)
    evidence: Dict[str, Any] = {
        "call": "%s:%d %s(%s=)" % (place["file"], line, place["call"], place["keyword"]),
        "trials": [],
    }
    wrong = []
    for trial in case["trials"]:
        spec = spec_space[place["config_class"]].__new__(spec_space[place["config_class"]])
        vars(spec).update(method=trial["method"], **trial.get("set", {}))
        vllm_config = Loose(speculative_config=spec, **place["given"])
        owner = Loose(vllm_config=vllm_config)
        given = {"self": owner, "vllm_config": vllm_config}
        got = ask(space["__decide__"], *[given.get(arg.arg, Stub(arg.arg)) for arg in decide.args.args])
        if isinstance(got, Stub):
            raise Undecided("%s of %s" % (place["keyword"], place["call"]))
        outcome = {
            "method": trial["method"],
            "set": trial.get("set", {}),
            "drops": plain(got),
            "expected": trial["expected"],
        }
        evidence["trials"].append(outcome)
        if bool(got) is not trial["expected"]:
            wrong.append(outcome)
    evidence["handed_on"] = _handed_on(files, place)
    actual = {item["method"]: item["drops"] for item in evidence["trials"]}
    if wrong:
        return answer("fail", case["expected"], actual, evidence)
    return answer("pass" if evidence["handed_on"] else "unknown", case["expected"], actual, evidence)


def _fields(cls: ast.stmt) -> Set[str]:
    return {
        item.target.id
        for item in getattr(cls, "body", [])
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _argument_of(source: Source, cls: str, call: str, keyword: str) -> Tuple[ast.FunctionDef, Set[str], int]:
    """``__decide__``: the slice of a method that computes one keyword of one call; what it reads; the call's line."""
    for owner, method in source.functions():
        found = calls(method, call) if owner == cls else []
        values = [item.value for one in found for item in one.keywords if item.arg == keyword]
        if not values:
            continue
        index = next(i for i, stmt in enumerate(method.body) if calls(stmt, call))
        wanted = {key for item in ast.walk(values[0]) for key in [key_of(item)] if key}
        kept = backward(method.body[:index], wanted)
        body = kept + [ast.copy_location(ast.Return(values[0]), values[0])]
        reads = {item.attr for stmt in body for item in ast.walk(stmt) if isinstance(item, ast.Attribute)}
        return function("__decide__", method, body), reads, found[0].lineno
    raise NotFound("%s has no %s(%s=) in %s" % (source.path, call, keyword, cls))


def _handed_on(files: Files, place: Dict[str, Any]) -> bool:
    """Does the manager give the coordinator the value that it was given (both ways)?"""
    source = files.source(place["manager_file"], {})
    decide, _reads, _line = _argument_of(source, place["manager_class"], place["manager_call"], place["keyword"])
    space = source.load([])
    source.run(decide, space)
    answers = []
    for value in (True, False):
        owner = Loose()
        answers.append(
            space["__decide__"](
                *[{"self": owner, place["keyword"]: value}.get(arg.arg, Stub(arg.arg)) for arg in decide.args.args]
            )
        )
    return answers == [True, False]
