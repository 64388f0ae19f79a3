# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a variables file with a port that is free now.

The port lies below the range from which Linux takes outgoing ports, so that no client gets it by
chance, and is drawn at random, so that clones on one machine draw different ones.
"""

from __future__ import annotations

import random
import socket
import sys

FIRST, LAST = 20000, 32000
TRIES = 200


def is_free(port: int) -> bool:
    """Whether nothing listens on the port, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def pick() -> int:
    """A free port.  Raises ``SystemExit`` where none of 200 drawn ones is free."""
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randint(FIRST, LAST)
        if is_free(port):
            return port
    raise SystemExit(f"setup: none of {TRIES} ports between {FIRST} and {LAST} is free.")


def main() -> int:
    """Write the file to standard output."""
    sys.stdout.write("---\n# Picked once by `make setup` for this clone; change it as you like.\n")
    sys.stdout.write(f"dflash_serve_port: {pick()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
