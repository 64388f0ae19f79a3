# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""From a pin and patches to one build commit, on real repositories."""

from __future__ import annotations

import os
import subprocess

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import source
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

ENV = {
    "PATH": os.environ["PATH"],
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@x",
    "GIT_COMMITTER_NAME": "C",
    "GIT_COMMITTER_EMAIL": "c@x",
    "GIT_AUTHOR_DATE": "@1700000000 +0200",
    "GIT_COMMITTER_DATE": "@1700000001 -0500",
}
SETUP = 'from setuptools import setup\nCMakeExtension(name="vllm._C")\nsetup()\n'


@pytest.fixture
def env(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


@pytest.fixture
def upstream(tmp_path, env):
    """A repository with a tag, a branch after it, and a pull request that no branch knows."""
    path = tmp_path / "upstream"
    path.mkdir()

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=path, env={**ENV, **env}, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    (path / "vllm").mkdir()
    (path / "csrc").mkdir()
    (path / "vllm" / "a.py").write_text("one\ntwo\nthree\n")
    (path / "csrc" / "k.cu").write_text("kernel\n")
    (path / "setup.py").write_text(SETUP)
    git("add", "-A")
    git("commit", "-qm", "first")
    git("tag", "v1.0")
    (path / "vllm" / "a.py").write_text("one\ntwo\nTHREE\n")
    git("commit", "-qam", "second")
    git("checkout", "-q", "--detach", "v1.0")
    (path / "csrc" / "k.cu").write_text("other kernel\n")
    git("commit", "-qam", "pull request")
    git("update-ref", "refs/pull/7/head", "HEAD")
    git("checkout", "-q", "main")
    git.path = str(path)
    git.folder = path
    return git


def patch(name, before, after, subject="Change two"):
    text = (
        "Subject: [PATCH 1/1] %s\n\nBecause it matters.\n---\n vllm/a.py | 2 +-\n\ndiff --git a/vllm/a.py b/vllm/a.py\n"
        "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,3 +1,3 @@\n one\n-%s\n+%s\n three\n--\n2.39\n"
        % (subject, before, after)
    )
    return {"name": name, "sha256": name, "text": text}


def build(root, upstream, env, pin, series=(), ref="v1.0"):
    log = []
    os.makedirs(os.path.join(root, "source"), exist_ok=True)
    mirror = source.update_mirror(str(root), upstream.path, ref, pin, env, log.append)
    commit = source.checkout(mirror, os.path.join(root, "src"), pin, series, env, log.append)
    return commit, mirror, log


def test_without_a_series_the_build_commit_is_the_pin(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    commit, mirror, _log = build(tmp_path, upstream, env, pin)
    assert commit == pin
    assert source.facts(mirror, upstream("rev-parse", "main")) == {"nearest": "v1.0", "ahead": 1}
    assert (tmp_path / "src" / "vllm" / "a.py").read_text() == "one\ntwo\nthree\n"


def test_the_build_commit_is_the_same_everywhere(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    series = [patch("1.patch", "two", "2"), patch("2.patch", "2", "zwei")]
    commits = {
        build(tmp_path / name, upstream, {**env, **extra}, pin, series)[0]
        for name, extra in (("x", {}), ("y", {"TZ": "Asia/Tokyo", "GIT_AUTHOR_NAME": "someone"}))
    }
    assert len(commits) == 1
    git = source.Git(str(tmp_path / "x" / "src"), env, print)
    shown = git.text("show", "-s", "--format=%an %ae %at %cn %ce %ct|%B", "HEAD")
    assert shown.startswith("A a@x 1700000000 C c@x 1700000001|Change two\n\nBecause it matters.")
    assert git.text("rev-parse", "HEAD~2") == pin


def test_an_untouched_tree_is_used_again_and_a_touched_one_is_not(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    series = [patch("1.patch", "two", "2")]
    commit, _mirror, _log = build(tmp_path, upstream, env, pin, series)
    (tmp_path / "src" / "build").mkdir()
    assert build(tmp_path, upstream, env, pin, series)[0] == commit
    assert (tmp_path / "src" / "build").is_dir()  # what a compiler has done is kept
    (tmp_path / "src" / "vllm" / "a.py").write_text("touched\n")
    assert build(tmp_path, upstream, env, pin, series)[0] == commit
    assert (tmp_path / "src" / "vllm" / "a.py").read_text() == "one\n2\nthree\n"
    assert build(tmp_path, upstream, env, pin, [])[0] == pin


def test_a_patch_that_is_in_already_is_told_and_adds_nothing(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    series = [patch("1.patch", "two", "2"), patch("again.patch", "two", "2")]
    once = build(tmp_path / "x", upstream, env, pin, series[:1])[0]
    twice, _mirror, log = build(tmp_path / "y", upstream, env, pin, series)
    assert twice == once
    assert "already in: again.patch" in log


def test_a_patch_that_does_not_apply_is_named_with_file_and_line(tmp_path, upstream, env):
    with pytest.raises(DflashError) as caught:
        build(tmp_path, upstream, env, upstream("rev-parse", "v1.0"), [patch("bad.patch", "nothing", "x")])
    assert "bad.patch" in str(caught.value)
    assert "vllm/a.py, hunk at line 1" in str(caught.value)


def test_a_second_fetch_needs_no_repository(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    build(tmp_path, upstream, env, pin)
    os.rename(upstream.path, upstream.path + ".gone")
    assert build(tmp_path, upstream, env, pin)[0] == pin


def test_a_pull_request_is_fetched_though_no_branch_has_it(tmp_path, upstream, env):
    pin = upstream("rev-parse", "refs/pull/7/head")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin, ref="refs/pull/7/head")
    assert "v1.0" in mirror.text("tag")
    with pytest.raises(DflashError) as caught:
        source.refuse_native(source.native_changes(mirror, "v1.0", pin))
    assert "csrc/k.cu" in str(caught.value)


def test_a_commit_that_is_gone_is_one_line(tmp_path, upstream, env):
    with pytest.raises(DflashError) as caught:
        build(tmp_path, upstream, env, "d" * 40)
    assert "no longer has the pinned commit" in str(caught.value)


def test_the_remote_follows_the_repository_that_was_named(tmp_path, upstream, env):
    pin = upstream("rev-parse", "v1.0")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin)
    mirror("remote", "set-url", "origin", "/elsewhere")
    build(tmp_path, upstream, env, pin)
    assert mirror.text("remote", "get-url", "origin") == upstream.path


@pytest.mark.parametrize(
    ("path", "is_native"),
    [
        ("csrc/cpu/x.py", True),
        ("cmake/utils.cmake", True),
        ("CMakeLists.txt", True),
        ("vllm/x.cuh", True),
        ("tests/kernels/x.cu", False),
        ("vllm/config.py", False),
        ("docs/CMakeLists.txt", False),
        ("setup.py", False),
    ],
)
def test_what_counts_as_native(path, is_native):
    assert source.native(path) is is_native


def test_another_extension_in_setup_is_a_native_change_and_another_text_is_not(tmp_path, upstream, env):
    for text, found in ((SETUP + "# remark\n", []), (SETUP.replace("_C", "_D"), ["setup.py (other extensions)"])):
        (upstream.folder / "setup.py").write_text(text)
        upstream("commit", "-qam", "setup")
        head = upstream("rev-parse", "HEAD")
        mirror = source.Git(upstream.path, env, print)
        assert source.changed_natives(mirror, "v1.0", head) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Subject: [PATCH v2 1/3] Keep\n the window\n\nWhy.\n---\n x | 1 +\n\ndiff --git a/x b/x\n",
            "Keep the window\n\nWhy.\n",
        ),
        ("--- a/x\n+++ b/x\n", "n.patch\n"),
    ],
)
def test_the_message_comes_from_the_patch(text, message):
    assert source.message_of(text, "n.patch") == message


# ---------------------------------------------------------------- native or Python only
def test_what_changed_natively_is_a_fact(tmp_path, upstream, env):
    first, second = upstream("rev-parse", "v1.0"), upstream("rev-parse", "main")
    mirror = source.Git(upstream.path, env, print)
    python = source.native_changes(mirror, "v1.0", second)
    assert python == {"base": "v1.0", "commit": first, "count": 0, "files": [], "says": "python only"}
    assert source.refuse_native(python) == first
    other = source.native_changes(mirror, first, upstream("rev-parse", "refs/pull/7/head"))
    assert other["says"] == "1 native file: csrc/k.cu" and other["files"] == ["csrc/k.cu"] and other["count"] == 1


def test_many_native_files_are_counted_and_the_first_are_named(upstream, env):
    for number in range(120):
        (upstream.folder / "csrc" / ("%03d.cu" % number)).write_text("x\n")
    upstream("add", "-A")
    upstream("commit", "-qm", "kernels")
    found = source.native_changes(source.Git(upstream.path, env, print), "v1.0", upstream("rev-parse", "HEAD"))
    assert found["count"] == 120 and len(found["files"]) == 100
    assert found["says"].startswith("120 native files: csrc/000.cu, ") and found["says"].endswith(" and 112 more")


# ---------------------------------------------------------------- commits required
def test_what_the_pin_descends_from_is_found_by_any_name(tmp_path, upstream, env):
    first, second = upstream("rev-parse", "v1.0"), upstream("rev-parse", "main")
    _commit, mirror, _log = build(tmp_path, upstream, env, second)
    wanted = [first, first[:9], "v1.0", "refs/tags/v1.0", "main", second]
    found = source.required_commits(mirror, second, wanted)
    assert [item["ref"] for item in found] == wanted
    assert [item["commit"] for item in found] == [first, first, first, first, second, second]
    assert source.required_commits(mirror, second, []) == []


@pytest.mark.parametrize("name", ["main", "refs/pull/7/head", "pull/7/head"])
def test_what_the_pin_does_not_contain_is_named(tmp_path, upstream, env, name):
    pin = upstream("rev-parse", "v1.0")
    commit = upstream("rev-parse", "main" if name == "main" else "refs/pull/7/head")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin)
    with pytest.raises(DflashError) as caught:
        source.required_commits(mirror, pin, ["v1.0", name])
    assert "%s does not contain the required commit %s (%s)" % (pin, name, commit) in str(caught.value)
    assert caught.value.where == "vllm_source_requires_commits"


def test_a_pull_request_that_was_merged_is_an_ancestor(tmp_path, upstream, env):
    upstream("merge", "-q", "-m", "merge", "refs/pull/7/head")
    pin = upstream("rev-parse", "HEAD")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin)
    assert source.required_commits(mirror, pin, ["refs/pull/7/head"])[0]["commit"] == upstream("rev-parse", "HEAD^2")


def test_a_change_that_was_picked_is_no_ancestor(tmp_path, upstream, env):
    """Ancestry is about commits: the same change under another SHA is not the commit."""
    upstream("cherry-pick", "refs/pull/7/head")
    pin = upstream("rev-parse", "HEAD")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin)
    with pytest.raises(DflashError, match="capability checks"):
        source.required_commits(mirror, pin, ["refs/pull/7/head"])


@pytest.mark.parametrize("name", ["d" * 40, "ddddddd", "v9.9", "refs/pull/99/head", "refs/tags/none"])
def test_an_unknown_object_says_so(tmp_path, upstream, env, name):
    pin = upstream("rev-parse", "main")
    _commit, mirror, _log = build(tmp_path, upstream, env, pin)
    with pytest.raises(DflashError) as caught:
        source.required_commits(mirror, pin, [name])
    assert "does not know the required commit %s" % name in str(caught.value)


@pytest.mark.parametrize("name", ["--output=x", "v1.0..main", "main^{tree}", "main~1", "a b", ""])
def test_an_expression_is_no_commit(tmp_path, upstream, env, name):
    with pytest.raises(DflashError, match="cannot name a commit"):
        source.required_commits(source.Git(upstream.path, env, print), upstream("rev-parse", "main"), [name])
