# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""``make truth-table``: what the probes say of every release, of broken releases and of forks.

Prints a row for each tree and check that is not as expected, a table of the releases, and the counts; the last
line is the result.  ``--rows`` prints all rows, ``--short`` takes what ``make test`` takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parent.parent.parent / "collections")]

import mutants  # noqa: E402
import shapes  # noqa: E402
import table  # noqa: E402
import trees  # noqa: E402
import unseen  # noqa: E402

LETTER = {"pass": "pass", "fail": "-", "skip": "skip", "unknown": "?"}


def main() -> int:
    """Run the table and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row with its reason")
    parser.add_argument("--short", action="store_true", help="the demo's release, some of its mutants, the forks")
    arguments = parser.parse_args()
    start = time.monotonic()
    releases = [trees.DEMO] if arguments.short else list(trees.RELEASES)
    chosen = [item for item in [*mutants.MUTANTS, *unseen.UNSEEN] if item.short or not arguments.short]
    for version in releases:
        trees.tree(version)
    fetched = time.monotonic() - start
    found = list(table.rows(releases, chosen, shapes.SHAPES))
    checks = list(trees.EXPECTED)
    width = max(len(name) for name in checks)
    print("%-*s  %s" % (width, "", "  ".join("%6s" % version for version in releases)))
    for check in checks:
        cells = [LETTER.get(row.said, row.said) for row in found if row.check == check and row.tree in releases]
        print("%-*s  %s" % (width, check, "  ".join("%6s" % cell for cell in cells)))
    print()
    for row in found:
        if arguments.rows:
            print("%-11s %-8s %-8s %s: %s (%s)" % (row.verdict, row.expected, row.said, row.tree, row.check, row.why))
    wrong = table.complaints(found)
    for line in wrong:
        print("WRONG " + line)
    verdicts = Counter(row.verdict for row in found)
    said = Counter(row.said for row in found)
    print(
        "%d releases, %d mutants, %d forks; fetched in %.0f s, judged in %.0f s; %d skipped, %d listed unknown"
        % (
            len(releases), len(chosen), len(shapes.SHAPES), fetched, time.monotonic() - start - fetched,
            said["skip"], said["unknown"] - verdicts["unknown"],
        )
    )
    print(
        "truth table: %s, %d rows, %d false passes, %d false alarms, %d unknowns, %d other"
        % (
            "FAILED" if wrong else "ok", len(found), verdicts["false pass"], verdicts["false alarm"],
            verdicts["unknown"], verdicts["other"],
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
