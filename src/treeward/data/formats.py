"""The formats of rows, recognised by their keys: one table for files, the playground and Python.

    recognise({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "in.jsonl:1")  # "BinaryPreferenceDataset"
    conversations_of({"prompt": "...", "completions": ["...", ...]}, ...)          # several: "scores", in this order

The names of a prompt are in `columns`, the parsers in `preference` and `winners`; docs/data.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeward.data.columns import EVERY_CONVERSATION, context_of, prompt_column, with_system
from treeward.data.conversation import (
    Conversation,
    Message,
    as_messages,
    check_messages,
    is_list,
    parse_json_list,
    read_template_kwargs,
)
from treeward.data.preference import (
    before,
    completions_of,
    from_binary_row,
    from_transcripts,
    is_transcript,
    turns_of,
)
from treeward.data.winners import SIDES, WINNER_COLUMNS
from treeward.errors import DataError

FORMATS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("HelpSteer3", ("response1", "response2", "overall_preference")),
    ("HelpSteer3", ("response_1", "response_2", "preference_strength")),
    ("HelpSteer2", ("prompt", "response", "helpfulness")),
    ("GradedDataset", ("prompt", "response", "score")),
    ("GradedDataset", ("prompt", "completion", "score")),
    ("HHTranscripts", ("chosen", "rejected")),
    ("BinaryPreferenceDataset", ("chosen", "rejected")),
    ("UltraFeedback", ("instruction", "completions")),
    ("PreferenceDataset", ("completions",)),
    ("PreferenceDataset", ("responses",)),
    *(("WinnerDataset", columns) for columns in WINNER_COLUMNS),
)
"""The datasets that read comparisons, and the keys of their rows; the first that fits a row is used."""

_ALWAYS_SCORED = ({"messages"}, {"completions"}, {"responses"}, {"chosen", "rejected"})
_SCORED_ALONE = (
    *({"response1", "response2"}, {"response"}, {"completion"}, {"conversations"}),
    *map(set[str], SIDES),
)
"""Many files have such columns: they are scored only where no other keys are."""


def recognise(values: Mapping[str, Any], where: str) -> str:
    """The name of the dataset that reads a comparison. Raises `DataError` for keys of no known format."""
    keys = {key for key, value in values.items() if value is not None}
    for dataset, dataset_keys in FORMATS:
        if keys.issuperset(dataset_keys) and (dataset != "HHTranscripts" or _are_transcripts(values)):
            return dataset
    raise DataError(
        "the row is a comparison in no known format",
        where=where,
        got=f"keys {sorted(map(str, values))}",
        need="a prompt with chosen and rejected; or with completions and their ranks or scores; docs/data.md has more",
        fix=_remedy(keys),
    )


def _remedy(keys: set[str]) -> str:
    """What names the columns of a row whose keys fit no format."""
    if keys & {"response", "completion", "answer", "completions", "responses"}:
        return (
            "name the column of the rating, as data.rating_key=rating (in eval and check-data "
            "--data-option rating_key=rating)"
        )
    return (
        "name the keys, as data.prompt_key=question data.chosen_key=good data.rejected_key=bad (in eval and check-data "
        "--data-option prompt_key=question ...), or the dataset, as data.dataset_name=HelpSteer3 "
        "(--dataset-name HelpSteer3)"
    )


def _are_transcripts(values: Mapping[str, Any]) -> bool:
    """Whether both are transcripts. With a prompt, a completion may begin with a speaker's name without being one."""
    sides, has_prompt = (values["chosen"], values["rejected"]), values.get("prompt") or values.get("context")
    return all(map(is_transcript, sides)) and (not has_prompt or all(side.startswith("\n\nHuman:") for side in sides))


def scored_keys(values: Mapping[str, Any], where: str) -> frozenset[str]:
    """The keys to score the row by. Raises `DataError` if no set of keys fits, or two do."""
    keys = {key for key, value in values.items() if value is not None}
    scored = keys & set().union(*_ALWAYS_SCORED) or keys & set().union(*_SCORED_ALONE)
    if scored - {"messages"}:
        # The prompt, or a column like others: UltraFeedback's binarized form repeats the chosen completion there.
        scored -= {"messages"}
    if scored not in (*_ALWAYS_SCORED, *_SCORED_ALONE):
        raise DataError(
            "the row cannot be scored with these keys together" if scored else "the row has nothing to score",
            where=where,
            got=f"keys {sorted(map(str, values))}",
            need="one of messages, completions, responses, chosen with rejected; docs/data.md has the keys",
        )
    return frozenset(scored)


def scored_columns(values: Mapping[str, Any], where: str) -> set[str]:
    """The columns by which the row is scored: its completions, its prompt, and what belongs to every conversation."""
    prompt = prompt_column(values, where)
    return {*scored_keys(values, where), *EVERY_CONVERSATION, *([] if prompt is None else [prompt])}


def is_single(values: Mapping[str, Any], where: str) -> bool:
    """Whether the row holds one conversation, and not a list."""
    keys = scored_keys(values, where)
    if keys == {"conversations"}:
        return _is_conversation(parse_json_list(values["conversations"], "conversations", where))
    return keys <= {"messages", "response", "completion"}


def _is_conversation(value: Any) -> bool:
    """Whether it is one conversation, as ShareGPT's, and not a list of them."""
    return is_list(value) and bool(value) and all(isinstance(item, Mapping) for item in value)


def conversations_of(values: Mapping[str, Any], where: str) -> list[Conversation]:
    """The conversations of one row, in the order of their scores. Lists may be JSON text, and keys without a value
    count as absent. Raises `DataError` for a row of no known format, or of two."""
    keys = scored_keys(values, where)
    row = {key: value for key, value in values.items() if value is not None}
    if "chosen" in keys:
        pair = from_transcripts(row, where) if _are_transcripts(row) else from_binary_row(row, where)
        return pair.conversations
    context, ends = _parts(row, keys, where)
    if not ends:
        raise DataError("there are no completions", where=where, field=next(iter(keys)), got="[]", need="one or more")
    context = with_system(context, ends, row, where)
    variables = read_template_kwargs(row, where)
    return [Conversation([*context, *end], chat_template_kwargs=variables) for end in ends]


def _parts(
    row: Mapping[str, Any], keys: frozenset[str], where: str
) -> tuple[tuple[Message, ...], list[Sequence[Message]]]:
    """The context of the row's conversations, perhaps empty, and what follows it in each."""
    if keys == {"messages"}:
        return (), [check_messages(parse_json_list(row["messages"], "messages", where), "messages", where)]
    if keys == {"conversations"}:
        items = parse_json_list(row["conversations"], "conversations", where)
        if _is_conversation(items):
            return (), [check_messages(items, "conversations", where)]
        return (), [check_messages(item, f"conversations[{i}]", where) for i, item in enumerate(items)]
    if keys & {"completions", "responses"}:
        context, completions = completions_of(row, where)
        return context, [messages for messages, _ in completions]
    sides = {key: as_messages(row[key], key, "assistant", where) for key in sorted(keys)}
    name = prompt_column(row, where)
    if name is None:
        if any(side[0]["role"] == "assistant" for side in sides.values()):
            got = f"keys {sorted(map(str, row))}"
            raise DataError("the row has no prompt", where=where, field="prompt", got=got)
        return (), [*sides.values()]
    prompt = context_of({name: turns_of(row[name])}, where) or ()
    return before(prompt, sides, where), [*sides.values()]
