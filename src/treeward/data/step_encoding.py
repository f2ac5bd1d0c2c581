"""`encode_steps`: problems whose solutions are steps, as token ids with a label for each mark.

    dataset = encode_steps(open_step_dataset(config), renderer, mark="<extra_0>", cache_dir=cache)
    dataset[0].token_ids, dataset[0].step_labels     # a conversation for each path of the tree

All rows of the data with the same context become one tree (`steps.py`): equal beginnings of their
solutions are one node. The mark is a token of its own after each step, so that each step is
tokenized alone, and equal steps have equal tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeward.data.conversation import Conversation, last_text
from treeward.data.encoding import (
    EncodedDataset,
    count_tree_tokens,
    empty_record,
    encoded_file,
)
from treeward.data.preference import digest_of
from treeward.data.step_marks import check_marks, mark_id
from treeward.data.steps import (
    Problem,
    StepNode,
    beginnings_of,
    marked_completion,
    paths_of,
    step_tree,
    with_last_labels,
)
from treeward.errors import DataError

if TYPE_CHECKING:
    from treeward.data.rendering import Renderer
    from treeward.data.step_datasets import StepDataset

logger = logging.getLogger(__name__)

_PROBLEMS_AT_ONCE = 64  # enough for a fast tokenizer to use all cores


def encode_steps(
    stream: StepDataset,
    renderer: Renderer,
    *,
    mark: str,
    last_step_only: bool = False,
    cache_dir: Path,
    progress: bool = False,
) -> EncodedDataset:
    """Encode every problem of a set, or open the file that an earlier call wrote for the same
    content. `last_step_only`: each solution keeps its last label alone.

    Of a solution that is longer than the renderer's `max_length` the last steps are left out, each
    as a whole; a problem without a step that fits is dropped. Raises `DataError` for an invalid
    row, a step that has the mark in it, a step without a token, and if no problem is left.
    """
    token_id = mark_id(renderer.tokenizer, mark)

    def records() -> Iterator[list[dict[str, Any]]]:
        problems = merged_problems(stream)
        if last_step_only:
            # Before the steps are merged: the last step of one solution may be an inner step of
            # another, and a solution that is cut has lost its label, and not got another one.
            problems = [(with_last_labels(problem), where) for problem, where in problems]
        for start in range(0, len(problems), _PROBLEMS_AT_ONCE):
            yield _encode(problems[start : start + _PROBLEMS_AT_ONCE], renderer, mark, token_id)

    parts = ["steps", stream.fingerprint, renderer.fingerprint, mark, token_id, last_step_only]
    dataset = encoded_file(stream.name, parts, records, cache_dir, progress=progress)
    counts = dataset.counts
    level = logging.WARNING if counts.is_much_dropped else logging.INFO
    logger.log(level, "%s: %s", stream.name, counts.summary())
    if not dataset:
        raise DataError(
            "no step with a label is left to learn from",
            where=stream.name,
            got=counts.summary(),
            need="one step with a label or more",
            fix="check the file and policy.max_total_sequence_length",
        )
    return dataset


def merged_problems(rows: Iterable[tuple[Problem, str]]) -> list[tuple[Problem, str]]:
    """The problems with all solutions of the rows that have their context, each at the place of its
    first row. The rows of a problem may lie apart: all are in memory until they are encoded."""
    first: dict[str, tuple[Problem, str]] = {}
    solutions: dict[str, list[Any]] = {}
    # One row may have a solution, or a hundred: the order of the rows decides nothing.
    for problem, where in rows:
        key = problem.context_key
        first.setdefault(key, (problem, where))
        solutions.setdefault(key, []).extend(problem.solutions)
    merged = []
    for key, (problem, where) in first.items():
        merged.append((replace(problem, solutions=tuple(solutions[key])), where))
    return merged


def _encode(
    rows: Sequence[tuple[Problem, str]], renderer: Renderer, mark: str, token_id: int
) -> list[dict[str, Any]]:
    """The rows of the file, from one call of the tokenizer."""
    trees: list[tuple[list[StepNode], list[list[int]]]] = []
    conversations: list[Conversation] = []
    texts: list[str] = []
    places: list[str] = []
    for problem, where in rows:
        for message in problem.context:
            _check_unmarked(str(message.get("content")), mark, "prompt", where)
        nodes = step_tree(problem.solutions)
        for node in nodes:
            _check_unmarked(node.text, mark, "step", where)
        paths = paths_of(nodes)
        trees.append((nodes, paths))
        for path in paths:
            steps = [nodes[i].text for i in path]
            conversation = problem.conversation(marked_completion(steps, mark))
            text = renderer.render(conversation, where=where)
            check_marks(text, steps, mark, where)
            conversations.append(conversation)
            texts.append(text)
            places.append(where)
    sequences = renderer.encode_texts(texts, where=places)
    encoded = iter(zip(sequences, conversations, strict=True))
    records = []
    for (problem, where), (nodes, paths) in zip(rows, trees, strict=True):
        encoded_paths = [next(encoded) for _ in paths]
        record = empty_record(where)
        fitting = _fitting_paths(nodes, paths, encoded_paths, renderer, token_id, where)
        record |= _record(problem, nodes, fitting)
        records.append(record)
    return records


def _check_unmarked(text: str, mark: str, what: str, where: str) -> None:
    """Raise `DataError` for a text that has the mark. `what`: "prompt" or "step"."""
    if mark in text:
        raise DataError(
            f"a {what} has the mark in it, which would be read as the end of a step",
            where=where,
            field=what,
            got=text,
            need=f"a text without {mark!r}",
            fix="choose another token: policy.reward_model_cfg.step_token=...",
        )


def labels_of_paths(
    nodes: Sequence[StepNode], paths: Sequence[Sequence[int]]
) -> tuple[list[list[float]], list[list[int]]]:
    """`step_labels` and `step_counts` of the paths: a node counts in the first one that has it."""
    labels: list[list[float]] = []
    counts: list[list[int]] = []
    counted: set[int] = set()
    # The first conversation that has a step gives it its whole weight. On a tree all of them read
    # the same node; as padded rows each reads a copy, of which one must count.
    for path in paths:
        path_labels = []
        path_counts = []
        for i in path:
            label = nodes[i].label
            path_labels.append(math.nan if label is None else label)
            path_counts.append(0 if i in counted else nodes[i].count)
            counted.add(i)
        labels.append(path_labels)
        counts.append(path_counts)
    return labels, counts


@dataclass(frozen=True, slots=True)
class _Paths:
    """The paths of a problem's tree that are learnt, each with its tokens up to its last mark and
    the characters of its completion. `longest`: the tokens of the longest path before any was
    cut."""

    token_ids: dict[tuple[int, ...], Sequence[int]]
    lengths: dict[tuple[int, ...], int]
    longest: int


def _fitting_paths(
    nodes: Sequence[StepNode],
    paths: Sequence[Sequence[int]],
    encoded: Sequence[tuple[list[int], Conversation]],
    renderer: Renderer,
    token_id: int,
    where: str,
) -> _Paths:
    """The paths, each with the steps that fit."""
    token_ids: dict[tuple[int, ...], Sequence[int]] = {}
    lengths: dict[tuple[int, ...], int] = {}
    longest = 0
    for path, (ids, conversation) in zip(paths, encoded, strict=True):
        marks = np.flatnonzero(np.asarray(ids) == token_id)
        # Every step has its mark, and nothing else has one: else labels would stand at other steps.
        if len(marks) != len(path):
            raise DataError(
                "the tokens have not one mark for each step",
                where=where,
                got=f"{len(marks)} marks for {len(path)} steps",
                need="a chat template that writes completions as they are",
                fix="choose another token or template: policy.reward_model_cfg.step_token, "
                "policy.tokenizer.chat_template",
            )
        # The end of the turn comes after the last mark, and no step attends to it.
        num_tokens = int(marks[-1]) + 1
        longest = max(longest, num_tokens)
        num_fitting = len(path)
        if renderer.max_length is not None and num_tokens > renderer.max_length:
            if renderer.truncation == "error":
                raise DataError(
                    "a solution is too long",
                    where=where,
                    got=f"{num_tokens} tokens",
                    need=f"at most {renderer.max_length}",
                    fix="data.truncation=drop leaves out the last steps",
                )
            num_fitting = int((marks < renderer.max_length).sum())
        # A label is needed at the last mark too: what follows the last label is not computed.
        while num_fitting and nodes[path[num_fitting - 1]].count == 0:
            num_fitting -= 1
        if num_fitting:
            end = int(marks[num_fitting - 1]) + 1
            fitting = tuple(path[:num_fitting])
            token_ids[fitting] = ids[:end]
            lengths[fitting] = len(last_text(conversation))
    # Solutions that were cut may be the beginning of others now.
    for beginning in beginnings_of(token_ids):
        token_ids.pop(beginning, None)
        lengths.pop(beginning, None)
    return _Paths(token_ids, lengths, longest)


def _record(problem: Problem, nodes: Sequence[StepNode], paths: _Paths) -> dict[str, Any]:
    """The columns of a problem, from the paths of its tree."""
    kept = list(paths.token_ids)
    kept_nodes = set(chain.from_iterable(kept))
    labelled_nodes = {i for i, node in enumerate(nodes) if node.count > 0}
    learnt_nodes = labelled_nodes & kept_nodes
    num_too_long = len(labelled_nodes - kept_nodes)
    if not kept:
        outcome = "dropped_too_long" if labelled_nodes else "dropped_ungraded"
        return {"outcome": outcome, "longest": paths.longest, "steps_too_long": num_too_long}
    labels, counts = labels_of_paths(nodes, kept)
    sequences = list(paths.token_ids.values())
    # Sorted, so that a problem whose solutions come in another order has the same digest.
    labelled_tokens = sorted(zip(map(tuple, sequences), labels, strict=True))
    token_arrays = [np.array(ids, dtype=np.int32) for ids in sequences]
    is_whole = [nodes[path[-1]].is_end for path in kept]
    num_copies = sum(nodes[i].count for i in learnt_nodes)
    return {
        "outcome": "kept",
        "subset": problem.task_name,
        "prompt": digest_of(problem.context_key),
        "digest": digest_of(repr(labelled_tokens)),
        "completions": len(kept),
        "token_ids": token_arrays,
        # A problem has no order of its solutions, and no grades of them.
        "ranks": [0] * len(kept),
        "lengths": list(paths.lengths.values()),
        "scores": [None] * len(kept),
        "grades": [[]] * len(kept),
        "step_labels": labels,
        "step_counts": counts,
        "is_whole": is_whole,
        "tokens": sum(map(len, sequences)),
        "tree_tokens": count_tree_tokens(sequences),
        "longest": paths.longest,
        "steps": len(learnt_nodes),
        "step_copies": num_copies,
        "steps_too_long": num_too_long,
    }
