"""Rollouts follow from the seed and the step and are counted; validation measures the same thing
every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from templates import PROMPTING_CHATML

from treeward.environments.interface import Reward
from treeward.errors import ModelError
from treeward.rl.rollouts import PolicyValidation, Rollouts, collect, sampling_seed, validate
from treeward.rl.setup import GRPOSetup

GOLD = (
    (
        "env={planted: {type: custom, function: planted.vowels}, gold: {type: custom, function: "
        "planted.length}}"
    ),
    "grpo.gold_environment=gold",
)


def measured(run: GRPOSetup) -> PolicyValidation:
    found = validate(run)
    assert found is not None
    return found


def texts(rollouts: Rollouts) -> list[list[str]]:
    return [[completion.text for completion in group.completions] for group in rollouts.groups]


def test_a_step_that_is_taken_again_is_the_same(opened: Callable[..., GRPOSetup]) -> None:
    run = opened()
    first = collect(run, step=3, drawn=12)
    again = collect(run, step=3, drawn=12)
    assert texts(first) == texts(again) and torch.equal(first.rewards_PG, again.rewards_PG)
    assert [g.prompt for g in first.groups] == [
        run.prompts.prompts[i] for i in run.order.take(12, 4)
    ]
    other = collect(run, step=4, drawn=12)  # the same prompts, other completions
    assert [g.prompt for g in other.groups] == [g.prompt for g in first.groups] and texts(
        other
    ) != texts(first)
    seeds = [
        sampling_seed(a, b, c, validation=d)
        for a in (0, 1)
        for b in range(9)
        for c in range(5)
        for d in (0, 1)
    ]
    # none is shared
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_samples_have_the_text_that_environments_read(opened: Callable[..., GRPOSetup]) -> None:
    template = PROMPTING_CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
    format_rule = "+env.form={type: rules, rule: regex, pattern: ^<think>}"
    run = opened(
        "~env.planted", format_rule, f"policy.tokenizer.chat_template={json.dumps(template)}"
    )
    rollouts = collect(run, step=0, drawn=0)
    validation = measured(run)
    assert rollouts.rewards_PG.eq(1).all() and validation.metrics["validation/reward"] == 1
    for samples in (rollouts.samples, validation.samples):
        assert all(
            one["text"].startswith("<think>\n")
            for sample in samples
            for one in sample["completions"]
        )
    lengths = [len(one.token_ids) for group in rollouts.groups for one in group.completions]
    logged = [one["num_tokens"] for sample in rollouts.samples for one in sample["completions"]]
    assert logged == lengths  # the opening is not sampled


def test_dynamic_sampling_draws_until_there_is_enough(
    opened: Callable[..., GRPOSetup],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import planted

    # Every second prompt's completions are all rewarded alike.
    lengths = lambda prompt, response: 0.5 if "moon" in prompt else float(len(response)) + 0.01  # noqa: E731
    monkeypatch.setattr(planted, "vowels", lengths)
    run = opened("grpo.use_dynamic_sampling=true", "env.planted.function=planted.vowels")
    generate = run.generator.generate
    seeds = list[int]()

    def recorded(*arguments: Any, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return generate(*arguments, seed=seed, **options)

    monkeypatch.setattr(run.generator, "generate", recorded)
    found = collect(run, step=0, drawn=0)
    assert len(set(seeds)) == len(seeds) > 1  # each draw samples with a seed of its own
    drawn = run.order.take(0, found.prompts_drawn)
    informative = [i for i in drawn if "moon" not in str(run.prompts.prompts[i].messages)]
    assert found.prompts_drawn % 4 == 0 and found.prompts_drawn > 4
    assert [g.prompt for g in found.groups] == [run.prompts.prompts[i] for i in informative][:4]
    assert found.metrics["train/num_groups_sampled"] == found.prompts_drawn
    assert found.metrics["planted_env/num_samples"] == 4 * found.prompts_drawn
    assert found.metrics["train/groups_without_signal"] == 1 - len(informative) / len(drawn)
    # What is logged is of all that was sampled, as if it were one draw.
    assert found.metrics["planted_env/mean_reward"] == pytest.approx(
        found.metrics["train/reward"], rel=1e-5
    )
    assert found.metrics["planted_env/std_reward"] == pytest.approx(
        found.metrics["train/reward_std"], rel=1e-4
    )
    few = opened("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    assert (
        0 < len(collect(few, step=0, drawn=0).groups) < 4
        and "of 4 groups in 1 batches" in caplog.text
    )
    monkeypatch.setattr(planted, "vowels", lambda prompt, response: 1.0)
    alike = opened("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2")
    with pytest.raises(ModelError, match="(?s)nothing to learn from.*2 batches"):
        collect(alike, step=0, drawn=0)


def test_failures_may_be_allowed(opened: Callable[..., GRPOSetup], tmp_path: Path) -> None:
    section = f"env={{planted: {{type: planted.Troubled, orders: {tmp_path}/orders.json}}}}"
    for share, failed in ((0.5, 8), (1, 16)):
        (tmp_path / "orders.json").write_text(f'{{"fail": {share}}}')
        found = collect(opened(section, "grpo.max_failed_share=1"), step=0, drawn=0)
        assert found.metrics["train/num_failed"] == failed
        assert ("train/reward" in found.metrics) == bool(found.used_PG.any()) == (failed < 16)


def test_the_numbers_are_those_of_the_completions(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that completions have different lengths
    ends = f"policy.generation.stop_token_ids={list(range(120, 160))}"
    twice = "grpo.reward_scaling={enabled: true, source_min: 0, source_max: 1, target_min: 0, target_max: 2}"
    run = opened(*GOLD, twice, "grpo.num_val_generations=2", ends)
    with torch.no_grad():
        run.policy.hf.get_output_embeddings().weight.mul_(30)  # type: ignore[union-attr, operator]
    measure = run.updater.measure
    entropies = list[torch.Tensor]()
    monkeypatch.setattr(
        run.updater,
        "measure",
        lambda groups: (measure(groups), entropies.append(measure(groups)[1]))[0],
    )
    found = measured(run)
    completions = [completion for sample in found.samples for completion in sample["completions"]]
    assert len(found.samples) == 6 and len(completions) == 12

    def mean(name: str) -> float:
        return sum(completion[name] for completion in completions) / len(completions)

    names = {name: name for name in ("reward", "raw_reward", "gold_reward", "kl")}
    names |= {"mean_gen_tokens_per_sample": "num_tokens", "truncation_rate": "truncated"}
    for metric, name in names.items():
        assert found.metrics[f"validation/{metric}"] == pytest.approx(mean(name), abs=1e-6), metric
    lengths = torch.tensor([completion["num_tokens"] for completion in completions])
    assert len(set(lengths.tolist())) > 2
    per_token = float((torch.cat(entropies).flatten() * lengths).sum() / lengths.sum())
    assert found.metrics["validation/entropy"] == pytest.approx(per_token, rel=1e-5)
    assert abs(float(torch.cat(entropies).mean()) - per_token) > 1e-2
    vowels = [sum(c in "aeiou" for c in a["text"]) / max(len(a["text"]), 1) for a in completions]
    assert [a["raw_reward"] for a in completions] == pytest.approx(vowels)
    rewards = [a["reward"] for a in completions]
    assert len(set(vowels)) > 2
    assert rewards == pytest.approx([2 * share for share in vowels])
    assert found.watched["proxy_by_prompt"].tolist() == pytest.approx(
        [sum(rewards[i : i + 2]) / 2 for i in range(0, 12, 2)]
    )
    assert found.watched["gold_by_prompt"].shape == (6,)


def test_metrics_by_set(
    opened: Callable[..., GRPOSetup], write_prompts: Callable[[str, Iterable[Any]], str]
) -> None:
    form = "{{dataset_name: PromptDataset, data_path: {}, name: {}}}"
    few = write_prompts("few.jsonl", ["Hum."])
    many = write_prompts("many.jsonl", [f"Hum {n}." for n in range(3)])
    sets = f"data.validation=[{form.format(few, 'few')}, {form.format(many, 'many')}]"
    found = measured(opened(*GOLD, sets))
    rewards = [sample["completions"][0]["reward"] for sample in found.samples]
    assert found.metrics["validation-few/reward"] == pytest.approx(rewards[0])
    assert found.metrics["validation-many/reward"] == pytest.approx(sum(rewards[1:]) / 3)
    assert {"validation-few/gold_reward", "validation-many/gold_reward"} <= found.metrics.keys()


def test_rewards_that_fail_are_in_no_mean(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened()
    failed = [Reward(None, error="told to fail")] * 6
    monkeypatch.setattr(run.rewards.environments["planted"], "rewards", lambda *_: failed)
    found = measured(run)
    assert found.metrics["validation/num_failed"] == 6 and "validation/reward" not in found.metrics
    assert found.samples[0]["completions"][0]["reward"] is None
    assert {alarm.kind for alarm in run.watch.observe(1, **found.watched)} <= {"truncation"}
