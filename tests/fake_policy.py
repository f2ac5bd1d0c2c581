"""A policy behind an OpenAI-compatible address on loopback, for tests: `/v1/chat/completions`, `/v1/responses`.

    with FakePolicy() as policy:
        policy.url                      # "http://127.0.0.1:PORT/v1"
        policy.failures["Why?"] = [503, 429]   # the next requests with this prompt are refused so

It answers `Answer NUMBER to PROMPT.` and counts: two requests of one prompt have two different completions.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

from loopback import Asked, Loopback


class FakePolicy:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failures: dict[str, list[int]] = defaultdict(list)
        self.replies: dict[str, Any] = {}
        """By prompt, another completion than the usual one: text, or what a chat message or a list of items has."""
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = Loopback(self._answer)
        self.url = f"{self._server.url}/v1"

    def __enter__(self) -> FakePolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def _answer(self, asked: Asked) -> tuple[int, dict[str, Any]]:
        if asked.method == "GET":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}]}
        body = asked.json
        prompt = self._prompt(body)
        with self._lock:
            self.requests.append(body)
            if self.failures[prompt]:
                status = self.failures[prompt].pop(0)
                return status, {"error": {"message": f"told to answer {status}"}}
            self._asked[prompt] += 1
            reply = self.replies.get(prompt, f"Answer {self._asked[prompt]} to {prompt}.")
        response = self.response if asked.path.endswith("/responses") else self._completion
        return 200, response(body, reply)

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

    def response(self, body: dict[str, Any], reply: Any) -> dict[str, Any]:
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
