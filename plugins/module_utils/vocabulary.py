# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The closed vocabulary: states, exit codes, check ids.  Data only; recap, JSON, API and docs read it here.

It is a Python literal and not JSON because Ansible carries only Python files to managed hosts.
"""

from __future__ import annotations

from typing import Any, Dict

#: State of a host after a run, worst last (a host with several instances shows the worst).
HOST_STATES: Dict[str, str] = {
    "unchanged": "was proven already; nothing was touched",
    "would_change": "check mode: a real run would change this host",
    "proven": "serves a build and a drafter that passed every required gate on this host, in this run",
    "removed": "the deployment was removed",
    "degraded": "serves without drafter, by explicit policy",
    "rolled_back": "a gate failed; the previous deployment serves, proven again",
    "not_reached": "the rollout stopped before this host",
    "refused": "what the host serves was not touched; reason and fix are told",
    "stopped": "a gate failed and there was nothing proven to go back to: nothing serves",
    "unreachable": "the host was never reached",
    "lost": "the host was touched and its outcome is not known",
}

RUN_STATES: Dict[str, str] = {
    "ok": "every host is proven, unchanged, would_change or removed",
    "failed": "at least one host is in another state",
    "cancelled": "the run was cancelled",
    "lost": "the run left no verdict",
}

#: Host states that let a run be ``ok``.
OK_HOST_STATES = ("proven", "unchanged", "would_change", "removed")

#: Exit code by cause; with several causes the first of EXIT_ORDER wins.
EXIT_CODES: Dict[str, int] = {"ok": 0, "gate_or_build": 2, "input": 3, "unreachable_or_lost": 4, "cancelled": 5}
EXIT_ORDER = (5, 4, 2, 3)

CHECK_STATUSES = ("pass", "fail", "unknown", "skip")
CHECK_LEVELS = ("required", "advisory")
CHECK_STAGES = ("build", "host", "serving")

# ``required_when``: "always"; or a word that the code knows how to answer for this host and this
# deployment (drafter dialect and layer types, runner, configuration); or "never" (advisory).
# ``covered_by``: another check whose pass settles an ``unknown`` of this one.
CHECKS: Dict[str, Dict[str, Any]] = {
    # ------------------------------------------------------------------ host (preflight)
    "host.root": {
        "stage": "host", "required_when": "always",
        "question": "Can the root folder be used: owner, free of noexec, short enough for sockets?",
        "remedy": "Choose another dflash_root that this account owns, at most 40 characters long.",
    },
    "host.python": {
        "stage": "host", "required_when": "always",
        "question": "Is there a Python of the wanted version, with venv, that the service account can run?",
        "remedy": "Install the distribution's python3.X and python3.X-venv, or name another in vllm_toolchain_python.",
    },
    "host.headers": {
        "stage": "host", "required_when": "cuda",
        "question": "Are a C compiler and the Python headers there (Triton and FlashInfer compile at run time)?",
        "remedy": "Install gcc and python3.X-dev.",
    },
    "host.tools": {
        "stage": "host", "required_when": "always",
        "question": "Is git there (the builder needs it)?",
        "remedy": "Install git.",
    },
    "host.platform": {
        "stage": "host", "required_when": "always",
        "question": "Is this Linux on x86_64 with glibc 2.28 or newer?",
        "remedy": "Use a supported host; aarch64 and ROCm are not supported.",
    },
    "host.cpu_flags": {
        "stage": "host", "required_when": "cpu",
        "question": "Does the processor have the instructions that the CPU build needs (AVX2)?",
        "remedy": "Use a host with AVX2, or build for CUDA.",
    },
    "host.memory": {
        "stage": "host", "required_when": "always",
        "question": "Is there enough memory?",
        "remedy": "Free memory or lower dflash_preflight_memory_gib.",
    },
    "host.disk": {
        "stage": "host", "required_when": "always",
        "question": "Is there enough space for build, layer and release under the root?",
        "remedy": "Free space, or choose another dflash_root; dflash_preflight_disk_gib is the bound.",
    },
    "host.port": {
        "stage": "host", "required_when": "always",
        "question": "Is the port free, or held by the instance itself?",
        "remedy": "Stop what listens there or choose another dflash_serve_port.",
    },
    "host.gpu": {
        "stage": "host", "required_when": "cuda",
        "question": "Does the driver see a GPU of compute capability 7.5 or newer?",
        "remedy": "Check nvidia-smi; install the driver; free the GPU.",
    },
    "host.driver": {
        "stage": "host", "required_when": "cuda",
        "question": "Does the driver support CUDA 13?",
        "remedy": "Install a driver of branch 580 or newer.",
    },
    "host.source": {
        "stage": "host", "required_when": "always",
        "question": "Does the builder reach the source repository?",
        "remedy": "Check vllm_source_repo, the network and dflash_proxy.",
    },
    # ------------------------------------------------------------------ pairing
    "pair.architecture": {
        "stage": "host", "required_when": "always",
        "question": "Is the drafter a DFlash drafter of a known dialect?",
        "remedy": "Point dflash_models_drafter at a z-lab or speculators DFlash checkpoint.",
    },
    "pair.hidden_size": {
        "stage": "host", "required_when": "always",
        "question": "Is the drafter's hidden size the target's?",
        "remedy": "The drafter belongs to another target: pair it with the one it was trained for.",
    },
    "pair.layers": {
        "stage": "host", "required_when": "always",
        "question": "Do the drafter's taps (target layer ids + 1) lie inside the target?",
        "remedy": "The drafter belongs to a deeper target: pair it with the one it was trained for.",
    },
    "pair.vocab": {
        "stage": "host", "required_when": "always",
        "question": "Is the drafter's vocabulary the target's, and the mask token inside it?",
        "remedy": "The drafter belongs to another tokenizer: pair it with the target it was trained for.",
    },
    "pair.block_size": {
        "stage": "host", "required_when": "always",
        "question": "Is the number of speculative tokens at most block size - 1?",
        "remedy": "Lower dflash_serve_num_speculative_tokens (block size counts the known token too).",
    },
    "pair.runner": {
        "stage": "host", "required_when": "always",
        "question": "Can this kind of host run the drafter's layer types (mixed layers need the V2 runner, so Triton)?",
        "remedy": "Use an all-full or all-sliding drafter on CPU, or a GPU host.",
    },
    # ------------------------------------------------------------------ identity
    "identity.commit": {
        "stage": "build", "required_when": "always",
        "question": "Is the build commit recorded by the build the commit that was pinned (with its series)?",
        "remedy": "Build again: what is installed was made from other source.",
    },
    "identity.version": {
        "stage": "build", "required_when": "always",
        "question": "Do the version of the package, of its metadata and of the manifest agree?",
        "remedy": "Build again; two installations have been mixed.",
    },
    "identity.wheel": {
        "stage": "build", "required_when": "installed",
        "question": "Was the release installed from the wheel with the hash that the build recorded?",
        "remedy": "Run the deployment again: the wheel is fetched and installed anew.",
    },
    # ------------------------------------------------------------------ completeness
    "complete.distribution": {
        "stage": "build", "required_when": "always",
        "question": "Is there exactly one vllm distribution, and does the package come from it?",
        "remedy": "The installation was interrupted: run the deployment again.",
    },
    "complete.record": {
        "stage": "build", "required_when": "always",
        "question": "Does every file of the distribution have the hash that RECORD states?",
        "remedy": "Files were changed, cut or lost after the build: run the deployment again.",
    },
    "complete.extra_files": {
        "stage": "build", "required_when": "always",
        "question": "Are there importable files in the package that no RECORD knows?",
        "remedy": "Something was added after the installation: run the deployment again.",
    },
    "complete.extensions": {
        "stage": "build", "required_when": "always",
        "question": "Is every compiled extension there that this source builds for this device?",
        "remedy": "The build is partial: build again and read the first error in the build log.",
    },
    "complete.layer": {
        "stage": "build", "required_when": "installed",
        "question": "Is every file of the dependency layer as it was installed?",
        "remedy": "Run the deployment again: the layer is installed anew.",
    },
    "complete.leftovers": {
        "stage": "build", "required_when": "always",
        "question": "Is the folder free of what an interrupted installer leaves (folders that begin with ~)?",
        "remedy": "An installation or removal was interrupted: run the deployment again.",
    },
    "complete.shadow": {
        "stage": "build", "required_when": "always",
        "question": "Is there no second vllm package on the interpreter's path, in the folder it is started from?",
        "remedy": "Remove the other vllm, or start from another folder and without PYTHONPATH.",
    },
    "complete.owners": {
        "stage": "build", "required_when": "always",
        "question": "Does each file of the package belong to one distribution only?",
        "remedy": "Uninstall both distributions and install the one that is meant: one wrote over the other's files.",
    },
    "complete.dependencies": {
        "stage": "build", "required_when": "installed",
        "question": "Does every file of the other distributions have the hash that their RECORD states?",
        "remedy": "Reinstall the distribution that is named.",
    },
    "complete.requirements": {
        "stage": "build", "required_when": "never",
        "question": "Are all requirements of vllm installed (vllm_release_exclude leaves some out on purpose)?",
        "remedy": "Expected when vllm_release_exclude names them; otherwise build the layer again.",
    },
    # ------------------------------------------------------------------ binaries
    "ext.elf": {
        "stage": "build", "required_when": "always",
        "question": "Is every extension a whole ELF file for this machine?",
        "remedy": "A library is truncated or for another machine: run the deployment again.",
    },
    "ext.cuda_major": {
        "stage": "build", "required_when": "cuda",
        "question": "Do all extensions, torch and the toolkit belong to one CUDA major version?",
        "remedy": "Build with the CUDA of the torch in the layer; remove foreign nvidia-*-cu12 packages.",
    },
    "ext.needed": {
        "stage": "build", "required_when": "extension",
        "question": "Is every library that the extensions need where the loader looks (a driver's own aside)?",
        "remedy": "Install the library that is named, or the torch that the build was made for.",
    },
    "ext.abi": {
        "stage": "build", "required_when": "always",
        "question": "Does this host have the newest GLIBC and GLIBCXX symbol versions that the extensions ask for?",
        "remedy": "The build was made on a newer system: build on this one, or update it.",
    },
    "ext.arch": {
        "stage": "build", "required_when": "cuda",
        "question": "Do the extensions hold code for this host's GPUs?",
        "remedy": "Build for the GPU's architecture (TORCH_CUDA_ARCH_LIST), or take a wheel that holds it.",
    },
    "ext.import": {
        "stage": "build", "required_when": "extension", "object": True,
        "question": "Does the extension import in a fresh process, from a neutral folder, as the service account?",
        "remedy": "Read the evidence: missing library, wrong torch, or a partial build.",
    },
    "ext.ops": {
        "stage": "build", "required_when": "extension", "object": True,
        "question": "Does the library load and register operators?",
        "remedy": "The library is damaged or belongs to another torch: run the deployment again.",
    },
    # ------------------------------------------------------------------ capabilities
    "capability.layer_offset.v1": {
        "stage": "build", "required_when": "runner_v1", "covered_by": "serving.canary_al",
        "question": "Does the V1 runner read the target's hidden states at target layer id + 1?",
        "remedy": "Pin v0.22.0 or newer, or a fork that has the +1 shift.",
    },
    "capability.layer_offset.v2": {
        "stage": "build", "required_when": "runner_v2", "covered_by": "serving.canary_al",
        "question": "Does the V2 runner read the target's hidden states at target layer id + 1?",
        "remedy": "Pin v0.24.0 or newer.",
    },
    "capability.swa.uniform.v1": {
        "stage": "build", "required_when": "uniform_sliding_v1", "covered_by": "serving.canary_al",
        "question": "Does the V1 runner give an all-sliding drafter its window?",
        "remedy": "Pin v0.25.0 or newer; before v0.26.0 a causal drafter must say so in dflash_config.causal.",
    },
    "capability.swa.uniform.v2": {
        "stage": "build", "required_when": "uniform_sliding_v2", "covered_by": "serving.canary_al",
        "question": "Does the V2 runner give an all-sliding drafter its window?",
        "remedy": "Pin v0.25.0 or newer; before v0.26.0 a causal drafter must say so in dflash_config.causal.",
    },
    "capability.swa.mixed.v1": {
        "stage": "build", "required_when": "mixed_v1", "covered_by": "serving.canary_al",
        "question": "Does the V1 runner give each layer of a mixed drafter its own window?",
        "remedy": "No release does: use the V2 runner (v0.26.0 or newer).",
    },
    "capability.swa.mixed.v2": {
        "stage": "build", "required_when": "mixed_v2", "covered_by": "serving.canary_al",
        "question": "Does the V2 runner give each layer of a mixed drafter its own window?",
        "remedy": "Pin v0.26.0 or newer.",
    },
    "capability.cache_rule.default": {
        "stage": "build", "required_when": "cache_rule_default",
        "question": "Does the scheduler keep the tail block for DFlash without being told?",
        "remedy": "Pin v0.33.0 or newer, or set disable_eagle_block_drop (v0.30.0 to v0.32.0).",
    },
    "capability.cache_rule.opt_in": {
        "stage": "build", "required_when": "cache_rule_opt_in",
        "question": "Does disable_eagle_block_drop keep the tail block for DFlash?",
        "remedy": "Pin v0.30.0 or newer.",
    },
    "capability.lookahead_slot": {
        "stage": "build", "required_when": "always", "covered_by": "serving.canary_al",
        "question": "Does the scheduler reserve one slot more than the speculative tokens for DFlash?",
        "remedy": "Pin v0.23.0 or newer.",
    },
    "capability.mixed_guard": {
        "stage": "build", "required_when": "mixed",
        "question": "Is a mixed drafter served right or refused, on each runner, never served wrongly in silence?",
        "remedy": "A patch took out the refusal, or the release is older than v0.25.0: pin v0.26.0 or newer.",
    },
    "capability.lm_head_sharing.v1": {
        "stage": "build", "required_when": "nested_target_v1", "covered_by": "serving.al",
        "question": "Does the V1 runner give the drafter the head of a target that nests it?",
        "remedy": "Pin an upstream release: each shares the head.",
    },
    "capability.lm_head_sharing.v2": {
        "stage": "build", "required_when": "nested_target_v2", "covered_by": "serving.al",
        "question": "Does the V2 runner give the drafter the head of a target that nests it?",
        "remedy": "Pin v0.26.0 or newer.",
    },
    "capability.dflash2_files": {
        "stage": "build", "required_when": "dflash2",
        "question": "Is DFlash2 there whole: its registered model with layers of its own, and its speculator?",
        "remedy": "Pin v0.28.0 or newer; some commits between releases lack the hook for DFlash2's layers.",
    },
    # ------------------------------------------------------------------ serving
    "serving.process": {
        "stage": "serving", "required_when": "always",
        "question": "Is the process that answers the one of this release?",
        "remedy": "Another server holds the port, or the service runs an older release: stop it and deploy again.",
    },
    "serving.ready": {
        "stage": "serving", "required_when": "always",
        "question": "Does the server name the model and give one real token in time?",
        "remedy": "Read the server's log; its first error stands in the evidence.",
    },
    "serving.aux_layers": {
        "stage": "serving", "required_when": "never",
        "question": "Did this process log auxiliary layers from the drafter's configuration, shifted by one?",
        "remedy": "The drafter's target layer ids were not read as they must be: pin another vLLM.",
    },
    "serving.text": {
        "stage": "serving", "required_when": "canary_text",
        "question": "Does the canary target answer word for word what it was trained to answer?",
        "remedy": "The target itself is served wrongly: check precision and attention backend.",
    },
    "serving.canary_al": {
        "stage": "serving", "required_when": "always",
        "question": "Does the canary pair reach its acceptance length on this host?",
        "remedy": "The build wires drafters wrongly, or drops their window: pin a vLLM whose capability checks pass.",
    },
    "serving.al": {
        "stage": "serving", "required_when": "always",
        "question": "Does the real pair reach its floor of acceptance length?",
        "remedy": "See the hint: no draft, no acceptance and a low acceptance have different causes.",
    },
}
