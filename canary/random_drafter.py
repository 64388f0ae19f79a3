#!/usr/bin/env python3
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Make a drafter with random weights and the shape of a trained one: it loads, and drafts nothing that is accepted.

    python3 canary/random_drafter.py canary/pairs/cpu/drafter_full OUT [--seed N]

Tests need a drafter that is wired right and worthless, to tell a weak drafter from a broken build. Only the standard
library is used: the safetensors file (8 bytes of header length, a JSON header, the tensors one after the other) is
written here. The same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import shutil
import struct
import sys

WEIGHTS = "model.safetensors"
SPREAD = 0.02
BYTES = {"F32": 4, "BF16": 2}


def read_header(path: pathlib.Path) -> dict[str, dict[str, object]]:
    """Names, types and shapes of the tensors of a safetensors file."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header


def random_values(draw: random.Random, count: int, dtype: str) -> bytes:
    """Evenly spread small numbers; bfloat16 is the upper half of float32."""
    packed = struct.pack(f"<{count}f", *(draw.uniform(-SPREAD, SPREAD) for _ in range(count)))
    if dtype == "F32":
        return packed
    return b"".join(packed[place + 2 : place + 4] for place in range(0, len(packed), 4))


def write_weights(like: pathlib.Path, path: pathlib.Path, seed: int) -> None:
    """Write tensors named, typed and shaped like those of another file; norms are 1, all else is random."""
    draw = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in sorted(read_header(like).items()):
        dtype, shape = str(tensor["dtype"]), list(tensor["shape"])  # type: ignore[call-overload]
        if dtype not in BYTES:
            raise ValueError(f"{like}: tensor {name} is {dtype}, expected one of {', '.join(sorted(BYTES))}")
        count = 1
        for size in shape:
            count *= size
        start = len(body)
        one = struct.pack("<f", 1.0)[4 - BYTES[dtype] :]
        body += one * count if len(shape) == 1 else random_values(draw, count, dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(body)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(body))


def main(argv: list[str] | None = None) -> int:
    """Make one random drafter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("like", type=pathlib.Path, help="folder of a trained drafter")
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_weights(args.like / WEIGHTS, args.out / WEIGHTS, args.seed)
        shutil.copyfile(args.like / "config.json", args.out / "config.json")
    except (OSError, ValueError, struct.error) as error:
        print(f"canary/random_drafter.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
