# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which compiled extensions a vLLM must have, and which it has."""

from __future__ import annotations

import ast
import os
import re
from typing import Dict, List, NamedTuple, Optional, Tuple

SUFFIX = re.compile(r"(\.abi3|\.cpython-[^.]+)?\.so$")

#: Must-have extensions by device and first release, for installations without source and manifest.
#: Read from the wheels of 0.20.0 to 0.33.0; the last entry at or below a version counts.
RELEASE_EXTENSIONS: Dict[str, List[Tuple[Tuple[int, int], List[str]]]] = {
    "cuda": [
        (
            (0, 20),
            [
                "vllm._C",
                "vllm._C_stable_libtorch",
                "vllm._moe_C",
                "vllm.cumem_allocator",
                "vllm.vllm_flash_attn._vllm_fa2_C",
            ],
        ),
        (
            (0, 22),
            [
                "vllm._C",
                "vllm._C_stable_libtorch",
                "vllm._moe_C",
                "vllm.cumem_allocator",
                "vllm.vllm_flash_attn._vllm_fa2_C",
                "vllm.spinloop",
            ],
        ),
        (
            (0, 24),
            [
                "vllm._C_stable_libtorch",
                "vllm._moe_C_stable_libtorch",
                "vllm.cumem_allocator",
                "vllm.vllm_flash_attn._vllm_fa2_C",
                "vllm.spinloop",
            ],
        ),
        (
            (0, 25),
            [
                "vllm._C_stable_libtorch",
                "vllm._moe_C_stable_libtorch",
                "vllm.cumem_allocator",
                "vllm.vllm_flash_attn._vllm_fa2_C",
                "vllm.spinloop",
                "vllm.fs_io_C",
            ],
        ),
    ],
    "cpu": [
        ((0, 20), ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2"]),
        ((0, 22), ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2", "vllm.spinloop"]),
        ((0, 25), ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2", "vllm.spinloop", "vllm.fs_io_C"]),
    ],
}

#: CPU variants of one extension: no two may be loaded by one process, and only one is used on a host.
CPU_VARIANTS = ("vllm._C", "vllm._C_AVX512", "vllm._C_AVX2")


class Expected(NamedTuple):
    """One extension that a source builds; ``required`` is false where the source calls it optional."""

    module: str
    required: bool


def from_setup(
    text: str, device: str, machine: str = "x86_64", cuda: str = "13.0", python: Tuple[int, int] = (3, 11)
) -> List[Expected]:
    """The extensions that a ``setup.py`` builds for a device, read from its syntax tree.

    A condition that cannot be read (a build flag, an environment variable) makes what stands below it optional.
    """
    facts = {"device": device, "machine": machine, "cuda": cuda, "python": "%d.%d" % python}
    found: Dict[str, bool] = {}
    _collect(ast.parse(text).body, True, facts, found)
    return [Expected(name, required) for name, required in found.items()]


def _collect(body: List[ast.stmt], certain: Optional[bool], facts: Dict[str, str], found: Dict[str, bool]) -> None:
    for stmt in body:
        if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(stmt, ast.If):
            truth = _truth(stmt.test, facts)
            if truth is not False:
                _collect(stmt.body, certain and truth, facts, found)
            if truth is not True:
                _collect(stmt.orelse, certain and (None if truth is None else True), facts, found)
            continue
        for call in ast.walk(stmt):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "CMakeExtension":
                words = {item.arg: getattr(item.value, "value", None) for item in call.keywords}
                name = words.get("name") or (getattr(call.args[0], "value", None) if call.args else None)
                if isinstance(name, str):
                    found[name] = found.get(name, False) or (certain is True and words.get("optional") is not True)


def _truth(test: ast.expr, facts: Dict[str, str]) -> Optional[bool]:
    """A build condition as far as device, machine and toolkit decide it; None where they do not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, facts)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [_truth(part, facts) for part in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in parts:
            return decisive
        return None if None in parts else not decisive
    if isinstance(test, ast.Name):
        return {"CUDA_HOME": facts["device"] == "cuda"}.get(test.id)
    if isinstance(test, ast.Call):
        device = facts["device"]
        return {
            "_is_cuda": device == "cuda",
            "_is_hip": device == "rocm",
            "_is_cpu": device == "cpu",
            "_is_xpu": False,
            "_build_custom_ops": device in ("cuda", "rocm"),
            "_no_device": False,
        }.get(getattr(test.func, "id", ""))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = ast.unparse(test.left), test.comparators[0]
        if left == "platform.machine()" and isinstance(test.ops[0], ast.In):
            return facts["machine"] in [getattr(item, "value", None) for item in getattr(right, "elts", [])]
        if left == "get_nvcc_cuda_version()" and isinstance(test.ops[0], ast.GtE) and isinstance(right, ast.Call):
            return _version(facts["cuda"]) >= _version(str(getattr(right.args[0], "value", "")))
        if left == "sys.version_info" and isinstance(test.ops[0], ast.GtE):
            return _version(facts["python"]) >= _version(ast.unparse(right).replace(",", "."))
    return None


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def from_release(version: str, device: str) -> List[Expected]:
    """The must-have extensions of a release by its version number; empty where the version is unknown."""
    names: List[str] = []
    for since, modules in RELEASE_EXTENSIONS.get(device, []):
        if version and _version(version) >= since:
            names = modules
    return [Expected(name, True) for name in names]


def present(package: str) -> Dict[str, str]:
    """``{module: path}`` of all shared libraries below a ``vllm`` folder."""
    found = {}
    for folder, _folders, files in os.walk(package):
        for name in files:
            if name.endswith(".so"):
                dotted = os.path.join(os.path.relpath(folder, os.path.dirname(package)), SUFFIX.sub("", name))
                found[dotted.replace(os.sep, ".")] = os.path.join(folder, name)
    return dict(sorted(found.items()))
