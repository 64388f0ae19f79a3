# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""The build, detached from whoever started it.  Runs on the builder as the build account, never as root.

``main(folder)`` does the steps that are not done yet.  Every step can be killed at any point and done
again; the manifest comes last, so a build without manifest is not a build.  What a watcher may ask is
in ``state.json``, written in one piece.
"""

from __future__ import annotations

import fcntl
import glob
import os
import platform
import shutil
import socket
import time
from typing import Any, Callable, Dict, List, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import (
    build_log,
    extensions,
    native,
    pip_tool,
    process,
    requirements,
    schema,
    source,
)
from ansible_collections.dflash.fleet.plugins.module_utils.build_host import (
    MARKER,
    STEPS,
    compiler_jobs,
    end_strays,
    expected_path,
    utc,
)
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import (
    read_json,
    sha256_file,
    short_hash,
    write_atomic,
    write_json,
)


class Job:
    """One build.  ``job.json`` in its folder says what to do."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        given = read_json(os.path.join(folder, "job.json"))
        if not isinstance(given, dict):
            raise DflashError("The job's orders cannot be read", os.path.join(folder, "job.json"), "Start it again.")
        self.build_id: str = given["build_id"]
        self.root: str = given["root"]
        self.spec: Dict[str, Any] = given["spec"]
        self.series: List[Dict[str, str]] = given["series"]
        self.origin: Dict[str, Any] = given["origin"]
        self.log_path = os.path.join(folder, "build.log")
        self.tree = os.path.join(folder, "src")
        self.out = os.path.join(folder, "out")
        self.work = os.path.join(folder, "tmp")
        home = os.path.join(folder, "home")
        pip_tool.write_home(home, given["pip_config"], given["git_config"])
        self.netrc = pip_tool.Netrc(home)
        os.makedirs(self.work, exist_ok=True)
        self.env = pip_tool.environment(home, given["cache"], given["environment"])
        self.tool: str = given["tool"]
        self.env.update({MARKER: self.build_id, "TMPDIR": self.work})
        self.log = open(self.log_path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - for the job's life
        self.run = pip_tool.Runner(self.env, self.log)
        self.state: Dict[str, Any] = {}
        self.done: Dict[str, Any] = {}
        self.facts: Dict[str, str] = {}
        self.urls: List[str] = list(self.spec.get("index", {}).get("extra_index_urls", []))

    # ------------------------------------------------------------------ state
    def write_state(self, **changes: Any) -> None:
        self.state.update(changes, updated_at=time.time())
        write_json(os.path.join(self.folder, "state.json"), self.state)

    def perform(self) -> None:
        """All steps in order; leaves ``done`` or ``failed`` in the state."""
        old = read_json(os.path.join(self.folder, "state.json")) or {}
        kept = old.get("steps") if old.get("build_id") == self.build_id else None
        self.done = dict(kept or {})
        now = time.time()
        self.state = {
            "schema": 1, "build_id": self.build_id, "state": "running", "step": "", "steps": self.done, "error": None,
            "started_at": now, "step_started_at": now, "attempt": int(old.get("attempt") or 0) + 1,
            "log_offset": self.log.tell(), "step_seconds": dict(old.get("step_seconds") or {}) if kept else {},
            **(process.identity(os.getpid()) or {}),
        }
        self.write_state()
        self.run.say("== build %s, attempt %d, %s ==" % (self.build_id, self.state["attempt"], utc()))
        ended = end_strays(self.build_id)
        if ended:
            self.run.say("ended %d processes of an earlier attempt" % ended)
        for step in STEPS:
            self.write_state(step=step, step_started_at=time.time(), log_offset=self.log.tell())
            self.run.say("== step %s, %s ==" % (step, utc()))
            begin = time.monotonic()
            getattr(self, "step_" + step)()
            spent = round(time.monotonic() - begin, 2)
            # A step that an earlier attempt did costs nothing now; what it took stays known.
            self.state["step_seconds"][step] = max(spent, float(self.state["step_seconds"].get(step, 0.0)))
            self.run.say("== step %s done in %.1f s ==" % (step, spent))
        self.write_state(state="done", finished_at=time.time())

    def mark(self, step: str, **facts: Any) -> None:
        """The step is done; what later steps need of it is kept with it."""
        self.done[step] = facts
        self.write_state()

    # ------------------------------------------------------------------ steps
    def step_source(self) -> None:
        os.makedirs(os.path.join(self.root, "source"), exist_ok=True)
        with self.netrc:
            mirror = source.update_mirror(self.root, self.origin["repo"], self.origin["ref"], self.spec["pin"],
                                          self.env, self.run.say)
            required = source.required_commits(mirror, self.spec["pin"], self.spec.get("requires_commits", []))
        commit = source.checkout(mirror, self.tree, self.spec["pin"], self.series, self.env, self.run.say)
        nearest, wheel = source.facts(mirror, self.spec["pin"]), self.spec.get("precompiled")
        # Without a wheel the nearest release is the base to tell the difference from.
        base = (wheel.get("base") or "") if wheel else nearest["nearest"]
        git = source.Git(self.tree, self.env, self.run.say)
        changes = source.native_changes(git, base, commit) if base else None
        start = source.refuse_native(changes) if wheel and changes else ""
        if self.done.get("source", {}).get("commit") not in (None, commit):
            self.done.clear()
        self.mark("source", commit=commit, base_commit=start, nearest=nearest, native=changes, required=required)

    def step_env(self) -> None:
        store = os.path.join(self.root, "buildenv")
        os.makedirs(store, exist_ok=True)
        self.facts = pip_tool.python_facts(self.run, self.origin["python"])
        tag = "cp" + "".join(self.facts["version"].split(".")[:2])
        if tag != self.spec["python_tag"]:
            raise DflashError(
                "%s is Python %s, and the build is for %s" % (self.origin["python"], self.facts["version"],
                                                             self.spec["python_tag"]),
                "vllm_toolchain_python", "Name the right interpreter, or plan again.",
            )
        with source.alone(os.path.join(self.tool, "lock")), self.netrc:
            self.pip = pip_tool.install_pip(self.run, self.tool, self.origin["python"])
        lines = requirements.build_requirements(self.tree, self.spec["device"], self.spec.get("torch", ""))
        key = {"lines": lines, "urls": self.urls, "python": self.facts}
        folder = os.path.join(store, short_hash(key))
        self.builder = os.path.join(folder, "bin", "python")
        with source.alone(folder + ".lock"), self.netrc, pip_tool.whole(folder, key) as needed:
            if needed:
                self.run([self.origin["python"], "-I", "-m", "venv", "--without-pip", folder])
                write_atomic(folder + ".in", "\n".join(lines) + "\n")
                self.run([*self.pip, "--python", self.builder, "install", "--quiet", "--no-compile", "--only-binary",
                          ":all:", *requirements.index_options(self.urls), "--requirement", folder + ".in"])
        self.mark("env", base=self.fetch_base())

    def fetch_base(self) -> Optional[Dict[str, Any]]:
        """The wheel whose binaries are taken, in mode precompiled."""
        wanted = self.spec.get("precompiled")
        if not wanted:
            return None
        if not wanted.get("requirement"):
            raise DflashError("No wheel is named whose binaries shall be used", "vllm_build_precompiled_wheel")
        folder = os.path.join(self.root, "cache", "base", short_hash(wanted["requirement"]))
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with source.alone(folder + ".lock"), self.netrc, pip_tool.whole(folder, wanted["requirement"]) as needed:
            if needed:
                self.run([*self.pip, "--python", self.builder, "download", "--quiet", "--no-deps", "--only-binary",
                          ":all:", "--dest", folder, *requirements.index_options(self.urls), wanted["requirement"]])
        wheels = glob.glob(os.path.join(folder, "*.whl"))
        if len(wheels) != 1:
            shutil.rmtree(folder)
            raise DflashError("%s gave %d wheels, not one" % (wanted["requirement"], len(wheels)), folder)
        recorded = native.recorded_commit(wheels[0])[0]
        if not self.done["source"]["base_commit"]:
            if not recorded:
                raise DflashError(
                    "The wheel %s does not say which commit it was built from" % os.path.basename(wheels[0]),
                    "vllm_build_precompiled_base", "Name the tag or commit that its binaries were built from.",
                )
            git = source.Git(self.tree, self.env, self.run.say)
            changes = source.native_changes(git, recorded, self.done["source"]["commit"])
            self.done["source"].update(native=changes, base_commit=source.refuse_native(changes))
        elif recorded and not self.done["source"]["base_commit"].startswith(recorded):
            raise DflashError(
                "The wheel was built from %s, not from %s" % (recorded, wanted["base"]),
                "vllm_build_precompiled_base", "Name the commit that the wheel records, or leave it empty.",
            )
        return {"requirement": wanted["requirement"], "path": wheels[0], "sha256": sha256_file(wheels[0]),
                "declared": not recorded, "commit": self.done["source"]["base_commit"]}

    def step_wheel(self) -> None:
        commit = self.done["source"]["commit"]
        wheel = self.done.get("wheel", {})
        if wheel.get("commit") == commit and os.path.exists(os.path.join(self.out, wheel.get("name", "") or ".none")):
            self.run.say("already built: %s" % wheel["name"])
            return
        for pattern in ("build/lib*", "build/bdist*", "*.egg-info"):
            for path in glob.glob(os.path.join(self.tree, pattern)):
                shutil.rmtree(path, ignore_errors=True)
        fresh = os.path.join(self.folder, "out.new")
        for path in (fresh, self.out):
            shutil.rmtree(path, ignore_errors=True)
        os.makedirs(self.out)
        self.run([*self.pip, "--python", self.builder, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir",
                  "--no-index", "--verbose", "--wheel-dir", fresh, self.tree],
                 env=self.build_environment(), cwd=self.tree)
        wheels = glob.glob(os.path.join(fresh, "*.whl"))
        if len(wheels) != 1:
            raise DflashError("The build gave %d wheels, not one" % len(wheels), fresh)
        name = os.path.basename(wheels[0])
        recorded, version = native.recorded_commit(wheels[0])
        if len(recorded) < 7 or not commit.startswith(recorded):
            raise DflashError(
                "The wheel says it was built from %s, not from the build commit %s" % (recorded or "nothing", commit),
                name, "The version must come from git: unset VLLM_VERSION_OVERRIDE and SETUPTOOLS_SCM_PRETEND_VERSION.",
            )
        os.rename(wheels[0], os.path.join(self.out, name))
        self.mark("wheel", name=name, commit=commit, package_version=version)

    def build_environment(self) -> Dict[str, str]:
        """What vLLM's own build reads."""
        jobs = str(self.origin.get("jobs") or compiler_jobs())
        env = {
            "PATH": os.path.dirname(self.builder) + ":" + pip_tool.PATH, "VLLM_TARGET_DEVICE": self.spec["device"],
            "MAX_JOBS": jobs, "NVCC_THREADS": "1", "CMAKE_BUILD_TYPE": "Release", "VLLM_DISABLE_SCCACHE": "1",
            "CCACHE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        }
        if self.spec.get("precompiled"):
            env.update(VLLM_USE_PRECOMPILED="1", VLLM_PRECOMPILED_WHEEL_LOCATION=self.done["env"]["base"]["path"])
        if self.spec["device"] == "cuda":
            env.update(self.cuda_environment(env["PATH"]))
        env.update({name: str(value) for name, value in self.spec.get("flags", {}).items()})
        return env

    def cuda_environment(self, path: str) -> Dict[str, str]:
        """The toolkit of the wanted CUDA; refused where the torch of the build belongs to another."""
        wanted = str(self.spec.get("cuda") or "")
        env = {}
        if self.spec.get("architectures"):
            env["TORCH_CUDA_ARCH_LIST"] = ";".join(self.spec["architectures"])
        places = [self.origin.get("cuda_home") or "", *sorted(glob.glob("/usr/local/cuda-%s*" % wanted), reverse=True),
                  "/usr/local/cuda"]
        home = next((place for place in places if place and os.path.exists(os.path.join(place, "bin", "nvcc"))), None)
        if home:
            env.update(CUDA_HOME=home, PATH="%s/bin:%s" % (home, path))
        elif not self.spec.get("precompiled"):
            raise DflashError("There is no CUDA %s toolkit with nvcc" % wanted, "vllm_toolchain_cuda", "Install it.")
        torch = self.run.text([self.builder, "-I", "-c", "import torch; print(torch.version.cuda or 'cpu')"]).strip()
        if wanted and torch.split(".")[0] != wanted.split(".")[0]:
            raise DflashError(
                "The torch of the build is made for %s, not for CUDA %s" % (torch, wanted), "vllm_toolchain_cuda",
                "Add the index that has torch for this CUDA to vllm_release_extra_index_urls.",
            )
        return env

    def wheel_path(self) -> str:
        return os.path.join(self.out, self.done["wheel"]["name"])

    def step_natives(self) -> None:
        base = self.done["env"]["base"]
        for path in native.transplant(base["path"], self.wheel_path()) if base else []:
            self.run.say("taken over from the ready-made wheel: %s" % path)
        listed = self.check_extensions()
        digest = sha256_file(self.wheel_path())
        store = os.path.join(self.root, "wheels", digest)
        target = os.path.join(store, self.done["wheel"]["name"])
        if not os.path.exists(target):
            os.makedirs(store, exist_ok=True)
            shutil.copyfile(self.wheel_path(), target + ".new")
            os.replace(target + ".new", target)
        self.mark("natives", sha256=digest, size=os.path.getsize(target), extensions=listed)

    def check_extensions(self) -> List[Dict[str, Any]]:
        """The wheel's compiled libraries; refused where one is missing that the source builds for this device."""
        with open(os.path.join(self.tree, "setup.py"), encoding="utf-8") as handle:
            wanted = {item.module: item.required for item in extensions.from_setup(
                handle.read(), self.spec["device"], os.uname().machine, str(self.spec.get("cuda") or "13"))}
        found = {native.module_name(path): path for path in native.libraries(self.wheel_path())}
        missing = sorted(name for name, required in wanted.items() if required and name not in found)
        if missing or not found:
            raise DflashError(
                "The build is partial: %s is missing" % (", ".join(missing) or "every compiled library"),
                os.path.basename(self.wheel_path()), "Read the first error in the build log, then build again.",
            )
        return [{"module": name, "path": found[name], "required": wanted.get(name, True)} for name in sorted(found)]

    def step_requirements(self) -> None:
        fields = requirements.metadata_of(self.wheel_path())
        exclude = self.spec.get("exclude", [])
        lines, left_out = requirements.wanted(fields.get("Requires-Dist", []), exclude, self.spec.get("torch", ""))
        for line in left_out:
            self.run.say("left out: %s" % line)
        key = requirements.cache_key(lines, self.urls, self.facts["version"], self.spec["platform"], exclude)
        cached = os.path.join(self.root, "cache", "requirements", key + ".lock")
        os.makedirs(os.path.dirname(cached), exist_ok=True)
        with source.alone(cached + ".one"), self.netrc:
            if not os.path.exists(cached):
                text = requirements.resolve(self.run, self.pip, self.builder, lines, self.urls, self.work, exclude)
                write_atomic(cached, text)
        with open(cached, encoding="utf-8") as handle:
            text = handle.read()
        locked = {item["name"]: item["version"] for item in requirements.parse_lock(text)}
        write_atomic(os.path.join(self.folder, "requirements.lock"), text)
        self.mark("requirements", sha256=sha256_file(os.path.join(self.folder, "requirements.lock")),
                  left_out=left_out, torch=locked.get("torch", ""), version=fields.get("Version", [""])[0])

    def step_manifest(self) -> None:
        done, finished = self.done, time.time()
        base = done["env"]["base"]
        manifest = {
            "schema": 1, "kind": "build", "build_id": self.build_id, "pin": self.spec["pin"],
            "series": [{"name": patch["name"], "sha256": patch["sha256"]} for patch in self.series],
            "commit": done["source"]["commit"], "nearest": done["source"]["nearest"], "mode": self.spec["mode"],
            "native": done["source"]["native"], "requires_commits": done["source"]["required"],
            "device": self.spec["device"],
            "base": {key: base[key] for key in ("requirement", "sha256", "declared", "commit")} if base else None,
            "torch": done["requirements"]["torch"], "python": self.facts["version"],
            "python_tag": self.spec["python_tag"], "platform": self.spec["platform"], "glibc": platform.libc_ver()[1],
            "wheel": {"name": done["wheel"]["name"], **{key: done["natives"][key] for key in ("sha256", "size")}},
            "version": done["requirements"]["version"], "package_version": done["wheel"]["package_version"],
            "extensions": done["natives"]["extensions"],
            "requirements_sha256": done["requirements"]["sha256"], "left_out": done["requirements"]["left_out"],
            "host": socket.gethostname(), "started_at": utc(self.state["started_at"]), "finished_at": utc(finished),
            "seconds": dict(self.state["step_seconds"]),
        }
        path = os.path.join(self.folder, "manifest.json")
        write_json(path, schema.require(manifest, "manifest", path))
        self.remember_seconds()
        # The wheel lies by its hash; objects and copies of it only take space from here on.
        for path in (self.work, self.out, os.path.join(self.tree, "build")):
            shutil.rmtree(path, ignore_errors=True)

    def remember_seconds(self) -> None:
        """For the next forecast."""
        path = expected_path(self.root)
        known = read_json(path) or {}
        known["%s-%s" % (self.spec["mode"], self.spec["device"])] = dict(self.state["step_seconds"])
        write_json(path, known)

    def fail(self, line: str, hint: str) -> None:
        error = {"step": self.state.get("step", ""), "line": line, "hint": hint}
        self.run.say("== failed in step %s: %s ==" % (error["step"], line))
        self.write_state(state="failed", error=error, finished_at=time.time())


def main(folder: str) -> int:
    """Do the job in ``folder``; 0 done or another one does it, 1 failed, 2 refused."""
    if os.geteuid() == 0:
        print("A build never runs as root: a source tree's build scripts are foreign code.")
        return 2
    os.umask(0o022)
    with open(os.path.join(folder, "running.lock"), "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        # Children must not keep the lock when the job is killed.
        os.set_inheritable(handle.fileno(), False)
        job = Job(folder)
        return attempt(job, job.perform)


def attempt(job: Job, act: Callable[[], None]) -> int:
    """Run ``act``; whatever goes wrong becomes one line and one hint in the state."""
    try:
        act()
        return 0
    except DflashError as error:
        line = error.what + (" [%s]" % error.where if error.where else "")
        job.fail(line, error.fix or build_log.hint_for(error.what))
    except pip_tool.CommandFailed as failure:
        job.log.flush()
        text = build_log.read_from(job.log_path, job.state.get("log_offset", 0))
        line = build_log.first_reason(text) or str(failure)
        job.fail(line, build_log.hint_for(line, text))
    except OSError as error:
        line = "%s: %s" % (error.strerror or error, error.filename or "")
        job.fail(line, build_log.hint_for(line))
    except Exception as error:  # pylint: disable=broad-except - a fault of ours must not look like a running build
        hint = "This is a fault of dflash.fleet: please report it with the log."
        job.fail("%s: %s" % (type(error).__name__, error), hint)
    return 1
