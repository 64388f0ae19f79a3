# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A tree in the shape of vLLM, a few lines per deciding file, for tests of the probes.

It proves that the probes do their job, never that a vLLM is right: that is the truth table's work.
"""

from __future__ import annotations

from pathlib import Path

RUNNER_V1 = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
MODEL = "model_executor/models/qwen3_dflash.py"
SCHEDULER = "v1/core/sched/scheduler.py"
MANAGER = "v1/core/kv_cache_manager.py"
CONFIG = "config/speculative.py"
PROPOSER = "v1/spec_decode/dflash.py"
SPECULATOR = "v1/worker/gpu/spec_decode/dflash/speculator.py"
HEADS_V1 = "v1/spec_decode/llm_base_proposer.py"
HEADS_V2 = "v1/worker/gpu/spec_decode/dflash/utils.py"

FILES: dict[str, str] = {
    "__init__.py": "",
    "_version.py": "__version__ = version = '0.32.1.dev2+g0123abcde'\n__commit_id__ = commit_id = 'g0123abcde'\n",
    RUNNER_V1: """
import torch
from vllm.logger import init_logger

logger = init_logger(__name__)


class GPUModelRunner(SomeMixin):
    def load_model(self):
        with torch.device("cuda"):
            if self.needs_taps:
                taps = self._get_eagle3_aux_layers_from_config()
                if taps:
                    logger.info("taps %s", taps)
                else:
                    taps = self.model.default_taps()
                self.model.set_aux_hidden_state_layers(taps)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        config = self.speculative_config.draft_model_config.hf_config
        ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        if not ids:
            own = getattr(config, "dflash_config", None)
            if own and isinstance(own, dict):
                ids = [number + 1 for number in own["target_layer_ids"]]
        return tuple(ids) if ids else None
""",
    RUNNER_V2: """
from vllm.config import SpeculativeConfig


def install_taps(model, spec_config: SpeculativeConfig) -> None:
    taps = get_eagle3_aux_layers_from_config(spec_config)
    model.set_aux_hidden_state_layers(taps or model.default_taps())


def get_eagle3_aux_layers_from_config(spec_config):
    config = spec_config.draft_model_config.hf_config
    ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    if not ids:
        ids = [number + 1 for number in config.dflash_config["target_layer_ids"]]
    return tuple(ids)
""",
    MODEL: """
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention

_SLIDING = "sliding_attention"


def _resolve(config, layer_idx: int) -> tuple[int | None, bool]:
    kinds = config.layer_types
    count = sum(kind == _SLIDING for kind in kinds)
    if 0 < count < len(kinds) and not get_current_vllm_config().use_v2_model_runner:
        raise NotImplementedError("mixed layers need the V2 runner")
    slides = kinds[layer_idx] == _SLIDING
    return config.sliding_window if slides else None, slides


class DFlashQwen3Attention(nn.Module):
    def __init__(self, hidden_size, sliding_window: int | None = None, causal: bool = False, prefix: str = "") -> None:
        super().__init__()
        self.attn = Attention(hidden_size, per_layer_sliding_window=sliding_window, prefix=f"{prefix}.attn")
        self.causal = causal


class DFlashQwen3DecoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, *, config, layer_idx: int, prefix: str = "") -> None:
        super().__init__()
        window, causal = _resolve(config, layer_idx)
        self.self_attn = DFlashQwen3Attention(config.hidden_size, sliding_window=window, causal=causal, prefix=prefix)


class DFlashQwen3Model(nn.Module):
    def __init__(self, config) -> None:
        count = config.num_hidden_layers
        self.layers = [DFlashQwen3DecoderLayer(None, config=config, layer_idx=i) for i in range(count)]


def all_causal(config) -> bool:
    return all(kind == _SLIDING for kind in config.layer_types)


class DFlashQwen3ForCausalLM(nn.Module):
    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [layer.self_attn.attn.layer_name for layer in self.model.layers]

    def get_draft_attn_causal(self) -> list[bool]:
        return [layer.self_attn.causal for layer in self.model.layers]
""",
    SCHEDULER: """
class Scheduler:
    def __init__(self, vllm_config, kv_cache_config, block_size: int, *, log_stats: bool = False) -> None:
        self.vllm_config = vllm_config
        for group in kv_cache_config.groups:
            block_size = max(block_size, group.size)
        speculative_config = vllm_config.speculative_config
        self.use_eagle = False
        self.drops = False
        if speculative_config is not None:
            if speculative_config.dynamic:
                self.lookup = build(speculative_config)
            self.use_eagle = speculative_config.use_eagle()
            self.drops = speculative_config.use_eagle_block_drop()
        self.num_lookahead_tokens = 0
        if speculative_config is not None:
            self.num_lookahead_tokens = speculative_config.num_speculative_tokens
            if speculative_config.use_dflash():
                self.num_lookahead_tokens += 1
        self.kv_cache_manager = KVCacheManager(kv_cache_config, use_eagle=self.drops, log_stats=log_stats)

    def schedule(self):
        self.kv_cache_manager.allocate_slots(1, num_lookahead_tokens=self.num_lookahead_tokens)
        slots = 0 if self.loading else self.num_lookahead_tokens
        self.kv_cache_manager.allocate_slots(2, num_lookahead_tokens=slots)
""",
    MANAGER: """
class KVCacheManager:
    def __init__(self, kv_cache_config, use_eagle: bool = False, log_stats: bool = False) -> None:
        self.use_eagle = use_eagle
        self.coordinator = get_kv_cache_coordinator(kv_cache_config, use_eagle=self.use_eagle)
""",
    CONFIG: """
from pydantic import Field
from vllm.config.utils import config


@config
class SpeculativeConfig:
    method: str | None = None
    num_speculative_tokens: int = Field(default=None, gt=0)
    disable_eagle_block_drop: bool = False

    def use_eagle(self) -> bool:
        return self.method in ("eagle", "eagle3", "mtp", "dflash")

    def use_dflash(self) -> bool:
        return self.method == "dflash"

    def use_eagle_block_drop(self) -> bool:
        return self.use_eagle() and not self.disable_eagle_block_drop
""",
    PROPOSER: """
from vllm.model_executor.models.qwen3_dflash import all_causal


class DFlashProposer(Base):
    def __init__(self, vllm_config) -> None:
        super().__init__(vllm_config)
        self.dflash_causal = all_causal(self.draft_model_config.hf_config)

    def set_inputs(self, common):
        return CommonAttentionMetadata(common.slots, causal=self.dflash_causal)
""",
    SPECULATOR: """
class DFlashSpeculator(Base):
    def set_attn(self, kv_cache_config) -> None:
        names = self.model.get_draft_kv_cache_layer_names()
        groups = {name: i for i, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        self._causal = {groups[name]: value for name, value in zip(names, self.model.get_draft_attn_causal())}

    def propose(self):
        return build_attn_metadata(self.slots, causal=self._causal)
""",
    HEADS_V1: """
class Base:
    def load_model(self, target_model):
        self.model = self._get_model()
        if supports_multimodal(target_model):
            inner = target_model.get_language_model()
        else:
            inner = target_model
        self._maybe_share_lm_head(inner)

    def _maybe_share_lm_head(self, target):
        if hasattr(target, "lm_head"):
            self.model.lm_head = target.lm_head
""",
    HEADS_V2: """
from vllm.model_executor.model_loader import get_model


def load_dflash_model(target_model, vllm_config):
    dflash_model = get_model(vllm_config=vllm_config)
    inner = target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    head = getattr(inner, "lm_head", None) or getattr(target_model, "lm_head", None)
    if vllm_config.verbose:
        log("sharing")
    if head is not None:
        del dflash_model.lm_head
        dflash_model.lm_head = head
    return dflash_model
""",
}

SETUP = """
ext_modules = []
if _is_cuda() or _is_hip():
    ext_modules.append(CMakeExtension(name="vllm.cumem_allocator"))
    ext_modules.append(CMakeExtension(name="vllm.triton_kernels", optional=True))
if not _is_xpu() and sys.version_info >= (3, 11):
    ext_modules.append(CMakeExtension(name="vllm.spinloop"))
if _is_cuda():
    if USE_PRECOMPILED or (CUDA_HOME and get_nvcc_cuda_version() >= Version("12.3")):
        ext_modules.append(CMakeExtension(name="vllm._fa3_C"))
    if os.environ.get("WITH_LUCK"):
        ext_modules.append(CMakeExtension(name="vllm._luck_C"))
if _is_cpu():
    import platform
    if platform.machine() in ("x86_64", "AMD64"):
        ext_modules.append(CMakeExtension(name="vllm._C"))
        ext_modules.append(CMakeExtension(name="vllm._C_AVX2"))
    else:
        ext_modules.append(CMakeExtension(name="vllm._C"))
if _build_custom_ops():
    ext_modules.append(CMakeExtension(name="vllm._C_stable_libtorch"))
"""


def write(folder: Path, changes: dict[str, dict[str, str]] | None = None, without: tuple = ()) -> Path:
    """Write the tree below ``folder/vllm`` and return that folder.

    ``changes`` maps a file to replacements; a text that is not in the file is an error of the test.
    """
    package = folder / "vllm"
    for path, text in FILES.items():
        if path in without:
            continue
        for old, new in (changes or {}).get(path, {}).items():
            assert old in text, "%r is not in %s" % (old, path)
            text = text.replace(old, new)
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return package
