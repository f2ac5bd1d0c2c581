"""`/v1/rewards/trace`: each point is the score that `/v1/rewards` gives the completion that stops there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.config.scoring import EnsembleConfig
from treeward.config.server import ServedModelConfig
from treeward.scoring.ensemble import EnsembleScorer
from treeward.serving.models import LoadedModel, ServedModel
from treeward.serving.service import Service

CONTEXT = [{"role": "user", "content": "How do I boil an egg so that the yolk stays soft?"}]
COMPLETION = "Boil it for six minutes, then cool it in cold water. \U0001f642 Yes!"


def trace(client: Any, **body: Any) -> Any:
    got = client.post("/v1/rewards/trace", json={"context": CONTEXT, "completion": COMPLETION, **body})
    assert got.status_code == 200, got.text
    return got.json()


def scores(client: Any, completions: list[str], **body: Any) -> list[float]:
    got = client.post("/v1/rewards", json={"context": CONTEXT, "completions": completions, **body})
    assert got.status_code == 200, got.text
    return [row["score"] for row in got.json()["data"]]


def test_points_are_the_scores_of_completions_that_stop_there(client: Any) -> None:
    got = trace(client)
    assert got["text"] == COMPLETION and "".join(token["text"] for token in got["tokens"]) == COMPLETION
    assert [COMPLETION[token["start"] : token["end"]] for token in got["tokens"]] == [t["text"] for t in got["tokens"]]
    assert [point["tokens"] for point in got["points"]] == list(range(1, len(got["tokens"]) + 1))
    cut = [COMPLETION[: token["end"]] for token in got["tokens"]]
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


def test_a_completion_is_computed_once(client: Any, loaded_model: LoadedModel) -> None:
    before = loaded_model.num_computed_tokens
    got = trace(client, context=[{"role": "user", "content": "A question that no other test asks, of a few words?"}])
    # The conversation, and an end of one token for each point but the last.
    assert loaded_model.num_computed_tokens - before == got["num_tokens"] + len(got["points"]) - 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"completion": ""}, 422, "no text"),
        ({"completion": []}, 422, "no completion to score"),
        ({"completion": "word " * 200}, 422, "too long to score"),
        ({"completion": 3}, 422, "completion"),
        ({"completion": "Yes", "max_points": 0}, 422, "max_points"),
        ({"completion": "Yes", "model": "other"}, 404, "other"),
    ],
)
def test_what_has_no_trace_is_refused_in_words(client: Any, body: dict[str, Any], status: int, words: str) -> None:
    got = client.post("/v1/rewards/trace", json={"context": CONTEXT, **body})
    assert got.status_code == status and words in got.json()["error"]["message"], got.text


def test_ensembles_and_models_of_other_tokens(
    loaded_model: LoadedModel, make_service: Callable[..., Service], asgi_client: Callable[..., Any]
) -> None:
    scorer: Any = loaded_model.scorer
    pair = EnsembleScorer([scorer, scorer], EnsembleConfig(method="mean", standardize=False))
    config = make_service().config
    section = ServedModelConfig(name="pair", models=("a", "b"), ensemble=pair.config)
    service = Service.of([LoadedModel(section, [pair])], config)
    service.models |= {"other": ServedModel("other", renderer=scorer.renderer), "words": ServedModel("words")}
    client = asgi_client(service)
    got = trace(client)
    cut = [COMPLETION[: token["end"]] for token in got["tokens"]]
    want = [one.score for one in scorer.score_completions(CONTEXT, cut)]
    assert [point["score"] for point in got["points"]] == pytest.approx(want, abs=1e-5)
    for name, code in (("other", "no_common_tokens"), ("words", "no_tokens")):
        body = {"context": CONTEXT, "completion": COMPLETION, "model": name}
        refused = client.post("/v1/rewards/trace", json=body)
        assert refused.status_code == 422 and refused.json()["error"]["code"] == code
