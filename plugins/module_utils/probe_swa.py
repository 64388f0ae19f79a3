# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The probe of sliding windows.  Part of a child's program, after ``probe_answer.py``."""

from __future__ import annotations

import ast
import copy
from typing import Any, Dict, List, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import (
    Answer,
    Files,
    answer,
    ask,
    key_of,
    plain,
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
from ansible_collections.dflash.fleet.plugins.module_utils.probe_follow import (
    Group,
    attribute,
    class_that,
    imported,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_syntax import last_name, names_in
from ansible_collections.dflash.fleet.plugins.module_utils.probe_writes import (
    WINDOW_KEYS,
    before_layers,
    in_configuration,
)

#: An attention's heads, their size and the scale: what no release gives otherwise than by position.
PLAIN_ARGUMENTS = 3
#: What a model answers about the causality of its layers.
QUESTION = "get_draft_attn_causal"


def swa(files: Files, case: Dict[str, Any]) -> Answer:
    """Build the drafter's layers on stubs as its model does; note each attention's window and causality."""
    place = case["place"]
    described = copy.deepcopy(case["config"])
    if case.get("raw"):
        described = translated(files, case["translator"], case["raw"], described)
    source = files.source(place["file"], {})
    config = Strict(**described)
    settings = files.parsable(place.get("config_file", ""))
    if settings is not None and place["config_class"] in settings.top:
        in_configuration(settings, place["config_class"], WINDOW_KEYS, {"method": "dflash"}, config)
        described = vars(config)
    layers, built, space = build(source, dict(case, config=described))
    windows = _windows(files, place, built, len(layers))
    evidence = {
        "layer": "%s:%d %s" % (place["file"], source.find(place["layer"]).lineno, place["layer"]),
        "user": "%s(%s=)" % (place["attention"], place["keyword"]),
    }
    expected = [tuple(item) for item in case["expected"]]
    if windows != [window for window, _causal in expected]:
        return answer("fail", case["expected"], {"windows": plain(windows)}, evidence)
    config = Strict(**described)
    causal, evidence["causality"] = _causalities(files, case, config, layers, space)
    got = list(zip(windows, causal))
    status = "unknown" if None in causal else ("pass" if got == expected else "fail")
    if status == "fail" and len(set(windows)) == 1 and not _by_layer(files, place, case["runner"], layers):
        # The question is about the window; in such a tree one causality is stated for the drafter as a whole.
        status = "pass"
        evidence["causality"] += ", one for all layers; a layer's own is not used in this tree"
    return answer(status, case["expected"], plain(got), evidence)


def _by_layer(files: Files, place: Dict[str, Any], runner: str, layers: List[Any]) -> bool:
    """Does the tree tell causality by layer: kept by a layer or a part of it, or known by the layers' names?"""
    parts = [part for layer in layers for part in [layer, *vars(layer).values()] if isinstance(part, Loose)]
    text = "".join(files.texts.get(path, "") for path in (place["file"], place[runner]["file"]))
    words = [word for word in (place[runner].get("names"), QUESTION) if word]
    return any("causal" in vars(part) for part in parts) or any(word in text for word in words)


def build(
    source: Source, case: Dict[str, Any], instead: Optional[Dict[str, Any]] = None
) -> Tuple[List[Any], List[Tuple[Any, Dict[str, Any]]], Dict[str, Any]]:
    """The drafter's layers, what every attention that was built was given, and what was loaded.

    ``instead`` takes the place of attributes of the model's class (a hook by which a derived model names its layer).
    """
    place = case["place"]
    config: Any = Strict(**copy.deepcopy(case["config"]))
    spec = Loose(method="dflash", draft_model_config=Loose(hf_config=config), num_speculative_tokens=15)
    current = Loose(
        use_v2_model_runner=case.get("runner") == "v2", speculative_config=spec, cache_config=None, quant_config=None
    )
    torch_nn = Stub("nn")
    torch_nn.ModuleList = list
    source.known = {
        "get_current_vllm_config": lambda *a, **k: current,
        "get_tensor_model_parallel_world_size": lambda *a, **k: 1,
        "get_tensor_model_parallel_rank": lambda *a, **k: 0,
        "get_pp_group": Group,
        "current_platform": _Platform(),
        "maybe_prefix": lambda prefix, name: name,
        "make_layers": lambda count, make, prefix="": (
            0,
            count,
            [make(prefix="%s.%d" % (prefix, index)) for index in range(count)],
        ),
        "extract_layer_index": lambda name, *rest: int(str(name).rsplit(".", 1)[-1]),
        "torch.nn": torch_nn,
        "nn": torch_nn,
        "ModuleList": list,
    }
    _names(source, place)
    space = source.load([place["model"]])
    model = source.top[place["model"]]
    owner = space[place["model"]].__new__(space[place["model"]])
    vars(owner).update(instead or {})
    given = {
        "vllm_config": current,
        "config": config,
        "start_layer_id": 64,
        "prefix": "model",
        "layer_types": list(case["config"].get("layer_types") or []),
    }
    before_layers(source, place["model"], config, Loose(speculative_config=spec))
    LOG.clear()
    layers = ask(attribute, source, place["model"], "layers", owner, given, space)
    if not isinstance(layers, list):
        raise Undecided("layers of %s (line %d)" % (place["model"], model.lineno))
    built = [
        (args, kwargs)
        for path, args, kwargs in LOG
        if path.split(".")[-1] == place["attention"] or place["keyword"] in kwargs
    ]
    return layers, built, space


def _names(source: Source, place: Dict[str, Any]) -> None:
    """Where a name of ``place`` is not in the file, the class that does its work: who builds whom."""

    def builds(name: str, cls: ast.ClassDef) -> bool:
        return cls.name != name and name in names_in(cls)

    def gives(cls: ast.ClassDef) -> bool:
        found = [item for item in ast.walk(cls) if isinstance(item, ast.Call)]
        return any(keyword.arg == place["keyword"] for item in found for keyword in item.keywords)

    if place["layer"] not in source.top:
        attention = class_that(source, gives)
        layer = class_that(source, lambda cls: builds(attention, cls)) if attention else None
        if layer is None:
            raise NotFound("no class in %s gives an attention %s" % (place["file"], place["keyword"]))
        place["layer"] = layer
    if place["model"] not in source.top:
        model = class_that(source, lambda cls: builds(place["layer"], cls))
        if model is None:
            raise NotFound("%s builds no %s" % (place["file"], place["layer"]))
        place["model"] = model
    elif place["layer"] not in names_in(source.top[place["model"]]):
        raise NotFound("%s does not build %s" % (place["model"], place["layer"]))


def _windows(files: Files, place: Dict[str, Any], built: List[Tuple[Any, Dict[str, Any]]], count: int) -> List[Any]:
    """The window that each layer's attention was given."""
    if not built:
        raise NotFound("%s builds no %s" % (place["layer"], place["attention"]))
    if len(built) != count:
        raise Undecided("which of %d attentions belongs to which of %d layers" % (len(built), count))
    windows = [_window(files, place, args, kwargs) for args, kwargs in built]
    for index, window in enumerate(windows):
        if isinstance(window, Stub):
            raise Undecided("window of layer %d" % index)
    return windows


def _window(files: Files, place: Dict[str, Any], args: Any, kwargs: Dict[str, Any]) -> Any:
    """The window of one attention's call; one given by position is bound to the tree's own signature."""
    keyword, position = place["keyword"], None
    if keyword in kwargs:
        return kwargs[keyword]
    if len(args) <= PLAIN_ARGUMENTS:
        return None
    for source in files.all():
        for cls, method in source.functions():
            if cls == place["attention"] and method.name == "__init__":
                names = [item.arg for item in method.args.posonlyargs + method.args.args][1:]
                position = names.index(keyword) if keyword in names else len(args)
    if position is None:
        raise Undecided("arguments of %s" % place["attention"])
    return args[position] if position < len(args) else None


def _causalities(
    files: Files, case: Dict[str, Any], config: Any, layers: List[Any], space: Dict[str, Any]
) -> Tuple[List[Optional[bool]], str]:
    """Causality per layer as the runner's attention metadata has it, and where that was found."""
    place = case["place"][case["runner"]]
    names = [str(index) for index in range(len(layers))]
    if place["file"] not in files.texts:
        return [None] * len(layers), "no file %s" % place["file"]
    source = files.source(place["file"], {})
    source.known = dict(
        imported(source, files.all()),
        current_platform=_Platform(),
        get_pp_group=Group,
    )
    cls = place["class"] if place["class"] in source.top else class_that(source, lambda item: bool(_given(item)))
    if cls is None:
        return [None] * len(layers), "%s has no class that gives a causality" % place["file"]
    groups = [[], []]  # type: List[List[str]]
    for name, (window, _causal) in zip(names, case["expected"]):
        groups[1 if window is None else 0].append(name)
    groups = [group for group in groups if group]
    answers: List[List[Optional[bool]]] = []
    for value in _given(source.top[cls]):
        owner: Any = Loose(
            draft_model_config=Loose(hf_config=config),
            vllm_config=Loose(speculative_config=Loose(draft_model_config=Loose(hf_config=config))),
            speculative_config=Loose(draft_model_config=Loose(hf_config=config)),
            model=_model(files, case, layers, names),
            draft_kv_cache_group_ids=list(range(len(groups))),
        )
        cache = Loose(kv_cache_groups=[Loose(layer_names=group) for group in groups])
        if isinstance(value, ast.Constant):
            said: Any = value.value
        else:
            said = ask(attribute, source, cls, value.attr, owner, {"kv_cache_config": cache})
        if isinstance(said, dict):
            by_name = {name: said.get(index) for index, group in enumerate(groups) for name in group}
            answers.append([by_name[name] for name in names])
        else:
            answers.append([said if isinstance(said, bool) else None] * len(names))
    if not answers:
        return [None] * len(layers), "%s gives no causality" % cls
    merged = [values[0] if len(set(values)) == 1 else None for values in zip(*answers)]
    where = "given by %s" % cls
    method = place.get("method")
    if method and any(found == cls and item.name == method for found, item in source.functions()):
        merged = _by_metadata(source, dict(place, **{"class": cls}), layers, merged)
        where += "." + method
    return merged, where


def _given(cls: ast.stmt) -> List[Any]:
    """What a class gives as ``causal=``, where that is an attribute of its own or a constant."""
    found: Dict[str, Any] = {}
    for call in [item for item in ast.walk(cls) if isinstance(item, ast.Call)]:
        for item in call.keywords:
            plain_self = isinstance(item.value, ast.Attribute) and key_of(item.value) == "self.%s" % item.value.attr
            stated = plain_self or isinstance(item.value, ast.Constant)
            if item.arg == "causal" and last_name(call) != "replace" and stated:
                found[ast.dump(item.value)] = item.value
    return list(found.values())


def _model(files: Files, case: Dict[str, Any], layers: List[Any], names: List[str]) -> Any:
    """The drafter as its runner asks it: names of the layers and, where it can tell, their causality."""
    source = files.source(case["place"]["file"], files.source(case["place"]["file"], {}).known)
    answers: Dict[str, Any] = {}
    for cls, method in source.functions():
        if cls and method.name == "get_draft_kv_cache_layer_names":
            answers[method.name] = lambda: names
        if cls and method.name == QUESTION:
            space = source.load([cls], only={cls: {QUESTION}})
            outer = space[cls].__new__(space[cls])
            vars(outer).update(model=Loose(layers=layers), layers=layers)
            answers[QUESTION] = getattr(outer, QUESTION)
    sliding = {str(index) for index, layer in enumerate(layers) if vars(layer).get("layer_type") == "sliding_attention"}
    return Strict(sliding_attention_layer_names=sliding, model=Strict(layers=layers), **answers)


def _by_metadata(
    source: Source, place: Dict[str, Any], layers: List[Any], base: List[Optional[bool]]
) -> List[Optional[bool]]:
    """Run the proposer's own metadata builder over what the base class gives (the closed pull request's way)."""
    sliding = {str(index) for index, layer in enumerate(layers) if vars(layer).get("layer_type") == "sliding_attention"}
    group: Any = Loose(layer_names=[str(index) for index in range(len(layers))], kv_cache_group_id=0)
    group.get_metadata_builder = lambda: Loose(
        build_for_drafting=lambda common_attn_metadata, **k: common_attn_metadata
    )
    group.build_metadata_for_drafting = lambda common_attn_metadata, **k: common_attn_metadata
    given = _Metadata(base[0] is True)

    class Base(Loose):
        def __build(self, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            return [metadata], dict.fromkeys(group.layer_names, metadata)

    setattr(Base, place["method"], Base._Base__build)  # type: ignore[attr-defined]
    space = source.load([place["class"]], only={place["class"]: {place["method"]}}, base=Base)
    proposer = space[place["class"]].__new__(space[place["class"]])
    vars(proposer).update(
        {
            "model": Loose(**{place["names"]: sliding}),
            "draft_attn_groups": [group],
            "dflash_causal": base[0] is True,
        }
    )
    for name in vars(space[place["class"]]):
        if not name.startswith("__") and name not in (place["method"], "dflash_causal"):
            vars(proposer)[name] = Stub(name)
    _groups, per_layer = ask(getattr(proposer, place["method"]), given)
    return [per_layer[name].causal if isinstance(per_layer[name].causal, bool) else None for name in group.layer_names]


class _Metadata(Loose):
    """Attention metadata, of which only the causality counts."""

    def __init__(self, causal: bool) -> None:
        super().__init__(causal=causal)

    def replace(self, **changes: Any) -> _Metadata:
        return _Metadata(changes.get("causal", self.causal))


class _Platform(Loose):
    """A platform that is none of those for which the code has exceptions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *args, **kwargs: False
        return super().__getattr__(name)
