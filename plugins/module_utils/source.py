# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Source on the builder: a mirror per repository, a checkout per build, and the series as commits.

Runs inside the build job, as the build account.  The build commit is made from the pin, the patches
and nothing else, so it is the same SHA on every host.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import short_hash, write_atomic
from ansible_collections.dflash.fleet.plugins.module_utils.lock import COMMIT, normal_repo, reason

#: A change of these means that binaries of another commit do not fit.
NATIVE_FOLDERS = ("csrc/", "cmake/")
NATIVE_FILES = ("CMakeLists.txt",)
NATIVE_SUFFIXES = (".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".hip", ".S", ".cmake")
#: Never built into the package, whatever lies there.
NOT_BUILT = ("tests/", "docs/", "benchmarks/", "examples/", "docker/", ".buildkite/", ".github/")
#: What may name a required commit: no option, no range, no expression.
REQUIRED = re.compile(r"^(?!-)(?!.*\.\.)[\w./+-]+$")
EXTENSION_CALLS = ("CMakeExtension", "Extension", "RustExtension", "CUDAExtension", "CppExtension")


class Git:
    """git in one folder, with one environment; every command goes to ``log``."""

    def __init__(self, folder: str, env: Mapping[str, str], log: Callable[[str], None]) -> None:
        self.folder, self.env, self.log = folder, dict(env), log

    def __call__(self, *words: str, check: bool = True, stdin: Optional[str] = None,
                 env: Optional[Mapping[str, str]] = None) -> subprocess.CompletedProcess[str]:
        argv = ["git", "-c", "core.autocrlf=false", "-c", "advice.detachedHead=false", "-c", "gc.auto=0", *words]
        self.log("$ git %s" % " ".join(words))
        try:
            done = subprocess.run(
                argv, cwd=self.folder, env={**self.env, **(env or {})}, input=stdin, text=True, errors="replace",
                stdin=None if stdin is not None else subprocess.DEVNULL, capture_output=True, check=False,
            )
        except FileNotFoundError:
            raise DflashError("git is not installed on the builder", None, "Install git.") from None
        if done.stderr.strip() and (check or done.returncode == 0):
            self.log(done.stderr.strip())
        if check and done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["exit status %d" % done.returncode]
            first = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[0])
            raise DflashError("git failed: %s" % first.strip(), "git %s" % " ".join(words[:3]))
        return done

    def text(self, *words: str) -> str:
        return self(*words).stdout.strip()


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """One process at a time, by a lock on ``path``."""
    with open(path, "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def mirror_path(root: str, repo: str) -> str:
    return os.path.join(root, "source", short_hash(normal_repo(repo)) + ".git")


def update_mirror(root: str, repo: str, ref: str, pin: str, env: Mapping[str, str], log: Callable[[str], None]) -> Git:
    """A bare mirror that has the pin and all tags (versions are made from tags); no network when it has both."""
    path = mirror_path(root, repo)
    with alone(path[:-4] + ".lock"):
        if not os.path.exists(os.path.join(path, "HEAD")):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            Git(path, env, log)("init", "--quiet", "--bare", ".")
        git = Git(path, env, log)
        if "origin" in git.text("remote").split():
            git("remote", "set-url", "origin", repo)
        else:
            git("remote", "add", "origin", repo)
        marks = os.path.join(path, "dflash")
        mark = os.path.join(marks, pin)
        if os.path.exists(mark) and has_commit(git, pin):
            return git
        fetch(git, repo, ref, pin)
        os.makedirs(marks, exist_ok=True)
        write_atomic(mark, normal_repo(repo) + "\n")
    return git


def has_commit(git: Git, commit: str) -> bool:
    return git("cat-file", "-e", commit + "^{commit}", check=False).returncode == 0


def fetch(git: Git, repo: str, ref: str, pin: str) -> None:
    """All branches and tags, then the ref itself, then the commit by its SHA: whatever gives the pin."""
    done = git("fetch", "--quiet", "--force", "--no-auto-gc", "origin",
               "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*", check=False)
    if done.returncode:
        raise reason(done.stderr, repo)
    if not has_commit(git, pin) and ref.startswith(("refs/", "pull/")):
        full = ref if ref.startswith("refs/") else "refs/" + ref
        git("fetch", "--quiet", "--force", "origin", "+%s:refs/dflash/%s" % (full, short_hash(ref)), check=False)
    if not has_commit(git, pin):
        git("fetch", "--quiet", "origin", pin, check=False)
    if not has_commit(git, pin):
        raise DflashError(
            "The repository no longer has the pinned commit %s (%s was moved by force?)" % (pin, ref), repo,
            "Run once with -e vllm_source_update=true to pin what %s means now." % ref,
        )
    # A commit fetched by its SHA has no name; give it one, or git's own cleaning may drop it.
    git("update-ref", "refs/dflash/pins/" + pin, pin)


# ---------------------------------------------------------------------- the series
def message_of(text: str, name: str) -> str:
    """The commit message of a patch: its subject and body, or its file name."""
    header, _sep, _rest = text.partition("\ndiff --git ")
    match = re.search(r"^Subject:[ ]*(.*(?:\n[ \t]+.*)*)", header, re.MULTILINE)
    if not match:
        return name + "\n"
    subject = re.sub(r"\s+", " ", re.sub(r"^\[PATCH[^\]]*\]\s*", "", match.group(1))).strip()
    body = header[match.end():].partition("\n\n")[2]
    body = re.split(r"^---\s*$", body, maxsplit=1, flags=re.MULTILINE)[0].strip()
    return (subject or name) + ("\n\n" + body if body else "") + "\n"


def identity_of(git: Git, commit: str) -> Dict[str, str]:
    """Author, committer and dates of a commit as git's environment variables."""
    shown = git("show", "--no-patch", "--format=%an%n%ae%n%ad%n%cn%n%ce%n%cd", "--date=raw", commit).stdout.split("\n")
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE",
             "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "GIT_COMMITTER_DATE")
    values = dict(zip(names, shown))
    for key in ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"):
        values[key] = "@" + values[key] if values[key] else "@0 +0000"
    for key in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        values[key] = values[key] or "unknown"
    return values


def apply_error(name: str, stderr: str) -> DflashError:
    """Which patch, which file, which line of it."""
    match = re.search(r"error: patch failed: (.+):(\d+)", stderr)
    if match:
        where = "%s, hunk at line %s" % (match.group(1), match.group(2))
    else:
        lines = [line[6:].strip() for line in stderr.splitlines() if line.startswith("error:")]
        where = lines[0] if lines else "no reason given"
    return DflashError(
        "The patch %s does not apply: %s" % (name, where), "vllm_source_series",
        "Make the patch again on the pinned commit, or pin the commit it was made for.",
    )


def apply_series(git: Git, pin: str, series: Sequence[Mapping[str, str]], log: Callable[[str], None]) -> str:
    """Put the series on the checked-out pin; gives the build commit.  A patch that is already in adds no commit."""
    head = pin
    if not series:
        return head
    identity = identity_of(git, pin)
    for patch in series:
        text = patch["text"]
        tried = git("apply", "--index", "--whitespace=nowarn", "-", check=False, stdin=text)
        if tried.returncode:
            if git("apply", "--index", "--reverse", "--check", "-", check=False, stdin=text).returncode == 0:
                log("already in: %s" % patch["name"])
                continue
            log(tried.stderr.strip())
            raise apply_error(patch["name"], tried.stderr)
        tree = git.text("write-tree")
        message = message_of(text, patch["name"])
        head = git("commit-tree", tree, "-p", head, stdin=message, env=identity).stdout.strip()
        git("update-ref", "--no-deref", "HEAD", head)
        log("applied: %s as %s" % (patch["name"], head))
    return head


def checkout(mirror: Git, folder: str, pin: str, series: Sequence[Mapping[str, str]], env: Mapping[str, str],
             log: Callable[[str], None]) -> str:
    """A work tree with the pin and the series; gives the build commit.  An untouched tree is used again."""
    if not COMMIT.match(pin):
        raise DflashError("A pin must be a commit of 40 digits, not %r" % pin, "vllm_source_ref")
    wanted = short_hash({"pin": pin, "series": [patch["sha256"] for patch in series]})
    mark = folder + ".commit"
    if os.path.isdir(os.path.join(folder, ".git")) and os.path.exists(mark):
        with open(mark, encoding="ascii") as handle:
            spec, _blank, commit = handle.read().strip().partition(" ")
        git = Git(folder, env, log)
        if spec == wanted and git("rev-parse", "HEAD", check=False).stdout.strip() == commit \
                and not git("status", "--porcelain", "--untracked-files=no", check=False).stdout.strip():
            return commit
    for path in (mark, folder):
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    mirror("clone", "--quiet", "--shared", "--no-checkout", mirror.folder, folder)
    git = Git(folder, env, log)
    git("checkout", "--quiet", "--detach", pin)
    head = git.text("rev-parse", "HEAD")
    if head != pin:
        raise DflashError("The checkout is at %s, not at the pin %s" % (head, pin), folder)
    commit = apply_series(git, pin, series, log)
    if git.text("rev-parse", "HEAD") != commit or git.text("status", "--porcelain", "--untracked-files=no"):
        raise DflashError("The checkout is not at the build commit %s" % commit, folder)
    write_atomic(mark, "%s %s\n" % (wanted, commit))
    return commit


# ---------------------------------------------------------------------- what binaries depend on
def native(path: str) -> bool:
    """Whether a changed file means that the binaries change."""
    if path.startswith(NOT_BUILT):
        return False
    return path.startswith(NATIVE_FOLDERS) or path in NATIVE_FILES or path.endswith(NATIVE_SUFFIXES)


def extension_calls(setup_py: str) -> List[str]:
    """The calls in setup.py that declare extensions, as text without layout."""
    try:
        tree = ast.parse(setup_py)
    except SyntaxError:
        return ["unreadable", setup_py]
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in EXTENSION_CALLS:
                calls.append(ast.dump(node))
    return sorted(calls)


def changed_natives(git: Git, base: str, commit: str) -> List[str]:
    """Files between two commits that make binaries of the one unfit for the other."""
    listed = git("diff", "--name-only", "--no-renames", "-z", base, commit).stdout.split("\0")
    names = sorted(name for name in listed if name)
    found = [name for name in names if native(name)]
    if "setup.py" in names:
        before, after = (git("show", "%s:setup.py" % side, check=False).stdout for side in (base, commit))
        if extension_calls(before) != extension_calls(after):
            found.append("setup.py (other extensions)")
    return found


def base_commit(git: Git, base: str) -> str:
    """The commit of a base named by tag, branch or SHA."""
    done = git("rev-parse", "--verify", "--quiet", base + "^{commit}", check=False)
    if done.returncode:
        raise DflashError(
            "The repository has no %s, the base that the ready-made binaries come from" % base,
            "vllm_build_precompiled_base", "Name a tag or commit of this repository, or build from source.",
        )
    return done.stdout.strip()


def native_changes(git: Git, base: str, commit: str) -> Dict[str, Any]:
    """What changed natively from a base to the build commit, as a fact: ``{base, commit, count, files, says}``.

    ``files`` holds the first hundred; ``says`` is ``python only`` or names them.
    """
    start = base_commit(git, base)
    found = changed_natives(git, start, commit)
    says = "python only"
    if found:
        shown = ", ".join(found[:8]) + (" and %d more" % (len(found) - 8) if len(found) > 8 else "")
        says = "%d native file%s: %s" % (len(found), "s" if len(found) > 1 else "", shown)
    return {"base": base, "commit": start, "count": len(found), "files": found[:100], "says": says}


def refuse_native(changes: Mapping[str, Any]) -> str:
    """The base's commit, when no native file differs; else one sentence that names them."""
    if changes["count"]:
        raise DflashError(
            "Ready-made binaries of %s do not fit: native files changed since: %s"
            % (changes["base"], changes["says"].partition(": ")[2]),
            "vllm_build_mode", "Use vllm_build_mode: source, or a base without these changes.",
        )
    return str(changes["commit"])


# ---------------------------------------------------------------------- commits that must be in
def required_commits(git: Git, pin: str, wanted: Sequence[str]) -> List[Dict[str, str]]:
    """Each wanted commit or ref that the pin contains, as ``{ref, commit}``; the first that it does not is an error.

    Ancestry only: a change that came in as another commit (squashed, picked) is not seen by it, and a commit that
    was taken back later still is one.  What the code does is for the capability checks to say.
    """
    found = []
    for name in wanted:
        commit = known_commit(git, name)
        asked = git("merge-base", "--is-ancestor", commit, pin, check=False)
        if asked.returncode not in (0, 1):
            raise DflashError("git cannot compare %s with the pin: %s" % (name, asked.stderr.strip()), git.folder)
        if asked.returncode:
            shown = name if commit == name else "%s (%s)" % (name, commit)
            raise DflashError(
                "The pin %s does not contain the required commit %s" % (pin, shown), "vllm_source_requires_commits",
                "Pin a commit that descends from it. If its change came in as another commit (squashed or picked), "
                "take it off the list: the capability checks run the code and decide.",
            )
        found.append({"ref": name, "commit": commit})
    return found


def known_commit(git: Git, name: str) -> str:
    """The commit of a name in the mirror; asked of the repository once where the mirror has it not."""
    if not REQUIRED.match(name):
        raise DflashError("%r cannot name a commit" % name, "vllm_source_requires_commits",
                          "Name a commit of 7 to 40 digits, a tag, a branch or refs/...")
    full = "refs/" + name if name.startswith("pull/") else name
    for attempt in (1, 2):
        done = git("rev-parse", "--verify", "--quiet", full + "^{commit}", check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        if attempt == 1 and full.startswith("refs/"):
            git("fetch", "--quiet", "--force", "origin", "+%s:%s" % (full, full), check=False)
        elif attempt == 1:
            git("fetch", "--quiet", "origin", full, check=False)
    raise DflashError(
        "The repository does not know the required commit %s (unknown object, or a short form that fits several)"
        % name, "vllm_source_requires_commits",
        "Write all 40 digits, a tag or a branch of this repository; a commit of another fork is not in it.",
    )


def facts(git: Git, pin: str) -> Dict[str, Any]:
    """What a plan prints of a pin: the nearest tag and how far behind it lies."""
    done = git("describe", "--tags", "--long", "--match", "v[0-9]*", pin, check=False)
    match = re.match(r"^(.*)-(\d+)-g[0-9a-f]+$", done.stdout.strip())
    return {"nearest": match.group(1), "ahead": int(match.group(2))} if match else {"nearest": "", "ahead": 0}
