# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The build job for real, on a small tree named vllm: killed, joined, finished, installed, repaired.

It proves the job, never a build: the tree has one compiled library and nothing of an engine.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import (
    accounts,
    build_control,
    build_host,
    ids,
    native,
    release,
    service,
)

PYTHON = "/usr/bin/python3"
USER = "nobody"
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77", "setuptools-scm>=8", "wheel"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
dynamic = ["version"]
dependencies = ["six", "left-out", "far @ https://example.invalid/far-1-py3-none-any.whl"]
[tool.setuptools]
packages = ["vllm"]
[tool.setuptools_scm]
write_to = "vllm/_version.py"
"""
SETUP = """\
import pathlib, time
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

class CMakeExtension(Extension):
    pass

class Slow(build_ext):
    def run(self):
        here = pathlib.Path(__file__).parent
        with open(here.parent / "compiled", "a") as handle:
            handle.write("x")
        time.sleep(3)
        super().run()

setup(ext_modules=[CMakeExtension(name="vllm._C", sources=["csrc/c.c"])], cmdclass={"build_ext": Slow})
"""
PATCH = """\
Subject: [PATCH] Say so

---
diff --git a/vllm/__init__.py b/vllm/__init__.py
--- a/vllm/__init__.py
+++ b/vllm/__init__.py
@@ -1 +1 @@
-WORD = "upstream"
+WORD = "patched"
"""


def git(folder: Path, *words: str) -> str:
    identity = {"GIT_%s_%s" % (who, what): "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **identity}
    return subprocess.run(
        ["git", *words], cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def root():
    """A root folder of its own, short and open to the build account."""
    path = Path("/var/tmp/dflash-test-" + secrets.token_hex(4))
    path.mkdir(mode=0o755)
    yield path
    manager = service.manager(str(path), USER, "supervisor")
    manager.shut_down()
    release.remove_tree(str(path))
    assert not path.exists()


@pytest.fixture
def order(root):
    """What is built: a tagged tree and one patch."""
    tree = root / "upstream"
    (tree / "vllm").mkdir(parents=True)
    (tree / "csrc").mkdir()
    (tree / "vllm" / "__init__.py").write_text('WORD = "upstream"\n')
    (tree / "csrc" / "c.c").write_text("int vllm_answer(void) { return 42; }\n")
    (tree / "setup.py").write_text(SETUP)
    (tree / "pyproject.toml").write_text(PYPROJECT)
    (tree / ".gitignore").write_text("/vllm/_version.py\n/build/\n*.egg-info\n*.so\n")
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "first")
    git(tree, "tag", "v1.0.0")
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    digest = hashlib.sha256(PATCH.encode()).hexdigest()
    spec = {
        "pin": git(tree, "rev-parse", "HEAD"),
        "series": [digest],
        "mode": "source",
        "device": "cpu",
        "python_tag": version,
        "platform": "linux_x86_64",
        "torch": "",
        "cuda": "",
        "architectures": [],
        "precompiled": None,
        "exclude": ["left-out"],
        "index": {"extra_index_urls": []},
        "flags": {},
    }
    return {
        "spec": spec,
        "series": [{"name": "1.patch", "sha256": digest, "text": PATCH}],
        "origin": {"repo": str(tree), "ref": "v1.0.0", "python": PYTHON},
    }


def start(root, order):
    return build_control.start(
        str(root), order["spec"], order["series"], order["origin"], USER, os.environ, "supervisor"
    )


def wait(root, order, until, limit=180):
    account = accounts.worker(USER)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        seen = build_control.status(str(root), ids.build_id(order["spec"]), account)
        if until(seen):
            return seen
        time.sleep(0.2)
    pytest.fail("not reached in %d s: %s\n%s" % (limit, seen, Path(seen["log"]).read_text()[-3000:]))


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_two_starts_a_kill_a_join_a_release_and_a_repair(root, order):
    with ProcessPoolExecutor(2) as pool:
        answers = list(pool.map(start, [root] * 2, [order] * 2))
    assert sorted(answer["changed"] for answer in answers) == [False, True]
    folder = Path(build_control.folder_of(str(root), ids.build_id(order["spec"])))

    # Killed while it compiles: seen at once, nothing of it lives on, and a start goes on from there.
    wait(root, order, lambda seen: (folder / "compiled").exists())
    state = build_control.read_json(str(folder / "state.json"))
    assert os.stat("/proc/%d" % state["pid"]).st_uid == accounts.worker(USER).uid
    os.killpg(state["pid"], signal.SIGKILL)
    seen = wait(root, order, lambda seen: seen["state"] == "failed", 5)
    assert (seen["error"]["step"], seen["manifest"]) == ("wheel", None)
    assert start(root, order)["changed"] is True
    done = wait(root, order, lambda seen: seen["state"] not in ("running", "absent"))
    assert done["state"] == "done", done["error"]
    assert build_host.strays(done["build_id"]) == []
    assert (done["attempt"], (folder / "compiled").read_text()) == (2, "xx")

    manifest = done["manifest"]
    assert manifest["pin"] == order["spec"]["pin"] != manifest["commit"]
    assert manifest["version"].startswith("1.0.1.dev1+g" + manifest["commit"][:7])
    assert manifest["extensions"] == [
        {"module": "vllm._C", "path": manifest["extensions"][0]["path"], "required": True}
    ]
    assert [line.split()[0] for line in manifest["left_out"]] == ["far", "left-out"]
    assert done["lock"].startswith("six==") and done["lock"].count("\n") == 1
    assert native.check_record(done["wheel_path"]) == []

    # Done is done: no second build, and quickly.
    begin = time.monotonic()
    again = start(root, order)
    assert (again["changed"], again["state"]) == (False, "done")
    assert time.monotonic() - begin < 1.0
    assert (folder / "compiled").read_text() == "xx"

    def install():
        return release.present(str(root), USER, manifest, done["lock"], PYTHON, done["wheel_path"], "", os.environ)

    first = install()
    assert first["changed"] is True
    # From a folder that holds another vllm: isolated Python answers from the release, its requirements from the layer.
    said = subprocess.run(
        [first["python"], "-I", "-c", "import vllm, six; print(vllm.WORD, vllm.__file__, six.__file__)"],
        cwd=root / "upstream",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[0] == "patched"
    assert said[1].startswith(first["path"]) and said[2].startswith(first["layer_path"])
    assert all(os.lstat(path).st_uid == os.geteuid() for path in (first["path"], said[1], said[2]))
    assert install()["changed"] is False

    library = next(Path(first["path"]).rglob("_C*.so"))
    data = library.read_bytes()
    library.parent.chmod(0o755)
    library.unlink()
    library.write_bytes(data[:100])
    mended = install()
    assert (mended["changed"], mended["release_id"]) == (True, first["release_id"])
    assert [item["kind"] for item in mended["repaired"]] == ["release"]
    assert library.read_bytes() == data
