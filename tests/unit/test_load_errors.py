# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Why an extension does not load: each message that was seen, and real libraries that fail in each way."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    child,
    extensions,
    load_errors,
    loading,
    probe_code,
    probe_native,
)

MESSAGES = [
    # As they were seen, word for word.
    ("libcuda.so.1: cannot open shared object file: No such file or directory", "driver_missing", "NVIDIA driver"),
    ("libtorch_cuda.so: cannot open shared object file: No such file or directory", "torch_is_cpu", "CUDA torch"),
    ("libc10.so: cannot open shared object file: No such file or directory", "torch_not_loaded", "torch"),
    ("libnvrtc.so.13: cannot open shared object file: No such file or directory", "toolkit_missing", "libnvrtc.so.13"),
    (
        "libcudart.so.13: cannot open shared object file: No such file or directory",
        "toolkit_missing",
        "libcudart.so.13",
    ),
    (
        "libcublas.so.13: cannot open shared object file: No such file or directory",
        "toolkit_missing",
        "libcublas.so.13",
    ),
    ("libnuma.so.1: cannot open shared object file: No such file or directory", "library_missing", "libnuma.so.1"),
    (
        "/x/_C_AVX2.abi3.so: undefined symbol: _ZNR5torch7Library4_defEON3c106eitherINS1_12OperatorName",
        "torch_mismatch",
        "_ZNR5torch7Library4_def",
    ),
    ("No module named 'vllm._C'", "absent", "partial"),
    ("the file is missing", "absent", "partial"),
    ("/x/_C.abi3.so: file too short", "truncated", "damaged"),
    ("/x/_C.abi3.so: invalid ELF header", "truncated", "damaged"),
    ("_C.abi3.so: killed by SIGBUS (a mapped file is shorter than it says: truncated library)", "truncated", "shorter"),
    ("_C.abi3.so: killed by SIGILL (built for another processor)", "other_processor", "processor"),
    ("_C.abi3.so: killed by SIGKILL (killed, perhaps for memory)", "killed", "memory"),
    ("_C.abi3.so: killed by SIGSEGV", "crash", "crashes"),
    ("_C.abi3.so: no answer within 60 s", "hang", "driver that hangs"),
    (
        "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /x/_C.abi3.so)",
        "system_old",
        "GLIBC 2.38",
    ),
    ("version `GLIBCXX_3.4.32' not found (required by /x/_C.abi3.so)", "system_old", "GLIBCXX 3.4.32"),
    ("/x/_C.abi3.so: wrong ELF class: ELFCLASS32", "other_machine", "another machine"),
    ("/x/_C.abi3.so: failed to map segment from shared object", "not_executable", "noexec"),
    (
        "/x/_C.abi3.so: cannot enable executable stack as shared object requires: Invalid argument",
        "executable_stack",
        "noexecstack",
    ),
    ("libgomp.so.1: cannot allocate memory in static TLS block", "static_tls", "LD_PRELOAD"),
    ("CUDA driver version is insufficient for CUDA runtime version", "driver_old", "580"),
    ("Only a single TORCH_LIBRARY can be used to register the namespace _C", "registered_twice", "Two copies"),
    ("_C_AVX2.abi3.so: it registers no operator", "no_operators", "offers nothing"),
    ("something that nobody has seen", "other", "evidence"),
]


@pytest.mark.parametrize("message, word, remedy", MESSAGES, ids=[item[0][:50] for item in MESSAGES])
def test_each_known_message_has_its_cause_and_remedy(message: str, word: str, remedy: str) -> None:
    cause = load_errors.classify(message)
    assert cause.word == word
    assert remedy in cause.remedy
    assert "{" not in cause.remedy and cause.remedy.endswith(".")


def test_every_cause_has_a_message() -> None:
    assert {word for _pattern, word, _remedy in load_errors.KNOWN} == {item[1] for item in MESSAGES} - {"other"}


# --------------------------------------------------------------------------------- real libraries, a pretended torch

TORCH = """
class version:
    cuda = "13.0"
__version__ = "2.11.0+cu130"
_names = ["aten::add"]
class _C:
    @staticmethod
    def _dispatch_get_all_op_names():
        return list(_names)
class ops:
    @staticmethod
    def load_library(path):
        import ctypes
        count = ctypes.CDLL(path).operators()
        _names.extend("_C::%s%d" % (path, number) for number in range(count))
"""
GCC = shutil.which("gcc")
needs_gcc = pytest.mark.skipif(not GCC, reason="libraries are compiled as the tests run")


@pytest.fixture(scope="module")
def lab() -> Iterator[Path]:
    """A folder that the probes' account can read, with a venv-like interpreter and the libraries."""
    root = Path(tempfile.mkdtemp(prefix="dflash-load-", dir="/var/tmp"))
    os.chmod(root, 0o755)
    python = child.any_python(None)
    version = subprocess.run(
        [python, "-I", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    site = root / "lib" / version / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text(TORCH)
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(python)
    (root / "pyvenv.cfg").write_text("home = %s\n" % os.path.dirname(os.path.realpath(python)))
    yield root
    shutil.rmtree(root)


def library(lab: Path, name: str, code: str, *flags: str) -> str:
    """Compile a library that registers operators the way the pretended torch asks for them."""
    source, path = lab / (name + ".c"), lab / (name + ".abi3.so")
    source.write_text(code)
    subprocess.run([str(GCC), "-shared", "-fPIC", "-w", "-o", str(path), str(source), *flags], check=True)
    return str(path)


def empty_library(lab: Path, soname: str, code: str = "") -> str:
    """A library to link with, that is not where the loader looks."""
    folder = lab / "link"
    folder.mkdir(exist_ok=True)
    (folder / "x.c").write_text(code)
    subprocess.run(
        [str(GCC), "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(folder / "x.c")],
        check=True,
    )
    return str(folder / soname)


def examine(lab: Path, path: str, device: str = "cuda", deadline: float = 30.0) -> dict[str, Any]:
    wanted = [extensions.Expected("vllm._C", True)]
    found = loading.examine(
        str(lab / "bin" / "python"),
        str(lab),
        {"vllm._C": path} if path else {},
        wanted,
        device,
        user=None,
        deadline=deadline,
        level="required",
    )
    assert [item["id"] for item in found] == ["ext.import:vllm._C"]
    return found[0]


OPERATORS = "int operators(void) { return %d; }\n"


@needs_gcc
def test_operators_are_counted_over_a_stub_of_the_driver(lab: Path) -> None:
    """A right CUDA extension on a host without driver: it takes functions and needs the driver's library."""
    driver = empty_library(lab, "libcuda.so.1", "int cuMemCreate(void){return 0;}\nint cuNewThing(void){return 0;}\n")
    path = library(
        lab,
        "right",
        OPERATORS % 95 + "int cuMemCreate(void); int cuNewThing(void);\nvoid *table[] = {cuMemCreate, cuNewThing};\n",
        "-Wl,--no-as-needed",
        driver,
    )
    found = examine(lab, path)
    assert (found["status"], found["level"]) == ("pass", "required")
    assert found["actual"] == "imports over a stub of the driver's library, 95 operators"
    assert found["evidence"]["operators"] == 95
    assert found["evidence"]["namespaces"] == {"_C": 95}
    assert found["evidence"]["driver"].startswith("a stub of libcuda.so.1 with 17 symbols")  # 16 and one of its own


@needs_gcc
def test_without_a_compiler_it_cannot_be_known(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = empty_library(lab, "libcuda.so.1", "int cuMemCreate(void){return 0;}\n")
    path = library(
        lab,
        "nocc",
        OPERATORS % 1 + "int cuMemCreate(void);\nvoid *t[] = {cuMemCreate};\n",
        "-Wl,--no-as-needed",
        driver,
    )
    source = child.source_of
    monkeypatch.setattr(
        child, "source_of", lambda module: source(module).replace('"/usr/bin/gcc", "/usr/bin/cc", ', "")
    )
    if os.path.exists("/usr/local/bin/gcc"):
        pytest.skip("a compiler stands at a third place")
    found = examine(lab, path)
    assert (found["status"], found["level"]) == ("unknown", "advisory")
    assert found["evidence"]["cause"] == "driver_missing"
    assert found["hint"] == load_errors.classify("libcuda.so.1: cannot open").remedy


@needs_gcc
def test_a_library_that_is_wrong_in_more_than_the_driver_fails_over_the_stub(lab: Path) -> None:
    driver = empty_library(lab, "libcuda.so.1", "int cuMemCreate(void){return 0;}\n")
    path = library(
        lab,
        "both",
        OPERATORS % 1 + "int cuMemCreate(void); int _ZNR5torch7Library4_def(void);\n"
        "void *t[] = {cuMemCreate, _ZNR5torch7Library4_def};\n",
        "-Wl,--no-as-needed",
        driver,
    )
    found = examine(lab, path)
    assert (found["status"], found["level"], found["evidence"]["cause"]) == ("fail", "required", "torch_mismatch")
    assert "_ZNR5torch7Library4_def" in found["hint"]


@needs_gcc
@pytest.mark.parametrize(
    "name, code, soname, cause, said",
    [
        ("toolkit", OPERATORS % 1, "libnvrtc.so.99", "toolkit_missing", "libnvrtc.so.99"),
        ("cputorch", OPERATORS % 1, "libtorch_cuda.so", "torch_is_cpu", "libtorch_cuda.so"),
        ("numa", OPERATORS % 1, "libnotthere.so.1", "library_missing", "libnotthere.so.1"),
        ("symbol", "int gone(void);\nvoid *t[] = {gone};\n" + OPERATORS % 1, "", "torch_mismatch", "gone"),
        (
            "crash",
            "__attribute__((constructor)) void f(void){*(volatile int*)0=1;}\n" + OPERATORS % 1,
            "",
            "crash",
            "SIGSEGV",
        ),
        (
            "illegal",
            "__attribute__((constructor)) void f(void){__builtin_trap();}\n" + OPERATORS % 1,
            "",
            "other_processor",
            "SIGILL",
        ),
        (
            "hang",
            "unsigned sleep(unsigned);\n__attribute__((constructor)) void f(void){for(;;)sleep(9);}\n" + OPERATORS % 1,
            "",
            "hang",
            "no answer within 2 s",
        ),
    ],
)
def test_each_real_failure_is_named_with_its_remedy(
    lab: Path, name: str, code: str, soname: str, cause: str, said: str
) -> None:
    flags = ["-Wl,--no-as-needed", empty_library(lab, soname)] if soname else []
    path = library(lab, name, code, *flags)
    found = examine(lab, path, deadline=2.0 if name == "hang" else 30.0)
    assert (found["status"], found["evidence"]["cause"]) == ("fail", cause)
    assert said in found["actual"]
    assert found["actual"].startswith(name + ".abi3.so: ")
    assert found["hint"] == load_errors.classify(found["actual"]).remedy


@needs_gcc
@pytest.mark.parametrize("keep, cause", [(0, "truncated"), (40, "truncated"), (6000, "truncated")])
def test_a_library_that_ends_early(lab: Path, keep: int, cause: str) -> None:
    path = library(lab, "cut%d" % keep, OPERATORS % 1)
    os.truncate(path, keep)
    found = examine(lab, path)
    assert (found["status"], found["evidence"]["cause"]) == ("fail", cause), found["actual"]
    assert "cut%d.abi3.so" % keep in found["actual"]


def test_a_file_that_is_not_there(lab: Path) -> None:
    found = examine(lab, "")
    assert (found["status"], found["actual"], found["evidence"]["cause"]) == ("fail", "the file is missing", "absent")


@needs_gcc
def test_a_symbol_that_only_the_driver_has_says_nothing(lab: Path) -> None:
    """The stub defines what the files name; what a library asks for as it runs, only a driver knows."""
    result = {
        "ok": False,
        "error": "/x/a.so: undefined symbol: cuNeverSeen",
        "ops": 0,
        "signal": 0,
        "namespaces": {},
        "seconds": 0.1,
        "stub": "a stub",
    }
    assert loading._import("vllm._C", None, "/x/a.so", result, {}, "required")["status"] == "unknown"
    del result["stub"]
    assert loading._import("vllm._C", None, "/x/a.so", result, {}, "required")["status"] == "fail"


def test_the_sixteen_symbols() -> None:
    assert len(set(probe_native.DRIVER_SYMBOLS)) == 16
    assert probe_code.__name__  # the child gets both, in this order
