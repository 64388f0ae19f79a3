# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which extensions a source builds, and what a file's headers tell."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import vllm_tree as tree

from ansible_collections.dflash.fleet.plugins.module_utils import binaries, extensions
from ansible_collections.dflash.fleet.plugins.module_utils import elf as elves


@pytest.mark.parametrize(
    "device, machine, python, required, optional",
    [
        ("cpu", "x86_64", (3, 11), ["spinloop", "_C", "_C_AVX2"], []),
        ("cpu", "aarch64", (3, 10), ["_C"], []),
        (
            "cuda",
            "x86_64",
            (3, 11),
            ["cumem_allocator", "spinloop", "_fa3_C", "_C_stable_libtorch"],
            ["triton_kernels", "_luck_C"],
        ),
        ("rocm", "x86_64", (3, 11), ["cumem_allocator", "spinloop", "_C_stable_libtorch"], ["triton_kernels"]),
    ],
)
def test_a_setup_says_what_it_builds(
    device: str, machine: str, python: tuple[int, int], required: list[str], optional: list[str]
) -> None:
    found = extensions.from_setup(tree.SETUP, device, machine, python=python)
    assert [item.module[5:] for item in found if item.required] == required
    assert [item.module[5:] for item in found if not item.required] == optional


def test_an_old_toolkit_leaves_an_extension_out() -> None:
    found = extensions.from_setup(tree.SETUP, "cuda", cuda="12.1")
    assert "vllm._fa3_C" not in [item.module for item in found if item.required]


@pytest.mark.parametrize(
    "version, device, has, lacks",
    [
        ("0.20.1", "cuda", "vllm._C", "vllm.spinloop"),
        ("0.24.0", "cuda", "vllm._C_stable_libtorch", "vllm._C"),
        ("0.33.0+cu132", "cuda", "vllm.fs_io_C", "vllm._moe_C"),
        ("0.32.1.dev2+g22b257388.cpu", "cpu", "vllm._C_AVX512", "vllm.cumem_allocator"),
    ],
)
def test_release_data(version: str, device: str, has: str, lacks: str) -> None:
    names = [item.module for item in extensions.from_release(version, device)]
    assert has in names
    assert lacks not in names


def test_no_data_for_an_unknown_version() -> None:
    assert extensions.from_release("", "cuda") == []
    assert extensions.from_release("0.1.dev16016+gabc", "cuda") == []


def elf(machine: int = 62, needed: tuple[str, ...] = ("libcudart.so.13",), beyond: int = 0) -> bytes:
    """A small whole ELF file: header, string table, dynamic section, section headers at the end."""
    names = b"\0" + b"\0".join(name.encode() for name in needed) + b"\0"
    offsets = [names.index(name.encode() + b"\0") for name in needed]
    dynamic = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets) + struct.pack("<QQ", 0, 0)
    strings_at, dynamic_at = 64, 64 + len(names)
    sections_at = dynamic_at + len(dynamic)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, sections_at, 0, 64, 56, 0, 64, 4, 0)
    )

    def section(kind: int, offset: int, size: int, link: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 1, 0)

    return (
        head
        + names
        + dynamic
        + section(0, 0, 0, 0)
        + section(3, strings_at, len(names) + beyond, 0)
        + section(6, dynamic_at, len(dynamic), 1)
        + section(8, dynamic_at, 1 << 30, 0)  # takes room in memory only
    )


@pytest.mark.parametrize(
    "data, problem",
    [
        (elf(), ""),
        (elf()[:-1], "is truncated: its tables end at byte"),
        (elf()[:200], "is truncated"),
        (elf(beyond=4096), "is truncated: its sections end at byte"),
        (elf()[:20], "is not an ELF file"),
        (b"", "is empty"),
        (bytes(4096), "is not an ELF file"),
        (elf(machine=183), "is for aarch64"),
    ],
)
def test_a_library_is_judged_by_its_headers(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(data)
    found = elves.read(str(path), "x86_64")
    assert found.problem.startswith(problem)
    assert bool(found.problem) == bool(problem)
    assert found.size == len(data)


def test_needed_libraries_name_the_cuda_version(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(elf(needed=("libc.so.6", "libcudart.so.13", "libcudart.so.12")))
    assert elves.read(str(path), "x86_64").needed == ["libc.so.6", "libcudart.so.13", "libcudart.so.12"]
    assert elves.cuda_majors(["libcudart.so.13", "libc.so.6"]) == ["13"]


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    assert elves.read(str(tmp_path / "no.so")).problem == "cannot be read: No such file or directory"


def test_what_is_there(tmp_path: Path) -> None:
    for name in (
        "_C.abi3.so",
        "vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
    ):
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert list(extensions.present(str(tmp_path / "vllm"))) == [
        "vllm._C",
        "vllm.third_party.deep_gemm._C",
        "vllm.vllm_flash_attn._vllm_fa2_C",
    ]


@pytest.mark.parametrize(
    "torch, needed, packages, status",
    [
        ("13.0", "libcudart.so.13", ["nvidia-nccl-cu13", "numpy"], "pass"),
        ("12.8", "libcudart.so.13", [], "fail"),
        ("13.0", "libcudart.so.12", [], "fail"),
        ("13.0", "libcudart.so.13", ["nvidia-cublas-cu12"], "fail"),
        (None, "libc.so.6", [], "unknown"),
    ],
)
def test_one_cuda_major_version(
    tmp_path: Path, torch: str | None, needed: str, packages: list[str], status: str
) -> None:
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(elf(needed=(needed,)))
    wanted = [extensions.Expected("vllm._C", True)]
    compiled = {"vllm._C": str(path)}
    place = binaries.Place(installed=packages, torch_cuda=torch, toolkits=())
    found = binaries.examine(str(tmp_path), compiled, wanted, "cuda", "required", place)
    by_id = {item["id"]: item["status"] for item in found}
    assert by_id["complete.extensions"] == by_id["ext.elf"] == "pass"
    assert by_id["ext.cuda_major"] == status
