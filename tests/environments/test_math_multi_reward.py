"""Three rewards of an answer in tags: whether it is correct, a whole number, and in the form."""

from __future__ import annotations

from typing import Any

import pytest

from treeward.environments.math_multi_reward import MathMultiRewardEnvironment
from treeward.environments.registry import make_environment
from treeward.scoring.score import Reward

GOOD = "<think>6 * 2</think>\n<answer>12</answer>"


def reward(text: str, **info: Any) -> Reward:
    environment = make_environment("math_multi_reward", {})
    assert isinstance(environment, MathMultiRewardEnvironment)
    log = [{"role": "user", "content": "6 * 2?"}, {"role": "assistant", "content": text}]
    (found,) = environment.rewards([log], [info])
    return found


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (GOOD, (1, 1, 1)),
        (f"\n{GOOD}\n", (1, 1, 1)),
        (GOOD.replace("12", "13"), (0, 1, 1)),
        (GOOD.replace("12", "twelve"), (0, 0, 1)),
        ("<answer> 12 </answer>", (1, 1, 0)),
        # The last answer counts, and a second one breaks the form.
        ("<think>a</think>\n<answer>13</answer> or <answer>12</answer>", (1, 1, 0)),
        ("It is 12.", (0, 0, 0)),
    ],
)
def test_each_reward_is_0_or_1(text: str, parts: tuple[int, int, int]) -> None:
    found = reward(text, ground_truth="12")
    assert found.components == dict(zip(("correctness", "integer", "format"), parts, strict=True))
    assert found.value == sum(parts)


def test_without_a_ground_truth_the_others_are_left() -> None:
    found = reward(GOOD)
    assert found.value is None
    assert found.components == {"integer": 1.0, "format": 1.0}
    assert found.error == "the sample has no ground_truth or expected_answer"
