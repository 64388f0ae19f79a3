# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""One copy of the proven release for all tests of damage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import damage_lab


@pytest.fixture(scope="session")
def session_lab() -> Iterator[damage_lab.Lab]:
    root = damage_lab.default_root()
    release = damage_lab.proven_release(root)
    if release is None:
        pytest.fail(
            f"{root} holds no proven release to copy: run `make demo` first, or name a root in DFLASH_TEST_ROOT"
        )
    lab = damage_lab.Lab(release)
    yield lab
    lab.close()


@pytest.fixture
def lab(session_lab: damage_lab.Lab) -> Iterator[damage_lab.Lab]:
    """The copy, right before the test and put right after it."""
    yield session_lab
    session_lab.restore()
