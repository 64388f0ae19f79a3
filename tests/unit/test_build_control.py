# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Starting, joining and watching a build, with processes that live and die, without building anything."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    build_control,
    build_host,
    build_job,
    ids,
    process,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

TEXT = "diff --git a/x b/x\n"
SERIES = [{"name": "1.patch", "sha256": hashlib.sha256(TEXT.encode()).hexdigest(), "text": TEXT}]
SPEC = {"pin": "a" * 40, "series": [SERIES[0]["sha256"]], "mode": "source", "device": "cpu", "python_tag": "cp311"}
ORIGIN = {"repo": "/r", "ref": "main", "python": sys.executable}
BUILD = ids.build_id(SPEC)


class Manager:
    """A service manager that runs a sleeping process in place of the job."""

    def __init__(self):
        self.started, self.process = [], None

    def start(self, program):
        self.started.append(program)
        folder = program.cwd
        self.process = subprocess.Popen(["sleep", "60"], env={build_host.MARKER: BUILD, "PATH": os.environ["PATH"]})
        path = os.path.join(folder, "state.json")
        with open(path) as handle:
            state = json.load(handle)
        state.update(step="wheel", **process.identity(self.process.pid))
        with open(path, "w") as handle:
            json.dump(state, handle)
        return True

    def stop(self, _name, _timeout=None):
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.kill()
        self.process.wait()
        return True


@pytest.fixture
def manager(monkeypatch):
    made = Manager()
    monkeypatch.setattr(build_control.service, "manager", lambda *_: made)
    monkeypatch.setattr(build_control, "worker", lambda _user: accounts.caller())
    yield made
    made.stop("")


def start(root, **more):
    return build_control.start(str(root), SPEC, SERIES, ORIGIN, None, {"HOME": "/nowhere", **more})


def status(root):
    return build_control.status(str(root), BUILD, accounts.caller())


def finish(root, wheel=b"wheel"):
    """What a job leaves when it is done."""
    folder = build_control.folder_of(str(root), BUILD)
    digest = hashlib.sha256(wheel).hexdigest()
    lock = "a==1 --hash=sha256:%s\n" % ("0" * 64)
    os.makedirs(os.path.join(str(root), "wheels", digest), exist_ok=True)
    with open(os.path.join(str(root), "wheels", digest, "v.whl"), "wb") as handle:
        handle.write(wheel)
    with open(os.path.join(folder, "requirements.lock"), "w") as handle:
        handle.write(lock)
    manifest = {
        "kind": "build",
        "build_id": BUILD,
        "wheel": {"name": "v.whl", "sha256": digest, "size": len(wheel)},
        "requirements_sha256": hashlib.sha256(lock.encode()).hexdigest(),
    }
    with open(os.path.join(folder, "manifest.json"), "w") as handle:
        json.dump(manifest, handle)
    with open(os.path.join(folder, "state.json")) as handle:
        state = json.load(handle)
    with open(os.path.join(folder, "state.json"), "w") as handle:
        json.dump(dict(state, state="done", finished_at=time.time()), handle)
    return os.path.join(str(root), "wheels", digest, "v.whl")


def test_nothing_is_there_before_the_first_start(tmp_path):
    assert status(tmp_path)["state"] == "absent"
    assert build_control.plan(str(tmp_path), SPEC, accounts.caller())["would_start"] is True
    assert os.listdir(tmp_path) == []


def test_a_second_start_joins(tmp_path, manager):
    first, second = start(tmp_path), start(tmp_path)
    assert (first["changed"], first["joined"], first["state"]) == (True, False, "running")
    assert (second["changed"], second["joined"], second["step"]) == (False, True, "wheel")
    assert len(manager.started) == 1


def test_two_starts_at_once_give_one_build(tmp_path, manager):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(start(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(manager.started) == 1
    assert sorted(answer["changed"] for answer in answers) == [False, False, False, True]


def test_a_killed_job_is_seen_at_once_and_started_again(tmp_path, manager):
    start(tmp_path)
    manager.stop("")
    seen = status(tmp_path)
    assert (seen["state"], seen["error"]["step"]) == ("failed", "wheel")
    assert "process is gone" in seen["error"]["line"]
    assert start(tmp_path)["changed"] is True


def test_a_reboot_is_seen_though_the_pid_lives(tmp_path, manager, monkeypatch):
    start(tmp_path)
    monkeypatch.setattr(process, "boot_id", lambda: "another boot")
    seen = status(tmp_path)
    assert seen["state"] == "failed"
    assert "restarted" in seen["error"]["line"]


def test_a_job_that_never_came_up_is_not_waited_for_without_end(tmp_path, manager, monkeypatch):
    start(tmp_path)
    path = os.path.join(build_control.folder_of(str(tmp_path), BUILD), "state.json")
    with open(path) as handle:
        state = dict(json.load(handle), pid=None)
    for age, expected in ((1, "running"), (build_control.START_GRACE + 1, "failed")):
        with open(path, "w") as handle:
            json.dump(dict(state, started_at=time.time() - age), handle)
        assert status(tmp_path)["state"] == expected


def test_done_is_done(tmp_path, manager):
    start(tmp_path)
    wheel = finish(tmp_path)
    manager.stop("")
    seen = start(tmp_path)
    assert (seen["changed"], seen["state"], seen["percent"], seen["wheel_path"]) == (False, "done", 100, wheel)
    assert seen["lock"].startswith("a==1")
    assert len(manager.started) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "lock"])
def test_a_damaged_build_is_built_again(tmp_path, manager, damage):
    start(tmp_path)
    wheel = finish(tmp_path)
    manager.stop("")
    if damage == "lock":
        wheel = os.path.join(build_control.folder_of(str(tmp_path), BUILD), "requirements.lock")
    if damage == "remove":
        os.unlink(wheel)
    else:
        data = Path(wheel).read_bytes()
        Path(wheel).write_bytes(b"W" + data[1:] if damage == "flip" else data[:-1])
    assert start(tmp_path)["changed"] is True
    assert not os.path.exists(os.path.join(build_control.folder_of(str(tmp_path), BUILD), "manifest.json"))


@pytest.mark.parametrize(("key", "value"), [("name", "../../x.whl"), ("name", ".."), ("sha256", "..")])
def test_a_manifest_cannot_point_out_of_its_place(tmp_path, manager, key, value):
    start(tmp_path)
    finish(tmp_path)
    path = Path(build_control.folder_of(str(tmp_path), BUILD), "manifest.json")
    manifest = json.loads(path.read_text())
    manifest["wheel"][key] = value
    path.write_text(json.dumps(manifest))
    assert build_control.finished(str(tmp_path), BUILD) is None


def test_cancel_ends_all_and_a_start_goes_on(tmp_path, manager):
    start(tmp_path)
    stray = subprocess.Popen(
        ["sleep", "60"], env={build_host.MARKER: BUILD, "PATH": os.environ["PATH"]}, start_new_session=True
    )
    seen = build_control.cancel(str(tmp_path), SPEC, None)
    assert (seen["changed"], seen["state"]) == (True, "cancelled")
    assert stray.wait(5) == -9
    assert build_control.cancel(str(tmp_path), SPEC, None)["changed"] is False
    assert start(tmp_path)["state"] == "running"


def test_patches_that_do_not_belong_to_the_id_are_refused(tmp_path, manager):
    for series in ([], [dict(SERIES[0], text="other")]):
        with pytest.raises(DflashError):
            build_control.start(str(tmp_path), SPEC, series, ORIGIN, None, {})
    assert manager.started == []


@pytest.mark.parametrize("mode", [{"mode": "wheel"}, {"mode": "precompiled"}, {"precompiled": {"requirement": "v==1"}}])
def test_a_mode_without_a_way_is_refused(tmp_path, manager, mode):
    with pytest.raises(DflashError):
        build_control.start(str(tmp_path), dict(SPEC, **mode), SERIES, ORIGIN, None, {})
    assert manager.started == []


def test_a_python_that_cannot_run_is_one_sentence(tmp_path, manager):
    with pytest.raises(DflashError) as caught:
        build_control.start(str(tmp_path), SPEC, SERIES, dict(ORIGIN, python="/usr/bin/python9.9"), None, {})
    assert "/usr/bin/python9.9" in str(caught.value)


def test_logins_do_not_stay_in_the_orders(tmp_path, manager):
    home = tmp_path / "h"
    home.mkdir()
    (home / ".netrc").write_text("machine x login y password sesame\n")
    start(tmp_path / "root", HOME=str(home))
    folder = build_control.folder_of(str(tmp_path / "root"), BUILD)
    assert "sesame" not in Path(os.path.join(folder, "job.json")).read_text()
    assert "sesame" in Path(os.path.join(folder, "home", ".netrc")).read_text()


def test_the_job_travels_with_all_that_it_imports(tmp_path, manager):
    start(tmp_path)
    package = os.path.join(build_control.folder_of(str(tmp_path), BUILD), "job", *build_control.PACKAGE.split("."))
    shipped = {name[:-3] for name in os.listdir(package) if name.endswith(".py")} - {"__init__"}
    for name in shipped:
        for node in ast.walk(ast.parse(Path(os.path.join(package, name + ".py")).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(build_control.PACKAGE):
                tail = node.module[len(build_control.PACKAGE) + 1 :]
                assert ({tail} if tail else {alias.name for alias in node.names}) <= shipped, name
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            "import sys; sys.path.insert(0, sys.argv[1]); import " + build_control.PACKAGE + ".build_job",
            os.path.join(os.path.dirname(package).split("/ansible_c")[0]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be refused")
def test_the_job_itself_refuses_to_run_as_root(tmp_path, capsys):
    assert build_job.main(str(tmp_path)) == 2
    assert "never runs as root" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_what_goes_wrong_in_a_step_is_one_line_and_one_hint():
    class Job:
        log_path, state, seen = "/none", {}, None

        def fail(self, line, hint):
            self.seen = (line, hint)

    for error, line in (
        (DflashError("What", "where", "Mend."), "What [where]"),
        (OSError(28, "No space left on device", "/x"), "No space left on device: /x"),
        (ZeroDivisionError("division"), "ZeroDivisionError: division"),
    ):

        def act(error=error):
            raise error

        job = Job()
        assert build_job.attempt(job, act) == 1
        assert job.seen[0] == line and job.seen[1]
