# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the files, reading them gives the declared result and nothing else."""

from __future__ import annotations

import base64
import hashlib
import struct
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_extensions import elf as small_elf

from ansible_collections.dflash.fleet.plugins.module_utils import (
    binaries,
    checks,
    elf,
    extensions,
    identity,
    load_errors,
    record,
)

FEW = settings(max_examples=150, deadline=None)
PATHS = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/\r\n"), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))
#: Real versions, and what stands near them.
VERSIONS = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\A\d{1,3}(\.\d{1,3}){0,3}(\.dev\d{1,6})?([+.](g[0-9a-f]{3,40}|d\d{8}|cu\d{2,4}|cpu)){0,4}\Z"),
)


def judged(said: dict[str, object], manifest: dict[str, object] | None) -> None:
    for item in identity.judge(said, manifest):
        assert item["status"] in ("pass", "fail", "unknown", "skip")
        assert isinstance(checks.sentence(item), str)


@FEW
@given(
    VERSIONS, st.none() | VERSIONS, st.none() | st.text(max_size=45), VERSIONS, st.text("0123456789abcdef", max_size=40)
)
def test_any_version_gets_one_of_the_four_answers(
    package: str, metadata: str | None, commit: str | None, built: str, pinned: str
) -> None:
    said = {
        "kind": "installed",
        "version": metadata,
        "package_version": package,
        "commit_id": commit,
        "head": None,
        "direct_url": None,
    }
    judged(said, {"commit": pinned, "version": built, "package_version": built, "nearest": {"nearest": built}})
    judged(dict(said, kind="tree"), None)
    assert isinstance(extensions.from_release(package, "cuda"), list)


@FEW
@given(st.from_regex(r"\A[0-9a-f]{40}\Z"), st.integers(7, 40), VERSIONS)
def test_a_commit_is_known_by_its_first_digits_whatever_the_number(commit: str, digits: int, number: str) -> None:
    version = number.partition("+")[0].partition(".d")[0] + "+g" + commit[:digits]
    if identity.DIRTY.search(version) or len(identity.HASH.findall(version)) != 1:
        return
    said = {
        "kind": "installed",
        "version": version,
        "package_version": version,
        "commit_id": "g" + commit[:digits],
        "head": None,
        "direct_url": None,
    }
    other = ("0" if commit[0] != "0" else "1") + commit[1:]
    assert identity.judge(said, {"commit": commit})[0]["status"] == "pass"
    assert identity.judge(said, {"commit": other})[0]["status"] == "fail"


@FEW
@given(st.binary(max_size=300))
def test_any_version_file_is_read_or_says_nothing(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "_version.py").write_bytes(data)
        found = identity.package_version(folder)
    assert set(found) == {"version", "commit_id", "commit_unset"}
    assert all(value is None or isinstance(value, str) for value in (found["version"], found["commit_id"]))


@FEW
@example("a,sha256=AAAA,\u00b2\n".encode())  # a digit that is no number
@example(b"vllm/a\0b,sha256=AAAA,1\n")
@example(b'"vllm/a,sha256=AAAA,1\n')
@example(b"vllm/a,sha256=" + b"\xc3\xa9" * 3 + b",1\n")
@example(b"vllm/a,sha256=A,1\n")
@example(b"vllm/a,md5=A," + b"9" * 5000)
@given(st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_record_is_a_list_or_none(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder, "vllm-1.dist-info")
        info.mkdir()
        (info / "RECORD").write_bytes(data)
        (info / "METADATA").write_bytes(data)
        (info / "WHEEL").write_bytes(data)
        listed = record.entries(folder, info.name)
        assert listed is None or all(isinstance(item, record.Entry) for item in listed)
        wrong = record.verify(folder, info.name)
        assert wrong is None or all(set(item) == {"path", "problem"} for item in wrong)
        assert isinstance(record.paths_below(folder, info.name, "vllm/"), list)
        assert len(record.distributions(folder)) == 1
        assert identity.build_tag(folder, info.name) is None or data


def row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    quoted = '"%s"' % name.replace('"', '""')
    return f"{quoted},sha256={digest},{len(data)}\r\n"


@FEW
@given(st.dictionaries(PATHS, st.binary(max_size=64), min_size=1, max_size=5), st.data())
def test_a_record_knows_its_files_and_every_change(files: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        info = site / "v.dist-info"
        info.mkdir()
        try:
            for name, content in files.items():
                (site / name).write_bytes(content)
        except OSError:  # a name that this file system does not take
            return
        (info / "RECORD").write_text("".join(row(name, content) for name, content in files.items()), newline="")
        assert record.verify(folder, info.name) == []
        victim = data.draw(st.sampled_from(sorted(files)))
        changed = data.draw(st.binary(max_size=64).filter(lambda other: other != files[victim]))
        (site / victim).write_bytes(changed)
        wrong = record.verify(folder, info.name)
        assert wrong is not None and [item["path"] for item in wrong] == [victim]


def read_all(data: bytes) -> elf.Elf:
    with tempfile.NamedTemporaryFile(suffix=".so") as handle:
        handle.write(data)
        handle.flush()
        found = elf.read(handle.name, "x86_64")
        assert isinstance(found, elf.Elf) and isinstance(found.problem, str)
        assert isinstance(elf.undefined(handle.name, "cu"), list)
        archs = elf.architectures(handle.name)
        assert archs is None or all(name.startswith(("sm_", "compute_")) for name in archs)
        place = binaries.Place(toolkits=())
        for item in binaries.examine("/x/vllm", {"vllm._C": handle.name}, [], "cuda", "required", place):
            assert item["status"] in ("pass", "fail", "unknown", "skip")
    return found


@FEW
@given(st.binary(max_size=600))
def test_any_bytes_are_judged_as_a_library(data: bytes) -> None:
    assert read_all(data).problem


@FEW
@given(
    st.binary(max_size=600),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.tuples(*[st.integers(0, 65535)] * 6),
)
def test_any_headers_are_judged(body: bytes, program: int, section: int, counts: tuple[int, ...]) -> None:
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, program, section, 0, *counts)
    read_all(head + body)


@FEW
@given(st.data())
def test_a_library_with_any_bytes_changed_is_judged(data: st.DataObject) -> None:
    whole = bytearray(small_elf())
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(whole))


@FEW
@given(st.integers(0, 600))
def test_a_library_that_ends_early_is_never_whole(keep: int) -> None:
    whole = small_elf()
    assert bool(read_all(whole[:keep]).problem) == (keep < len(whole))


@FEW
@given(st.text(max_size=200))
def test_any_message_has_a_cause(message: str) -> None:
    assert load_errors.classify(message).remedy


@FEW
@given(
    st.lists(st.from_regex(r"\A(GLIBC|GLIBCXX|CXXABI)_\d{1,3}(\.\d{1,3}){0,2}\Z") | st.text(max_size=20), max_size=8)
)
def test_the_newest_version_is_among_those_asked_for(names: list[str]) -> None:
    for family, version in elf.newest(names).items():
        assert f"{family}_{version}" in names
        same = [
            elf.number(name.partition("_")[2])
            for name in names
            if name.startswith(family + "_") and elf.VERSION_NAME.match(name)
        ]
        assert elf.number(version) == max(same)
