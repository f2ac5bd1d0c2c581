"""Rows of prompts, as `treeward rollouts` reads them, and the rollouts that are to be made of them.

    tasks = read_tasks("rows.jsonl", limit=100)
    plan(tasks, num_repeats=4)          # one `Job` for each rollout, under the indices that NeMo Gym gives

A row is in NeMo Gym's form (`responses_create_params`), or has `messages`, or a `prompt`. Its other keys are kept. Rows
that ask the same share a task index, and count their rollouts on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.files import Row
from treeward.data.formats import as_messages
from treeward.data.preference import Message
from treeward.data.responses_items import messages_of_input
from treeward.data.sources import read_rows
from treeward.errors import DataError

__all__ = ["Job", "Task", "plan", "read_tasks"]


@dataclass(frozen=True, slots=True)
class Task:
    """One row: `params` is the request of the Responses API that it stands for, `where` its place in the file.

    `copy`: how many rows before it have its `index`, and so ask the same.
    """

    index: int
    row: Mapping[str, Any]
    params: dict[str, Any]
    where: str
    copy: int = 0

    @property
    def chat(self) -> list[Message]:
        """What the policy is asked, as messages; its developer is the developer."""
        return messages_of_input(self.params, developer="developer")


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout that is to be made."""

    task: Task
    rollout_index: int

    @property
    def key(self) -> tuple[int, int]:
        """By which a rollout is known: the indices of the task and of the rollout."""
        return self.task.index, self.rollout_index


def read_tasks(path: str, *, limit: int | None = None) -> list[Task]:
    """The rows of a file, the first `limit` of them. Raises `DataError` for one that asks nothing."""
    seen: dict[str, tuple[int, int]] = {}
    tasks = []
    for row in itertools.islice(read_rows(path), limit):
        params = _params(row)
        key = json.dumps(params, sort_keys=True, default=str)
        index, copies = seen.get(key, (len(seen), 0))
        seen[key] = (index, copies + 1)
        tasks.append(Task(index, row.values, params, row.where, copies))
    return tasks


def plan(tasks: Sequence[Task], *, num_repeats: int) -> Iterator[Job]:
    """All rollouts, those of one task together: they share its prompt."""
    for task in tasks:
        for repeat in range(num_repeats):
            yield Job(task, task.copy * num_repeats + repeat)


def _params(row: Row) -> dict[str, Any]:
    values, where = row.values, row.where
    given = values.get("responses_create_params")
    if given is not None:
        if not isinstance(given, Mapping) or not given.get("input"):
            raise DataError(
                "the request of the row has no input",
                where=where,
                field="responses_create_params.input",
                got=given,
                need="a text, or a list of items",
            )
        return {key: value for key, value in given.items() if value is not None}
    key = next((key for key in ("messages", "prompt") if values.get(key) is not None), None)
    if key is None:
        raise DataError(
            "the row asks nothing",
            where=where,
            got=f"keys {sorted(map(str, values))}",
            need="responses_create_params, messages or prompt",
        )
    messages = as_messages(values[key], key, "user", where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the row has its answer already",
            where=where,
            field=key,
            got="a conversation that ends with a message of the assistant",
            need="one that ends with what is to be answered",
            fix="to score answers that are there, use treeward score",
        )
    return {"input": list(messages)}
