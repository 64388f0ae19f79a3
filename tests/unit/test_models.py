# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A model's revision is its content, wherever it lies; equal stat means that nothing is read."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import models
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Qwen-tiny"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (folder / "model.safetensors").write_bytes(b"\0\1\2\3")
    (folder / "sub" / "tokenizer.json").write_text("{}")
    return folder


def test_a_listing_names_every_file_with_size_time_and_inode(model):
    for ignored in (".git", ".cache"):
        (model / ignored).mkdir()
        (model / ignored / "x").write_text("x")
    found = models.listing(str(model))
    assert sorted(found) == ["config.json", "model.safetensors", "sub/tokenizer.json"]
    info = (model / "model.safetensors").stat()
    assert found["model.safetensors"] == [4, info.st_mtime_ns, info.st_ino]


def test_links_are_followed_as_a_hub_cache_needs_it(model, tmp_path):
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "f").write_text("")
    (model / "linked.safetensors").symlink_to(tmp_path / "blob")
    (model / "folder").symlink_to(tmp_path / "more")
    found = models.listing(str(model))
    assert found["linked.safetensors"][0] == 5
    assert "folder/f" in found


@pytest.mark.parametrize("act", ["absent", "file", "dangling"])
def test_what_cannot_be_listed_is_told_with_its_path(model, act):
    path = model
    if act == "absent":
        path = model / "none"
    elif act == "file":
        path = model / "config.json"
    else:
        (model / "lost.bin").symlink_to("nowhere")
    with pytest.raises(DflashError) as caught:
        models.listing(str(path))
    assert caught.value.where == str(model / "lost.bin" if act == "dangling" else path)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", '"x"'])
def test_a_config_is_a_json_object(model, text):
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    with pytest.raises(DflashError, match="no readable config") as caught:
        models.config(str(model))
    assert caught.value.where == str(model) and caught.value.fix


def test_a_description_is_whole(model):
    found = models.describe(str(model) + "/")
    assert found["name"] == "Qwen-tiny" and found["path"] == str(model)
    assert found["config"] == {"hidden_size": 8}
    assert found["stat"] == models.listing(str(model))
    assert len(found["revision"]) == 16 and int(found["revision"], 16)
    assert models.describe(str(model), "other")["name"] == "other"
    assert models.folder_name(found) == "Qwen-tiny@" + found["revision"]


def test_equal_content_has_one_revision_wherever_it_lies(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "config.json", (1, 1))
    assert models.describe(str(tmp_path / "copy"))["revision"] == models.describe(str(model))["revision"]


@pytest.mark.parametrize("act", ["byte", "renamed", "added", "removed", "swapped"])
def test_other_content_has_another_revision(model, act):
    (model / "b.json").write_text("[]")
    before = models.describe(str(model))["revision"]
    weights = model / "model.safetensors"
    if act == "byte":
        weights.write_bytes(b"\0\1\2\4")
    elif act == "renamed":
        weights.rename(model / "model2.safetensors")  # the order stays
    elif act == "added":
        (model / "empty").write_text("")
    elif act == "removed":
        weights.unlink()
    else:
        (model / "b.json").write_text("{}")
        (model / "sub" / "tokenizer.json").write_text("[]")
    assert models.describe(str(model))["revision"] != before


def test_equal_stat_reads_nothing(model, monkeypatch):
    known = models.describe(str(model))
    monkeypatch.setattr(models, "sha256_file", lambda _path: pytest.fail("a file was read"))
    assert models.describe(str(model), known=known) == known
    assert models.describe(str(model), known=json.loads(json.dumps(known))) == known


@pytest.mark.parametrize("stale", ["time", "size", "inode", "path", "revision", "added"])
def test_any_difference_reads_again(model, stale):
    known = dict(models.describe(str(model)), revision="remembered")
    weights = model / "model.safetensors"
    if stale == "time":
        os.utime(weights, ns=(1, 1))
    elif stale == "size":
        weights.write_bytes(b"\0\1\2\3\4")
    elif stale == "inode":
        info = weights.stat()
        shutil.copy(weights, model / "new")
        os.replace(model / "new", weights)
        os.utime(weights, ns=(info.st_mtime_ns, info.st_mtime_ns))
    elif stale == "added":
        (model / "new").write_text("")
    elif stale == "path":
        known["path"] = "/elsewhere"
    else:
        known["revision"] = ""
    assert len(models.describe(str(model), known=known)["revision"]) == 16


def test_a_file_that_goes_away_while_it_is_read_is_told(model, monkeypatch):
    def gone(path):
        raise FileNotFoundError(2, "No such file", path)

    monkeypatch.setattr(models, "sha256_file", gone)
    with pytest.raises(DflashError, match="cannot be read: No such file") as caught:
        models.describe(str(model))
    assert caught.value.where == str(model / "config.json")
