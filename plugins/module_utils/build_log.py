# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a build log: the first line that says why, one sentence that says what to do, and progress."""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Tuple

#: What a failure is known by, most telling first, and what mends it.
CAUSES: List[Tuple[str, str]] = [
    (r"No space left on device|Disk quota exceeded|OSError: \[Errno 28\]",
     "The disk is full: free space under dflash_root and run again; what is done is kept."),
    (r"(?i)\bKilled\b.*(signal|process)|out of memory|cannot allocate memory|virtual memory exhausted|"
     r"Killed signal terminated program|fatal error: Killed",
     "Memory ran out: free memory, or set MAX_JOBS lower."),
    (r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable|"
     r"Connection refused|NewConnectionError|Connection timed out|Read timed out|ConnectTimeoutError|"
     r"Failed to establish a new connection|ProxyError",
     "The network cannot be reached: check it, dflash_proxy and dflash_ca_bundle, and run again."),
    (r"CERTIFICATE_VERIFY_FAILED|SSLError|certificate verify failed|server certificate verification failed",
     "A server's certificate is not trusted: name your certificate authority in dflash_ca_bundle."),
    (r"No module named '?(venv|ensurepip)'?|ensurepip is not available",
     "This Python cannot make virtual environments: install the distribution's python3-venv package."),
    (r"Python\.h: No such file|fatal error: Python\.h",
     "The Python headers are missing: install the distribution's python3-dev package."),
    (r"No matching distribution found for (\S+)|Could not find a version that satisfies the requirement (\S+)",
     "The package index that pip is configured with does not have it, or does not answer: add the index that has it "
     "to vllm_release_extra_index_urls, or leave the package out with vllm_release_exclude."),
    (r"ResolutionImpossible|conflicting dependencies",
     "The requirements contradict each other: check pip's constraints on this host."),
    (r"THESE PACKAGES DO NOT MATCH THE HASHES",
     "A package is not the one that was locked: somebody changed the index; do not go on before you know why."),
    (r"unsupported GNU version|nvcc fatal|CUDA_HOME|No CUDA toolset found|Could not find nvcc",
     "The CUDA toolkit and the compiler do not fit: check vllm_toolchain_cuda."),
    (r"Permission denied", "An account may not write there: check owner and mode under dflash_root."),
]
#: Lines that look like the reason, in the order in which tools print them.
REASON = re.compile(
    r"^(\s*)(ERROR:|error:|fatal:|FAILED:|CMake Error|nvcc fatal|E: )|: (fatal )?error:|"
    r"^\s*([A-Za-z_.]*(Error|Exception|Impossible)): |^\s*\S+: command not found|undefined reference|No rule to make"
)
#: Lines that look like errors in builds that go well.
NOISE = re.compile(
    r"error: can't find Rust compiler|error: command '(cargo|rustc)'|Rust (compiler|frontend|toolchain)|"
    r"^\s*(error|ERROR): subprocess-exited-with-error|Failed building wheel|metadata-generation-failed|"
    r"build_rust|ignored error|WARNING|CalledProcessError|Failed to build|^ERROR: Exception:$"
)
#: A missing package is only a consequence where the index did not answer.
NO_ANSWER = re.compile(r"^.*(connection broken by|Could not fetch URL).*$", re.MULTILINE)
NINJA = re.compile(r"^\[(\d+)/(\d+)\]", re.MULTILINE)
LIMIT = 4 << 20


def first_reason(text: str) -> str:
    """The first line that says why a step failed; the last line where none does."""
    fallback = ""
    broken = NO_ANSWER.search(text)
    if broken and "(from versions: none)" in text:
        return broken.group(0).strip()[:300]
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith(("$ ", "-- ", "== ")):
            continue
        if not NOISE.search(line):
            if REASON.search(line) or any(re.search(pattern, line) for pattern, _hint in CAUSES):
                return re.sub(r" \(from versions: .{80,}", " (from versions: many others)", line)[:300]
            fallback = line
    return fallback[:300]


def hint_for(line: str, text: str = "") -> str:
    """What mends it, by the line that says why, else by any line of the step."""
    for place in (line, text):
        for pattern, hint in CAUSES:
            if re.search(pattern, place):
                return hint
    return "Read the log from this line on; run again after the change, finished steps are kept."


def read_from(path: str, offset: int) -> str:
    """The log from a byte on; of a very long one the beginning and the end."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as handle:
            handle.seek(offset)
            data = handle.read(LIMIT)
            if size - offset > 2 * LIMIT:
                handle.seek(size - LIMIT)
                data += b"\n" + handle.read(LIMIT)
            else:
                data += handle.read(LIMIT)
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


def compile_share(path: str, offset: int) -> Optional[float]:
    """How much of the compilation is done, from the last ``[12/385]`` in the log; None where there is none."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(offset, os.path.getsize(path) - (1 << 16)))
            found = NINJA.findall(handle.read().decode("utf-8", "replace"))
    except OSError:
        return None
    return int(found[-1][0]) / max(1, int(found[-1][1])) if found else None


def progress(steps: List[str], step: str, spent: float, expected: Dict[str, float],
             share: Optional[float]) -> Tuple[int, Optional[int]]:
    """``(percent, seconds left)`` by how long each step took last time; never 100 before the end."""
    total = sum(expected.get(name, 1.0) for name in steps) or 1.0
    before = sum(expected.get(name, 1.0) for name in steps[:steps.index(step)]) if step in steps else 0.0
    mine = expected.get(step, 1.0)
    part = share if share is not None else min(0.95, spent / mine if mine else 0.95)
    left_here = spent / share - spent if share else max(0.0, mine - spent)
    after = total - before - mine
    return min(99, int(100 * (before + mine * part) / total)), round(left_here + after)
