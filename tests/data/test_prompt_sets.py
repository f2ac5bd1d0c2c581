"""Prompts for RL: every published schema, in small local files; what is kept, held out and
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import assistant, read_jsonl, user, write_jsonl

from treeward.config.data import PromptSetConfig
from treeward.data.bundled import bundled_path
from treeward.data.prompt_sets import PromptSet, check_prompt, open_prompts, prompts_summary
from treeward.data.sources import PromptFiles
from treeward.errors import ConfigError, DataError


def opened(tmp_path: Path, dataset_name: str, *rows: Any, **more: Any) -> PromptSet:
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    return open_prompts(PromptSetConfig(dataset_name=dataset_name, data_path=path, **more))


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 7, "unused": None},
}
GYM: dict[str, Any] = {
    "responses_create_params": {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "In French."},
            {"role": "user", "content": "2 + 3?"},
        ],
        "temperature": 0.7,
    },
    "expected_answer": "cinq",
    "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
}


SUM = (user("2 + 3?"),)
CHAT = [user("Hi"), assistant("Hello!"), user("2 + 3?"), assistant("5")]
REFERENCE: dict[str, Any] = {"ground_truth": "5", "reference_answers": ["5"]}
OWN_REFERENCE = {"ground_truth": "five", "reference_answers": ["V"]}
PROBLEM = {
    "problem": "2 + 3?",
    "expected_answer": "5",
    "answer": "5",
    "generated_solution": "It is 5.",
}
OF_VERL = {key: value for key, value in VERL.items() if key not in ("prompt", "extra_info")}
OF_GYM = {
    "expected_answer": "cinq",
    "agent_ref": GYM["agent_ref"],
    "responses_create_params": {"temperature": 0.7},
}
BRIEF = tuple({"role": "system", "content": text} for text in ("Be brief.", "In French."))


@pytest.mark.parametrize(
    ("name", "row", "messages", "info"),
    [
        ("OpenMathInstruct-2", PROBLEM, SUM, {"ground_truth": "5"}),
        (
            "OpenMathInstruct-2",
            {"messages": [*SUM, assistant("5")], "task_name": "x"},
            SUM,
            {"ground_truth": "5"},
        ),
        ("DeepScaler", PROBLEM, SUM, {"ground_truth": "5"}),
        ("AIME2024", PROBLEM, SUM, {"ground_truth": "5"}),
        (
            "ResponseDataset",
            {"input": "2 + 3?", "output": "5", "level": 2},
            SUM,
            {**REFERENCE, "level": 2},
        ),
        ("ResponseDataset", {"input": [*SUM], "output": 5}, SUM, {"ground_truth": 5}),
        ("PromptDataset", {"prompt": "2 + 3?", "extra_info": "x"}, SUM, {"extra_info": "x"}),
        ("ResponseDataset", {"messages": [*SUM, assistant("5")]}, SUM, REFERENCE),
        ("PromptDataset", {"messages": CHAT}, tuple(CHAT[:3]), REFERENCE),
        ("PromptDataset", {"messages": CHAT, **OWN_REFERENCE}, tuple(CHAT[:3]), OWN_REFERENCE),
        ("auto", {"messages": CHAT[:3]}, tuple(CHAT[:3]), {}),
        *(
            (
                "PromptDataset",
                {key: prompt, "solution": "5", "nothing": None},
                SUM,
                {"solution": "5"},
            )
            for key in ("prompt", "context")
            for prompt in ("2 + 3?", [*SUM])
        ),
        *(
            (name, VERL, SUM, {**OF_VERL, "ground_truth": "5", "split": "train", "index": 7})
            for name in ("PromptDataset", "DAPOMath17K", "DAPOMathAIME2024")
        ),
        ("PromptDataset", GYM, (*BRIEF, *SUM), OF_GYM),
    ],
)
def test_schemas(
    tmp_path: Path,
    name: str,
    row: dict[str, Any],
    messages: Any,
    info: dict[str, Any],
) -> None:
    (prompt,) = opened(tmp_path, name, row, env_name="math")
    assert (prompt.messages, prompt.info) == (messages, info | {"environment": "math"})
    assert prompt.where == str(tmp_path / "rows.jsonl") + ":1"


def test_bundled() -> None:
    prompts = open_prompts(
        PromptSetConfig(dataset_name="Bundled", split="length_controlled", env_name="rm"),
    )
    rows = read_jsonl(bundled_path("length_controlled"))
    contexts = [row["context"] for row in rows]
    different = []
    for context in contexts:
        if context not in different:
            different.append(context)
    assert [list(prompt.messages) for prompt in prompts] == different
    best = []
    for row in rows:
        if row["context"] == list(prompts[3].messages):
            best += [c["completion"][0]["content"] for c in row["completions"] if c["rank"] == 0]
    assert prompts[3].info == {"reference_answers": list(dict.fromkeys(best)), "environment": "rm"}
    assert prompts[3].where == "Bundled[length_controlled]:prompt 4"
    for wrong, words in (
        ({"split": "validatio"}, "did you mean validation"),
        ({"name": "held_out"}, "does not say its split"),
        ({"data_path": "x.jsonl"}, "its own path"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_prompts(PromptSetConfig(dataset_name="Bundled", **wrong))


def test_a_row_chooses_its_environment(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "environment": "math", "env_name": "other"},
        {"prompt": "2", "env_name": "other"},
        {"prompt": "3", "task_name": "rm"},
        {"prompt": "4", "task_name": "preference"},
        {"prompt": "5"},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    config = PromptSetConfig(dataset_name="PromptDataset", data_path=path, env_name="math")
    prompts = open_prompts(config, environments=["math", "rm", "other"])
    assert [prompt.info["environment"] for prompt in prompts] == [
        "math",
        "other",
        "rm",
        "math",
        "math",
    ]
    assert "env_name" not in prompts[0].info
    assert prompts[3].info["task_name"] == "preference"
    unknown = open_prompts(config)  # without the names nothing is known of task names
    assert [prompt.info["environment"] for prompt in unknown][2:] == ["math"] * 3


def test_rows_are_held_out_for_validation(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 40}", "ground_truth": str(n)} for n in range(100)]
    share: dict[str, Any] = {"split_validation_size": 0.25, "seed": 3}
    train = opened(tmp_path, "PromptDataset", *rows, part="train", **share)
    validation = opened(tmp_path, "PromptDataset", *rows, part="validation", **share)
    train_truths = [int(prompt.info["ground_truth"]) for prompt in train]
    held_out_truths = [int(prompt.info["ground_truth"]) for prompt in validation]
    assert sorted(train_truths + held_out_truths) == list(range(100))
    assert train_truths == sorted(train_truths)
    train_questions = {prompt.messages[0]["content"] for prompt in train}
    held_out_questions = {prompt.messages[0]["content"] for prompt in validation}
    assert not train_questions & held_out_questions
    assert 4 <= len(held_out_questions) <= 16
    assert (train.counts["read"], train.counts["kept"], train.counts["held_out"]) == (
        100,
        len(train),
        len(validation),
    )
    assert f"left out: {len(validation)} of the other part" in prompts_summary(train.counts)
    # Another prompt file moves no prompt to the other part.
    (tmp_path / "prompt.txt").write_text("Solve: {}")
    (tmp_path / "system.txt").write_text("Be brief.")
    files = {"prompt_file": tmp_path / "prompt.txt", "system_prompt_file": tmp_path / "system.txt"}
    filled = opened(
        tmp_path,
        "PromptDataset",
        *rows,
        part="validation",
        **share,
        **{key: str(path) for key, path in files.items()},
    )
    assert [prompt.where for prompt in filled] == [prompt.where for prompt in validation]
    assert filled[0].messages[1]["content"].startswith("Solve: ")
    other = opened(
        tmp_path,
        "PromptDataset",
        *rows,
        part="validation",
        split_validation_size=0.25,
        seed=4,
    )
    other_places = [prompt.where for prompt in other]
    assert other_places != [prompt.where for prompt in validation]
    with pytest.raises(ConfigError, match="leaves this part without a prompt"):
        opened(
            tmp_path,
            "PromptDataset",
            *rows[:1],
            part="validation",
            **share | {"split_validation_size": 1e-9},
        )


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "PromptDataset",
            {"question": "2?"},
            "the row asks nothing(.|\n)*need: .*messages(.|\n)*input_key",
        ),
        (
            "PromptDataset",
            {"prompt": "2?", "messages": [user("3?")]},
            "several prompts(.|\n)*messages and prompt",
        ),
        ("PromptDataset", {"prompt": 3}, "neither text nor a list of messages(.|\n)*got:   3"),
        (
            "PromptDataset",
            {"messages": [BRIEF[0], assistant("2")]},
            "the prompt asks nothing(.|\n)*got:   .*system",
        ),
        (
            "PromptDataset",
            {"prompt": [user("1"), assistant("2")]},
            "ends with a message of the assistant",
        ),
        (
            "PromptDataset",
            {"messages": [assistant("2")]},
            "nothing comes before the completion(.|\n)*field: messages",
        ),
        (
            "PromptDataset",
            {"responses_create_params": {"input": [{"type": "input_image"}]}},
            r"field: responses_create_params.input\[0\]",
        ),
        (
            "PromptDataset",
            {"prompt": [user("<image>2?")], "images": [{"bytes": "..."}]},
            "images would be lost(.|\n)*input_key=prompt",
        ),
        (
            "ResponseDataset",
            {"input": "2?", "output": "2", "image": "a.png"},
            "image would be lost(.|\n)*input_key=input",
        ),
        (
            "ResponseDataset",
            {"instruction": "Translate.", "input": "Due?", "output": "2?"},
            "instruction would be lost(.|\n)*input_key=input",
        ),
        (
            "ResponseDataset",
            {"inputs": "2?", "output": "2"},
            "the row has no input(.|\n)*is it inputs",
        ),
        (
            "ResponseDataset",
            {"prompt": "2?"},
            "field: input(.|\n)*dataset_name: auto reads rows that have prompt",
        ),
        *(
            ("ResponseDataset", {"input": "2?", "output": wrong}, "output is no answer")
            for wrong in (float("nan"), [], True)
        ),
        ("ResponseDataset", {"input": "2?"}, "the row has no output(.|\n)*PromptDataset"),
        (
            "OpenMathInstruct-2",
            {"problem": 3, "expected_answer": "3"},
            "neither text nor(.|\n)*field: problem",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    good = {"input": "1", "output": "1", "problem": "1", "expected_answer": "1"}
    first = {"prompt": "1"} if name == "PromptDataset" else good
    with pytest.raises(DataError, match=f"rows.jsonl:2: (.|\n)*{message}"):
        opened(tmp_path, name, first, row)


@pytest.fixture
def my_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts_of_mine.py").write_text(
        """
from types import SimpleNamespace
from treeward.data.prompt_sets import Prompt, RowPrompts

class Contract:
    def __init__(self, data_path, input_key="text", times=1):
        rows = [{"messages": [{"role": "user", "content": f"{data_path} {input_key} {n}"}]} for n in range(times)]
        self.formatted_ds = {"train": rows, "validation": [{"prompt": "held out"}]}
        self.task_spec = SimpleNamespace(task_name="mine", prompt_file=None, system_prompt_file=None)

class Rows(RowPrompts):
    def to_prompt(self, row):
        return Prompt(({"role": "user", "content": row.values["x"]},), {}, row.where)
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("my_prompts")
def test_classes_by_dotted_path(tmp_path: Path) -> None:
    def texts(cls: str, **more: Any) -> list[str]:
        prompts = open_prompts(PromptSetConfig(dataset_name=f"prompts_of_mine.{cls}", **more))
        return [prompt.messages[0]["content"] for prompt in prompts]

    assert texts("Contract", data_path="p", kwargs={"times": 2}) == ["p text 0", "p text 1"]
    assert texts("Contract", data_path="p", input_key="q") == ["p q 0"]
    assert texts("Contract", name="own", kwargs={"data_path": "p"}) == ["held out"]
    assert texts("Rows", data_path=write_jsonl(tmp_path / "x.jsonl", {"x": "9?"})) == ["9?"]


@pytest.mark.parametrize("text", ["{} and {}", "no place", "{name}", "{"])
def test_a_prompt_file_has_one_place_for_the_question(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match="prompt_file") as raised:
        PromptFiles.load(str(file), None)
    assert "exactly one {}" in str(raised.value.need)


def test_the_environment_of_a_row_is_a_name(write_rows: Any) -> None:
    row = {"prompt": "2 + 2?", "environment": 3}
    config = PromptSetConfig(
        dataset_name="PromptDataset",
        data_path=str(write_rows("p.jsonl", [row])),
    )
    with pytest.raises(DataError, match="environment") as raised:
        list(open_prompts(config))
    assert "p.jsonl:1" in str(raised.value.where)


def test_a_prompt_of_a_class_of_ones_own_is_checked() -> None:
    for messages in (None, 7, "2 + 2?", [None]):
        with pytest.raises(DataError, match=r"x:1(?s:.*)the prompt is not messages"):
            check_prompt(messages, "messages", "x:1")  # type: ignore[arg-type]
