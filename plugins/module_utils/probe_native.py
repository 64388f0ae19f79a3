# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Load compiled extensions, each in a process of its own: program of a child process, on top of ``probe_code.py``.

The child imports torch once and forks per extension, because two variants of one extension abort a
process and a truncated library kills it without a word.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import LOG, Loose, Source

#: What vLLM's extensions of 0.20.1 take from the driver's library; a stub that defines them lets all of them load.
DRIVER_SYMBOLS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
DRIVER = "libcuda.so.1"
NO_DRIVER = DRIVER + ": cannot open"
COMPILERS = ("/usr/bin/gcc", "/usr/bin/cc", "/usr/local/bin/gcc")

#: What Python says of a library that registers operators only; vLLM itself goes on after it.
NO_EXPORT = "dynamic module does not define module export function"


def main(payload: Dict[str, Any]) -> Dict[str, Any]:
    """``{torch, cuda, variant, results: [{module, ok, error, signal, hung, ops, namespaces, seconds}]}``.

    ``payload``: ``extensions`` = ``[{module, path}]``, ``deadline`` per extension in seconds,
    ``platform_source`` = text of ``vllm/platforms/cpu.py`` (or empty), ``torch`` = import torch first.
    """
    report: Dict[str, Any] = {"torch": None, "cuda": None, "torch_error": "", "variant": None, "results": []}
    try:
        torch = importlib.import_module("torch")
        report["torch"] = str(torch.__version__)
        report["cuda"] = torch.version.cuda
    except BaseException as error:  # a damaged torch may raise anything
        report["torch_error"] = ("%s: %s" % (type(error).__name__, error))[:500]
        return report
    if payload.get("platform_source"):
        report["variant"] = variant(payload["platform_source"], torch)
    names = sorted(set(DRIVER_SYMBOLS) | set(payload.get("driver_symbols") or []))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        stub: Optional[str] = None
        patience = payload["deadline"]
        for item in payload["extensions"]:
            done = in_own_process(torch, item["module"], item["path"], patience)
            if NO_DRIVER in done["error"]:
                stub = driver_stub(folder, names) if stub is None else stub
                if stub:
                    done = in_own_process(torch, item["module"], item["path"], patience, stub)
                    done["stub"] = "a stub of %s with %d symbols" % (DRIVER, len(names))
            if done["hung"]:
                patience = max(1.0, patience / 4)  # what hangs one hangs the next: a driver, most often
            report["results"].append(dict(done, **item))
    return report


def driver_stub(folder: str, names: List[str]) -> str:
    """Compile a library that defines the driver's symbols and does nothing; an empty text where it cannot be.

    Loaded first, it answers for ``libcuda.so.1`` by its soname.  No function of it is ever called by an import
    that counts operators; each returns "no device" (100).
    """
    compiler = next((path for path in COMPILERS if os.access(path, os.X_OK)), None)
    if compiler is None:
        return ""
    source, library = os.path.join(folder, "stub.c"), os.path.join(folder, DRIVER)
    try:
        with open(source, "w", encoding="utf-8") as handle:
            handle.writelines("int %s(void) { return 100; }\n" % name for name in names)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-w", "-Wl,-soname," + DRIVER, "-o", library, source],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return library


def variant(text: str, torch: Any) -> Optional[str]:
    """The extension that this tree's CPU platform imports on this processor, by running its own choice."""
    known = {
        "torch": torch,
        "CpuArchEnum": Loose(X86="x86", ARM="arm"),
        "Platform": Loose(get_cpu_architecture=lambda: "x86"),
    }
    try:
        space = Source(text, "platforms/cpu.py", known).load(["CpuPlatform"], only={"CpuPlatform": {"import_kernels"}})
        LOG.clear()
        space["CpuPlatform"].import_kernels()
    except Exception:  # another tree decides in another way: the caller has a rule of its own
        return None
    wanted = [args[0] for kind, args, _kwargs in LOG if kind == "import" and args[0].startswith("vllm._C")]
    return wanted[0] if wanted else None


def in_own_process(torch: Any, module: str, path: str, deadline: float, first: str = "") -> Dict[str, Any]:
    """Fork, load one extension, and tell what became of it."""
    reader, writer = os.pipe()
    started = time.time()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            if first:
                ctypes.CDLL(first, mode=ctypes.RTLD_GLOBAL)
            os.write(writer, json.dumps(load(torch, module, path)).encode("utf-8"))
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    while True:
        ready, _w, _x = select.select([reader], [], [], max(0.0, deadline - (time.time() - started)))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        block = os.read(reader, 65536)
        if not block:
            break
        text += block
    os.close(reader)
    _pid, status = os.waitpid(child, 0)
    result: Dict[str, Any] = {"ok": False, "error": "", "signal": 0, "ops": 0, "namespaces": {}, "hung": False}
    if text:
        result.update(json.loads(text.decode("utf-8")))
    elif time.time() - started >= deadline:
        result["error"] = "no answer within %d s" % deadline
        result["hung"] = True
    else:
        result["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        result["error"] = "the process ended without an answer"
    result["seconds"] = round(time.time() - started, 2)
    return result


def load(torch: Any, module: str, path: str) -> Dict[str, Any]:
    """Import a library from its file under its module's name; count the operators that it registers."""
    before = set(torch._C._dispatch_get_all_op_names())
    error = ""
    try:
        loader = importlib.machinery.ExtensionFileLoader(module, path)
        spec = importlib.util.spec_from_file_location(module, path, loader=loader)
        if spec is None:
            raise ImportError("no loader for %s" % path)
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        loader.exec_module(found)
    except ImportError as problem:
        error = str(problem)
    if NO_EXPORT in error:
        try:
            torch.ops.load_library(path)
        except OSError as problem:
            error = str(problem)
    new = set(torch._C._dispatch_get_all_op_names()) - before
    spaces: Dict[str, int] = {}
    for name in new:
        space = name.split("::", 1)[0]
        spaces[space] = spaces.get(space, 0) + 1
    if NO_EXPORT in error and not new:
        error = "it registers no operator"
    ok = not error or NO_EXPORT in error
    return {
        "ok": ok,
        "error": "" if ok else error[:500],
        "ops": len(new),
        "namespaces": spaces,
        "exports_module": not error,
    }
