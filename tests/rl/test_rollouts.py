"""Rollouts follow from the seed and the step, and what is made of them is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treeward.errors import ModelError
from treeward.rl.rollouts import Rollouts, collect, sampling_seed
from treeward.rl.setup import GRPOSetup


def texts(rollouts: Rollouts) -> list[list[str]]:
    return [[completion.text for completion in group.completions] for group in rollouts.groups]


def test_a_step_that_is_taken_again_is_the_same(opened: Callable[..., GRPOSetup]) -> None:
    run = opened()
    first, again = collect(run, step=3, drawn=12), collect(run, step=3, drawn=12)
    assert texts(first) == texts(again) and torch.equal(first.rewards_PG, again.rewards_PG)
    assert [g.prompt for g in first.groups] == [run.prompts[i].prompt for i in run.order.take(12, 4)]
    other = collect(run, step=4, drawn=12)  # the same prompts, other completions
    assert [g.prompt for g in other.groups] == [g.prompt for g in first.groups] and texts(other) != texts(first)
    seeds = [sampling_seed(a, b, c, validation=d) for a in (0, 1) for b in range(9) for c in range(5) for d in (0, 1)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)  # none is shared


def test_dynamic_sampling_draws_until_there_is_enough(
    opened: Callable[..., GRPOSetup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import planted

    # Every second prompt's completions are all rewarded alike.
    lengths = lambda prompt, response: 0.5 if "moon" in prompt else float(len(response)) + 0.01  # noqa: E731
    monkeypatch.setattr(planted, "vowels", lengths)
    run = opened("grpo.use_dynamic_sampling=true", "env.planted.function=planted.vowels")
    found = collect(run, step=0, drawn=0)
    drawn = run.order.take(0, found.prompts_drawn)
    informative = [i for i in drawn if "moon" not in str(run.prompts[i].prompt.messages)]
    assert found.prompts_drawn % 4 == 0 and found.prompts_drawn > 4
    assert [g.prompt for g in found.groups] == [run.prompts[i].prompt for i in informative][:4]
    assert found.metrics["train/num_groups_sampled"] == found.prompts_drawn
    assert found.metrics["planted_env/num_samples"] == 4 * found.prompts_drawn
    assert found.metrics["train/groups_without_signal"] == 1 - len(informative) / len(drawn)
    # What is logged is of all that was sampled, as if it were one draw.
    assert found.metrics["planted_env/mean_reward"] == pytest.approx(found.metrics["train/reward"], rel=1e-5)
    assert found.metrics["planted_env/std_reward"] == pytest.approx(found.metrics["train/reward_std"], rel=1e-4)
    few = opened("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    assert 0 < len(collect(few, step=0, drawn=0).groups) < 4 and "of 4 groups in 1 batches" in caplog.text
    monkeypatch.setattr(planted, "vowels", lambda prompt, response: 1.0)
    alike = opened("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2")
    with pytest.raises(ModelError, match="(?s)nothing to learn from.*2 batches"):
        collect(alike, step=0, drawn=0)


def test_too_many_failures_stop(opened: Callable[..., GRPOSetup], tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text('{"fail": 0.5}')
    section = f"env={{planted: {{type: planted.Troubled, orders: {tmp_path}/orders.json}}}}"
    assert collect(opened(section), step=0, drawn=0).metrics["train/num_failed"] == 8
    with pytest.raises(ModelError, match="too many completions have no reward") as caught:
        collect(opened(section, "grpo.max_failed_share=0.49"), step=0, drawn=0)
    assert "50% of 16; 8 x planted: told to fail (" in str(caught.value) and "train.jsonl:" in str(caught.value)
    (tmp_path / "orders.json").write_text('{"fail": 1}')
    found = collect(opened(section, "grpo.max_failed_share=1"), step=0, drawn=0)
    assert not found.rewards_PG.isfinite().any() and not found.used_PG.any() and "train/reward" not in found.metrics
