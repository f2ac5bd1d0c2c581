"""`Policy`: a language model behind an OpenAI-compatible address, asked by chat completions or by responses.

    policy = Policy(client, model="my-model", api="chat", sampling={"temperature": 1.0})
    response = await policy.complete(task)         # in the form of the Responses API, whichever API was used

The parameters of a row go before `sampling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from treeward.data.preference import Message
from treeward.errors import DataError
from treeward.http import ServerError
from treeward.openai_client import post
from treeward.serving.rollouts.rows import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Api", "Policy"]

Api = Literal["chat", "responses"]


@dataclass(frozen=True, slots=True)
class Policy:
    """`sampling`: `temperature`, `top_p` and `max_output_tokens` for rows that do not set them."""

    client: AsyncOpenAI
    model: str
    api: Api
    sampling: Mapping[str, Any]

    def request(self, task: Task) -> dict[str, Any]:
        """The body of the request. The chat API is given the parameters under its own names."""
        params = {**self.sampling, **task.params}
        if self.api == "responses":
            return params | {"model": self.model}
        for key in ("input", "instructions"):
            params.pop(key, None)
        if "max_output_tokens" in params:
            params["max_tokens"] = params.pop("max_output_tokens")
        reasoning = params.pop("reasoning", None) or {}
        if not isinstance(reasoning, Mapping):
            need, field = "{effort: low}", "responses_create_params.reasoning"
            raise DataError("the reasoning is no mapping", where=task.where, field=field, got=reasoning, need=need)
        if effort := reasoning.get("effort"):
            params["reasoning_effort"] = effort
        tools = [_chat_tool(tool, task.where) for tool in params.pop("tools", None) or ()]
        choice = params.get("tool_choice")
        if isinstance(choice, Mapping) and "name" in choice:
            params["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        messages = [_chat_message(message) for message in task.chat]
        return params | ({"tools": tools} if tools else {}) | {"model": self.model, "messages": messages}

    async def complete(self, task: Task) -> dict[str, Any]:
        """The policy's completion. Raises `ServerError`."""
        path = "/chat/completions" if self.api == "chat" else "/responses"
        reply = await post(self.client, path, self.request(task))
        try:
            response = reply if self.api == "responses" else _as_response(reply)
            if not isinstance(response["output"], list):
                raise TypeError(f"output is {response['output']}")
        except (LookupError, TypeError, AttributeError) as error:
            where = f"{str(self.client.base_url).rstrip('/')}{path}"
            summary = "the policy's answer has no output"
            raise ServerError(summary, status=200, where=where, got=reply, need=f"a completion: {error!r}") from error
        return dict(response)


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise DataError(
            "chat completions have no such tool",
            where=where,
            field="responses_create_params.tools",
            got=tool,
            need="tools of the type function",
            fix="--api responses",
        )
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _chat_message(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    as_text = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": as_text}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_response(reply: Any) -> dict[str, Any]:
    """A chat completion in the form of the Responses API."""
    choice = reply["choices"][0]
    output = _output(choice["message"])
    stopped_by = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(choice.get("finish_reason"))
    usage = reply.get("usage") or {}
    return {
        "id": reply.get("id") or "",
        "object": "response",
        "created_at": reply.get("created") or 0,
        "model": reply.get("model") or "",
        "status": "incomplete" if stopped_by else "completed",
        "incomplete_details": {"reason": stopped_by} if stopped_by else None,
        "output": output,
        "usage": {
            "input_tokens": usage.get("prompt_tokens"),
            "output_tokens": usage.get("completion_tokens"),
            "total_tokens": usage.get("total_tokens"),
        },
    }


def _output(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        output.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    parts = []
    if isinstance(message.get("content"), str):
        parts.append({"type": "output_text", "text": message["content"], "annotations": []})
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    calls = message.get("tool_calls") or []
    if parts and not (calls and parts[0].get("text") == ""):
        output.append({"type": "message", "role": "assistant", "status": "completed", "content": parts})
    for call in calls:
        output.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": call["function"]["name"],
                "arguments": call["function"].get("arguments"),
            }
        )
    return output
