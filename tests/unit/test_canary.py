# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The shipped canary pairs are whole and fit each other; the random drafter has the shape of the trained one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ROOT / "canary" / "pairs"
SCRIPT = ROOT / "canary" / "random_drafter.py"
DRAFTERS = {
    "cpu/drafter_full": ["full_attention", "full_attention"],
    "cpu/drafter_sliding": ["sliding_attention", "sliding_attention"],
    "gpu/drafter_mixed": ["sliding_attention", "full_attention"],
}
TYPES = {"float32": "F32", "bfloat16": "BF16"}
MOST_BYTES = 7_000_000


@pytest.fixture(scope="module")
def random_drafter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_drafter", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensors(path: Path) -> dict:
    """The header of a safetensors file, after a check that the data it names fills the file exactly."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    places = sorted(tensor["data_offsets"] for tensor in header.values())
    assert places[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(places))
    assert places[-1][1] == len(data) - 8 - length
    return header


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_fits_its_target(name: str) -> None:
    drafter, target = config(PAIRS / name), config((PAIRS / name).parent / "target")
    for key in ("hidden_size", "vocab_size", "torch_dtype", "rope_theta", "eos_token_id"):
        assert drafter[key] == target[key], key
    assert drafter["num_target_layers"] == target["num_hidden_layers"]
    ids = drafter["dflash_config"]["target_layer_ids"]
    # Shifted by one in both directions the ids still name layers: that is what the canary must notice.
    assert min(ids) >= 1 and max(ids) + 1 < target["num_hidden_layers"]
    assert drafter["layer_types"] == DRAFTERS[name]
    slides = "sliding_attention" in drafter["layer_types"]
    assert drafter["use_sliding_window"] is slides
    assert drafter["sliding_window"] == (24 if slides else None)
    assert drafter["block_size"] == 8


@pytest.mark.parametrize("name", [*DRAFTERS, "cpu/target", "gpu/target"])
def test_weights_are_those_the_config_says(name: str) -> None:
    folder = PAIRS / name
    wanted, found = config(folder), tensors(folder / "model.safetensors")
    prefix = "model." if name.endswith("target") else ""
    assert {tensor["dtype"] for tensor in found.values()} == {TYPES[wanted["torch_dtype"]]}
    layers = {key.split("layers.")[1].split(".")[0] for key in found if "layers." in key}
    assert layers == {str(number) for number in range(wanted["num_hidden_layers"])}
    heads = wanted["num_attention_heads"] * wanted["head_dim"]
    assert found[f"{prefix}layers.0.self_attn.q_proj.weight"]["shape"] == [heads, wanted["hidden_size"]]
    if prefix:
        assert found["lm_head.weight"]["shape"] == [wanted["vocab_size"], wanted["hidden_size"]]
    else:
        taps = len(wanted["dflash_config"]["target_layer_ids"])
        assert found["fc.weight"]["shape"] == [wanted["hidden_size"], taps * wanted["hidden_size"]]
        assert "lm_head.weight" not in found


@pytest.mark.parametrize("pair", ["cpu", "gpu"])
def test_items_and_tokenizer(pair: str) -> None:
    items = json.loads((PAIRS / pair / "items.json").read_text(encoding="utf-8"))
    assert len(items) == 24
    assert len({item["q"] for item in items}) == 24
    for item in items:
        assert str(item["number"]) in item["q"] and item["a"].startswith(f"Item {item['number']} is ")
    folder = PAIRS / pair / "target"
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    wanted = config(folder)
    assert max(known.values()) + 1 == wanted["vocab_size"]
    assert known["<|im_end|>"] == wanted["eos_token_id"]
    ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert wanted["eos_token_id"] in ends
    for name in DRAFTERS:
        if name.startswith(pair):
            assert config(PAIRS / name)["dflash_config"]["mask_token_id"] == known["<|mask|>"]
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    assert json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"] == template


def test_pairs_stay_small_and_hold_nothing_else() -> None:
    names = {path.relative_to(PAIRS).as_posix() for path in PAIRS.rglob("*") if path.is_file()}
    target = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja"}
    wanted = {f"{pair}/target/{name}" for pair in ("cpu", "gpu") for name in target}
    wanted |= {f"{name}/{file}" for name in DRAFTERS for file in ("config.json", "model.safetensors")}
    wanted |= {"cpu/items.json", "gpu/items.json"}
    assert names == wanted
    assert sum((PAIRS / name).stat().st_size for name in names) < MOST_BYTES


@pytest.mark.parametrize("name", ["cpu/drafter_full", "gpu/drafter_mixed"])
def test_random_drafter_has_the_same_shape_and_other_weights(
    random_drafter: ModuleType, tmp_path: Path, name: str
) -> None:
    like = PAIRS / name
    assert random_drafter.main([str(like), str(tmp_path / "a"), "--seed", "3"]) == 0
    trained, made = (tensors(folder / "model.safetensors") for folder in (like, tmp_path / "a"))
    assert {key: (value["dtype"], value["shape"]) for key, value in made.items()} == {
        key: (value["dtype"], value["shape"]) for key, value in trained.items()
    }
    assert config(tmp_path / "a") == config(like)
    made_bytes = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert made_bytes != (like / "model.safetensors").read_bytes()
    one = {"F32": struct.pack("<f", 1.0), "BF16": b"\x80\x3f"}[made["norm.weight"]["dtype"]]
    start, end = made["norm.weight"]["data_offsets"]
    body = made_bytes[8 + struct.unpack_from("<Q", made_bytes)[0] :]
    assert body[start:end] == one * made["norm.weight"]["shape"][0]
    start, end = made["fc.weight"]["data_offsets"]
    assert len(set(body[start:end])) > 100
    width = {"F32": 4, "BF16": 2}[made["fc.weight"]["dtype"]]
    padded = b"".join(b"\0" * (4 - width) + body[place : place + width] for place in range(start, end, width))
    values = struct.unpack(f"<{len(padded) // 4}f", padded)
    assert max(values) <= random_drafter.SPREAD and min(values) >= -random_drafter.SPREAD
    assert abs(sum(values) / len(values)) < random_drafter.SPREAD / 10


def test_random_drafter_is_seeded(random_drafter: ModuleType, tmp_path: Path) -> None:
    like = PAIRS / "cpu" / "drafter_full"
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        random_drafter.main([str(like), str(tmp_path / folder), "--seed", seed])
    first, again, other = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert first == again
    assert first != other


def test_random_drafter_needs_the_standard_library_alone(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), str(PAIRS / "cpu" / "drafter_full"), str(tmp_path)],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    missing = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), str(tmp_path / "none"), str(tmp_path)],
                             capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
