# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of a CUDA build, by files alone: this host has no CUDA torch, so nothing is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
from damage_cases import compiled, patch, renamed
from damage_lab import Lab

from ansible_collections.dflash.fleet.plugins.module_utils import binaries, checks, elf, extensions, host, record

FAKE = "/* GPU code comes from nvcc where it is there */ int operators(void) { return 0; }\n"


@pytest.fixture
def cuda(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The release as a CUDA build: one more library that needs CUDA 13's runtime, and a torch that says 13.0."""
    monkeypatch.setattr(
        "ansible_collections.dflash.fleet.plugins.module_utils.binaries.toolkit_version", lambda _f: None
    )
    runtime = lab.root / "libcudart.so.13"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-o", str(runtime), "-x", "c", os.devnull],
        check=True,
    )
    lab.put(lab.package / "_cuda_C.abi3.so", compiled(lab, FAKE, "-Wl,--no-as-needed", str(runtime)))
    lab.put(lab.deps / "torch" / "version.py", "cuda = '13.0'\n")
    return lab


def cuda_checks(lab: Lab) -> dict[str, checks.Check]:
    """Without loading anything: this host has no CUDA torch."""
    names = [item.name for site in (lab.deps, lab.site) for item in record.distributions(str(site))]
    sites = [str(lab.deps), str(lab.site)]
    place = binaries.Place(
        sites,
        str(lab.python),
        names,
        binaries.torch_cuda(sites),
        lab.manifest["version"],
        gpus=host.compute_capabilities(),
    )
    found = binaries.examine(
        str(lab.package),
        extensions.present(str(lab.package)),
        [extensions.Expected("vllm._cuda_C", True)],
        "cuda",
        "required",
        place,
    )
    return {item["id"]: item for item in found}


def test_a_cuda_build_of_one_major_version(cuda: Lab) -> None:
    found = cuda_checks(cuda)
    assert found["ext.cuda_major"]["status"] == "pass", found["ext.cuda_major"]
    assert found["ext.cuda_major"]["actual"] == ["13"]


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda lab: lab.put(lab.deps / "torch" / "version.py", "cuda = '12.8'\n"), ["CUDA 12: torch"]),
        (
            lambda lab: lab.put(
                lab.site / "nvidia_cublas_cu12-12.8.dist-info" / "METADATA",
                "Name: nvidia-cublas-cu12\nVersion: 12.8\n\n",
            ),
            ["CUDA 12: nvidia-cublas-cu12"],
        ),
        (
            lambda lab: patch(lab, "_cuda_C.abi3.so", renamed(b"libcudart.so.13\0", b"libcudart.so.12\0")),
            ["CUDA 12: vllm/_cuda_C.abi3.so", "CUDA 13: torch"],
        ),
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
    source.write_text('__global__ void k(float *x) { *x *= 2.f; }\nextern "C" void run(float *x) { k<<<1, 1>>>(x); }\n')
    subprocess.run(
        [
            "nvcc",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-cudart",
            "shared",
            "-gencode",
            "arch=compute_90a,code=sm_90a",
            str(source),
            "-o",
            str(out),
        ],
        check=True,
    )
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
