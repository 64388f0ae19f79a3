# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What an ELF file says without being loaded: whole or not, libraries, symbol versions, GPU architectures.

Only headers and small tables are read, never a whole file, and whatever the bytes are, the answer is a value.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

#: ``e_machine`` of an ELF file by ``platform.machine()``.
MACHINES = {"x86_64": 62, "aarch64": 183}
MACHINE_NAMES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm"}

_STRTAB, _DYNAMIC, _NOBITS, _DYNSYM = 3, 6, 8, 11
_VERDEF, _VERNEED = 0x6FFFFFFD, 0x6FFFFFFE
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_UNREADABLE = (struct.error, IndexError, ValueError, OverflowError, MemoryError)
#: Sections that hold code for GPUs, and the first word of each container in them.
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
FATBIN_MAGIC = 0xBA55ED50
_PTX, _SASS = 1, 2
#: More entries than any real library has: a bound for damaged ones.
_MOST = 200_000
VERSION_NAME = re.compile(r"^(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)*)$")


class Elf(NamedTuple):
    """What an ELF file says; ``problem`` is empty when it is whole and for this machine."""

    problem: str
    size: int
    machine: str
    needed: List[str]
    #: Symbol versions that it asks of each library: ``{"libc.so.6": ["GLIBC_2.17"]}``.
    versions: Dict[str, List[str]] = {}
    #: Symbol versions that it defines itself.
    defines: List[str] = []
    #: Folders in which its libraries are looked for, as written (``$ORIGIN`` and all).
    runpath: List[str] = []


class _Section(NamedTuple):
    name: int
    kind: int
    offset: int
    size: int
    link: int
    info: int


def read(path: str, machine: Optional[str] = None) -> Elf:
    """Headers and tables of an ELF file; says so when they point beyond its end.  Raises nothing."""
    wanted = machine or platform.machine()
    size = 0
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            return _read(handle, size, wanted)
    except OSError as error:
        return Elf("cannot be read: %s" % error.strerror, 0, "", [])
    except _UNREADABLE:
        return Elf("is not a whole ELF file", size, "", [])


def _read(handle: Any, size: int, wanted: str) -> Elf:
    head = handle.read(64)
    if size == 0:
        return Elf("is empty", 0, "", [])
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return Elf("is not an ELF file", size, "", [])
    if head[4] != 2 or head[5] != 1:
        return Elf("is not a 64-bit little-endian ELF file", size, "", [])
    number = struct.unpack_from("<H", head, 18)[0]
    machine = MACHINE_NAMES.get(number, "machine %d" % number)
    if number != MACHINES.get(wanted, number):
        return Elf("is for %s" % machine, size, machine, [])
    program_at, section_at = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", head, 54)
    ends = [program_at + program_size * program_count, section_at + section_size * section_count]
    if max(ends) > size:
        return Elf("is truncated: its tables end at byte %d of %d" % (max(ends), size), size, machine, [])
    table = _at(handle, program_at, program_size * program_count)
    for i in range(program_count):
        _kind, _flags, offset, _va, _pa, length = struct.unpack_from("<IIQQQQ", table, program_size * i)
        ends.append(offset + length)
    sections = _sections(handle, head)
    ends += [item.offset + item.size for item in sections if item.kind != _NOBITS]
    if max(ends) > size:
        return Elf("is truncated: its sections end at byte %d of %d" % (max(ends), size), size, machine, [])
    dynamic = _dynamic(handle, sections)
    return Elf(
        "",
        size,
        machine,
        [text for tag, text in dynamic if tag == _DT_NEEDED],
        _needs(handle, sections),
        _defines(handle, sections),
        [folder for tag, text in dynamic if tag in (_DT_RPATH, _DT_RUNPATH) for folder in text.split(":") if folder],
    )


def _at(handle: Any, offset: int, size: int) -> bytes:
    handle.seek(offset)
    found: bytes = handle.read(size)
    return found


def _sections(handle: Any, head: bytes) -> List[_Section]:
    (at,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    table = _at(handle, at, size * count)
    out = []
    for i in range(count):
        name, kind, _flags, _address, offset, length, link, info = struct.unpack_from("<IIQQQQII", table, size * i)
        out.append(_Section(name, kind, offset, length, link, info))
    return out


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode("utf-8", "replace")


def _linked(handle: Any, sections: List[_Section], item: _Section) -> bytes:
    """The string table that a section names."""
    strings = sections[item.link]
    return b"" if strings.kind == _NOBITS else _at(handle, strings.offset, strings.size)


def _dynamic(handle: Any, sections: List[_Section]) -> List[Tuple[int, str]]:
    """``(tag, text)`` of the dynamic section's entries that name libraries or folders."""
    out = []
    for item in sections:
        if item.kind != _DYNAMIC:
            continue
        data, names = _at(handle, item.offset, item.size), _linked(handle, sections, item)
        for i in range(0, len(data) - 15, 16):
            tag, value = struct.unpack_from("<QQ", data, i)
            if tag in (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH):
                out.append((tag, _text(names, value)))
    return out


def _needs(handle: Any, sections: List[_Section]) -> Dict[str, List[str]]:
    """``.gnu.version_r``: the symbol versions asked of each library."""
    out: Dict[str, List[str]] = {}
    for item in sections:
        if item.kind != _VERNEED:
            continue
        data, names = _at(handle, item.offset, item.size), _linked(handle, sections, item)
        at = 0
        for _ in range(min(item.info, _MOST)):
            _version, count, file, first, following = struct.unpack_from("<HHIII", data, at)
            asked = out.setdefault(_text(names, file), [])
            inner = at + first
            for _ in range(count):
                _hash, _flags, _other, name, step = struct.unpack_from("<IHHII", data, inner)
                asked.append(_text(names, name))
                if not step:
                    break
                inner += step
            if not following:
                break
            at += following
    return out


def _defines(handle: Any, sections: List[_Section]) -> List[str]:
    """``.gnu.version_d``: the symbol versions that a library offers."""
    out = []
    for item in sections:
        if item.kind != _VERDEF:
            continue
        data, names = _at(handle, item.offset, item.size), _linked(handle, sections, item)
        at = 0
        for _ in range(min(item.info, _MOST)):
            _version, _flags, _index, count, _hash, first, following = struct.unpack_from("<HHHHIII", data, at)
            if count:
                out.append(_text(names, struct.unpack_from("<I", data, at + first)[0]))
            if not following:
                break
            at += following
    return out


def undefined(path: str, pattern: str) -> List[str]:
    """Names of the symbols that a library takes from others and that match ``pattern``.  Raises nothing."""
    wanted = re.compile(pattern)
    found = set()
    try:
        with open(path, "rb") as handle:
            sections = _sections(handle, handle.read(64))
            for item in sections:
                if item.kind != _DYNSYM:
                    continue
                data, names = _at(handle, item.offset, item.size), _linked(handle, sections, item)
                for name, _info, _other, home in struct.iter_unpack("<IBBH16x", data[: len(data) // 24 * 24]):
                    if home == 0 and name and wanted.match(_text(names, name)):
                        found.add(_text(names, name))
    except (OSError, *_UNREADABLE):
        return []
    return sorted(found)


def architectures(path: str) -> Optional[List[str]]:
    """GPU architectures that a library holds code for: ``["compute_90", "sm_75", "sm_90"]``.

    ``compute_`` is code that the driver compiles for newer GPUs.  Empty: it holds no GPU code that says so.
    None: the file holds such sections and they cannot be read.  Letters (``sm_90a``) are not told apart.
    """
    try:
        with open(path, "rb") as handle:
            head = handle.read(64)
            if head[:4] != b"\x7fELF":
                return None
            sections = _sections(handle, head)
            (index,) = struct.unpack_from("<H", head, 62)
            names = _at(handle, sections[index].offset, sections[index].size) if sections else b""
            found: Set[str] = set()
            for item in sections:
                if item.kind != _NOBITS and _text(names, item.name) in FATBIN_SECTIONS:
                    _containers(handle, item, found)
            return sorted(found, key=lambda name: (name.split("_")[0], int(name.split("_")[1])))
    except (OSError, *_UNREADABLE):
        return None


def _containers(handle: Any, section: _Section, found: Set[str]) -> None:
    """Walk the fat binaries of a section by their headers.  Raises ``ValueError`` for what is none."""
    at, end, steps = section.offset, section.offset + section.size, 0
    while at + 16 <= end and steps < _MOST:
        magic, _version, header, size = struct.unpack("<IHHQ", _at(handle, at, 16))
        if magic == 0:  # padding
            at, steps = at + 8, steps + 1
            continue
        if magic != FATBIN_MAGIC or header < 16:
            raise ValueError("no fat binary at byte %d" % at)
        entry, at = at + header, at + header + size
        while entry + 32 <= at <= end and steps < _MOST:
            steps += 1
            kind, _unknown, length, payload = struct.unpack("<HHIQ", _at(handle, entry, 16))
            (number,) = struct.unpack("<I", _at(handle, entry + 28, 4))
            if length < 32:
                raise ValueError("no entry at byte %d" % entry)
            if kind in (_PTX, _SASS) and 10 <= number <= 999:
                found.add("%s_%d" % ("sm" if kind == _SASS else "compute", number))
            entry += length + payload


def cuda_majors(needed: Iterable[str]) -> List[str]:
    """The CUDA major versions that NEEDED entries name, by the libraries whose number is the toolkit's."""
    pattern = re.compile(r"^lib(?:cudart|nvrtc|cublas|cublasLt|nvJitLink)\.so\.(\d+)")
    return sorted({match.group(1) for name in needed for match in [pattern.match(name)] if match})


def newest(names: Iterable[str]) -> Dict[str, str]:
    """The newest symbol version of each family (GLIBC, GLIBCXX, CXXABI) among names: ``{"GLIBC": "2.34"}``."""
    out: Dict[str, str] = {}
    for name in names:
        match = VERSION_NAME.match(name)
        if match and number(match.group(2)) > number(out.get(match.group(1), "")):
            out[match.group(1)] = match.group(2)
    return out


def number(text: str) -> Tuple[int, ...]:
    """The digits of a version, for comparing."""
    return tuple(int(part) for part in re.findall(r"\d+", text, re.ASCII))


def folders(path: str, elf: Elf) -> List[str]:
    """The folders that a library itself names for its libraries, ``$ORIGIN`` filled in."""
    origin = os.path.dirname(os.path.abspath(path))
    return [os.path.normpath(item.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)) for item in elf.runpath]


def system_folders(root: str = "/") -> List[str]:
    """The folders in which the loader of this host looks: its configuration, then its own."""
    out: List[str] = []
    _configured(os.path.join(root, "etc", "ld.so.conf"), root, out, 0)
    triple = "%s-linux-gnu" % platform.machine()
    defaults = ["lib/" + triple, "usr/lib/" + triple, "lib64", "usr/lib64", "lib", "usr/lib"]
    out += [os.path.join(root, item) for item in defaults]
    return [item for item in dict.fromkeys(out) if os.path.isdir(item)]


def _configured(path: str, root: str, out: List[str], depth: int) -> None:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            lines = [line.split("#", 1)[0].strip() for line in handle]
    except OSError:
        return
    for line in lines:
        if line.startswith("include") and depth < 5:
            for pattern in line.split()[1:]:
                base = os.path.join(root, pattern.lstrip("/")) if pattern.startswith("/") else pattern
                for name in sorted(glob.glob(os.path.join(os.path.dirname(path), base))):
                    _configured(name, root, out, depth + 1)
        elif line.startswith("/"):
            out.append(os.path.join(root, line.lstrip("/")))


def find(name: str, places: Sequence[str]) -> Optional[str]:
    """The first file of this name in the folders."""
    for folder in places:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    return None
