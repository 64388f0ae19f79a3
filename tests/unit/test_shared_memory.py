# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a living process uses in shared memory is never taken from it."""

from __future__ import annotations

import multiprocessing
import os

from ansible_collections.dflash.fleet.plugins.module_utils import process


def test_a_living_semaphore_stays_and_a_stale_segment_goes() -> None:
    """A named semaphore is mapped under a temporary name, so only its inode tells that it is in use."""
    lock = multiprocessing.get_context("spawn").Lock()
    name = "sem." + lock._semlock.name.lstrip("/")
    stale = os.path.join(process.SHM, "psm_dflash_unit_%d" % os.getpid())
    with open(stale, "w", encoding="ascii") as handle:
        handle.write("left behind")
    gone = process.remove_stale_shared_memory(os.getuid())
    assert os.path.basename(stale) in gone
    assert name not in gone and os.path.exists(os.path.join(process.SHM, name))
