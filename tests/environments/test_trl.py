"""An environment rewards what TRL's own GRPOTrainer generates, and what has no reward does not train."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treeward.data.preference import Message
from treeward.environments.interface import Environment, Reward
from treeward.environments.trl import as_trl
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer


class Lengths(Environment):
    """The length of the completion, less `ground_truth`; a completion that says "fail" has no reward."""

    name = "lengths"

    def __init__(self) -> None:
        self.seen: list[tuple[list[Message], Mapping[str, Any]]] = []

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.seen += [(list(c), dict(info)) for c, info in zip(conversations, env_infos, strict=True)]
        return [self._reward(c[-1]["content"], info) for c, info in zip(conversations, env_infos, strict=True)]

    def _reward(self, completion: str, info: Mapping[str, Any]) -> Reward:
        if "fail" in completion:
            return Reward(None, error="it says fail")
        return Reward(len(completion) - info.get("ground_truth", 0.0), score=Score(float(len(completion))))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_conversations_and_their_columns() -> None:
    environment = Lengths()
    rewards = as_trl(environment)(
        prompts=[user("a"), user("b")],
        completions=[assistant("four"), assistant("three")],
        completion_ids=[[1], [2]],
        ground_truth=[1.0, 2.0],
        empty=[None, "x"],
        trainer_state=object(),
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
        environments=[object(), object()],
    )
    assert rewards == [3.0, 3.0]
    assert environment.seen == [
        (user("a") + assistant("four"), {"ground_truth": 1.0}),
        (user("b") + assistant("three"), {"ground_truth": 2.0, "empty": "x"}),
    ]


def test_what_has_no_reward_is_none_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reward = as_trl(Lengths(), name="mine")
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        values = reward(["a"] * 4, ["x", "fail", "xxx", "fail"], ground_truth=[0.5] * 4, log_metric=logged.__setitem__)
    assert values == [0.5, None, 2.5, None]
    assert logged == {"mine/failed": 0.5, "mine/raw_mean": 2.0}
    assert [r.getMessage() for r in caplog.records] == [
        "lengths: 2 of 4 samples have no reward; the first: sample 1: it says fail"
    ]


class Recorder:
    """A second reward function, which rewards nothing and notes what the trainer generated."""

    def __init__(self) -> None:
        self.steps: list[list[list[Message]]] = []

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[None]:
        self.steps.append([prompt + completion for prompt, completion in zip(prompts, completions, strict=True)])
        return [None] * len(prompts)


def train_with_grpo(
    reward: Any, tokenizer: Any, folder: Path, *, steps: int = 2, **options: Any
) -> tuple[Any, Recorder]:
    """TRL's GRPOTrainer on a tiny policy, on the CPU."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(
            "qwen3", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        policy = AutoModelForCausalLM.from_config(config)
        recorder = Recorder()
        rows = [{"prompt": user(f"What is {i} + {i}?"), "ground_truth": float(i)} for i in range(4)]
        args = trl.GRPOConfig(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=8, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", seed=1,
            disable_tqdm=True, bf16=False, temperature=1.0, learning_rate=1e-2, **options,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=policy, reward_funcs=[reward, recorder], args=args, processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_list(rows), eval_dataset=datasets.Dataset.from_list(rows[:1]),
        )  # fmt: skip
        trainer.train()
    return trainer, recorder


@pytest.fixture
def policy_tokenizer(tiny_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "left"
    return tokenizer


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "server"])
def test_trl_trains_on_the_rewards_of_the_model(
    where: str, signed_folder: Path, served: str, policy_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = as_trl(str(signed_folder), precision="float32")
    if where == "server":
        monkeypatch.setenv("REWARD_TOKEN", "a-token")
        reward = as_trl(served, token_env="REWARD_TOKEN")
    trainer, recorder = train_with_grpo(reward, policy_tokenizer, tmp_path)
    scorer = Scorer.load(signed_folder, device="cpu")
    want = [[score.score for score in scorer.score(step)] for step in recorder.steps]
    assert len(want) == 2 and all(len(step) == 4 for step in want)
    assert logged(trainer, "rewards/reward_model_env/mean") == pytest.approx(
        [sum(step) / len(step) for step in want], abs=1e-5
    )
    assert logged(trainer, "rewards/reward_model_env/std") == pytest.approx(
        [torch.tensor(step).std().item() for step in want], abs=1e-5
    )
    assert min(logged(trainer, "rewards/reward_model_env/std")) > 1e-3  # the completions differ, and so do the rewards
    assert logged(trainer, "reward_model_env/failed") == [0.0, 0.0]
    means = logged(trainer, "rewards/reward_model_env/mean")
    assert logged(trainer, "reward_model_env/raw_mean") == pytest.approx(means, abs=1e-6)  # TRL's are of float32
