# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of what DFlash needs besides: lookahead slot, shared head, guard of mixed drafters, DFlash2.

Part of a child's program, after ``probe_swa.py``.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Set

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import (
    Answer,
    Files,
    Refused,
    answer,
    ask,
    calls,
    key_of,
    plain,
    short,
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
from ansible_collections.dflash.fleet.plugins.module_utils.probe_follow import (
    Group,
    attribute,
    call_cut,
    evaluate,
    imported,
    run_to,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_swa import build, swa
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import last_name, names_in

# ------------------------------------------------------------------ lookahead slot


def lookahead(files: Files, case: Dict[str, Any]) -> Answer:
    """Run what decides the slots that the scheduler reserves past a step, where it hands them to the cache."""
    place = case["place"]
    scheduler = files.source(place["file"], {})
    uses = [
        (cls, method, item.value)
        for cls, method in scheduler.functions()
        for call in calls(method, place["call"])
        for item in call.keywords
        if item.arg == place["keyword"]
    ]
    if not uses:
        raise NotFound("%s has no %s(%s=)" % (place["file"], place["call"], place["keyword"]))
    config = files.source(place["config_file"], {})
    evidence: Dict[str, Any] = {"call": "%s %s(%s=)" % (place["file"], place["call"], place["keyword"]), "trials": []}
    wrong = []
    spec_class = config.load([place["config_class"]], only={place["config_class"]: _methods(config, place)})
    read = [key_of(node) or "" for node in ast.walk(scheduler.tree)]
    asked = {key[len("vllm_config.") :] for key in read if key.startswith("vllm_config.")}
    for trial in case["trials"]:
        spec = spec_class[place["config_class"]].__new__(spec_class[place["config_class"]])
        vars(spec).update(method=trial["method"], num_speculative_tokens=trial["tokens"])
        vllm_config = _vllm_config(files, place, spec, asked)
        got = [_slots(scheduler, use, vllm_config) for use in uses]
        decided = [value for value in got if not isinstance(value, Stub)]
        if not decided:
            raise Undecided("%s of %s" % (place["keyword"], place["call"]))
        outcome = {"method": trial["method"], "tokens": trial["tokens"], "slots": plain(decided)}
        evidence["trials"].append(outcome)
        if any(value != trial["expected"] for value in decided):
            wrong.append(dict(outcome, expected=trial["expected"]))
    shown = {item["method"]: item["slots"][0] for item in evidence["trials"]}
    return answer("fail" if wrong else "pass", case["expected"], shown, evidence)


def _methods(config: Source, place: Dict[str, Any]) -> Set[str]:
    """The questions that the configuration answers about its method."""
    names = {m.name for cls, m in config.functions() if cls == place["config_class"]}
    return {name for name in names if name.startswith(("use_", "uses_"))}


def _vllm_config(files: Files, place: Dict[str, Any], spec: Any, asked: Set[str]) -> Any:
    """The configuration, with the properties of its class that the scheduler asks for."""
    name, path = place["owner_class"], place["owner_file"]
    made: Any = Loose()
    if path in files.texts:
        source = files.source(path, {})
        space = source.load([name], only={name: asked})
        made = space[name].__new__(space[name])
    vars(made).update(speculative_config=spec)
    return made


def _slots(scheduler: Source, use: Any, vllm_config: Any) -> Any:
    """What one call reserves; a stub where it cannot be decided."""
    cls, method, value = use
    owner: Any = Loose(vllm_config=vllm_config)
    given = {"self": owner, "vllm_config": vllm_config}
    if isinstance(value, ast.Name):  # a local name: the last assignment, with what it reads of self
        found = [item for item in ast.walk(method) if isinstance(item, ast.Assign)]
        found = [item for item in found if value.id in [getattr(target, "id", None) for target in item.targets]]
        if not found:
            return Stub(value.id)
        value = found[-1].value
        if isinstance(value, ast.IfExp):  # none while blocks are being loaded
            value = value.orelse if _is_zero(value.body) else value.body
    for item in ast.walk(value):
        key = key_of(item)
        if key and key.startswith("self.") and key[5:] not in vars(owner):
            attribute(scheduler, cls, key[5:], owner, given)
    try:
        return ask(evaluate, scheduler, method, value, scheduler.load([]), given)
    except Undecided:
        return Stub("undecided")


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


# ------------------------------------------------------------------ head of the target


class _Head(Strict):
    """A head, named so that an answer can tell whose it is."""

    name = ""


def lm_head(files: Files, case: Dict[str, Any]) -> Answer:
    """Run what shares the target's head for a target that nests it, and for one that does not."""
    place = case["place"]
    source = files.source(place["file"], {})
    trials = {}
    for nested in (True, False):
        target_head, own = _Head(name="target"), _Head(name="own")
        draft = Strict(lm_head=own, model=Strict(embed_tokens=Stub("own")), config=Strict())
        holder = Strict(lm_head=target_head, model=Strict(embed_tokens=Stub("target")))
        target = holder
        if nested:
            target = Strict(get_language_model=lambda holder=holder: holder, config=Strict(image_token_id=1))
        known = {
            "supports_multimodal": lambda model: hasattr(model, "get_language_model"),
            "get_model": lambda *args, draft=draft, **kwargs: draft,
            "get_pp_group": Group,
        }
        source.known = dict(imported(source, files.all()), **known)
        try:
            (_share_v1 if case["runner"] == "v1" else _share_v2)(source, place, target, draft)
        except Undecided:  # what comes after the head is set asks about other things
            if vars(draft).get("lm_head") is not target_head:
                raise
        except AttributeError as error:  # it asks the target for what a target of this form does not have
            trials["nested" if nested else "plain"] = short(error)
            continue
        held = getattr(draft, "lm_head", None)
        trials["nested" if nested else "plain"] = held.name if isinstance(held, _Head) else plain(held)
    evidence = {"file": place["file"], "trials": trials}
    right = all(held == "target" for held in trials.values())
    return answer("pass" if right else "fail", case["expected"], trials, evidence)


def _share_v1(source: Source, place: Dict[str, Any], target: Any, draft: Any) -> None:
    users = [
        (cls, method)
        for cls, method in source.functions()
        if cls and method.name != place["sink"] and calls(method, place["sink"])
    ]
    if not users:
        raise NotFound("nothing in %s calls %s" % (place["file"], place["sink"]))
    cls, method = users[0]
    space = source.load(sorted(names_in(method) | {str(cls)}), only={str(cls): {place["sink"]}})
    owner = space[str(cls)].__new__(space[str(cls)])
    vars(owner).update(
        model=draft,
        use_local_argmax_reduction=False,
        _get_model=lambda *args, **kwargs: draft,
        get_model_name=lambda model: "Qwen3_5ForConditionalGeneration",
    )
    given = {"self": owner, "target_model": target}
    ask(run_to, source, method, place["sink"], space, given)


def _share_v2(source: Source, place: Dict[str, Any], target: Any, draft: Any) -> None:
    """Run the function that sets the drafter's head, without the statements that ask a stub and set none."""
    own = [method for cls, method in source.functions() if cls is None]
    found = [method for method in own if any(_sets_head(item) for item in ast.walk(method) if _assigns(item))]
    found = found or [method for method in own if calls(method, place["loads"])]
    if not found:
        raise NotFound("nothing in %s sets a head" % place["file"])
    method = found[0]
    space = source.load(sorted(names_in(method)))
    given = {"target_model": target, "dflash_model": draft, "draft_model": draft}
    left_out: Set[int] = set()
    while True:
        body = [stmt for index, stmt in enumerate(method.body) if index not in left_out]
        LOG.clear()
        try:
            ask(call_cut, source, method, body, space, given)
            return
        except (Undecided, AttributeError) as error:
            at = _blamed(method.body, error)
            if at is None or at in left_out or _sets_head(method.body[at]):
                raise
            left_out.add(at)


def _assigns(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(last_name(target) == "lm_head" for target in node.targets)


def _sets_head(stmt: ast.AST) -> bool:
    return any(isinstance(item, ast.Attribute) and item.attr == "lm_head" for item in ast.walk(stmt))


def _blamed(body: List[ast.stmt], error: BaseException) -> Any:
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__follow__":
            line = trace.tb_lineno
        trace = trace.tb_next
    for index, stmt in enumerate(body):
        if stmt.lineno <= line <= (getattr(stmt, "end_lineno", None) or stmt.lineno):
            return index
    return None


# ------------------------------------------------------------------ guard of mixed drafters


def mixed_guard(files: Files, case: Dict[str, Any]) -> Answer:
    """A runner serves a mixed drafter right, or refuses it: what it does otherwise nobody would see."""
    does: Dict[str, Any] = {}
    unknown = False
    for name, part in sorted(case["parts"].items()):
        try:
            said = swa(files, dict(part, place=case["place"]))
        except Refused as error:
            does[name] = "refuses: %s" % error.args[0][:120]
            continue
        does[name] = {"pass": "right", "fail": "wrong and silent"}.get(said["status"], said["status"])
        unknown = unknown or said["status"] == "unknown"
        if said["status"] == "fail" and name == "v1" and _refused_by_config(files, case["guard"]):
            does[name] = "refused by the configuration"
    silent = any(word == "wrong and silent" for word in does.values())
    return answer("fail" if silent else ("unknown" if unknown else "pass"), case["expected"], does, {"runners": does})


def _refused_by_config(files: Files, guard: Dict[str, Any]) -> bool:
    """Does the configuration name a mixed drafter among what the V1 runner cannot do?"""
    if guard["file"] not in files.texts or guard["test"] not in files.texts[guard["file"]]:
        return False
    source = files.source(guard["file"], {})
    for cls, method in source.functions():
        for stmt in ast.walk(method):
            if cls != guard["class"] or not isinstance(stmt, ast.If) or not calls(stmt.test, guard["test"]):
                continue
            said: List[Any] = []
            owner = Loose(**{guard["test"]: lambda: True})
            nodes: List[Any] = list(ast.walk(stmt))
            lists = {node.func.value.id for node in nodes if _appends(node)}
            given = dict({"self": owner}, **dict.fromkeys(lists, said))
            space = source.load([])
            space.update(given)
            call_cut(source, method, [stmt], space, given)
            if said:
                return True
    return False


def _appends(node: Any) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and isinstance(node.func.value, ast.Name)
    )


# ------------------------------------------------------------------ DFlash2


def dflash2(files: Files, case: Dict[str, Any]) -> Answer:
    """DFlash2's model builds its own layers through the base, and the V2 runner picks its speculator."""
    place = case["place"]
    evidence: Dict[str, Any] = {}
    needed = ("own_file", "speculator_file", "registry", "choice_file", "file")
    missing = [place[key] for key in needed if place[key] not in files.texts]
    if missing:
        return answer("fail", case["expected"], "no %s" % missing[0], {"missing": missing})
    registered = registry_entry(files.texts[place["registry"]], case["architecture"])
    stem = place["own_file"].rpartition("/")[2][: -len(".py")]
    if registered is None or registered[0].rpartition(".")[2] != stem:
        return answer("fail", case["expected"], "%s is registered as %s" % (case["architecture"], registered), evidence)
    own, base = files.source(place["own_file"], {}), files.source(place["file"], {})
    model = own.top.get(place["own_model"])
    hook = _named(model, place["own_layer"])
    evidence.update(speculator=_chosen(files, place, case["architecture"]), hook=hook)
    if hook is None or _named(own.top.get(registered[1]), place["own_model"]) is None:
        return answer("fail", case["expected"], "%s names no layer of its own" % place["own_model"], evidence)
    if not {place["layer"]} & {last_name(item) for item in getattr(own.top.get(place["own_layer"]), "bases", [])}:
        return answer("fail", case["expected"], "%s is no layer of DFlash" % place["own_layer"], evidence)
    marks: List[int] = []

    def mark(*args: Any, **kwargs: Any) -> Any:
        marks.append(kwargs.get("layer_idx", -1))
        return Loose()

    build(base, case, {hook: mark})
    evidence["layers"] = marks
    if marks != list(range(case["config"]["num_hidden_layers"])):
        return answer("fail", case["expected"], "the base builds its own layers, not those of DFlash2", evidence)
    chosen_file = files.source(place["speculator_file"], {})
    if evidence["speculator"] != place["speculator"] or place["speculator"] not in chosen_file.top:
        return answer("fail", case["expected"], "the V2 runner picks %s" % evidence["speculator"], evidence)
    return answer("pass", case["expected"], case["expected"], evidence)


def _named(cls: Any, value: str) -> Any:
    """The attribute by which a class names another class."""
    for item in getattr(cls, "body", []):
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name) and item.value.id == value:
            return getattr(item.targets[0], "id", None)
    return None


def registry_entry(text: str, architecture: str) -> Any:
    """Module and class that the registry names for an architecture; None where it names none."""
    for node in ast.walk(ast.parse(text)):
        for key, value in zip(getattr(node, "keys", []), getattr(node, "values", []) if _is_dict(node) else []):
            if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                words = [item.value for item in value.elts if isinstance(item, ast.Constant)]
                return words if len(words) == 2 else None
    return None


def _is_dict(node: ast.AST) -> bool:
    return isinstance(node, ast.Dict)


def _chosen(files: Files, place: Dict[str, Any], architecture: str) -> str:
    """The class that the V2 runner makes for this architecture."""
    source = files.source(place["choice_file"], {})
    source.known = imported(source, files.all())
    space = source.load([place["choice"]])
    if place["choice"] not in space:
        raise NotFound("%s has no %s" % (place["choice_file"], place["choice"]))
    spec = Loose(method="dflash", draft_model_config=Loose(architectures=[architecture]))
    chooser: Any = source.top[place["choice"]]
    LOG.clear()
    arguments = chooser.args.args
    ask(
        space[place["choice"]],
        *[Loose(speculative_config=spec) if a.arg == "vllm_config" else Stub(a.arg) for a in arguments],
    )
    made = [path for path, _args, _kw in LOG if path.endswith("Speculator")]
    return made[-1] if made else "nothing"
