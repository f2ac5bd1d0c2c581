"""A policy behind an OpenAI-compatible address on loopback, as NeMo Gym asks it:
`FakePolicy().url`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from loopback import Asked, Loopback


class FakePolicy:
    """Responds `Answer NUMBER to PROMPT.`, so that completions of a prompt differ, or as `replies`
    say by prompt."""

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.server = Loopback(self._answer)
        self.url = f"{self.server.url}/v1"

    def _answer(self, asked: Asked) -> tuple[int, dict[str, Any]]:
        if asked.method == "GET":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}]}
        body = asked.json
        given = body.get("messages", body.get("input"))
        content = given if isinstance(given, str) else given[-1].get("content", "")
        prompt = (
            content
            if isinstance(content, str)
            else "".join(part.get("text", "") for part in content)
        )
        with self._lock:
            self._asked[prompt] += 1
            reply = self.replies.get(prompt, f"Answer {self._asked[prompt]} to {prompt}.")
        if asked.path.endswith("/responses"):
            return 200, response(reply)
        message = {"role": "assistant", "content": reply}
        usage = {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
        }
        return 200, completion | {"choices": [choice], "usage": usage}


def response(reply: str) -> dict[str, Any]:
    """As the Responses API has it, with a thought before the message."""
    text = {"type": "output_text", "text": reply, "annotations": [], "logprobs": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "thinking"}],
    }
    details = {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1.0,
        "model": "policy",
        "status": "completed",
        "output": [thought, message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 10, "output_tokens": 7, "total_tokens": 17, **details},
    }
