# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a vLLM tree can do for a DFlash drafter: cases for the probes, their answers as checks, their levels."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import (
    checks,
    child,
    probe_answer,
    probe_capability,
    probe_code,
    probe_swa,
    symbols,
)

SLIDING = "sliding_attention"
FULL = "full_attention"

#: The mixed drafter that stands for all where none is given (five layers for a target of 64).
GENERIC_IDS = [1, 16, 31, 46, 61]
GENERIC_WINDOW = 2048
GENERIC_LAYERS = [SLIDING] * 4 + [FULL]
#: A second list, so that a constant cannot pass for an answer.
OTHER_IDS = [0, 3, 7]
OPTION = "disable_eagle_block_drop"
RUNNERS = ("v1", "v2")
PROGRAM = (probe_code, probe_answer, probe_swa, probe_capability)

#: What the layer's code reads besides; a drafter's own config wins.
_BASE: Dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "intermediate_size": 17408,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "attention_bias": False,
}


class Drafter(NamedTuple):
    """A drafter as vLLM's configuration layer hands it to the model: ``kind`` is full, uniform or mixed."""

    kind: str
    config: Dict[str, Any]
    ids: List[int]
    expected: List[Tuple[Optional[int], bool]]
    raw: Optional[Dict[str, Any]] = None  # as it stands in the file, where the tree's own code translates it


def generic(kind: str) -> Drafter:
    """The drafter that stands for all of one kind."""
    layers = {"mixed": GENERIC_LAYERS, "uniform": [SLIDING] * 5, "full": [FULL] * 5}[kind]
    return read_drafter(
        {
            "layer_types": layers,
            "sliding_window": GENERIC_WINDOW,
            "use_sliding_window": True,
            "num_hidden_layers": 5,
            "dflash_config": {"target_layer_ids": GENERIC_IDS, "mask_token_id": 151669},
        }
    )


def read_drafter(raw: Mapping[str, Any]) -> Drafter:
    """Read a drafter's ``config.json`` (own or speculators dialect) as vLLM does."""
    config: Dict[str, Any] = dict(_BASE)
    dialect = None
    if "speculators_model_type" in raw or "aux_hidden_state_layer_ids" in raw:
        dialect = dict(raw)
        config.update(raw.get("transformer_layer_config") or {})
        aux = list(raw.get("aux_hidden_state_layer_ids") or [])
        config["eagle_aux_hidden_state_layer_ids"] = aux
        config["dflash_config"] = {
            "target_layer_ids": [item - 1 for item in aux],
            "mask_token_id": raw.get("mask_token_id"),
            "causal": not raw.get("sliding_window_non_causal", True),
        }
    else:
        config.update(raw)
    trained = config.get("sliding_window")
    named = raw.get("model_type") or (raw.get("transformer_layer_config") or {}).get("model_type")
    if named == "qwen3" and not config.get("use_sliding_window"):
        config["sliding_window"] = None  # what transformers' Qwen3Config does
    dflash = config.get("dflash_config") or {}
    count = int(config.get("num_hidden_layers") or len(config.get("layer_types") or []) or 1)
    config["num_hidden_layers"] = count
    layers = config.get("layer_types")
    sliding = [item == SLIDING for item in layers] if layers else [False] * count
    if dflash.get("use_swa") and not any(sliding):
        sliding = [True] * count
    window = dflash.get("swa_window_size", trained)
    kind = "full" if not any(sliding) else ("uniform" if all(sliding) else "mixed")
    expected = [(window if slides else None, _causal(config, dflash, index)) for index, slides in enumerate(sliding)]
    ids = list(dflash.get("target_layer_ids") or config.get("target_layer_ids") or [])
    return Drafter(kind, config, ids, expected, dialect)


def _causal(config: Mapping[str, Any], dflash: Mapping[str, Any], index: int) -> bool:
    for override in (config.get("is_causal"), dflash.get("causal")):
        if override is not None:
            return bool(override)
    layers = config.get("layer_types") or []
    return bool(layers) and layers[index] == SLIDING


def runners(package: str, device: str, kind: str, runner: str = "auto") -> Set[str]:
    """The model runners that may serve this drafter on this host.

    CPU hosts have no Triton, so V1.  With CUDA a mixed drafter takes V2 where the tree has it; otherwise vLLM
    chooses by target and release, so every runner of the tree that knows DFlash must be right.
    """
    if runner in RUNNERS:
        return {runner}
    if device == "cpu":
        return {"v1"}
    known = {name for name in RUNNERS if knows_dflash(package, name)} or {"v2"}
    return {"v2"} if kind == "mixed" and "v2" in known else known


def knows_dflash(package: str, runner: str) -> bool:
    """Does the tree hold DFlash for this runner at all?"""
    return any(os.path.isfile(os.path.join(package, path)) for path in symbols.RUNNER_FILES[runner])


def required_ids(
    package: str, device: str, drafter: Optional[Drafter], speculative_config: Mapping[str, Any], runner: str = "auto"
) -> Set[str]:
    """The capability ids that this deployment needs; none without a drafter."""
    if drafter is None:
        return set()
    needed = set()
    for name in runners(package, device, drafter.kind, runner):
        needed.add("capability.layer_offset." + name)
        if drafter.kind != "full":
            needed.add("capability.swa.%s.%s" % (drafter.kind, name))
    needed.add("capability.cache_rule." + ("opt_in" if speculative_config.get(OPTION) is True else "default"))
    return needed


def cases(drafter: Optional[Drafter]) -> List[Dict[str, Any]]:
    """The questions for the probes, in the order of the vocabulary; ``places`` is empty where no symbol is known."""
    own = drafter if drafter is not None and drafter.ids else generic("mixed")
    ids = own.ids
    taps = [item + 1 for item in ids]
    trials = [
        {"what": "the drafter's ids", "config": own.config, "expected": taps, "raw": own.raw},
        {
            "what": "other ids",
            "expected": [item + 1 for item in OTHER_IDS],
            "config": _with_ids(own.config, OTHER_IDS),
            "raw": own.raw and dict(own.raw, aux_hidden_state_layer_ids=[item + 1 for item in OTHER_IDS]),
        },
        {
            "what": "ids that count from one already",
            "expected": taps,
            "config": dict(_with_ids(own.config, ids), eagle_aux_hidden_state_layer_ids=list(taps)),
        },
    ]
    out: List[Dict[str, Any]] = []
    for name in RUNNERS:
        out.append(
            {
                "id": "capability.layer_offset." + name,
                "kind": "layer_offset",
                "runner": name,
                "trials": trials,
                "places": symbols.SYMBOLS.get("capability.layer_offset." + name, []),
                "translator": symbols.SPECULATORS,
                "expected": taps,
            }
        )
    for kind in ("uniform", "mixed"):
        form = drafter if drafter is not None and drafter.kind == kind else generic(kind)
        for name in RUNNERS:
            out.append(
                {
                    "id": "capability.swa.%s.%s" % (kind, name),
                    "kind": "swa",
                    "runner": name,
                    "config": form.config,
                    "raw": form.raw,
                    "translator": symbols.SPECULATORS,
                    "places": symbols.SYMBOLS.get("capability.swa." + name, []),
                    "expected": [list(item) for item in form.expected],
                }
            )
    control = {"method": "eagle3", "expected": True}
    answer = {"dflash": False, "eagle3": True}
    places = symbols.SYMBOLS.get("capability.cache_rule", [])
    out.append(
        {
            "id": "capability.cache_rule.default",
            "kind": "cache_rule",
            "runner": None,
            "places": places,
            "trials": [{"method": "dflash", "expected": False}, control],
            "expected": answer,
        }
    )
    out.append(
        {
            "id": "capability.cache_rule.opt_in",
            "kind": "cache_rule",
            "runner": None,
            "places": places,
            "needs_option": True,
            "expected": answer,
            "trials": [{"method": "dflash", "set": {OPTION: True}, "expected": False}, control],
        }
    )
    return out


def _with_ids(config: Mapping[str, Any], ids: List[int]) -> Dict[str, Any]:
    changed = dict(config, dflash_config=dict(config.get("dflash_config") or {}, target_layer_ids=list(ids)))
    for key in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
        changed.pop(key, None)
    return changed


def examine(
    package: str,
    python: str,
    drafter: Optional[Drafter],
    required: Set[str],
    *,
    user: Optional[str] = None,
    deadline: float = 60.0,
) -> List[checks.Check]:
    """Answer every capability id for the tree whose ``vllm`` folder is ``package``."""
    asked, answers = [], {}
    for case in cases(drafter):
        if not case["places"]:
            answers[case["id"]] = _unknown(case, {"not_found": "no known place of the deciding code"})
        elif case["runner"] and not knows_dflash(package, case["runner"]):
            answers[case["id"]] = dict(
                _unknown(case, {"looked_for": symbols.RUNNER_FILES[case["runner"]]}),
                status="fail",
                actual="no DFlash for the %s runner in this tree" % case["runner"].upper(),
            )
        else:
            asked.append(dict(case, places=[_first_there(package, case["places"])]))
    payload = {"cases": asked, "sources": _sources(package, asked)}
    outcome = child.run(python, PROGRAM, payload, user=user, deadline=deadline)
    if outcome.ok:
        answers.update({answer["id"]: answer for answer in outcome.value})
    else:
        answers.update({case["id"]: _unknown(case, {"probe": outcome.reason}) for case in asked})
    out = []
    for case in cases(drafter):
        answer = answers[case["id"]]
        out.append(
            checks.make(
                case["id"],
                answer["status"],
                answer["expected"],
                answer["actual"],
                evidence=answer["evidence"],
                level="required" if case["id"] in required else "advisory",
            )
        )
    return out


def _unknown(case: Mapping[str, Any], evidence: Any) -> Dict[str, Any]:
    return {"id": case["id"], "status": "unknown", "expected": case["expected"], "actual": None, "evidence": evidence}


def _first_there(package: str, places: List[Dict[str, Any]]) -> Dict[str, Any]:
    for place in places:
        if os.path.isfile(os.path.join(package, place["file"])):
            return place
    return places[0]


def _sources(package: str, asked: List[Dict[str, Any]]) -> Dict[str, str]:
    """Texts of the files that the cases name.  They are handed to the child: it may not be able to read the folder."""
    texts: Dict[str, str] = {}
    for case in asked:
        for place in case["places"]:
            for path in (
                place["file"],
                place.get("config_file"),
                place.get("manager_file"),
                place.get("metadata", {}).get("file"),
                case.get("translator", {}).get("file"),
            ):
                if path and path not in texts:
                    try:
                        with open(os.path.join(package, path), encoding="utf-8") as handle:
                            texts[path] = handle.read()
                    except (OSError, UnicodeDecodeError):
                        continue
    return texts
