# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The probe of sliding windows.  Part of a child's program, after ``probe_answer.py``."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Dict, List, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.probe_answer import (
    Answer,
    Files,
    answer,
    ask,
    fill,
    plain,
    translated,
)
from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import (
    LOG,
    Loose,
    NotFound,
    Strict,
    Stub,
    Undecided,
    names_in,
)


def swa(files: Files, case: Dict[str, Any]) -> Answer:
    """Build every draft layer on stubs and note the window that its attention is given, and its causality."""
    place = case["places"][0]
    described = copy.deepcopy(case["config"])
    if case.get("raw"):
        described = translated(files, case["translator"], case["raw"], described)
    config: Any = Strict(**described)
    spec = Loose(method="dflash", draft_model_config=Loose(hf_config=config), num_speculative_tokens=15)
    current = Loose(
        use_v2_model_runner=case["runner"] == "v2", speculative_config=spec, cache_config=None, quant_config=None
    )
    source = files.source(
        place["file"],
        {
            "get_current_vllm_config": lambda *a, **k: current,
            "get_tensor_model_parallel_world_size": lambda *a, **k: 1,
            "get_tensor_model_parallel_rank": lambda *a, **k: 0,
            "current_platform": _Platform(),
            "maybe_prefix": lambda prefix, name: name,
        },
    )
    layer_class = source.find(place["layer"])
    model = source.top.get(place["model"])
    if model is None or place["layer"] not in names_in(model):
        raise NotFound("%s does not build %s" % (place["model"], place["layer"]))
    space = source.load([place["layer"]])
    _note_causality(space)
    layers: List[Any] = []
    windows: List[Any] = []
    for index in range(config.num_hidden_layers):
        LOG.clear()
        layer = ask(
            space[place["layer"]],
            **fill(
                space[place["layer"]].__init__,
                {
                    "vllm_config": current,
                    "config": config,
                    "layer_idx": index,
                    "cache_config": None,
                    "quant_config": None,
                    "prefix": "model.layers.%d" % index,
                    "layer_type": (case["config"].get("layer_types") or [None] * 99)[index],
                },
            ),
        )
        built = [kwargs for path, _args, kwargs in LOG if path.split(".")[-1] == place["attention"]]
        if not built:
            raise NotFound("%s builds no %s" % (place["layer"], place["attention"]))
        if isinstance(built[0].get(place["keyword"]), Stub):
            raise Undecided("window of layer %d" % index)
        layers.append(layer)
        windows.append(built[0].get(place["keyword"]))
    evidence = {
        "layer": "%s:%d %s" % (place["file"], layer_class.lineno, place["layer"]),
        "user": "%s(%s=)" % (place["attention"], place["keyword"]),
    }
    expected = [tuple(item) for item in case["expected"]]
    if windows != [window for window, _causal in expected]:
        return answer("fail", case["expected"], {"windows": plain(windows)}, evidence)
    causal, evidence["causality"] = _causalities(files, case, layers)
    got = list(zip(windows, causal))
    status = "unknown" if None in causal else ("pass" if got == expected else "fail")
    return answer(status, case["expected"], plain(got), evidence)


def _causalities(files: Files, case: Dict[str, Any], layers: List[Any]) -> Tuple[List[Optional[bool]], str]:
    """Causality per layer, and where it was found: kept by the layer, built with, or given by the runner."""
    kept = [_of_attention(layer, "causal") for layer in layers]
    if None not in kept:
        return kept, "kept by each layer"
    noted = [_of_attention(layer, _NOTED) for layer in layers]
    if None not in noted:
        return noted, "decided per layer, but the runner takes dflash_config.causal"
    place = case["places"][0].get("metadata")
    if place and case["runner"] == "v1":
        return _by_metadata(files, place, layers)
    return kept, "not found"


def _by_metadata(files: Files, place: Dict[str, Any], layers: List[Any]) -> Tuple[List[Optional[bool]], str]:
    """Run the proposer's metadata builder for layers that only know their type (the closed pull request's way)."""
    sliding = {str(index) for index, layer in enumerate(layers) if vars(layer).get("layer_type") == "sliding_attention"}
    group: Any = Loose(layer_names=[str(index) for index in range(len(layers))], kv_cache_group_id=0)
    group.get_metadata_builder = lambda: Loose(
        build_for_drafting=lambda common_attn_metadata, **k: common_attn_metadata
    )

    class Base(Loose):
        def __build(self, metadata: Any, *args: Any) -> Any:
            return [metadata], dict.fromkeys(group.layer_names, metadata)

    setattr(Base, place["method"], Base._Base__build)  # type: ignore[attr-defined]
    source = files.source(place["file"], {})
    source.method(place["class"], place["method"])
    space = source.load([place["class"]], only={place["class"]: {place["method"]}}, base=Base)
    proposer = space[place["class"]].__new__(space[place["class"]])
    vars(proposer).update({"model": Loose(**{place["names"]: sliding}), "draft_attn_groups": [group]})
    for name in vars(space[place["class"]]):
        if not name.startswith("__") and name != place["method"]:
            vars(proposer)[name] = Stub(name)
    _groups, per_layer = ask(getattr(proposer, place["method"]), _Metadata(False))
    causal = [
        per_layer[name].causal if isinstance(per_layer[name].causal, bool) else None for name in group.layer_names
    ]
    return causal, "given by %s.%s" % (place["class"], place["method"])


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


def _of_attention(layer: Any, key: str) -> Optional[bool]:
    """A truth value that one of the layer's parts holds under ``key``; None where none does."""
    for part in vars(layer).values():
        held = getattr(part, "__dict__", {}).get(key)
        if isinstance(held, bool):
            return held
    return None
