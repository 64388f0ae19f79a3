# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Find the files of a vLLM tree that a capability probe reads: where releases have them, else where they moved to."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import probe_extra

#: Keys of a place that name a file.
FILE_KEYS = (
    "file",
    "config_file",
    "manager_file",
    "owner_file",
    "registry",
    "own_file",
    "choice_file",
    "speculator_file",
)
#: No file of vLLM that a probe reads is as large.
TOO_LARGE = 4 * 1024 * 1024


class Tree:
    """The ``vllm`` folder of a tree; each text is read once."""

    def __init__(self, package: str) -> None:
        self.package = package
        self._texts: Dict[str, Optional[str]] = {}

    def text(self, path: str) -> Optional[str]:
        """A file's text, or None where it is absent or no text."""
        if path not in self._texts:
            full = os.path.join(self.package, path)
            try:
                with open(full, encoding="utf-8") as handle:
                    self._texts[path] = handle.read(TOO_LARGE)
            except (OSError, UnicodeDecodeError):
                self._texts[path] = None
        return self._texts[path]

    def python_files(self, folder: str) -> Iterator[str]:
        """Python files below a folder, in order."""
        top = os.path.join(self.package, folder)
        for base, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    yield os.path.relpath(os.path.join(base, name), self.package)

    def names(self, folder: str, word: str) -> bool:
        """Does a file of the folder, by its name or its text, name ``word`` (in lower case)?"""
        return any(
            word in path.lower() or word in (self.text(path) or "").lower() for path in self.python_files(folder)
        )

    def places(self, place: Mapping[str, Any]) -> List[Dict[str, Any]]:
        """The place as it is in this tree: its file, or those that do its work where that is gone."""
        if "architecture" in place:
            return [self._registered(place)]
        sink = place.get("sink")
        text = self.text(place["file"])
        if not sink or "area" not in place:
            return [dict(place)]
        found = [
            path
            for path in self.python_files(place["area"])
            if sink in (self.text(path) or "")
            and not (place.get("beside") and path.startswith(place["beside"] + os.sep))
        ]
        if text is not None and sink in text:
            calls = [path for path in found if "." + sink + "(" in (self.text(path) or "")]
            return [dict(place, also=[path for path in calls if path != place["file"]])]
        return [dict(place, file=path) for path in found] or [dict(place)]

    def _registered(self, place: Mapping[str, Any]) -> Dict[str, Any]:
        """The model's file as the registry of the tree names it."""
        try:
            entry = probe_extra.registry_entry(self.text(place["registry"]) or "", place["architecture"])
        except SyntaxError:
            entry = None
        if entry:
            module = entry[0]
            if "." not in module:
                module = "model_executor.models." + module
            elif module.startswith("vllm."):
                module = module[len("vllm.") :]
            path = module.replace(".", "/")
            for candidate in (path + ".py", path + "/__init__.py"):
                if self.text(candidate) is not None:
                    return dict(place, file=candidate)
        return dict(place)

    def texts(self, cases: List[Dict[str, Any]], more: Any = ()) -> Dict[str, str]:
        """Texts of the files that the cases name.  The child gets them: it may not be able to read the folder."""
        paths: Dict[str, None] = dict.fromkeys(more)
        for case in cases:
            paths.update(dict.fromkeys(case.get(key, {}).get("file") for key in ("translator", "guard")))
            for place in case["places"]:
                paths.update(dict.fromkeys(place.get(key) for key in FILE_KEYS))
                paths.update(dict.fromkeys(place.get("helpers", [])))
                paths.update(dict.fromkeys(place.get(key, {}).get("file") for key in ("v1", "v2")))
        return {path: text for path in paths if path for text in [self.text(path)] if text is not None}
