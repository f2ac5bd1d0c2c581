"""A judge that was trained to rate scores as a reward model does, on every way to a score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from messages import chat
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from treeward.config.reward_environments import JudgeEnvironmentConfig, PreferenceVerdictConfig
from treeward.config.scoring import ScoringConfig
from treeward.config.server import ServerConfig
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError, DataError, ModelError
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.identity import scorer_identity
from treeward.scoring.trained_judge import write_judge_contract
from treeward.scoring.verdicts import make_question
from treeward.serving.app import create_app
from treeward.serving.service import Service

RATES = PreferenceVerdictConfig(mode="rating", system_prompt="Judge.", template="{conversation} {completion}?")
CHATS = [chat("Hi", text) for text in ("Hello!", "No.", "Ha ha")]


@pytest.fixture
def judge(own_policy_folder: Path) -> Path:
    write_judge_contract(own_policy_folder, RATES)
    return own_policy_folder


def loaded(folder: Path, **keys: object) -> Any:
    return load_scorer(ScoringConfig.model_validate({"models": [str(folder)], "dtype": "float32", **keys}))


def test_the_score_is_the_expected_rating_of_plain_transformers(judge: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForCausalLM.from_pretrained(judge)
    expected = []
    for one in CHATS:
        question = make_question(RATES, "user: Hi", [one[-1]["content"]], about=0)
        prompt = tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
        log_probs = []
        for rating in range(1, 10):
            ids = tokenizer(f"{prompt}Rating: [[{rating}]]", add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                of_all = model(ids).logits[0, :-1].log_softmax(-1)
            log_probs.append(float(of_all.gather(-1, ids[0, 1:, None]).sum()))
        weights = [math.exp(value - max(log_probs)) for value in log_probs]
        rating = sum(weight * number for number, weight in enumerate(weights, 1)) / sum(weights)
        expected.append((rating - 1) / 8)
    scores = loaded(judge).score(CHATS)
    assert [score.score for score in scores] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 6) for value in expected}) == 3


def test_environment_and_server_give_the_same_scores(judge: Path) -> None:
    expected = [score.score for score in loaded(judge).score(CHATS)]
    environment = RewardModelEnvironment({"model_name": str(judge), "precision": "float32"})
    assert [reward.value for reward in environment.reward(CHATS, [])] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ConfigError, match="reads questions"):
        environment.preprocess_data(CHATS)
    config = ServerConfig.model_validate({"models": [{"models": [str(judge)], "dtype": "float32"}]})
    service = Service.load(config)
    with TestClient(create_app(service)) as client:
        request = {"context": CHATS[0][:-1], "completions": [one[-1]["content"] for one in CHATS]}
        answer = client.post("/v1/rewards", json=request).json()
        assert [item["reward"] for item in answer["data"]] == pytest.approx(expected, abs=1e-6)
        refused = client.post("/classify", json={"input": ["user: Hi"]})
        assert refused.status_code == 422 and "reads messages" in refused.json()["error"]["message"]


def test_what_has_no_score_says_why(judge: Path) -> None:
    scorer = loaded(judge)
    [masked, scored] = scorer.score([CHATS[0][:1], CHATS[0]], on_error="mask")
    assert masked.score is None and "no completion to score" in str(masked.error)
    assert scored.score is not None
    with pytest.raises(DataError, match="no completion to score"):
        scorer.score([CHATS[0][:1]])
    long = [CHATS[0][0], {"role": "assistant", "content": "word " * 300}]
    assert "256 are read" in str(scorer.score([long])[0].error)
    [limited] = loaded(judge, max_length=20).score(CHATS[:1])
    assert limited.score is None and "20 are read" in str(limited.error)
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}, CHATS[0][1]]
    for wrong, reason in (("2 + 2?", "not a list of messages"), (image, "reads text only")):
        assert reason in str(scorer.score([wrong], on_error="mask")[0].error)
        with pytest.raises(DataError, match=reason):
            scorer.score([wrong])


def test_a_pass_keeps_to_its_budget_and_tokens_are_counted(judge: Path) -> None:
    whole, small = loaded(judge), load_scorer(ScoringConfig(models=(str(judge),), dtype="float32"), batch_tokens=100)
    assert whole.num_computed_tokens == 0  # the golden questions are no work of the user's
    sizes: list[int] = []
    log_probs = small.judge.policy.log_probs
    small.judge.policy.log_probs = lambda rows, starts: sizes.append(len(rows[0])) or log_probs(rows, starts)
    expected = [score.score for score in whole.score(CHATS * 3)]
    assert [score.score for score in small.score(CHATS * 3)] == pytest.approx(expected, abs=1e-6)
    assert len(sizes) == 9 and set(sizes) == {9}
    assert whole.num_computed_tokens < whole.num_row_tokens
    sizes.clear()
    small.judge.batch_tokens, small.judge.max_questions = 100_000, 2  # as an environment's batch_size: 2
    small.score(CHATS * 3)
    assert sizes == [18, 18, 18, 18, 9]
    assert scorer_identity(whole, "") != scorer_identity(loaded(judge, max_length=200), "")


def test_variables_of_the_template_are_part_of_the_contract(judge: Path) -> None:
    write_judge_contract(judge, RATES, {"enable_thinking": False})
    asked = JudgeEnvironmentConfig(model=str(judge))
    assert asked.chat_template_kwargs == loaded(judge).renderer.chat_template_kwargs == {"enable_thinking": False}


def test_other_judges_are_refused(judge: Path) -> None:
    for setting in ({"head_weights": [1.0]}, {"truncation": "truncate_left"}, {"tokenizer": {"chat_template": "x"}}):
        with pytest.raises(ConfigError, match="for reward models"):
            loaded(judge, **setting)
    tensors = load_file(judge / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, judge / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="a golden verdict has changed"):
        loaded(judge)
    write_judge_contract(judge, PreferenceVerdictConfig(template="{completion_a} {completion_b}"))
    with pytest.raises(ConfigError, match="compares"):
        loaded(judge)
