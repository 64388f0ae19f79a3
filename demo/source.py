#!/usr/bin/env python3
# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Make a git repository out of the release archive of vLLM 0.32.0.

    python3 demo/source.py FOLDER.git

The demo needs a real pin, a tag in a git repository, on machines that reach a package index but no git host. The
release archive holds the same tree, so this command turns it into a bare repository with one commit and the tag
v0.32.0. Author, dates and message are fixed: the commit has the same SHA on every machine, and that SHA is checked.

The archive comes from the package index (and the extra indexes) that pip is configured with, and its hash is checked
against the one below; --archive takes a file that is already here. A second run finds the repository and changes
nothing. The last line of the output is JSON: changed, repo, ref, commit.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import json
import netrc
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

PROJECT = "vllm"
VERSION = "0.32.0"
ARCHIVE = f"{PROJECT}-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
TAG = f"v{VERSION}"
COMMIT = "19b98277cb1658c6be55387d1cba125a0afdf08e"

BRANCH = "main"
WHO = "vLLM release archive <release@vllm.invalid>"
WHEN = "2026-10-20T00:00:00+00:00"
MESSAGE = f"{PROJECT} {VERSION}, the tree of its release archive\n"

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
DOWNLOAD_TIMEOUT_S = 180


class DemoError(Exception):
    """What went wrong, in one line with the way out of it."""


def pip_output(*args: str) -> str:
    """What `pip ARGS` prints; pip is the one of the running interpreter, else the one on the path."""
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        try:
            done = subprocess.run([*command, *args], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return done.stdout
    raise DemoError("no pip was found to read the package index from; install pip, or give --archive FILE")


def pip_setting(config: str, key: str) -> str:
    """The value of an option in `pip config list`; the environment wins, then the command's section, then global."""
    values = dict(re.findall(r"^(\S+)='(.*)'$", config, flags=re.MULTILINE))
    for section in (":env:", "download", "global"):
        if f"{section}.{key}" in values:
            return values[f"{section}.{key}"]
    return ""


def indexes() -> list[str]:
    """The package indexes pip would ask, in its order; the first is pip's own default when none is configured."""
    config = pip_output("config", "list")
    first = pip_setting(config, "index-url")
    if not first:
        found = re.search(r"\(default\s+(\S+?)\)", pip_output("download", "--help").split("--index-url", 1)[-1])
        if not found:
            raise DemoError("pip tells no package index; set index-url in pip's configuration, or give --archive FILE")
        first = found.group(1)
    extra = pip_setting(config, "extra-index-url").replace("\\n", " ").split()
    return [url.rstrip("/") for url in (first, *extra)]


class LinkParser(html.parser.HTMLParser):
    """Collects the targets of the links of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def open_url(url: str, accept: str = "*/*") -> urllib.request.addinfourl:
    """Open a URL; credentials come from the URL itself or from netrc, as they do for pip."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "dflash-demo"}
    user, password = parts.username, parts.password
    if parts.scheme == "file" and parts.path.endswith("/"):
        url += "index.html"
    elif parts.hostname:
        try:
            login = netrc.netrc().authenticators(parts.hostname)
        except (OSError, netrc.NetrcParseError):
            login = None
        if not user and login:
            user, password = login[0], login[2]
        if user:
            manager = urllib.request.HTTPPasswordMgrWithPriorAuth()
            port = f":{parts.port}" if parts.port else ""
            url = urllib.parse.urlunsplit(parts._replace(netloc=parts.hostname + port))
            manager.add_password(None, url, urllib.parse.unquote(user), urllib.parse.unquote(password or ""), True)
            opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(manager))
            return opener.open(urllib.request.Request(url, headers=headers), timeout=DOWNLOAD_TIMEOUT_S)
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=DOWNLOAD_TIMEOUT_S)


def archive_links(index: str) -> Iterator[str]:
    """Addresses of the archive on one index, whose page may be JSON or HTML."""
    page = f"{index}/{PROJECT}/"
    with open_url(page, f"{SIMPLE_JSON}, text/html;q=0.5") as answer:
        base, kind, text = answer.url, answer.headers.get("Content-Type", ""), answer.read().decode()
    if kind.startswith(SIMPLE_JSON):
        links = [entry["url"] for entry in json.loads(text)["files"]]
    else:
        parser = LinkParser()
        parser.feed(text)
        links = parser.links
    for link in links:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base, link)).url
        if urllib.parse.unquote(url).rsplit("/", 1)[-1] == ARCHIVE:
            yield url


def sha256(path: pathlib.Path) -> str:
    """Hash of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_archive(path: pathlib.Path) -> None:
    """Refuse an archive whose bytes are not the expected ones."""
    found = sha256(path)
    if found != ARCHIVE_SHA256:
        raise DemoError(f"{path}: sha256 is {found}, expected {ARCHIVE_SHA256}; remove the file and fetch it again")


def fetch_archive(folder: pathlib.Path) -> pathlib.Path:
    """Take the archive from the first index that has it."""
    told = []
    for index in indexes():
        try:
            for url in archive_links(index):
                path = folder / ARCHIVE
                with open_url(url) as answer, path.open("wb") as stream:
                    shutil.copyfileobj(answer, stream)
                check_archive(path)
                return path
            told.append("one index does not list it")
        except (OSError, ValueError, KeyError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            told.append(f"one index did not answer ({reason})")
    raise DemoError(f"{ARCHIVE} was found on none of pip's indexes: {'; '.join(told)}; give --archive FILE")


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpack the archive without owners and refuse what would leave the folder; return the tree's root."""
    root = f"{PROJECT}-{VERSION}"
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = pathlib.PurePosixPath(member.name).parts
            if parts[:1] != (root,) or ".." in parts:
                raise DemoError(f"{archive}: member {member.name!r} lies outside {root}/; the archive is not usable")
            if member.issym() or member.islnk():
                target = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
                if member.islnk():
                    target = os.path.normpath(member.linkname)
                if not target.startswith(root + "/"):
                    raise DemoError(f"{archive}: link {member.name!r} points outside; the archive is not usable")
            elif not (member.isfile() or member.isdir()):
                continue
            member.uid, member.gid = os.getuid(), os.getgid()
            member.uname = member.gname = ""
            tar.extract(member, folder)
    return folder / root


def git(git_dir: pathlib.Path, *args: str, work_tree: pathlib.Path | None = None) -> str:
    """Run git without the user's and the machine's configuration, so that nothing of it reaches the commit."""
    name, _, email = WHO.rstrip(">").partition(" <")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull, GIT_CONFIG_NOSYSTEM="1", LC_ALL="C",
        GIT_AUTHOR_NAME=name, GIT_AUTHOR_EMAIL=email, GIT_AUTHOR_DATE=WHEN,
        GIT_COMMITTER_NAME=name, GIT_COMMITTER_EMAIL=email, GIT_COMMITTER_DATE=WHEN,
        GIT_CONFIG_COUNT="3",
        GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*",
        GIT_CONFIG_KEY_1="core.autocrlf", GIT_CONFIG_VALUE_1="false",
        GIT_CONFIG_KEY_2="core.excludesFile", GIT_CONFIG_VALUE_2=os.devnull,
    )
    place = [f"--git-dir={git_dir}"] + ([f"--work-tree={work_tree}"] if work_tree else [])
    try:
        done = subprocess.run(["git", *place, *args], env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DemoError("git is not installed; install git") from error
    if done.returncode:
        raise DemoError(f"git {args[0]} failed: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return done.stdout.strip()


def make_repository(tree: pathlib.Path, bare: pathlib.Path) -> None:
    """Commit the tree and tag it; the tree's own .gitignore keeps files out that a checkout would not have."""
    git(bare, "init", "--quiet", "--bare", f"--initial-branch={BRANCH}")
    git(bare, "add", "--all", work_tree=tree)
    commit = git(bare, "commit-tree", git(bare, "write-tree"), "-m", MESSAGE.strip())
    if commit != COMMIT:
        raise DemoError(f"the commit made is {commit}, expected {COMMIT}; this git stores the tree in another way")
    git(bare, "update-ref", f"refs/heads/{BRANCH}", commit)
    git(bare, "tag", TAG, commit)
    (bare / "index").unlink()
    git(bare, "repack", "-a", "-d", "-q")
    git(bare, "config", "uploadpack.allowReachableSHA1InWant", "true")
    (bare / "description").write_text(MESSAGE)


def open_to_all(folder: pathlib.Path) -> None:
    """Readable by every account: the one that clones is not the one that made it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def present(target: pathlib.Path) -> bool:
    """True when the repository is there and holds the expected commit; refuse a folder that is something else."""
    if not target.exists():
        return False
    try:
        if git(target, "rev-parse", "--verify", f"refs/tags/{TAG}^{{commit}}") == COMMIT:
            git(target, "rev-list", "--objects", "--quiet", COMMIT)
            return True
    except DemoError:
        pass
    raise DemoError(f"{target} exists and is not the demo's repository; remove it, or name another folder")


def main(argv: list[str] | None = None) -> int:
    """Make the repository unless it is there, and say so in JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=pathlib.Path, help="folder of the bare repository, made when it is missing")
    parser.add_argument("--archive", type=pathlib.Path, help=f"a copy of {ARCHIVE}, instead of the package index")
    args = parser.parse_args(argv)
    os.umask(0o022)
    target = args.target.resolve()
    try:
        changed = not present(target)
        if changed:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
                folder = pathlib.Path(scratch)
                archive = args.archive or fetch_archive(folder)
                check_archive(archive)
                make_repository(unpack(archive, folder), folder / "bare")
                open_to_all(folder / "bare")
                (folder / "bare").rename(target)
    except (DemoError, OSError, tarfile.TarError) as error:
        print(f"demo/source.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"changed": changed, "repo": str(target), "ref": TAG, "commit": COMMIT}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
