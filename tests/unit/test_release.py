# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Layers and releases: whole, absent, unfinished, damaged; and what happens to each."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import accounts, ids, release
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.native import record_row

LOCK = "attrs==1 --hash=sha256:%s\n" % ("0" * 64)


def fake_site(folder, files):
    """A venv folder with a vllm distribution of these files, as an installer leaves it."""
    site = os.path.join(folder, "venv", "lib", "python3.11", "site-packages")
    rows = []
    for name, data in files.items():
        path = os.path.join(site, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as handle:
            handle.write(data)
        rows.append(",".join(record_row(name, hashlib.sha256(data).digest(), len(data))))
    with open(os.path.join(site, "vllm-1.dist-info", "RECORD"), "w") as handle:
        handle.write("\n".join([*rows, "vllm-1.dist-info/RECORD,,"]) + "\n")


FILES = {
    "vllm/__init__.py": b"",
    "vllm/_C.abi3.so": b"binary" * 99,
    "vllm-1.dist-info/METADATA": b"Name: vllm\nVersion: 1\n",
}


@pytest.fixture
def installer(tmp_path):
    made = release.Installer(str(tmp_path), accounts.caller(), sys.executable, {"HOME": str(tmp_path)})
    made.prepare()
    return made


RELEASE, WHEEL = "a" * 16, "d" * 64


def install(installer, files=FILES, name=RELEASE, fill=None, must=None):
    manifest = {
        "schema": 1, "kind": "release", "release_id": name, "wheel_sha256": WHEEL, "build_id": "b" * 16,
        "layer_id": "1" * 16, "requirements_spec": "", "commit": "c" * 40, "version": "1.0",
    }
    return installer.install(
        "release", name, fill or (lambda folder: fake_site(folder, files)), manifest, must or {"wheel_sha256": WHEEL}
    )


def place(installer, name="vllm/_C.abi3.so"):
    return os.path.join(installer.root, "releases", RELEASE, "venv", "lib", "python3.11", "site-packages", name)


def damage_truncate(path):
    replace(path, Path(path).read_bytes()[:100])


def damage_flip_with_time_kept(path):
    info = os.stat(path)
    os.chmod(path, 0o600)
    with open(path, "r+b") as handle:
        handle.seek(10)
        handle.write(b"X")
    os.chmod(path, stat.S_IMODE(info.st_mode))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def damage_remove(path):
    replace(path, None)


def replace(path, data):
    folder = os.path.dirname(path)
    os.chmod(folder, 0o700)
    os.unlink(path)
    if data is not None:
        with open(path, "wb") as handle:
            handle.write(data)
    os.chmod(folder, 0o555)


def test_installed_once_then_left_alone(installer):
    assert install(installer)["changed"] is True
    before = os.stat(place(installer)).st_ino
    assert install(installer) == {"changed": False, "repaired": "", "seconds": 0.0, "bytes": 0}
    assert os.stat(place(installer)).st_ino == before


def test_what_is_installed_is_read_only(installer):
    install(installer)
    for base, folders, files in os.walk(os.path.join(installer.root, "releases", RELEASE)):
        for name in [*folders, *files]:
            assert os.lstat(os.path.join(base, name)).st_mode & 0o222 == 0, name


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip_with_time_kept, damage_remove])
def test_a_damaged_one_is_installed_anew_under_the_same_id(installer, damage):
    install(installer)
    damage(place(installer))
    folder = os.path.join(installer.root, "releases", RELEASE)
    assert release.examine(folder, "release", RELEASE).startswith("damaged")
    done = install(installer)
    assert done["changed"] is True
    assert done["repaired"].startswith("damaged")
    assert Path(place(installer)).read_bytes() == FILES["vllm/_C.abi3.so"]
    assert release.examine(folder, "release", RELEASE) == "whole"


def test_an_added_file_is_damage_too(installer):
    install(installer)
    folder = os.path.dirname(place(installer))
    os.chmod(folder, 0o700)
    open(os.path.join(folder, "evil.py"), "w").close()
    assert install(installer)["repaired"].startswith("damaged")


def test_another_wheel_under_the_same_id_is_never_taken(installer):
    install(installer)
    assert install(installer, must={"wheel_sha256": "other"})["changed"] is True


def test_an_interrupted_installation_counts_as_nothing(installer):
    def killed(folder):
        fake_site(folder, FILES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(installer, fill=killed)
    folder = os.path.join(installer.root, "releases", RELEASE)
    assert release.examine(folder, "release", RELEASE) == "unfinished"
    done = install(installer)
    assert (done["changed"], done["repaired"]) == (True, "")
    install(installer)
    assert [name for name in os.listdir(os.path.dirname(folder)) if release.ASIDE in name] == []


def test_a_file_that_differs_from_its_record_is_refused(installer):
    def cut(folder):
        fake_site(folder, FILES)
        path = os.path.join(folder, "venv", "lib", "python3.11", "site-packages", "vllm", "_C.abi3.so")
        with open(path, "r+b") as handle:
            handle.truncate(50)

    with pytest.raises(DflashError) as caught:
        install(installer, fill=cut)
    assert "vllm/_C.abi3.so" in str(caught.value)
    assert not os.path.exists(os.path.join(installer.root, "releases", RELEASE, "manifest.json"))


BUILD = {
    "build_id": "b",
    "python": "3.11.2",
    "requirements_sha256": hashlib.sha256(LOCK.encode()).hexdigest(),
    "wheel": {"name": "w.whl", "sha256": "5" * 64, "size": 1},
    "commit": "c" * 40,
    "version": "1",
}


def test_a_lock_or_wheel_that_is_not_the_builds_own_is_refused(tmp_path):
    release.check_lock(BUILD, LOCK)
    with pytest.raises(DflashError):
        release.check_lock(BUILD, LOCK + "more==1 --hash=sha256:%s\n" % ("1" * 64))
    wheel = tmp_path / "w.whl"
    wheel.write_bytes(b"x")
    with pytest.raises(DflashError) as caught:
        release.check_wheel(BUILD, str(wheel))
    assert "not the one that was built" in str(caught.value)
    with pytest.raises(DflashError):
        release.check_wheel(BUILD, str(tmp_path / "none.whl"))


def test_another_python_is_refused_and_ids_follow_the_hosts_python(tmp_path):
    with pytest.raises(DflashError) as caught:
        release.present(
            str(tmp_path),
            "nobody",
            dict(BUILD, python="3.99.0"),
            LOCK,
            "/usr/bin/python3",
            "/w",
            "",
            os.environ,
            dry=True,
        )
    assert "built for 3.99.0" in str(caught.value)
    names = release.names(BUILD, LOCK, "3.11.9")
    assert names["layer_id"] == ids.layer_id(LOCK, "3.11.9") != ids.layer_id(LOCK, "3.11.2")
    assert names["release_id"] == ids.release_id("b", names["layer_id"])


def test_the_manifest_is_written_last(installer, monkeypatch):
    written = []
    keep = release.write_json
    monkeypatch.setattr(
        release, "write_json", lambda path, *rest: (written.append(os.path.basename(path)), keep(path, *rest))
    )
    install(installer)
    assert written == ["stat.json", "manifest.json"]
    folder = os.path.join(installer.root, "releases", RELEASE)
    with open(os.path.join(folder, "manifest.json")) as handle:
        assert json.load(handle)["distributions"] == [{"name": "vllm", "version": "1"}]
