"""A row has one text: as JSON lines, CSV, parquet and a saved dataset; in training, scoring,
evaluation, over HTTP, in Python and as TRL's reward. Scores of a model with random weights stand
for texts: other text has another score."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import assistant, read_jsonl, user, write_jsonl
from starlette.testclient import TestClient
from templates import family_renderer, template_source

from treeward import Conversation, RewardModelEnvironment, Scorer, open_dataset
from treeward.cli.main import main
from treeward.config.data import DatasetConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.encoding import encode_dataset
from treeward.data.formats import conversations_of
from treeward.data.sources import read_rows
from treeward.environments.trl import as_trl
from treeward.serving.app import create_app
from treeward.serving.service import Service

CLOSE = 1e-5
Row = dict[str, Any]


def tool(name: str, *arguments: str) -> Row:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


def call(name: str, arguments: Any) -> Row:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


WEATHER = tool("weather", "city", "day")
CLOCK = tool("clock", "zone")
ASKED = [
    user("Rain in Rome?"),
    call("weather", {"city": "Rome"}),
    {"role": "tool", "content": "no"},
]
TIMED = [user("What time is it?"), call("clock", {"zone": "CET"}), {"role": "tool", "content": "9"}]
ENDS = {"chosen": [assistant("No rain.")], "rejected": [assistant("I do not know.")]}
TEXTS = {"chosen": "4", "rejected": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


def with_text_arguments(messages: list[Row]) -> list[Row]:
    """The same messages with the arguments as OpenAI's API has them."""
    asked, calling, result = messages
    (made,) = calling["tool_calls"]
    function = made["function"] | {"arguments": json.dumps(made["function"]["arguments"])}
    return [asked, calling | {"tool_calls": [made | {"function": function}]}, result]


def two(context: list[Row], chosen: Any, rejected: Any, **variables: Any) -> list[Conversation]:
    """The two conversations that a row means."""
    ends = [assistant(end) if isinstance(end, str) else end[0] for end in (chosen, rejected)]
    return [Conversation([*context, end], **variables) for end in ends]


KINDS: dict[str, tuple[list[Row], list[list[Conversation]]]] = {
    # The second row has other keys: a table of Arrow fills those of the first with nulls.
    "tools": (
        [
            {"tools": [WEATHER], "prompt": ASKED, **ENDS},
            {"tools": [CLOCK], "prompt": TIMED, **ENDS},
        ],
        [two(ASKED, *ENDS.values(), tools=[WEATHER]), two(TIMED, *ENDS.values(), tools=[CLOCK])],
    ),
    "tools as JSON text": (
        [
            {"tools": json.dumps([WEATHER]), "prompt": ASKED, **ENDS},
            {"tools": "[]", "prompt": TIMED, **ENDS},
        ],
        [two(ASKED, *ENDS.values(), tools=[WEATHER]), two(TIMED, *ENDS.values())],
    ),
    "arguments as JSON text": (
        [{"tools": [WEATHER], "prompt": with_text_arguments(ASKED), **ENDS}],
        [two(ASKED, *ENDS.values(), tools=[WEATHER])],
    ),
    "variables of the template": (
        [{"prompt": "2 + 2?", "chat_template_kwargs": {"mood": "sad"}, **TEXTS}],
        [two([user("2 + 2?")], *TEXTS.values(), chat_template_kwargs={"mood": "sad"})],
    ),
    "messages are the prompt": (
        [{"messages": [user("2 + 2?")], **TEXTS}],
        [two([user("2 + 2?")], *TEXTS.values())],
    ),
    "system and question": (
        [{"system": "Be brief.", "question": "2 + 2?", **TEXTS}],
        [two([SYSTEM, user("2 + 2?")], *TEXTS.values())],
    ),
    "ShareGPT's messages": (
        [{"conversations": [{"from": "human", "value": "2 + 2?"}], **TEXTS}],
        [two([user("2 + 2?")], *TEXTS.values())],
    ),
    "ShareGPT's pairs": (
        [
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                **{key: {"from": "gpt", "value": text} for key, text in TEXTS.items()},
            }
        ],
        [two([user("2 + 2?")], *TEXTS.values())],
    ),
}


def write_csv(path: Path, rows: list[Row]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), delimiter=";")
        writer.writeheader()
        for row in rows:
            cells = {}
            for name, value in row.items():
                cells[name] = value if isinstance(value, str) else json.dumps(value)
            writer.writerow(cells)
    return str(path)


def write_parquet(path: Path, rows: list[Row]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def save_to_disk(path: Path, rows: list[Row]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


WRITERS: dict[str, Callable[[Path, list[Row]], str]] = {
    "rows.jsonl": lambda path, rows: str(write_jsonl(path, *rows)),
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "saved": save_to_disk,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template is Qwen2.5's, which quotes arguments that are text, with a variable of
    ours."""
    from signed import SIZES

    from treeward.data.rendering import Renderer
    from treeward.model.export import export_model
    from treeward.model.loading import build_reward_model
    from treeward.scoring.golden import sign_exported

    tokenizer = family_renderer("qwen2_5").tokenizer
    fields = {"model_type": "llama", "max_position_embeddings": 1024, **SIZES}
    loaded = build_reward_model(fields, tokenizer, seed=3)
    renderer = Renderer(
        tokenizer, chat_template="{{ mood }}" + template_source("qwen2_5"), max_length=1024
    )
    path = tmp_path_factory.mktemp("model")
    export_model(loaded.model, tokenizer, path, chat_template=renderer.chat_template)
    contract = sign_exported(path, model=loaded.model, renderer=renderer)
    assert "tools" in [example.name for example in contract.golden]
    return path


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Scorer:
    return Scorer.load(folder, device="cpu")


def scores_of(scorer: Scorer, conversations: list[Any]) -> list[float]:
    return [score.score for score in scorer.score(conversations)]  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_row_has_one_text(
    name: str, kind: str, folder: Path, scorer: Scorer, tmp_path: Path
) -> None:
    rows, meant = KINDS[kind]
    want = [scores_of(scorer, conversations) for conversations in meant]
    close = [pytest.approx(values, abs=CLOSE) for values in want]
    assert abs(want[0][0] - want[0][1]) > 100 * CLOSE, "scores tell texts apart"
    path = WRITERS[name](tmp_path / name, rows)

    stream = open_dataset(DatasetConfig(data_path=path))
    encoded = encode_dataset(stream, scorer.renderer, cache_dir=tmp_path / "cache")
    for comparison, conversations in zip(encoded, meant, strict=True):
        in_training = [ids.tolist() for ids in comparison.token_ids]
        assert in_training == list(map(scorer.renderer.encode, conversations))

    assert main(["score", str(folder), "--data", path, "--output", f"{tmp_path}/out.jsonl"]) == 0
    assert [row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")] == close

    read = [conversations_of(row.values, row.where) for row in read_rows(path)]
    assert [scores_of(scorer, conversations) for conversations in read] == close

    environment = RewardModelEnvironment({"model_name": str(folder)})
    rewards = []
    for chats in read:
        rewards.append([reward.value for reward in environment.reward(chats, [])])
    assert rewards == close
    reward = as_trl(environment)
    for row, conversations, values in zip(read_rows(path), read, close, strict=True):
        columns = {key: [row.values.get(key)] * 2 for key in ("tools", "chat_template_kwargs")}
        prompts = [chat[:-1] for chat in conversations]
        assert reward(prompts, [chat[-1:] for chat in conversations], **columns) == values


@pytest.mark.parametrize("kind", KINDS)
def test_requests_and_evaluations_have_that_text_too(
    kind: str, folder: Path, scorer: Scorer, tmp_path: Path
) -> None:
    rows, meant = KINDS[kind]
    want = [scores_of(scorer, conversations) for conversations in meant]
    path = WRITERS["rows.parquet"](tmp_path / "rows.parquet", rows)
    assert main(["eval", str(folder), "--data", path, "--output", f"{tmp_path}/eval"]) == 0
    (examples,) = tmp_path.glob("eval/**/examples.jsonl")
    for row, values in zip(read_jsonl(examples), want, strict=True):
        assert row["scores"] == pytest.approx(values, abs=CLOSE)

    served = ServedModelConfig(models=(str(folder),), name="rm", device="cpu")
    service = Service.load(ServerConfig(models=(served,)))
    with TestClient(create_app(service), base_url="http://localhost") as client:
        for row, conversations, values in zip(read_rows(path), meant, want, strict=True):
            variables = {
                key: row.values[key]
                for key in ("tools", "chat_template_kwargs")
                if row.values.get(key)
            }
            if isinstance(variables.get("tools"), str):
                variables["tools"] = json.loads(variables["tools"])
            context = [dict(message) for message in conversations[0][:-1]]
            body = {
                "prompt": context,
                "completions": [chat[-1:] for chat in conversations],
                **variables,
            }
            data = client.post("/v1/rewards", json=body).json()["data"]
            assert [item["score"] for item in data] == pytest.approx(values, abs=CLOSE)
            bodies = [{"messages": list(chat), **variables} for chat in conversations]
            data = client.post("/v1/rewards", json={"conversations": bodies}).json()["data"]
            assert [item["score"] for item in data] == pytest.approx(values, abs=CLOSE)
            classified = [
                client.post("/classify", json=item).json()["data"][0]["probs"] for item in bodies
            ]
            assert classified == [[pytest.approx(value, abs=CLOSE)] for value in values]
