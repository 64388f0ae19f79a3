# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The first line that says why, as real tools print it."""

from __future__ import annotations

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import build_log

TABLE = [
    (
        "disk full in pip",
        '$ pip install\nERROR: Exception:\nTraceback (most recent call last):\n  File "x"\n'
        "OSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 28] No space left on device",
        "disk is full",
    ),
    (
        "index does not answer",
        "WARNING: Retrying after connection broken by 'NewConnectionError(Connection refused)': /simple/x/\n"
        "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
        "ERROR: No matching distribution found for x==1\n",
        "WARNING: Retrying after connection broken by 'NewConnectionError(Connection refused)': /simple/x/",
        "network cannot be reached",
    ),
    (
        "package is not in the index",
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0)\n",
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0)",
        "vllm_release_extra_index_urls",
    ),
    (
        "compiler, with noise before it",
        "error: can't find Rust compiler\n[1/9] nvcc\n[2/9] nvcc\nFAILED: CMakeFiles/_C.dir/x.cu.o \n"
        'x.cu(3): error: identifier "y" is undefined\nninja: build stopped: subcommand failed.\n'
        "subprocess.CalledProcessError: Command 'cmake' returned non-zero exit status 1.\n"
        "  ERROR: Failed building wheel for vllm\n",
        "FAILED: CMakeFiles/_C.dir/x.cu.o",
        "Read the log",
    ),
    (
        "out of memory",
        "[7/9] nvcc\nKilled signal terminated program cc1plus\ncompilation terminated.\n",
        "Killed signal terminated program cc1plus",
        "Memory ran out",
    ),
    (
        "no venv",
        "The virtual environment was not created successfully because ensurepip is not available.\n",
        "The virtual environment was not created successfully because ensurepip is not available.",
        "python3-venv",
    ),
    (
        "git",
        "$ git fetch\nfatal: unable to access 'https://x/': Could not resolve host: x\n",
        "fatal: unable to access 'https://x/': Could not resolve host: x",
        "network cannot be reached",
    ),
    (
        "certificate",
        "ssl.SSLError: CERTIFICATE_VERIFY_FAILED\n",
        "ssl.SSLError: CERTIFICATE_VERIFY_FAILED",
        "dflash_ca_bundle",
    ),
    (
        "changed index",
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n",
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
        "do not go on",
    ),
    ("nothing telling", "$ x\nabc\nthe last word\n-- 0.1 s, status 3\n", "the last word", "Read the log"),
    ("nothing at all", "", "", "Read the log"),
]


@pytest.mark.parametrize(("text", "line", "hint"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_first_reason_and_hint(text, line, hint):
    assert build_log.first_reason(text) == line
    assert hint in build_log.hint_for(line, text)


def test_progress_by_forecast_and_by_the_compiler(tmp_path):
    steps, expected = ["a", "b", "c"], {"a": 10.0, "b": 80.0, "c": 10.0}
    assert build_log.progress(steps, "a", 0, expected, None) == (0, 100)
    assert build_log.progress(steps, "b", 40, expected, None) == (50, 50)
    assert build_log.progress(steps, "b", 800, expected, None)[0] < 90  # late is not nearly done
    assert build_log.progress(steps, "b", 100, expected, 0.25) == (30, 310)
    assert build_log.progress(steps, "c", 99, expected, None)[0] == 99
    log = tmp_path / "log"
    log.write_text("[1/4] x\nnoise [9/9]\n[2/4] y\n")
    assert build_log.compile_share(str(log), 0) == 0.5
    assert build_log.compile_share(str(log), 30) is None


def test_a_huge_log_is_read_from_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(build_log, "LIMIT", 100)
    log = tmp_path / "log"
    log.write_text("skipped\n" + "FIRST\n" + "x" * 500 + "\nLAST\n")
    text = build_log.read_from(str(log), 8)
    assert "FIRST" in text and "LAST" in text and "skipped" not in text
