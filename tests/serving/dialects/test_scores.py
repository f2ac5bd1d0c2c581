"""A conversation has one score, whichever dialect's client asks for it, and in whichever form."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from families import tiny_model
from messages import edit_json
from serving.dialects.clients import CLIENTS, Client
from serving.dialects.conftest import CHATS, KINDS, Served
from signed import signed

from treeward import RewardClient, RewardModelEnvironment
from treeward.client.verification import verify_server
from treeward.config.scoring import RewardShapingConfig
from treeward.losses import Heads
from treeward.model.contract import CONTRACT_FILE
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.rendered_text import Ending, RenderedText, beginning_of

CLOSE = 1e-5


def forms_of(served: Served, form: str) -> list[Any]:
    if form == "messages":
        return CHATS
    if form == "ids":
        return served.ids
    bos = served.scorer.renderer.tokenizer.bos_token
    without = form == "texts_without_bos" and bos  # as verl takes it away
    return [text.removeprefix(bos) if without else text for text in served.texts]


def scores_through(client: Client, served: Served) -> list[float]:
    """What the client reads for each of `CHATS`, in one request or in one each."""
    items = forms_of(served, client.form)
    groups = [items] if client.at_once else [[item] for item in items]
    result = []
    for group in groups:
        response = served.client.post(client.route, json=client.body(group))
        assert response.status_code == 200, response.text
        result += client.read(response.json())
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_scores_equal_the_scorers(client: Client, kind: str, shared: Any) -> None:
    served = shared(kind)
    assert scores_through(client, served) == pytest.approx(served.scores, abs=CLOSE)
    assert len({round(score, 3) for score in served.scores}) == len(CHATS)


def test_the_spread_of_heads_is_in_our_own_dialect_and_its_client(
    tiny_tokenizer: Any,
    tmp_path: Path,
    make_service: Any,
    serve_on_loopback: Any,
) -> None:
    heads = Heads(weights=(1 / 3,) * 3, are_estimates=True).contract()
    signed(tmp_path, tiny_tokenizer, tiny_model("llama", num_labels=3), heads=heads)
    url = serve_on_loopback(make_service(models=[{"model": str(tmp_path), "device": "cpu"}]))
    for score, expected in zip(
        RewardClient(url).score(CHATS),
        Scorer.load(tmp_path).score(CHATS),
        strict=True,
    ):
        assert score.score == pytest.approx(fmean(score.heads), abs=CLOSE) == expected.score
        assert score.spread == pytest.approx(pstdev(score.heads), abs=CLOSE) == expected.spread
    environment = RewardModelEnvironment({"model_name": url})
    [reward] = environment.rewards(CHATS[:1], [{}])
    assert reward.components["score/spread"] == pytest.approx(pstdev(reward.score.heads), abs=CLOSE)


def test_a_spread_is_in_our_own_dialect_and_verified_there(
    spread_folder: Path, make_service: Any, serve_on_loopback: Any
) -> None:
    url = serve_on_loopback(make_service(models=[{"model": str(spread_folder), "device": "cpu"}]))
    want = Scorer.load(spread_folder, device="cpu").score(CHATS)
    got = RewardClient(url).score(CHATS)
    spreads = [score.spread for score in want]
    assert None not in spreads
    assert [score.spread for score in got] == pytest.approx(spreads, abs=CLOSE)
    result = verify_server(spread_folder, url)
    assert result.equal and "spreads equal" in result.checks[-1].summary
    foreign = verify_server(spread_folder, url, dialect="vllm")
    assert foreign.equal and foreign.checks[-1].state == "not checked"


def test_a_server_of_a_model_that_was_not_calibrated_sends_no_spread(
    spread_folder: Path, tmp_path: Path, make_service: Any, serve_on_loopback: Any
) -> None:
    # As a server that was started before `treeward calibrate`.
    before = shutil.copytree(spread_folder, tmp_path / "model")
    edit_json(before / CONTRACT_FILE, spread=None)
    url = serve_on_loopback(make_service(models=[{"model": str(before), "device": "cpu"}]))
    difference = verify_server(spread_folder, url).first_difference
    assert difference is not None and difference.part == "spread"
    assert difference.summary == "the server sends no spread"


ASK = [{"role": "user", "content": "2 + 2?"}]
FOUR = [*ASK, {"role": "assistant", "content": "4"}]
JSON = [*ASK, {"role": "assistant", "content": '[{"role": "user", "content": "5"}]'}]
TEXTS = [FOUR[1]["content"], JSON[1]["content"]]


@pytest.mark.parametrize(
    "row",
    [
        {"context": ASK, "completions": TEXTS},
        {"context": "2 + 2?", "completions": [FOUR[1:], TEXTS[1]]},
        {"context": [], "completions": [FOUR, JSON]},
        {"conversations": [FOUR, JSON]},
        {"context": [{"role": "user", "content": ["2 + 2?"]}], "completions": TEXTS},
    ],
    ids=" ".join,
)
def test_v1_rewards_takes_text_and_messages(row: dict[str, Any], shared: Any) -> None:
    """A text that looks like messages is still a text: a policy may have written it."""
    served = shared("chatml")
    want = [score.score for score in served.scorer.score_completions("2 + 2?", TEXTS)]
    got = served.client.post("/v1/rewards", json=row)
    assert got.status_code == 200, got.text
    scores = [one["score"] for one in got.json()["data"]]
    assert scores == pytest.approx(want, abs=CLOSE)
    assert want[0] != want[1]


@pytest.mark.parametrize("kind", ["bos_written", "bos_added", "encoder"])
def test_texts_have_exactly_one_bos(kind: str, shared: Any) -> None:
    served = shared(kind)
    tokenizer = served.scorer.renderer.tokenizer
    first = tokenizer.bos_token or tokenizer.cls_token
    assert served.texts[0].startswith(first)
    texts = [served.texts[0], served.texts[0].removeprefix(first), first + served.texts[0]]
    for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        got = served.client.post("/classify", json={"input": texts, **options}).json()
        assert [row["probs"][0] for row in got["data"]] == pytest.approx(
            [served.scores[0]] * 3,
            abs=CLOSE,
        )
    other = served.client.post("/classify", json={"input": [served.ids[0][:1] + served.ids[0]]})
    assert abs(other.json()["data"][0]["probs"][0] - served.scores[0]) > 1e-3


@pytest.mark.parametrize("route", ["/classify", "/pooling"])
@pytest.mark.parametrize("key", ["use_activation", "activation", "softmax"])
def test_scores_are_raw_whatever_activation_is_asked_for(route: str, key: str, shared: Any) -> None:
    """As vLLM 0.32 gives them: an export says `problem_type: regression`."""
    served = shared("chatml")
    names = {"/classify": "vllm_example", "/pooling": "vllm_pooling"}
    [client] = [client for client in CLIENTS if client.name == names[route]]
    for value in (True, False):
        body = client.body(forms_of(served, client.form)[2:3]) | {key: value}
        assert client.read(served.client.post(route, json=body).json()) == pytest.approx(
            [served.scores[2]],
            abs=CLOSE,
        )


def test_a_sigmoid_is_given_where_tei_is_asked_for_it(shared: Any) -> None:
    """`huggingface_hub.InferenceClient.text_classification` sends
    `parameters.function_to_apply`.
    """
    served = shared("chatml")

    def ask(**more: Any) -> Any:
        return served.client.post("/predict", json={"inputs": served.texts[2], **more})

    def of_hub(function: str | None, **more: Any) -> dict[str, Any]:
        return {"parameters": {"function_to_apply": function, "top_k": 1}, **more}

    score = served.scores[2]
    probability = 1 / (1 + math.exp(-score))
    for more, want in (
        ({"raw_scores": False}, probability),
        ({"raw_scores": None}, score),
        ({"raw_scores": True}, score),
        (of_hub("sigmoid", raw_scores=True), probability),
        (of_hub("none", raw_scores=False), score),
        (of_hub(None, raw_scores=False), probability),
    ):
        assert ask(**more).json()[0]["score"] == pytest.approx(want, abs=CLOSE), more


@pytest.mark.parametrize("function", ["softmax", "tanh"])
def test_other_functions_of_tei_are_refused(function: str, shared: Any) -> None:
    served = shared("chatml")
    body = {"inputs": served.texts[2], "parameters": {"function_to_apply": function}}
    refused = served.client.post("/predict", json=body)
    assert refused.status_code == 422
    assert "function_to_apply" in refused.json()["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_end_is_scored_and_told_once(
    kind: str,
    serve: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = serve(kind)
    whole = served.texts[0]
    end = {"plain": "<|endoftext|>"}.get(kind, "\n")
    sep = "[SEP]" if kind == "encoder" else ""
    cut = whole.removesuffix(sep).removesuffix(end)
    assert cut + end + sep == whole
    served.client.post("/classify", json={"input": [whole]})
    assert "do not end with" not in caplog.text
    got = served.client.post("/classify", json={"input": [whole, cut, whole, cut]})
    prepared = served.scorer.prepare_texts([whole, cut])
    want = [score.score for score in served.scorer.score_prepared(prepared)]
    assert [row["probs"][0] for row in got.json()["data"]] == pytest.approx(want * 2, abs=CLOSE)
    assert abs(want[0] - want[1]) > 1e-3
    served.client.post("/predict", json={"inputs": cut})
    assert caplog.text.count("do not end with") == 1


@pytest.mark.parametrize("kind", ["plain", "chatml", "bos_written"])
def test_generated_texts_get_what_a_policy_never_writes(kind: str, shared: Any) -> None:
    served = shared(kind)
    # A policy stops at its end of turn.
    stopped = served.texts[2].rstrip("\n")
    assert (stopped == served.texts[2]) is (kind == "plain")
    padding = served.scorer.renderer.tokenizer.pad_token
    texts = [stopped]
    if padding is not None:
        texts.append(padding * 3 + stopped + padding * 2)
    for text in texts:
        response = served.client.post("/get_reward", json={"query": [text]})
        assert response.json()["rewards"] == pytest.approx(served.scores[2:3], abs=CLOSE)
        sample = {"prompt": text[:30], "response": text[30:], "label": None}
        response = served.client.post("/slime", json=sample)
        assert response.json() == pytest.approx(served.scores[2], abs=CLOSE)


@pytest.mark.parametrize("kind", ["plain", "chatml", "bos_written"])
def test_slimes_messages_have_the_end_of_turn_in_the_response(kind: str, shared: Any) -> None:
    served = shared(kind)
    end = served.scorer.renderer.tokenizer.eos_token
    sample = {"prompt": CHATS[2][:-1], "response": CHATS[2][-1]["content"] + end}
    response = served.client.post("/slime", json=sample)
    assert response.json() == pytest.approx(served.scores[2], abs=CLOSE)


@pytest.mark.parametrize("kind", ["plain", "chatml", "bos_written"])
def test_a_text_that_was_cut_is_scored_as_it_is(kind: str, shared: Any) -> None:
    served = shared(kind)
    unfinished = served.texts[2][:-20]
    stopped = served.texts[2].rstrip("\n")
    response = served.client.post("/get_reward", json={"query": [unfinished, stopped]})
    [want] = served.scorer.score_prepared(served.scorer.prepare_texts([unfinished]))
    expected = [want.score, served.scores[2]]
    assert response.json()["rewards"] == pytest.approx(expected, abs=CLOSE)


@dataclass(frozen=True)
class Shaped:
    """A service with a length penalty, the generated texts with their prompts, and the rewards."""

    served: Served
    texts: list[str]
    prompts: list[str]
    rewards: list[float]


@pytest.fixture
def shaped(serve: Any) -> Shaped:
    penalty = {"length_penalty": {"coefficient": 0.5, "threshold": 5}}
    served = serve(shaper=Shaper(RewardShapingConfig.model_validate(penalty)))
    texts = [text.rstrip("\n") for text in served.texts]
    prompts = []
    for text in texts:
        prompts.append(text[: text.index("assistant\n") + len("assistant\n")])
    response = served.client.post("/v1/rewards", json={"conversations": CHATS})
    rewards = [row["reward"] for row in response.json()["data"]]
    assert rewards != pytest.approx(served.scores, abs=0.1)
    return Shaped(served, texts, prompts, rewards)


def test_shaping_reads_openrlhfs_completion_beside_the_prompt(shaped: Shaped) -> None:
    body = {"query": shaped.texts, "prompts": shaped.prompts}
    result = shaped.served.client.post("/get_reward", json=body).json()
    assert result["rewards"] == pytest.approx(shaped.rewards, abs=CLOSE)
    raw_scores = result["extra_logs"]["raw_score"]
    assert raw_scores == pytest.approx(shaped.served.scores, abs=CLOSE)


def test_shaping_reads_slimes_response(shaped: Shaped) -> None:
    rows = zip(shaped.texts, shaped.prompts, shaped.rewards, strict=True)
    for text, prompt, reward in rows:
        sample = {"prompt": prompt, "response": text.removeprefix(prompt)}
        response = shaped.served.client.post("/slime", json=sample)
        assert response.json() == pytest.approx(reward, abs=CLOSE)


def test_shaping_reads_the_last_message(shaped: Shaped) -> None:
    response = shaped.served.client.post("/classify", json={"messages": CHATS[0]})
    probs = response.json()["data"][0]["probs"]
    assert probs == pytest.approx(shaped.rewards[:1], abs=CLOSE)


def test_shaping_refuses_a_text_without_its_prompt(shaped: Shaped) -> None:
    whole = shaped.served.texts
    other_prompts = [shaped.prompts[0], "another prompt"]
    for route, body in (
        ("/get_reward", {"query": shaped.texts}),
        ("/get_reward", {"query": shaped.texts[:2], "prompts": other_prompts}),
        ("/classify", {"input": whole}),
        ("/pooling", {"input": whole}),
        ("/classify", {"text": whole}),
        ("/v1/embeddings", {"input": whole}),
        ("/predict", {"inputs": whole[0]}),
    ):
        refused = shaped.served.client.post(route, json=body)
        assert refused.status_code == 422
        assert "send messages" in refused.text
        assert "prompts" in refused.text


@pytest.mark.parametrize("kind", KINDS)
def test_completions_of_a_prompt_have_one_beginning(kind: str, shared: Any) -> None:
    """In each form that a client may send; replicas are chosen by it."""
    served = shared(kind)
    ending = served.service.models["rm"].ending
    for form in (
        [RenderedText(text) for text in served.texts],
        [RenderedText(ids) for ids in served.ids],
        CHATS,
    ):
        one, same, other, same_other = (beginning_of(asked, ending) for asked in form)
        assert one == same != other == same_other


def test_a_conversation_without_a_role_has_a_beginning() -> None:
    """Its error is that of the replica, and not of all conversations of a step."""
    assert beginning_of([{"content": "Hi"}], Ending()) == "[{'content': 'Hi'}]"
