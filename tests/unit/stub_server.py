# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that answers and counts as vLLM does, right or wrong on demand."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubServer:
    """Answers from ``items``; each answer makes ``drafts`` drafts of ``k`` tokens, ``accepted`` of each accepted."""

    def __init__(self, items: list[dict[str, str]], **settings: Any) -> None:
        self.items = items
        self.model = "stub"
        self.k = 7
        self.drafts = 10
        self.accepted = 6
        self.speculates = True
        self.vllm = True
        self.engines = 1
        self.key = ""
        self.status = 200
        self.lag = 0
        self.uncounted = False
        self.background = 0
        self.running = 0
        self.wrong: dict[str, str] = {}
        self.chat = True
        self.healthy = True
        self.born = 1.796e9
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.seen: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.counts = {"drafts": 0, "accepted": 0, "requests": 0}
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            wbufsize = 1 << 16  # headers and body in one packet, or each answer waits 40 ms

            def log_message(self, *_args: Any) -> None:
                pass

            def reply(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                stub.paths.append(self.path)
                if self.path == "/metrics":
                    self.reply(200, stub.metrics())
                elif self.path == "/health":
                    self.reply(200 if stub.healthy else 503, "")
                elif stub.key and self.headers.get("Authorization") != "Bearer " + stub.key:
                    self.reply(401, json.dumps({"error": "Unauthorized"}))
                elif self.path == "/v1/models":
                    self.reply(200, json.dumps({"object": "list", "data": [{"id": stub.model}]}))
                else:
                    self.reply(404, json.dumps({"detail": "Not Found"}))

            def do_POST(self) -> None:
                stub.paths.append(self.path)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if stub.key and self.headers.get("Authorization") != "Bearer " + stub.key:
                    self.reply(401, json.dumps({"error": "Unauthorized"}))
                elif stub.status != 200:
                    self.reply(stub.status, json.dumps({"error": {"message": "the stub refuses"}}))
                elif self.path == "/v1/chat/completions" and not stub.chat:
                    self.reply(400, json.dumps({"error": {"message": "no chat template"}}))
                else:
                    self.reply(200, json.dumps(stub.answer(body)))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = "http://127.0.0.1:%d" % self.port
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> StubServer:
        self.thread.start()
        return self

    def __exit__(self, *_args: Any) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        known = {item["q"]: item.get("a", "") for item in self.items}
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.seen.append(body)
        threading.Event().wait(0.005)
        with self.lock:
            self.at_once -= 1
            if not self.uncounted:
                self.counts["requests"] += 1
                self.counts["drafts"] += self.drafts
                self.counts["accepted"] += self.drafts * self.accepted
        text = self.wrong.get(question, known.get(question, "?"))
        return {"choices": [{"message": {"content": text}, "text": text}], "usage": {"completion_tokens": 1}}

    def metrics(self) -> str:
        with self.lock:
            self.counts["drafts"] += self.background
            counts = dict(self.counts)
        if not self.vllm:
            return "python_info 1.0\n"
        lines = ["# HELP vllm:num_requests_running x", "# TYPE vllm:num_requests_running gauge"]
        for engine in range(self.engines):
            labels = 'engine="%d",model_name="%s"' % (engine, self.model)
            share = counts if engine == 0 else dict.fromkeys(counts, 0)
            lines.append("vllm:num_requests_running{%s} %d" % (labels, self.running))
            for reason in ("stop", "length"):
                value = share["requests"] if reason == "stop" else 0
                lines.append('vllm:request_success_total{%s,finished_reason="%s"} %d.0' % (labels, reason, value))
                lines.append('vllm:request_success_created{%s,finished_reason="%s"} 1.796e+09' % (labels, reason))
            if self.speculates:
                lines += [
                    "vllm:spec_decode_num_drafts_total{%s} %d.0" % (labels, share["drafts"]),
                    "vllm:spec_decode_num_drafts_created{%s} %r" % (labels, self.born),
                    "vllm:spec_decode_num_draft_tokens_total{%s} %d.0" % (labels, share["drafts"] * self.k),
                    "vllm:spec_decode_num_accepted_tokens_total{%s} %d.0" % (labels, share["accepted"]),
                    "vllm:spec_decode_num_accepted_tokens_created{%s} 1.796e+09" % labels,
                ]
                for position in range(self.k):
                    value = share["drafts"] if position < self.accepted else 0
                    lines.append(
                        'vllm:spec_decode_num_accepted_tokens_per_pos_total{%s,position="%d"} %d.0'
                        % (labels, position, value)
                    )
        return "\n".join(lines) + "\n"
