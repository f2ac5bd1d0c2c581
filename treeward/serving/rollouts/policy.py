"""Rows of prompts, and the policy that completes them: a language model behind an OpenAI-compatible address.

    tasks = read_tasks("rows.jsonl", limit=100)
    policy = Policy(client, model="my-model", api="chat", sampling={"temperature": 1.0})
    response = await policy.complete(tasks[0])     # in the form of the Responses API, whichever API was used

A row is in NeMo Gym's form (`responses_create_params`), or has `messages`, or a `prompt`. Its other keys are kept, and
its parameters go before `sampling`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from treeward.data.preference import Message, as_messages
from treeward.data.responses_items import messages_of_input
from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.http import ServerError
from treeward.openai_client import post

_OF_RESPONSES = ResponseCreateParamsBase.__annotations__.keys() - CompletionCreateParamsBase.__annotations__.keys()
"""Parameters that chat completions do not have, or have under other names."""
_TRANSLATED = frozenset({"input", "instructions", "max_output_tokens", "reasoning"})
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
_STOPPED_BY = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class Task:
    """One row. `params`: its request of the Responses API; `where`: its file and line.

    Rows with the same request share an `index`; `copy` counts those before it.
    """

    index: int
    row: Mapping[str, Any]
    params: dict[str, Any]
    where: str
    copy: int = 0


def read_tasks(path: str, *, limit: int | None = None) -> list[Task]:
    """The rows of a file, the first `limit` of them. Raises `DataError` for a row without a prompt."""
    seen: dict[str, tuple[int, int]] = {}
    tasks = []
    for row in itertools.islice(read_rows(path), limit):
        params = _params(row)
        key = json.dumps(params, sort_keys=True, default=str)
        index, copies = seen.get(key, (len(seen), 0))
        seen[key] = (index, copies + 1)
        tasks.append(Task(index, row.values, params, row.where, copies))
    return tasks


def _params(row: Row) -> dict[str, Any]:
    values, where = row.values, row.where
    given = values.get("responses_create_params")
    if given is not None:
        if not isinstance(given, Mapping) or not given.get("input"):
            field, need = "responses_create_params.input", "a text, or a list of items"
            raise DataError("the request of the row has no input", where=where, field=field, got=given, need=need)
        return {key: value for key, value in given.items() if value is not None}
    key = next((key for key in ("messages", "prompt") if values.get(key) is not None), None)
    if key is None:
        got, need = f"keys {sorted(map(str, values))}", "responses_create_params, messages or prompt"
        raise DataError("the row has no prompt", where=where, got=got, need=need)
    messages = as_messages(values[key], key, "user", where)
    if messages[-1]["role"] == "assistant":
        need, fix = "a prompt, which ends with another message", "to score completions, use treeward score"
        raise DataError("the row has a completion already", where=where, field=key, need=need, fix=fix)
    return {"input": list(messages)}


@dataclass(frozen=True, slots=True)
class Policy:
    """`sampling`: `temperature`, `top_p` and `max_output_tokens` for rows that do not set them."""

    client: AsyncOpenAI
    model: str
    api: Literal["chat", "responses"]
    sampling: Mapping[str, Any]

    def request(self, task: Task) -> dict[str, Any]:
        """The body of the request. The chat API is given the parameters under its own names."""
        params = {**self.sampling, **task.params}
        if self.api == "responses":
            return params | {"model": self.model}
        if alien := sorted((params.keys() & _OF_RESPONSES) - _TRANSLATED):
            raise _only_in_responses(task, alien[0], params[alien[0]])
        body = {key: value for key, value in params.items() if key not in _OF_RESPONSES}
        if "max_output_tokens" in params:
            body["max_tokens"] = params["max_output_tokens"]
        reasoning = params.get("reasoning") or {}
        if not isinstance(reasoning, Mapping):
            need, field = "{effort: low}", "responses_create_params.reasoning"
            raise DataError("the reasoning is no mapping", where=task.where, field=field, got=reasoning, need=need)
        if effort := reasoning.get("effort"):
            body["reasoning_effort"] = effort
        tools = [_chat_tool(tool, task) for tool in body.pop("tools", None) or ()]
        choice = params.get("tool_choice")
        if isinstance(choice, Mapping) and "name" in choice:
            body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        messages = [_chat_message(message) for message in messages_of_input(params, developer="developer")]
        return body | ({"tools": tools} if tools else {}) | {"model": self.model, "messages": messages}

    async def complete(self, task: Task) -> dict[str, Any]:
        """The policy's completion. Raises `ServerError`."""
        path = "/chat/completions" if self.api == "chat" else "/responses"
        reply = await post(self.client, path, self.request(task))
        try:
            response = dict(reply) if self.api == "responses" else _as_response(reply)
            if isinstance(response["output"], list):
                return response
            raise TypeError(f"output is {response['output']}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            where, need = f"{str(self.client.base_url).rstrip('/')}{path}", f"a completion: {error!r}"
            raise ServerError("the response has no output", status=200, where=where, got=reply, need=need) from error


def _only_in_responses(task: Task, field: str, got: Any) -> DataError:
    summary, field = "chat completions have no such parameter", f"responses_create_params.{field}"
    return DataError(summary, where=task.where, field=field, got=got, fix="--api responses")


def _chat_tool(tool: Any, task: Task) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _only_in_responses(task, "tools", tool)
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _chat_message(message: Message) -> Message:
    """The message with the arguments of its tool calls as text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": as_text}})
    return {**message, "tool_calls": calls} if calls else message


def _as_response(reply: Any) -> dict[str, Any]:
    """A chat completion in the form of the Responses API."""
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    stopped_by = _STOPPED_BY.get(choice.get("finish_reason"))
    return {
        "id": reply.get("id") or "",
        "object": "response",
        "created_at": reply.get("created") or 0,
        "model": reply.get("model") or "",
        "status": "incomplete" if stopped_by else "completed",
        "incomplete_details": {"reason": stopped_by} if stopped_by else None,
        "output": _output(choice["message"]),
        "usage": {name: usage.get(key) for name, key in _USAGE.items()},
    }


def _output(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        output.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]})
    content, calls = message.get("content"), message.get("tool_calls") or []
    parts: list[dict[str, Any]] = []
    if isinstance(content, str) and (content or not calls):
        parts.append({"type": "output_text", "text": content, "annotations": []})
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    if parts:
        output.append({"type": "message", "role": "assistant", "status": "completed", "content": parts})
    for call in calls:
        function = {key: call["function"].get(key) for key in ("name", "arguments")}
        output.append({"type": "function_call", "call_id": call.get("id"), **function})
    return output
