# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Can the deployment work on this host?  Facts are gathered in one go; judging them is pure."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import tempfile
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.dflash.fleet.plugins.module_utils import accounts, host, plan, process
from ansible_collections.dflash.fleet.plugins.module_utils.checks import Check, make
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

#: Least glibc: the manylinux tag of vLLM's own wheels and of torch (manylinux_2_28).
GLIBC = [2, 28]
#: Driver branch of CUDA 13.0 (NVIDIA's CUDA toolkit release notes, table of minimum driver versions).
DRIVER = 580
#: CUDA 13 dropped what came before Turing.
CAPABILITY = 7.5
ROOT_LENGTH = 40


def gather(
    root: str,
    user: str,
    python: str,
    address: str,
    port: int,
    instance: str,
    source_repo: str = "",
    deadline: float = 30.0,
) -> Dict[str, Any]:
    """Facts of this host.  ``source_repo`` empty: the repository is not asked for (no build needed)."""
    try:
        account: accounts.Account = accounts.worker(user)
        missing_account = ""
    except DflashError as error:
        account, missing_account = accounts.caller(), str(error)
    facts: Dict[str, Any] = dict(host.system(), **host.identity())
    try:
        facts["python"] = host.python(python, account)
        facts["python_error"] = ""
    except DflashError as error:
        facts["python"], facts["python_error"] = None, str(error)
    holder = host.port_holder(address, port)
    own = process.members(os.path.join(root, "instances", instance)) if holder else []
    if holder and set(process.listener_pids(port)) & {item.pid for item in own}:
        holder = None
    facts.update(
        account=account.name,
        missing_account=missing_account,
        memory_gib=host.memory_gib(),
        disk_gib=host.disk_gib(root),
        mount_options=host.mount_options(root),
        root=root,
        root_problem=root_problem(root),
        port=port,
        port_holder=holder,
        cpu_flags=host.cpu_flags(),
        tools=[name for name in ("git", "gcc", "cc") if shutil.which(name, path=host.SEARCH)],
        headers=bool(glob.glob("/usr/include/python3*/Python.h")),
        compute_capabilities=host.compute_capabilities(),
        service_manager="systemd" if os.path.isdir("/run/systemd/system") else "supervisor",
        source_repo=source_repo,
        source_problem=source_problem(source_repo, account, deadline) if source_repo else "",
    )
    return facts


def root_problem(root: str) -> str:
    """Why the root folder cannot be used by this caller, or an empty string."""
    parent = host.existing_parent(root)
    if os.path.islink(root):
        return "%s is a symbolic link" % root
    blocked = [folder for folder in _parents(root) if os.path.lexists(folder) and not os.path.isdir(folder)]
    if blocked:
        return "%s is not a folder" % blocked[0]
    if parent == root:
        owner = os.stat(root).st_uid
        if owner != os.geteuid():
            return "%s belongs to uid %d, not to this account (uid %d)" % (root, owner, os.geteuid())
    elif not os.access(parent, os.W_OK):
        return "%s cannot be made: no permission in %s" % (root, parent)
    closed = [folder for folder in _parents(root) if os.path.isdir(folder) and not os.stat(folder).st_mode & 0o001]
    if closed and os.geteuid() == 0:
        return "the service account cannot enter %s (mode %o)" % (closed[0], os.stat(closed[0]).st_mode & 0o777)
    return ""


def _parents(path: str) -> List[str]:
    out = []
    while path != "/":
        out.append(path)
        path = os.path.dirname(path)
    return out


def source_problem(repo: str, account: accounts.Account, deadline: float) -> str:
    """The first line of what git says when the repository cannot be read, or an empty string."""
    git = shutil.which("git", path=host.SEARCH)
    if not git:
        return "git is not installed"
    env = {"PATH": host.SEARCH, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    env.update(
        {
            name: value
            for name, value in os.environ.items()
            if re.match(r"^(GIT_SSL|SSL_CERT|https?_proxy|no_proxy)", name)
        }
    )
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        # A local repository of another owner is refused unless a configuration file names it safe (an environment
        # variable does not reach the process that serves it); what is fetched is checked by its hash anyway.
        with open(os.path.join(home, ".gitconfig"), "w", encoding="utf-8") as handle:
            handle.write("[safe]\n\tdirectory = *\n")
        try:
            done = subprocess.run(
                [git, "ls-remote", "--quiet", "--heads", repo],
                capture_output=True,
                text=True,
                timeout=deadline,
                env=dict(env, HOME=home),
                cwd="/",
                stdin=subprocess.DEVNULL,
                check=False,
                **accounts.drop_to(account),
            )
        except subprocess.TimeoutExpired:
            return "no answer within %d s" % deadline
        except OSError as error:
            return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["git ls-remote failed"])[0]


def judge(facts: Mapping[str, Any], device: str, disk_gib: float, memory_gib: float) -> List[Check]:
    """The host's checks, cheapest first; those of the other device are left out."""
    out: List[Check] = []

    def say(
        check_id: str, good: bool, expected: Any, actual: Any, hint: Optional[str] = None, evidence: Any = None
    ) -> None:
        out.append(
            make(check_id, "pass" if good else "fail", expected, actual, hint=None if good else hint, evidence=evidence)
        )

    platform = "%s %s" % (facts["system"], facts["machine"])
    python = facts["python"]
    glibc = python["glibc"] if python else ""
    say(
        "host.platform",
        platform == "Linux x86_64" and (not python or GLIBC <= plan.glibc_key(glibc) < [999]),
        "Linux x86_64, glibc >= 2.28",
        "%s, glibc %s" % (platform, glibc or "unknown"),
    )
    problem = facts["root_problem"]
    if not problem and len(facts["root"]) > ROOT_LENGTH:
        problem = "%d characters long" % len(facts["root"])
    if not problem and "noexec" in facts["mount_options"]:
        problem = "on a mount with noexec"
    say("host.root", not problem, "usable", problem or "usable", evidence=facts["root"])
    say(
        "host.python",
        bool(python and python["venv"]),
        "a Python with venv that %s can run" % facts["account"],
        facts["python_error"]
        or ("%s %s%s" % (python["path"], python["version"], "" if python["venv"] else ", without venv")),
    )
    say("host.tools", "git" in facts["tools"], "git", ", ".join(facts["tools"]) or "none")
    if device == "cpu":
        say(
            "host.cpu_flags",
            "avx2" in facts["cpu_flags"],
            "avx2",
            " ".join(flag for flag in facts["cpu_flags"] if flag.startswith(("avx", "amx"))) or "none",
        )
    say("host.memory", facts["memory_gib"] >= memory_gib, ">= %.1f GiB" % memory_gib, "%.1f GiB" % facts["memory_gib"])
    say(
        "host.disk",
        facts["disk_gib"] >= disk_gib,
        ">= %.1f GiB at %s" % (disk_gib, facts["root"]),
        "%.1f GiB" % facts["disk_gib"],
    )
    say("host.port", not facts["port_holder"], "port %d free" % facts["port"], facts["port_holder"] or "free")
    if facts["source_repo"]:
        say("host.source", not facts["source_problem"], facts["source_repo"], facts["source_problem"] or "answers")
    if device == "cuda":
        capabilities = [float(text) for text in facts["compute_capabilities"]]
        say(
            "host.gpu",
            bool(capabilities) and min(capabilities) >= CAPABILITY,
            "a GPU of capability >= %s" % CAPABILITY,
            ", ".join(facts["compute_capabilities"]) or "none",
        )
        branch = facts["driver"].split(".")[0]
        say("host.driver", branch.isdigit() and int(branch) >= DRIVER, ">= %d" % DRIVER, facts["driver"] or "none")
        say(
            "host.headers",
            facts["headers"] and ("gcc" in facts["tools"] or "cc" in facts["tools"]),
            "C compiler and Python.h",
            "compiler %s, Python.h %s"
            % ("there" if "gcc" in facts["tools"] else "missing", "there" if facts["headers"] else "missing"),
        )
    return out
