"""`Prompt`, and the formats of rows that become one.

    from_prompt_row({"prompt": "2 + 2?", "ground_truth": "4"}, "train.jsonl:1")
    from_response_row({"input": "2 + 2?", "output": "4"}, "train.jsonl:1")

Each function is pure, and raises `DataError` naming the place, the row's own key, what was found and the fix. The other
columns of a row are the prompt's `info`, under the keys that environments read: `ground_truth`, `reference_answers`,
`environment`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeward.data.preference import Message, as_messages, last_text, required
from treeward.data.responses_items import messages_of_input
from treeward.errors import DataError

__all__ = ["Prompt", "check_prompt", "from_prompt_row", "from_response_row"]

_REQUEST = "responses_create_params"
_PROMPT_KEYS = (_REQUEST, "messages", "prompt", "context")
_ENVIRONMENT_KEYS = ("environment", "env_name")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages that a policy completes. `info`: for environments (ground truth, reference answers, the
    environment's name). `where`: file and line, for errors.
    """

    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None


def from_prompt_row(
    values: Mapping[str, Any], where: str, *, prompt_key: str | None = None, answer_key: str | None = None
) -> Prompt:
    """A row with its prompt under one of four keys, or under `prompt_key`.

    - `messages`: a conversation; a last message of the assistant is the reference answer, and no part of the prompt.
    - `prompt` (TRL, verl) or `context` (the rank format): messages, or the text of the user's only one.
    - `responses_create_params` (NeMo Gym): a request of OpenAI's Responses API.

    `ground_truth` is the row's own, under `answer_key` if that is given, or verl's `reward_model.ground_truth`, or the
    reference answer. `environment` or `env_name` is the environment. The entries of verl's `extra_info`, and every
    other column with a value, are in `info` under their own names.
    """
    key = prompt_key or _prompt_key(values, where)
    value = required(values, key, where, "the key of the prompt, which input_key names")
    info, reference = _columns(values, key), None
    if key == _REQUEST:
        messages, rest = _messages_of_request(value, where)
        info |= {_REQUEST: rest} if rest else {}
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
    return Prompt(check_prompt(messages, key, where), info, where)


def from_response_row(
    values: Mapping[str, Any],
    where: str,
    *,
    input_key: str = "input",
    output_key: str = "output",
    keeps_columns: bool = True,
) -> Prompt:
    """A row of a question and its answer, which is its `ground_truth` and, if it is text, its reference answer.

    The question is text or messages. A row without the key but with `messages` is read as `from_prompt_row` does.
    `keeps_columns`: False leaves all but the ground truth away, as for problems that come with a whole solution each.
    Source: `ResponseDataset` and `math_hf_data_processor` of NeMo RL.
    """
    has_input = values.get(input_key) is not None or values.get("messages") is None
    keys = (input_key, output_key) if has_input else ("messages", None)
    read = from_prompt_row(values, where, prompt_key=keys[0], answer_key=keys[1])
    truth = read.info.get("ground_truth")
    if not keeps_columns:
        return replace(read, info={"ground_truth": required(read.info, "ground_truth", where, "an answer")})
    references = {"reference_answers": [truth]} if isinstance(truth, str) else {}
    return replace(read, info=references | {key: v for key, v in read.info.items() if key != output_key})


def check_prompt(messages: Sequence[Message], field: str, where: str | None) -> tuple[Message, ...]:
    """The messages, which must ask something: the last is not the assistant's, and says something.

    Instructions (`system`, `developer`) alone ask nothing.
    """
    given: Any = messages  # a dataset's own code may have made it
    problem = None
    if isinstance(given, str) or not all(isinstance(one, Mapping) and "role" in one for one in given):
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
    found = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if found[:1] == [_REQUEST] or len(found) == 1:
        return found[0]
    if found:
        need = "one of them, which input_key names"
        raise DataError("the row has several prompts", where=where, got=" and ".join(found), need=need)
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
    rest = {key: value for key, value in request.items() if key not in ("input", "instructions") and value is not None}
    return tuple(messages), rest


def _columns(values: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    """The row's columns that have a value, beside its prompt."""
    given = {key: value for key, value in values.items() if value is not None}
    extra = given.pop("extra_info", {})
    columns = {key: v for key, v in extra.items() if v is not None} if isinstance(extra, Mapping) else {}
    columns |= {key: value for key, value in given.items() if key not in (prompt_key, *_ENVIRONMENT_KEYS)}
    chosen = next((given[key] for key in _ENVIRONMENT_KEYS if key in given), None)
    return columns if chosen is None else columns | {"environment": chosen}
