"""Rows of steps in every form, bad rows, merging, and the tokens and labels that come of them."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.config.dataset_table import STEP_FORMATS
from treeward.data.datasets import open_dataset
from treeward.data.encoding import EncodedDataset
from treeward.data.rendering import Renderer
from treeward.data.step_datasets import open_step_dataset, recognise_steps
from treeward.data.step_encoding import encode_steps
from treeward.data.step_marks import choose_mark, mark_id
from treeward.data.steps import Problem, Step, paths_of, step_tree
from treeward.data.tokenizers import train_tokenizer
from treeward.errors import ConfigError, DataError

MARK = "<|step|>"
QUESTION = "2 + 3, times 2?"
FIRST = "Step 1: 2 + 3 = 5"
SECOND = "Step 2: 5 * 2 = 12"

PRM800K = {
    "question": {"problem": QUESTION},
    "label": {
        "steps": [
            {
                "completions": [
                    {"text": FIRST, "rating": 1},
                    {"text": "Let me see.", "rating": 0},
                    {"text": "2 + 3 = 6", "rating": -1},
                ],
                "chosen_completion": 0,
                "human_completion": None,
            },
            {
                "completions": [{"text": SECOND, "rating": -1}],
                "chosen_completion": None,
                "human_completion": None,
            },
        ],
        "finish_reason": "found_error",
    },
}
BOTH = [Step(FIRST, 1.0), Step(SECOND, 0.0)]
FORMS: list[tuple[str, dict[str, Any], list[list[Step]]]] = [
    (
        "StepDataset",
        {"prompt": QUESTION, "completions": [FIRST, f" {SECOND}\n"], "labels": [True, False]},
        [BOTH],
    ),
    (
        "StepDataset",
        {"prompt": QUESTION, "completions": [FIRST, SECOND], "labels": [0.9, None]},
        [[Step(FIRST, 0.9), Step(SECOND)]],
    ),
    (
        "StepDataset",  # distilabel writes the prompt twice
        {
            "instruction": QUESTION,
            "prompt": QUESTION,
            "completions": [FIRST, SECOND],
            "labels": [True, False],
        },
        [BOTH],
    ),
    (
        "PRM800K",
        PRM800K,
        [
            [Step(FIRST, 1.0)],
            [Step("Let me see.", 1.0)],
            [Step("2 + 3 = 6", 0.0)],
            [Step(FIRST), Step(SECOND, 0.0)],
        ],
    ),
    (
        "MathShepherd",
        {
            "input": f"{QUESTION} {FIRST} ки\n{SECOND} ки",
            "label": f"{QUESTION} {FIRST} +\n{SECOND} -",
            "task": "GSM8K",
        },
        [BOTH],
    ),
    (
        "MathShepherd",  # a dozen problems have a stray mark before the first step
        {
            "input": f"{QUESTION} ки {FIRST} ки\n{SECOND} ки",
            "label": f"{QUESTION} - {FIRST} +\n{SECOND} -",
        },
        [BOTH],
    ),
    (
        "PlaceholderSteps",
        {"input": f"{QUESTION} {FIRST} ки\n{SECOND} ки", "label": ["+", "-"]},
        [BOTH],
    ),
    (
        "PlaceholderSteps",  # the column that OpenRLHF's example names
        {"input": f"{QUESTION} {FIRST} ки\n{SECOND} ки", "value": ["+", "-"]},
        [BOTH],
    ),
    (
        "PlaceholderSteps",
        {"prompt": QUESTION, "input": "It is 5. ки Then 12.ки", "label": [0.75, 0]},
        [[Step("It is 5.", 0.75), Step("Then 12.", 0.0)]],
    ),
    (
        "SignedTurns",
        {
            "conversations": [
                {"role": "user", "content": f"{QUESTION} {FIRST}"},
                {"role": "assistant", "content": "+"},
                {"role": "user", "content": SECOND},
                {"role": "assistant", "content": "-"},
            ]
        },
        [BOTH],
    ),
    (
        "ProcessBench",
        {
            "id": "gsm8k-1",
            "generator": "a model",
            "problem": QUESTION,
            "steps": [FIRST, SECOND, "So 12."],
            "final_answer_correct": False,
            "label": 1,
        },
        [[*BOTH, Step("So 12.")]],
    ),
]


@pytest.mark.parametrize(("name", "row", "solutions"), FORMS, ids=[form[0] for form in FORMS])
def test_every_form_gives_the_same_steps(
    name: str, row: dict[str, Any], solutions: list[list[Step]], write_rows: Callable[..., Path]
) -> None:
    assert recognise_steps(row, "x:1").name == name
    path = write_rows("rows.jsonl", [row])
    for dataset_name in ("auto", name):
        config = DatasetConfig(dataset_name=dataset_name, data_path=str(path))
        [(problem, where)] = open_step_dataset(config)
        assert where == f"{path}:1"
        assert problem.context[-1]["content"].strip() == QUESTION
        assert [list(solution) for solution in problem.solutions] == solutions
        assert problem.task_name == name


def test_every_form_of_the_table_is_tried() -> None:
    assert {name for name, _, _ in FORMS} == {known.name for known in STEP_FORMATS}


@pytest.mark.parametrize(
    ("first_error", "labels"),
    [
        (-1, [1.0, 1.0, 1.0]),
        (0, [0.0, None, None]),
        (1, [1.0, 0.0, None]),
        (2, [1.0, 1.0, 0.0]),
    ],
)
def test_nobody_has_judged_what_follows_the_first_error_of_processbench(
    first_error: int, labels: list[float | None], write_rows: Callable[..., Path]
) -> None:
    row = {"problem": QUESTION, "steps": [FIRST, SECOND, "So 12."], "label": first_error}
    config = DatasetConfig(
        dataset_name="ProcessBench", data_path=str(write_rows("rows.jsonl", [row]))
    )
    [(problem, _)] = open_step_dataset(config)
    assert [step.label for step in problem.solutions[0]] == labels


def test_what_follows_the_last_mark_is_a_step_without_a_label(
    write_rows: Callable[..., Path],
) -> None:
    row = MARKED | {"input": f"{QUESTION} {FIRST} ки\n{SECOND} ки So 12. "}
    row = row | {"label": ["+", "-"]}
    [(problem, _)] = open_step_dataset(
        DatasetConfig(data_path=str(write_rows("rows.jsonl", [row])))
    )
    assert problem.solutions[0] == (*BOTH, Step("So 12."))


def test_the_neutral_rating_is_what_the_key_says(write_rows: Callable[..., Path]) -> None:
    path = str(write_rows("rows.jsonl", [PRM800K]))
    for neutral_is_right in (True, False):
        config = DatasetConfig(data_path=path, neutral_is_right=neutral_is_right)
        [(problem, _)] = open_step_dataset(config)
        assert problem.solutions[1] == (Step("Let me see.", float(neutral_is_right)),)


def test_a_step_that_a_person_wrote_is_followed(write_rows: Callable[..., Path]) -> None:
    human = {
        "completions": [{"text": "no", "rating": -1}],
        "chosen_completion": None,
        "human_completion": {"text": "yes", "rating": None},
    }
    last = {"completions": [{"text": "end", "rating": 1}], "chosen_completion": 0}
    row = {"question": {"problem": "q"}, "label": {"steps": [human, last]}}
    [(problem, _)] = open_step_dataset(
        DatasetConfig(data_path=str(write_rows("rows.jsonl", [row])))
    )
    chosen = (Step("yes"), Step("end", 1.0))
    assert problem.solutions == (chosen, (Step("no", 0.0),))


def first_row(form: str) -> dict[str, Any]:
    """The first row of a form."""
    return next(row for name, row, _ in FORMS if name == form)


TRL = first_row("StepDataset")
TURNS = first_row("SignedTurns")["conversations"]
MARKED = {"input": f"{FIRST} ки\n{SECOND} ки", "label": f"{FIRST} +\n{SECOND} -"}
WITH_PROBLEM = {key: f"{QUESTION} {text}" for key, text in MARKED.items()}
LISTED = MARKED | {"label": ["+", "-"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ODD: list[tuple[str, str, dict[str, Any]]] = [
    ("MathShepherd", "a prompt beside it", MARKED | {"prompt": QUESTION}),
    ("MathShepherd", "another name of the prompt", MARKED | {"question": QUESTION}),
    ("MathShepherd", "a prompt that the text repeats", WITH_PROBLEM | {"question": QUESTION}),
    ("MathShepherd", "a prompt that is null", WITH_PROBLEM | {"prompt": None}),
    ("MathShepherd", "a prompt that is blank", WITH_PROBLEM | {"prompt": " "}),
    (
        "MathShepherd",
        "a first mark before any text",
        {key: f"{mark} {WITH_PROBLEM[key]}" for key, mark in (("input", "ки"), ("label", "-"))},
    ),
    (
        "MathShepherd",
        "line ends of Windows",
        {key: text.replace("\n", "\r\n") for key, text in WITH_PROBLEM.items()},
    ),
    ("PlaceholderSteps", "another name of the prompt", LISTED | {"instruction": QUESTION}),
    ("PlaceholderSteps", "labels as JSON", LISTED | {"query": QUESTION, "label": '["+", "-"]'}),
    (
        "SignedTurns",
        "a prompt beside it",
        {"prompt": QUESTION, "messages": [TURNS[0] | {"content": FIRST}, *TURNS[1:]]},
    ),
    ("SignedTurns", "a prompt that the turns repeat", {"prompt": QUESTION, "messages": TURNS}),
    (
        "SignedTurns",
        "content in parts",
        {"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in TURNS]},
    ),
    ("SignedTurns", "turns as JSON", {"conversations": json.dumps(TURNS)}),
    (
        "SignedTurns",
        "white space around signs",
        {"messages": [{**turn, "content": f"{turn['content']}\n"} for turn in TURNS]},
    ),
    ("StepDataset", "a label and a question of its own", TRL | {"label": 1}),
]


@pytest.mark.parametrize(("name", "row"), [odd[::2] for odd in ODD], ids=[odd[1] for odd in ODD])
def test_odd_rows_give_the_same_problem(
    name: str, row: dict[str, Any], write_rows: Callable[..., Path]
) -> None:
    path = write_rows("rows.jsonl", [row])
    config = DatasetConfig(data_path=str(path))
    [(problem, _)] = open_step_dataset(config)
    assert problem.task_name == name
    assert problem.context == ({"role": "user", "content": QUESTION},)
    assert problem.solutions == (tuple(BOTH),)


@pytest.mark.parametrize(
    "row",
    [
        LISTED,
        MARKED,
        {"messages": [TURNS[0] | {"content": FIRST}, *TURNS[1:]]},
        TRL | {"completions": [FIRST, SECOND]},
    ],
    ids=["PlaceholderSteps", "MathShepherd", "SignedTurns", "StepDataset"],
)
def test_the_problem_may_have_any_column(
    row: dict[str, Any], write_rows: Callable[..., Path]
) -> None:
    others = {name: value for name, value in row.items() if name != "prompt"}
    path = write_rows("rows.jsonl", [{"problem": QUESTION} | others])
    config = DatasetConfig(data_path=str(path), prompt_key="problem")
    [(problem, _)] = open_step_dataset(config)
    assert problem.context == ({"role": "user", "content": QUESTION},)
    assert problem.solutions == (tuple(BOTH),)


def test_a_problem_that_begins_with_a_bracket(write_rows: Callable[..., Path]) -> None:
    row = {key: f"[asy] draw(A); [/asy] {text}" for key, text in WITH_PROBLEM.items()}
    path = write_rows("rows.jsonl", [row])
    [(problem, _)] = open_step_dataset(DatasetConfig(data_path=str(path)))
    assert problem.context[0]["content"] == f"[asy] draw(A); [/asy] {QUESTION}"


def test_a_last_turn_without_a_sign_is_a_step_without_a_label(
    write_rows: Callable[..., Path],
) -> None:
    path = write_rows("rows.jsonl", [{"messages": TURNS[:3]}])
    [(problem, _)] = open_step_dataset(DatasetConfig(data_path=str(path)))
    assert problem.solutions == ((Step(FIRST, 1.0), Step(SECOND)),)


BROKEN: list[tuple[dict[str, Any], str]] = [
    (TRL | {"labels": [True]}, "labels"),
    (TRL | {"labels": [True, 1.5]}, r"labels\[1\]"),
    (TRL | {"labels": [True, "good"]}, r"labels\[1\]"),
    (TRL | {"labels": [True, "1"]}, r"got:   '1'"),
    (TRL | {"completions": [FIRST, " "]}, r"completions\[1\]"),
    (TRL | {"completions": "text"}, "completions"),
    (TRL | {"prompt": None}, "prompt"),
    (first_row("MathShepherd") | {"label": f"{QUESTION} {FIRST} ?\n{SECOND} -"}, "label"),
    (first_row("MathShepherd") | {"input": "no mark"}, "input"),
    (
        first_row("MathShepherd") | {"input": "no first step ки", "label": "no first step +"},
        "input",
    ),
    (first_row("PlaceholderSteps") | {"label": ["+"]}, "label"),
    (first_row("PlaceholderSteps") | {"label": None, "value": ["+", 3]}, r"value\[1\]"),
    (first_row("ProcessBench") | {"label": 3}, "label"),
    (first_row("ProcessBench") | {"label": True}, "label"),
    ({"question": {"problem": QUESTION}, "label": {"steps": None}}, r"label\.steps"),
    (
        {
            "question": {"problem": QUESTION},
            "label": {"steps": [{"completions": [{"text": "a", "rating": 2}]}]},
        },
        r"label\.steps\[0\]\.completions\[0\]\.rating",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "no steps with labels"),
    ({"question": "text", "label": {"steps": []}}, "no steps with labels"),
    # Without its problem a row would teach steps of nothing, and be one tree with all others.
    (MARKED, "no problem before the first step"),
    (TRL | {"prompt": " "}, "the problem is empty"),
    ({"messages": [TURNS[0] | {"content": FIRST}, *TURNS[1:]]}, r"messages\[0\]\.content"),
    ({"messages": [TURNS[0], TURNS[0]]}, r"no steps with labels"),
    ({"messages": [*TURNS[:2], TURNS[1]]}, r"messages\[2\]\.role"),
    (
        {
            "question": {"problem": QUESTION},
            "label": {"steps": [{"completions": 5}]},
        },
        r"label\.steps\[0\]\.completions",
    ),
    (
        {
            "question": {"problem": QUESTION},
            "label": {
                "steps": [{"completions": [{"text": "a", "rating": 1}], "chosen_completion": True}]
            },
        },
        r"label\.steps\[0\]\.chosen_completion",
    ),
]


@pytest.mark.parametrize(("row", "field"), BROKEN, ids=[field for _, field in BROKEN])
def test_a_bad_row_has_its_place_and_its_field(
    row: dict[str, Any], field: str, write_rows: Callable[..., Path]
) -> None:
    path = write_rows("rows.jsonl", [row])
    with pytest.raises(DataError, match=rf"rows\.jsonl:1(?s:.*){field}"):
        list(open_step_dataset(DatasetConfig(data_path=str(path))))


def test_steps_are_no_comparison(write_rows: Callable[..., Path]) -> None:
    """Their keys are also those of completions with ranks: the error says what learns them."""
    config = DatasetConfig(data_path=str(write_rows("rows.jsonl", [TRL])))
    with pytest.raises(DataError, match="reward_model_type=process"):
        open_dataset(config)
    scored = {"prompt": QUESTION, "completions": ["5", "6"], "labels": [1, 0], "scores": [1, 0]}
    path = write_rows("scored.jsonl", [scored])
    [(preference, _)] = open_dataset(DatasetConfig(data_path=str(path)))
    assert [completion.rank for completion in preference.completions] == [0, 1]


def test_a_named_form_needs_its_label(write_rows: Callable[..., Path]) -> None:
    path = str(write_rows("rows.jsonl", [WITH_PROBLEM | {"label": None}]))
    with pytest.raises(DataError, match="label is not a text"):
        list(open_step_dataset(DatasetConfig(data_path=path, dataset_name="MathShepherd")))


def test_an_empty_mark_of_the_data_is_an_error(write_rows: Callable[..., Path]) -> None:
    path = str(write_rows("rows.jsonl", [WITH_PROBLEM]))
    with pytest.raises(DataError, match="placeholder_token"):
        list(open_step_dataset(DatasetConfig(data_path=path, placeholder_token="")))


def test_held_out_problems_are_in_one_part(write_rows: Callable[..., Path]) -> None:
    rows = [TRL | {"prompt": f"problem {i % 20}"} for i in range(40)]
    path = str(write_rows("rows.jsonl", rows))
    parts: list[set[str]] = []
    for part in ("train", "validation"):
        config = DatasetConfig.model_validate(
            {"data_path": path, "split_validation_size": 0.3, "part": part}
        )
        parts.append({problem.context_key for problem, _ in open_step_dataset(config)})
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 20


def test_copies_are_one_node_with_their_mean_label() -> None:
    nodes = step_tree(
        [
            (Step("a", 1.0), Step("b", 1.0)),
            (Step("a", 0.0), Step("c", 0.0)),
            (Step("a", 0.5), Step("b")),
            (Step("b", 1.0), Step("a", 1.0), Step("unjudged")),
        ]
    )
    assert [(node.text, node.count, node.label) for node in nodes] == [
        ("a", 3, 0.5),
        ("b", 1, 1.0),
        ("c", 1, 0.0),
        ("b", 1, 1.0),
        ("a", 1, 1.0),
        ("unjudged", 0, None),
    ]
    # What follows the last label is not computed.
    assert paths_of(nodes) == [[0, 1], [0, 2], [3, 4]]
    # Two paths end where their last labels are, and one of them is the beginning of another.
    nodes = step_tree(
        [(Step("a", 1.0), Step("x")), (Step("a"), Step("y")), (Step("a"), Step("b", 0.0))]
    )
    assert paths_of(nodes) == [[0, 3]]
    assert paths_of(step_tree([(Step("a"), Step("b"))])) == []


def test_a_node_says_whether_a_solution_ends_there() -> None:
    nodes = step_tree([(Step("a", 1.0), Step("b", 1.0)), (Step("a", 1.0), Step("c"))])
    assert [node.is_end for node in nodes] == [False, True, True]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([QUESTION, FIRST, SECOND], vocab_size=300, more_special=[MARK])


def encoded(
    rows: list[dict[str, Any]], tokenizer: Any, folder: Path, write_rows: Any, **options: Any
) -> EncodedDataset:
    stream = open_step_dataset(DatasetConfig(data_path=str(write_rows("rows.jsonl", rows))))
    renderer = Renderer(tokenizer, **options)
    return encode_steps(stream, renderer, mark=MARK, cache_dir=folder / "cache")


def test_rows_of_a_problem_are_one_tree_wherever_they_are(
    tokenizer: Any, tmp_path: Path, write_rows: Any
) -> None:
    other = TRL | {"prompt": "another"}
    rows = [TRL, other, TRL | {"completions": [FIRST, "Step 2: 5 * 2 = 10"], "labels": [0, 1]}]
    dataset = encoded(rows, tokenizer, tmp_path, write_rows)
    assert len(dataset) == 2
    problem = dataset[0]
    assert problem.step_labels == ((0.5, 0.0), (0.5, 1.0))
    assert problem.step_counts == ((2, 1), (0, 1))
    counts = dataset.counts
    assert (counts.read, counts.kept, counts.completions) == (2, 2, 3)
    assert (counts.steps, counts.step_copies) == (5, 6)
    token = mark_id(tokenizer, MARK)
    for ids, labels in zip(problem.token_ids, problem.step_labels, strict=True):
        assert (ids == token).sum() == len(labels) and ids[-1] == token
    # Each step is tokenized alone: its tokens are those of its text.
    marks = [i for i, value in enumerate(problem.token_ids[0].tolist()) if value == token]
    second = problem.token_ids[0][marks[0] + 1 : marks[1]].tolist()
    assert second == tokenizer.encode(SECOND, add_special_tokens=False)
    assert "different solutions" in counts.summary() and "2 of 2 problems" in counts.summary()


TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{{ mood }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_row_has_its_tools_and_template_variables(
    tokenizer: Any, tmp_path: Path, write_rows: Any
) -> None:
    rows = [
        TRL,
        TRL | {"tools": TOOLS},
        TRL | {"chat_template_kwargs": {"mood": "calm"}},
        TRL | {"tools": TOOLS},
    ]
    dataset = encoded(rows, tokenizer, tmp_path, write_rows, chat_template=TEMPLATE)
    texts = [tokenizer.decode(problem.token_ids[0]) for problem in dataset[:]]
    assert [text.partition(QUESTION)[0] for text in texts] == ["", "add: ", "calm"]


def test_no_step_is_cut_in_the_middle_and_no_row_is_left_without_labels(
    tokenizer: Any, tmp_path: Path, write_rows: Any
) -> None:
    draw = random.Random(0)
    rows = []
    for i in range(12):
        steps = [f"Step {k}: " + "x " * draw.randrange(1, 12) for k in range(4)]
        labels = [draw.choice([True, False, None]) for _ in steps]
        labels[draw.randrange(4)] = True
        rows.append({"prompt": f"Problem {i}", "completions": steps, "labels": labels})
    whole = encoded(rows, tokenizer, tmp_path, write_rows)
    whole_by_place = {item.where: item for item in whole[:]}
    token = mark_id(tokenizer, MARK)
    for limit in (20, 45, 70, 100):
        try:
            dataset = encoded(rows, tokenizer, tmp_path, write_rows, max_length=limit)
        except DataError as error:
            assert limit == 20 and "no step with a label is left" in str(error)
            continue
        counts = dataset.counts
        assert counts.kept + counts.dropped_too_long == 12
        num_labels = 0
        for item in dataset[:]:
            [ids] = item.token_ids
            [labels] = item.step_labels
            assert len(ids) <= limit and ids[-1] == token and not math.isnan(labels[-1])
            before = whole_by_place[item.where].token_ids[0][: len(ids)]
            assert before.tolist() == ids.tolist()
            num_labels += sum(not math.isnan(label) for label in labels)
        assert num_labels == counts.steps
        assert counts.steps + counts.steps_too_long == whole.counts.steps
    with pytest.raises(DataError, match="too long"):
        encoded(rows, tokenizer, tmp_path, write_rows, max_length=45, truncation="error")


def test_the_mark_is_one_token_that_nothing_else_has(
    tokenizer: Any, tmp_path: Path, write_rows: Any
) -> None:
    assert choose_mark(tokenizer, None) == MARK
    with pytest.raises(ConfigError, match="step_token"):
        choose_mark(tokenizer, "two words")
    with pytest.raises(ConfigError, match="cannot be the mark(?s:.*)endoftext"):
        choose_mark(tokenizer, "|")
    # Gemma's vocabulary has a blank line as one token, which every second prompt has too.
    with_blank_line = copy.deepcopy(tokenizer)
    with_blank_line.add_tokens(["\n\n"])
    with pytest.raises(ConfigError, match="step_token(?s:.*)no prompt"):
        choose_mark(with_blank_line, "\n\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1(?s:.*)has the mark in it"):
        encoded([TRL | {"completions": [FIRST, f"a{MARK}b"]}], tokenizer, tmp_path, write_rows)
    with pytest.raises(DataError, match="a prompt has the mark in it"):
        encoded([TRL | {"prompt": MARK}], tokenizer, tmp_path, write_rows)
    # A template that writes the mark itself: labels would stand at other steps.
    with pytest.raises(DataError, match="not one mark for each step"):
        template = f"{MARK}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
        encoded([TRL], tokenizer, tmp_path, write_rows, chat_template=template)
    # One that leaves out reasoning: a label would stand at a mark without its step.
    with pytest.raises(DataError, match="leaves out the text of a step"):
        template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
        row = TRL | {"completions": [f"<think>{FIRST}</think>", "a"], "labels": [True, False]}
        encoded([row], tokenizer, tmp_path, write_rows, chat_template=template)


def test_a_problem_has_its_texts_for_a_tokenizer() -> None:
    problem = Problem(({"role": "user", "content": "q"},), ((Step("a"), Step("b")),))
    assert problem.texts == ["q", "a", "b"]
