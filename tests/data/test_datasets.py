from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import assistant, user, write_jsonl
from templates import CHATML, byte_bpe

from treeward.config.data import DataConfig, DatasetConfig
from treeward.config.load import load_section
from treeward.data.datasets import open_dataset, register_dataset
from treeward.data.encoding import encode_dataset
from treeward.data.pairs import from_binary_row
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.data.transcripts import parse_transcript
from treeward.errors import ConfigError, DataError

Parse = Callable[..., Preference]


def rank_row(better: str = "4", worse: str = "5", **more: Any) -> dict[str, Any]:
    completions = [
        {"rank": rank, "completion": [assistant(text)]} for rank, text in ((0, better), (1, worse))
    ]
    return {"context": [user("2 + 2?")], "completions": completions, **more}


def shape(preference: Preference) -> tuple[list[Any], dict[int, list[Any]]]:
    return list(preference.context), {
        each.rank: list(each.messages) for each in preference.completions
    }


def test_rank_format(parse: Parse) -> None:
    row = rank_row(task_name="maths", margin=0.5)
    row["completions"][1]["score"] = 2
    preference = parse("PreferenceDataset", row)
    assert shape(preference) == ([user("2 + 2?")], {0: [assistant("4")], 1: [assistant("5")]})
    assert (preference.task_name, preference.strength, preference.completions[1].score) == (
        "maths",
        0.5,
        2.0,
    )
    assert parse("PreferenceDataset", rank_row()).task_name == "PreferenceDataset"


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"context": 4}, "context", "neither text nor a list of messages"),
        ({"context": [{"role": "user"}]}, "context[0].content", "has no text"),
        ({"completions": rank_row()["completions"][:1]}, "completions", "two or more"),
        *(
            (
                {"completions": [{"rank": rank, "completion": [assistant("4")]}] * 2},
                "completions[0].rank",
                "rank",
            )
            for rank in (None, True, 0.5, float("nan"), 2**64, 10**400)
        ),
        ({"margin": float("nan")}, "margin", "finite"),
    ],
)
def test_bad_rank_rows(parse: Parse, more: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        parse("PreferenceDataset", rank_row() | more)
    assert caught.value.field == field and str(caught.value.where).endswith("rows.jsonl:1")


CONTEXT = [user("Hi"), assistant("Hello"), user("2 + 2?")]
PLAIN = (CONTEXT, {0: [assistant("4")], 1: [assistant("5")]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CONTEXT, "chosen": "4", "rejected": "5"},
        {"prompt": json.dumps(CONTEXT), "chosen": "4", "rejected": json.dumps([assistant("5")])},
        {"prompt": CONTEXT, "chosen": [assistant("4")], "rejected": [assistant("5")]},
        {
            "prompt": CONTEXT,
            "chosen": [*CONTEXT, assistant("4")],
            "rejected": [*CONTEXT, assistant("5")],
        },
        {
            "prompt": CONTEXT[:1],
            "chosen": [*CONTEXT, assistant("4")],
            "rejected": [*CONTEXT, assistant("5")],
        },
        {
            "prompt": "2 + 2? ",
            "chosen": [*CONTEXT, assistant("4")],
            "rejected": [*CONTEXT, assistant("5")],
        },
        {"chosen": [*CONTEXT, assistant("4")], "rejected": [*CONTEXT, assistant("5")]},
        {
            "prompt": None,
            "chosen": [*CONTEXT, assistant("4")],
            "rejected": [*CONTEXT, assistant("5")],
        },
    ],
)
def test_forms_of_a_pair(parse: Parse, row: dict[str, Any]) -> None:
    assert shape(parse("BinaryPreferenceDataset", row)) == PLAIN


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "chosen", "is it choosen"),
        ({"chosen": [assistant("b")], "rejected": [assistant("c")]}, "prompt", "set prompt_key"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen", "neither text nor"),
        (
            {"prompt": "a", "chosen": [user("x"), assistant("b")], "rejected": "c"},
            "chosen[0].role",
            "not contain",
        ),
        (
            {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": "c"},
            "chosen[0].role",
            "other completion",
        ),
    ],
)
def test_bad_pairs(parse: Parse, row: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        parse("BinaryPreferenceDataset", row)
    assert caught.value.field == field and str(caught.value.where).endswith("rows.jsonl:1")


def steer(preference: Any, context: Any = "2 + 2?") -> dict[str, Any]:
    return {
        "context": context,
        "response1": "one",
        "response2": "two",
        "overall_preference": preference,
    }


@pytest.mark.parametrize(
    ("grade", "ranked"),
    [
        (-1.0, [(0, "one"), (1, "two")]),
        (0, [(0, "one"), (0, "two")]),
        ("3", [(0, "two"), (1, "one")]),
    ],
)
def test_helpsteer3(parse: Parse, grade: Any, ranked: list[Any]) -> None:
    preference = parse("HelpSteer3", steer(grade))
    assert [(each.rank, each.messages[0]["content"]) for each in preference.completions] == ranked
    assert preference.task_name == "HelpSteer3" and list(preference.context) == [user("2 + 2?")]
    assert list(parse("HelpSteer3", steer(grade, CONTEXT)).context) == CONTEXT


def test_tulu3(parse: Parse) -> None:
    row = {
        "prompt": "another text",
        "chosen": [*CONTEXT, assistant("4")],
        "rejected": [*CONTEXT, assistant("5")],
    }
    assert shape(parse("Tulu3Preference", row)) == PLAIN


def test_hub_datasets_ask_for_their_own_subset_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(path: str, name: str | None = None, *, split: str | None) -> Any:
        calls.append((path, name, split))
        return datasets.Dataset.from_list([steer(-1 if split == "train" else 1)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    ((train, where),) = open_dataset(DatasetConfig(dataset_name="HelpSteer3"))
    ((held, _),) = open_dataset(
        DatasetConfig(dataset_name="HelpSteer3Dataset", name="default", split="validation"),
    )
    assert set(calls) == {
        ("nvidia/HelpSteer3", "preference", split) for split in ("train", "validation")
    }
    assert where == "nvidia/HelpSteer3[train]:row 1"
    assert (train.completions[0].messages[0], held.completions[0].messages[0]) == (
        assistant("one"),
        assistant("two"),
    )
    with pytest.raises(ConfigError, match="does not say its split"):
        open_dataset(DatasetConfig(dataset_name="Tulu3Preference", name="default"))
    with pytest.raises(ConfigError, match="needs a path"):
        open_dataset(DatasetConfig.model_construct(dataset_name="PreferenceDataset"))
    calls.clear()
    list(
        open_dataset(
            DatasetConfig(dataset_name="HelpSteer3", data_path="me/copy", split="x", subset="y"),
        )
    )
    assert set(calls) == {("me/copy", "y", "x")}


def join(messages: Any) -> str:
    speakers = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{speakers[message['role']]}: {message['content']}" for message in messages)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), min_size=1, max_size=5),
)
def test_a_transcript_joins_again(texts: list[str]) -> None:
    messages = []
    for i, text in enumerate(texts):
        speaker = assistant if i % 2 else user
        messages.append(speaker(text))
    transcript = join(messages)
    assert join(parse_transcript(transcript)) == transcript


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_completion_that_is_another_conversation_is_refused(parse: Parse, role: str) -> None:
    sides = {}
    for key in ("chosen", "rejected"):
        instructions = {"role": role, "content": "Be brief."}
        sides[key] = [instructions, user("3 + 3?"), assistant(key)]
    with pytest.raises(DataError, match="does not contain the prompt"):
        parse("BinaryPreferenceDataset", {"prompt": "2 + 2?", **sides})


def test_prompt_files(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Answer in \\boxed{{}}: {}")
    (tmp_path / "system.txt").write_text("Be brief.")
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        {"prompt": CONTEXT, "chosen": "{4}", "rejected": "5"},
    )
    files = {
        "prompt_file": str(tmp_path / "prompt.txt"),
        "system_prompt_file": str(tmp_path / "system.txt"),
    }
    config = DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path=path, **files)
    ((preference, _),) = open_dataset(config)
    filled = user("Answer in \\boxed{}: 2 + 2?")
    assert list(preference.context) == [
        {"role": "system", "content": "Be brief."},
        *CONTEXT[:2],
        filled,
    ]
    assert preference.completions[0].messages == (assistant("{4}"),)
    parts = [{"type": "text", "text": "2 + "}, "2?"]
    row = {"prompt": [user(parts)], "chosen": "4", "rejected": "5"}
    asked = parse("BinaryPreferenceDataset", row, prompt_file=files["prompt_file"])
    assert list(asked.context) == [filled]
    # Beside an image each text is filled by itself.
    image = {"type": "image"}
    row["prompt"] = [user(["2 + 2?", image, {"type": "text"}])]
    asked = parse("BinaryPreferenceDataset", row, prompt_file=files["prompt_file"])
    empty = {"type": "text", "text": "Answer in \\boxed{}: "}
    assert list(asked.context) == [user([filled["content"], image, empty])]
    # OpenAI's newer name of a system message.
    developer = {"role": "developer", "content": "Be kind."}
    row["prompt"] = [developer, user("2 + 2?")]
    asked = parse("BinaryPreferenceDataset", row, system_prompt_file=files["system_prompt_file"])
    assert list(asked.context) == row["prompt"]
    before = open_dataset(config).fingerprint
    (tmp_path / "system.txt").write_text("Be long.")
    assert open_dataset(config).fingerprint != before


ROWS_OF_PROMPTS = [
    {"prompt": f"{i % 60} + 2?", "chosen": "Yes.", "rejected": f"No {i}."} for i in range(180)
]
"""Three rows of each of 60 prompts."""


def prompts_of_part(path: str, part: Literal["train", "validation"], seed: int = 42) -> list[str]:
    config = DatasetConfig(data_path=path, split_validation_size=0.25, part=part, seed=seed)
    stream = open_dataset(config)
    assert stream.name == f"{path}, {'not held out' if part == 'train' else 'held out'}"
    return [preference.context[0]["content"] for preference, _ in stream]


def test_a_share_of_the_prompts_is_held_out(tmp_path: Path) -> None:
    """All rows of a prompt are in one part."""
    path = write_jsonl(tmp_path / "all.jsonl", *ROWS_OF_PROMPTS)
    train = prompts_of_part(path, "train")
    held_out = prompts_of_part(path, "validation")
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 180
    assert len(held_out) == 3 * len(set(held_out))
    assert 6 <= len(set(held_out)) <= 24


def test_the_part_of_a_prompt_does_not_depend_on_other_rows(tmp_path: Path) -> None:
    whole = prompts_of_part(write_jsonl(tmp_path / "all.jsonl", *ROWS_OF_PROMPTS), "validation")
    few_rows = ROWS_OF_PROMPTS[100:40:-1]
    few = prompts_of_part(write_jsonl(tmp_path / "few.jsonl", *few_rows), "validation")
    assert set(few) == set(whole) & {row["prompt"] for row in few_rows}


def test_another_seed_holds_out_other_prompts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", *ROWS_OF_PROMPTS)
    one = prompts_of_part(path, "validation")
    other = prompts_of_part(path, "validation", seed=1)
    assert set(one) != set(other)


@pytest.fixture
def unprompted(tmp_path: Path) -> DatasetConfig:
    """Rows without a prompt, which a system prompt gives all of them."""
    rows = [{"chosen": f"{i}.", "rejected": "No."} for i in range(60)]
    (tmp_path / "system.txt").write_text("Be brief.")
    return DatasetConfig(
        data_path=write_jsonl(tmp_path / "x.jsonl", *rows),
        split_validation_size=0.5,
        part="train",
        system_prompt_file=str(tmp_path / "system.txt"),
    )


def test_rows_with_a_system_prompt_alone_are_divided_too(unprompted: DatasetConfig) -> None:
    assert 10 < len(list(open_dataset(unprompted))) < 50


def test_a_share_without_a_part_is_refused(unprompted: DatasetConfig) -> None:
    with pytest.raises(
        ConfigError,
        match=r"part(?s:.*)split_validation_size: 0\.5(?s:.*)part: validation",
    ):
        open_dataset(unprompted.model_copy(update={"part": None}))


def test_fingerprints_follow_content_and_parsing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    config = DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path=path)
    other = DatasetConfig(
        dataset_name="BinaryPreferenceDataset",
        data_path=path,
        prompt_key="question",
    )
    tulu = DatasetConfig(dataset_name="Tulu3Preference", data_path=path)
    digests = [open_dataset(one).fingerprint for one in (config, other, tulu, config)]
    assert len(set(digests)) == 3 and digests[0] == digests[-1]
    write_jsonl(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "d"})
    assert open_dataset(config).fingerprint != digests[0]


_NOTEBOOK = """
from helper import instruction
from treeward.data.datasets import RowDataset
from treeward.data.pairs import from_binary_row

class Questions(RowDataset):
    def to_preference(self, row):
        pair = row.values | {"prompt": f"{instruction()} INSTRUCTION {row.values['prompt']}"}
        return from_binary_row(pair, row.where, task_name="questions")
"""


def test_what_a_class_of_ones_own_gives_is_never_out_of_date(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a class without a file, as of a notebook, nor a helper of it that changes."""
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        {"prompt": "Quid?", "chosen": "Hoc.", "rejected": "Nescio."},
    )
    words = {"helper": "Please"}
    monkeypatch.setitem(sys.modules, "helper", SimpleNamespace(instruction=lambda: words["helper"]))

    def encoded(instruction: str) -> tuple[str, str]:
        cell: dict[str, Any] = {"__name__": "__main__"}
        exec(_NOTEBOOK.replace("INSTRUCTION", instruction), cell)  # noqa: S102
        register_dataset("Questions")(cell["Questions"])
        stream = open_dataset(DatasetConfig(dataset_name="Questions", data_path=rows))
        renderer = Renderer(byte_bpe(), chat_template=CHATML)
        dataset = encode_dataset(stream, renderer, cache_dir=tmp_path / "cache")
        return stream.fingerprint, str(renderer.tokenizer.decode(dataset[0].token_ids[0]))

    brief = encoded("answer briefly:")
    french = encoded("answer in French:")
    assert (
        "Please answer briefly: Quid?" in brief[1] and "Please answer in French: Quid?" in french[1]
    )
    words["helper"] = "Kindly"
    assert "Kindly answer briefly: Quid?" in encoded("answer briefly:")[1]
    words["helper"] = "Please"
    # it is reused
    assert (
        encoded("answer briefly:") == brief and len(list((tmp_path / "cache").glob("*.arrow"))) == 3
    )
    moved = (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    again = open_dataset(DatasetConfig(dataset_name="Questions", data_path=str(moved)))
    assert again.fingerprint == brief[0]


_MODULE = """
from types import SimpleNamespace as Spec

def rows(word):
    answers = [[{"role": "assistant", "content": text}] for text in (word, "no")]
    completions = [{"rank": rank, "completion": answer} for rank, answer in enumerate(answers)]
    return [{"context": [{"role": "user", "content": "Hi"}], "completions": completions}]

class Old:
    def __init__(self, word="yes"):
        self.formatted_ds = {"train": rows(word), "validation": rows("held")}
        self.task_spec = Spec(task_name="old")

class WithPath:
    def __init__(self, train_data_path, train_split=None):
        self.formatted_ds = {"train": rows(train_data_path + str(train_split))}
        self.task_spec = Spec(task_name="path")

class New:
    def __init__(self, data_path, subset=None, **more):
        self.dataset, self.task_name = rows(f"{data_path} {subset} {sorted(more.items())}"), "new"

"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"custom_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def first_word(path: str, **more: Any) -> str:
    preference, where = next(iter(open_dataset(DatasetConfig(dataset_name=path, **more))))
    assert path in where and where.endswith(":row 1")
    return str(preference.completions[0].messages[0]["content"])


def test_custom_classes(custom: str) -> None:
    assert first_word(f"{custom}.Old") == "yes"
    assert first_word(f"{custom}.Old", name="default") == "held"
    assert first_word(f"{custom}.Old", split="validation") == "held"
    assert first_word(f"{custom}.Old", kwargs={"word": "other"}) == "other"
    assert first_word(f"{custom}.WithPath", data_path="a.jsonl") == "a.jsonlNone"
    assert (
        first_word(f"{custom}.WithPath", data_path="a.jsonl", name="default", split="held")
        == "a.jsonlheld"
    )
    assert first_word(f"{custom}.New", data_path="a", subset="b", split="c") == (
        f"a b [('dataset_name', '{custom}.New'), ('split', 'c')]"
    )
    config = DatasetConfig(dataset_name=f"{custom}.Old")
    stream = open_dataset(config)
    assert list(stream) == list(stream) and next(iter(stream))[0].task_name == "old"
    other = open_dataset(config.model_copy(update={"kwargs": {"word": "other"}}))
    assert stream.name == f"{custom}.Old[train]" and stream.fingerprint != other.fingerprint


def test_a_class_gets_its_whole_section_as_in_nemo_rl(custom: str, tmp_path: Path) -> None:
    """Keys of its own come from the set and from `default`, to the constructor and to
    `set_task_spec`."""
    (tmp_path / f"{custom}.py").open("a").write("""
from treeward.compat.nemo_rl.data.datasets.raw_dataset import RawDataset

class Mine(RawDataset):
    task_name = "mine"

    def __init__(self, **section):
        self.dataset = rows(str(sorted(section)))

    def set_task_spec(self, data_config):
        super().set_task_spec(data_config)
        self.dataset = rows(self.dataset[0]["completions"][0]["completion"][0]["content"] + data_config["flavour"])
""")
    (tmp_path / "system.txt").write_text("Be kind.")
    default = {
        "dataset_name": f"{custom}.Mine",
        "flavour": " sweet",
        "system_prompt_file": str(tmp_path / "system.txt"),
    }
    data = load_section(
        DataConfig,
        {"train": {"data_path": "a", "strength": 2}, "default": default},
        where="data",
    )
    stream = open_dataset(data.train[0])
    preference, _ = next(iter(stream))
    want = "['data_path', 'dataset_name', 'flavour', 'strength', 'system_prompt_file'] sweet"
    assert preference.completions[0].messages[0]["content"] == want
    assert (
        preference.context[0] == {"role": "system", "content": "Be kind."}
        and preference.task_name == "mine"
    )
    with pytest.raises(ConfigError, match="did you mean train.0..split_validation_size"):
        load_section(DataConfig, {"train": {**default, "split_validation_sise": 0.1}}, where="data")


def test_a_mistyped_grade_of_ultrafeedback_is_left_out_counted_and_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mistyped = {"response": "6", "overall_score": 10, "fine-grained_score": 2.0}
    good = {"response": "4", "overall_score": 10.0, "fine-grained_score": 4.75}
    fair = {"response": "5", "overall_score": 8.5, "fine-grained_score": 1.0}
    rows = [
        {"instruction": "2 + 2?", "completions": [mistyped, good, fair]},
        {"instruction": "Alone?", "completions": [mistyped, good]},
    ]
    stream = open_dataset(DatasetConfig(data_path=str(write_jsonl(tmp_path / "rows.jsonl", *rows))))
    for _ in range(2):
        ((preference, _),) = stream
    ranked = [(item.rank, item.messages[0]["content"]) for item in preference.completions]
    assert ranked == [(0, "4"), (1, "5")]
    assert (
        caplog.text.count(
            "2 completions have an overall_score of 10 beside a fine-grained_score of 2 or less",
        )
        == 1
    )
    assert [Path(where).name for where in stream.left_out] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_a_transcript_begins_with_a_turn() -> None:
    with pytest.raises(DataError, match="transcript") as raised:
        parse_transcript("x\n\nHuman: Hi\n\nAssistant: Hello", "t.jsonl:3")
    assert raised.value.where == "t.jsonl:3"


def test_the_probability_of_a_preference_is_its_log_odds() -> None:
    def strength(probability: float) -> float | None:
        row = {"prompt": "2 + 2?", "chosen": "4.", "rejected": "5.", "probability": probability}
        return from_binary_row(row, "t.jsonl:1").strength

    assert strength(0.8) == pytest.approx(math.log(4))
    assert strength(0.5) == pytest.approx(0.0)
    for certain in (0.0, 1.0):
        assert math.isfinite(strength(certain) or 0.0)


def test_a_class_of_ones_own_without_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    formatted_ds = {'train': None}\n")
    with pytest.raises(ConfigError, match="offers no rows for train") as raised:
        open_dataset(DatasetConfig(dataset_name=f"{file}:Mine"))
    assert raised.value.field == "dataset_name"
