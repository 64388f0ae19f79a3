# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""pip as the one tool that fetches and installs, with the user's own configuration of it.

A build account has a HOME of its own, so what pip, git and TLS are configured with for the caller is
passed on explicitly: environment, configuration files, certificates.  Nothing here names an index.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import subprocess
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import short_hash, write_atomic

#: pip itself, exactly; taken from the user's index.  Source: the package index's own record of the wheel.
#: Where the index does not have it, the pip that comes with Python does, when it knows ``--report``.
VERSION = "25.3"
SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"
OLDEST = (22, 3)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
    "XDG_CONFIG_DIRS", "TZ",
)
#: pip settings that would send its output elsewhere or change what it works on.
HELD_BACK = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_LOG", "PIP_CACHE_DIR",
             "PIP_CONFIG_FILE", "PIP_REQUIRE_VIRTUALENV", "PIP_QUIET", "PIP_VERBOSE", "PIP_SRC", "PIP_REPORT")
#: pip sections and git settings of the caller that say how to reach servers.
GIT_PASSED = re.compile(
    r"^(http\.(.*\.)?(proxy|sslcainfo|sslcapath|sslverify|version)|url\..*\.insteadof)$", re.IGNORECASE,
)


def places(root: str, account: str) -> Dict[str, str]:
    """Where an account's pip and its cache of downloads lie: builds and installations share them."""
    name = "pip-" + account
    return {"tool": os.path.join(root, "tools", name), "cache": os.path.join(root, "cache", name)}


def passed_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """The part of the caller's environment that says how to reach servers."""
    out = {name: environ[name] for name in PASSED if environ.get(name)}
    out.update({name: value for name, value in environ.items() if name.startswith("PIP_") and name not in HELD_BACK})
    return out


def user_pip_config(environ: Mapping[str, str]) -> str:
    """The caller's own pip configuration files as one text; those of the system are read by pip anyway."""
    home = environ.get("HOME") or os.path.expanduser("~")
    places = [
        os.path.join(home, ".pip", "pip.conf"),
        os.path.join(environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "pip", "pip.conf"),
        environ.get("PIP_CONFIG_FILE", ""),
    ]
    merged = configparser.RawConfigParser()
    for place in places:
        with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
            if place and place != os.devnull:
                with open(place, encoding="utf-8") as handle:
                    merged.read_string(handle.read())
    lines: List[str] = []
    for section in merged.sections():
        lines.append("[%s]" % section)
        for key, value in merged.items(section):
            if "PIP_" + key.upper().replace("-", "_") not in HELD_BACK:
                lines.append("%s = %s" % (key, value.replace("\n", "\n    ")))
    return "\n".join(lines) + "\n" if lines else ""


def user_git_config(environ: Mapping[str, str]) -> str:
    """A git configuration for a private HOME: trust every folder, and reach servers as the caller does.

    ``safe.directory`` lets the build account read a repository of another owner.  Rewritten URLs with
    a login in them stay behind: a fork's build scripts could read them.
    """
    lines = ["[safe]", "\tdirectory = *"]
    try:
        done = subprocess.run(["git", "config", "--global", "--null", "--list"], env=dict(environ), cwd="/", timeout=20,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, subprocess.SubprocessError):
        return "\n".join(lines) + "\n"
    for entry in done.stdout.split("\0") if done.returncode == 0 else []:
        key, _newline, value = entry.partition("\n")
        if GIT_PASSED.match(key) and "@" not in key and "\n" not in value and "@" not in value:
            section, _dot, rest = key.partition(".")
            sub, _dot, name = rest.rpartition(".")
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            lines += ["[%s%s]" % (section, ' "%s"' % sub if sub else ""), '\t%s = "%s"' % (name, quoted)]
    return "\n".join(lines) + "\n"


def write_home(home: str, pip_config: str, git_config: str, netrc: str = "") -> None:
    """A private HOME; call it as the account that it is for."""
    for folder in (home, os.path.join(home, ".config"), os.path.join(home, ".config", "pip")):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    write_atomic(os.path.join(home, ".config", "pip", "pip.conf"), pip_config, 0o600)
    write_atomic(os.path.join(home, ".gitconfig"), git_config, 0o600)
    if netrc:
        write_atomic(os.path.join(home, ".netrc"), netrc, 0o600)


class Netrc:
    """Logins for indexes and repositories, on disk only while a step needs them.

    A build script of the source tree runs as the same account: so the file is read once, removed,
    and there again only inside ``with``.
    """

    def __init__(self, home: str) -> None:
        self.path = os.path.join(home, ".netrc")
        self.text = ""
        with contextlib.suppress(OSError):
            with open(self.path, encoding="utf-8") as handle:
                self.text = handle.read()
            os.unlink(self.path)

    def __enter__(self) -> Netrc:
        if self.text:
            write_atomic(self.path, self.text, 0o600)
        return self

    def __exit__(self, *_reason: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def user_netrc(environ: Mapping[str, str]) -> str:
    """The caller's logins, empty where there are none.  Never logged, never in an argument."""
    home = environ.get("HOME") or os.path.expanduser("~")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open(environ.get("NETRC") or os.path.join(home, ".netrc"), encoding="utf-8") as handle:
            return handle.read()
    return ""


def environment(home: str, cache: str, passed: Mapping[str, str]) -> Dict[str, str]:
    """The whole environment of a child that fetches, builds or installs."""
    env = dict(passed)
    env.update(
        HOME=home, PATH=PATH, LANG="C.UTF-8", LC_ALL="C.UTF-8", PIP_CACHE_DIR=cache, PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1", PYTHONNOUSERSITE="1", GIT_TERMINAL_PROMPT="0", GIT_CONFIG_NOSYSTEM="0",
        PYTHONUNBUFFERED="1", PIP_ROOT_USER_ACTION="ignore",
    )
    env.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    return env


class Runner:
    """Runs commands one after another; each and its output goes to a log."""

    def __init__(self, env: Mapping[str, str], log: Any, drop: Optional[Mapping[str, Any]] = None) -> None:
        self.env, self.stream, self.drop = dict(env), log, dict(drop or {})

    def say(self, text: str) -> None:
        self.stream.write(text.rstrip("\n") + "\n")
        self.stream.flush()

    def __call__(self, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, cwd: str = "/",
                 check: bool = True) -> int:
        self.say("$ " + " ".join(argv))
        begin = time.monotonic()
        try:
            code = subprocess.call(list(argv), env={**self.env, **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL,
                                   stdout=self.stream, stderr=subprocess.STDOUT, **self.drop)
        except OSError as error:
            raise DflashError("%s cannot be run: %s" % (argv[0], error.strerror), argv[0]) from None
        self.say("-- %.1f s%s" % (time.monotonic() - begin, ", status %d" % code if code else ""))
        if code and check:
            raise CommandFailed(list(argv), code)
        return code

    def text(self, argv: Sequence[str], cwd: str = "/") -> str:
        """The output of a short command."""
        try:
            done = subprocess.run(list(argv), env=self.env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, errors="replace", check=False, **self.drop)
        except OSError as error:
            raise DflashError("%s cannot be run: %s" % (argv[0], error.strerror), argv[0]) from None
        if done.returncode:
            self.say("$ %s\n%s" % (" ".join(argv), done.stderr))
            raise CommandFailed(list(argv), done.returncode)
        return str(done.stdout)


class CommandFailed(Exception):
    """A command ended with another status than 0; its reason stands in the log."""

    def __init__(self, argv: List[str], code: int) -> None:
        self.argv, self.code = argv, code
        super().__init__("%s ended with status %d" % (os.path.basename(argv[0]), code))


def python_facts(run: Runner, python: str) -> Dict[str, str]:
    """``{version, executable}`` of an interpreter, as it says itself."""
    code = "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3]); print(sys.executable)"
    try:
        version, executable = run.text([python, "-I", "-c", code]).split("\n")[:2]
    except (CommandFailed, ValueError):
        raise DflashError(
            "%s is no Python that can make virtual environments" % python, "vllm_toolchain_python",
            "Install the distribution's python3 and python3-venv packages.",
        ) from None
    return {"version": version, "executable": executable}


@contextlib.contextmanager
def whole(folder: str, key: Any) -> Iterator[bool]:
    """A folder that is either complete for ``key`` or made anew: gives True where it must be filled."""
    mark = os.path.join(folder, "complete")
    with contextlib.suppress(OSError):
        with open(mark, encoding="ascii") as handle:
            if handle.read().strip() == short_hash(key):
                yield False
                return
    shutil.rmtree(folder, ignore_errors=True)
    yield True
    write_atomic(mark, short_hash(key) + "\n")


def install_pip(run: Runner, folder: str, python: str) -> List[str]:
    """The command that runs our pip; installed once per Python into ``folder``."""
    facts = python_facts(run, python)
    home = os.path.join(folder, "pip-%s-%s" % (VERSION, short_hash(facts, 8)))
    command = [os.path.join(home, "bin", "python"), "-I", "-m", "pip"]
    with whole(home, facts) as needed:
        if needed:
            run([python, "-I", "-m", "venv", home])
            requirements = home + ".txt"
            write_as(requirements, "pip==%s --hash=sha256:%s\n" % (VERSION, SHA256), run)
            code = run([*command, "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
                        "--requirement", requirements], check=False)
            if code:
                version = run.text([*command, "--version"]).split()[1]
                found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
                if found < OLDEST:
                    raise DflashError(
                        "pip %s cannot be fetched and Python's own pip %s is too old" % (VERSION, version),
                        "vllm_toolchain_python", "Check pip's configuration on the host, or use a newer Python.",
                    )
                run.say("pip %s is not to be had; using pip %s" % (VERSION, version))
    return command


def write_as(path: str, text: str, run: Runner) -> None:
    """A small file for a command to read, written by the account that runs the commands."""
    if not run.drop:
        write_atomic(path, text)
        return
    subprocess.run(["/bin/sh", "-c", 'umask 022; cat >"$1"', "sh", path], input=text, text=True, check=True,
                   env=run.env, cwd="/", **run.drop)


