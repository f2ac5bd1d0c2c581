"""Validation measures the same thing every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from treeward.rl.rollouts import Validation, validate
from treeward.rl.setup import GRPOSetup

GOLD = (
    "env={planted: {type: custom, function: planted.vowels}, gold: {type: custom, function: planted.length}}",
    "grpo.gold_environment=gold",
    "grpo.environments=[planted]",
)


def measured(run: GRPOSetup) -> Validation:
    found = validate(run)
    assert found is not None
    return found


def test_the_same_weights_give_the_same_numbers(opened: Callable[..., GRPOSetup]) -> None:
    run = opened(*GOLD, "grpo.num_val_generations=3")
    first, second = measured(run), measured(run)
    assert first.metrics == second.metrics and first.samples == second.samples
    with torch.no_grad():
        run.policy.hf.lm_head.weight.mul_(3)  # type: ignore[union-attr, operator]
    other = measured(run)
    assert other.metrics["validation/reward"] != first.metrics["validation/reward"]
    assert other.metrics["validation/kl"] > first.metrics["validation/kl"] == 0.0
    assert other.metrics["validation/entropy"] < first.metrics["validation/entropy"]


def test_the_numbers_are_those_of_the_completions(opened: Callable[..., GRPOSetup]) -> None:
    run = opened(*GOLD, "grpo.num_val_generations=2", "grpo.num_logged_samples=100")
    found = measured(run)
    completions = [completion for sample in found.samples for completion in sample["completions"]]
    assert len(found.samples) == 6 and len(completions) == 12

    def mean(name: str) -> float:
        return sum(completion[name] for completion in completions) / len(completions)

    for metric, name in (
        ("reward", "reward"),
        ("raw_reward", "raw_reward"),
        ("gold_reward", "gold_reward"),
        ("kl", "kl"),
        ("mean_gen_tokens_per_sample", "num_tokens"),
        ("truncation_rate", "truncated"),
    ):
        assert found.metrics[f"validation/{metric}"] == pytest.approx(mean(name), abs=1e-6), metric
    vowels = [sum(c in "aeiou" for c in a["text"]) / max(len(a["text"]), 1) for a in completions]
    assert [a["reward"] for a in completions] == pytest.approx(vowels)
    assert found.watched["proxy_by_prompt"].tolist() == pytest.approx(
        [sum(vowels[i : i + 2]) / 2 for i in range(0, 12, 2)]
    )
    assert found.watched["gold_by_prompt"].shape == (6,)


def test_metrics_by_set(opened: Callable[..., GRPOSetup], write_prompts: Callable[[str, Iterable[Any]], str]) -> None:
    sets = ", ".join(
        f"{{dataset_name: PromptDataset, data_path: {write_prompts(f'{name}.jsonl', asks)}, name: {name}}}"
        for name, asks in (("few", ["Hum."]), ("many", [f"Hum {n}." for n in range(3)]))
    )
    found = measured(opened(*GOLD, f"data.validation=[{sets}]", "grpo.num_logged_samples=100"))
    rewards = [sample["completions"][0]["reward"] for sample in found.samples]
    assert found.metrics["validation-few/reward"] == pytest.approx(rewards[0])
    assert found.metrics["validation-many/reward"] == pytest.approx(sum(rewards[1:]) / 3)
    assert {"validation-few/gold_reward", "validation-many/gold_reward"} <= found.metrics.keys()


def test_rewards_that_fail_are_in_no_mean(opened: Callable[..., GRPOSetup], tmp_path: Any) -> None:
    (tmp_path / "orders.json").write_text("{}")
    run = opened(f"env={{planted: {{type: planted.Troubled, orders: {tmp_path}/orders.json}}}}")
    whole = measured(run)
    assert whole.metrics["validation/num_failed"] == 0
    run.rewards.environments["planted"].evaluation_rewards = (  # type: ignore[method-assign]
        lambda conversations, infos: [_none() for _ in conversations]
    )
    found = measured(run)
    assert found.metrics["validation/num_failed"] == 6 and "validation/reward" not in found.metrics
    assert found.samples[0]["completions"][0]["reward"] is None
    assert run.watch.observe(1, **found.watched) == [] or run.watch.alarms


def _none() -> Any:
    from treeward.environments.interface import Reward

    return Reward(None, error="told to fail")


def test_running_statistics_neither_move_nor_hide_the_proxy(opened: Callable[..., GRPOSetup]) -> None:
    run = opened("env={planted: {type: planted.Counting}}")
    before = run.rewards.state_dict()
    found = measured(run)
    assert run.rewards.state_dict() == before
    assert found.metrics["validation/reward"] != found.metrics["validation/raw_reward"]
    assert found.metrics["validation/proxy"] == found.metrics["validation/raw_reward"]
    assert found.watched["proxy_by_prompt"].mean() == pytest.approx(found.metrics["validation/proxy"], abs=1e-6)
