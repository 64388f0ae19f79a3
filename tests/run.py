# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of ``make test`` in order and says what came of them in the last line.

``python tests/run.py [lint] [unit] [truth] [e2e] [damage]``; without a name all run.  A stage that executes no
test has failed: nothing passes by being absent.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parent.parent
PYTEST = {
    "unit": ["tests/unit", "tests/house"],
    "truth": ["tests/truth_table"],
    "e2e": ["tests/e2e", "-v"],
    "damage": ["tests/damage"],
}
STAGES = ("lint", "unit", "truth", "e2e", "damage")


@dataclass
class Outcome:
    """What one stage did."""

    stage: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed (errors too) and skipped tests of a JUnit report."""
    if not report.is_file() or not report.stat().st_size:
        return 0, 0, 0
    total = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def run(stage: str) -> Outcome:
    """Run one stage; its output goes straight to the terminal."""
    print(f"== {stage}", flush=True)
    outcome, start = Outcome(stage), time.monotonic()
    if stage == "lint":
        code = subprocess.call([str(REPO / "tools" / "lint.sh")], cwd=REPO)
        outcome.passed, outcome.failed = (1, 0) if code == 0 else (0, 1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "--durations=5", f"--junitxml={report}", *PYTEST[stage]]
            code = subprocess.call(command, cwd=REPO)
            outcome.passed, outcome.failed, outcome.skipped = counts(report)
        if code == 5:
            print(f"{stage}: no test was executed, which counts as a failure", flush=True)
        if code and not outcome.failed:
            outcome.failed = 1
    outcome.seconds = time.monotonic() - start
    return outcome


def main(names: list[str]) -> int:
    """Run the named stages; a failed lint does not hide what the tests say."""
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        print(f"tests: no stage {unknown[0]}; there are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    outcomes = [run(stage) for stage in STAGES if not names or stage in names]
    print()
    for item in outcomes:
        word = "FAILED" if item.failed else "ok"
        print(f"{item.stage:6} {word:6} {item.passed} passed, {item.failed} failed, {item.seconds:.0f} s")
    failed = sum(item.failed for item in outcomes)
    skipped = sum(item.skipped for item in outcomes)
    tail = f", {skipped} skipped" if skipped else ""
    print(f"{sum(item.passed for item in outcomes)} passed, {failed} failed{tail}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
