# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Lets tests import the collection by its full name, from any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
COLLECTIONS = REPO / "collections"

if str(COLLECTIONS) not in sys.path:
    sys.path.insert(0, str(COLLECTIONS))
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))
# Child processes (modules run by hand, probes) find it too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(COLLECTIONS), *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(COLLECTIONS)]]
)
# Ansible reads the working folder's ansible.cfg; tests run from anywhere.
os.environ.setdefault("ANSIBLE_CONFIG", str(REPO / "ansible.cfg"))


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
