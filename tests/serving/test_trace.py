"""`/v1/rewards/trace`: each point is the score that `/v1/rewards` gives the answer that stops there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.config.ensemble import EnsembleConfig
from treeward.config.server import ServerConfig
from treeward.scoring.ensemble import EnsembleScorer
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

CONTEXT = [{"role": "user", "content": "How do I boil an egg so that the yolk stays soft?"}]
ANSWER = "Boil it for six minutes, then cool it in cold water. \U0001f642 Yes!"


def trace(client: Any, **body: Any) -> Any:
    got = client.post("/v1/rewards/trace", json={"context": CONTEXT, "completion": ANSWER, **body})
    assert got.status_code == 200, got.text
    return got.json()


def scores(client: Any, completions: list[str], **body: Any) -> list[float]:
    got = client.post("/v1/rewards", json={"context": CONTEXT, "completions": completions, **body})
    assert got.status_code == 200, got.text
    return [row["score"] for row in got.json()["data"]]


def test_points_are_the_scores_of_answers_that_stop_there(client: Any) -> None:
    got = trace(client)
    assert got["text"] == ANSWER and "".join(token["text"] for token in got["tokens"]) == ANSWER
    assert [ANSWER[token["start"] : token["end"]] for token in got["tokens"]] == [t["text"] for t in got["tokens"]]
    assert [point["tokens"] for point in got["points"]] == list(range(1, len(got["tokens"]) + 1))
    cut = [ANSWER[: token["end"]] for token in got["tokens"]]
    assert [point["score"] for point in got["points"]] == pytest.approx(scores(client, cut), abs=1e-5)
    assert len({round(point["score"], 4) for point in got["points"]}) > 10
    assert got["object"] == "reward.trace" and got["model"] == "tiny" and got["contract"]


def test_the_last_of_few_points_is_the_score(client: Any) -> None:
    whole = trace(client)
    for most in (1, 2, 7):
        points = trace(client, max_points=most)["points"]
        assert len(points) == most and points[-1]["tokens"] == len(whole["tokens"])
        same = [whole["points"][point["tokens"] - 1]["score"] for point in points]
        assert [point["score"] for point in points] == pytest.approx(same, abs=1e-5)
        gaps = [b["tokens"] - a["tokens"] for a, b in zip(points, points[1:], strict=False)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_an_answer_is_computed_once(client: Any, loaded_model: ServedModel) -> None:
    before = loaded_model.num_computed_tokens
    got = trace(client, context=[{"role": "user", "content": "A question that no other test asks, of a few words?"}])
    computed = loaded_model.num_computed_tokens - before
    assert len(got["points"]) > 20
    # The conversation, and an end of one token for each point but the last.
    assert computed == got["num_tokens"] + len(got["points"]) - 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"completion": ""}, 422, "no text"),
        ({"completion": [{"role": "user", "content": "Hi"}]}, 422, "no completion to score"),
        ({"completion": []}, 422, "no completion to score"),
        ({"completion": "word " * 200}, 422, "too long to score"),
        ({"completion": 3}, 422, "completion"),
        ({"completion": "Yes", "max_points": 0}, 422, "max_points"),
        ({"completion": "Yes", "max_points": 100_000}, 422, "max_points"),
        ({"completion": "Yes", "model": "other"}, 404, "other"),
        ({"context": CONTEXT}, 422, "completion"),
    ],
)
def test_what_has_no_trace_is_refused_in_words(client: Any, body: dict[str, Any], status: int, words: str) -> None:
    got = client.post("/v1/rewards/trace", json={"context": CONTEXT, **body})
    assert got.status_code == status and words in got.json()["error"]["message"], got.text


def test_ensembles_and_models_of_other_tokens(
    loaded_model: ServedModel, served_folder: Any, asgi_client: Callable[..., Any], close_later: Callable[..., Service]
) -> None:
    scorer: Any = loaded_model.scorer
    pair = EnsembleScorer([scorer, scorer], EnsembleConfig(method="mean", standardize=False))
    alike = ServedModel("pair", pair, members=["a", "b"])
    other = ServedModel("other", pair, members=["a", "b"])
    other.scorer = _Unlike(pair)  # type: ignore[assignment]
    without = ServedModel("words", scorer)
    without.__class__ = _OfWords
    client = asgi_client(close_later([alike, other, without]))
    assert [p["score"] for p in trace(client)["points"]] == pytest.approx(
        [s.score for s in scorer.score_completions(CONTEXT, [ANSWER[: t["end"]] for t in trace(client)["tokens"]])],
        abs=1e-5,
    )
    for name, code in (("other", "no_common_tokens"), ("words", "no_tokens")):
        body = {"context": CONTEXT, "completion": ANSWER, "model": name}
        got = client.post("/v1/rewards/trace", json=body)
        assert got.status_code == 422 and got.json()["error"]["code"] == code


class _Unlike(EnsembleScorer):
    def __init__(self, of: EnsembleScorer) -> None:
        self.__dict__.update(of.__dict__)

    @property
    def render_alike(self) -> bool:
        return False


class _OfWords(ServedModel):
    @property
    def scorers(self) -> tuple[()]:
        return ()


@pytest.fixture
def close_later(make_service: Callable[..., Service]) -> Any:
    """A function that makes a service of loaded models; its engine ends with the test."""
    from treeward.serving.run import make_service as load_service

    made: list[Service] = []

    def make(models: list[ServedModel]) -> Service:
        config = ServerConfig.model_validate({"models": [{"model": "x", "name": model.name} for model in models]})
        made.append(load_service(config, models=models))
        return made[-1]

    yield make
    for service in made:
        service.close()
