"""The loop learns, says what it does, watches, and stops as it is told."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import vowels
from sampled import sequences_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from treeward.rl import grpo as grpo_module
from treeward.rl.advantages import advantages, informative_groups
from treeward.rl.generation import CompletionGroup, completion_lengths
from treeward.rl.grpo import GRPOOutcome, GRPORun, grpo
from treeward.rl.rollouts import Rollouts
from treeward.training.tracking import read_metrics

Make = Callable[..., Any]

SHORT = (
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
)


def run(config: Any) -> GRPOOutcome:
    return grpo(config, show_progress=False)


def logged(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The lines that have all of these metrics."""
    lines = read_metrics(folder / "logs" / "metrics.jsonl")
    return [line for line in lines if line.keys() >= set(names)]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Rollouts]:
    """The rollouts of each step, as they come."""
    found: list[Rollouts] = []
    collect = grpo_module.collect
    monkeypatch.setattr(
        grpo_module, "collect", lambda *a, **k: found.append(collect(*a, **k)) or found[-1]
    )
    return found


def test_a_planted_reward_is_learnt(tiny_grpo: Make, tmp_path: Path) -> None:
    config = tiny_grpo(
        "grpo.max_num_steps=16",
        "grpo.num_generations_per_prompt=12",
        "grpo.val_at_start=true",
        "grpo.val_period=8",
        "policy.optimizer.kwargs.lr=0.03",
        "checkpointing.save_period=100",
    )
    outcome = run(config)
    assert (outcome.step, outcome.total_steps, outcome.exit_code, outcome.interrupted_by) == (
        16,
        16,
        0,
        None,
    )
    before, *_, after = [
        line["validation/reward"] for line in logged(tmp_path, "validation/reward")
    ]
    assert before < 0.2 and after > 0.6
    assert outcome.validation["validation/reward"] == after
    trained = [line["train/reward"] for line in logged(tmp_path, "train/reward")]
    assert len(trained) == 16 and sum(trained[-3:]) > 3 * sum(trained[:3])
    # what it costs is seen too
    kls = [line["train/kl"] for line in logged(tmp_path, "train/kl")]
    assert kls[0] == 0.0 and kls[-1] > 1.0
    assert outcome.report is not None and "reach the length limit" in outcome.report.read_text(
        encoding="utf-8"
    )
    assert AutoModelForCausalLM.from_pretrained(outcome.model_folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(outcome.model_folder).chat_template


def test_the_metrics_of_a_step_and_the_kl_that_is_taken_from_each_reward(
    opened: Callable[..., Any], sampled: list[Rollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has moved, and moves no further; it samples at the temperature at which it
    learns."""
    options = (
        "loss_fn.kl_in_reward=true",
        "loss_fn.reference_policy_kl_penalty=0.5",
        "policy.optimizer.kwargs.lr=1e-30",
    )
    gold = "env.gold={type: custom, function: planted.length}", "grpo.gold_environment=gold"
    run = GRPORun(opened(*options, *gold, "policy.generation.temperature=0.7"))
    with torch.no_grad():
        run.setup.policy.hf.get_output_embeddings().weight.mul_(3)
    compared = list[torch.Tensor]()
    monkeypatch.setattr(
        grpo_module, "advantages", lambda *args: compared.append(args[0]) or advantages(*args)
    )
    metrics = run.step(1).logged
    kl_PG, _ = run.setup.updater.measure(sampled[0].groups)
    assert kl_PG is not None and float(kl_PG.min()) > 0
    torch.testing.assert_close(compared[0], sampled[0].rewards_PG - 0.5 * kl_PG)
    used = advantages(compared[0], run.grpo)[sampled[0].used_PG]
    assert metrics["train/advantages_std"] == pytest.approx(
        float(used.square().mean() - used.mean().square()) ** 0.5
    )
    assert metrics["train/kl_penalty"] == pytest.approx(0.5 * float(kl_PG.mean()))
    assert metrics["train/kl"] == pytest.approx(float(kl_PG.mean()), rel=1e-5)
    assert metrics["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    completions = list(chain.from_iterable(group.completions for group in sampled[0].groups))
    texts = [one.text for one in completions]
    lengths = [len(one.token_ids) for one in completions]
    assert metrics["train/raw_reward"] == metrics["train/reward"]
    assert metrics["train/reward"] == pytest.approx(
        sum(vowels("", text) for text in texts) / 16, abs=1e-6
    )
    assert metrics["train/gold_reward"] == pytest.approx(sum(map(len, texts)) / 16 / 100, abs=1e-6)
    assert metrics["train/mean_gen_tokens_per_sample"] == pytest.approx(sum(lengths) / 16)
    assert metrics["planted_env/num_samples"] == 16 and metrics["planted_env/num_failed"] == 0
    assert (
        metrics["train/num_failed"] == metrics["train/num_masked"] == 0
        and metrics["train/lr"] == 1e-30
    )
    assert metrics["train/prompts_drawn"] == 4 and metrics["epoch"] == pytest.approx(4 / 42)


def test_completions_that_the_generator_saw_otherwise_are_left_out(
    opened: Callable[..., Any], sampled: list[Rollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each group the first completion is off by a factor of exp(0.2) a token: within the limit,
    and beyond it."""
    for limit, num_masked in ((1.5, 0), (1.1, 4)):
        run = GRPORun(opened(f"grpo.seq_logprob_error_threshold={limit}"))
        generate = run.setup.generator.generate

        def generate_off(
            *args: Any, generate: Any = generate, **options: Any
        ) -> list[CompletionGroup]:
            groups = []
            for one in generate(*args, **options):
                first, *others = one.completions
                said = tuple(value - 0.2 for value in first.log_probs)
                groups.append(replace(one, completions=(replace(first, log_probs=said), *others)))
            return groups

        monkeypatch.setattr(run.setup.generator, "generate", generate_off)
        metrics = run.step(1).logged
        num_used = int(sampled[-1].used_PG.sum())
        used = advantages(sampled[-1].rewards_PG, run.grpo)[sampled[-1].used_PG]
        assert metrics["train/num_masked_seqs_by_logprob_error"] == num_masked
        assert num_used == len(used) == 16
        assert (
            metrics["train/advantages_mean"] == pytest.approx(float(used.mean()), abs=1e-7)
        ) == (num_masked == 0)


def test_validations_begin_where_they_are_asked_to(tiny_grpo: Make, tmp_path: Path) -> None:
    run(
        tiny_grpo(
            "grpo.max_num_steps=4",
            "grpo.val_period=1",
            "grpo.val_start_at=3",
            "grpo.val_at_start=true",
        )
    )
    assert [line["step"] for line in logged(tmp_path, "validation/reward")] == [0, 3, 4]


def nodes(groups: list[CompletionGroup]) -> int:
    """Tokens of the trees, counted by hand: different beginnings."""
    count = 0
    for group in groups:
        beginnings = set()
        for sequence in sequences_of(group):
            beginnings |= {tuple(sequence[: n + 1]) for n in range(len(sequence))}
        count += len(beginnings)
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ([], 2),  # the reference, and the update, which is its own old policy
        (
            ["grpo.updates_per_batch=3", "policy.train_global_batch_size=8"],
            5,
        ),  # old, reference, three updates
        (["loss_fn.kl_in_reward=true", "loss_fn.reference_policy_kl_type=k1"], 3),
        (
            [
                "grpo.skip_reference_policy_logprobs_calculation=true",
                "loss_fn.reference_policy_kl_penalty=0",
            ],
            1,
        ),
    ],
)
def test_prompts_are_computed_once(
    tiny_grpo: Make, tmp_path: Path, sampled: list[Rollouts], options: list[str], passes: int
) -> None:
    run(tiny_grpo(*SHORT, *options))
    for line, rollouts in zip(logged(tmp_path, "train/computed_tokens"), sampled, strict=True):
        groups = list(rollouts.groups)
        assert len(groups) == 4
        # none is left out of the update
        completions = chain.from_iterable(group.completions for group in groups)
        assert all(completion.token_ids for completion in completions)
        sequences = chain.from_iterable(map(sequences_of, groups))
        assert line["train/row_tokens"] == passes * sum(map(len, sequences))
        assert line["train/computed_tokens"] == passes * nodes(groups)
        assert line["train/computed_tokens"] < line["train/row_tokens"]
        assert ("train/kl" in line) == (passes > 1) and ("train/kl_penalty" in line) == (
            "kl_in_reward" in str(options)
        )


HACK = (
    "env.gold={type: custom, function: planted.consonants}",
    "grpo.gold_environment=gold",
    "grpo.num_generations_per_prompt=12",
    "grpo.max_num_steps=30",
    "grpo.val_period=3",
    "grpo.num_val_generations=8",
    "grpo.max_val_samples=null",
    "policy.optimizer.kwargs.lr=0.03",
    "loss_fn.reference_policy_kl_penalty=0",
    "grpo.watch.stop_on=[gold_falls]",
)


def test_completions_that_are_not_the_policys_are_told_once(
    tiny_grpo: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collect = grpo_module.collect

    def shifted(*arguments: Any, **options: Any) -> Rollouts:
        """Completions of a generator that gives each token 1 / 1.3 of the policy's probability."""
        rollouts = collect(*arguments, **options)
        groups = []
        for group in rollouts.groups:
            completions = []
            for completion in group.completions:
                assert completion.log_probs is not None
                log_probs = tuple(value - math.log(1.3) for value in completion.log_probs)
                completions.append(replace(completion, log_probs=log_probs))
            groups.append(replace(group, completions=tuple(completions)))
        return replace(rollouts, groups=groups)

    run(tiny_grpo(*SHORT))
    assert "not sampled from the policy" not in caplog.text
    monkeypatch.setattr(grpo_module, "collect", shifted)
    run(tiny_grpo(*SHORT, "grpo.max_num_steps=4"))
    assert (
        caplog.text.count("not sampled from the policy") == 1
        and "off by a factor of 1.30" in caplog.text
    )


@pytest.mark.slow
def test_a_planted_hack_stops_the_run(
    tiny_grpo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gold is what the reward is paid for not to be: it falls while the proxy rises."""
    outcome = run(tiny_grpo(*HACK))
    assert outcome.stopped_by == "gold_falls" and outcome.step < 30 and outcome.exit_code == 0
    (alarm,) = [alarm for alarm in outcome.alarms if alarm.kind == "gold_falls"]
    assert alarm.step == outcome.step and alarm.stops
    kept = json.loads((tmp_path / "logs" / "alarms.json").read_text())
    assert [one["kind"] for one in kept] == [one.kind for one in outcome.alarms]
    assert [line["step"] for line in logged(tmp_path, "watch/alarm") if line["watch/alarm"]][
        -1
    ] == outcome.step
    assert outcome.model_folder is not None and outcome.interrupted_by is None
    # The same command does not go on; without `stop_on` it does.
    with caplog.at_level(logging.INFO, "treeward.rl"):
        again = run(tiny_grpo(*HACK))
    assert (again.step, again.stopped_by) == (outcome.step, "gold_falls")
    assert f"has ended this run after step {outcome.step}" in caplog.text
    more = f"grpo.max_num_steps={outcome.step + 1}"
    onwards = run(tiny_grpo(*HACK, "grpo.watch.stop_on=[]", more))
    assert (onwards.step, onwards.stopped_by) == (outcome.step + 1, None)
    assert [one.kind for one in onwards.alarms][: len(kept)] == [one["kind"] for one in kept]


@pytest.mark.slow
def test_dynamic_sampling_ends_with_the_epochs(
    tiny_grpo: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two batches of six for each step: 84 prompts of two epochs are drawn in seven steps, not in
    21."""
    import planted

    def length_for_some(prompt: str, response: str) -> float:
        return len(response) if "and sun" in prompt else 0.5

    monkeypatch.setattr(planted, "vowels", length_for_some)
    options = ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5", "grpo.max_num_steps=null",
               "grpo.dynamic_sampling_max_gen_batches=2", "grpo.max_num_epochs=2",
               "grpo.log_period=100",
               "data.shuffle=false")  # fmt: skip
    with caplog.at_level("INFO", "treeward.rl"):
        outcome = run(tiny_grpo(*options))
    assert (outcome.step, outcome.total_steps, outcome.interrupted_by) == (7, 7, None)
    assert (
        outcome.model_folder is not None
        and outcome.validation
        and (tmp_path / "checkpoints" / "step_7").is_dir()
    )
    assert [line["train/prompts_drawn"] for line in logged(tmp_path, "train/reward")] == [84]
    assert "drawn the prompts of all 2 epochs in 7 steps" in caplog.text
    assert run(tiny_grpo(*options)).step == 7
    assert run(tiny_grpo(*options, "grpo.max_num_epochs=3")).step == 11  # 132 of 126 prompts


def test_components_are_normalised_one_by_one(
    tiny_grpo: Make, tmp_path: Path, sampled: list[Rollouts]
) -> None:
    """Completions of one character have no second reward, and are learnt from by the first."""
    run(
        tiny_grpo(
            *SHORT,
            "env.planted.function=planted.vowels_and_order",
            "grpo.adv_estimator={name: gdpo, reward_weights: {vowels: 1.0, order: 0.5}}",
            "grpo.num_generations_per_prompt=8",
            "policy.generation.max_new_tokens=1",
            "grpo.max_failed_share=0.1",
            "data.validation=null",
        )
    )
    rollouts = sampled[0]
    has_none_PG = rollouts.components["order"].isnan()
    assert has_none_PG.any() and rollouts.rewards_PG[has_none_PG].isnan().all()
    assert torch.equal(rollouts.used_PG, completion_lengths(rollouts.groups) > 0)
    line = logged(tmp_path, "train/loss")[0]
    assert line["train/component_without_signal/order"] == pytest.approx(
        1 - float(informative_groups(rollouts.components["order"]).float().mean())
    )
    assert line["planted_env/component/vowels"] == pytest.approx(
        float(rollouts.components["vowels"].mean())
    )
    written = json.loads((tmp_path / "logs" / "samples.jsonl").read_text("utf-8").splitlines()[0])
    for g, completion in enumerate(written["completions"]):
        known = {} if has_none_PG[0, g] else {"order": float(rollouts.components["order"][0, g])}
        assert completion["components"] == {
            "vowels": float(rollouts.components["vowels"][0, g]),
            **known,
        }
