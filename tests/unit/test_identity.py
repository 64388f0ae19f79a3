# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Which installations are the build that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import identity

COMMIT = "22b257388" + "0" * 31
INSTALLED = {
    "kind": "installed",
    "distribution": "vllm",
    "version": "0.32.1.dev2+g22b257388.cpu",
    "package_version": "0.32.1.dev2+g22b257388",
    "commit_id": "g22b257388",
    "head": None,
    "direct_url": None,
}
MANIFEST = {
    "commit": COMMIT,
    "version": "0.32.1.dev2+g22b257388.cpu",
    "package_version": "0.32.1.dev2+g22b257388",
    "wheel": {"sha256": "aa"},
}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("as built", {}, {}, "pass", "pass"),
    ("other commit", {"commit_id": "gffffffff0", "version": None, "package_version": "0.32.1"},
     {"version": None, "package_version": None}, "fail", "pass"),
    ("commit in the version only", {"commit_id": None}, {}, "pass", "pass"),
    ("a version that was given", {"commit_id": None, "commit_unset": True}, {}, "unknown", "pass"),
    (
        "commit of the origin",
        {"commit_id": None, "direct_url": {"vcs_info": {"commit_id": COMMIT}}},
        {},
        "pass",
        "pass",
    ),
    ("origin is another", {"direct_url": {"vcs_info": {"commit_id": "f" * 40}}}, {}, "fail", "pass"),
    (
        "uncommitted changes",
        {"version": "0.32.1.dev2+g22b257388.d20261130.cpu", "package_version": "0.32.1.dev2+g22b257388.d20261130"},
        {},
        "fail",
        "fail",
    ),
    ("two installations mixed", {"package_version": "0.33.0"}, {}, "pass", "fail"),
    (
        "longer by chance",
        {"version": "0.32.10", "package_version": "0.32.1"},
        {"version": "0.32.10", "package_version": "0.32.1"},
        "pass",
        "fail",
    ),
    ("another version than built", {"version": "0.32.1.dev2+g22b257388.cu132"}, {}, "pass", "fail"),
    ("no version file", {"package_version": None}, {}, "pass", "fail"),
    ("nothing to compare with", {}, {"commit": None, "version": None, "package_version": None}, "pass", "pass"),
]


@pytest.mark.parametrize("said, manifest, commit, version", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_identity(said: dict[str, Any], manifest: dict[str, Any], commit: str, version: str) -> None:
    found = identity.judge({**INSTALLED, **said}, {**MANIFEST, **manifest})
    assert [item["id"] for item in found] == ["identity.commit", "identity.version"]
    assert [item["status"] for item in found] == [commit, version]


@pytest.mark.parametrize(
    "manifest, release, status",
    [
        (MANIFEST, {"wheel_sha256": "aa"}, "pass"),
        (MANIFEST, {"wheel_sha256": "bb"}, "fail"),
        (MANIFEST, {}, "fail"),
        (None, {"wheel_sha256": "aa"}, "skip"),
    ],
)
def test_the_wheel_of_a_release(manifest: Any, release: dict[str, str], status: str) -> None:
    assert identity.judge(INSTALLED, manifest, release)[2]["status"] == status


def test_a_version_file_is_read_not_run(tmp_path: Path) -> None:
    (tmp_path / "_version.py").write_text(
        "version: str\n__version__ = version = '0.32.0'\n__commit_id__ = commit_id = None\nraise SystemExit\n"
    )
    assert identity.package_version(str(tmp_path)) == {
        "version": "0.32.0", "commit_id": None, "commit_unset": True,
    }
    assert identity.package_version(str(tmp_path / "nowhere")) == {
        "version": None, "commit_id": None, "commit_unset": False,
    }


def test_head_of_a_clone_is_read_from_its_files(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    git.mkdir()
    assert identity.git_head(str(tmp_path)) is None
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n%s refs/heads/main\n" % COMMIT)
    assert identity.git_head(str(tmp_path)) == COMMIT
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert identity.git_head(str(tmp_path)) == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert identity.git_head(str(tmp_path)) == "c" * 40


def test_a_clone_that_was_never_built_is_its_head(tmp_path: Path) -> None:
    said = {**INSTALLED, "kind": "tree", "version": None, "package_version": None, "commit_id": None, "head": COMMIT}
    commit, version = identity.judge(said, {"commit": COMMIT})
    assert (commit["status"], version["status"], version["level"]) == ("pass", "skip", "advisory")
    assert identity.judge(said, {"commit": "f" * 40})[0]["status"] == "fail"
