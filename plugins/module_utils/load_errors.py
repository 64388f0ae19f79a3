# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the loader's messages mean: one cause and one remedy for each that is known.  Data and one function."""

from __future__ import annotations

import re
from typing import List, NamedTuple, Tuple


class Cause(NamedTuple):
    """Why an extension did not load: a word for tests and reports, and what mends it."""

    word: str
    remedy: str


#: (pattern, word, remedy), first match wins; groups of the pattern fill the remedy.
KNOWN: List[Tuple[str, str, str]] = [
    (
        r"libcuda\.so\.1: cannot open",
        "driver_missing",
        "This host has no NVIDIA driver; the file checks stand for the import until it has one.",
    ),
    (
        r"driver version is insufficient|CUDA driver version",
        "driver_old",
        "The driver is older than the toolkit of the build: install a driver of branch 580 or newer.",
    ),
    (
        r"(libtorch_cuda\S*|libc10_cuda\S*): cannot open",
        "torch_is_cpu",
        "The extension is built for CUDA and the torch beside it is not: install the CUDA torch it was built with.",
    ),
    (
        r"libc10\.so: cannot open|libtorch(_cpu|_python)?\.so: cannot open",
        "torch_not_loaded",
        "torch's own libraries were not found: torch is damaged or not installed in this environment.",
    ),
    (
        r"lib(cudart|nvrtc|cublas|cublasLt|cusparse|cusolver|curand|nvJitLink)\.so\.(\d+)\S*: cannot open",
        "toolkit_missing",
        "The CUDA library lib{0}.so.{1} is not here: install the torch (or toolkit) of the CUDA that the build names.",
    ),
    (
        r"version `(GLIBC|GLIBCXX|CXXABI)_([\d.]+)' not found",
        "system_old",
        "The build was made on a newer system ({0} {1}): build on this one, or update it.",
    ),
    (
        r"undefined symbol: (\S+)",
        "torch_mismatch",
        "Built against another torch: the symbol {0} is not in this one. "
        "Install the torch of the build, or build again.",
    ),
    (
        r"No module named '?([\w.]+)'?|the file is missing",
        "absent",
        "The file is not there: the build is partial. Build again and read the first error in the build log.",
    ),
    (
        r"registers no operator",
        "no_operators",
        "The library loads and offers nothing: it is an empty or foreign build. Build again.",
    ),
    (
        r"file too short|invalid ELF header|ELF load command|ELF file's phentsize|cannot read file data|"
        r"object file has no|section header",
        "truncated",
        "The library is damaged: run the deployment again, or reinstall the wheel.",
    ),
    (
        r"wrong ELF class|cannot open shared object file: Exec format|ELF file OS ABI|ELF file version",
        "other_machine",
        "The library is for another machine: build for this one.",
    ),
    (
        r"failed to map segment from shared object",
        "not_executable",
        "The folder lies on a mount with noexec, or memory is short: choose another dflash_root.",
    ),
    (
        r"cannot enable executable stack",
        "executable_stack",
        "This system forbids executable stacks: build again with a linker flag -z noexecstack.",
    ),
    (
        r"cannot allocate memory in static TLS block",
        "static_tls",
        "Another library took the thread-local space first: start without LD_PRELOAD.",
    ),
    (
        r"(lib\S+?\.so[\d.]*): cannot open",
        "library_missing",
        "The library {0} is not on this host: install the system package that brings it.",
    ),
    (
        r"killed by SIGBUS",
        "truncated",
        "A mapped file is shorter than it says: run the deployment again, or reinstall the wheel.",
    ),
    (
        r"killed by SIGILL",
        "other_processor",
        "Built for a processor with other instructions than this one: build on this host's kind.",
    ),
    (
        r"killed by SIGKILL",
        "killed",
        "Something killed the process, most often the kernel for want of memory: look in its log.",
    ),
    (
        r"killed by SIG(SEGV|ABRT|FPE)",
        "crash",
        "The library crashes as it loads: it is damaged or was built against another torch. Build again.",
    ),
    (
        r"no answer within",
        "hang",
        "Loading never ended: a driver that hangs, or a deadlock at load; try nvidia-smi, then build again.",
    ),
    (
        r"already registered|multiple registrations|duplicate registration|"
        r"Tried to register an operator|Only a single TORCH_LIBRARY",
        "registered_twice",
        "Two copies of the same operators meet: two vllm packages are on the path, or two variants in one process.",
    ),
]
UNKNOWN = Cause("other", "Read the evidence: the message is none that is known.")


def classify(message: str) -> Cause:
    """The cause that a message names."""
    for pattern, word, remedy in KNOWN:
        match = re.search(pattern, message)
        if match:
            return Cause(word, remedy.format(*[group or "" for group in match.groups()]))
    return UNKNOWN
