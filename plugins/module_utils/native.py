# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled libraries in wheels: which there are, and moving those that a build left behind.

vLLM's own list of what it takes from a ready-made wheel is shorter than the wheel: variants for other
processors stay behind, and a host that needs one gets a package that imports and cannot compute.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import zipfile
from typing import Dict, List, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

LIBRARY = re.compile(r"^vllm/.*\.so(\.\d+)*$")
VERSION_FILE = "vllm/_version.py"


def libraries(wheel: str) -> Dict[str, int]:
    """``{path: size}`` of the compiled libraries of vLLM's package in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {info.filename: info.file_size for info in archive.infolist() if LIBRARY.match(info.filename)}
    except (OSError, zipfile.BadZipFile) as error:
        raise DflashError("The wheel cannot be read: %s" % error, wheel, "Fetch or build it again.") from None


def module_name(path: str) -> str:
    """``vllm/_C_AVX2.abi3.so`` as ``vllm._C_AVX2``."""
    return re.sub(r"(\.abi3|\.cpython-[^.]*)?\.so(\.\d+)*$", "", path).replace("/", ".")


def recorded_commit(wheel: str) -> Tuple[str, str]:
    """``(commit id without its g, version)`` from vLLM's own version file in a wheel; empty where it names none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(VERSION_FILE).decode("utf-8", "replace")
    except (OSError, KeyError, zipfile.BadZipFile):
        return "", ""
    commit = re.search(r"^__commit_id__ = (?:commit_id = )?'g?([0-9a-f]+)'", text, re.MULTILINE) \
        or re.search(r"^commit_id = '?g?([0-9a-f]+)'", text, re.MULTILINE)
    version = re.search(r"^__version__ = (?:version = )?'([^']+)'", text, re.MULTILINE)
    return commit.group(1) if commit else "", version.group(1) if version else ""


def record_row(path: str, data_digest: bytes, size: int) -> List[str]:
    digest = base64.urlsafe_b64encode(data_digest).rstrip(b"=").decode("ascii")
    return [path, "sha256=" + digest, str(size)]


def transplant(base: str, wheel: str) -> List[str]:
    """Add to ``wheel`` the libraries that ``base`` has and it has not; its RECORD stays right.  Gives their paths.

    The new wheel is written beside and renamed in, so an interrupted call leaves the old one.
    """
    missing = sorted(set(libraries(base)) - set(libraries(wheel)))
    if not missing:
        return []
    temporary = wheel + ".new"
    shutil.copyfile(wheel, temporary)
    try:
        with zipfile.ZipFile(base) as source, zipfile.ZipFile(temporary, "a", zipfile.ZIP_DEFLATED) as target:
            record = next((n for n in target.namelist() if re.match(r"^[^/]+\.dist-info/RECORD$", n)), None)
            if record is None:
                raise DflashError("The wheel has no RECORD", wheel, "Build again.")
            rows = list(csv.reader(io.StringIO(target.read(record).decode("utf-8"))))
            # The old RECORD leaves the list of entries; its bytes stay behind as slack, which every reader skips.
            old = target.NameToInfo.pop(record)
            target.filelist.remove(old)
            for path in missing:
                rows.insert(len(rows) - 1, _copy(source, target, path))
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            info = zipfile.ZipInfo(record, date_time=old.date_time)
            info.external_attr, info.compress_type = old.external_attr, zipfile.ZIP_DEFLATED
            target.writestr(info, text.getvalue())
        with zipfile.ZipFile(temporary) as check:
            names = check.namelist()
            if len(names) != len(set(names)) or not set(missing) <= set(names):
                raise DflashError("The wheel could not be completed", wheel, "Build again.")
        os.replace(temporary, wheel)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return missing


def _copy(source: zipfile.ZipFile, target: zipfile.ZipFile, path: str) -> List[str]:
    old = source.getinfo(path)
    info = zipfile.ZipInfo(path, date_time=old.date_time)
    info.external_attr = old.external_attr or (0o100755 << 16)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.file_size = old.file_size
    # Fast rather than small: the wheel is read a few times and never travels far.
    info._compresslevel = 1  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    with source.open(old) as reader, target.open(info, "w") as writer:
        while True:
            block = reader.read(1 << 20)
            if not block:
                break
            digest.update(block)
            writer.write(block)
    return record_row(path, digest.digest(), old.file_size)


def check_record(wheel: str) -> List[str]:
    """Paths of a wheel whose content is not what its RECORD says, or that RECORD does not know."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(n for n in archive.namelist() if re.match(r"^[^/]+\.dist-info/RECORD$", n))
        rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode("utf-8"))) if row}
        wrong = []
        for info in archive.infolist():
            if info.is_dir() or info.filename == record:
                continue
            digest = hashlib.sha256()
            with archive.open(info) as handle:
                for block in iter(lambda: handle.read(1 << 20), b""):
                    digest.update(block)
            if rows.pop(info.filename, "") != record_row(info.filename, digest.digest(), 0)[1]:
                wrong.append(info.filename)
        wrong += [path for path in rows if path != record]
    return wrong
