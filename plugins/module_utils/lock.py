# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""What a ref means: resolved once, kept in the lock file, and from then on the lock wins."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import fcntl
import hashlib
import os
import re
import subprocess
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ansible_collections.dflash.fleet.plugins.module_utils import schema
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.files import read_json, write_json

SCHEMA = 1
COMMIT = re.compile(r"^[0-9a-f]{40}$")
SHORT = re.compile(r"^[0-9a-f]{7,39}$")
TIMEOUT = 120
#: Runs ``git ls-remote`` with these arguments after the repository; gives (return code, stdout, stderr).
Asker = Callable[[str, Sequence[str]], Tuple[int, str, str]]


def ask_git(repo: str, words: Sequence[str]) -> Tuple[int, str, str]:
    """``git ls-remote`` without ever asking a person for a password."""
    env = dict(os.environ, GIT_TERMINAL_PROMPT="0", GCM_INTERACTIVE="never", LC_ALL="C")
    env.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    options = [word for word in words if word.startswith("--")]
    patterns = [word for word in words if not word.startswith("--")]
    try:
        done = subprocess.run(
            ["git", "ls-remote", *options, "--", repo, *patterns], env=env, cwd="/", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False,
        )
    except FileNotFoundError:
        raise DflashError("git is not installed here", None, "Install git on the controller.") from None
    except subprocess.TimeoutExpired:
        return 128, "", "no answer within %d seconds" % TIMEOUT
    return done.returncode, done.stdout, done.stderr


def normal_repo(repo: str) -> str:
    """One spelling per repository: without final slashes and ``.git``, host in small letters."""
    text = repo.strip().rstrip("/")
    if text.endswith(".git"):
        text = text[:-4]
    match = re.match(r"^([a-z+]+://)([^/]+)(/.*)?$", text, re.IGNORECASE)
    if match:
        text = match.group(1).lower() + match.group(2).lower() + (match.group(3) or "")
    return text


def refuse_secrets(repo: str) -> None:
    """A password in a URL would end in the lock file, in reports and in process lists."""
    match = re.match(r"^[a-z+]+://([^/@]+)@", repo, re.IGNORECASE)
    if match and ":" in match.group(1):
        raise DflashError(
            "The repository's URL holds a password", "vllm_source_repo",
            "Take it out of the URL; give it to git by a credential helper or by ~/.netrc.",
        )


def candidates(ref: str) -> List[str]:
    """Full ref names that ``ref`` may stand for, the first that exists wins; tags peeled, tags before branches."""
    if ref.startswith("refs/"):
        return [ref + "^{}", ref]
    names = ["refs/tags/%s^{}" % ref, "refs/tags/%s" % ref, "refs/heads/%s" % ref, "refs/%s" % ref]
    return ["HEAD", *names] if ref == "HEAD" else names


def parse_refs(text: str) -> Dict[str, str]:
    """``git ls-remote`` output: full ref name to commit."""
    found = {}
    for line in text.splitlines():
        commit, _tab, name = line.partition("\t")
        if COMMIT.match(commit) and name:
            found[name] = commit
    return found


def reason(stderr: str, repo: str) -> DflashError:
    """One sentence for why a repository cannot be read."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(lines)
    first = next((line for line in lines if line.startswith("fatal:")), lines[0] if lines else "no reason given")
    first = first[6:].strip() if first.startswith("fatal:") else first
    if "dubious ownership" in text:
        return DflashError(
            "git does not read a repository that another account owns", repo,
            "git config --global --add safe.directory %s" % re.sub("^file://", "", repo),
        )
    if re.search(r"could not read Username|Authentication failed|Permission denied|prompts disabled", text):
        return DflashError(
            "The repository does not exist or needs a login", repo,
            "Check vllm_source_repo; give git a login by a credential helper, ~/.netrc or an SSH key.",
        )
    unreachable = r"resolve host|Temporary failure|unreachable|refused|timed out|no answer within|SSL|certificate"
    if re.search(unreachable, text):
        return DflashError(
            "The repository cannot be reached: %s" % first, repo,
            "Check the network, dflash_proxy and dflash_ca_bundle.",
        )
    return DflashError("The repository cannot be read: %s" % first, repo, "Check vllm_source_repo.")


def resolve(repo: str, ref: str, ask: Asker = ask_git) -> str:
    """The 40-hex commit that ``ref`` means in ``repo`` now.  A full commit stands for itself."""
    if COMMIT.match(ref):
        return ref
    if not ref.strip() or ref.startswith("-") or re.search(r"[\s~^:?*\[\\]|\.\.", ref):
        what = "%r cannot be the name of a ref" % ref
        raise DflashError(what, "vllm_source_ref", "Name a tag, branch, SHA or refs/...")
    names = candidates(ref)
    code, out, err = ask(repo, names)
    if code:
        raise reason(err, repo)
    found = parse_refs(out)
    for name in names:
        if name in found:
            return found[name]
    if SHORT.match(ref):
        raise DflashError("A shortened commit cannot be resolved: %s" % ref, repo, "Write all 40 digits.")
    raise DflashError("There is no ref %s in the repository" % ref, repo, nearest(repo, ref, ask))


def nearest(repo: str, ref: str, ask: Asker) -> str:
    """A sentence with the refs that look most like ``ref``."""
    code, out, _err = ask(repo, ["--tags", "--heads", "--refs"])
    names = [re.sub(r"^refs/(heads|tags)/", "", name) for name in parse_refs(out)] if not code else []
    close = difflib.get_close_matches(ref, names, 3, 0.5) or sorted(names)[-3:]
    return "Did you mean %s?" % ", ".join(close) if close else "Check vllm_source_ref."


# ---------------------------------------------------------------------- the lock file
def read_lock(path: str) -> Dict[str, Any]:
    """The lock, empty where there is no file.  A broken file is never taken for an empty one."""
    if not os.path.exists(path):
        return {"schema": SCHEMA, "pins": []}
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("pins"), list):
        what = "The lock file is not readable JSON of this product"
        raise DflashError(what, path, "Restore it from version control, or remove it.")
    if value.get("schema") != SCHEMA:
        raise DflashError("The lock file has schema %s, this release knows %d" % (value.get("schema"), SCHEMA), path)
    schema.require(value, "lock", path)
    return value


def find(lock: Dict[str, Any], repo: str, ref: str) -> Optional[Dict[str, Any]]:
    """The lock's entry for this ref of this repository."""
    wanted = normal_repo(repo)
    return next((pin for pin in lock["pins"] if normal_repo(pin["repo"]) == wanted and pin["ref"] == ref), None)


def other_repo(lock: Dict[str, Any], repo: str, ref: str) -> Optional[str]:
    """A repository that the lock knows this ref from, when it does not know it from ``repo``."""
    if find(lock, repo, ref):
        return None
    return next((pin["repo"] for pin in lock["pins"] if pin["ref"] == ref), None)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Only one run at a time changes the lock file; its folder is what is locked, so no other file is left."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DflashError("The lock file's folder cannot be used: %s" % error.strerror, folder) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_series(paths: Sequence[str]) -> List[Dict[str, str]]:
    """The patches of a series, in order: ``[{name, sha256, text}]``."""
    out: List[Dict[str, str]] = []
    for path in paths:
        try:
            with open(path, "rb") as handle:
                data = handle.read()
            text = data.decode("utf-8")
        except OSError as error:
            what = "A patch of the series cannot be read: %s" % error.strerror
            raise DflashError(what, path, "Check vllm_source_series.") from None
        except UnicodeDecodeError:
            what = "A patch of the series is not UTF-8 text"
            raise DflashError(what, path, "Binary patches are not supported.") from None
        if not re.search(r"^(diff --git |--- )", text, re.MULTILINE):
            raise DflashError("A file of the series holds no patch", path, "Make it with git format-patch.")
        name = os.path.basename(path)
        if any(item["name"] == name for item in out):
            raise DflashError("Two patches of the series have the same name", path, "Rename one of them.")
        out.append({"name": name, "sha256": hashlib.sha256(data).hexdigest(), "text": text})
    return out


def pin(repo: str, ref: str, lock_file: str, update: bool = False, dry: bool = False, ask: Asker = ask_git,
        now: Optional[str] = None) -> Dict[str, Any]:
    """What ``ref`` is pinned to: ``{changed, pin, moved, before, after}``; the lock is written unless ``dry``.

    ``before`` and ``after`` are the lock's pins, for a diff.
    """
    refuse_secrets(repo)
    if not lock_file:
        raise DflashError("No lock file is named", "vllm_source_lock_file")
    now = now or datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if COMMIT.match(ref):
        entry = {"repo": repo, "ref": ref, "commit": ref, "resolved_at": now}
        return {"changed": False, "pin": entry, "moved": None, "before": [], "after": []}
    known = find(read_lock(lock_file), repo, ref)
    if known and not update:
        return {"changed": False, "pin": dict(known, repo=repo), "moved": None, "before": [], "after": []}
    with locked(lock_file):
        lock = read_lock(lock_file)
        known = find(lock, repo, ref)
        if known and not update:
            return {"changed": False, "pin": dict(known, repo=repo), "moved": None, "before": [], "after": []}
        elsewhere = other_repo(lock, repo, ref)
        if elsewhere and not update:
            raise DflashError(
                "The lock knows %s from another repository, %s" % (ref, elsewhere), lock_file,
                "If the change of repository is meant, run once with -e vllm_source_update=true.",
            )
        commit = resolve(repo, ref, ask)
        before = [dict(item) for item in lock["pins"]]
        entry = {"repo": repo, "ref": ref, "commit": commit, "resolved_at": now}
        if known and known["commit"] == commit:
            return {"changed": False, "pin": dict(known, repo=repo), "moved": None, "before": [], "after": []}
        pins = [item for item in lock["pins"] if item is not known] + [entry]
        pins.sort(key=lambda item: (item["repo"], item["ref"]))
        if not dry:
            try:
                write_json(lock_file, schema.require({"schema": SCHEMA, "pins": pins}, "lock", lock_file))
            except OSError as error:
                raise DflashError(
                    "The lock file cannot be written: %s" % error.strerror, lock_file,
                    "Name another in vllm_source_lock_file.",
                ) from None
        return {"changed": True, "pin": entry, "moved": commit if known else None, "before": before, "after": pins}
