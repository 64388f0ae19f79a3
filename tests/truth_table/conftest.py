# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The modules of the truth table are found by their names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
