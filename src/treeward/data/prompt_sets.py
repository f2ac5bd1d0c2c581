"""`PromptSet`: prompts for reinforcement learning, from the `data` section of a config.

    config = PromptSetConfig(dataset_name="OpenMathInstruct-2", env_name="math")
    prompts = open_prompts(config)
    prompts[0].messages  # the conversation
    prompts[0].info      # for environments: {"ground_truth": ...}

Prompts are messages, held in memory; a row's other columns are the prompt's `info`. The names are
those of `PROMPT_SETS` in `config/dataset_table.py`. A dataset of your own is a `RowPrompts` whose
`to_prompt` reads a row, registered by `register_prompt_dataset`, or a class by dotted path
(`treeward.data.registry`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from treeward.config.data import PromptSetConfig
from treeward.config.dataset_table import PROMPT_SETS, KnownDataset
from treeward.data.columns import (
    MEDIA_COLUMNS,
    PROMPT_COLUMNS,
    check_not_lost,
    shown_keys,
    with_system,
)
from treeward.data.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    as_messages,
    last_text,
    read_template_kwargs,
)
from treeward.data.preference import first_with_value, required
from treeward.data.registry import ObjectRows, Registry, arguments_of, function_of
from treeward.data.responses_items import messages_of_input, tools_of
from treeward.data.sources import Row, RowSource
from treeward.errors import ConfigError, DataError

_PROMPT_DATASETS = Registry("datasets of prompts", PROMPT_SETS, example="my_module.MyPrompts")
_Class = TypeVar("_Class", bound="type[RowPrompts]")
_REQUEST = "responses_create_params"
FAMILY = "prompt_family"
"""A key of `info`. Prompts with the same value there are computed as one tree, such as both orders
of a pair."""
_PROMPT_KEYS = (_REQUEST, "messages", "prompt", "context")
_ENVIRONMENT_KEYS = ("environment", "env_name")
_NAME_IT = "name the prompt's column, as input_key={}: then only that one is read"
_NEED_ANSWER = "an answer, whose key output_key names; without one, dataset_name: PromptDataset"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages for a policy to complete. `info`: for environments. `where`: file and line, for
    errors. `template_kwargs`: tools and further variables, for the policy's template and for those
    of reward models. `opening`: how the policy's generation prompt begins the text of every
    completion (`Renderer.opening`)."""

    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""

    @property
    def conversation(self) -> Conversation:
        """The messages with their template variables."""
        return Conversation(self.messages, chat_template_kwargs=self.template_kwargs)


def prompts_summary(counts: Counter[str]) -> str:
    """One line for a person: the rows `read` and `kept`, and those left out: `held_out` (of the
    other part of a split set), `too_long`, and `tied` (questions about completions of equal
    rank)."""
    reasons = {"of the other part": "held_out", "too long": "too_long", "of equal ranks": "tied"}
    left_out = []
    for reason, key in reasons.items():
        if counts[key]:
            left_out.append(f"{counts[key]:,} {reason}")
    summary = f"{counts['kept']:,} of {counts['read']:,} prompts kept"
    if left_out:
        summary += f" (left out: {', '.join(left_out)})"
    return summary


class PromptSet(list[Prompt]):
    """The prompts of one set, in the order of the data. `name`: for messages. `weight`: passes over
    it per epoch. `together`: how many neighbours are always drawn together, and left out together.
    """

    def __init__(
        self,
        name: str,
        prompts: Iterable[Prompt],
        counts: Counter[str],
        weight: float = 1.0,
        together: int = 1,
    ) -> None:
        super().__init__(prompts)
        self.name = name
        self.counts = counts
        self.weight = weight
        self.together = together


def register_prompt_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config of prompts means this
    class."""
    return _PROMPT_DATASETS.register(name, *aliases)


def open_prompts(
    config: PromptSetConfig,
    *,
    environments: Collection[str] | None = None,
) -> PromptSet:
    """Read one training or validation set; with `split_validation_size` the prompts of `part`.

    `environments`: the existing names. A row may name no other, and its `task_name` chooses the
    environment of that name. Raises `ConfigError` for an unknown name or class, `DataError` for
    missing data or an invalid row.
    """
    entry = _PROMPT_DATASETS.find(config.dataset_name)
    source: RowPrompts
    if isinstance(entry, KnownDataset):
        source = KnownPrompts(config, entry)
    elif issubclass(entry, RowPrompts):
        source = entry(config)
    else:
        source = _ObjectPrompts(config, entry)
    num_read = 0
    kept = []
    # `max_samples` counts the rows of both parts, so that both are of the same rows.
    for prompt in itertools.islice(source, config.max_samples):
        num_read += 1
        # Here too, because a class of the user may make prompts without `from_prompt_row`.
        messages = check_prompt(prompt.messages, "messages", prompt.where)
        # The prompt files come after: another template must not move a prompt to the other part.
        is_of_part = source.is_of_part(messages)
        messages = source.files.complete(messages, prompt.where)
        prompt = replace(prompt, messages=messages)
        prompt = _with_environment(prompt, config.env_name, environments)
        if is_of_part:
            kept.append(prompt)
    if num_read == 0:
        need = "at least one"
        raise DataError(
            "there are no prompts",
            where=source.name,
            got="an empty dataset",
            need=need,
        )
    if not kept:
        summary = "split_validation_size leaves this part without a prompt"
        need = "a larger set, or another share"
        raise ConfigError(summary, where=source.name, field="split_validation_size", need=need)
    counts = Counter(read=num_read, kept=len(kept), held_out=num_read - len(kept))
    return PromptSet(source.name, kept, counts, config.weight)


class RowPrompts(RowSource):
    """A dataset that reads the rows of a file, folder or hub dataset. A subclass defines
    `to_prompt`."""

    def to_prompt(self, row: Row) -> Prompt:
        """Read one row; raises `DataError` naming `row.where`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.to_prompt, self.rows())


class KnownPrompts(RowPrompts):
    """A data set of the table."""

    def __init__(self, config: PromptSetConfig, known: KnownDataset) -> None:
        super().__init__(config, known)
        self.known: KnownDataset = known
        self._parser = function_of(known.parser)
        self._arguments = arguments_of(known, config)

    def rows(self) -> Iterator[Row]:
        """The rows for the parser."""
        rows = super().rows()
        if self.known.prepare is not None:
            rows = function_of(self.known.prepare)(rows, self)
        return rows

    def to_prompt(self, row: Row) -> Prompt:
        prompt: Prompt = self._parser(row.values, where=row.where, **self._arguments)
        return prompt


class _ObjectPrompts(ObjectRows, RowPrompts):
    """A dataset of a class by dotted path, whose rows are `Prompt`s, or rows as `PromptDataset`
    reads them."""

    def to_prompt(self, row: Row) -> Prompt:
        row_value: Any = row.values
        if isinstance(row_value, Prompt):
            if row_value.where is None:
                return replace(row_value, where=row.where)
            return row_value
        if isinstance(row_value, Mapping):
            return from_prompt_row(row_value, row.where)
        need = "an object, or a Prompt"
        raise DataError("a row is not an object", where=row.where, got=row_value, need=need)


def different_prompts(rows: Iterator[Row], dataset: RowSource) -> Iterator[Row]:
    """The different prompts of comparisons of the bundled data; their `reference_answers` are the
    best completions."""
    prompts: dict[str, dict[str, Any]] = {}
    for row in rows:
        context = row.values["context"]
        completions = row.values["completions"]
        key = json.dumps(context)
        prompt = prompts.setdefault(key, {"context": context, "reference_answers": []})
        best_rank = min(completion["rank"] for completion in completions)
        for completion in completions:
            text = completion["completion"][-1]["content"]
            if completion["rank"] == best_rank and text not in prompt["reference_answers"]:
                prompt["reference_answers"].append(text)
    for number, prompt in enumerate(prompts.values(), 1):
        yield Row(prompt, f"{dataset.name}:prompt {number}")


def _with_environment(
    prompt: Prompt,
    default: str | None,
    environments: Collection[str] | None,
) -> Prompt:
    """The prompt with the environment of its row, or else of its task name or the set's
    `env_name`."""
    name = prompt.info.get("environment")
    if name is None:
        name = default
        task = prompt.info.get("task_name")
        if environments is not None and isinstance(task, str) and task in environments:
            name = task
    if name is None:
        return prompt
    if not isinstance(name, str) or not name:
        summary = "environment is not a name"
        need = "a name; a mixture is an environment of the type hybrid"
        raise DataError(summary, where=prompt.where, field="environment", got=name, need=need)
    if environments is None or name in environments:
        return replace(prompt, info={**prompt.info, "environment": name})
    raise DataError.unknown(
        "there is no such environment",
        name,
        sorted(environments),
        where=prompt.where,
        field="environment",
        fix="add it to env, or change the row or env_name",
    )


def from_prompt_row(
    values: Mapping[str, Any],
    where: str,
    *,
    input_key: str | None = None,
    output_key: str | None = None,
) -> Prompt:
    """A row with its prompt under one of four keys, or under `input_key`.

    - `messages`: a conversation. If its last message is the assistant's, that is the reference
      answer and no part of the prompt.
    - `prompt` (TRL, verl) or `context` (the rank format): messages, or the text of one message of
      the user.
    - `responses_create_params` (NeMo Gym): a request of OpenAI's Responses API.

    `ground_truth` is the value of `output_key`, of `ground_truth`, of verl's
    `reward_model.ground_truth`, or the reference answer. `tools` (also those of the request) and
    `chat_template_kwargs` go to chat templates, and `system` becomes the system message. The
    entries of verl's `extra_info`, and all other columns with a value, are in `info` under their
    names.
    """
    key = input_key
    if key is None:
        key = _prompt_key(values, where)
        check_not_lost(values, MEDIA_COLUMNS, where, fix=_NAME_IT.format(key))
    value = required(values, key, where, "the key of the prompt, which input_key names")
    info = _columns(values, key)
    variables = read_template_kwargs(values, where)
    reference = None
    messages: tuple[Message, ...]
    if key == _REQUEST:
        messages, settings = _messages_of_request(value, where)
        request_tools = tools_of(value)
        # The tools of the row itself win.
        if request_tools:
            variables = {"tools": request_tools} | variables
        if settings:
            info[_REQUEST] = settings
    else:
        messages = as_messages(value, key, "user", where)
        if key == "messages" and messages[-1]["role"] == "assistant":
            reference = messages[-1]
            messages = messages[:-1]
    if output_key is not None:
        info["ground_truth"] = required(values, output_key, where, _NEED_ANSWER)
    elif "ground_truth" not in info:
        # As verl's rows have it, or else the reference answer.
        verl = values.get("reward_model")
        truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
        if truth is None and reference is not None:
            truth = last_text([reference])
        if truth is not None:
            info["ground_truth"] = truth
    if reference is not None:
        text = reference.get("content")
        # A message with parts or calls is kept whole, as the only message of a conversation.
        answer = text if isinstance(text, str) else [reference]
        # The row's own reference answers win.
        info.setdefault("reference_answers", [answer])
    messages = with_system(messages, [()], values, where)
    return Prompt(check_prompt(messages, key, where), info, where, variables)


def from_response_row(
    values: Mapping[str, Any],
    where: str,
    *,
    input_key: str | None = None,
    output_key: str = "output",
    keeps_columns: bool = True,
) -> Prompt:
    """A row of a question (text or messages) and its answer, the `ground_truth` and, if it is text,
    the reference answer; as NeMo RL's `ResponseDataset`. A row without the key but with `messages`
    is read by `from_prompt_row`. `keeps_columns`: False keeps the ground truth alone."""
    if input_key is None:
        input_key = "input"
        others = []
        if values.get(input_key) is not None:
            # As Alpaca's, whose `input` is what its `instruction` is about.
            others = [name for name in PROMPT_COLUMNS if values.get(name) != values[input_key]]
        fix = _NAME_IT.format(input_key)
        check_not_lost(values, [*MEDIA_COLUMNS, *others], where, fix=fix)
    # A row with neither gets the error of the missing key.
    has_input = values.get(input_key) is not None or values.get("messages") is None
    usual = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if values.get(input_key) is None and has_input and usual:
        raise DataError(
            "the row has no question and answer",
            where=where,
            field=input_key,
            got=shown_keys(values),
            need="the key of the prompt, which input_key names, and that of the answer",
            fix=f"dataset_name: auto reads rows that have {usual[0]}",
        )
    if has_input:
        read = from_prompt_row(values, where, input_key=input_key, output_key=output_key)
    else:
        read = from_prompt_row(values, where, input_key="messages")
    truth = read.info.get("ground_truth")
    if has_input and not _is_answer(truth):
        summary = f"{output_key} is no answer"
        need = "a text, a number, or a list of accepted ones"
        raise DataError(summary, where=where, field=output_key, got=truth, need=need)
    if not keeps_columns:
        truth = required(read.info, "ground_truth", where, "an answer")
        return replace(read, info={"ground_truth": truth})
    info: dict[str, Any] = {}
    if isinstance(truth, str):
        info["reference_answers"] = [truth]
    for key, column in read.info.items():
        # Without the answer's own column, which `ground_truth` repeats. Reference answers of the
        # row replace the truth.
        if key == "ground_truth" or key != output_key:
            info[key] = column
    return replace(read, info=info)


def _is_answer(truth: Any) -> bool:
    """Whether rules can compare it: a text, a finite number, or a list of accepted answers."""
    if isinstance(truth, bool):
        return False  # for Python it would be a number
    if isinstance(truth, int | float):
        return abs(truth) < math.inf  # not NaN either
    return isinstance(truth, str) or (isinstance(truth, Sequence) and len(truth) > 0)


def check_prompt(messages: Sequence[Message], field: str, where: str | None) -> tuple[Message, ...]:
    """The messages, checked: the last is not the assistant's nor empty, and not all are
    instructions."""
    problem = _problem_of(messages)
    if problem is None:
        return tuple(messages)
    need = "a conversation that ends with a question"
    fix = "fix or remove the row"
    raise DataError(problem, where=where, field=field, got=messages, need=need, fix=fix)


def _problem_of(messages: Any) -> str | None:
    """What is wrong with the messages of a prompt, which a dataset's own code may have made; None
    for nothing."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return "the prompt is not messages"
    if not all(isinstance(item, Mapping) and "role" in item for item in messages):
        return "the prompt is not messages"
    if not messages:
        return "nothing comes before the completion"
    last = messages[-1]
    if last["role"] == "assistant":
        return "the prompt ends with a message of the assistant"
    roles = {message["role"] for message in messages}
    content = last.get("content")
    # Content in parts may be an image alone, which has no text.
    is_blank = isinstance(content, str) and not content.strip()
    if roles <= {*SYSTEM_ROLES} or not content or is_blank:
        return "the prompt asks nothing"
    return None


def _prompt_key(values: Mapping[str, Any], where: str) -> str:
    """The key of the row's only prompt."""
    keys = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if len(keys) == 1 or _REQUEST in keys:
        return keys[0]  # a request comes first, and holds its messages itself
    if keys:
        need = "one of them, which input_key names"
        got = " and ".join(keys)
        raise DataError("the row has several prompts", where=where, got=got, need=need)
    need = f"a value of one of {', '.join(_PROMPT_KEYS)}"
    fix = "set input_key to the prompt's key; for rows with answers, dataset_name: ResponseDataset"
    got = shown_keys(values)
    raise DataError("the row asks nothing", where=where, got=got, need=need, fix=fix)


def _messages_of_request(request: Any, where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """The messages, and the request's other settings: its tools, its temperature."""
    if not isinstance(request, Mapping):
        summary = "the request is not an object"
        need = '{"input": ...}'
        raise DataError(summary, where=where, field=_REQUEST, got=request, need=need)
    try:
        messages = messages_of_input(request)
    except DataError as error:
        field = f"{_REQUEST}.{error.field}"
        raise DataError(
            error.summary,
            where=where,
            field=field,
            got=error.got,
            need=error.need,
        ) from error
    settings = {}
    for key, value in request.items():
        if key not in ("input", "instructions") and value is not None:
            settings[key] = value
    return tuple(messages), settings


def _columns(values: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    """The row's columns with a value, without its prompt; verl's `extra_info` is columns too."""
    row_values = {key: value for key, value in values.items() if value is not None}
    extra = row_values.pop("extra_info", {})
    # Only verl's is a mapping; another file may call a column of text so.
    if not isinstance(extra, Mapping):
        extra = {"extra_info": extra}
    columns = {key: value for key, value in extra.items() if value is not None}
    for key, value in row_values.items():
        if key != prompt_key and key not in _ENVIRONMENT_KEYS:
            columns[key] = value
    environment_key = first_with_value(row_values, _ENVIRONMENT_KEYS)
    if environment_key is not None:
        columns["environment"] = row_values[environment_key]
    return columns
