"""GDPO: advantages from several rewards, by NeMo RL's and TRL's formulas.

The expected numbers were computed by hand from the formulas of both libraries, for two prompts with
three completions each: correctness [1, 0, 0] and [1, 1, 0], format [1, 1, 0] and [.5, .5, .5], with
the weights 1 and 0.5.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from treeward.config.grpo import GRPOConfig
from treeward.errors import ConfigError
from treeward.rl.advantages import advantages, component_advantages, component_weights, rewarded

CORRECT = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
FORM = [[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]]
WEIGHTS = {"correct": 1.0, "form": 0.5}
MISSING = torch.nan


def config(name: str = "gdpo", weights: Any = WEIGHTS, **keys: Any) -> GRPOConfig:
    return GRPOConfig(adv_estimator={"name": name, "reward_weights": weights}, **keys)  # type: ignore[arg-type]


def components(**changed: list[list[float]]) -> dict[str, torch.Tensor]:
    values = {"correct": CORRECT, "form": FORM, **changed}
    return {name: torch.tensor(rows) for name, rows in values.items()}


def advantages_of(
    given: dict[str, torch.Tensor],
    chosen: GRPOConfig,
    *,
    own: Mapping[str, torch.Tensor] | None = None,
    row_components: Collection[str] = (),
    has_failed: bool = False,
) -> torch.Tensor:
    """`own`: the weights of the components in their rewards, 1 by default."""
    own = own or {name: torch.ones_like(values) for name, values in given.items()}
    weights = component_weights(
        {name: own[name] for name in given},
        chosen.adv_estimator,
        row_components=row_components,
        has_failed=has_failed,
    )
    rewards = next(iter(given.values()), torch.zeros(2, 3))
    return component_advantages(rewards, given, weights, chosen)


WORKED = {
    "NeMo RL": (config(), [[1.3762, -0.2752, -1.1010], [0.5505, 0.5505, -1.1010]]),
    "NeMo RL, leave one out": (
        config(use_leave_one_out_baseline=True),
        [[1.2684, -0.3732, -1.1940], [0.6468, 0.6468, -0.9948]],
    ),
    "TRL": (
        config("normalize_then_sum"),
        [[1.3761, -0.2752, -1.1009], [0.5504, 0.5504, -1.1009]],
    ),
}


@pytest.mark.parametrize("source", WORKED)
def test_it_is_the_formula_of_its_source(source: str) -> None:
    chosen, want = WORKED[source]
    got = advantages_of(components(), chosen)
    assert got.dtype == torch.float32
    assert torch.allclose(got, torch.tensor(want), atol=6e-5)


def by_formula(source: str) -> list[list[float]]:
    """The formulas with Python's numbers, completion by completion."""
    floor = 1e-4 if source == "TRL" else 1e-6
    sums = []
    for correct, form in zip(CORRECT, FORM, strict=True):
        for i in range(3):
            total = 0.0
            for weight, rewards in ((1.0, correct), (0.5, form)):
                compared = rewards
                if source == "NeMo RL, leave one out":
                    compared = rewards[:i] + rewards[i + 1 :]
                difference = rewards[i] - statistics.mean(compared)
                std = statistics.stdev(compared)
                total += weight * (difference / (std + floor) if std > 0 else difference)
            sums.append(total)
    std = statistics.stdev(sums) + (floor if source == "TRL" else 0.0)
    result = [(one - statistics.mean(sums)) / std for one in sums]
    return [result[:3], result[3:]]


@pytest.mark.parametrize("source", WORKED)
def test_it_is_the_formula_to_rounding(source: str) -> None:
    chosen, _ = WORKED[source]
    got = advantages_of(components(), chosen)
    assert torch.allclose(got, torch.tensor(by_formula(source)), atol=1e-6)


def test_a_detail_is_learnt_from_only_where_it_is_named() -> None:
    """As the spread of a score: more doubt is no better."""
    values = components() | {"score/spread": torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])}
    want = advantages_of(components(), config(weights=None))
    assert torch.equal(advantages_of(values, config(weights=None)), want)
    only_one = {name: values[name] for name in ("correct", "score/spread")}
    with pytest.raises(ConfigError, match="two components or more"):
        advantages_of(only_one, config(weights=None))
    named = config(weights={"correct": 1.0, "form": 1.0, "score/spread": -0.5})
    assert not torch.equal(advantages_of(values, named), want)


def test_a_missing_component_adds_nothing_to_its_completion() -> None:
    """B2's correctness is missing; its form is all that it has, and that does not vary."""
    given = components(correct=[CORRECT[0], [1.0, MISSING, 0.0]])
    got = advantages_of(given, config("normalize_then_sum"))
    want = [[1.521, -0.304, -1.217], [0.745, 0.0, -0.745]]
    assert torch.allclose(got, torch.tensor(want), atol=6e-4)


def test_a_completion_without_components_counts_nowhere() -> None:
    given = components(
        correct=[CORRECT[0], [1.0, MISSING, 0.0]], form=[FORM[0], [0.5, MISSING, 0.5]]
    )
    got = advantages_of(given, config("normalize_then_sum"))
    assert torch.allclose(got[1], torch.tensor([0.6666, 0.0, -0.6666]), atol=6e-5)
    assert float(got[0, 0]) == pytest.approx(1.3607, abs=6e-5)
    weights = {name: torch.ones(2, 3) for name in given}
    assert rewarded(torch.zeros(2, 3), given, weights).tolist() == [
        [True] * 3,
        [True, False, True],
    ]


@pytest.mark.parametrize(
    ("name", "leaves_one_out"),
    [("gdpo", False), ("gdpo", True), ("normalize_then_sum", False)],
)
def test_equal_rewards_are_no_signal_however_they_round(name: str, leaves_one_out: bool) -> None:
    equal = torch.full((2, 7), 0.3)
    given = {"correct": equal, "form": equal.clone()}
    chosen = config(name, use_leave_one_out_baseline=leaves_one_out)
    assert torch.equal(advantages_of(given, chosen), torch.zeros(2, 7))


def test_two_equal_components_are_one() -> None:
    """The sum is twice one of them, and over the batch it is divided by twice its std."""
    given = torch.tensor([[1.0, 2.0, 4.0], [0.0, 3.0, 1.0]])
    got = advantages_of({"a": given, "b": given}, config(weights=None))
    once = advantages(given, GRPOConfig())
    assert torch.allclose(got, once / once.std(), atol=1e-5)


def test_advantages_are_cut() -> None:
    got = advantages_of(components(), config(advantage_clip_low=-1.0, advantage_clip_high=1.0))
    assert float(got.max()) == 1.0
    assert float(got.min()) == -1.0


def test_a_list_of_weights_is_in_alphabetical_order() -> None:
    by_name = advantages_of(components(), config())
    assert torch.equal(advantages_of(components(), config(weights=[1.0, 0.5])), by_name)


def test_components_of_members_stand_for_themselves_in_the_members_reward() -> None:
    given = components() | {"judge/position_bias": torch.rand(2, 3)}
    got = advantages_of(given, config(weights=None))
    assert torch.equal(got, advantages_of(components(), config(weights=None)))
    # A list has no place for them either.
    assert torch.equal(
        advantages_of(given, config(weights=[1.0, 0.5])),
        advantages_of(components(), config(weights=[1.0, 0.5])),
    )


@pytest.mark.parametrize(
    ("weights", "given", "got"),
    [
        ([1.0, 0.5, 0.25], components(), "correct, form"),
        ({"correct": 1.0, "tone": 0.5}, components(), "no tone among correct, form"),
        (None, {"correct": torch.tensor(CORRECT)}, "correct"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, given: Any, got: str) -> None:
    with pytest.raises(ConfigError, match="components") as caught:
        advantages_of(given, config(weights=weights))
    assert caught.value.field == "grpo.adv_estimator.reward_weights"
    assert caught.value.got == got


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"reward_shaping": {"enabled": True}}, "reward_shaping.enabled"),
        ({"adv_estimator": {"reward_weights": {"a": 1.0, "b": 1.0}}}, "reward_weights"),
        ({"adv_estimator": {"name": "gdpo", "reward_weights": {"a": 1.0}}}, "reward_weights"),
        (
            {
                "adv_estimator": {"name": "normalize_then_sum"},
                "use_leave_one_out_baseline": True,
            },
            "use_leave_one_out_baseline",
        ),
    ],
)
def test_keys_that_have_no_effect_together_are_refused(keys: dict[str, Any], field: str) -> None:
    given = {"adv_estimator": {"name": "gdpo"}, **keys}
    with pytest.raises((ConfigError, ValueError), match=field):
        GRPOConfig.model_validate(given)


@pytest.mark.parametrize("weights", [WEIGHTS, None])
def test_a_component_that_a_whole_batch_lacks_is_missing_where_rewards_failed(weights: Any) -> None:
    """A judge that does not answer for a while ends no run, and the other component is learnt from."""
    given = {"correct": torch.tensor(CORRECT)}
    once = advantages(given["correct"], GRPOConfig())
    got = advantages_of(given, config(weights=weights), has_failed=True)
    assert torch.allclose(got, once / once.std(), atol=1e-5)


@pytest.mark.parametrize("weights", [WEIGHTS, None, [1.0, 0.5]])
def test_a_batch_may_lack_a_criterion_that_other_rows_have(weights: Any) -> None:
    """Rubrics differ from prompt to prompt: here no prompt of the batch is judged by its form."""
    given = {"correct": torch.tensor(CORRECT)}
    once = advantages(given["correct"], GRPOConfig())
    chosen = config(weights=weights)
    got = advantages_of(given, chosen, row_components=["correct", "form"])
    assert torch.allclose(got, once / once.std(), atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "got"),
    [
        ({"correct": 1.0, "tone": 0.5}, "no tone among correct, form"),
        ([1.0, 0.5, 0.25], "correct, form"),
    ],
)
def test_a_weight_of_a_criterion_that_no_row_has_is_refused(weights: Any, got: str) -> None:
    given = {"correct": torch.tensor(CORRECT)}
    with pytest.raises(ConfigError, match="components") as caught:
        advantages_of(given, config(weights=weights), row_components=["correct", "form"])
    assert caught.value.got == got


def test_a_list_of_weights_cannot_tell_which_component_has_failed() -> None:
    given = {"correct": torch.tensor(CORRECT)}
    with pytest.raises(ConfigError, match="a mapping of names and weights goes on"):
        advantages_of(given, config(weights=[1.0, 0.5]), has_failed=True)


def test_without_any_component_nothing_is_learnt() -> None:
    assert torch.equal(advantages_of({}, config(), has_failed=True), torch.zeros(2, 3))
    assert not rewarded(torch.ones(2, 3), {}, {}).any()


def test_without_weights_of_the_configuration_components_count_as_in_their_rewards() -> None:
    """The points of a rubric differ from prompt to prompt."""
    given = components()
    own = {"correct": torch.ones(2, 3), "form": torch.full((2, 3), 0.5)}
    unweighted = config(weights=None)
    got = advantages_of(given, unweighted, own=own)
    assert torch.allclose(got, torch.tensor(WORKED["NeMo RL"][1]), atol=6e-5)
    # The second prompt's form does not vary, so that its weight there changes nothing.
    own["form"][1] = 9.0
    assert torch.equal(advantages_of(given, unweighted, own=own), got)


def test_weights_of_the_configuration_replace_those_of_the_rewards() -> None:
    own = {"correct": torch.full((2, 3), 7.0), "form": torch.full((2, 3), -7.0)}
    got = advantages_of(components(), config(), own=own)
    assert torch.allclose(got, torch.tensor(WORKED["NeMo RL"][1]), atol=6e-5)
