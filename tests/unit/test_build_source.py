# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The build job's first step on a real repository: the checkout, what is native, and what the pin must contain."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import build_job
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

NAMES = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")


@pytest.fixture
def upstream(tmp_path):
    """v1.0, a Python change on main, and a native change on the branch kernel."""
    path = tmp_path / "upstream"
    (path / "csrc").mkdir(parents=True)

    def git(*words: str) -> str:
        env = {**os.environ, **dict.fromkeys(NAMES, "a@x")}
        done = subprocess.run(["git", *words], cwd=path, env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    for name, text in (("a.py", "one\n"), ("csrc/k.cu", "kernel\n"), ("setup.py", "setup()\n")):
        (path / name).write_text(text)
    git("add", "-A")
    git("commit", "-qm", "first")
    git("tag", "v1.0")
    git("checkout", "-qb", "kernel")
    (path / "csrc" / "k.cu").write_text("other\n")
    git("commit", "-qam", "kernel")
    git("checkout", "-q", "main")
    (path / "a.py").write_text("two\n")
    git("commit", "-qam", "second")
    git.path = str(path)  # type: ignore[attr-defined]
    return git


def source_step(tmp_path: Any, upstream: Any, ref: str, **spec: Any) -> dict[str, Any]:
    """The facts that the step leaves for later ones and for the manifest."""
    folder = tmp_path / "build"
    folder.mkdir()
    orders = {
        "build_id": "0" * 16, "root": str(tmp_path), "series": [], "pip_config": "",
        "git_config": "[safe]\n\tdirectory = *\n", "environment": {}, "cache": str(tmp_path / "cache"),
        "tool": str(tmp_path / "tool"), "origin": {"repo": "file://" + upstream.path, "ref": ref, "python": "python3"},
        "spec": {"pin": upstream("rev-parse", ref), "series": [], "mode": "source", "precompiled": None, **spec},
    }
    (folder / "job.json").write_text(json.dumps(orders))
    job = build_job.Job(str(folder))
    try:
        job.step_source()
    finally:
        job.log.close()
    return dict(job.done["source"])


def test_without_a_wheel_the_nearest_release_is_what_the_difference_is_told_from(tmp_path, upstream):
    found = source_step(tmp_path, upstream, "main")
    assert found["native"] == {
        "base": "v1.0", "commit": upstream("rev-parse", "v1.0"), "count": 0, "files": [], "says": "python only",
    }
    assert found["base_commit"] == "" and found["required"] == []


def test_a_native_change_is_a_fact_in_a_build_from_source(tmp_path, upstream):
    assert source_step(tmp_path, upstream, "kernel")["native"]["says"] == "1 native file: csrc/k.cu"


def test_with_a_wheel_its_declared_base_is_what_the_difference_is_told_from(tmp_path, upstream):
    found = source_step(tmp_path, upstream, "main", precompiled={"requirement": "w==1", "base": "v1.0"})
    assert found["base_commit"] == upstream("rev-parse", "v1.0") and found["native"]["says"] == "python only"


def test_a_native_change_refuses_a_wheel(tmp_path, upstream):
    with pytest.raises(DflashError, match="native files changed since: csrc"):
        source_step(tmp_path, upstream, "kernel", precompiled={"requirement": "w==1", "base": "v1.0"})


def test_a_wheel_that_names_its_base_itself_is_asked_later(tmp_path, upstream):
    found = source_step(tmp_path, upstream, "main", precompiled={"requirement": "w==1", "base": ""})
    assert (found["native"], found["base_commit"]) == (None, "")


def test_required_commits_are_kept_with_what_they_meant(tmp_path, upstream):
    found = source_step(tmp_path, upstream, "main", requires_commits=["v1.0"])
    assert found["required"] == [{"ref": "v1.0", "commit": upstream("rev-parse", "v1.0")}]


def test_a_missing_commit_ends_the_build_before_anything_is_checked_out(tmp_path, upstream):
    with pytest.raises(DflashError, match="does not contain the required commit kernel"):
        source_step(tmp_path, upstream, "main", requires_commits=["v1.0", "kernel"])
    assert not (tmp_path / "build" / "src").exists()
