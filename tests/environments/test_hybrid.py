"""Members make one reward by weights or by fallback; what a member cannot say is never counted as a
number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments.conftest import chat, details, numbers

from treeward.environments.hybrid import HybridEnvironment
from treeward.errors import ConfigError

FUNCTIONS = """
asked = []

def told(conversation, env_info):
    return env_info.get("told")

def second(conversation, env_info):
    asked.append(conversation[-1]["content"])
    return env_info.get("second")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "members.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    return str(file)


INFOS = [
    {"ground_truth": "4", "told": 0.5},
    {"ground_truth": "5", "told": -2.0},
    {"ground_truth": "4", "told": None},
    {"told": 1.0},
    {},
]


def test_weighted(functions: str) -> None:
    members = {
        "rules": {"weight": 3.0, "rule": "exact_match"},
        "told": {"type": "custom", "function": f"{functions}:told"},
    }
    result = HybridEnvironment({"members": members}).step([chat("4")] * 5, INFOS)
    assert numbers(result) == [3.5, -2.0, None, None, None]
    components = {"rules": 1, "rules/correct": 1, "rules/answered": 1, "told": 0.5}
    assert details(result, "components")[0] == components
    _, _, third, _, last = details(result, "error")
    assert third == "told: the function gave no reward"
    assert last.startswith("rules: the sample has no ground_truth") and "; told:" in last


def test_a_member_that_is_switched_off_is_no_part_of_the_reward(functions: str) -> None:
    members = {
        "rules": {"rule": "exact_match"},
        # Of a kind whose section takes the key, as NeMo RL's files have it.
        "reward_model": {"model_name": "no/such/model", "enabled": False, "weight": 2.0},
        "told": {"type": "custom", "function": f"{functions}:told", "enabled": True},
    }
    environment = HybridEnvironment({"members": members})
    assert list(environment.members) == ["rules", "told"]
    assert numbers(environment.step([chat("4")], INFOS[:1])) == [1.5]
    with pytest.raises(ConfigError, match="members"):
        HybridEnvironment({"members": {"rules": {"rule": "exact_match", "enabled": False}}})


def test_a_member_counts_by_its_weight_to_whoever_weighs_components(functions: str) -> None:
    # GDPO would take a penalty for a reward without it.
    members = {
        "rules": {"weight": 3.0, "rule": "exact_match"},
        "told": {"type": "custom", "function": f"{functions}:told", "weight": -0.5},
    }
    environment = HybridEnvironment({"members": members})
    for reward in environment.rewards([chat("4")] * 5, INFOS):
        assert reward.weights == {"rules": 3.0, "told": -0.5}


SECOND = [
    {"ground_truth": "a", "second": 0.1},
    {"ground_truth": "x", "second": 0.2},
    {"second": 0.3},
    {"ground_truth": "x", "second": None},
    {},
]


def test_fallback(functions: str) -> None:
    members = {
        "check": {"type": "rules", "rule": "exact_match"},
        "second": {"type": "custom", "function": f"{functions}:second"},
    }
    environment = HybridEnvironment({"mode": "fallback", "members": members})
    result = environment.step([chat(completion) for completion in "abcde"], SECOND)
    assert numbers(result) == [1, 0.2, 0.3, None, None]
    (module,) = (m for m in sys.modules.values() if getattr(m, "__file__", "") == functions)
    assert module.asked == ["b", "c", "d", "e"]
    assert details(result, "components")[0]["check"] == 1
    # What a member could not say is no error of a completion that another one has rewarded.
    errors = details(result, "error")
    assert errors[:3] == [None, None, None]
    assert errors[3].startswith("second: ")
    assert errors[4].startswith("check: ") and "; second: " in errors[4]


def test_a_wrong_answer_of_the_right_form_is_wrong(functions: str) -> None:
    members = {
        "form": {"type": "math_multi_reward"},
        "judge": {"type": "custom", "function": f"{functions}:told"},
    }
    environment = HybridEnvironment({"mode": "fallback", "members": members})
    text = "<think>So.</think>\n<answer>4</answer>"
    assert numbers(environment.step([chat(text), chat(text)], INFOS[:2])) == [3.0, -2.0]


def test_the_score_of_a_weighted_sum_is_that_sum_before_shaping(functions: str) -> None:
    members = {
        "a": {"type": "custom", "function": f"{functions}:told", "weight": 2.0},
        "b": {"type": "custom", "function": f"{functions}:second", "weight": 0.5},
    }
    environment = HybridEnvironment({"mode": "weighted", "members": members})
    [reward] = environment.rewards([chat("2 + 2?", "4")], [{"told": 1.5, "second": 1.0}])
    assert (reward.value, reward.raw) == (3.5, 3.5)
