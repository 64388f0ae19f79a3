# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What the launcher makes of its files, and that it stands alone on a host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import launcher, process


def test_env_file_is_taken_as_it_is() -> None:
    text = "# secret\n\nA=b=c d \"e\" $F\nB=\n VLLM_API_KEY=x\n"
    assert launcher.parse_env_file(text) == {"A": 'b=c d "e" $F', "B": "", "VLLM_API_KEY": "x"}
    for bad in ("no equals", "A-B=1", "=1"):
        with pytest.raises(ValueError, match="line 1 is not NAME=value"):
            launcher.parse_env_file(bad)


def test_env_file_must_be_closed(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("A=1\n")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ValueError, match="0600"):
            launcher.read_env_file(str(path))
    path.chmod(0o600)
    assert launcher.read_env_file(str(path)) == {"A": "1"}


def test_command(tmp_path: Path) -> None:
    argv_json = {
        "argv": ["/r/vllm", "serve", "--config", "@DEPLOYMENT@/serve.yaml"],
        "env": {"A": "@DEPLOYMENT@", "TZ": "UTC"}, "env_file": str(tmp_path / "none"),
    }
    argv, env = launcher.command(argv_json, "/d", {"TZ": "CET", "NVIDIA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "x"})
    assert argv == ["/r/vllm", "serve", "--config", "/d/serve.yaml"]
    assert env == {"A": "/d", "TZ": "UTC", "NVIDIA_VISIBLE_DEVICES": "0"}
    with pytest.raises(ValueError, match="would serve anybody"):
        launcher.command({**argv_json, "api_key_file": "/etc/key"}, "/d", {})


def test_record_is_written_into_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("x" * 500)
    inode = path.stat().st_ino
    launcher.write_in_place(str(path), {"pid": 1})
    assert path.read_text() == '{"pid": 1}\n'
    assert path.stat().st_ino == inode
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        launcher.write_in_place(str(link), {"pid": 1})


def test_it_stands_alone(tmp_path: Path) -> None:
    instance = tmp_path / "instances" / "main"
    (instance / "run" / "left").mkdir(parents=True)
    for module in (launcher, process):
        shutil.copy(str(module.__file__), instance)
    env = {"PATH": "/usr/bin:/bin"}
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    left = subprocess.Popen(sleep, env={"DFLASH_INSTANCE": str(instance)})
    try:
        command = [sys.executable, "-I", str(instance / "launcher.py")]
        done = subprocess.run([*command, "--clean", str(instance)], env=env, capture_output=True, text=True, cwd="/")
        assert (done.returncode, done.stderr) == (0, "")
        assert '"ended": 1' in done.stdout
        assert left.wait(5) == -15
        assert os.listdir(instance / "run") == []
        done = subprocess.run([*command, str(instance / "deployments" / "x")], env=env, capture_output=True, text=True)
        assert done.returncode == 3
        assert "dflash launcher cannot start" in done.stderr
        assert "Traceback" not in done.stderr
        for wrong in ([], ["--what"], ["a", "b"]):
            done = subprocess.run([*command, *wrong], env=env, capture_output=True, text=True)
            assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)
    finally:
        left.kill()
        left.wait()


def test_a_broken_argv_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "instances" / "main" / "deployments" / "d"
    folder.mkdir(parents=True)
    (folder / "argv.json").write_text("{")
    assert launcher.main([str(folder)]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
