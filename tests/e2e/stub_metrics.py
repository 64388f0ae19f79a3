# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""stub-metrics: a proxy to the real server that rewrites its speculative counters and nothing else.

It shows that the verdict follows the counters.  It is a stub by name, and stands in for a fault that
no build on this machine has.
"""

from __future__ import annotations

import http.server
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

COUNTER = re.compile(
    r"^(vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)_total\{([^}]*)\}) (\S+)$"
)


def rewrite(text: str, length: float) -> str:
    """The exposition with accepted tokens as an acceptance length of ``length`` has them, drafts as they are."""
    drafts = sum(
        float(found.group(4)) for found in map(COUNTER.match, text.splitlines()) if found and found.group(2) == "drafts"
    )
    out = []
    for line in text.splitlines():
        found = COUNTER.match(line)
        if found and found.group(2) != "drafts":
            share = length - 1
            if found.group(2) == "accepted_tokens_per_pos":
                position = int(re.findall(r'position="(\d+)"', found.group(3))[0])
                share = min(1.0, max(0.0, length - 1 - position))
            line = f"{found.group(1)} {drafts * share!r}"
        out.append(line)
    return "\n".join(out) + "\n"


@contextmanager
def proxy(port: int, upstream: str, length: float) -> Iterator[str]:
    """Serve on a loopback port until the block ends; yields the base URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def _pass(self, body: bytes | None) -> None:
            request = urllib.request.Request(upstream + self.path, data=body, method=self.command)
            for name in ("Content-Type", "Authorization"):
                if self.headers[name]:
                    request.add_header(name, self.headers[name])
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    status, kind, data = answer.status, answer.headers["Content-Type"], answer.read()
            except urllib.error.HTTPError as error:
                status, kind, data = error.code, error.headers["Content-Type"], error.read()
            except urllib.error.URLError:
                status, kind, data = 502, "text/plain", b"the server behind the proxy is not there"
            if self.path == "/metrics" and status == 200:
                data = rewrite(data.decode(), length).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._pass(None)

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers["Content-Length"] or 0)))

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.shutdown()
        server.server_close()
