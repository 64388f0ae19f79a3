# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which releases a run looks at: ``DFLASH_TRUTH_TABLE=full`` takes all, else a short list."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per release."""
    if "version" in metafunc.fixturenames:
        import trees

        full = os.environ.get("DFLASH_TRUTH_TABLE") == "full"
        metafunc.parametrize("version", list(trees.RELEASES) if full else list(trees.SHORT))
