"""Rows whose completions have ratings: one completion a row, as HelpSteer2 has them, and
UltraFeedback's.

A row of a set with one completion in each is joined with its neighbours of the same prompt. The
functions are those that `config/dataset_table.py` names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from treeward.data.columns import EVERY_CONVERSATION, prompt_column
from treeward.data.conversation import parse_json_list
from treeward.data.preference import (
    Preference,
    first_with_value,
    grades_of,
    preference_from_dict,
    required,
)
from treeward.data.sources import Row, RowSource
from treeward.errors import DataError

logger = logging.getLogger(__name__)

COMPLETION_COLUMNS = ("completion", "response", "answer")
"""The names of the completion of a row that has one."""

MISTYPED = "have an overall_score of 10 beside a fine-grained_score of 2 or less, a mistyped 1"
"""The fault of completions of UltraFeedback, for a sentence: "2 completions have ..."."""


def from_ratings(
    values: Mapping[str, Any],
    where: str,
    *,
    task_name: str = "preference",
    attributes: Sequence[str] = (),
    rating_key: str | None = None,
) -> Preference | None:
    """A row of `preference_from_dict`; None where it has too few completions to compare."""
    fewest = 1 if attributes else 2
    completions = values.get("completions")
    # Not an error: `prepare` has joined or removed completions, and a prompt may be left with one.
    if isinstance(completions, list) and len(completions) < fewest:
        return None
    return preference_from_dict(
        values,
        where=where,
        task_name=task_name,
        attributes=attributes,
        rating_key=rating_key,
    )


def joined_by_prompt(rows: Iterator[Row], dataset: RowSource) -> Iterator[Row]:
    """One row per prompt, at the place of its first completion.

    Logs a warning about prompts that come back after others: a file is read once, so these are not
    joined.
    """
    seen: set[str] = set()
    num_again = 0
    # Only neighbours: to join rows that lie apart the whole file would have to be in memory.
    for prompt, group in groupby(_rated_completions(rows, dataset), lambda rated: rated[0]):
        rated = list(group)
        key = json.dumps(prompt, sort_keys=True, default=repr)
        if key in seen:
            num_again += 1
        seen.add(key)
        completions = [completion for _, completion, _ in rated]
        first_place = rated[0][2]
        yield Row({**prompt, "completions": completions}, first_place)
    if num_again:
        logger.warning(
            "%s: %d times a prompt comes back after rows of others. Only rows that follow each "
            "other are compared: sort the file by its prompt.",
            dataset.name,
            num_again,
        )


def _rated_completions(
    rows: Iterator[Row],
    dataset: RowSource,
) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """The columns of each row's prompt, its completion with its `score`, and its place."""
    assert dataset.known is not None and dataset.known.rating is not None
    attributes = dataset.config.attributes
    rating_key = dataset.config.rating_key or dataset.known.rating
    need = f"a row of prompt, response and {rating_key}"
    for row in rows:
        values = row.values
        where = row.where
        text_key = first_with_value(values, COMPLETION_COLUMNS) or "response"
        try:
            column = prompt_column(values, where) or "prompt"
            prompt: dict[str, Any] = {}
            for name in EVERY_CONVERSATION:
                if values.get(name) is not None:
                    prompt[name] = values[name]
            prompt["prompt"] = required(values, column, where, need)
            response = required(values, text_key, where, need)
            # Where grades are learnt a completion may lack the one that ranks.
            if not attributes:
                required(values, rating_key, where, need)
            grades = grades_of(values, attributes, where)
        except DataError as error:
            dataset.broken(error)
            continue
        # The whole row, because a grade of any name may be asked for. Its rating ranks: a column
        # `rank` may be the place in a search, or count from the worst.
        completion = {**values, "rank": None, **grades}
        completion |= {"response": response, "score": values.get(rating_key)}
        yield prompt, completion, where


def without_mistyped(rows: Iterator[Row], dataset: RowSource) -> Iterator[Row]:
    """UltraFeedback's rows without the completions whose grade is mistyped, which
    `dataset.left_out` counts.

    About 2,000 completions have an `overall_score` of 10 where the annotator gave 1, as its authors
    have confirmed (https://github.com/OpenBMB/UltraFeedback/issues/8). The `fine-grained_score` of
    such a completion is low. It is left out, because its true grade is not in the data.
    """
    for row in rows:
        try:
            completions = parse_json_list(row.values.get("completions"), "completions", row.where)
        except DataError as error:
            dataset.broken(error)
            continue
        if not isinstance(completions, list):
            yield row
            continue
        sound = []
        for completion in completions:
            if _is_mistyped(completion):
                dataset.leave_out(row.where, MISTYPED)
            else:
                sound.append(completion)
        yield Row({**row.values, "completions": sound}, row.where)


def _is_mistyped(completion: Any) -> bool:
    """Whether the `overall_score` of 10 contradicts the other grade."""
    if not isinstance(completion, dict):
        return False
    overall = completion.get("overall_score")
    fine_grained = completion.get("fine-grained_score")
    return overall == 10 and isinstance(fine_grained, int | float) and fine_grained <= 2
