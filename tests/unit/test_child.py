# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A probe's child: isolated, bounded, never root, and not to be talked over."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import types

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import child
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError


class _Loader:
    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


def program(text: str) -> types.ModuleType:
    module = types.ModuleType("dflash_test_program")
    module.__loader__ = _Loader(text)
    return module


def run(text: str, payload: object = None, deadline: float = 20) -> child.Outcome:
    return child.run(child.any_python(None), [program(text)], payload, deadline=deadline)


def test_the_answer_comes_back_whatever_the_code_prints() -> None:
    outcome = run("import os\ndef main(p):\n    print('{}')\n    os.write(1, b'noise')\n    return {'got': p}", [1])
    assert outcome.ok
    assert outcome.value == {"got": [1]}


def test_the_child_is_isolated() -> None:
    text = (
        "import os, sys\ndef main(p):\n"
        "    return [os.getcwd(), sys.flags.isolated, sys.dont_write_bytecode, os.geteuid(), sorted(os.environ)]"
    )
    folder, isolated, no_cache, uid, environment = run(text).value
    assert (folder, isolated, no_cache) == ("/", 1, True)
    assert uid != 0
    assert "PYTHONPATH" not in environment


@pytest.mark.parametrize(
    "text, reason",
    [
        ("def main(p):\n    raise ValueError('no such thing')", "ValueError: no such thing"),
        ("import os, signal\ndef main(p):\n    os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS"),
        ("import os\ndef main(p):\n    os._exit(3)", "exit code 3 without a word"),
        ("import time\ndef main(p):\n    time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_child_without_an_answer_says_why(text: str, reason: str) -> None:
    outcome = run(text, deadline=1 if "sleep" in text else 20)
    assert not outcome.ok
    assert outcome.reason.startswith(reason)


def test_a_child_of_the_child_dies_with_it() -> None:
    text = (
        "import os, time\ndef main(p):\n    if os.fork() == 0:\n        time.sleep(2)\n"
        "        open(p, 'w').close()\n        os._exit(0)\n    time.sleep(60)"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o777)
        mark = os.path.join(folder, "mark")
        assert run(text.replace("sleep(2)", "sleep(0)").replace("time.sleep(60)", "os.wait()"), mark).ok is False
        assert os.path.exists(mark), "the child's child can write there"
        os.unlink(mark)
        assert run(text, mark, deadline=1).timed_out
        time.sleep(1.5)
        assert not os.path.exists(mark)


def test_an_interpreter_that_is_not_there() -> None:
    outcome = child.run("/nowhere/python", [program("")], None)
    assert outcome.reason.startswith("/nowhere/python: No such file")
    assert child.can_run("/nowhere/python", None) is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops privileges")
@pytest.mark.parametrize("user", ["root", "no-such-account"])
def test_never_as_root_and_never_as_nobody_knows_whom(user: str) -> None:
    with pytest.raises(DflashError):
        child.run(sys.executable, [program("")], None, user=user)
