"""Several heads learn one score, each from initial weights of its own; their spread goes wherever scores go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from treeward.config.scoring import EnsembleConfig
from treeward.data.sources import Row
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError
from treeward.losses import Heads, Labels, RewardSums, graded, ranked_pairs, squared_error
from treeward.model.contract import read_contract
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rows import ChunkScorer, chunks_of
from treeward.scoring.scorer import Scorer
from treeward.training.prefetch import BatchPreparer
from treeward.training.setup import set_up
from treeward.training.train import RewardModelRun, train

HEADS = "policy.reward_model_cfg.num_heads=4"


def gradients(run: RewardModelRun) -> list[Tensor]:
    found = [one.grad.clone() for one in run.model.parameters() if one.grad is not None]
    run.model.zero_grad(set_to_none=True)
    return found


def test_the_loss_is_the_mean_of_each_heads_loss() -> None:
    """Two comparisons, three heads, by hand in float64, forward and backward."""
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    pairs, expected = ranked_pairs([(0, 1), (1, 0, 1)]), torch.zeros((), dtype=torch.float64)
    for h in range(3):
        expected = expected - F.logsigmoid(values[0, h] - values[1, h]) / 3
        for worse in (2, 4):
            expected = expected - F.logsigmoid(values[3, h] - values[worse, h]) / 2 / 3
    estimates = Heads(weights=(1 / 3,) * 3, are_estimates=True)
    got = estimates.loss(values, Labels(pairs))
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    [by_hand], [ours] = torch.autograd.grad(expected, values), torch.autograd.grad(got, values)
    torch.testing.assert_close(ours, by_hand, atol=1e-6, rtol=1e-5)
    grades = graded([[(1.0,), (math.nan,)], [(0.0,), (2.0,), (4.0,)]], stds=(2.0,))
    error = sum(
        (values[s, h] - grade) ** 2 / size / 4 / 3
        for h in range(3)
        for s, grade, size in ((0, 1.0, 2), (2, 0.0, 3), (3, 2.0, 3), (4, 4.0, 3))
    )
    got = replace(estimates, function=squared_error).loss(values, Labels(pairs, grades))
    assert float(got) == pytest.approx(float(error), rel=1e-6)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_grades_of_completions_that_stand_alone_are_learnt(
    num_heads: int, tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    """There is no pair in the data; the loss is the mean squared error in units of the grades' deviation. Several heads
    estimate a grade by their mean, and each learns for itself."""
    grades = [float(n % 5) for n in range(8)]
    alone = [{"prompt": f"Say {n}.", "completions": ["sun"], "scores": [grade]} for n, grade in enumerate(grades)]
    path = write_rows("alone.jsonl", alone)
    sets = [f"data.train=[{{data_path: {path}}}]", f"data.validation=[{{data_path: {path}, name: held_out}}]"]
    kind = f"policy.reward_model_cfg={{reward_model_type: regression, num_heads: {num_heads}}}"
    run = RewardModelRun(set_up(tiny_run(kind, *sets, "checkpointing.metric_name=val_loss")))
    [dataset] = run.setup.training_sets.values()
    values = [float(run.model.score_tokens(one.token_ids).mean()) for one in dataset[:]]
    errors = [(value - one.grades[0][0]) ** 2 for value, one in zip(values, dataset[:], strict=True)]
    want = fmean(errors) / pstdev(grades) ** 2
    measured = run.validate_set("held_out")
    assert measured is not None and measured.sums.means()["loss"] == pytest.approx(want, rel=1e-5)
    assert measured.metrics()["mse"].value == pytest.approx(fmean(errors), rel=1e-5)
    assert num_heads > 1 or run.step(1).logged["train/rm/loss"] == pytest.approx(want, rel=1e-5)
    run.close()


@pytest.mark.parametrize("kind", ["bradley_terry", "plackett_luce"])
def test_micro_batches_change_no_gradient(kind: str, tiny_run: Callable[..., Any]) -> None:
    found = []
    for size in ("512", "60"):  # also in parts
        kinds = [HEADS, f"policy.reward_model_cfg.reward_model_type={kind}"]
        setup = set_up(tiny_run(*kinds, f"policy.train_micro_batch_tokens={size}"))
        run, batches, sums = RewardModelRun(setup), BatchPreparer(setup).step(1), RewardSums()
        for micro_batch in batches.micro_batches:
            run.backward(micro_batch, batches.num_units, sums)
        found.append((len(batches.micro_batches), sums.read().loss_sum, gradients(run)))
    (few, loss, wanted), (many, other_loss, got) = found
    assert few < many and loss == pytest.approx(other_loss, rel=1e-5)
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert len({float(row.norm()) for row in wanted[-1]}) == 4  # no two heads learn alike


def test_spread_is_used_by_environment_and_ensemble(tiny_run: Callable[..., Any]) -> None:
    folder = train(tiny_run(HEADS, "rm.max_num_steps=2"), show_progress=False).model_folder
    assert folder is not None
    log = [{"role": "user", "content": "Say 1."}]
    log.append({"role": "assistant", "content": "sun moon"})
    contract, [score] = read_contract(folder), Scorer.load(folder).score([log])
    assert contract is not None and contract.has_estimates and contract.read.plain_transformers
    assert [(one.name, one.weight) for one in contract.heads] == [(f"LABEL_{h}", 0.25) for h in range(4)]
    assert score.score == pytest.approx(fmean(score.heads), abs=1e-6) and score.parts["spread"] == score.spread
    environment = RewardModelEnvironment({"model_name": str(folder), "precision": "float32"})
    [reward] = environment.rewards([log], [{}])
    assert reward.value == pytest.approx(score.score) and reward.components["spread"] == pytest.approx(score.spread)
    assert [reward.components[f"head_{h}"] for h in range(4)] == pytest.approx(list(score.heads))
    config = EnsembleConfig(over="heads", method="uncertainty", uncertainty_coefficient=0.7)
    [careful] = EnsembleScorer.load([folder], config=config).score([log])  # without constants: one unit
    assert careful.score == pytest.approx(fmean(score.heads) - 0.7 * pstdev(score.heads) ** 2, abs=1e-6)
    assert careful.spread == score.spread == pytest.approx(pstdev(score.heads)) and careful.members == score.heads
    given = [{"messages": log}, {"prompt": "Say 1.", "completions": ["sun moon", "ash"]}]
    chunks = chunks_of(Row(values, f"in.jsonl:{i}") for i, values in enumerate(given))
    [scored] = map(ChunkScorer(lambda: (Scorer.load(folder), None, {})).score, chunks)
    one, two = scored.rows
    assert (one["score"], one["spread"]) == pytest.approx((score.score, score.spread))
    assert two["spreads"][0] == pytest.approx(score.spread) and len(two["spreads"]) == 2


@pytest.mark.parametrize("kind", ["{reward_model_type: attributes, attributes: [a, b], num_heads: 2}",
                                  "{reward_model_type: regression, attribute_weights: fit, num_heads: 2}"])  # fmt: skip
def test_several_heads_are_of_one_score(kind: str, tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        tiny_run(f"policy.reward_model_cfg={kind}")
