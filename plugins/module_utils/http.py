# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Questions to one server: with a deadline, without proxies or redirects, the API key from a file."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Dict, List, NamedTuple, Optional

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError

#: No answer of a server is larger; a stranger on the port must not fill the memory.
BODY_MAX = 64 << 20


class NoAnswer(Exception):
    """The server did not answer: nobody listens, it closed the connection, or time ran out."""


class Answer(NamedTuple):
    """Status and text of an answer; an HTTP error is an answer too."""

    status: int
    text: str

    def json(self) -> Any:
        """The JSON value of the text, None when it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def complaint(self) -> str:
        """What an error answer says, in one line."""
        value = self.json()
        error = value.get("error", value.get("detail")) if isinstance(value, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        return "HTTP %d: %s" % (self.status, " ".join(str(text or self.text).split())[:300] or "(no text)")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """A redirect would carry the API key elsewhere."""
        return


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def read_key(path: Optional[str]) -> Optional[str]:
    """The API key in a file: its text, or the value of ``VLLM_API_KEY=`` in an env file.

    None without a path.  Raises ``DflashError`` where a path is given and holds no key.
    """
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DflashError(
            "The API key cannot be read: %s" % (getattr(error, "strerror", None) or "it is no text"), path,
            "Check that the file exists on this host and that this account may read it.",
        ) from None
    for line in text.splitlines():
        if line.startswith("VLLM_API_KEY="):
            text = line.partition("=")[2]
    if not text or len(text.split()) != 1:
        raise DflashError("The API key file must hold one word", path, "Write the key alone into it.")
    return text


class Client:
    """Asks one server; ``deadline`` (monotonic) ends every request."""

    def __init__(self, base_url: str, key: Optional[str] = None, deadline: Optional[float] = None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise DflashError("%r is no address of a server" % base_url, "base_url", "Give http://host:port.")
        self.base_url = base_url.rstrip("/")
        self.key = key
        self.deadline = deadline

    def get(self, path: str, timeout: float = 10.0) -> Answer:
        """Raises ``NoAnswer``."""
        return self._ask(path, None, timeout)

    def post(self, path: str, payload: Any, timeout: float = 60.0) -> Answer:
        """Raises ``NoAnswer``."""
        return self._ask(path, json.dumps(payload).encode("utf-8"), timeout)

    def _ask(self, path: str, data: Optional[bytes], timeout: float) -> Answer:
        limit = time.monotonic() + timeout
        if self.deadline is not None:
            limit = min(limit, self.deadline)
        left = limit - time.monotonic()
        if left <= 0:
            raise NoAnswer("the time was over before the question")
        headers: Dict[str, str] = {"Accept": "*/*"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        address = path if path.startswith(("http://", "https://")) else self.base_url + path
        request = urllib.request.Request(address, data=data, headers=headers)
        try:
            try:
                with _OPENER.open(request, timeout=left) as response:
                    return Answer(response.status, _body(response, limit))
            except urllib.error.HTTPError as error:
                with error:
                    return Answer(error.code, _body(error, limit))
        except urllib.error.URLError as error:
            raise NoAnswer(_reason(error.reason)) from None
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswer(_reason(error)) from None


def _body(response: Any, limit: float) -> str:
    parts: List[bytes] = []
    size = 0
    while True:
        block = response.read1(1 << 16) if hasattr(response, "read1") else response.read(1 << 16)
        if not block:
            return b"".join(parts).decode("utf-8", errors="replace")
        parts.append(block)
        size += len(block)
        if size > BODY_MAX:
            raise OSError("the answer is larger than %d MB" % (BODY_MAX >> 20))
        if time.monotonic() > limit:
            raise socket.timeout("timed out")


def _reason(error: Any) -> str:
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def healthy(host: str, port: int, timeout: float = 5.0) -> bool:
    """Does a server on this machine say that it is well?  Needs no key."""
    from ansible_collections.dflash.fleet.plugins.module_utils import launch

    try:
        return Client(launch.base_url(host, port)).get("/health", timeout).status == 200
    except NoAnswer:
        return False
