# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's commands: damage stays in one release and is what it says; the archive is found on pip's indexes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo"
LOADED = 4000


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


damage, source = load("damage"), load("source")


def elf(loaded: int, size: int) -> bytes:
    """A 64-bit ELF file with one segment that is loaded, one that is not, and debug data behind."""
    header = b"\x7fELF\x02\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 1000, 0, 0, loaded - 1000, 0, 0)
    segments += struct.pack("<IIQQQQQQ", 4, 5, loaded, 0, 0, size, 0, 0)
    return (header + segments).ljust(size, b"x")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A read-only release whose interpreter answers as a CPU with AVX2 would."""
    root = tmp_path / "release"
    site = root / "venv" / "lib" / "python3.11" / "site-packages"
    package = site / "vllm"
    package.mkdir(parents=True)
    (package / "_C_AVX2.abi3.so").write_bytes(elf(LOADED, 20000))
    (package / "_C.abi3.so").write_bytes(elf(LOADED, 20000))
    (package / "sampling_params.py").write_text("# SPDX-License-Identifier: Apache-2.0\nx = 1\n")
    record = site / "vllm-1.dist-info"
    record.mkdir()
    (record / "RECORD").write_text("vllm/sampling_params.py,,\n")
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in *is_avx512*) echo _C_AVX2 ;; *) echo 0.32.1 ;; esac\n')
    python.chmod(0o755)
    for path in sorted(package.rglob("*")) + [package, record]:
        path.chmod(path.stat().st_mode & ~0o222)
    return root


def modes(root: Path) -> dict:
    return {path: path.lstat().st_mode for path in root.rglob("*")}


def test_truncated_so_ends_inside_the_loaded_part_and_spares_its_twin(release: Path, tmp_path: Path, capsys) -> None:
    library = release / "venv/lib/python3.11/site-packages/vllm/_C_AVX2.abi3.so"
    os.link(library, tmp_path / "twin.so")
    before, whole = modes(release), library.read_bytes()
    assert damage.main(["truncated_so", str(release)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(library) and told["import_vllm_answers"] == "0.32.1"
    cut = library.read_bytes()
    assert 0 < len(cut) < LOADED and whole.startswith(cut)
    assert (tmp_path / "twin.so").read_bytes() == whole
    assert library.with_name("_C.abi3.so").read_bytes() == whole
    assert modes(release) == before


def test_flipped_byte_keeps_size_and_time(release: Path) -> None:
    path = release / "venv/lib/python3.11/site-packages/vllm/sampling_params.py"
    before, content = path.stat(), path.read_bytes()
    assert damage.main(["flipped_byte", str(release)]) == 0
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_mode) == (before.st_size, before.st_mtime_ns, before.st_mode)
    assert sum(a != b for a, b in zip(content, path.read_bytes(), strict=True)) == 1


@pytest.mark.parametrize(
    ("name", "gone"), [("missing_so", "vllm/_C_AVX2.abi3.so"), ("no_record", "vllm-1.dist-info/RECORD")]
)
def test_a_file_is_removed(release: Path, name: str, gone: str) -> None:
    before = set(modes(release))
    assert damage.main([name, str(release)]) == 0
    assert before - set(modes(release)) == {release / "venv/lib/python3.11/site-packages" / gone}


def test_what_lies_behind_a_link_is_left_alone(release: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(elf(LOADED, 20000))
    package = release / "venv/lib/python3.11/site-packages/vllm"
    package.chmod(0o755)
    (package / "_C_AVX2.abi3.so").unlink()
    (package / "_C_AVX2.abi3.so").symlink_to(other)
    assert damage.main(["truncated_so", str(release)]) == 1
    assert "lies outside" in capsys.readouterr().err
    assert other.stat().st_size == 20000


def test_nothing_is_damaged_when_the_release_does_not_answer(release: Path) -> None:
    python = release / "venv/bin/python"
    python.write_text("#!/bin/sh\nexit 3\n")
    before = set(modes(release))
    assert damage.main(["no_record", str(release)]) == 1
    assert set(modes(release)) == before


def test_indexes_come_from_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"text": ""}
    shown = "  -i, --index-url <url>  Base URL (default\n     https://default.invalid/simple). More\n"
    monkeypatch.setattr(source, "pip_output", lambda *args: config["text"] if args[0] == "config" else shown)
    assert source.indexes() == ["https://default.invalid/simple"]
    config["text"] = (
        "global.index-url='https://one.invalid/simple/'\nglobal.extra-index-url='file:///a\\nfile:///b'\n"
    )
    assert source.indexes() == ["https://one.invalid/simple", "file:///a", "file:///b"]
    config["text"] += ":env:.index-url='https://env.invalid/simple'\n"
    assert source.indexes()[0] == "https://env.invalid/simple"


def test_archive_is_found_on_an_index_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    page = f'<a href="../../files/{source.ARCHIVE}#sha256=00">a</a><a href="x/vllm-0.31.0.tar.gz">b</a>'
    (folder / "index.html").write_text(page)
    assert [link.rsplit("/", 2)[1:] for link in source.archive_links(tmp_path.as_uri())] == [["files", source.ARCHIVE]]


def test_archive_with_other_bytes_is_refused(tmp_path: Path, capsys) -> None:
    archive = tmp_path / source.ARCHIVE
    archive.write_bytes(b"other")
    assert source.main([str(tmp_path / "repo.git"), "--archive", str(archive)]) == 1
    assert source.ARCHIVE_SHA256 in capsys.readouterr().err
    assert not (tmp_path / "repo.git").exists()


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path, capsys) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "letter").write_text("dear")
    assert source.main([str(target)]) == 1
    assert "remove it, or name another folder" in capsys.readouterr().err
    assert (target / "letter").read_text() == "dear"


def test_an_archive_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo(f"vllm-{source.VERSION}/a")
        link.type, link.linkname = tarfile.SYMTYPE, "../../outside"
        tar.addfile(link)
    with pytest.raises(source.DemoError, match="points outside"):
        source.unpack(archive, tmp_path / "out")


def touched(path: Path) -> set:
    return set(re.findall(r"^diff --git a/(\S+) b/", path.read_text(), flags=re.MULTILINE))


def test_patches_are_mails_that_say_why_and_breaks_keep_to_themselves() -> None:
    series, breaks = sorted((DEMO / "series").glob("*.patch")), sorted((DEMO / "breaks").glob("*.patch"))
    assert [path.name[:5] for path in series] == ["0001-", "0002-"]
    assert [path.name for path in breaks] == ["layer_offset.patch", "truncated_so.patch"]
    for path in series + breaks:
        head, _, _ = path.read_text().partition("\n---\n")
        assert head.startswith("From ") and "\nSubject: [PATCH" in head
        assert len(head.split("\n\n", 1)[1]) > 200, f"{path.name} does not say why"
    others = set().union(*(touched(path) for path in series + breaks[:1]))
    assert not touched(breaks[1]) & others
    changed = [line for line in breaks[1].read_text().splitlines() if re.match(r"[+-](?![+-])", line)]
    assert changed and all(line.startswith("+#") for line in changed)
    moved = [line for line in breaks[0].read_text().splitlines() if re.match(r"[+-](?![+-])", line)]
    assert [moved[0][1:].replace("i + 1 for", "i for")] == [moved[1][1:]] and len(moved) == 2
