"""A judge behind an OpenAI-compatible address on loopback, for tests.

judge = FakeJudge(lambda request: "[[A]]" if len(places(request)[0]) > 9 else "[[B]]")
judge.url, judge.requests
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from loopback import Asked, Loopback


def completion(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


class FakeJudge:
    """``answer` makes of a request a text, or (status, body) as `Loopback` has it."""

    def __init__(
        self, answer: Callable[[dict[str, Any]], Any] = lambda request: "Rating: [[7]]"
    ) -> None:
        self.answer = answer
        self.server = Loopback(self._answer)
        self.url = f"{self.server.url}/v1"

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [asked.json for asked in self.server.requests]

    def _answer(self, asked: Asked) -> Any:
        assert asked.path == "/v1/chat/completions"
        answer = self.answer(asked.json)
        json_type = {"content-type": "application/json"}
        if isinstance(answer, tuple):
            return (*answer[:2], json_type | (answer[2] if len(answer) > 2 else {}))
        return 200, completion(answer), json_type


def between_tags(request: dict[str, Any], name: str) -> str:
    found = re.search(
        rf"<{name} (\w+)>\n(.*)\n</{name} \1>", request["messages"][-1]["content"], re.DOTALL
    )
    assert found is not None
    return found[2]


def places(request: dict[str, Any]) -> list[str]:
    """The completions of a question, in the order in which they are shown."""
    names = [
        name
        for name, _ in re.findall(r"<(completion_\w+) (\d+)>", request["messages"][1]["content"])
    ]
    return [between_tags({"messages": request["messages"][:2]}, name) for name in names]
