"""The formats of rows, recognised by their keys: one table for files, the playground and Python.

    recognise({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "in.jsonl:1")  # "BinaryPreferenceDataset"
    conversations_of({"prompt": "...", "completions": ["...", ...]}, ...)          # several: "scores", in this order

A prompt is called `context`, `prompt` or `instruction`. The parsers are in `preference`; docs/data.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeward.data.preference import (
    Message,
    as_messages,
    before,
    check_messages,
    completions_of,
    from_binary_row,
    from_transcripts,
    is_transcript,
    parse_json_list,
    prompt_key,
    turns_of,
)
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
)
"""The datasets that read comparisons, and the keys of their rows; the first that fits a row is used."""

_ALWAYS_SCORED = ({"messages"}, {"completions"}, {"responses"}, {"chosen", "rejected"})
_SCORED_ALONE = (
    *({"response1", "response2"}, {"response_1", "response_2"}, {"response"}, {"completion"}, {"conversations"}),
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
        fix="name the keys, as data.prompt_key=question (in eval --data-option prompt_key=question), or the "
        "dataset, as data.dataset_name=HelpSteer3 (--dataset-name HelpSteer3)",
    )


def _are_transcripts(values: Mapping[str, Any]) -> bool:
    """Whether both are transcripts. With a prompt, a completion may begin with a speaker's name without being one."""
    sides, has_prompt = (values["chosen"], values["rejected"]), values.get("prompt") or values.get("context")
    return all(map(is_transcript, sides)) and (not has_prompt or all(side.startswith("\n\nHuman:") for side in sides))


def scored_keys(values: Mapping[str, Any], where: str) -> frozenset[str]:
    """The keys to score the row by. Raises `DataError` if no set of keys fits, or two do."""
    keys = {key for key, value in values.items() if value is not None}
    scored = keys & set().union(*_ALWAYS_SCORED) or keys & set().union(*_SCORED_ALONE)
    if scored >= {"chosen", "rejected"}:
        scored -= {"messages"}  # a column like others: UltraFeedback's binarized form repeats the chosen ones there
    if scored not in (*_ALWAYS_SCORED, *_SCORED_ALONE):
        raise DataError(
            "the row cannot be scored with these keys together" if scored else "the row has nothing to score",
            where=where,
            got=f"keys {sorted(map(str, values))}",
            need="one of messages, completions, responses, chosen with rejected; docs/data.md has the keys",
        )
    return frozenset(scored)


def is_single(values: Mapping[str, Any], where: str) -> bool:
    """Whether the row holds one conversation, and not a list."""
    return scored_keys(values, where) <= {"messages", "response", "completion"}


def conversations_of(values: Mapping[str, Any], where: str) -> list[list[Message]]:
    """The conversations of one row, in the order of their scores. Lists may be JSON text, and keys without a value
    count as absent. Raises `DataError` for a row of no known format, or of two."""
    keys = scored_keys(values, where)
    row = {key: value for key, value in values.items() if value is not None}
    if keys == {"messages"}:
        return [list(check_messages(parse_json_list(row["messages"], "messages", where), "messages", where))]
    if keys == {"conversations"}:
        items = parse_json_list(row["conversations"], "conversations", where)
        return [list(check_messages(item, f"conversations[{i}]", where)) for i, item in enumerate(items)]
    if "chosen" in keys:
        if _are_transcripts(row):
            pair = from_transcripts(row, where)
        else:
            pair = from_binary_row(row, where, prompt_key=prompt_key(row, where) or "prompt")
        return [[*pair.context, *completion.messages] for completion in pair.completions]
    if keys & {"completions", "responses"}:
        context, completions = completions_of(row, where)
        ends = [messages for messages, _ in completions]
    else:
        name = prompt_key(row, where)
        if name is None:
            raise DataError("the row has no prompt", where=where, field="prompt", got=f"keys {sorted(map(str, row))}")
        sides = {key: as_messages(row[key], key, "assistant", where) for key in sorted(keys)}
        context, ends = before(as_messages(turns_of(row[name]), name, "user", where), sides, where), [*sides.values()]
    if not ends:
        raise DataError("there are no completions", where=where, field=next(iter(keys)), got="[]", need="one or more")
    return [[*context, *end] for end in ends]


def as_conversations(context: Any, completions: Any) -> list[list[Message]]:
    """The conversation of each completion of a context; both are messages or literal text."""
    if isinstance(completions, str) or not completions:
        need = 'a list, as ["one", "another"]'
        raise DataError("completions is not a list of completions", got=completions, need=need)
    prompt = literally(context, "user")
    return [[*prompt, *literally(completion, "assistant")] for completion in completions]


def literally(value: Any, role: str) -> Any:
    """Text as one message of the role, never parsed: a policy may have written it."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
