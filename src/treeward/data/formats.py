"""The formats of rows, recognised by their keys: one table for files, the playground and Python.

    recognise({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "in.jsonl:1")
    # "BinaryPreferenceDataset"
    conversations_of({"prompt": "...", "completions": ["...", ...]}, "in.jsonl:2")
    # a conversation for each completion, in this order

The keys are those of `COMPARISONS` in `config/dataset_table.py`; the names of a prompt are in
`columns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeward.config.dataset_table import COMPARISONS, KnownDataset
from treeward.data.columns import (
    EVERY_CONVERSATION,
    context_of,
    prompt_column,
    shown_keys,
    with_own_prompt,
    with_system,
)
from treeward.data.conversation import (
    Conversation,
    Message,
    as_messages,
    check_messages,
    is_list,
    parse_json_list,
    read_template_kwargs,
)
from treeward.data.pairs import from_binary_row
from treeward.data.preference import before, completions_of
from treeward.data.ratings import COMPLETION_COLUMNS
from treeward.data.registry import function_of
from treeward.data.transcripts import are_transcripts, from_transcripts
from treeward.errors import DataError

Columns = tuple[str, ...]

_MESSAGES: Columns = ("messages",)
"""One whole conversation."""

_CONVERSATIONS: Columns = ("conversations",)
"""A list of whole conversations, or one in ShareGPT's form."""

_NEED_FORMAT = "a prompt, with chosen and rejected, or rated completions; docs/data.md has more"
_NEED_SCORED = "one of messages, completions, responses, chosen with rejected; see docs/data.md"

_LISTS = ("completions", "responses")
"""Columns with a list of completions."""


_SCORED_ALWAYS: list[Columns] = [_MESSAGES]
"""The sets of columns that hold what is scored, whatever else a row has."""

_SCORED_ALONE: list[Columns] = [_CONVERSATIONS]
"""Many files have such columns beside others: they are scored only in a row without those above."""

_SINGLE: list[Columns] = [_MESSAGES]
"""Those that hold one completion."""

# A form with columns beside its completions, as the winner of a pair, has names that files of
# other kinds use too.
for _known in COMPARISONS:
    for _form in _known.forms:
        _scored = _SCORED_ALONE if _form.others else _SCORED_ALWAYS
        _scored.append(_form.completions)
        if _known.rating is not None:
            _SINGLE.append(_form.completions)


def recognise(values: Mapping[str, Any], where: str) -> str:
    """The name of the dataset that reads a comparison. Raises `DataError` for keys of no known
    format."""
    if _are_labelled_steps(values):
        raise DataError(
            "the row has a solution as steps with labels, and nothing to compare it with",
            where=where,
            got=shown_keys(values),
            need=_NEED_FORMAT,
            fix="policy.reward_model_cfg.reward_model_type=process learns such rows",
        )
    known = _entry_of(values)
    if known is not None:
        return known.name
    keys = _keys_with_value(values)
    # The remedy names the columns of such a row.
    fix = (
        "name the keys, as data.prompt_key=question data.chosen_key=good data.rejected_key=bad (in "
        "eval and check-data --data-option prompt_key=question ...), or the dataset, as "
        "data.dataset_name=HelpSteer3 (--dataset-name HelpSteer3)"
    )
    if keys & {*COMPLETION_COLUMNS, *_LISTS}:
        fix = (
            "name the column of the rating, as data.rating_key=rating (in eval and check-data "
            "--data-option rating_key=rating)"
        )
    raise DataError(
        "the row is a comparison in no known format",
        where=where,
        got=shown_keys(values),
        need=_NEED_FORMAT,
        fix=fix,
    )


def _are_labelled_steps(values: Mapping[str, Any]) -> bool:
    """Whether it is TRL's row of a process reward model, whose steps are called completions."""
    completions: Any = values.get("completions")
    if not is_list(completions) or not is_list(values.get("labels")):
        return False
    are_texts = all(isinstance(completion, str) for completion in completions)
    return are_texts and values.get("scores") is None


def _entry_of(values: Mapping[str, Any]) -> KnownDataset | None:
    """The first entry of the table that reads a row with these keys."""
    keys = _keys_with_value(values)
    for known in COMPARISONS:
        if not any(keys.issuperset(form.keys) for form in known.forms):
            continue
        if known.condition is None or function_of(known.condition)(values):
            return known
    return None


def _keys_with_value(values: Mapping[str, Any]) -> set[str]:
    return {key for key, value in values.items() if value is not None}


def scored_keys(values: Mapping[str, Any], where: str) -> Columns:
    """The keys to score the row by. Raises `DataError` if no set of keys fits, or two do."""
    keys = _keys_with_value(values)
    scored = keys & set().union(*_SCORED_ALWAYS)
    if not scored:
        scored = keys & set().union(*_SCORED_ALONE)
    if scored - {"messages"}:
        # Beside completions `messages` is not what is scored. It is the prompt, or repeats one of
        # them, as in UltraFeedback's binarized form.
        scored -= {"messages"}
    for columns in (*_SCORED_ALWAYS, *_SCORED_ALONE):
        if scored == set(columns):
            return columns
    summary = "the row has nothing to score"
    if scored:
        summary = "the row cannot be scored with these keys together"
    got = shown_keys(values)
    raise DataError(summary, where=where, got=got, need=_NEED_SCORED)


def scored_columns(values: Mapping[str, Any], where: str) -> set[str]:
    """The columns by which the row is scored: its completions, its prompt, and what belongs to
    every conversation."""
    prompt = prompt_column(values, where)
    if prompt is None:
        known = _entry_of(values)
        prompt = None if known is None else known.prompt
    columns = {*scored_keys(values, where), *EVERY_CONVERSATION}
    if prompt is not None:
        columns.add(prompt)
    return columns


def is_single(values: Mapping[str, Any], where: str) -> bool:
    """Whether the row holds one conversation, and not a list."""
    keys = scored_keys(values, where)
    if keys == _CONVERSATIONS:
        return _is_conversation(parse_json_list(values["conversations"], "conversations", where))
    return keys in _SINGLE


def _is_conversation(value: Any) -> bool:
    """Whether it is one conversation, as ShareGPT's, and not a list of them."""
    return is_list(value) and bool(value) and all(isinstance(item, Mapping) for item in value)


def conversations_of(values: Mapping[str, Any], where: str) -> list[Conversation]:
    """The conversations of one row, in the order of their scores. Lists may be JSON text, and keys
    without a value count as absent. Raises `DataError` for a row of no known format, or of two."""
    keys = scored_keys(values, where)
    row: Mapping[str, Any] = {key: value for key, value in values.items() if value is not None}
    known = _entry_of(row)
    if known is not None:
        row = with_own_prompt(row, known.prompt, where)
    if keys == ("chosen", "rejected"):
        # By the parsers of training: the keys of a pair do not tell where its prompt is.
        parser = from_transcripts if are_transcripts(row) else from_binary_row
        return parser(row, where).conversations
    context, ends = _parts(row, keys, where)
    if not ends:
        summary = "there are no completions"
        raise DataError(summary, where=where, field=keys[0], got="[]", need="one or more")
    context = with_system(context, ends, row, where)
    variables = read_template_kwargs(row, where)
    return [Conversation([*context, *end], chat_template_kwargs=variables) for end in ends]


def _parts(
    row: Mapping[str, Any],
    keys: Columns,
    where: str,
) -> tuple[tuple[Message, ...], list[Sequence[Message]]]:
    """The context of the row's conversations, perhaps empty, and what follows it in each."""
    if keys == _MESSAGES:
        items = parse_json_list(row["messages"], "messages", where)
        return (), [check_messages(items, "messages", where)]
    if keys == _CONVERSATIONS:
        items = parse_json_list(row["conversations"], "conversations", where)
        if _is_conversation(items):
            return (), [check_messages(items, "conversations", where)]
        if not is_list(items):
            summary = "conversations is not a list"
            need = "a list of conversations, or the messages of one"
            raise DataError(summary, where=where, field="conversations", got=items, need=need)
        ends: list[Sequence[Message]] = []
        for i, item in enumerate(items):
            ends.append(check_messages(item, f"conversations[{i}]", where))
        return (), ends
    if keys[0] in _LISTS:
        context, completions = completions_of(row, where)
        return context, [messages for messages, _ in completions]
    sides = {key: as_messages(row[key], key, "assistant", where) for key in keys}
    ends = list(sides.values())
    name = prompt_column(row, where)
    if name is None:
        # Completions alone: their score would be that of an answer to nothing.
        if any(side[0]["role"] == "assistant" for side in ends):
            got = shown_keys(row)
            raise DataError("the row has no prompt", where=where, field="prompt", got=got)
        return (), ends
    prompt = context_of({name: row[name]}, where) or ()
    return before(prompt, sides, where), ends
