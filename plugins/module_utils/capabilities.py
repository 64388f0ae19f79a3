# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a vLLM tree can do for a DFlash drafter: cases for the probes, their answers as checks, their levels."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import (
    checks,
    child,
    probe_answer,
    probe_capability,
    probe_code,
    probe_extra,
    probe_follow,
    probe_swa,
    probe_syntax,
    probe_writes,
    symbols,
)
from ansible_collections.dflash.fleet.plugins.module_utils.places import Tree

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
PROGRAM = (probe_syntax, probe_code, probe_answer, probe_follow, probe_writes, probe_swa, probe_extra, probe_capability)
#: The architecture of the second generation.
DFLASH2 = "DFlash2DraftModel"

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
    tree = Tree(package)
    return any(tree.names(folder, "dflash") for folder in symbols.RUNNER_FOLDERS[runner])


def is_nested(target: Mapping[str, Any]) -> bool:
    """Does a target's configuration name a model whose head lies below ``get_language_model()``?"""
    named = target.get("architectures")
    return isinstance(named, list) and any(str(item).endswith("ForConditionalGeneration") for item in named)


def is_dflash2(drafter: Optional[Drafter]) -> bool:
    """Is this a drafter of the second generation?"""
    return drafter is not None and DFLASH2 in (drafter.config.get("architectures") or [])


def required_ids(
    package: str,
    device: str,
    drafter: Optional[Drafter],
    speculative_config: Mapping[str, Any],
    runner: str = "auto",
    nested_target: bool = False,
) -> Set[str]:
    """The capability ids that this deployment needs; none without a drafter.

    ``nested_target``: the target's head lies below ``get_language_model()`` (a ``*ForConditionalGeneration``).
    """
    if drafter is None:
        return set()
    needed = set()
    for name in runners(package, device, drafter.kind, runner):
        needed.add("capability.layer_offset." + name)
        if drafter.kind != "full":
            needed.add("capability.swa.%s.%s" % (drafter.kind, name))
        if nested_target:
            needed.add("capability.lm_head_sharing." + name)
    needed.add("capability.lookahead_slot")
    if drafter.kind == "mixed":
        needed.add("capability.mixed_guard")
    if is_dflash2(drafter):
        needed.add("capability.dflash2_files")
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
    parts: Dict[str, Dict[str, Any]] = {}
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
            parts[name] = out[-1]
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
    return out + _further(own, parts)


def _further(own: Drafter, parts: Dict[str, Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The questions about what DFlash needs besides; ``parts`` are those about a mixed drafter per runner."""
    out: List[Dict[str, Any]] = [
        {
            "id": "capability.lookahead_slot",
            "kind": "lookahead",
            "trials": [
                {"method": "dflash", "tokens": 15, "expected": 16},
                {"method": "eagle3", "tokens": 15, "expected": 15},
                {"method": "dflash", "tokens": 7, "expected": 8},
            ],
            "expected": {"dflash": 8, "eagle3": 15},
        },
        {
            "id": "capability.mixed_guard",
            "kind": "mixed_guard",
            "parts": parts,
            "guard": symbols.GUARD,
            "translator": symbols.SPECULATORS,
            "expected": "right, or refused, on each runner",
        },
    ]
    out += [
        {
            "id": "capability.lm_head_sharing." + name,
            "kind": "lm_head",
            "runner": name,
            "expected": {"nested": "target", "plain": "target"},
        }
        for name in RUNNERS
    ]
    if is_dflash2(own):
        out.append(
            {
                "id": "capability.dflash2_files",
                "kind": "dflash2",
                "runner": "v2",
                "config": own.config,
                "architecture": DFLASH2,
                "expected": "%s with layers of its own and its speculator" % DFLASH2,
            }
        )
    return [dict({"runner": None}, places=symbols.SYMBOLS.get(case["id"], []), **case) for case in out]


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
    only: Optional[Set[str]] = None,
) -> List[checks.Check]:
    """Answer every capability id (or those of ``only``) for the tree whose ``vllm`` folder is ``package``."""
    tree, asked, answers = Tree(package), [], {}
    present = {name for name in RUNNERS if knows_dflash(package, name)}
    wanted = [case for case in cases(drafter) if only is None or case["id"] in only]
    for case in wanted:
        if not case["places"]:
            answers[case["id"]] = _unknown(case, {"not_found": "no known place of the deciding code"})
        elif case["runner"] and case["runner"] not in present and case["kind"] != "dflash2":
            # Nothing to judge, and nothing to rely on: a deployment that needs it must not pass.
            answers[case["id"]] = dict(
                _unknown(case, {"looked_in": symbols.RUNNER_FOLDERS[case["runner"]]}),
                status="fail" if case["id"] in required else "skip",
                actual="no DFlash for the %s runner in this tree" % case["runner"].upper(),
            )
        else:
            places = [found for place in case["places"] for found in tree.places(place)]
            parts = {name: part for name, part in case.get("parts", {}).items() if name in present}
            asked.append(dict(case, places=places, **({"parts": parts} if "parts" in case else {})))
    answers.update(_ask(tree, python, asked, user, deadline))
    out = []
    for case in wanted:
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


def _ask(
    tree: Tree, python: str, asked: List[Dict[str, Any]], user: Optional[str], deadline: float
) -> Dict[str, Dict[str, Any]]:
    """Let a child answer; where the code under test imports what it needs, once more with those files."""
    answers: Dict[str, Dict[str, Any]] = {}
    more: List[str] = []
    for _round in range(3):
        texts = tree.texts(asked, more)
        outcome = child.run(python, PROGRAM, {"cases": asked, "sources": texts}, user=user, deadline=deadline)
        if not outcome.ok:
            answers.update({case["id"]: _unknown(case, {"probe": outcome.reason}) for case in asked})
            break
        answers.update({answer["id"]: answer for answer in outcome.value})
        asked = [case for case in asked if answers[case["id"]]["status"] == "unknown"]
        paths = [path for case in asked for path in (answers[case["id"]]["evidence"] or {}).get("wants", [])]
        names = [name for path in paths for name in (path + ".py", path + "/__init__.py")]
        files = [name for name in names if tree.text(name) is not None]
        if not set(files) - set(more) - set(texts):
            break
        more += files
    return answers


def _unknown(case: Mapping[str, Any], evidence: Any) -> Dict[str, Any]:
    return {"id": case["id"], "status": "unknown", "expected": case["expected"], "actual": None, "evidence": evidence}
