# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Changes that somebody else thought of, who had not read the probes: decorators, rebinding, writes on the way, other
spellings.  Edits like those of ``mutants.py``; an empty first text means that the second is added to the file.
"""

from __future__ import annotations

from textwrap import indent

from mutants import (
    ALL_WINDOWS,
    CONFIG,
    FAIL,
    MANAGER,
    MIXED,
    MODEL,
    OFF_V1,
    OFF_V2,
    RUNNER,
    RUNNER_V2,
    SCHEDULER,
    SHIFT_V1,
    SLOT,
    TAKE,
    TWO,
    UNKNOWN,
    Mutant,
    one,
)

WORKER_V2 = "v1/worker/gpu/model_runner.py"
DROPS = {"cache_rule.default": FAIL, "cache_rule.opt_in": FAIL}
OPEN_DROPS = dict.fromkeys(DROPS, UNKNOWN)
NEW = "0.33.0"
READ_V1 = "    def _get_eagle3_aux_layers_from_config(self)"
READ_V2 = "def get_eagle3_aux_layers_from_config(\n"
SET_V1 = "        self.model.set_aux_hidden_state_layers(aux_layers)\n\n    def _get_eagle3"
ASKED_V1 = "        aux_layers = self._get_eagle3_aux_layers_from_config()\n"
RAW_V1 = '''    hf = self.speculative_config.draft_model_config.hf_config
    ids = (getattr(hf, "dflash_config", None) or {}).get("target_layer_ids")
    return tuple(ids or getattr(hf, "eagle_aux_hidden_state_layer_ids", None) or ())
'''
MADE = "DFlashProposer(self.vllm_config, self.device, self)\n                self.use_aux_hidden_state_outputs = "
HASHES = "        self.num_hash_lookahead_tokens = vllm_config.num_hash_lookahead_tokens\n"
MAKE = "        self.kv_cache_manager = KVCacheManager(\n"
GIVE = "            use_eagle=self.use_eagle_block_drop,\n"
MAMBA = "        # Mamba managers already account for their speculative state blocks.\n"
PARALLEL = """                if self.method in ("dflash", "dspark"):
                    self.parallel_drafting = True
"""
VERIFY = "        if not self.use_heterogeneous_vocab:\n            self.verify_equal_vocab"
VOCABULARY = 'self.config.draft_vocab_size = getattr(self.config, "vocab_size", None)\n'
WINDOW = "            per_layer_sliding_window=sliding_window,\n"
ATTENTION = "        self.attn = Attention(\n"
BACK = "    return tuple(i - 1 for i in ids) if ids else ids\n"


def new(name: str, kind: str, path: str, old: str, text: str, differs: dict[str, str] | None = None) -> Mutant:
    """A mutant of the newest release with one replacement."""
    return one(name, kind, path, old, text, differs, release=NEW)


def both(name: str, kind: str, changes: dict[str, list[tuple[str, str]]], differs: dict[str, str]) -> Mutant:
    """A mutant of the newest release with several replacements."""
    return Mutant(name, kind, changes, differs, release=NEW)


#: Those that the short form takes.
SHORT = {
    "function decorated, V2",
    "method rebound at the end",
    "outer class clears the types",
    "option reset by the configuration",
    "manager made by partial",
    "taps turned off by the constructor",
}

UNSEEN: list[Mutant] = [
    # ------------------------------------------------------------------ layer offset
    new("shifted back for the method alone", "value unused", RUNNER, SET_V1,
        "        shift = int(self.speculative_config.use_dflash())\n"
        + SET_V1.replace("(aux_layers)", "(tuple(i - shift for i in aux_layers))"), OFF_V1),
    new("function rebound at the end, V2", "rebinding", RUNNER_V2, "",
        "\n\n_taken = get_eagle3_aux_layers_from_config\n\n\n" + READ_V2 + "    spec_config,\n):\n"
        "    ids = _taken(spec_config)\n    if ids is None or spec_config.method != 'dflash':\n        return ids\n"
        "    return tuple(max(i - 1, 1) for i in ids)\n", OFF_V2),
    new("name rebound at the end, V2", "rebinding", RUNNER_V2, "",
        "\n\n_taken = get_eagle3_aux_layers_from_config\n\n\ndef _back(spec_config):\n    ids = _taken(spec_config)\n"
        + BACK + "\n\nget_eagle3_aux_layers_from_config = _back\n", OFF_V2),
    new("method rebound at the end", "rebinding", RUNNER, "",
        "\n\ndef _raw(self):\n" + RAW_V1 + "\n\nGPUModelRunner._get_eagle3_aux_layers_from_config = _raw\n", OFF_V1),
    new("method defined twice", "rebinding", RUNNER, "    def reload_weights(\n",
        READ_V1 + ":\n" + indent(RAW_V1, "    ") + "\n    def reload_weights(\n", OFF_V1),
    new("function decorated, V2", "decorator", RUNNER_V2, READ_V2,
        "def _dedupe(fn):\n    def wrapper(spec_config):\n        ids = fn(spec_config)\n"
        "        return tuple(sorted({max(i - 1, 0) for i in ids})) if ids else ids\n\n    return wrapper\n\n\n"
        "@_dedupe\n" + READ_V2, OFF_V2),
    both("method decorated", "decorator", {RUNNER: [
        (READ_V1, "    @_unshift\n" + READ_V1),
        ("def count_nans_per_row(", "def _unshift(fn):\n    return lambda self: tuple(i - 1 for i in fn(self) or ())\n"
         "\n\ndef count_nans_per_row(")]}, OFF_V1),
    new("decorated by a stranger, V2", "decorator", RUNNER_V2, READ_V2,
        "from elsewhere import changed\n\n\n@changed\n" + READ_V2, {"layer_offset.v2": UNKNOWN}),
    new("raw ids set after the right ones", "value unused", RUNNER,
        "                self._setup_eagle3_aux_hidden_state_outputs()\n",
        "                self._setup_eagle3_aux_hidden_state_outputs()\n"
        "                if self.speculative_config is not None and self.speculative_config.use_dflash():\n"
        "                    hf_config = self.speculative_config.draft_model_config.hf_config\n"
        '                    ids = hf_config.dflash_config.get("target_layer_ids")\n'
        "                    self.model.set_aux_hidden_state_layers(tuple(ids))\n", OFF_V1),
    new("raw ids set by the caller, V2", "value unused", WORKER_V2,
        "                    self.model, self.speculative_config, self.use_pp\n                )\n",
        "                    self.model, self.speculative_config, self.use_pp\n                )\n"
        "                hf = self.speculative_config.draft_model_config.hf_config\n"
        '                self.model.set_aux_hidden_state_layers(tuple(hf.dflash_config["target_layer_ids"]))\n',
        {"layer_offset.v2": UNKNOWN}),
    new("bounded by the drafter's own layers, V2", "condition never true", RUNNER_V2, "[i + 1 for i in " + TAKE,
        '[i + 1 if i < getattr(hf_config, "num_hidden_layers", 99) else i for i in ' + TAKE, OFF_V2),
    new("taps turned off by the constructor", "condition never true", RUNNER,
        MADE + "True", MADE + "False",
        OFF_V1),
    new("method replaced on the object", "value unused", RUNNER,
        "        # Try to get auxiliary layers from speculative config,\n",
        "        if self.speculative_config.use_dflash():\n"
        "            self._get_eagle3_aux_layers_from_config = lambda: None\n", OFF_V1),
    new("shift by an operator", "other spelling", RUNNER, SHIFT_V1, "(1).__add__(i) for i in " + TAKE),
    new("V1 asks V2's function", "other spelling", RUNNER, ASKED_V1,
        "        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (\n"
        "            get_eagle3_aux_layers_from_config,\n        )\n\n"
        "        aux_layers = get_eagle3_aux_layers_from_config(self.speculative_config)\n"),
    both("V1 asks V2's module", "other spelling", {RUNNER: [
        (ASKED_V1, "        from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils\n\n"
         "        aux_layers = eagle3_utils.get_eagle3_aux_layers_from_config(self.speculative_config)\n"),
        (READ_V1, "    def _unused_aux_layers(self)")]}, {}),
    # ------------------------------------------------------------------ sliding windows
    new("mirrored layers", "wrong layer index", MODEL, "                    layer_idx=layer_idx,\n",
        "                    layer_idx=self.config.num_hidden_layers - 1 - layer_idx,\n", {**MIXED, **TWO}),
    new("outer class clears the types", "written on the way", MODEL, VOCABULARY, VOCABULARY
        + '        if not (getattr(self.config, "dflash_config", None) or {}).get("use_swa"):\n'
        "            self.config.layer_types = None\n", ALL_WINDOWS),
    new("model clears the types", "written on the way", MODEL,
        "        self.vocab_size = self.config.vocab_size\n",
        "        self.vocab_size = self.config.vocab_size\n        self.config.layer_types = None\n", ALL_WINDOWS),
    new("configuration clears the types", "written on the way", CONFIG, PARALLEL, PARALLEL
        + "                    self.draft_model_config.hf_config.layer_types = None\n", ALL_WINDOWS),
    both("subclass swallows the window", "value unused", {MODEL: [
        (ATTENTION, ATTENTION.replace("Attention", "_Draft")),
        ("class DFlashQwen3Attention(nn.Module):\n",
         "class _Draft(Attention):\n    def __init__(self, *args, per_layer_sliding_window=None, **kwargs):\n"
         "        super().__init__(*args, **kwargs)\n\n\nclass DFlashQwen3Attention(nn.Module):\n")]}, ALL_WINDOWS),
    new("layer's class rebound", "rebinding", MODEL, "",
        "\n\nclass _Full(DFlashQwen3DecoderLayer):\n    def __init__(self, vllm_config, *, config, **kwargs):\n"
        "        import copy\n\n        config = copy.copy(config)\n        config.layer_types = None\n"
        "        super().__init__(vllm_config, config=config, **kwargs)\n\n\n"
        "DFlashQwen3Model.decoder_layer_cls = _Full\n", ALL_WINDOWS),
    new("resolver rebound", "rebinding", MODEL, "",
        "\n\n_taken = _resolve_layer_attention\n"
        "_resolve_layer_attention = lambda config, layer_idx: (None, _taken(config, layer_idx)[1])\n", ALL_WINDOWS),
    both("window given by partial", "other spelling", {MODEL: [
        (ATTENTION, "        self.attn = functools.partial(Attention, per_layer_sliding_window=sliding_window)(\n"),
        (WINDOW, ""), ("import io\n", "import functools\nimport io\n")]}, {}),
    # ------------------------------------------------------------------ tail block
    new("set again when caching", "written on the way", SCHEDULER, HASHES,
        "        self.use_eagle_block_drop |= self.use_eagle and self.cache_config.enable_prefix_caching\n" + HASHES,
        DROPS),
    new("set again by the method", "written on the way", SCHEDULER, HASHES,
        "        self.use_eagle_block_drop |= self.use_eagle\n" + HASHES, DROPS),
    one("option reset by the configuration", "written on the way", CONFIG, PARALLEL, PARALLEL
        + "                    self.disable_eagle_block_drop = False\n", {"cache_rule.opt_in": FAIL}),
    one("option reset by a validator", "written on the way", CONFIG, VERIFY,
        "        if self.use_dflash():\n            self.disable_eagle_block_drop = False\n" + VERIFY,
        {"cache_rule.opt_in": FAIL}),
    new("coordinator written afterwards", "written on the way", SCHEDULER, MAMBA,
        "        if self.use_eagle and not self.num_hash_lookahead_tokens:\n"
        "            self.kv_cache_manager.coordinator.drop_eagle_group_ids = {0}\n" + MAMBA, OPEN_DROPS),
    new("manager rebound", "rebinding", MANAGER, "",
        "\n\nclass _Drop(KVCacheManager):\n    def __init__(self, *args, use_eagle=False, **kwargs):\n"
        "        super().__init__(*args, use_eagle=True, **kwargs)\n\n\nKVCacheManager = _Drop\n", OPEN_DROPS),
    new("manager drops when caching", "value unused", MANAGER, "            use_eagle=self.use_eagle,\n",
        "            use_eagle=self.use_eagle or self.enable_caching,\n", DROPS),
    new("question rebound", "rebinding", CONFIG, "",
        '\n\nSpeculativeConfig.use_dflash = lambda self: self.method == "d-flash"\n',
        {"cache_rule.default": FAIL, **SLOT, **OFF_V1}),
    both("manager made of a dictionary", "other spelling", {SCHEDULER: [
        (MAKE, "        given = dict(\n"),
        (MAMBA, "        self.kv_cache_manager = KVCacheManager(**given)\n" + MAMBA)]}, {}),
    both("manager made by partial", "other spelling", {SCHEDULER: [
        (MAKE, "        make = functools.partial(\n            KVCacheManager,\n"), (GIVE, ""),
        (MAMBA, "        self.kv_cache_manager = make(use_eagle=self.use_eagle_block_drop)\n" + MAMBA),
        ("import itertools\n", "import functools\nimport itertools\n")]}, {}),
    new("keyword in a dictionary", "other spelling", SCHEDULER, GIVE,
        '            **{"use_eagle": self.use_eagle_block_drop},\n'),
    new("class by another name", "other spelling", SCHEDULER, MAKE,
        "        cls = KVCacheManager\n" + MAKE.replace("KVCacheManager", "cls")),
    both("rules in a base class", "other spelling", {CONFIG: [
        ("@config\nclass SpeculativeConfig:\n",
         "class _Rules:\n    def needs_eagle_block_drop(self):\n"
         '        return self.method in frozenset({"eagle", "eagle3", "mtp"})\n\n    def use_eagle_block_drop(self):\n'
         "        return not (not self.needs_eagle_block_drop() or self.disable_eagle_block_drop)\n\n\n"
         "@config\nclass SpeculativeConfig(_Rules):\n"),
        ("    def needs_eagle_block_drop(self) -> bool:", "    def _unused_needs(self) -> bool:"),
        ("    def use_eagle_block_drop(self) -> bool:", "    def _unused_use(self) -> bool:")]}, {}),
]
for _mutant in UNSEEN:
    _mutant.short = _mutant.name in SHORT

#: Constructs that the probes do not follow; each stands for a wrong build, and none of them passes.
OPEN = {(mutant.name, check) for mutant in UNSEEN for check, said in mutant.differs.items() if said == UNKNOWN}
