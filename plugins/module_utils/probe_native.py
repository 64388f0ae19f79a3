# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Load compiled extensions, each in a process of its own: program of a child process, on top of ``probe_code.py``.

The child imports torch once and forks per extension, because two variants of one extension abort a
process and a truncated library kills it without a word.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
from typing import Any, Dict, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.probe_code import LOG, Loose, Source

#: What Python says of a library that registers operators only; vLLM itself goes on after it.
NO_EXPORT = "dynamic module does not define module export function"


def main(payload: Dict[str, Any]) -> Dict[str, Any]:
    """``{torch, cuda, variant, results: [{module, ok, error, signal, ops, namespaces, seconds}]}``.

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
    for item in payload["extensions"]:
        report["results"].append(dict(in_own_process(torch, item["module"], item["path"], payload["deadline"]), **item))
    return report


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


def in_own_process(torch: Any, module: str, path: str, deadline: float) -> Dict[str, Any]:
    """Fork, load one extension, and tell what became of it."""
    reader, writer = os.pipe()
    started = time.time()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
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
    result: Dict[str, Any] = {"ok": False, "error": "", "signal": 0, "ops": 0, "namespaces": {}}
    if text:
        result.update(json.loads(text.decode("utf-8")))
    elif time.time() - started >= deadline:
        result["error"] = "no answer within %d s" % deadline
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
    ok = not error or (NO_EXPORT in error and bool(new))
    return {
        "ok": ok,
        "error": "" if ok else error[:500],
        "ops": len(new),
        "namespaces": spaces,
        "exports_module": not error,
    }
