"""Rollouts follow from the seed and the step and are counted; validation measures the same thing
every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from templates import PROMPTING_CHATML

from treeward.data.prompt_sets import Prompt
from treeward.environments.interface import Reward
from treeward.errors import ModelError
from treeward.rl.generation import CompletionGroup, SampledCompletion
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


def texts(rollouts: Rollouts) -> list[str]:
    """Of all completions, one group after another."""
    return [completion.text for completion in completions_of(rollouts)]


def completions_of(rollouts: Rollouts) -> list[SampledCompletion]:
    return list(chain.from_iterable(group.completions for group in rollouts.groups))


def prompts_of(rollouts: Rollouts) -> list[Prompt]:
    return [group.prompt for group in rollouts.groups]


def in_samples(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The completions of the lines of samples.jsonl."""
    return list(chain.from_iterable(sample["completions"] for sample in samples))


def test_a_step_that_is_taken_again_is_the_same(opened: Callable[..., GRPOSetup]) -> None:
    run = opened()
    first = collect(run, step=3, drawn=12)
    again = collect(run, step=3, drawn=12)
    assert texts(first) == texts(again)
    assert torch.equal(first.rewards_PG, again.rewards_PG)


def test_the_prompts_of_a_step_are_the_next_ones(opened: Callable[..., GRPOSetup]) -> None:
    run = opened()
    next_prompts = [run.prompts.prompts[i] for i in run.order.take(12, 4)]
    assert prompts_of(collect(run, step=3, drawn=12)) == next_prompts


def test_another_step_has_other_completions_to_the_same_prompts(
    opened: Callable[..., GRPOSetup],
) -> None:
    run = opened()
    first = collect(run, step=3, drawn=12)
    other = collect(run, step=4, drawn=12)
    assert prompts_of(first) == prompts_of(other)
    assert texts(first) != texts(other)


def test_no_two_draws_share_a_seed() -> None:
    draws = product((0, 1), range(9), range(5), (False, True))
    seeds = []
    for seed, step, draw, is_validation in draws:
        seeds.append(sampling_seed(seed, step, draw, validation=is_validation))
    assert len(set(seeds)) == len(seeds) == 2 * 9 * 5 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


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
        assert all(sample["text"].startswith("<think>\n") for sample in in_samples(samples))
    # the opening is not sampled
    lengths = [len(completion.token_ids) for completion in completions_of(rollouts)]
    assert [sample["num_tokens"] for sample in in_samples(rollouts.samples)] == lengths


def half_alike(prompt: str, response: str) -> float:
    """The completions of every second prompt are all rewarded alike."""
    return 0.5 if "moon" in prompt else float(len(response)) + 0.01


DYNAMIC = "grpo.use_dynamic_sampling=true"


@pytest.fixture
def half_informative(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., GRPOSetup]:
    monkeypatch.setattr(planted, "vowels", half_alike)
    return lambda *options: opened(DYNAMIC, "env.planted.function=planted.vowels", *options)


def test_dynamic_sampling_draws_until_there_is_enough(
    half_informative: Callable[..., GRPOSetup],
) -> None:
    run = half_informative()
    found = collect(run, step=0, drawn=0)
    drawn = [run.prompts.prompts[i] for i in run.order.take(0, found.prompts_drawn)]
    informative = [prompt for prompt in drawn if "moon" not in str(prompt.messages)]
    assert found.prompts_drawn % 4 == 0
    assert found.prompts_drawn > 4
    assert prompts_of(found) == informative[:4]
    assert found.metrics["train/groups_without_signal"] == 1 - len(informative) / len(drawn)


def in_parts(prompt: str, response: str) -> dict[str, float | None]:
    """Two rewards, of which the second is missing, and so their sum."""
    return {"reward/length": half_alike(prompt, response), "reward/form": None}


def test_a_group_whose_components_vary_has_a_signal(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "vowels", in_parts)
    run = opened("env.planted.function=planted.vowels", "grpo.adv_estimator={name: gdpo}")
    found = collect(run, step=0, drawn=0)
    alike = ["moon" in str(group.prompt.messages) for group in found.groups]
    assert 0 < sum(alike) < len(alike)
    assert found.rewards_PG.isnan().all()
    assert found.watched["groups_without_signal"] == sum(alike) / len(alike)


@pytest.mark.parametrize(("estimator", "without_signal"), [("grpo", 0.0), ("gdpo", 1.0)])
def test_a_range_of_the_rewards_clips_components_that_are_learnt_from(
    opened: Callable[..., GRPOSetup],
    monkeypatch: pytest.MonkeyPatch,
    estimator: str,
    without_signal: float,
) -> None:
    def above_one(prompt: str, response: str) -> dict[str, float]:
        return {"reward/length": 1.0 + len(response), "reward/start": float(response < "k")}

    monkeypatch.setattr(planted, "vowels", above_one)
    run = opened(
        "env.planted.function=planted.vowels",
        f"grpo.adv_estimator={{name: {estimator}}}",
        "grpo.reward_scaling={enabled: true, source_min: 0, source_max: 1}",
    )
    metrics = collect(run, step=0, drawn=0).metrics
    assert metrics["train/component_without_signal/length"] == without_signal


def test_a_draw_has_no_prompt_more_by_rounding(half_informative: Callable[..., GRPOSetup]) -> None:
    """50 times 1.1 is a little more than 55 in floats."""
    run = half_informative(
        "grpo.num_prompts_per_step=50",
        "grpo.batch_multiplier=1.1",
        "grpo.dynamic_sampling_max_gen_batches=1",
    )
    assert collect(run, step=0, drawn=0).prompts_drawn == 55


def test_each_draw_of_dynamic_sampling_has_a_seed_of_its_own(
    half_informative: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = half_informative()
    generate = run.generator.generate
    seeds = list[int]()

    def recorded(*arguments: Any, seed: int, **options: Any) -> Any:
        seeds.append(seed)
        return generate(*arguments, seed=seed, **options)

    monkeypatch.setattr(run.generator, "generate", recorded)
    collect(run, step=0, drawn=0)
    assert len(set(seeds)) == len(seeds) > 1


def test_the_metrics_of_dynamic_sampling_are_of_all_that_was_sampled(
    half_informative: Callable[..., GRPOSetup],
) -> None:
    """As if it were one draw."""
    found = collect(half_informative(), step=0, drawn=0)
    logged = found.metrics
    assert logged["train/num_groups_sampled"] == found.prompts_drawn
    assert logged["planted_env/num_samples"] == 4 * found.prompts_drawn
    mean = logged["train/reward"]
    std = logged["train/reward_std"]
    assert logged["planted_env/mean_reward"] == pytest.approx(mean, rel=1e-5)
    assert logged["planted_env/std_reward"] == pytest.approx(std, rel=1e-4)


def test_a_step_goes_on_with_fewer_groups_than_it_wants(
    half_informative: Callable[..., GRPOSetup], caplog: pytest.LogCaptureFixture
) -> None:
    few = half_informative("grpo.dynamic_sampling_max_gen_batches=1")
    assert 0 < len(collect(few, step=0, drawn=0).groups) < 4
    assert "of 4 groups in 1 batches" in caplog.text


def test_a_step_whose_rewards_are_all_equal_is_an_error(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "vowels", lambda prompt, response: 1.0)
    alike = opened(DYNAMIC, "grpo.dynamic_sampling_max_gen_batches=2")
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
    source = "source_min: 0, source_max: 1"
    twice = f"grpo.reward_scaling={{enabled: true, {source}, target_min: 0, target_max: 2}}"
    run = opened(*GOLD, twice, "grpo.num_val_generations=2", ends)
    with torch.no_grad():
        run.policy.hf.get_output_embeddings().weight.mul_(30)  # type: ignore[union-attr, operator]
    measure = run.updater.measure
    entropies = list[torch.Tensor]()

    def recorded(groups: Sequence[CompletionGroup]) -> Any:
        kl_PG, entropy_PG = measure(groups)
        entropies.append(entropy_PG)
        return kl_PG, entropy_PG

    monkeypatch.setattr(run.updater, "measure", recorded)
    found = measured(run)
    completions = in_samples(found.samples)
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
    vowels = [planted.vowels("", completion["text"]) for completion in completions]
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


def test_components_of_gold_are_measured_beside_those_of_the_proxy(
    opened: Callable[..., GRPOSetup],
) -> None:
    """Both rewards have components of the same names, of which no mean is mixed."""
    of_proxy = "{type: custom, function: planted.vowels_and_order}"
    of_gold = "{type: hybrid, members: {vowels: {type: custom, function: planted.consonants}}}"
    run = opened(
        f"env={{planted: {of_proxy}, gold: {of_gold}}}",
        "grpo.gold_environment=gold",
        "grpo.num_val_generations=2",
    )
    found = measured(run)
    texts = [completion["text"] for completion in in_samples(found.samples)]
    vowels = [planted.consonants("", text) for text in texts]
    mean = sum(vowels) / len(vowels)
    assert found.metrics["validation/gold/component/vowels"] == pytest.approx(mean)
    assert found.metrics["validation/planted_env/component/vowels"] == pytest.approx(1 - mean)
    assert 0 < found.metrics["validation/planted_env/component/order"] < 1
    by_prompt = found.watched["gold_components_by_prompt"]["vowels"].tolist()
    pairs = [sum(vowels[i : i + 2]) / 2 for i in range(0, len(vowels), 2)]
    assert by_prompt == pytest.approx(pairs)
    run.watch.observe(0, **found.watched)
    metrics = run.watch.metrics()
    # Paired with itself, nothing has changed, and both have a place of their own.
    assert metrics["watch/gold_component/vowels_change"] == 0.0
    assert metrics["watch/component/vowels_change"] == 0.0


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
