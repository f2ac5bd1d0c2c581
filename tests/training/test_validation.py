from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeward.training.setup import set_up
from treeward.training.validation import validate


def test_the_metrics_do_not_depend_on_the_batches(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run())
    dataset = run.validation_sets["held_out"]

    def metrics(**options: Any) -> Any:
        return validate(run.model, dataset, run.pairs_of, run.loss_of, **options)

    few = metrics(limit=24, max_tokens=100)
    assert few.num_groups == 24
    assert few.means() == pytest.approx(metrics(limit=24, max_groups=24).means(), abs=1e-5)
    assert metrics(max_tokens=8192).num_groups == metrics(limit=10**6, max_tokens=8192).num_groups == len(dataset)


def test_the_model_is_left_as_it_was(tiny_run: Callable[..., Any]) -> None:
    run = set_up(tiny_run())
    for training in (True, False):
        run.model.train(training)
        validate(run.model, run.validation_sets["held_out"], run.pairs_of, run.loss_of, limit=4, max_groups=2)
        assert run.model.training is training
    assert all(parameter.grad is None for parameter in run.model.parameters())
