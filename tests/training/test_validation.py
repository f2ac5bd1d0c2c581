from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.evaluation.diagnostics.perturbations import sample_examples
from treeward.evaluation.suites.preferences import PreferenceSuite
from treeward.training.setup import examples_to_perturb, set_up
from treeward.training.validation import validate, values_of

ROBUST = ("checkpointing.metric_name=validation-held_out/robust_accuracy", "rm.val_perturbations=3")


def test_the_metrics_do_not_depend_on_the_batches(tiny_run: Callable[..., Any]) -> None:
    few, other = (
        validate(set_up(tiny_run("rm.val_batches=3", *options)), "held_out")
        for options in (("policy.train_micro_batch_tokens=100",), ("rm.val_micro_batch_size=24",))
    )
    assert few is not None and other is not None
    assert few.sums.num_groups == len(few.scored) == 24
    assert values_of(few.metrics()) == pytest.approx(values_of(other.metrics()), abs=1e-5)
    dataset = set_up(tiny_run()).validation_sets["held_out"]
    for one, same, comparison in zip(few.scored, other.scored, dataset[:24], strict=True):
        assert one.scores == pytest.approx(same.scores, abs=1e-5)
        assert (one.example.ranks, one.lengths) == (comparison.ranks, comparison.lengths)
        assert (one.example.id, one.example.subset) == (comparison.where, comparison.subset)


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_a_runs_plan_keeps_its_budget(layout: str, tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run(f"policy.attention={layout}", "policy.train_micro_batch_tokens=300"))
    comparisons = run.validation_sets["held_out"][:60]
    plan = run.plan(comparisons)
    assert sorted(i for members in plan for i in members) == list(range(60))
    for members in plan:
        batch = run.model.make_batch([comparisons[i].token_ids for i in members])
        assert batch.num_computed_tokens <= 300 or len(members) == 1


@pytest.mark.parametrize("calls", [2, 5], ids=["among the comparisons", "among the rewritten"])
def test_it_can_be_stopped_on_the_way_and_leaves_no_gradient(tiny_run: Callable[..., Any], calls: int) -> None:
    run = set_up(tiny_run(*ROBUST, "rm.val_micro_batch_size=4"))
    answers = iter([False] * calls + [True])
    assert validate(run, "held_out", lambda: next(answers)) is None
    assert run.model.training and all(parameter.grad is None for parameter in run.model.parameters())


def test_what_is_rewritten_is_what_is_validated(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run(*ROBUST, "rm.val_perturbations=null"))
    dataset, config = run.validation_sets["held_out"], run.config.data.validation[0]
    places = [comparison.where for comparison in dataset[:16]]
    assert [example.where for example in run.perturbed["held_out"]] == places, "no more than are validated"
    drawn = examples_to_perturb(dataset, config, 5, limit=16)
    assert len(drawn) == 5 and {example.where for example in drawn} <= set(places)
    of_all = sample_examples(PreferenceSuite("held_out", config).load(), 5)
    assert examples_to_perturb(dataset, config, 5, limit=None) == of_all, "as `treeward eval` draws"
