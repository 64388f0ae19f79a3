# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""How fast the proof is on a warm page cache: all but torch's import, and hashing against sha256sum."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from unittest import mock

import pytest
from damage_lab import Lab

from ansible_collections.dflash.fleet.plugins.module_utils import checks, loading, proof, record

SIZE = 700 * 10**6
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.fixture
def big(lab: Lab) -> Lab:
    """The release, filled up to 700 MB with one more recorded file."""
    own = sum(path.stat().st_size for path in lab.site.rglob("*") if path.is_file() and not path.is_symlink())
    path = lab.package / "fill.bin"
    lab.put(path, os.urandom(max(0, SIZE - own)))
    with (lab.info / "RECORD").open() as handle:
        text = handle.read()
    lab.put(lab.info / "RECORD", text + "vllm/fill.bin,,\n")
    lab.record(path)
    return lab


def test_all_but_the_import_of_torch_within_two_seconds(big: Lab) -> None:
    wish = proof.Wish(manifest=big.manifest, speculative_config={"disable_eagle_block_drop": True})
    found: list[checks.Check] = []
    with mock.patch.object(loading, "examine", lambda *_a, **_k: []):
        times = [seconds(lambda: found.extend(proof.inspect_release(str(big.release), wish)[0])) for _ in range(ROUNDS)]
    assert {item["id"]: item["status"] for item in found}["complete.record"] == "pass"
    print("proof of 700 MB without torch's import: %s s" % ", ".join("%.2f" % item for item in times))
    # The best of a few: other work on the machine slows a run, nothing makes one faster than it is.
    assert min(times) < 2.0, times


def test_hashing_is_as_fast_as_the_system_tool(big: Lab) -> None:
    paths = [str(path) for path in big.package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = [os.path.relpath(path, big.package) for path in paths]

    def tool() -> None:
        feed = "\0".join(paths).encode()
        subprocess.run(["xargs", "-0", "sha256sum", "--"], input=feed, stdout=subprocess.DEVNULL, check=True)

    ours, theirs = [], []
    tool()
    for _ in range(3):  # in turns, so that both meet the same machine
        theirs.append(seconds(tool))
        ours.append(seconds(lambda: record.hash_files(str(big.package), files, workers=1)))
    rate = statistics.median(theirs) / statistics.median(ours)
    print(
        "hashing: ours %.2f s, sha256sum %.2f s, rate %.2f" % (statistics.median(ours), statistics.median(theirs), rate)
    )
    assert rate >= 0.8, (ours, theirs)


def test_unchanged_files_are_not_read_again(big: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size, time and inode stand for the layer's content; only what vLLM owns is hashed every time."""
    stat = record.make_stat(str(big.layer), vllm=False)
    monkeypatch.setattr(record, "digest_file", lambda path: pytest.fail(f"{path} was read"))
    assert record.compare_stat(str(big.layer), stat)["ok"] is True
