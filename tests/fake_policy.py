"""A policy behind an OpenAI-compatible address on loopback, for tests: `/v1/chat/completions`, `/v1/responses`.

    with FakePolicy() as policy:
        policy.url                      # "http://127.0.0.1:PORT/v1"
        policy.failures["Why?"] = [503, 429]   # the next requests with this prompt are refused so

It answers `Answer NUMBER to PROMPT.` and counts: two requests of one prompt have two different answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakePolicy:
    def __init__(self, *, delay: float = 0.0, token: str | None = None) -> None:
        self.delay, self.token = delay, token
        self.requests: list[dict[str, Any]] = []
        self.failures: dict[str, list[int]] = defaultdict(list)
        self.retry_after: str | None = None
        self.replies: dict[str, Any] = {}
        """By prompt, an answer instead of the usual one: text, or what a chat message or a list of items has."""
        self.asked: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> FakePolicy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any], token: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            prompt = self._prompt(body)
            status = self.failures[prompt].pop(0) if self.failures[prompt] else 200
            if status == 200:
                self.asked[prompt] += 1
            number = self.asked[prompt]
        time.sleep(self.delay)
        with self._lock:
            self._at_once -= 1
        if self.token is not None and token != f"Bearer {self.token}":
            return 401, {"error": {"message": "no such key"}}
        if status != 200:
            return status, {"error": {"message": f"told to answer {status}"}}
        reply = self.replies.get(prompt, f"Answer {number} to {prompt}.")
        return 200, self._response(body, reply) if path.endswith("/responses") else self._completion(body, reply)

    def _prompt(self, body: dict[str, Any]) -> str:
        given = body.get("messages", body.get("input"))
        if isinstance(given, str):
            return given
        content = given[-1].get("content", "")
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    def _completion(self, body: dict[str, Any], reply: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17},
        }

    def _response(self, body: dict[str, Any], reply: Any) -> dict[str, Any]:
        text = {"type": "output_text", "text": reply, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
        thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "thinking"}]}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1.0,
            "model": body.get("model") or "policy",
            "status": "completed",
            "output": [thought, message] if isinstance(reply, str) else reply,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {"input_tokens": 10, "output_tokens": 7, "total_tokens": 17, **details},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        policy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*policy.answer(self.path, body, self.headers.get("Authorization", "")))

            def _send(self, status: int, value: dict[str, Any]) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                if status != 200 and policy.retry_after is not None:
                    self.send_header("Retry-After", policy.retry_after)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
