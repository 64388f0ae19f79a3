# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Programs start the same way everywhere, and no argument passes through a unit file's quoting."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import accounts, service, service_supervisor, service_systemd
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

HARD = ["--config", '{"a": "it\'s 50% $HOME `x` \\\\ \n two"}', "", "*", "%n $$ ${X}"]


def test_the_script_hands_over_every_byte(tmp_path):
    log = tmp_path / "sub dir" / "p.log"
    log.parent.mkdir()
    program = service.Program(
        "p",
        [
            "/usr/bin/env",
            "python3",
            "-c",
            "import sys, os, json; print(json.dumps([sys.argv[1:], os.environ['A'], os.getcwd()]))",
            *HARD,
        ],
        env={"A": HARD[1]},
        cwd=str(log.parent),
        log=str(log),
    )
    script = tmp_path / "p.sh"
    script.write_text(service.script(program))
    subprocess.run(["/bin/sh", str(script)], check=True)
    assert json.loads(log.read_text()) == [HARD, HARD[1], str(log.parent)]


@pytest.mark.parametrize(
    "program",
    [
        service.Program("p", ["x"], env={"A B": "1"}),
        service.Program("p", ["x"], env={"": "1"}),
        service.Program("p", ["a\0b"]),
    ],
)
def test_what_a_shell_cannot_carry_is_refused(program):
    with pytest.raises(DflashError):
        service.script(program)


def test_a_unit_file_holds_paths_and_numbers_only():
    program = service.Program("dflash-main", ["vllm", HARD[1]], stop_timeout=40, autostart=True, restart=True)
    text = service_systemd.unit_text(program, '/opt/a b/50%/$x/"q".sh', "dflash")
    assert 'ExecStart=/bin/sh "/opt/a b/50%%/$$x/\\"q\\".sh"' in text
    assert "vllm" not in text
    for line in (
        "KillMode=control-group",
        "TimeoutStopSec=40",
        "User=dflash",
        "Restart=on-failure",
        "StartLimitBurst=3",
    ):
        assert line in text.splitlines()
    assert "User=" not in service_systemd.unit_text(program, "/x", None)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_file(tmp_path):
    unit = tmp_path / "dflash-main.service"
    unit.write_text(service_systemd.unit_text(service.Program("dflash-main", ["x"]), "/opt/x y/z.sh", "daemon"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "dflash-main" in line]
    assert ours == []


@pytest.mark.parametrize(
    ("shown", "state", "pid"),
    [
        ("LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\n", "running", 7),
        ("LoadState=loaded\nActiveState=deactivating\nSubState=stop-sigterm\nMainPID=7\n", "running", 7),
        ("LoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nMainPID=0\n", "failed", None),
        ("LoadState=loaded\nActiveState=inactive\nSubState=dead\nMainPID=0\n", "stopped", None),
        ("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\n", "absent", None),
    ],
)
def test_what_systemd_shows_in_our_words(shown, state, pid):
    found = service_systemd.state_of(service_systemd.parse_show(shown))
    assert (found["state"], found["pid"]) == (state, pid)


@pytest.mark.parametrize(
    ("name", "status", "state"),
    [
        ("RUNNING", 0, "running"),
        ("STARTING", 0, "running"),
        ("STOPPING", 0, "running"),
        ("EXITED", 0, "stopped"),
        ("EXITED", 3, "failed"),
        ("STOPPED", 0, "stopped"),
        ("FATAL", 0, "failed"),
        ("UNKNOWN", 0, "failed"),
    ],
)
def test_what_supervisor_says_in_our_words(name, status, state):
    assert service_supervisor.state_of({"statename": name, "exitstatus": status}) == state


def test_supervisor_never_restarts_by_itself_and_takes_the_whole_group(tmp_path):
    manager = service_supervisor.Supervisor(str(tmp_path), accounts.caller())
    text = manager._program_config(service.Program("p", ["x"], stop_timeout=7), "/r/50%.sh")
    for line in (
        "autorestart=false",
        "stopasgroup=true",
        "killasgroup=true",
        "stopwaitsecs=7",
        "autostart=false",
        "command=/bin/sh /r/50%%.sh",
    ):
        assert line in text.splitlines()
    assert manager.status("p") == {"state": "absent", "pid": None, "detail": ""}
    assert manager.stop("p") is False


def test_a_root_that_is_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(DflashError) as caught:
        service_supervisor.Supervisor("/" + "x" * 90, accounts.caller())
    assert "shorter dflash_root" in str(caught.value)


def test_a_program_that_runs_is_not_started_again(tmp_path):
    class Pretend(service.Manager):
        state, launched = "absent", 0

        def ensure_ready(self):
            return False

        def status(self, _name):
            return {"state": self.state, "pid": None, "detail": ""}

        def _launch(self, _program, path):
            assert os.access(path, os.X_OK)
            self.launched, self.state = self.launched + 1, "running"

    manager = Pretend(str(tmp_path), accounts.caller())
    assert [manager.start(service.Program("p", ["x"])) for _ in range(2)] == [True, False]
    assert manager.launched == 1
    manager.state = "failed"
    assert manager.start(service.Program("p", ["x"])) is True


def test_an_unknown_manager_and_a_bad_name_are_refused(tmp_path):
    user = "nobody"
    with pytest.raises(DflashError):
        service.manager(str(tmp_path), user, "upstart")
    with pytest.raises(DflashError):
        service.manager(str(tmp_path), user, "supervisor").start(service.Program("a b", ["x"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is asked for an account")
@pytest.mark.parametrize("user", ["root", "", None, "no-such-account"])
def test_nothing_foreign_runs_as_root(user):
    with pytest.raises(DflashError):
        accounts.worker(user)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_a_child_is_the_account_for_good_and_says_what_went_wrong(tmp_path):
    account = accounts.worker("nobody")
    assert accounts.as_child(account, lambda: [*os.getresuid(), *os.getgroups()]) == [account.uid] * 3

    def fail():
        raise DflashError("what", "where", "fix")

    with pytest.raises(DflashError) as caught:
        accounts.as_child(account, fail)
    assert (caught.value.what, caught.value.where, caught.value.fix) == ("what", "where", "fix")
    with pytest.raises(DflashError) as caught:
        accounts.as_child(account, lambda: os.mkdir("/not-for-nobody"))
    assert "Permission denied" in str(caught.value)
    with accounts.acting_as(account):
        assert os.geteuid() == account.uid
    assert os.geteuid() == 0
