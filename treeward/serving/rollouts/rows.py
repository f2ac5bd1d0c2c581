"""Rows of prompts, as `treeward rollouts` reads them.

    tasks = read_tasks("rows.jsonl", limit=100)
    tasks[0].params, tasks[0].rollout_indices(num_repeats=4)

A row is in NeMo Gym's form (`responses_create_params`), or has `messages`, or a `prompt`. Its other keys are kept. Rows
with the same request share a task index, and their rollouts are numbered together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeward.data.preference import Message, as_messages
from treeward.data.responses_items import messages_of_input
from treeward.data.sources import Row, read_rows
from treeward.errors import DataError

__all__ = ["Task", "read_tasks"]


@dataclass(frozen=True, slots=True)
class Task:
    """One row. `params`: its request of the Responses API; `where`: its file and line.

    `copy`: the number of rows before it that have its `index`, and so the same request.
    """

    index: int
    row: Mapping[str, Any]
    params: dict[str, Any]
    where: str
    copy: int = 0

    @property
    def chat(self) -> list[Message]:
        """The request as messages; a developer's message keeps its role."""
        return messages_of_input(self.params, developer="developer")

    def rollout_indices(self, num_repeats: int) -> range:
        """The indices of its rollouts."""
        return range(self.copy * num_repeats, (self.copy + 1) * num_repeats)


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
        raise DataError(
            "the row has a completion already",
            where=where,
            field=key,
            got="a conversation that ends with a message of the assistant",
            need="a prompt, which ends with another message",
            fix="to score completions, use treeward score",
        )
    return {"input": list(messages)}
