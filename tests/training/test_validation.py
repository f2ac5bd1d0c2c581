from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.training.setup import set_up
from treeward.training.validation import validate, values_of
from treeward.tree.batch import plan_micro_batches


def test_the_metrics_do_not_depend_on_the_batches(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run())
    dataset = run.validation_sets["held_out"]

    def metrics(limit: int | None, **budget: int) -> Any:
        def plan(comparisons: Any) -> list[list[int]]:
            return plan_micro_batches([comparison.tree_tokens for comparison in comparisons], **budget)

        tokens = budget.get("max_tokens")
        return validate(run.model, dataset, run.pairs_of, run.loss_of, plan, max_tokens=tokens, limit=limit)

    few = metrics(24, max_tokens=100)
    assert few.sums.num_groups == len(few.scored) == 24
    other = metrics(24, max_groups=24)
    assert values_of(few.metrics()) == pytest.approx(values_of(other.metrics()), abs=1e-5)
    for one, same, comparison in zip(few.scored, other.scored, dataset[:24], strict=True):
        assert one.scores == pytest.approx(same.scores, abs=1e-5)
        assert (one.example.ranks, one.lengths) == (comparison.ranks, comparison.lengths)
        assert (one.example.id, one.example.subset) == (comparison.where, comparison.subset)
    assert metrics(None, max_tokens=8192).sums.num_groups == len(metrics(10**6, max_tokens=8192).scored) == len(dataset)


@pytest.mark.parametrize(("layout", "budget"), [("tree", 300), ("rows", 300)])
def test_a_runs_plan_keeps_its_budget(layout: str, budget: int, tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run(f"policy.attention={layout}", f"policy.train_micro_batch_tokens={budget}"))
    comparisons = run.validation_sets["held_out"][:60]
    plan = run.plan(comparisons)
    assert sorted(i for members in plan for i in members) == list(range(60))
    for members in plan:
        batch = run.model.make_batch([comparisons[i].token_ids for i in members])
        assert batch.num_computed_tokens <= budget or len(members) == 1


def test_it_can_be_stopped_on_the_way(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run())
    calls = iter([False, False, True])
    stopped = validate(
        run.model.train(),
        run.validation_sets["held_out"],
        run.pairs_of,
        run.loss_of,
        run.plan,
        should_stop=lambda: next(calls),
    )
    assert stopped is None and run.model.training


def test_the_model_is_left_as_it_was(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run())
    for training in (True, False):
        run.model.train(training)
        validate(run.model, run.validation_sets["held_out"], run.pairs_of, run.loss_of, run.plan, limit=4)
        assert run.model.training is training
    assert all(parameter.grad is None for parameter in run.model.parameters())
