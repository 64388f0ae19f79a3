# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the truth table: a tree, a check, what is expected and what the probes say."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mutants
import shapes
import trees
import unseen

from ansible_collections.dflash.fleet.plugins.module_utils import capabilities, child

#: A drafter of the second generation: its check is asked only for one.
SECOND = {
    "architectures": [capabilities.DFLASH2],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 1},
}


class Row(NamedTuple):
    """One check of one tree."""

    tree: str
    check: str
    expected: str
    said: str
    why: str

    @property
    def verdict(self) -> str:
        """What kind of answer this is."""
        if self.said == self.expected:
            return "right"
        if self.said == "unknown":
            return "unknown"
        if self.said == "pass" or (self.said == "skip" and self.expected == "fail"):
            return "false pass"
        return "false alarm" if self.expected in ("pass", "skip") else "other"


def statuses(package: Path) -> dict[str, str]:
    """What the probes say of a tree: all checks for the drafter that stands for all, then the second generation's."""
    python = child.any_python(None)
    second = capabilities.read_drafter(SECOND)
    found = capabilities.examine(str(package), python, None, set())
    only = {"capability.dflash2_files"}
    found += capabilities.examine(str(package), python, second, set(), only=only)
    return {item["id"].replace("capability.", ""): item["status"] for item in found}


def _release(version: str) -> list[Row]:
    said = statuses(trees.tree(version) / "vllm")
    return [
        Row(version, name, step["status"], said.get(name, "absent"), step["why"])
        for name, step in trees.expected(version).items()
    ]


def _mutant(mutant: mutants.Mutant) -> list[Row]:
    expected = {name: step["status"] for name, step in trees.expected(mutant.release).items()}
    expected.update(mutant.differs)
    with tempfile.TemporaryDirectory(prefix="dflash-mutant-") as folder:
        package = Path(folder) / "vllm"
        shutil.copytree(trees.tree(mutant.release) / "vllm", package)
        for path, replacements in mutant.changes.items():
            file = package / path
            text = file.read_text(encoding="utf-8")
            for old, new in replacements:
                if old not in text:
                    raise AssertionError("%r is no longer in %s of %s" % (old, path, mutant.release))
                text = text.replace(old, new) if old else text + new
            file.write_text(text, encoding="utf-8")
        for path, target in mutant.moves.items():
            if target:
                (package / target).parent.mkdir(parents=True, exist_ok=True)
                (package / path).rename(package / target)
            else:
                (package / path).unlink()
        said = statuses(package)
    name = "%s: %s" % (mutant.release, mutant.name)
    return [Row(name, check, expected[check], said.get(check, "absent"), mutant.kind) for check in expected]


def _shape(shape: shapes.Shape) -> list[Row]:
    expected = {**shapes.RIGHT, **shape.differs}
    with tempfile.TemporaryDirectory(prefix="dflash-shape-") as folder:
        said = statuses(shape.write(Path(folder)))
    return [Row("fork: " + shape.name, name, expected[name], said.get(name, "absent"), "shape") for name in expected]


def rows(releases: Iterable[str], changed: Iterable[mutants.Mutant], forks: Iterable[shapes.Shape]) -> Iterator[Row]:
    """All rows, in order; two trees at a time (each waits for its child)."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(_release, version) for version in releases]
        jobs += [pool.submit(_mutant, mutant) for mutant in changed]
        jobs += [pool.submit(_shape, shape) for shape in forks]
        for job in jobs:
            yield from job.result()


def complaints(found: list[Row]) -> list[str]:
    """Rows that break the table's rules, each in one line."""
    out = []
    for row in found:
        listed = (row.tree.partition(": ")[2], row.check) in {*shapes.UNKNOWN, *unseen.OPEN}
        if row.verdict != "right":
            out.append("%s: %s is %s, expected %s (%s)" % (row.tree, row.check, row.said, row.expected, row.verdict))
        elif row.said == "unknown" and not listed:
            out.append("%s: %s is unknown and not listed" % (row.tree, row.check))
    return out
