# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Files are whole or absent, hashes depend on content alone, a link is switched in one step."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.dflash.fleet.plugins.module_utils import files

quick = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("size", [0, 1, files.CHUNK - 1, files.CHUNK, files.CHUNK + 1, 2 * files.CHUNK + 3])
def test_a_file_has_the_hash_of_all_its_bytes(tmp_path, size):
    path = tmp_path / "f"
    path.write_bytes(b"x" * size)
    assert files.sha256_file(str(path)) == hashlib.sha256(b"x" * size).hexdigest()


def test_a_file_that_is_not_there_has_no_hash(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        files.sha256_file(str(tmp_path / "none"))


@quick
@given(JSON)
def test_canonical_text_reads_back_and_is_plain(value):
    text = files.canonical(value)
    assert json.loads(text) == value
    assert text.isascii()


def test_canonical_text_knows_no_order_of_keys_and_no_spaces():
    assert files.canonical({"b": [1, 2], "a": {"d": 1, "c": None}}) == '{"a":{"c":null,"d":1},"b":[1,2]}'
    assert files.canonical("ü") == '"\\u00fc"'


def test_a_short_hash_is_the_head_of_the_long_one():
    whole = hashlib.sha256(b'{"a":1}').hexdigest()
    assert files.short_hash({"a": 1}) == whole[:16]
    assert files.short_hash({"a": 1}, 12) == whole[:12]
    assert files.short_hash({"a": "1"}) != files.short_hash({"a": 1})


# ---------------------------------------------------------------- writing
def test_a_written_file_has_text_mode_and_no_neighbours(tmp_path):
    path = tmp_path / "f"
    files.write_atomic(str(path), "ü\n")
    assert path.read_text(encoding="utf-8") == "ü\n"
    assert path.stat().st_mode & 0o777 == 0o644
    files.write_atomic(str(path), "secret", mode=0o600, owner=(os.getuid(), os.getgid()))
    assert path.read_text() == "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_what_a_reader_has_open_is_not_changed(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with path.open() as handle:
        files.write_atomic(str(path), "new")
        assert handle.read() == "old"


@pytest.mark.parametrize("broken", ["fsync", "replace", "fchmod"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "f"
    path.write_text("old")

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomic(str(path), "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_the_bytes_are_on_disk_before_the_name_is(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *args, name=name, act=act: (done.append(name), act(*args))[1])
    files.write_atomic(str(tmp_path / "f"), "x")
    assert done == ["fsync", "replace"]


def test_a_file_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_atomic("f", "x")
    assert (tmp_path / "f").read_text() == "x"


def test_the_owner_is_set_before_the_file_has_its_name(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(files.os, "fchown", lambda _fd, uid, gid: given.append((uid, gid, os.path.exists(path))))
    path = str(tmp_path / "f")
    files.write_atomic(path, "x", owner=(12, 34))
    assert given == [(12, 34, False)]


def test_written_json_is_for_people_and_reads_back(tmp_path):
    path = tmp_path / "f"
    files.write_json(str(path), {"b": 1, "a": ["x"]}, mode=0o600)
    assert path.read_text() == '{\n  "a": [\n    "x"\n  ],\n  "b": 1\n}\n'
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.read_json(str(path)) == {"b": 1, "a": ["x"]}


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"a": 1', b"\xff\xfe{}", b'{"a": 1} x'])
def test_what_is_no_whole_json_file_reads_as_none(tmp_path, content):
    path = tmp_path / "f"
    if content is not None:
        path.write_bytes(content)
    assert files.read_json(str(path)) is None
    assert files.read_json(str(tmp_path)) is None


# ---------------------------------------------------------------- links
def test_a_link_is_made_switched_and_left_alone(tmp_path):
    link = tmp_path / "current"
    assert files.switch_link(str(link), "a") is True
    assert os.readlink(link) == "a"
    assert files.switch_link(str(link), "a") is False
    assert files.switch_link(str(link), "b") is True
    assert os.readlink(link) == "b"
    assert [entry.name for entry in tmp_path.iterdir()] == ["current"]


def test_a_link_is_never_absent_while_it_is_switched(tmp_path, monkeypatch):
    link = tmp_path / "current"
    link.symlink_to("a")
    seen = []
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda *args: (seen.append(os.readlink(link)), replace(*args)))
    files.switch_link(str(link), "b")
    assert seen == ["a"] and os.readlink(link) == "b"


def test_what_a_killed_switch_left_is_in_nobodys_way(tmp_path):
    (tmp_path / ("current.new.%d" % os.getpid())).symlink_to("rest")
    assert files.switch_link(str(tmp_path / "current"), "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["current"]


def test_a_file_in_the_links_place_is_replaced(tmp_path):
    (tmp_path / "current").write_text("b")
    assert files.switch_link(str(tmp_path / "current"), "b") is True
    assert os.readlink(tmp_path / "current") == "b"
