"""`PromptSet`: prompts for reinforcement learning, from the `data` section of a config.

    prompts = open_prompts(PromptSetConfig(dataset_name="OpenMathInstruct-2", prompt_file="cot.txt", env_name="math"))
    prompts[0].messages, prompts[0].info          # the conversation, and for environments: {"ground_truth": ...}

Prompts are messages, held in memory; a row's other columns are the prompt's `info`. A dataset is a `RowPrompts` whose
`to_prompt` reads a row, registered by `register_prompt_dataset`, or a class by dotted path (`treeward.data.registry`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from treeward.config.data import PromptSetConfig
from treeward.data.bundled import bundled_path
from treeward.data.columns import with_system
from treeward.data.conversation import Conversation, Message, as_messages, last_text, read_template_kwargs
from treeward.data.preference import required
from treeward.data.registry import ObjectRows, Registry
from treeward.data.responses_items import messages_of_input, tools_of
from treeward.data.sources import Row, RowSource
from treeward.errors import ConfigError, DataError

_PROMPT_DATASETS = Registry("datasets of prompts", example="my_module.MyPrompts")
_Class = TypeVar("_Class", bound="type[RowPrompts]")
_REQUEST = "responses_create_params"
FAMILY = "prompt_family"
"""The key of `info` whose value prompts have in common that are computed as one tree, as both orders of a pair."""
_PROMPT_KEYS = (_REQUEST, "messages", "prompt", "context")
_ENVIRONMENT_KEYS = ("environment", "env_name")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages for a policy to complete. `info`: for environments. `where`: file and line, for errors.
    `template_kwargs`: tools and further variables, for the policy's template and for those of reward models. `opening`:
    how the policy's generation prompt begins the text of every completion (`Renderer.opening`)."""

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
    """One line for a person: the rows `read` and `kept`, and those left out: `held_out` (of the other part of a split
    set), `too_long`, and `tied` (questions about completions of equal rank)."""
    reasons = {"of the other part": "held_out", "too long": "too_long", "of equal ranks": "tied"}
    left_out = ", ".join(f"{counts[key]:,} {reason}" for reason, key in reasons.items() if counts[key])
    return f"{counts['kept']:,} of {counts['read']:,} prompts kept" + (f" (left out: {left_out})" if left_out else "")


class PromptSet(list[Prompt]):
    """The prompts of one set, in the order of the data. `name`: for messages. `weight`: passes over it per epoch.
    `together`: so many neighbours are always drawn together, and left out together."""

    def __init__(
        self, name: str, prompts: Iterable[Prompt], counts: Counter[str], weight: float = 1.0, together: int = 1
    ) -> None:
        super().__init__(prompts)
        self.name, self.counts, self.weight, self.together = name, counts, weight, together


def register_prompt_dataset(name: str, *aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: `dataset_name: <name>` (or an alias) in a config of prompts means this class."""
    return _PROMPT_DATASETS.register(name, *aliases)


def open_prompts(config: PromptSetConfig, *, environments: Collection[str] | None = None) -> PromptSet:
    """Read one training or validation set; with `split_validation_size` the prompts of `part`.

    `environments`: the existing names. A row may name no other, and its `task_name` chooses the environment of that
    name. Raises `ConfigError` for an unknown name or class, `DataError` for missing data or an invalid row.
    """
    cls: Any = _PROMPT_DATASETS.find(config.dataset_name)
    source: RowPrompts = cls(config) if issubclass(cls, RowPrompts) else _ObjectPrompts(config, cls)
    prompts = []
    for prompt in itertools.islice(source, config.max_samples):
        messages = source.files.complete(check_prompt(prompt.messages, "messages", prompt.where), prompt.where)
        prompts.append(_with_environment(replace(prompt, messages=messages), config.env_name, environments))
    if not prompts:
        raise DataError("there are no prompts", where=source.name, got="an empty dataset", need="at least one")
    kept = [prompt for prompt in prompts if source.is_of_part(prompt.messages)]
    if not kept:
        summary, need = "split_validation_size leaves this part without a prompt", "a larger set, or another share"
        raise ConfigError(summary, where=source.name, field="split_validation_size", need=need)
    counts = Counter(read=len(prompts), kept=len(kept), held_out=len(prompts) - len(kept))
    return PromptSet(source.name, kept, counts, config.weight)


class RowPrompts(RowSource):
    """A dataset that reads the rows of a file, folder or hub dataset. A subclass defines `to_prompt`."""

    def to_prompt(self, row: Row) -> Prompt:
        """Read one row; raises `DataError` naming `row.where`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.to_prompt, self.rows())


@register_prompt_dataset("PromptDataset", "auto")
class PromptDataset(RowPrompts):
    """Rows with their prompt under `messages`, `prompt`, `context` or `responses_create_params`: `from_prompt_row`."""

    def to_prompt(self, row: Row) -> Prompt:
        config = self.config
        return from_prompt_row(row.values, row.where, prompt_key=config.input_key, answer_key=config.output_key)


@register_prompt_dataset("ResponseDataset")
class ResponseDataset(RowPrompts):
    """Rows of a question and its answer, under keys that may be named; NeMo RL's."""

    keys: ClassVar[tuple[str, str]] = ("input", "output")
    keeps_columns: ClassVar[bool] = True

    def to_prompt(self, row: Row) -> Prompt:
        question, answer = self.config.input_key or self.keys[0], self.config.output_key or self.keys[1]
        keys: Any = {"input_key": question, "output_key": answer, "keeps_columns": self.keeps_columns}
        return from_response_row(row.values, row.where, **keys)


@register_prompt_dataset("OpenMathInstruct-2", "OpenMathInstruct2")
class OpenMathInstruct2(ResponseDataset):
    """nvidia/OpenMathInstruct-2, or a copy of it; without a split its first million rows. Problems come repeatedly."""

    hub_path, hub_split = "nvidia/OpenMathInstruct-2", "train_1M"
    keys, keeps_columns = ("problem", "expected_answer"), False


@register_prompt_dataset("DeepScaler")
class DeepScaler(ResponseDataset):
    """agentica-org/DeepScaleR-Preview-Dataset, or a copy of it."""

    hub_path, keys, keeps_columns = "agentica-org/DeepScaleR-Preview-Dataset", ("problem", "answer"), False


@register_prompt_dataset("AIME2024")
class Aime2024(DeepScaler):
    """HuggingFaceH4/aime_2024, or a copy of it: 30 problems."""

    hub_path = "HuggingFaceH4/aime_2024"


@register_prompt_dataset("DAPOMath17K")
class DapoMath17K(PromptDataset):
    """BytedTsinghua-SIA/DAPO-Math-17k, or a copy of it: verl's rows."""

    hub_path = "BytedTsinghua-SIA/DAPO-Math-17k"


@register_prompt_dataset("DAPOMathAIME2024")
class DapoMathAime2024(DapoMath17K):
    """BytedTsinghua-SIA/AIME-2024, or a copy of it: AIME's problems in DAPO's words, each 32 times."""

    hub_path = "BytedTsinghua-SIA/AIME-2024"


@register_prompt_dataset("Bundled")
class BundledPrompts(RowPrompts):
    """The different prompts of the bundled data; their `reference_answers` are the best completions."""

    hub_path = "Bundled"

    def __iter__(self) -> Iterator[Prompt]:
        answers_by_context: dict[str, tuple[list[Message], list[str]]] = {}
        for line in bundled_path(self.split or "train").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            _, answers = answers_by_context.setdefault(json.dumps(row["context"]), (row["context"], []))
            best = min(completion["rank"] for completion in row["completions"])
            texts = [item["completion"][-1]["content"] for item in row["completions"] if item["rank"] == best]
            answers += [text for text in texts if text not in answers]
        for number, (messages, answers) in enumerate(answers_by_context.values(), 1):
            yield Prompt(tuple(messages), {"reference_answers": answers}, f"{self.name}:prompt {number}")


class _ObjectPrompts(ObjectRows, RowPrompts):
    """A dataset of a class by dotted path, whose rows are `Prompt`s, or rows as `PromptDataset` reads them."""

    def to_prompt(self, row: Row) -> Prompt:
        row_value: Any = row.values
        if isinstance(row_value, Prompt):
            return row_value if row_value.where is not None else replace(row_value, where=row.where)
        if isinstance(row_value, Mapping):
            return from_prompt_row(row_value, row.where)
        raise DataError("a row is not an object", where=row.where, got=row_value, need="an object, or a Prompt")


def _with_environment(prompt: Prompt, default: str | None, environments: Collection[str] | None) -> Prompt:
    """The prompt with the environment of its row, or else of its task name or the set's `env_name`."""
    name, task = prompt.info.get("environment"), prompt.info.get("task_name")
    if name is None:
        name = task if environments is not None and isinstance(task, str) and task in environments else default
    if name is None:
        return prompt
    if not isinstance(name, str) or not name:
        need = "a name; a mixture is an environment of the type hybrid"
        raise DataError("environment is not a name", where=prompt.where, field="environment", got=name, need=need)
    if environments is None or name in environments:
        return replace(prompt, info={**prompt.info, "environment": name})
    place: Any = {"where": prompt.where, "field": "environment", "fix": "add it to env, or change the row or env_name"}
    raise DataError.unknown("there is no such environment", name, sorted(environments), **place)


def from_prompt_row(
    values: Mapping[str, Any], where: str, *, prompt_key: str | None = None, answer_key: str | None = None
) -> Prompt:
    """A row with its prompt under one of four keys, or under `prompt_key`.

    - `messages`: a conversation; a last message of the assistant is the reference answer, and no part of the prompt.
    - `prompt` (TRL, verl) or `context` (the rank format): messages, or the text of the user's only one.
    - `responses_create_params` (NeMo Gym): a request of OpenAI's Responses API.

    `ground_truth` is the value of `answer_key`, of `ground_truth`, of verl's `reward_model.ground_truth`, or the
    reference answer. `tools` (also those of the request) and `chat_template_kwargs` go to chat templates, and `system`
    becomes the system message. The entries of verl's `extra_info`, and all other columns with a value, are in `info`
    under their names.
    """
    key = prompt_key or _prompt_key(values, where)
    value = required(values, key, where, "the key of the prompt, which input_key names")
    info, reference = _columns(values, key), None
    variables = read_template_kwargs(values, where)
    if key == _REQUEST:
        messages, settings = _messages_of_request(value, where)
        if request_tools := tools_of(value):
            variables = {"tools": request_tools} | variables
        info |= {_REQUEST: settings} if settings else {}
    else:
        messages = as_messages(value, key, "user", where)
        if key == "messages" and messages[-1]["role"] == "assistant":
            messages, reference = messages[:-1], messages[-1]
    if answer_key is not None:
        need = "an answer, whose key output_key names; for rows without one use dataset_name: PromptDataset"
        info["ground_truth"] = required(values, answer_key, where, need)
    elif "ground_truth" not in info:
        verl = values.get("reward_model")
        truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
        if truth is None and reference is not None:
            truth = last_text([reference])
        info |= {} if truth is None else {"ground_truth": truth}
    if reference is not None:
        text = reference.get("content")
        info.setdefault("reference_answers", [text if isinstance(text, str) else [reference]])
    messages = with_system(tuple(messages), [()], values, where)
    return Prompt(check_prompt(messages, key, where), info, where, variables)


def from_response_row(
    values: Mapping[str, Any],
    where: str,
    *,
    input_key: str = "input",
    output_key: str = "output",
    keeps_columns: bool = True,
) -> Prompt:
    """A row of a question (text or messages) and its answer, the `ground_truth` and, if it is text, the reference
    answer; as NeMo RL's `ResponseDataset`. A row without the key but with `messages` is read by `from_prompt_row`.
    `keeps_columns`: False keeps the ground truth alone."""
    has_input = values.get(input_key) is not None or values.get("messages") is None
    keys = (input_key, output_key) if has_input else ("messages", None)
    read = from_prompt_row(values, where, prompt_key=keys[0], answer_key=keys[1])
    truth = read.info.get("ground_truth")
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool) and abs(truth) < math.inf
    if has_input and not (isinstance(truth, str) or is_number or (isinstance(truth, Sequence) and truth)):
        need = "a text, a number, or a list of accepted ones"
        raise DataError(f"{output_key} is no answer", where=where, field=output_key, got=truth, need=need)
    if not keeps_columns:
        return replace(read, info={"ground_truth": required(read.info, "ground_truth", where, "an answer")})
    references = {"reference_answers": [truth]} if isinstance(truth, str) else {}
    columns = {key: v for key, v in read.info.items() if key == "ground_truth" or key != output_key}
    return replace(read, info=references | columns)


def check_prompt(messages: Sequence[Message], field: str, where: str | None) -> tuple[Message, ...]:
    """The messages, checked: the last is not the assistant's nor empty, and not all are instructions."""
    unchecked: Any = messages  # a dataset's own code may have made it
    problem = None
    if isinstance(unchecked, str) or not all(isinstance(item, Mapping) and "role" in item for item in unchecked):
        problem = "the prompt is not messages"
    elif not messages:
        problem = "nothing comes before the completion"
    elif messages[-1]["role"] == "assistant":
        problem = "the prompt ends with a message of the assistant"
    elif {message["role"] for message in messages} <= {"system", "developer"} or not (
        messages[-1].get("content") and (last_text(messages).strip() or not isinstance(messages[-1]["content"], str))
    ):
        problem = "the prompt asks nothing"
    if problem is None:
        return tuple(messages)
    need, fix = "a conversation that ends with a question", "mend or remove the row"
    raise DataError(problem, where=where, field=field, got=messages, need=need, fix=fix)


def _prompt_key(values: Mapping[str, Any], where: str) -> str:
    keys = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if keys[:1] == [_REQUEST] or len(keys) == 1:
        return keys[0]
    if keys:
        need = "one of them, which input_key names"
        raise DataError("the row has several prompts", where=where, got=" and ".join(keys), need=need)
    need = f"a value of one of {', '.join(_PROMPT_KEYS)}"
    fix = "set input_key to the key of the prompt; for questions with answers use dataset_name: ResponseDataset"
    raise DataError("the row asks nothing", where=where, got=f"keys {sorted(map(str, values))}", need=need, fix=fix)


def _messages_of_request(request: Any, where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """The messages, and the request's other settings: its tools, its temperature."""
    if not isinstance(request, Mapping):
        raise DataError("the request is not an object", where=where, field=_REQUEST, got=request, need='{"input": ...}')
    try:
        messages = messages_of_input(request)
    except DataError as error:
        field = f"{_REQUEST}.{error.field}"
        raise DataError(error.summary, where=where, field=field, got=error.got, need=error.need) from error
    keys = [key for key, value in request.items() if key not in ("input", "instructions") and value is not None]
    return tuple(messages), {key: request[key] for key in keys}


def _columns(values: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    """The row's columns with a value, without its prompt."""
    row_values = {key: value for key, value in values.items() if value is not None}
    extra = row_values.pop("extra_info", {})
    extra = extra if isinstance(extra, Mapping) else {"extra_info": extra}
    columns = {key: value for key, value in extra.items() if value is not None}
    columns |= {key: value for key, value in row_values.items() if key not in (prompt_key, *_ENVIRONMENT_KEYS)}
    environment = next((row_values[key] for key in _ENVIRONMENT_KEYS if key in row_values), None)
    return columns if environment is None else columns | {"environment": environment}
