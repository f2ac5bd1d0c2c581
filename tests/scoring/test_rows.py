"""Rows of every shape go in, come out in order with their scores, and say where they are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from families import tiny_model

from treeward.data.formats import conversations_of
from treeward.data.rendering import Renderer
from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.model.reward_model import RewardModel
from treeward.scoring.rows import ChunkScorer, chunks_of
from treeward.scoring.scorer import Scorer

ASK = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
TWO = [[ASK, FOUR], [ASK, FIVE]]


def score_rows(scorer: Scorer, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    for scored in map(ChunkScorer(lambda: (scorer, None, {})).score, chunks_of(rows)):
        yield from scored.rows
        if scored.error is not None:
            raise scored.error


@pytest.fixture
def scorer(tiny_tokenizer: Any) -> Scorer:
    return Scorer(RewardModel(tiny_model("llama")), Renderer(tiny_tokenizer, max_length=60))


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"messages": [ASK, FOUR]}, [[ASK, FOUR]]),
        ({"context": [ASK], "completions": [[FOUR], [FIVE]]}, TWO),
        (
            {
                "context": [ASK],
                "completions": [{"rank": 0, "completion": [FOUR]}, {"rank": 1, "completion": "5"}],
            },
            TWO,
        ),
        ({"completions": [[ASK, FOUR], [ASK, FIVE]]}, TWO),
        ({"prompt": "2 + 2?", "responses": ["4", "5"]}, TWO),
        (
            {
                "prompt": "2 + 2?",
                "completions": [{"completion": "4", "score": 1}, {"completion": "5", "score": 2}],
            },
            TWO,
        ),
        ({"prompt": "2 + 2?", "response": "4", "helpfulness": 3}, TWO[:1]),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, TWO),
        ({"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]}, TWO),
        (
            {
                "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
            },
            TWO,
        ),
    ],
)
def test_every_shape(values: dict[str, Any], want: list[Any], scorer: Scorer) -> None:
    assert conversations_of(values, "in.jsonl:1") == want
    (row,) = score_rows(scorer, [Row(values, "in.jsonl:1")])
    numbers = [score.score for score in scorer.score(want)]
    assert {name: row[name] for name in values} == values  # as it came, and its scores
    assert row.keys() - values.keys() == ({"score"} if len(want) == 1 else {"scores"})
    got = [row["score"]] if len(want) == 1 else row["scores"]
    assert got == pytest.approx(numbers, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": "4"}, r"nothing to score(?s:.*)\['text'\](?s:.*)one of messages,"),
        ({"prompt": "2 + 2?", "context": [ASK], "completions": [[FOUR]]}, "two prompts"),
        ({"response": "4"}, "no prompt"),
        ({"conversations": 3}, "conversations is not a list"),
        ({"messages": [ASK, {"content": "4"}]}, "role"),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": None}, "these keys together"),
        ({"messages": '[{"role": "user"'}, "messages is not valid JSON"),
    ],
)
def test_errors_name_the_line_and_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"(?s:in.jsonl:17: .*{message})"):
        conversations_of(values, "in.jsonl:17")


def test_rows_stream_in_order(scorer: Scorer) -> None:
    """More rows than are taken at once; the first come out before the last are read."""
    read = []

    def rows() -> Iterator[Row]:
        for i in range(600):  # of one prompt
            read.append(i)
            yield Row({"id": i, "messages": [ASK, FOUR if i % 2 else FIVE]}, f"in.jsonl:{i + 1}")

    out = score_rows(scorer, rows())
    first = next(out)
    assert first["id"] == 0 and len(read) < 600
    remaining = list(out)
    assert [row["id"] for row in remaining] == list(range(1, 600))
    assert len({row["score"] for row in remaining if row["id"] % 2}) == 1
    assert list(score_rows(scorer, [])) == []


def test_too_long_and_truncated_rows_say_so(tiny_tokenizer: Any) -> None:
    long = {
        "context": [{"role": "user", "content": "word " * 60}, FOUR, ASK],
        "completions": ["4", "5 " * 90],
    }
    model = RewardModel(tiny_model("llama"))
    (dropped,) = score_rows(
        Scorer(model, Renderer(tiny_tokenizer, max_length=40)), [Row(long, "a:1")]
    )
    assert dropped["scores"] == [None, None]
    assert "too long to score" in dropped["error"] and "at most 40" in dropped["error"]
    cutting = Scorer(model, Renderer(tiny_tokenizer, max_length=40, truncation="truncate_left"))
    cut = next(score_rows(cutting, [Row(long, "a:1")]))
    assert cut["truncated"] is True and cut["scores"][0] is not None and cut["scores"][1] is None
    assert "too long" in cut["error"]


def test_a_row_without_a_completion_has_an_error_and_one_of_no_shape_ends_the_scoring(
    scorer: Scorer,
) -> None:
    values = [
        {"messages": [ASK, FOUR]},
        {"messages": [ASK]},
        {"messages": [ASK, FOUR]},
        {"nothing": 1},
    ]
    done = []
    with pytest.raises(DataError, match=r"in\.jsonl:4: "):
        for row in score_rows(
            scorer, [Row(row, f"in.jsonl:{n}") for n, row in enumerate(values, 1)]
        ):
            done.append(row["score"])
            assert ("no completion" in row.get("error", "")) == (row["score"] is None)
    assert done[0] == done[2] and done[1] is None and len(done) == 3


def test_what_an_earlier_scoring_has_left_is_replaced_and_told(
    scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"messages": [ASK, FOUR], "score": 99.0, "error": "too long", "truncated": True}
    scored, _ = score_rows(scorer, [Row(values, "in.jsonl:1"), Row(values, "in.jsonl:2")])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "The rows already have error, score, truncated, which this scoring replaces."
    ]
    assert scored.keys() == {"messages", "score"} and scored["score"] != 99.0
