"""Rows of solutions with labels of steps, in the forms in which they are published: each function
makes a `Problem` of a row.

    from_step_row({"prompt": "2 + 3 = ?", "completions": ["It is 5."], "labels": [True]},
                  where="train.jsonl:1")

The functions are those that `STEP_FORMATS` of `config/dataset_table.py` names. Each raises
`DataError` with the place of the row and the field. White space around a step is no part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treeward.data.columns import context_of, shown_keys, with_system
from treeward.data.conversation import (
    Messages,
    as_messages,
    is_list,
    last_text,
    parse_json_list,
    read_template_kwargs,
)
from treeward.data.steps import Problem, Solution, Step
from treeward.errors import DataError

_FIRST_STEP = re.compile(r"Step 1:")
_WITH_STEPS = ("input", "conversations", "messages")
"""Columns with the text of the steps."""
_NEED_LABEL = "true or false, + or -, or a probability from 0 to 1; null for a step without a label"
_SIGNS = {"+": 1.0, "-": 0.0}


def from_step_row(values: Mapping[str, Any], where: str, *, task_name: str) -> Problem:
    """TRL's form: a prompt, `completions`, which are the steps, and `labels`, one for each.

    Labels may be probabilities. TRL's own trainer cuts these to 0.
    """
    texts = _list_of(values, "completions", where)
    labels = _list_of(values, "labels", where)
    if len(texts) != len(labels):
        raise DataError(
            "there is not one label for each step",
            where=where,
            field="labels",
            got=f"{len(labels)} labels",
            need=f"{len(texts)}, one for each of completions",
        )
    steps = []
    for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
        step_text = _step_text(text, f"completions[{i}]", where)
        steps.append(Step(step_text, _label(label, f"labels[{i}]", where)))
    context = context_of(values, where)
    if not context:
        raise DataError(
            "the row has no prompt",
            where=where,
            field="prompt",
            got=shown_keys(values),
            need="the problem, a text or messages",
        )
    return _problem(values, context, [steps], where, task_name)


def from_process_bench_row(values: Mapping[str, Any], where: str, *, task_name: str) -> Problem:
    """ProcessBench's form: `problem`, `steps`, and `label`, the index of the first wrong step, -1
    where all are right. Nobody has judged what follows a wrong step."""
    texts = _list_of(values, "steps", where)
    first_error: Any = values.get("label")
    is_index = isinstance(first_error, int) and not isinstance(first_error, bool)
    if not is_index or not -1 <= first_error < len(texts):
        raise DataError(
            "the label is no index of a step",
            where=where,
            field="label",
            got=repr(first_error),  # "1" is a text, and no index
            need=f"-1, or 0 to {len(texts) - 1}",
        )
    steps = []
    for i, text in enumerate(texts):
        label: float | None = 1.0
        if first_error >= 0 and i == first_error:
            label = 0.0
        elif first_error >= 0 and i > first_error:
            label = None
        steps.append(Step(_step_text(text, f"steps[{i}]", where), label))
    context = as_messages(values.get("problem"), "problem", "user", where)
    return _problem(values, context, [steps], where, task_name)


def has_question_with_problem(values: Mapping[str, Any]) -> bool:
    """Whether the question is an object with the problem, as in PRM800K, and no prompt's text."""
    question = values.get("question")
    return isinstance(question, Mapping) and "problem" in question


def from_prm800k_row(
    values: Mapping[str, Any], where: str, *, task_name: str, neutral_is_right: bool = True
) -> Problem:
    """PRM800K's form: `question.problem`, and `label.steps`, each with the `completions` that were
    rated and the one that was chosen. Alternatives are solutions that end there."""
    question = values.get("question")
    problem = question.get("problem") if isinstance(question, Mapping) else None
    context = as_messages(problem, "question.problem", "user", where)
    label = values.get("label")
    steps: Any = label.get("steps") if isinstance(label, Mapping) else None
    if not is_list(steps):
        raise DataError(
            "there are no steps", where=where, field="label.steps", got=steps, need="a list"
        )
    solutions: list[list[Step]] = []
    # The solution that the labelling went on with, as far as it has come.
    chosen: list[Step] = []
    for number, step in enumerate(steps):
        field = f"label.steps[{number}]"
        if not isinstance(step, Mapping):
            raise DataError("a step is not an object", where=where, field=field, got=step)
        items: Any = step.get("completions") or []
        if not is_list(items):
            raise DataError(
                "completions is not a list",
                where=where,
                field=f"{field}.completions",
                got=items,
                need="a list, or null",
            )
        rated = []
        for i, item in enumerate(items):
            rated.append(_rated(item, f"{field}.completions[{i}]", where, neutral_is_right))
        human = step.get("human_completion")
        index = step.get("chosen_completion")
        # Where no completion was good enough, a person could write the step that follows.
        following: Step | None = None
        if index is not None:
            is_index = isinstance(index, int) and not isinstance(index, bool)
            if not is_index or not 0 <= index < len(rated):
                raise DataError(
                    "the chosen completion is not there",
                    where=where,
                    field=f"{field}.chosen_completion",
                    got=index,
                    need=f"0 to {len(rated) - 1}, or null",
                )
            following = rated[index]
        elif human is not None:
            following = _rated(human, f"{field}.human_completion", where, neutral_is_right)
        for i, alternative in enumerate(rated):
            if i != index:
                # The chosen solution has the labels: an alternative that repeats them would count
                # them again.
                before = [Step(earlier.text) for earlier in chosen]
                solutions.append([*before, alternative])
        if following is None:
            break  # the labelling has ended here
        chosen.append(following)
    if chosen:
        solutions.insert(0, chosen)
    return _problem(values, context, solutions, where, task_name)


def _rated(item: Any, field: str, where: str, neutral_is_right: bool) -> Step:
    """A step of PRM800K with its rating: 1 is right, 0 is neutral, -1 is wrong."""
    if not isinstance(item, Mapping):
        raise DataError("a completion is not an object", where=where, field=field, got=item)
    text = _step_text(item.get("text"), f"{field}.text", where)
    rating = item.get("rating")
    if rating is None:
        return Step(text)  # flagged, or written by a person
    if rating not in (-1, 0, 1):
        need = "-1, 0, 1, or null"
        raise DataError(
            "this is no rating", where=where, field=f"{field}.rating", got=rating, need=need
        )
    is_right = rating == 1 or (rating == 0 and neutral_is_right)
    return Step(text, float(is_right))


def has_label_text(values: Mapping[str, Any]) -> bool:
    """Whether the label is a text, as in Math-Shepherd, and no list of labels, nor its JSON."""
    label = values.get("label")
    if not isinstance(label, str):
        return False
    # The text may begin with a bracket too: many problems of MATH begin with "[asy]".
    try:
        return not isinstance(json.loads(label), list)
    except (ValueError, RecursionError):
        return True


def from_math_shepherd_row(
    values: Mapping[str, Any], where: str, *, task_name: str, placeholder_token: str
) -> Problem:
    """Math-Shepherd's form: `input`, a problem and its steps with a mark after each, and `label`,
    the same text with + or - for each mark."""
    pieces = _pieces(values, placeholder_token, where)
    signed = values.get("label")
    if not isinstance(signed, str):
        raise DataError(
            "label is not a text",
            where=where,
            field="label",
            got=signed,
            need="the text of input with + or - for its marks",
        )
    labels: list[float | None] = []
    place = 0
    # The sign is one character where the mark was, which may be longer: the two texts drift apart.
    for piece in pieces[:-1]:
        end = place + len(piece)
        sign = signed[end : end + 1]
        if signed[place:end] != piece or sign not in _SIGNS:
            raise DataError(
                "label is not the text of input with + or - for its marks",
                where=where,
                field="label",
                got=signed[max(0, end - 20) : end + 20],
                need=f"+ or - at character {end}",
            )
        labels.append(_SIGNS[sign])
        place = end + 1
    return _marked_problem(values, pieces, labels, where, task_name)


def from_placeholder_row(
    values: Mapping[str, Any], where: str, *, task_name: str, placeholder_token: str
) -> Problem:
    """OpenRLHF's form: `input`, the text with a placeholder after each step, and `label` or
    `value`, a list: words are hard labels, numbers soft ones."""
    pieces = _pieces(values, placeholder_token, where)
    field = "value" if values.get("label") is None else "label"
    items = _list_of(values, field, where)
    labels = [_label(item, f"{field}[{i}]", where) for i, item in enumerate(items)]
    if len(labels) != len(pieces) - 1:
        raise DataError(
            "there is not one label for each placeholder",
            where=where,
            field=field,
            got=f"{len(labels)} labels",
            need=f"{len(pieces) - 1}, one for each {placeholder_token!r} of input",
        )
    return _marked_problem(values, pieces, labels, where, task_name)


def _pieces(values: Mapping[str, Any], mark: str, where: str) -> list[str]:
    """The text between the marks; the last piece is what follows the last mark."""
    if not mark:
        raise DataError(
            "the mark of the data is empty",
            where=where,
            field="data.placeholder_token",
            got=repr(mark),
            need="the text that stands after each step of input",
        )
    text = values.get("input")
    if not isinstance(text, str) or mark not in text:
        raise DataError(
            "there is no mark after a step",
            where=where,
            field="input",
            got=text,
            need=f"a text with {mark!r} after each step",
            fix="name the mark of the data: data.placeholder_token=...",
        )
    return text.split(mark)


def _marked_problem(
    values: Mapping[str, Any],
    pieces: Sequence[str],
    labels: Sequence[float | None],
    where: str,
    task_name: str,
) -> Problem:
    """The problem of a text that has its problem before its first step."""
    problem_text = ""
    steps: list[Step] = []
    prompt = _prompt_beside(values, where)
    for i, piece in enumerate(pieces):
        text = piece
        if not steps:
            before, first_step = _first_step(piece, prompt)
            problem_text += before
            if first_step is None:
                # A dozen problems of Math-Shepherd have a stray mark before the first step. Its
                # label is of no step.
                continue
            text = first_step
        if i < len(labels):
            steps.append(Step(_step_text(text, "input", where), labels[i]))
        elif text.strip():
            steps.append(Step(text.strip()))  # what follows the last mark has no label
    if not steps:
        raise DataError(
            "nothing says where the problem ends",
            where=where,
            field="input",
            got=problem_text,
            need="Step 1: where the first step begins, or a column prompt with the problem",
        )
    context = prompt or _problem_before(problem_text, "input", where)
    return _problem(values, context, [steps], where, task_name)


def _prompt_beside(values: Mapping[str, Any], where: str) -> Messages | None:
    """The prompt in a column of its own, beside a text that may have it too; None without one."""
    others = {}
    for name, value in values.items():
        is_blank = isinstance(value, str) and not value.strip()
        if name not in _WITH_STEPS and not is_blank:
            others[name] = value
    return context_of(others, where) or None


def _first_step(text: str, prompt: Messages | None) -> tuple[str, str | None]:
    """The text before the first step, and the first step: what follows the `prompt` of a column of
    its own, or begins with `Step 1:`. None for the step where the text ends before it."""
    if prompt is None:
        begin = _FIRST_STEP.search(text)
        if begin is None:
            return text, None
        return text[: begin.start()], text[begin.start() :]
    # Whether the text repeats the prompt: else it begins with the step.
    problem = last_text(prompt).strip()
    rest = text.strip().removeprefix(problem)
    # White space ends the prompt: "2 + 25" only begins as "2 + 2" does.
    if rest == text.strip() or rest[:1].strip():
        return "", text
    return problem, rest or None


def _problem_before(text: str, field: str, where: str) -> Messages:
    """The problem that stands before the first step. Raises `DataError` where nothing does: the
    model would read steps without knowing of what."""
    if not text.strip():
        raise DataError(
            "there is no problem before the first step",
            where=where,
            field=field,
            got=repr(text),
            need="the problem, and then Step 1:; or a column prompt with the problem",
            fix="name the problem's column: data.prompt_key=...",
        )
    return as_messages(text.strip(), field, "user", where)


def are_signed_turns(values: Mapping[str, Any]) -> bool:
    """Whether the assistant's turns of a conversation are + and -."""
    try:
        turns = _turns(values, "")
    except DataError:
        return False
    signs = [last_text([turn]).strip() for turn in turns if turn["role"] == "assistant"]
    return bool(signs) and all(sign in _SIGNS for sign in signs)


def _turns(values: Mapping[str, Any], where: str) -> Messages:
    return as_messages(values.get(_turns_column(values)), _turns_column(values), "user", where)


def _turns_column(values: Mapping[str, Any]) -> str:
    return "conversations" if values.get("conversations") is not None else "messages"


def from_signed_turns(values: Mapping[str, Any], where: str, *, task_name: str) -> Problem:
    """RLHFlow's form: a conversation in which each user turn is a step, the first with the problem
    before it, and each assistant turn is + or -."""
    name = _turns_column(values)
    turns = _turns(values, where)
    prompt = _prompt_beside(values, where)
    context: Messages = prompt or ()
    steps: list[Step] = []
    for i, turn in enumerate(turns):
        field = f"{name}[{i}].content"
        role = "assistant" if i % 2 else "user"
        if turn["role"] != role:
            raise DataError(
                "the turns do not alternate",
                where=where,
                field=f"{name}[{i}].role",
                got=turn["role"],
                need=f"{role}: a step of the user, and then + or - of the assistant",
            )
        if role == "assistant":
            label = _label(last_text([turn]), field, where)
            steps[-1] = Step(steps[-1].text, label)
            continue
        text = last_text([turn])
        if i == 0:
            before, first_step = _first_step(text, prompt)
            if first_step is None:
                raise DataError(
                    "nothing says where the problem ends",
                    where=where,
                    field=field,
                    got=before,
                    need="Step 1: where the first step begins, or a column prompt with the problem",
                )
            text = first_step
            context = prompt or _problem_before(before, field, where)
        steps.append(Step(_step_text(text, field, where)))
    return _problem(values, context, [steps], where, task_name)


def _problem(
    values: Mapping[str, Any],
    context: Messages,
    solutions: Sequence[Sequence[Step]],
    where: str,
    task_name: str,
) -> Problem:
    """The problem of a row, with its system message, template variables and task name."""
    if not any(last_text([message]).strip() for message in context):
        raise DataError(
            "the problem is empty",
            where=where,
            got=shown_keys(values),
            need="a text: the model would read steps without knowing of what",
        )
    whole: list[Solution] = [tuple(solution) for solution in solutions if solution]
    if not whole:
        raise DataError("the row has no step", where=where, got=shown_keys(values), need="one step")
    name = values.get("task_name")
    if isinstance(name, str) and name:
        task_name = name  # the row's own wins over the set's
    return Problem(
        with_system(context, [()], values, where),
        tuple(whole),
        task_name,
        read_template_kwargs(values, where),
    )


def _list_of(values: Mapping[str, Any], field: str, where: str) -> Sequence[Any]:
    items = parse_json_list(values.get(field), field, where)
    if not is_list(items) or not items:
        raise DataError(
            f"{field} is not a list", where=where, field=field, got=items, need="one item or more"
        )
    listed: Sequence[Any] = items
    return listed


def _step_text(text: Any, field: str, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise DataError("a step is no text", where=where, field=field, got=text, need="a text")
    return text.strip()


def _label(value: Any, field: str, where: str) -> float | None:
    """The probability that a step is right; None without a label."""
    if value is None:
        return None
    number: float | None = None
    # Text is no number, also not "1": a file of another form would be learnt by mistake.
    if isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        number = _SIGNS.get(value.strip())
    elif isinstance(value, int | float) and 0 <= value <= 1:  # NaN is not
        number = float(value)
    if number is None:
        raise DataError(
            "this is no label", where=where, field=field, got=repr(value), need=_NEED_LABEL
        )
    return number
