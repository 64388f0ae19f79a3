# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Questions end in time, go to nobody else, and carry the key that a file holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.dflash.fleet.plugins.module_utils import http
from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from tests.unit.stub_server import StubServer


def serve_raw(answer: bytes, pause: float = 0.0, times: int = 1) -> int:
    """A server that sends ``answer`` ``times`` times with pauses, to one caller."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as caller:
            caller.recv(65536)
            try:
                for _ in range(times):
                    caller.sendall(answer)
                    time.sleep(pause)
            except OSError:
                pass

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


def test_errors_are_answers_and_silence_is_not() -> None:
    with StubServer([]) as stub:
        answer = http.Client(stub.url).get("/nothing")
        assert (answer.status, answer.complaint()) == (404, "HTTP 404: Not Found")
    with pytest.raises(http.NoAnswer, match="Connection refused"):
        http.Client("http://127.0.0.1:9").get("/")
    with pytest.raises(http.NoAnswer):
        http.Client("http://127.0.0.1:%d" % serve_raw(b"")).get("/")
    with pytest.raises(http.NoAnswer):
        http.Client("http://127.0.0.1:%d" % serve_raw(b"no http\r\n\r\n")).get("/")


def test_a_slow_answer_ends_in_time() -> None:
    drip = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    begun = time.monotonic()
    with pytest.raises(http.NoAnswer, match="no answer in time"):
        http.Client("http://127.0.0.1:%d" % serve_raw(drip, 0.1, 50)).get("/", timeout=0.4)
    with pytest.raises(http.NoAnswer, match="over before the question"):
        http.Client("http://127.0.0.1:9", deadline=time.monotonic() - 1).get("/")
    assert time.monotonic() - begun < 3


def test_a_huge_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_MAX", 1000)
    port = serve_raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200000)
    with pytest.raises(http.NoAnswer, match="larger than"):
        http.Client("http://127.0.0.1:%d" % port).get("/")


def test_a_proxy_is_not_asked() -> None:
    code = (
        "import sys\n"
        "from ansible_collections.dflash.fleet.plugins.module_utils import http\n"
        "sys.exit(0 if http.Client(sys.argv[1]).get('/health').status == 200 else 1)\n"
    )
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    with StubServer([]) as stub:
        subprocess.run([sys.executable, "-c", code, stub.url], env=env, check=True)


def test_redirects_are_not_followed() -> None:
    with StubServer([]) as stub:
        there = b"HTTP/1.1 302 Found\r\nLocation: %s/health\r\nContent-Length: 0\r\n\r\n" % stub.url.encode()
        before = len(stub.paths)
        assert http.Client("http://127.0.0.1:%d" % serve_raw(there), key="k").get("/").status == 302
        assert len(stub.paths) == before


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert http.read_key(None) is None
    assert http.read_key("") is None
    for text in ("secret\n", "# x\nVLLM_API_KEY=secret\nOTHER=1\n"):
        path.write_text(text)
        assert http.read_key(str(path)) == "secret"
    for text in ("", "two words", "\n"):
        path.write_text(text)
        with pytest.raises(DflashError, match="one word"):
            http.read_key(str(path))
    with pytest.raises(DflashError, match="No such file"):
        http.read_key(str(tmp_path / "none"))
    with StubServer([], key="secret") as stub:
        assert http.Client(stub.url, "secret").get("/v1/models").status == 200
        assert http.Client(stub.url).get("/v1/models").status == 401


def test_healthy() -> None:
    with StubServer([]) as stub:
        assert http.healthy("127.0.0.1", stub.port)
        stub.healthy = False
        assert not http.healthy("127.0.0.1", stub.port)
    assert not http.healthy("127.0.0.1", 9, timeout=1)


def test_an_address_must_be_one() -> None:
    with pytest.raises(DflashError, match="no address"):
        http.Client("localhost:8000")
    with pytest.raises(DflashError, match="no address"):
        http.Client("file:///etc/passwd")
