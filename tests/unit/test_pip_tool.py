# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A build account has its own home, and still reaches servers as the caller does."""

from __future__ import annotations

import configparser
import os
import subprocess
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import pip_tool
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


def test_the_environment_that_says_how_to_reach_servers_is_passed_on():
    given = {
        "PIP_INDEX_URL": "i",
        "PIP_FIND_LINKS": "/w",
        "SSL_CERT_FILE": "c",
        "https_proxy": "p",
        "PIP_TARGET": "t",
        "PIP_CONFIG_FILE": "f",
        "HOME": "/root",
        "AWS_SECRET": "s",
        "VLLM_VERSION_OVERRIDE": "1",
        "PYTHONPATH": "x",
    }
    passed = pip_tool.passed_environment(given)
    assert passed == {"PIP_INDEX_URL": "i", "PIP_FIND_LINKS": "/w", "SSL_CERT_FILE": "c", "https_proxy": "p"}
    env = pip_tool.environment("/h", "/c", passed)
    assert env["HOME"] == "/h" and env["PIP_CACHE_DIR"] == "/c" and env["PIP_INDEX_URL"] == "i"


def test_the_callers_own_pip_files_are_merged(tmp_path):
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    (tmp_path / ".pip" / "pip.conf").write_text("[global]\nindex-url = old\ntimeout = 9\n")
    (tmp_path / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = new\nextra-index-url =\n  one\n  two\n[install]\ntarget = /x\n"
    )
    text = pip_tool.user_pip_config({"HOME": str(tmp_path)})
    read = configparser.RawConfigParser()
    read.read_string(text)
    assert read["global"]["index-url"] == "new"
    assert read["global"]["timeout"] == "9"
    assert read["global"]["extra-index-url"].split() == ["one", "two"]
    assert not read.has_option("install", "target")
    assert pip_tool.user_pip_config({"HOME": str(tmp_path / "none")}) == ""


def test_git_settings_come_along_without_logins(tmp_path):
    (tmp_path / ".gitconfig").write_text(
        "[user]\n\tname = me\n[http]\n\tproxy = http://proxy:1\n\textraheader = secret\n"
        '[http "https://a.b/"]\n\tsslCAInfo = "/c a"\n'
        '[url "https://mirror/"]\n\tinsteadOf = https://up/\n[url "https://me:secret@x/"]\n\tinsteadOf = https://y/\n'
        '[http "https://z/"]\n\tproxy = http://me:secret@proxy\n'
    )
    text = pip_tool.user_git_config({"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert "secret" not in text and "me" not in text.replace("name", "")
    (tmp_path / "out").write_text(text)
    listed = subprocess.run(
        ["git", "config", "-f", str(tmp_path / "out"), "--list"], capture_output=True, text=True, check=True
    )
    assert sorted(listed.stdout.split("\n")[:-1]) == [
        "http.https://a.b/.sslcainfo=/c a",
        "http.proxy=http://proxy:1",
        "safe.directory=*",
        "url.https://mirror/.insteadof=https://up/",
    ]


def test_logins_are_on_disk_only_while_they_are_needed(tmp_path):
    home = str(tmp_path / "h")
    pip_tool.write_home(home, "", "", "machine x login y password z\n")
    netrc = os.path.join(home, ".netrc")
    assert os.stat(netrc).st_mode & 0o777 == 0o600
    logins = pip_tool.Netrc(home)
    assert not os.path.exists(netrc)
    with logins:
        assert "password z" in Path(netrc).read_text()
    assert not os.path.exists(netrc)
    with pytest.raises(RuntimeError), logins:
        raise RuntimeError
    assert not os.path.exists(netrc)


def test_a_folder_is_whole_or_made_anew(tmp_path):
    folder = str(tmp_path / "f")
    with pytest.raises(RuntimeError), pip_tool.whole(folder, "k") as needed:
        assert needed
        os.makedirs(folder)
        open(os.path.join(folder, "half"), "w").close()
        raise RuntimeError
    with pip_tool.whole(folder, "k") as needed:
        assert needed and not os.path.exists(folder)
        os.makedirs(folder)
    for key, expected in (("k", False), ("other", True)):
        with pip_tool.whole(folder, key) as needed:
            assert needed is expected
            os.makedirs(folder, exist_ok=True)


def test_commands_and_their_end_stand_in_the_log(tmp_path):
    with open(tmp_path / "log", "w") as log:
        run = pip_tool.Runner({"PATH": "/usr/bin:/bin"}, log)
        assert run(["sh", "-c", "echo out; echo err >&2"]) == 0
        with pytest.raises(pip_tool.CommandFailed):
            run(["sh", "-c", "exit 3"])
        assert run(["sh", "-c", "exit 3"], check=False) == 3
        with pytest.raises(DflashError):
            run(["/no/such/program"])
        with pytest.raises(DflashError):
            pip_tool.python_facts(run, "/bin/true")
    text = (tmp_path / "log").read_text()
    assert text.startswith("$ sh -c echo out; echo err >&2\nout\nerr\n-- 0.")
    assert ", status 3" in text
