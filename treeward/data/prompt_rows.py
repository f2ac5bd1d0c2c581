"""From one row, in each of the formats that prompts come in, to a `Prompt`.

    from_prompt_row({"prompt": "2 + 2?", "ground_truth": "4"}, "train.jsonl:1")
    math_hf_data_processor({"problem": "2 + 2?", "expected_answer": "4"}, "train.jsonl:1", prompts=prompts)

Each function is pure, and raises `DataError` naming the place, the row's own key, what was found and the fix. What a
row says beside the prompt is the prompt's `info`, under the keys that environments read: `ground_truth`,
`reference_answers`, `environment`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeward.data.preference import Message, as_messages, last_text
from treeward.data.prompt_files import Prompts
from treeward.data.responses_items import messages_of_input
from treeward.errors import DataError

__all__ = ["Prompt", "check_asks", "from_prompt_row", "from_response_row", "math_hf_data_processor"]

_PROMPT_KEYS = ("responses_create_params", "messages", "prompt", "context")
_ENVIRONMENT_KEYS = ("environment", "env_name")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked. `info`: what environments need to know (ground truth, reference answers, the environment's name).

    `where`: file and line, for errors.
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
    reference answer. `environment` or `env_name` is the environment. What verl has in `extra_info`, and every other
    column with a value, is in `info` under its own name.
    """
    given = {key: value for key, value in values.items() if value is not None}
    key = _prompt_key(values, where) if prompt_key is None else prompt_key
    value = _required(values, key, where, "the key of the prompt, which input_key names")
    reference: Message | None = None
    if key == "responses_create_params":
        messages, kept = _messages_of_request(value, where)
    else:
        messages, kept = as_messages(value, key, "user", where), {}
        if key == "messages" and messages[-1]["role"] == "assistant":
            *asked, reference = messages
            messages = tuple(asked)
    info = _columns(given, key) | kept
    if answer_key is not None:
        info["ground_truth"] = _required(values, answer_key, where, "the key of the answer, which output_key names")
    elif "ground_truth" not in info:
        verl = given.get("reward_model")
        truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
        if truth is None and reference is not None:
            truth = last_text([reference])
        if truth is not None:
            info["ground_truth"] = truth
    if reference is not None and "reference_answers" not in info:
        text = reference.get("content")
        info["reference_answers"] = [text if isinstance(text, str) else [reference]]
    return Prompt(check_asks(messages, key, where), info, where)


def from_response_row(
    values: Mapping[str, Any], where: str, *, input_key: str = "input", output_key: str = "output"
) -> Prompt:
    """A row of a question and its answer, which is its `ground_truth` and, if it is text, its reference answer.

    The question is text or messages. A row without the key but with `messages` is read as `from_prompt_row` does.
    Source: `ResponseDataset` of NeMo RL.
    """
    if values.get(input_key) is None and values.get("messages") is not None:
        return from_prompt_row(values, where, prompt_key="messages")
    given = {key: value for key, value in values.items() if value is not None}
    question = _required(values, input_key, where, "a question: input_key names the key that holds it")
    messages = check_asks(as_messages(question, input_key, "user", where), input_key, where)
    info = {key: value for key, value in _columns(given, input_key).items() if key != output_key}
    need = "an answer: output_key names the key that holds it; for rows without one use dataset_name: PromptDataset"
    info["ground_truth"] = answer = _truth(_required(values, output_key, where, need), output_key, where)
    if isinstance(answer, str):
        info.setdefault("reference_answers", [answer])
    return Prompt(messages, info, where)


def math_hf_data_processor(
    values: Mapping[str, Any],
    where: str,
    *,
    prompts: Prompts | None = None,
    problem_key: str = "problem",
    answer_key: str = "expected_answer",
) -> Prompt:
    """A mathematical problem with its expected answer, which is the `ground_truth`; `prompts` completes the question.

    A row may also have the form that NeMo RL makes of it before its processor of this name: `messages` of the problem
    and of the expected answer. Nothing else of the row is kept: OpenMathInstruct-2 has a whole solution in each.
    """
    if values.get(problem_key) is None and values.get("messages") is not None:
        read = from_prompt_row({"messages": values["messages"]}, where)
        messages, truth = read.messages, _required(read.info, "ground_truth", where, "a last message with the answer")
    else:
        problem = _required(values, problem_key, where, "the text of a problem")
        if not isinstance(problem, str):
            raise DataError("a problem is not text", where=where, field=problem_key, got=problem, need="a text")
        messages = check_asks(({"role": "user", "content": problem},), problem_key, where)
        truth = _truth(_required(values, answer_key, where, "the expected answer"), answer_key, where)
    return Prompt(messages if prompts is None else prompts.complete(messages, where), {"ground_truth": truth}, where)


def check_asks(messages: Sequence[Message], field: str, where: str | None) -> tuple[Message, ...]:
    """The messages, which must ask something: the last is not the assistant's, and says something.

    Instructions (`system`, `developer`) alone ask nothing.
    """
    given: Any = messages  # a dataset's own code may have made it
    if isinstance(given, str) or not all(isinstance(one, Mapping) and "role" in one for one in given):
        raise DataError(
            "the prompt is not messages", where=where, field=field, got=messages, need='{"role": ..., "content": ...}'
        )
    last = messages[-1] if messages else None
    if last is None:
        raise DataError(
            "nothing comes before the answer",
            where=where,
            field=field,
            got="no message but one of the assistant",
            need="a message that is to be answered",
            fix="remove the row",
        )
    if last["role"] == "assistant":
        raise DataError(
            "the prompt ends with a message of the assistant",
            where=where,
            field=field,
            got="roles " + " > ".join(str(message["role"]) for message in messages),
            need="a conversation that ends with what is to be answered",
            fix="remove the answer, or give the conversation as messages: its last message is the reference answer",
        )
    if all(message["role"] in ("system", "developer") for message in messages):
        raise DataError(
            "the prompt asks nothing",
            where=where,
            field=field,
            got="roles " + " > ".join(str(message["role"]) for message in messages),
            need="a message of the user",
            fix="add what is asked, or remove the row",
        )
    content = last.get("content")
    if not content or (isinstance(content, str) and not content.strip()):
        raise DataError(
            "the prompt asks nothing", where=where, field=field, got=content, need="a text", fix="remove the row"
        )
    return tuple(messages)


def _prompt_key(values: Mapping[str, Any], where: str) -> str:
    found = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if found[:1] == ["responses_create_params"] or len(found) == 1:
        return found[0]
    empty = [key for key in _PROMPT_KEYS if key in values]
    if not found and empty:
        raise DataError(
            "the row asks nothing",
            where=where,
            field=empty[0],
            got=", ".join(f"{key}: null" for key in empty),
            need="a text, or messages",
            fix="add what is asked, or remove the row",
        )
    if not found:
        raise DataError(
            "the row asks nothing",
            where=where,
            got=f"keys {sorted(str(key) for key, value in values.items() if value is not None)}",
            need=f"one of {', '.join(_PROMPT_KEYS)}",
            fix="set input_key to the key of the prompt; for questions with answers use dataset_name: ResponseDataset",
        )
    raise DataError(
        "the row has several prompts",
        where=where,
        got=" and ".join(found),
        need="one of them",
        fix="set input_key to the one that is the prompt",
    )


def _messages_of_request(request: Any, where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """The messages, and what else the request says (its tools, its temperature) under its own name."""
    field = "responses_create_params"
    if not isinstance(request, Mapping):
        raise DataError("the request is not an object", where=where, field=field, got=request, need='{"input": ...}')
    try:
        messages = messages_of_input(request)
    except DataError as error:
        named = f"{field}.{error.field}" if error.field else field
        raise DataError(
            error.summary, where=where, field=named, got=error.got, need=error.need, fix=error.fix
        ) from error
    rest = {key: value for key, value in request.items() if key not in ("input", "instructions") and value is not None}
    return tuple(messages), {field: rest} if rest else {}


def _columns(given: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    """What a row says beside its prompt."""
    own = {key: value for key, value in given.items() if key not in (prompt_key, *_ENVIRONMENT_KEYS, "extra_info")}
    chosen = next((given[key] for key in _ENVIRONMENT_KEYS if key in given), None)
    if chosen is not None:
        own["environment"] = chosen
    extra = given.get("extra_info")
    if isinstance(extra, Mapping):
        return {key: value for key, value in extra.items() if value is not None} | own
    return own if extra is None else own | {"extra_info": extra}


def _required(values: Mapping[str, Any], key: str, where: str, need: str) -> Any:
    value = values.get(key)
    if value is None:
        there = sorted(str(name) for name, one in values.items() if one is not None)
        near = difflib.get_close_matches(key, there, n=1)
        raise DataError(
            f"the row has no {key}",
            where=where,
            field=key,
            got="null" if key in values else f"keys {there}",
            need=need,
            fix=f"is it {near[0]}?" if near else "mend or remove the row",
        )
    return value


def _truth(value: Any, key: str, where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if isinstance(value, str) or is_number or (isinstance(value, Sequence) and value):
        return value
    raise DataError(
        f"{key} is no answer", where=where, field=key, got=value, need="a text, a number, or a list of accepted ones"
    )
