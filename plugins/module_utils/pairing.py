# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Do a target and a drafter belong together, and can this kind of host run them?  Read from two config.json.

Sizes do not prove that a drafter was trained for a target (some pairs are equal in every size);
they prove that it was not.  What a configuration does not state is ``unknown``, never guessed.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import checks

Config = Mapping[str, Any]
SLIDING = "sliding_attention"
FULL = "full_attention"

#: Architectures that vLLM loads with method dflash, in the z-lab dialect.
ZLAB_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashLagunaForCausalLM")
#: Drafters that look alike and are loaded by another method.
OTHER_METHODS = {
    "Qwen3DSparkModel": "DSpark", "Gemma4DSparkModel": "DSpark", "DominoDraftModel": "Domino",
    "Eagle3Speculator": "EAGLE-3", "LlamaForCausalLMEagle3": "EAGLE-3",
}
SPECULATORS_METHODS = ("dflash", "dflash2")
#: Architectures whose forward pass exists for the V2 runner only, whatever the layer types.
V2_ARCHITECTURES = ("DFlash2DraftModel",)


def text_part(config: Config) -> Config:
    """The part that describes the language model; multimodal targets nest it."""
    for key in ("text_config", "language_config", "llm_config"):
        part = config.get(key)
        if isinstance(part, Mapping):
            return part
    return config


def _integer(value: Any) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(value: Any) -> Config:
    return value if isinstance(value, Mapping) else {}


def _names(value: Any) -> List[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _integers(value: Any) -> Optional[List[int]]:
    if not isinstance(value, (list, tuple)) or not value:
        return None
    out = [item for item in value if _integer(item) is not None]
    return list(out) if len(out) == len(value) else None


def dialect_of(config: Config) -> Tuple[str, str]:
    """``(dialect, why not)``: zlab or speculators, or "other" (a known other method) or "unknown" with the reason."""
    architectures = _names(config.get("architectures"))
    method = config.get("speculators_model_type")
    if method is not None:
        if method in SPECULATORS_METHODS:
            return "speculators", ""
        return "other", "a speculators checkpoint of method %s" % method
    flash = _mapping(config.get("dflash_config"))
    projector = flash.get("projector_type")
    if projector:
        return "other", "a drafter of projector type %s" % projector
    for name in architectures:
        if name in OTHER_METHODS:
            return "other", "%s, a %s drafter" % (name, OTHER_METHODS[name])
    if isinstance(config.get("speculative_config"), Mapping):
        return "unknown", "an Open Spec Config checkpoint, a dialect not known to be read by vLLM"
    if flash and (not architectures or any(name in ZLAB_ARCHITECTURES for name in architectures)):
        return "zlab", ""
    if flash:
        return "unknown", "architecture %s with a dflash_config" % ", ".join(architectures)
    if any(name in ZLAB_ARCHITECTURES for name in architectures):
        return "unknown", "architecture %s without a dflash_config" % ", ".join(architectures)
    return "other", "architecture %s, without dflash_config" % (", ".join(architectures) or "not named")


class Drafter:
    """What a drafter's configuration states, whichever dialect states it; None where it does not."""

    def __init__(self, config: Config) -> None:
        self.dialect, self.why_not = dialect_of(config)
        self.architectures = _names(config.get("architectures"))
        flash = _mapping(config.get("dflash_config"))
        layers = _mapping(config.get("transformer_layer_config")) if self.dialect == "speculators" else config
        self.hidden_size = _integer(layers.get("hidden_size"))
        self.target_hidden_size = _integer(config.get("target_hidden_size"))
        self.vocab_size = _integer(layers.get("vocab_size"))
        self.draft_vocab_size = _integer(config.get("draft_vocab_size"))
        self.num_target_layers = _integer(config.get("num_target_layers"))
        self.max_positions = _integer(layers.get("max_position_embeddings"))
        mask = flash.get("mask_token_id")
        self.mask_token_id = _integer(config.get("mask_token_id") if mask is None else mask)
        self.anchored = bool(config.get("sample_from_anchor") or flash.get("sample_from_anchor"))
        self.block_sizes = {
            place: value for place, value in (
                ("dflash_config.block_size", _integer(flash.get("block_size"))),
                ("block_size", _integer(config.get("block_size"))),
            ) if value is not None
        }
        self.target_layer_ids, self.taps = _taps(config, flash, self.dialect)
        self.num_layers = _integer(layers.get("num_hidden_layers"))
        self.layer_types, self.window, self.layer_note = _layers(layers, flash, self.num_layers)
        self.proposed = _proposed(config)

    @property
    def block_size(self) -> Optional[int]:
        """The one block size, None when none or several are stated."""
        values = set(self.block_sizes.values())
        return values.pop() if len(values) == 1 else None

    @property
    def most(self) -> Optional[int]:
        """The most tokens that one round can draft: slot 0 of the block holds the known token."""
        if self.block_size is None:
            return None
        return self.block_size if self.anchored else self.block_size - 1

    @property
    def mixed(self) -> bool:
        return self.layer_types is not None and len(set(self.layer_types)) > 1


def _taps(config: Config, flash: Config, dialect: str) -> Tuple[Optional[List[int]], Optional[List[int]]]:
    """``(target layer ids from 0, taps)``: tap n is the hidden state after n layers, so id + 1."""
    stated = _integers(config.get("aux_hidden_state_layer_ids"))
    if dialect == "speculators":
        return ([i - 1 for i in stated], stated) if stated else (None, None)
    ids = _integers(flash.get("target_layer_ids")) or _integers(config.get("target_layer_ids"))
    return (ids, [i + 1 for i in ids]) if ids else (None, None)


def _layers(layers: Config, flash: Config, count: Optional[int]) -> Tuple[Optional[List[str]], Optional[int], str]:
    """``(layer types or None, window or None, what is wrong or unclear)``."""
    window = _integer(layers.get("sliding_window"))
    if flash.get("use_swa"):
        window = _integer(flash.get("swa_window_size")) or window
        if count is None or window is None:
            return None, window, "use_swa is set, but layer count or window is not stated"
        return [SLIDING] * count, window, ""
    types = layers.get("layer_types")
    if types is None:
        uses = layers.get("use_sliding_window")
        if (window or uses) and uses is not False:
            return None, window, "a sliding window is stated, but not which layers have it"
        if count is None or (layers.get("model_type") is None and uses is None):
            return None, None, "layer_types is not stated"
        return [FULL] * count, None, ""
    names = _names(types)
    odd = sorted(set(names) - {SLIDING, FULL})
    if odd or not names:
        return None, window, "layer types %s are not known" % (", ".join(odd) or "(none)")
    if SLIDING in names and window is None:
        return names, None, "sliding layers without a sliding_window"
    if SLIDING in names and layers.get("use_sliding_window") is False:
        return names, window, "sliding layers, but use_sliding_window false, which drops the window"
    return names, window if SLIDING in names else None, ""


def _proposed(config: Config) -> Optional[int]:
    """The number of speculative tokens that a speculators checkpoint proposes for itself."""
    methods = _mapping(config.get("speculators_config")).get("proposal_methods")
    for method in methods if isinstance(methods, (list, tuple)) else []:
        found = _integer(_mapping(method).get("speculative_tokens"))
        if found is not None:
            return found
    return None


def _architecture(drafter: Drafter) -> checks.Check:
    expected = "a DFlash drafter in the z-lab or speculators dialect"
    if drafter.dialect == "other":
        return checks.make("pair.architecture", "fail", expected, drafter.why_not)
    if drafter.dialect == "unknown":
        return checks.make("pair.architecture", "unknown", expected, drafter.why_not)
    count, types = drafter.num_layers, drafter.layer_types
    if count is not None and types is not None and len(types) != count:
        return checks.make(
            "pair.architecture", "fail", "%d layer types for %d layers" % (count, count), "%d layer types" % len(types),
            hint="The drafter's config.json contradicts itself: fetch the checkpoint again.",
        )
    if types is not None and drafter.layer_note:
        return checks.make(
            "pair.architecture", "fail", "a window for every sliding layer", drafter.layer_note,
            hint="The drafter's config.json contradicts itself: fetch the checkpoint again.",
        )
    name = ", ".join(drafter.architectures) or "DFlash by its dflash_config"
    return checks.make("pair.architecture", "pass", expected, "%s (%s)" % (name, drafter.dialect))


def _compare(check_id: str, what: str, wanted: Optional[int], found: Optional[int]) -> checks.Check:
    expected = "the target's %s" % what if wanted is None else "%s %d (the target's)" % (what, wanted)
    if wanted is None or found is None:
        side = "target" if wanted is None else "drafter"
        return checks.make(
            check_id, "unknown", expected, "not stated" if found is None else found,
            hint="The %s's config.json does not state it: give the complete config.json." % side,
        )
    return checks.make(check_id, "pass" if wanted == found else "fail", expected, found)


def _hidden_size(target: Config, drafter: Drafter) -> checks.Check:
    wanted = _integer(target.get("hidden_size"))
    if drafter.target_hidden_size is not None and drafter.target_hidden_size != wanted and wanted is not None:
        return checks.make(
            "pair.hidden_size", "fail", "hidden size %d (the target's)" % wanted,
            "made for a target of %d" % drafter.target_hidden_size,
        )
    return _compare("pair.hidden_size", "hidden size", wanted, drafter.hidden_size)


def _depth(target: Config, drafter: Drafter) -> checks.Check:
    depth = _integer(target.get("num_hidden_layers"))
    expected = "taps of 1 to %s" % ("?" if depth is None else depth)
    evidence = {"target_layer_ids": drafter.target_layer_ids, "taps": drafter.taps, "num_hidden_layers": depth}
    if drafter.taps is None or depth is None:
        missing = "the drafter's target layer ids" if drafter.taps is None else "the target's num_hidden_layers"
        return checks.make(
            "pair.layers", "unknown", expected, drafter.taps, evidence=evidence,
            hint="%s are not stated: give the complete config.json." % missing.capitalize(),
        )
    outside = [tap for tap in drafter.taps if not 1 <= tap <= depth]
    if outside:
        return checks.make(
            "pair.layers", "fail", expected,
            "taps %s (target layer ids %s), outside: %s" % (drafter.taps, drafter.target_layer_ids, outside),
            evidence=evidence,
        )
    if drafter.num_target_layers is not None and drafter.num_target_layers != depth:
        return checks.make(
            "pair.layers", "fail", "a drafter for %d target layers" % depth,
            "made for %d" % drafter.num_target_layers, evidence=evidence,
        )
    return checks.make("pair.layers", "pass", expected, drafter.taps, evidence=evidence)


def _vocabulary(target: Config, drafter: Drafter) -> checks.Check:
    size = _integer(target.get("vocab_size"))
    found = _compare("pair.vocab", "vocabulary size", size, drafter.vocab_size)
    mask = drafter.mask_token_id
    if found["status"] == "fail":
        return found
    if size is not None and mask is not None and not 0 <= mask < size:
        return checks.make("pair.vocab", "fail", "a mask token of 0 to %d" % (size - 1), "mask token %d" % mask)
    if size is not None and drafter.draft_vocab_size is not None and drafter.draft_vocab_size > size:
        return checks.make(
            "pair.vocab", "fail", "a draft vocabulary of at most %d" % size, drafter.draft_vocab_size,
        )
    if found["status"] == "pass" and mask is None:
        return checks.make(
            "pair.vocab", "unknown", "a mask token of 0 to %d" % ((size or 0) - 1), "not stated",
            hint="The drafter's config.json does not state mask_token_id: give the complete config.json.",
        )
    return found


def _block(drafter: Drafter, k: Optional[int]) -> checks.Check:
    if drafter.block_size is None:
        several = len(drafter.block_sizes) > 1
        return checks.make(
            "pair.block_size", "unknown", "one block size",
            ", ".join("%s %d" % item for item in sorted(drafter.block_sizes.items())) if several else "not stated",
            hint="The drafter's config.json %s: give the right one."
            % ("contradicts itself" if several else "states no block size"),
        )
    most = drafter.most or 0
    expected = "1 to %d speculative tokens (block size %d)" % (most, drafter.block_size)
    if k is None or 1 <= k <= most:
        return checks.make("pair.block_size", "pass", expected, most if k is None else k)
    hint = None
    if k == drafter.block_size:
        hint = "Set dflash_serve_num_speculative_tokens to %d: a block counts the known token, K does not." % most
    return checks.make("pair.block_size", "fail", expected, k, hint=hint)


def _runner(drafter: Drafter, device: str, runner: Optional[str]) -> Tuple[checks.Check, str]:
    """The check and the runner that will serve: v1, v2, or auto where the pin decides."""
    names = drafter.layer_types
    said = "not known" if names is None else "mixed" if drafter.mixed else "all " + names[0].split("_")[0]
    only_v2 = [name for name in drafter.architectures if name in V2_ARCHITECTURES]
    serves = "v1" if device == "cpu" else "v2" if drafter.mixed or only_v2 else runner or "auto"
    expected = "layer types that the %s runner serves on %s" % (serves.upper() if serves != "auto" else "pin's", device)
    evidence = {"layer_types": names, "window": drafter.window, "device": device, "runner": serves}
    if device == "cpu" and runner == "v2":
        return checks.make(
            "pair.runner", "fail", expected, "the V2 runner was asked for; it needs Triton", evidence=evidence,
        ), serves
    if drafter.mixed or only_v2:
        reason = "mixed layers" if drafter.mixed else only_v2[0]
        if device == "cpu" or runner == "v1":
            return checks.make(
                "pair.runner", "fail", expected, "%s need the V2 runner" % reason, evidence=evidence,
            ), serves
        return checks.make("pair.runner", "pass", expected, said, evidence=evidence), serves
    if names is None:
        return checks.make(
            "pair.runner", "unknown", expected, drafter.layer_note, evidence=evidence,
            hint="Give the drafter's complete config.json.",
        ), serves
    return checks.make("pair.runner", "pass", expected, said, evidence=evidence), serves


def examine(
    target_config: Config, drafter_config: Config, k: Optional[int] = None, device: str = "cpu",
    runner: Optional[str] = None,
) -> Dict[str, Any]:
    """Everything that the two configurations say about the pair.

    ``k`` None or 0 means the default, block size - 1 (or what a speculators checkpoint proposes).
    ``runner`` is v1, v2 or None (the pin decides).  Returns ``{ok, checks, k, block_size, dialect,
    layer_types, window, target_layer_ids, taps, runner, needs, max_model_len, message}``; a value
    that is not stated is None.  ``needs`` holds words of ``v2_runner swa_uniform swa_mixed dflash2``.
    ``message`` tells what stands against the pair, with the numbers: what makes it impossible or,
    if nothing does, what is not known.
    """
    target = text_part(target_config)
    drafter = Drafter(drafter_config)
    wanted = k or None
    runner_check, serves = _runner(drafter, device, runner)
    found = [
        _architecture(drafter), _hidden_size(target, drafter), _depth(target, drafter), _vocabulary(target, drafter),
        _block(drafter, wanted), runner_check,
    ]
    needs = []
    if serves == "v2":
        needs.append("v2_runner")
    if drafter.layer_types and SLIDING in drafter.layer_types:
        needs.append("swa_mixed" if drafter.mixed else "swa_uniform")
    if any(name in V2_ARCHITECTURES for name in drafter.architectures):
        needs.append("dflash2")
    standing = checks.blocking(found)
    impossible = [item for item in standing if item["status"] == "fail"]
    default = drafter.most
    if drafter.proposed is not None and (default is None or 1 <= drafter.proposed <= default):
        default = drafter.proposed
    return {
        "ok": not standing, "checks": found, "k": wanted or default, "block_size": drafter.block_size,
        "dialect": drafter.dialect, "layer_types": drafter.layer_types, "window": drafter.window,
        "target_layer_ids": drafter.target_layer_ids, "taps": drafter.taps, "runner": serves, "needs": needs,
        "max_model_len": drafter.max_positions,
        "message": "; ".join(checks.sentence(item) for item in impossible or standing),
    }
