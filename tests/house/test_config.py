# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What ansible.cfg says is what Ansible understood."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import house

WANTED = {
    "COLLECTIONS_PATHS": [str(house.REPO / "collections")],
    "HOST_KEY_CHECKING": True,
    "INJECT_FACTS_AS_VARS": False,
    "INTERPRETER_PYTHON": "/usr/bin/python3",
    "RETRY_FILES_ENABLED": False,
    "LOCALHOST_WARNING": False,
    "DEFAULT_FORKS": 32,
    "CACHE_PLUGIN": "memory",
    "ssh.reconnection_retries": 8,
    "ssh.pipelining": True,
    "default.result_format": "yaml",
}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Every setting that comes from ansible.cfg; a plugin's as ``plugin.setting``."""
    program = str(Path(sys.executable).parent / "ansible-config")
    command = [program, "dump", "--only-changed", "--type", "all", "--format", "json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(command, cwd=house.REPO, env=environment, capture_output=True, text=True, check=True)
    found = {}

    def collect(node: Any, prefix: str) -> None:
        for item in node if isinstance(node, list) else [node]:
            if "name" in item and "value" in item:
                if str(item.get("origin", "")).endswith("ansible.cfg"):
                    found[prefix + item["name"]] = item["value"]
                continue
            for name, inner in item.items():
                if isinstance(inner, (list, dict)):
                    collect(inner, "" if name.isupper() else name + ".")

    collect(json.loads(done.stdout), "")
    return found


@pytest.mark.parametrize("name", sorted(WANTED))
def test_setting_is_understood(settings: dict[str, Any], name: str) -> None:
    assert settings[name] == WANTED[name]


def test_connections_are_kept_and_notice_a_dead_host(settings: dict[str, Any]) -> None:
    arguments = settings["ssh.ssh_args"]
    for option in ("ControlMaster=auto", "ControlPersist=", "ServerAliveInterval=", "ServerAliveCountMax="):
        assert f"-o {option}" in arguments
    # 108 bytes are all that a socket's path may have; a long home must leave room for it.
    assert len(settings["ssh.control_path_dir"]) <= 12


def test_no_line_is_without_effect(settings: dict[str, Any]) -> None:
    """A misspelt key would be ignored in silence."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(house.REPO / "ansible.cfg")
    lines = sum(len(parser[section]) for section in parser.sections())
    plain = [name for name in settings if "." not in name]
    assert lines == len(plain) + len({"ssh.reconnection_retries", "ssh.control_path_dir", "ssh.ssh_args",
                                      "default.result_format"} & set(settings))
