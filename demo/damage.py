#!/usr/bin/env python3
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Damage one installed release on purpose, to see that the pipeline finds it.

    python3 demo/damage.py truncated_so RELEASE_DIR [--python PATH]

RELEASE_DIR is the folder of one release (it holds venv/), or a virtual environment. Every damage is one that leaves
`import vllm; print(vllm.__version__)` answering, and the command checks that it does.

    truncated_so   the compiled library this CPU serves with ends early, as after an install that was killed
    missing_so     the same library is gone
    flipped_byte   one byte of a Python file differs, size and modification time are as before
    no_record      the distribution's RECORD is gone, as after an install that was killed before its end

A damaged file is written new and renamed in, so what shares its bytes with the old one keeps them; a file that lies
outside RELEASE_DIR, behind a link, is refused. Read-only modes of files and folders are as before afterwards. The last
line of the output is JSON: damage, path, and what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

KEPT_SHARE = 0.4
PT_LOAD = 1
ANSWER_TIMEOUT_S = 120
ANSWER = "import vllm; print(vllm.__version__)"

# What vllm.platforms.cpu imports: the widest instruction set that this CPU has.
PICK_LIBRARY = """
import torch
wide = torch.cpu._is_avx512_supported()
print("_C" if wide and torch.cpu._is_avx512_bf16_supported() else "_C_AVX512" if wide else "_C_AVX2")
"""


class DamageError(Exception):
    """What stands in the way, in one line."""


def ask(python: pathlib.Path, code: str) -> str:
    """What a fresh interpreter of the release prints, from a neutral folder."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_"))}
    try:
        done = subprocess.run(
            [str(python), "-I", "-B", "-c", code], cwd="/", env=env, capture_output=True, text=True,
            timeout=ANSWER_TIMEOUT_S, check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DamageError(f"{python} does not run: {error}") from error
    if done.returncode:
        raise DamageError(f"{python} ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['-'])[-1]}")
    return done.stdout.strip()


def package_folder(release: pathlib.Path) -> pathlib.Path:
    """The folder of the vllm package inside the release."""
    found = sorted(release.glob("venv/lib/python3*/site-packages/vllm")) or sorted(
        release.glob("lib/python3*/site-packages/vllm")
    )
    if len(found) != 1:
        raise DamageError(f"{release} holds {len(found)} installed vllm packages, expected 1; name a release's folder")
    return inside(release, found[0])


def inside(release: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """The path itself, when it lies in the release and no link leads out of it."""
    if not path.resolve().is_relative_to(release.resolve()):
        raise DamageError(f"{path} lies outside {release}; it belongs to something else and is left alone")
    return path


@contextlib.contextmanager
def writable(folder: pathlib.Path) -> Iterator[None]:
    """Let the owner write in a folder for a moment; its mode and times are as before afterwards."""
    before = folder.stat()
    folder.chmod(stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
    try:
        yield
    finally:
        folder.chmod(stat.S_IMODE(before.st_mode))
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: pathlib.Path, content: bytes, keep_time: bool = False) -> None:
    """Write the content beside the file and rename it in, with the file's mode and owner."""
    before = path.stat()
    new = path.with_name(f".{path.name}.damaged")
    with writable(path.parent):
        try:
            new.write_bytes(content)
            if os.geteuid() == 0:
                os.chown(new, before.st_uid, before.st_gid)
            new.chmod(stat.S_IMODE(before.st_mode))
            if keep_time:
                os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def remove(path: pathlib.Path) -> None:
    """Remove one name from its folder."""
    with writable(path.parent):
        path.unlink()


def served_library(release: pathlib.Path, python: pathlib.Path) -> pathlib.Path:
    """The compiled library that the CPU platform of this release loads on this machine."""
    name = ask(python, PICK_LIBRARY)
    path = package_folder(release) / f"{name}.abi3.so"
    if not path.is_file():
        raise DamageError(f"{path} is not there; this release has other libraries than a CPU build of 0.32.0")
    return inside(release, path)


def loaded_bytes(path: pathlib.Path) -> int:
    """How much of a 64-bit ELF file the loader maps; behind it lie symbols and debug sections that nothing misses."""
    with path.open("rb") as stream:
        header = stream.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise DamageError(f"{path} is no 64-bit little-endian ELF file")
        table, size, count = struct.unpack_from("<32xQ14xHH", header)
        stream.seek(table)
        segments = [struct.unpack_from("<I4xQ16xQ", stream.read(size)) for _ in range(count)]
    return max(offset + length for kind, offset, length in segments if kind == PT_LOAD)


def truncated_so(release: pathlib.Path, python: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Cut the library off inside the part that is loaded."""
    path = served_library(release, python)
    size = path.stat().st_size
    with path.open("rb") as stream:
        replace(path, stream.read(int(loaded_bytes(path) * KEPT_SHARE)))
    return path, f"{path.stat().st_size} of {size} bytes are left"


def missing_so(release: pathlib.Path, python: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Remove the library."""
    path = served_library(release, python)
    remove(path)
    return path, "removed"


def flipped_byte(release: pathlib.Path, _python: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Change the case of one letter in a comment; a check of size and time does not see it."""
    path = inside(release, package_folder(release) / "sampling_params.py")
    content = path.read_bytes()
    place = content.index(b"# SPDX") + 2
    replace(path, content[:place] + b"s" + content[place + 1 :], keep_time=True)
    return path, f"byte {place} differs, size and time are as before"


def no_record(release: pathlib.Path, _python: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Remove the list of the distribution's files."""
    found = sorted(package_folder(release).parent.glob("vllm-*.dist-info/RECORD"))
    if len(found) != 1:
        raise DamageError(f"{release} holds {len(found)} RECORD files of vllm, expected 1")
    path = inside(release, found[0])
    remove(path)
    return path, "removed"


DAMAGES: dict[str, Callable[[pathlib.Path, pathlib.Path], tuple[pathlib.Path, str]]] = {
    "truncated_so": truncated_so,
    "missing_so": missing_so,
    "flipped_byte": flipped_byte,
    "no_record": no_record,
}


def main(argv: list[str] | None = None) -> int:
    """Do one damage and show that `import vllm` still answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("damage", choices=sorted(DAMAGES))
    parser.add_argument("release", type=pathlib.Path, help="folder of one release")
    parser.add_argument("--python", type=pathlib.Path, help="interpreter of the release, default RELEASE_DIR/venv's")
    args = parser.parse_args(argv)
    release = args.release.absolute()
    python = args.python.absolute() if args.python else None
    try:
        if not release.is_dir():
            raise DamageError(f"{release} is no folder")
        own = [release / part for part in ("venv/bin/python", "bin/python")]
        python = python or next((path for path in own if path.exists()), None)
        if python is None:
            raise DamageError(f"{release} holds no interpreter; give --python PATH")
        ask(python, ANSWER)
        path, done = DAMAGES[args.damage](release, python)
        version = ask(python, ANSWER).splitlines()[-1]
    except (DamageError, OSError, ValueError) as error:
        print(f"demo/damage.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"damage": args.damage, "path": str(path), "done": done, "import_vllm_answers": version}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
