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
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_extra import dflash2, lm_head, lookahead, mixed_guard
from ansible_collections.dflash.fleet.plugins.module_utils.probe_follow import (
    Group,
    assigned,
    imported,
    reached,
    run_to,
    wants,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_swa import swa
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import names_in
from ansible_collections.dflash.fleet.plugins.module_utils.probe_writes import after_construction, in_configuration

#: A method that never drops.
NEVER = [{"method": "ngram", "expected": False}]


def main(payload: Dict[str, Any]) -> List[Answer]:
    """Answer all cases of ``payload``: ``{sources: {path: text}, cases: [{id, kind, places, ...}]}``.

    A case with several places is answered by the first that has what the probe looks for.
    """
    parsed: Dict[str, Source] = {}
    return [dict(_first(Files(payload["sources"], parsed), case), id=case["id"]) for case in payload["cases"]]


def _first(files: Files, case: Dict[str, Any]) -> Answer:
    said: Answer = {}
    for place in case["places"]:
        LOG.clear()
        said = _one(files, dict(case, place=place))
        if "not_found" not in (said["evidence"] or {}):
            break
    return said


def _one(files: Files, case: Dict[str, Any]) -> Answer:
    probes = {
        "layer_offset": layer_offset,
        "swa": swa,
        "cache_rule": cache_rule,
        "lookahead": lookahead,
        "lm_head": lm_head,
        "mixed_guard": mixed_guard,
        "dflash2": dflash2,
    }
    try:
        return probes[case["kind"]](files, case)
    except NotFound as error:
        return answer("unknown", case["expected"], None, {"not_found": str(error)})
    except Undecided as error:
        more = wants(list(files.parsed.values()), error)
        return answer("unknown", case["expected"], None, {"undecided": str(error), "wants": more})
    except Refused as error:
        return answer("fail", case["expected"], "refuses: %s" % error.args[0], {"error": short(error.args[1])})
    except SyntaxError as error:
        return answer("unknown", case["expected"], None, {"cannot_parse": str(error)})
    except Exception as error:  # the code under test is foreign: whatever it raises is an answer
        return answer("unknown", case["expected"], None, {"error": short(error)})


# ------------------------------------------------------------------ target layer ids


def layer_offset(files: Files, case: Dict[str, Any]) -> Answer:
    """Run the code that hands ids to the model (``sink``), whatever it asks for them, for each trial."""
    place = case["place"]
    source = files.source(place["file"], {})
    users = [
        (cls, method)
        for cls, method in source.functions()
        if method.name != place["sink"] and calls(method, place["sink"])
    ]
    if not users:
        raise NotFound("nothing in %s calls %s" % (place["file"], place["sink"]))
    source.known = dict(imported(source, files.all()), get_pp_group=Group)
    evidence: Dict[str, Any] = {"trials": []}
    wrong = []
    for cls, method in users:
        evidence["user"] = "%s:%d %s hands them to %s" % (place["file"], method.lineno, method.name, place["sink"])
        wanted = names_in(method) - ({cls} if cls else set())
        space = source.load(sorted(wanted) + ([cls] if cls else []), only={cls: {method.name}} if cls else None)
        for trial in case["trials"]:
            used = _handed(files, case, source, (cls, method), space, trial)
            outcome = {"what": trial["what"], "expected": trial["expected"], "used": used}
            evidence["trials"].append(outcome)
            if used != trial["expected"]:
                wrong.append(outcome)
    shown = wrong[0] if wrong else evidence["trials"][0]
    if any(str(outcome["used"]).startswith("<") for outcome in wrong):
        raise Undecided("ids of %s" % wrong[0]["used"][1:-1])
    if not wrong and place.get("also"):
        raise Undecided("which of the calls comes last: %s is also in %s" % (place["sink"], place["also"][0]))
    return answer("fail" if wrong else "pass", shown["expected"], shown["used"] or "no layers", evidence)


def _handed(
    files: Files, case: Dict[str, Any], source: Source, user: Tuple[Optional[str], Any], space: Any, trial: Any
) -> Any:
    """What the sink is given in one trial; None where it is not called."""
    cls, method = user
    sink = case["place"]["sink"]
    config = copy.deepcopy(trial["config"])
    if trial.get("raw"):
        config = translated(files, case["translator"], trial["raw"], config)
    spec = _asked(files, case["place"])
    vars(spec).update(method="dflash", draft_model_config=Loose(hf_config=Strict(**config)))
    owner: Any = Loose(speculative_config=spec)
    if cls:
        owner = space[cls].__new__(space[cls])
        vars(owner).update(speculative_config=spec, vllm_config=Loose(speculative_config=spec))
    given = {a.arg: spec for a in method.args.args if "spec" in a.arg}
    given.update(self=owner, vllm_config=Loose(speculative_config=spec))
    if method.name.startswith("_") and not calls(source.tree, method.name):
        return None  # a part of the class that nobody calls
    if cls and not reached(source, cls, method, owner, given):
        return None
    if not _refusing(run_to, source, method, sink, space, given):
        return None
    sunk = [args for path, args, _kw in LOG if path.split(".")[-1] == sink]
    if not sunk or not sunk[-1]:
        return None
    used = sunk[-1][0]
    if isinstance(used, Stub):
        return "the model's own default layers" if "default" in used._stub_name else "<%s>" % used._stub_name
    return plain(used)


def _asked(files: Files, place: Dict[str, Any]) -> Any:
    """The speculative configuration with the tree's own answers about its method, where they are here."""
    config = files.parsable(place.get("config_file", ""))
    if config is None or place["config_class"] not in config.top:
        return Loose(use_eagle=lambda: True, use_dflash=lambda: True)
    names = {method.name for cls, method in config.functions() if cls == place["config_class"]}
    asked = {name for name in names if name.startswith(("use_", "uses_"))}
    made = config.load([place["config_class"]], only={place["config_class"]: asked})[place["config_class"]]
    return made.__new__(made)


def _refusing(function: Any, *args: Any) -> Any:
    """Call a helper of ours that runs cut code; the cut code's own refusals become ``Refused``."""
    return ask(function, *args)


# ------------------------------------------------------------------ tail block of the prefix cache


def cache_rule(files: Files, case: Dict[str, Any]) -> Answer:
    """Run what decides the scheduler's ``use_eagle=`` for each trial, and check that the manager hands it on."""
    place = case["place"]
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
    evidence: Dict[str, Any] = {"trials": []}
    for trial in case["trials"]:
        described = dict(trial.get("set", {}), method=trial["method"])
        names = set(trial.get("set", {}))
        reset = in_configuration(config, place["config_class"], names, described) if names else []
        if reset:
            return answer("fail", case["expected"], "the configuration sets %s again" % place["option"], {"at": reset})
    found = None
    for keyword in _keywords(scheduler, place):
        try:
            decide, reads, line = _argument_of(scheduler, place["class"], place["call"], keyword)
            outcomes = _trials(files, case, scheduler, decide, reads)
        except Unnamed:
            continue
        if outcomes is not None and keyword != place["keyword"]:  # one that is true for all methods is another
            never = _trials(files, dict(case, trials=NEVER), scheduler, decide, reads)
            outcomes = outcomes if never and never[0]["drops"] is False and _tells(outcomes) else None
        if outcomes is not None:
            found = keyword
            evidence.update(call="%s:%d %s(%s=)" % (place["file"], line, place["call"], keyword), trials=outcomes)
            break
    if found is None:
        raise Undecided("what decides %s of %s" % (place["keyword"], place["call"]))
    wrong = [item for item in evidence["trials"] if bool(item["drops"]) is not item["expected"]]
    evidence["handed_on"] = _handed_on(files, place, found)
    actual = {item["method"]: item["drops"] for item in evidence["trials"] if item["expected"] is not None}
    if wrong or not evidence["handed_on"]:
        return answer("fail", case["expected"], actual if wrong else "not handed on by the manager", evidence)
    return answer("pass", case["expected"], actual, evidence)


def _keywords(source: Source, place: Dict[str, Any]) -> List[str]:
    """The keyword that carries the rule, or, where a tree calls it otherwise, all of the call."""
    names: List[str] = []
    for _owner, method in source.functions():
        for call in calls(method, place["call"]):
            names += [item.arg for item in call.keywords if item.arg]
    return [place["keyword"]] + ([] if place["keyword"] in names else sorted(set(names)))


def _tells(outcomes: List[Dict[str, Any]]) -> bool:
    """A value that is true for the control and follows the method is the rule."""
    return any(item["expected"] is True and item["drops"] is True for item in outcomes) and all(
        isinstance(item["drops"], bool) for item in outcomes
    )


def _trials(
    files: Files, case: Dict[str, Any], scheduler: Source, decide: ast.FunctionDef, reads: Set[str]
) -> Optional[List[Dict[str, Any]]]:
    """The value of the keyword for each trial; None where one cannot be decided (of several keywords)."""
    place = case["place"]
    config = files.source(place["config_file"], {})
    spec_space = config.load([place["config_class"]], only={place["config_class"]: reads})
    scheduler.known = {place["call"]: _Given, "__given__": _given}
    space = scheduler.load(sorted(names_in(decide) - {place["class"], place["call"]}))
    space.update(scheduler.known)
    scheduler.run(decide, space)
    outcomes = []
    for trial in case["trials"]:
        spec = spec_space[place["config_class"]].__new__(spec_space[place["config_class"]])
        vars(spec).update(method=trial["method"], **trial.get("set", {}))
        cache = Loose(enable_prefix_caching=True, block_size=16, cache_dtype="auto", num_gpu_blocks=1024)
        vllm_config = Loose(speculative_config=spec, cache_config=cache, **place["given"])
        owner = Loose(vllm_config=vllm_config)
        given = {"self": owner, "vllm_config": vllm_config}
        after_construction(scheduler, place["class"], "kv_cache_manager", Loose(vllm_config=vllm_config), given)
        got = ask(space["__decide__"], *[given.get(arg.arg, Stub(arg.arg)) for arg in decide.args.args])
        if isinstance(got, Stub):
            return None
        outcomes.append(
            {
                "method": trial["method"],
                "set": trial.get("set", {}),
                "drops": plain(got),
                "expected": trial["expected"],
            }
        )
    return outcomes


def _fields(cls: ast.stmt) -> Set[str]:
    return {
        item.target.id
        for item in getattr(cls, "body", [])
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


class _Pruned(ast.NodeTransformer):
    """Calls and dictionaries without the values of other keywords, so that these decide nothing."""

    def __init__(self, keyword: str) -> None:
        self.keyword = keyword

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        for item in node.keywords:
            if item.arg not in (None, self.keyword):
                item.value = ast.copy_location(ast.Constant(None), item.value)
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        self.generic_visit(node)
        for index, key in enumerate(node.keys):
            if isinstance(key, ast.Constant) and key.value != self.keyword:
                node.values[index] = ast.copy_location(ast.Constant(None), node.values[index])
        return node


def _made_of(source: Source, cls: str, call: str, keyword: str) -> Tuple[ast.FunctionDef, Set[str], int]:
    """``__decide__`` where the call is spelt otherwise: run to where its outcome is kept, see what it was given."""
    for owner, method in source.functions():
        if (owner != cls and cls in source.top) or call not in names_in(method):
            continue
        tainted, last = {call}, -1
        for index, stmt in enumerate(method.body):
            if names_in(stmt) & tainted:
                tainted |= assigned([stmt])
                last = index
                if isinstance(stmt, ast.Assign) and (key_of(stmt.targets[0]) or "").startswith("self."):
                    break
        final = method.body[last]
        if not isinstance(final, ast.Assign):
            break
        pruned = [_Pruned(keyword).visit(copy.deepcopy(stmt)) for stmt in method.body[: last + 1]]
        final = pruned[-1]
        read = ast.Call(ast.Name("__given__", ast.Load()), [final.value, ast.Constant(keyword)], [])
        kept = backward(pruned[:-1], {key for item in ast.walk(final.value) for key in [key_of(item)] if key})
        body = kept + [ast.fix_missing_locations(ast.copy_location(ast.Return(read), final))]
        reads = {item.attr for stmt in body for item in ast.walk(stmt) if isinstance(item, ast.Attribute)}
        return function("__decide__", method, body), reads, final.lineno
    raise NotFound("%s has no %s(%s=) in %s" % (source.path, call, keyword, cls))


class Unnamed(Undecided):
    """A recorded call was not given this keyword."""


class _Given:
    """What a recorded call was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def _given(made: Any, keyword: str) -> Any:
    if not isinstance(made, _Given) or made.args or keyword not in made.kwargs:
        raise Unnamed("%s of the call" % keyword)
    return made.kwargs[keyword]


def _argument_of(source: Source, cls: str, call: str, keyword: str) -> Tuple[ast.FunctionDef, Set[str], int]:
    """``__decide__``: the slice of a method that computes one keyword of one call; what it reads; the call's line."""
    for owner, method in source.functions():
        found = calls(method, call) if owner == cls or cls not in source.top else []
        values = [item.value for one in found for item in one.keywords if item.arg == keyword]
        if not values:
            continue
        index = next(i for i, stmt in enumerate(method.body) if calls(stmt, call))
        wanted = {key for item in ast.walk(values[0]) for key in [key_of(item)] if key}
        kept = backward(method.body[:index], wanted)
        body = kept + [ast.copy_location(ast.Return(values[0]), values[0])]
        reads = {item.attr for stmt in body for item in ast.walk(stmt) if isinstance(item, ast.Attribute)}
        return function("__decide__", method, body), reads, found[0].lineno
    return _made_of(source, cls, call, keyword)


def _handed_on(files: Files, place: Dict[str, Any], keyword: str) -> bool:
    """Does the manager give the coordinator the value that it was given (both ways), under whatever name?"""
    source = files.source(place["manager_file"], {})
    names = {
        item.arg
        for owner, method in source.functions()
        if owner == place["manager_class"]
        for call in calls(method, place["manager_call"])
        for item in call.keywords
        if item.arg
    }
    if not names:
        raise NotFound("%s does not call %s by keywords" % (place["manager_class"], place["manager_call"]))
    for name in sorted(names, key=lambda item: item != place["keyword"]):
        decide, _reads, _line = _argument_of(source, place["manager_class"], place["manager_call"], name)
        space = source.load([])
        source.run(decide, space)
        answers = []
        for value in (True, False):
            given = {"self": Loose(), keyword: value}
            try:
                answers.append(space["__decide__"](*[given.get(a.arg, Stub(a.arg)) for a in decide.args.args]))
            except Undecided:
                break
        if len(answers) == 2 and answers[0] is True and answers[1] is False:
            return True
        if name == place["keyword"]:
            return False
    return False
