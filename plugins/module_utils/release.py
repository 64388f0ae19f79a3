# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Layers and releases: what a host serves from, installed once, verified, and never changed afterwards.

A layer is a virtual environment of everything but vLLM, named by its lock; a release is a thin one
with vLLM alone over a layer.  Both are installed in place (a virtual environment cannot be moved) and
count from the moment their manifest is there, which is written last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils import build_log, ids, pip_tool, record, requirements, schema
from ansible_collections.dflash.fleet.plugins.module_utils.accounts import Account, as_child, make_folder, worker
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, sha256_file, write_atomic, write_json

#: The file that puts the layer behind the release; ``site`` runs it at start.
PTH = "dflash_layer.pth"
ASIDE = ".damaged-"
#: Not worth a compiled copy: nothing imports tests at run time.
UNCOMPILED = r"/tests?/"


def utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def folder_of(root: str, kind: str, name: str) -> str:
    return os.path.join(root, kind + "s", name)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """One installer at a time per layer or release."""
    make_folder(os.path.dirname(path))
    with open(path + ".lock", "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def examine(folder: str, kind: str, name: str, manifest: Optional[Mapping[str, Any]] = None) -> str:
    """``whole``, ``absent``, ``unfinished`` or ``damaged: ...``.

    ``manifest``: keys and values that the manifest must have.  Compares sizes, times and inodes of all
    files with those taken at the installation, and hashes vLLM's own.
    """
    if not os.path.lexists(folder):
        return "absent"
    found = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(found, dict) or found.get("kind") != kind or found.get(kind + "_id") != name:
        return "unfinished"
    for key, value in (manifest or {}).items():
        if found.get(key) != value:
            return "damaged: its manifest says another %s" % key
    table = read_json(os.path.join(folder, "stat.json"))
    if not isinstance(table, dict):
        return "damaged: its table of files is gone"
    compared = record.compare_stat(folder, table)
    if compared["ok"]:
        return "whole"
    for problem in ("missing", "rehashed", "changed", "extra"):
        if compared[problem]:
            return "damaged: %d files %s, first %s" % (len(compared[problem]), problem, compared[problem][0])
    return "damaged"


def remove_tree(path: str) -> None:
    """Remove a folder whose parts are read-only."""
    def again(act: Callable[..., Any], place: str, _error: Any) -> None:
        for each in (os.path.dirname(place), place):
            if not os.path.islink(each):
                os.chmod(each, 0o700)
        act(place)

    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        for base, folders, _files in os.walk(path):
            os.chmod(base, 0o700)
            for name in folders:
                if not os.path.islink(os.path.join(base, name)):
                    os.chmod(os.path.join(base, name), 0o700)
        shutil.rmtree(path, onerror=again)


def set_aside(folder: str) -> None:
    """Move a damaged or unfinished one out of the way; what runs from it keeps its open files."""
    if os.path.lexists(folder):
        os.rename(folder, "%s%s%d" % (folder, ASIDE, time.time_ns()))


def clear_aside(folder: str) -> None:
    """Remove what earlier calls have set aside."""
    parent, name = os.path.split(folder)
    for entry in os.listdir(parent):
        if entry.startswith(name + ASIDE):
            remove_tree(os.path.join(parent, entry))


def seal(folder: str) -> None:
    """Make it read-only, and root's where root installs."""
    root = os.geteuid() == 0
    for base, folders, files in os.walk(folder, topdown=False):
        for name in [*folders, *files]:
            path = os.path.join(base, name)
            info = os.lstat(path)
            if root and (info.st_uid or info.st_gid):
                os.lchown(path, 0, 0)
            if not stat.S_ISLNK(info.st_mode):
                readable = 0o555 if stat.S_ISDIR(info.st_mode) else 0o444
                os.chmod(path, stat.S_IMODE(info.st_mode) & 0o555 | readable)
    if root:
        os.chown(folder, 0, 0)


def disk_use(folder: str) -> int:
    """Bytes that a folder takes on disk."""
    total = 0
    for base, _folders, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
    return total


class Installer:
    """Installs for one host; the work is done by ``account``, the result belongs to the caller."""

    def __init__(self, root: str, account: Account, python: str, environ: Mapping[str, str]) -> None:
        self.root, self.account, self.python, self.environ = root, account, python, environ
        self.home = os.path.join(root, "tools", "home-" + account.name)
        places = pip_tool.places(root, account.name)
        self.tool, self.cache = places["tool"], places["cache"]
        # Read as the caller: the account cannot read the caller's home.
        self.pip_config = pip_tool.user_pip_config(environ)
        self.netrc = pip_tool.user_netrc(environ)

    def prepare(self) -> None:
        for folder in (os.path.join(self.root, "tools"), os.path.join(self.root, "cache")):
            make_folder(folder)
        for folder in (self.tool, self.cache):
            make_folder(folder, self.account)
        make_folder(self.home, self.account, 0o700)

    def runner(self, log: Any, temporary: str) -> pip_tool.Runner:
        pip_tool.write_home(self.home, self.pip_config, "", self.netrc)
        env = pip_tool.environment(self.home, self.cache, pip_tool.passed_environment(self.environ))
        env["TMPDIR"] = temporary
        return pip_tool.Runner(env, log)

    def python_version(self) -> str:
        """``3.11.2`` of the interpreter, asked as the account that will run it."""
        def ask() -> str:
            with open(os.devnull, "w", encoding="ascii") as log:
                env = {"PATH": pip_tool.PATH, "LANG": "C.UTF-8"}
                return pip_tool.python_facts(pip_tool.Runner(env, log), self.python)["version"]

        return str(as_child(self.account, ask))

    def fill(self, folder: str, arguments: List[str], requirements_text: str, pth: Optional[str] = None) -> None:
        """Make ``folder/venv`` and install into it, as the account."""
        venv, temporary = os.path.join(folder, "venv"), os.path.join(folder, "tmp")

        def act() -> None:
            os.makedirs(temporary)
            log_path = os.path.join(folder, "install.log")
            with open(log_path, "w", encoding="utf-8") as log:
                run = self.runner(log, temporary)
                logins = pip_tool.Netrc(self.home)
                try:
                    with alone(os.path.join(self.tool, "lock")), logins:
                        pip = pip_tool.install_pip(run, self.tool, self.python)
                    run([self.python, "-I", "-m", "venv", "--without-pip", venv])
                    wanted = os.path.join(folder, "requirements.txt")
                    write_atomic(wanted, requirements_text)
                    python = os.path.join(venv, "bin", "python")
                    with logins:
                        run([*pip, "--python", python, "install", "--quiet", "--no-deps", "--require-hashes",
                             "--only-binary", ":all:", "--no-compile", *arguments, "--requirement", wanted])
                    site = record.site_packages(folder) or venv
                    if pth:
                        write_atomic(os.path.join(site, PTH), pth)
                    jobs = str(min(8, len(os.sched_getaffinity(0))))
                    # Some packages carry files for other Pythons: what does not compile is not imported here.
                    run([python, "-I", "-m", "compileall", "-q", "-j", jobs, "-x", UNCOMPILED, site], check=False)
                except pip_tool.CommandFailed as failure:
                    log.flush()
                    text = build_log.read_from(log_path, 0)
                    line = build_log.first_reason(text) or str(failure)
                    raise DflashError(line, log_path, build_log.hint_for(line, text)) from None
            shutil.rmtree(temporary, ignore_errors=True)

        as_child(self.account, act)

    def install(self, kind: str, name: str, fill: Callable[[str], None], manifest: Dict[str, Any],
                must: Mapping[str, Any], beside: Optional[Mapping[str, Any]] = None) -> Dict[str, Any]:
        """One layer or release: ``{changed, repaired, seconds, bytes}``; the manifest comes last.

        ``beside``: JSON files that go into the folder before the manifest.
        """
        folder = folder_of(self.root, kind, name)
        with locked(folder):
            found = examine(folder, kind, name, must)
            if found == "whole":
                return {"changed": False, "repaired": "", "seconds": 0.0, "bytes": 0}
            begin = time.monotonic()
            set_aside(folder)
            clear_aside(folder)
            make_folder(folder, self.account)
            try:
                fill(folder)
                self.verify(folder)
                seal(folder)
                write_json(os.path.join(folder, "stat.json"), record.make_stat(folder, vllm=kind == "release"), 0o444)
                for file, value in (beside or {}).items():
                    write_json(os.path.join(folder, file), value, 0o444)
                listed = [{"name": item.name, "version": item.version}
                          for item in record.distributions(record.site_packages(folder) or folder)]
                manifest = dict(manifest, distributions=listed, installed_at=utc())
                path = os.path.join(folder, "manifest.json")
                write_json(path, schema.require(manifest, "manifest", path), 0o444)
            except OSError as error:
                line = "%s: %s" % (error.strerror or error, error.filename or folder)
                raise DflashError(line, folder, build_log.hint_for(line)) from None
            os.chmod(folder, 0o555)
            return {
                "changed": True, "repaired": found if found.startswith("damaged") else "",
                "seconds": round(time.monotonic() - begin, 2), "bytes": disk_use(folder),
            }

    def verify(self, folder: str) -> None:
        """Every file of every distribution has the hash that its RECORD states."""
        site = record.site_packages(folder)
        if site is None:
            raise DflashError("The installation left no site-packages folder", folder, "Run again.")
        found = record.verify_site(site)
        if found["problems"]:
            first = found["problems"][0]
            raise DflashError(
                "%d files differ from what their distributions record, first %s of %s (%s)" % (
                    len(found["problems"]), first["path"], first["distribution"], first["problem"]),
                folder, "Check the disk, then run again: it is installed anew.",
            )


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_lock(build: Mapping[str, Any], lock: str) -> None:
    """The lock is the one that the build recorded, and every line has a hash."""
    if hashlib.sha256(lock.encode("utf-8")).hexdigest() != build["requirements_sha256"]:
        raise DflashError("The requirements lock is not the one of this build", "lock", "Build again.")
    requirements.parse_lock(lock)


def check_wheel(build: Mapping[str, Any], wheel: str) -> None:
    """The wheel on this host is the one that came through the controller."""
    try:
        digest = sha256_file(wheel)
    except OSError as error:
        raise DflashError("The wheel cannot be read: %s" % error.strerror, wheel, "Distribute it again.") from None
    if digest != build["wheel"]["sha256"]:
        raise DflashError(
            "The wheel is not the one that was built: its SHA-256 is %s" % digest, wheel, "Remove it and run again.",
        )


def names(build: Mapping[str, Any], lock: str, version: str) -> Dict[str, str]:
    """Ids of the layer and the release that belong to a build on a host with this Python."""
    layer = ids.layer_id(lock, version)
    return {"layer_id": layer, "release_id": ids.release_id(build["build_id"], layer)}


def present(root: str, user: Optional[str], build: Mapping[str, Any], lock: str, python: str, wheel: str, spec: str,
            environ: Mapping[str, str], dry: bool = False, extra_index_urls: Sequence[str] = ()) -> Dict[str, Any]:
    """See to it that the layer and the release of ``build`` are on this host, whole.

    The build's manifest is kept in the release (``build.json``): it is proven against it for as long as it is there.
    """
    account = worker(user)
    installer = Installer(root, account, python, environ)
    check_lock(build, lock)
    version = installer.python_version()
    if version.split(".")[:2] != str(build["python"]).split(".")[:2]:
        raise DflashError(
            "%s is Python %s and the wheel was built for %s" % (python, version, build["python"]),
            "vllm_toolchain_python", "Use a Python of the same minor version on this host.",
        )
    found = names(build, lock, version)
    layer, release = folder_of(root, "layer", found["layer_id"]), folder_of(root, "release", found["release_id"])
    must = {"wheel_sha256": build["wheel"]["sha256"]}
    answer: Dict[str, Any] = dict(
        found, changed=False, path=release, layer_path=layer, python=os.path.join(release, "venv", "bin", "python"),
        repaired=[], seconds={"layer": 0.0, "release": 0.0}, bytes_added=0, manifest=None,
    )
    if dry:
        states = (examine(layer, "layer", found["layer_id"]), examine(release, "release", found["release_id"], must))
        answer["changed"] = any(state != "whole" for state in states)
        return answer
    installer.prepare()
    layer_manifest = {
        "schema": 1, "kind": "layer", "layer_id": found["layer_id"], "python": version, "python_executable": python,
        "requirements_sha256": build["requirements_sha256"],
    }
    release_manifest = {
        "schema": 1, "kind": "release", **found, "build_id": build["build_id"], "requirements_spec": spec,
        "python": version, "wheel_sha256": build["wheel"]["sha256"], "commit": build["commit"],
        "version": build["version"],
    }

    def fill_layer(folder: str) -> None:
        installer.fill(folder, requirements.index_options(extra_index_urls), lock)

    def fill_release(folder: str) -> None:
        check_wheel(build, wheel)
        line = "vllm @ file://%s --hash=sha256:%s\n" % (wheel, build["wheel"]["sha256"])
        site = record.site_packages(layer)
        installer.fill(folder, ["--no-index"], line, "import site; site.addsitedir(%r)\n" % site)

    for kind, name, fill, manifest, wanted, beside in (
        ("layer", found["layer_id"], fill_layer, layer_manifest, {}, {}),
        ("release", found["release_id"], fill_release, release_manifest, must, {"build.json": dict(build)}),
    ):
        done = installer.install(kind, name, fill, manifest, wanted, beside)
        answer["changed"] = answer["changed"] or done["changed"]
        answer["seconds"][kind] = done["seconds"]
        answer["bytes_added"] += done["bytes"]
        if done["repaired"]:
            answer["repaired"].append({"kind": kind, "id": name, "why": done["repaired"]})
    answer["manifest"] = read_json(os.path.join(release, "manifest.json"))
    return answer
