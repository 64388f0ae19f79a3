# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Names of builds as they occur: which agree, which do not, and the one sentence for each disagreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import checks, identity, record

#: The published case: a fork's branch, installed from git by a tool that cloned no tags.
SEED = "0.1.dev16016+g3cfc8f8b7"
SEED_COMMIT = "3cfc8f8b7" + "5" * 31
RELEASE = "f98b2747f" + "0" * 31


def installed(
    site: Path,
    version: str | None = None,
    package: str | None = None,
    commit: str | None = None,
    url: dict[str, Any] | None = None,
    tag: str | None = None,
    field: bool = True,
) -> dict[str, Any]:
    """Write what an installer leaves, and read it as the modules do."""
    (site / "vllm").mkdir()
    if package is not None:
        line = f"__commit_id__ = commit_id = {commit!r}\n" if field else ""
        (site / "vllm" / "_version.py").write_text(f"__version__ = version = {package!r}\n{line}")
    if version is None:
        return identity.of_tree(str(site))
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n" + (f"Build: {tag}\n" if tag else ""))
    if url:
        (info / "direct_url.json").write_text(json.dumps(url))
    return identity.of_site(str(site), record.distributions(str(site))[0])


def git(commit: str) -> dict[str, Any]:
    return {"url": "https://example.org/vllm.git", "vcs_info": {"vcs": "git", "commit_id": commit}}


def manifest(commit: str, version: str, package: str = "", **more: Any) -> dict[str, Any]:
    return {"commit": commit, "version": version, "package_version": package or version, **more}


SEED_BUILD = manifest(SEED_COMMIT, SEED)
CASES: list[tuple[str, dict[str, Any], dict[str, Any] | None, tuple[str, str | None], tuple[str, Any]]] = [
    # what it is; what is installed; manifest; (commit status, because); (version status, because or told)
    (
        "the seed's version, as pip says it",
        {"version": SEED, "package": SEED, "commit": "g3cfc8f8b7", "url": git(SEED_COMMIT)},
        SEED_BUILD,
        ("pass", None),
        ("pass", ["no_tags"]),
    ),
    (
        "the seed's version where another commit of the fork was pinned",
        {"version": SEED, "package": SEED, "commit": "g3cfc8f8b7"},
        manifest("a" * 40, "0.1.dev16020+gaaaaaaaaa"),
        ("fail", "other_commit"),
        ("fail", "other_build"),
    ),
    (
        "the seed's version, and a cached wheel of another commit inside",
        {"version": SEED, "package": SEED, "commit": "g3cfc8f8b7", "url": git("b" * 40)},
        SEED_BUILD,
        ("fail", "origin_and_commit_id"),
        ("pass", ["no_tags"]),
    ),
    (
        "the seed's metadata over the files of an older installation",
        {"version": SEED, "package": "0.20.1", "commit": "gf98b2747f"},
        SEED_BUILD,
        ("fail", "version_and_commit_id"),
        ("fail", "mixed"),
    ),
    (
        "a suffix in the metadata only",
        {"version": "0.20.2.dev1+gc3575f5b5.cu132", "package": "0.20.2.dev1+gc3575f5b5", "commit": "gc3575f5b5"},
        manifest("c3575f5b5" + "0" * 31, "0.20.2.dev1+gc3575f5b5.cu132", "0.20.2.dev1+gc3575f5b5"),
        ("pass", None),
        ("pass", ["suffix_in_metadata"]),
    ),
    (
        "the same source for another toolkit",
        {"version": "0.20.2.dev1+gc3575f5b5.cu129", "package": "0.20.2.dev1+gc3575f5b5", "commit": "gc3575f5b5"},
        manifest("c3575f5b5" + "0" * 31, "0.20.2.dev1+gc3575f5b5.cu132", "0.20.2.dev1+gc3575f5b5"),
        ("pass", None),
        ("fail", "suffix"),
    ),
    (
        "a dirty tree at the tag",
        {
            "version": "0.20.2.dev0+gf98b2747f.d20260504",
            "package": "0.20.2.dev0+gf98b2747f.d20260504",
            "commit": "gf98b2747f",
        },
        manifest(RELEASE, "0.20.1"),
        ("fail", "dirty"),
        ("fail", "other_build"),
    ),
    (
        "at a tag the version has no hash, and the file has",
        {"version": "0.20.1", "package": "0.20.1", "commit": "gf98b2747f"},
        manifest(RELEASE, "0.20.1"),
        ("pass", None),
        ("pass", None),
    ),
    (
        "at a tag, nothing names the commit",
        {"version": "0.20.1", "package": "0.20.1", "commit": None},
        manifest(RELEASE, "0.20.1"),
        ("unknown", "no_commit"),
        ("pass", None),
    ),
    (
        "a tag of the fork is nearer than the release",
        {"version": "7.1.1.dev4+gc3575f5b5", "package": "7.1.1.dev4+gc3575f5b5", "commit": "gc3575f5b5"},
        manifest("c3575f5b5" + "0" * 31, "7.1.1.dev4+gc3575f5b5", nearest={"nearest": "v0.20.1", "ahead": 9}),
        ("pass", None),
        ("pass", ["foreign_tag"]),
    ),
    (
        "the release's own tag is the nearest",
        {"version": "0.20.2.dev4+gc3575f5b5", "package": "0.20.2.dev4+gc3575f5b5", "commit": "gc3575f5b5"},
        manifest("c3575f5b5" + "0" * 31, "0.20.2.dev4+gc3575f5b5", nearest={"nearest": "v0.20.1", "ahead": 4}),
        ("pass", None),
        ("pass", None),
    ),
    (
        "a wheel with a build tag, of the same number and another commit",
        {"version": "0.20.1", "package": "0.20.1", "commit": "gc3575f5b5", "tag": "1"},
        manifest(RELEASE, "0.20.1"),
        ("fail", "same_number"),
        ("pass", None),
    ),
    (
        "a pretended number",
        {"version": "0.20.1", "package": "0.20.1", "commit": None},
        manifest(RELEASE, "0.20.2.dev1+gf98b2747f"),
        ("unknown", "no_commit"),
        ("fail", "pretend"),
    ),
    (
        "a pretended number with a hash that is the right one",
        {"version": "0.20.1+gf98b2747f", "package": "0.20.1+gf98b2747f", "commit": None},
        manifest(RELEASE, "0.20.1+gf98b2747f"),
        ("unknown", "given_hash"),
        ("pass", None),
    ),
    (
        "a pretended number with a hash that is another",
        {"version": "0.20.1+gc3575f5b5", "package": "0.20.1+gc3575f5b5", "commit": None},
        manifest(RELEASE, "0.20.1+gc3575f5b5"),
        ("fail", "given_hash"),
        ("pass", None),
    ),
    (
        "a tool of before the field: the hash is in the version",
        {"version": SEED, "package": SEED, "field": False},
        SEED_BUILD,
        ("pass", None),
        ("pass", ["no_tags"]),
    ),
    (
        "a version that names one commit, a file that names another",
        {"version": SEED, "package": SEED, "commit": "gc3575f5b5"},
        SEED_BUILD,
        ("fail", "version_and_commit_id"),
        ("pass", ["no_tags"]),
    ),
    (
        "no version file",
        {"version": SEED, "url": git(SEED_COMMIT)},
        SEED_BUILD,
        ("pass", None),
        ("fail", "no_version_file"),
    ),
    (
        "six digits name too many commits",
        {"version": "0.20.1", "package": "0.20.1", "commit": "gf98b27"},
        manifest(RELEASE, "0.20.1"),
        ("unknown", "no_commit"),
        ("pass", None),
    ),
]


@pytest.mark.parametrize("what, made, build, commit, version", CASES, ids=[case[0] for case in CASES])
def test_each_disagreement_has_its_own_sentence(
    tmp_path: Path,
    what: str,
    made: dict[str, Any],
    build: dict[str, Any] | None,
    commit: tuple[str, str | None],
    version: tuple[str, Any],
) -> None:
    found = identity.judge(installed(tmp_path, **made), build)
    said = [(item["status"], item["evidence"].get("because")) for item in found]
    assert said[0] == commit
    told = found[1]["evidence"].get("told")
    assert (found[1]["status"], said[1][1] or (list(told) if told else None)) == version
    for item, (status, word) in zip(found, (commit, version), strict=True):
        if status in ("fail", "unknown"):
            assert item["hint"] == identity.WHY[word]
            assert identity.WHY[word] in checks.sentence(item)


def test_every_sentence_is_used_and_no_two_are_alike(tmp_path: Path) -> None:
    used = {case[3][1] for case in CASES} | {
        word for case in CASES if isinstance(case[4][1], list) for word in case[4][1]
    }
    used |= {case[4][1] for case in CASES if isinstance(case[4][1], str)}
    # The rest has tests of its own below.
    assert set(identity.WHY) - used == {"head_moved", "by_wheel"}
    assert len(set(identity.WHY.values())) == len(identity.WHY)


def test_a_clone_that_moved_on_after_its_build(tmp_path: Path) -> None:
    said = installed(tmp_path, package="0.20.2.dev1+gc3575f5b5", commit="gc3575f5b5")
    found = identity.judge({**said, "head": "d" * 40})[0]
    assert (found["status"], found["evidence"]["because"], found["expected"]) == ("fail", "head_moved", "d" * 40)


def test_the_wheels_hash_names_a_commit_that_the_version_does_not(tmp_path: Path) -> None:
    said = installed(tmp_path, version="0.20.1", package="0.20.1", commit=None)
    build = manifest(RELEASE, "0.20.1", wheel={"sha256": "aa"})
    right = identity.judge(said, build, {"wheel_sha256": "aa"})
    assert (right[0]["status"], right[0]["actual"], right[0]["evidence"]["because"]) == ("pass", RELEASE, "by_wheel")
    wrong = identity.judge(said, build, {"wheel_sha256": "bb"})
    assert [item["status"] for item in wrong] == ["unknown", "pass", "fail"]


def test_the_build_tag_is_told(tmp_path: Path) -> None:
    said = installed(tmp_path, version="0.20.1", package="0.20.1", commit="gc3575f5b5", tag="1")
    assert identity.judge(said, manifest(RELEASE, "0.20.1"))[0]["evidence"]["build_tag"] == "1"


def test_a_number_never_decides(tmp_path: Path) -> None:
    """The same commit under any number is that commit; another commit under the same number is not."""
    for index, number in enumerate((SEED, "0.20.1", "7.0", "0.99.1.dev3+g3cfc8f8b7")):
        site = tmp_path / str(index)
        site.mkdir()
        said = installed(site, version=number, package=number, commit="g3cfc8f8b7")
        assert identity.judge(said, {"commit": SEED_COMMIT})[0]["status"] == "pass"
        assert identity.judge(said, {"commit": "a" * 40})[0]["status"] == "fail"
