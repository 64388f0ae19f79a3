# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""One demo for all: the files run in the order of their names, each on what the one before left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness


@pytest.fixture(scope="session")
def demo() -> harness.Clone:
    """This checkout, deployed and proven on this machine."""
    clone = harness.Clone()
    run = clone.demo()
    assert run.code == 0, "the demo was not proven"
    return clone


@pytest.fixture
def proven(demo: harness.Clone) -> harness.Clone:
    """The demo, brought back to proven before the test if the one before it left something to do."""
    run = demo.playbook()
    assert run.code == 0 and demo.host()["state"] in ("unchanged", "proven")
    return demo
