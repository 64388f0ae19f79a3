# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The lock wins: what is asked of the network, and when."""

from __future__ import annotations

import json

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import lock
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

A, B, C = "a" * 40, "b" * 40, "c" * 40
REPO = "https://example.org/o/vllm.git"
REFS = {
    "refs/tags/v1.0": A,
    "refs/tags/v1.0^{}": B,
    "refs/heads/main": C,
    "refs/heads/v1.0": C,
    "refs/pull/7/head": A,
}


class Remote:
    """A repository that counts how often it is asked."""

    def __init__(self, refs=REFS, error=""):
        self.refs, self.error, self.asked = dict(refs), error, 0

    def __call__(self, _repo, words):
        self.asked += 1
        if self.error:
            return 128, "", self.error
        options = [word for word in words if word.startswith("--")]
        names = self.refs if options else [name for name in words if name in self.refs]
        return 0, "".join("%s\t%s\n" % (self.refs[name], name) for name in names), ""


@pytest.mark.parametrize(
    ("ref", "commit"),
    [
        ("v1.0", B),  # the commit behind an annotated tag, and a tag before a branch of the same name
        ("main", C),
        ("refs/pull/7/head", A),
        ("pull/7/head", A),
        ("refs/tags/v1.0", B),
        (A, A),
    ],
)
def test_a_ref_means_one_commit(ref, commit):
    assert lock.resolve(REPO, ref, Remote()) == commit


def test_a_full_commit_asks_nobody():
    remote = Remote()
    assert lock.resolve(REPO, A, remote) == A
    assert remote.asked == 0


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("v1.1", "Did you mean v1.0"),
        ("mian", "Did you mean main"),
        (A[:9], "Write all 40 digits"),
        ("--upload-pack=x", "cannot be the name of a ref"),
        ("a b", "cannot be the name of a ref"),
    ],
)
def test_a_wrong_ref_is_one_line_with_what_mends_it(ref, says):
    with pytest.raises(DflashError) as caught:
        lock.resolve(REPO, ref, Remote())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("fatal: unable to access 'https://x/': Could not resolve host: x", "cannot be reached"),
        ("fatal: could not read Username for 'https://x': terminal prompts disabled", "needs a login"),
        ("fatal: detected dubious ownership in repository at '/srv/x'", "another account owns"),
        ("fatal: '/nowhere' does not appear to be a git repository", "cannot be read"),
    ],
)
def test_an_unreachable_repository_is_one_line(stderr, says):
    with pytest.raises(DflashError) as caught:
        lock.resolve(REPO, "main", Remote(error=stderr))
    assert says in str(caught.value)


def test_the_second_run_needs_no_network(tmp_path):
    path, remote = str(tmp_path / "l.json"), Remote()
    first = lock.pin(REPO, "main", path, ask=remote, now="then")
    assert (first["changed"], first["pin"]["commit"], remote.asked) == (True, C, 1)
    remote.error = "fatal: Could not resolve host"
    second = lock.pin(REPO, "main", path, ask=remote)
    assert second["changed"] is False
    assert second["pin"] == {"repo": REPO, "ref": "main", "commit": C, "resolved_at": "then"}
    assert remote.asked == 1
    assert lock.pin(REPO[:-4] + "/", "main", path, ask=remote)["pin"]["commit"] == C  # another spelling of it


def test_update_shows_what_moved(tmp_path):
    path, remote = str(tmp_path / "l.json"), Remote()
    lock.pin(REPO, "main", path, ask=remote, now="then")
    assert lock.pin(REPO, "main", path, update=True, ask=remote)["changed"] is False
    remote.refs["refs/heads/main"] = A
    assert lock.pin(REPO, "main", path, ask=remote)["pin"]["commit"] == C
    moved = lock.pin(REPO, "main", path, update=True, ask=remote)
    assert (moved["changed"], moved["moved"], moved["pin"]["commit"]) == (True, A, A)
    assert [pin["commit"] for pin in json.loads((tmp_path / "l.json").read_text())["pins"]] == [A]


def test_check_mode_writes_nothing(tmp_path):
    path = tmp_path / "l.json"
    assert lock.pin(REPO, "main", str(path), dry=True, ask=Remote())["changed"] is True
    assert not path.exists()


def test_a_ref_from_another_repository_is_refused_until_it_is_meant(tmp_path):
    path, other = str(tmp_path / "l.json"), "https://example.org/fork/vllm"
    lock.pin(REPO, "main", path, ask=Remote())
    with pytest.raises(DflashError) as caught:
        lock.pin(other, "main", path, ask=Remote())
    assert "another repository" in str(caught.value)
    lock.pin(other, "main", path, update=True, ask=Remote())
    assert len(lock.read_lock(path)["pins"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema": 1}',
        '{"schema": 9, "pins": []}',
        '{"schema": 1, "pins": [{"repo": "r", "ref": "x", "commit": "short"}]}',
    ],
)
def test_a_broken_lock_is_never_taken_for_an_empty_one(tmp_path, text):
    path = tmp_path / "l.json"
    path.write_text(text)
    with pytest.raises(DflashError):
        lock.pin(REPO, "main", str(path), ask=Remote())
    assert path.read_text() == text


def test_a_password_in_the_url_is_refused(tmp_path):
    with pytest.raises(DflashError) as caught:
        lock.pin("https://me:secret@example.org/x", "main", str(tmp_path / "l.json"), ask=Remote())
    assert "secret" not in str(caught.value)


def test_a_series_is_read_in_order_with_its_hashes(tmp_path):
    for name in ("b.patch", "a.patch"):
        (tmp_path / name).write_text("Subject: %s\n---\ndiff --git a/x b/x\n" % name)
    series = lock.read_series([str(tmp_path / "b.patch"), str(tmp_path / "a.patch")])
    assert [patch["name"] for patch in series] == ["b.patch", "a.patch"]
    assert all(len(patch["sha256"]) == 64 for patch in series)
    (tmp_path / "c.patch").write_text("no patch")
    (tmp_path / "d.patch").write_bytes(b"\xff\xfe")
    for bad in ("c.patch", "d.patch", "none.patch"):
        with pytest.raises(DflashError):
            lock.read_series([str(tmp_path / bad)])
    with pytest.raises(DflashError):
        lock.read_series([str(tmp_path / "a.patch")] * 2)
