"""Members make one reward by weights or by fallback; what a member cannot say is never counted as a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from treeward.data.preference import Message
from treeward.environments.hybrid import HybridEnvironment
from treeward.environments.interface import DETAILS, Environment, EnvironmentReturn, Reward
from treeward.errors import CheckpointError, ConfigError

FUNCTIONS = """
asked = []

def told(conversation, env_info):
    return env_info.get("told")

def second(conversation, env_info):
    asked.append(conversation[-1]["content"])
    return env_info.get("second")

class Closing:
    def __call__(self, conversation, env_info):
        return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "members.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    return str(file)


def chat(completion: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": completion}]


def step(config: dict[str, Any], completions: list[str], infos: list[dict[str, Any]]) -> EnvironmentReturn:
    return HybridEnvironment(config).step([chat(completion) for completion in completions], infos)


def values(result: EnvironmentReturn) -> list[float | None]:
    return [None if math.isnan(reward) else round(reward, 6) for reward in result.rewards.tolist()]


INFOS = [
    {"ground_truth": "4", "told": 0.5},
    {"ground_truth": "5", "told": -2.0},
    {"ground_truth": "4", "told": None},
    {"told": 1.0},
    {},
]
COMPLETIONS = ["4"] * 5


def weighted(functions: str, **changes: Any) -> dict[str, Any]:
    members = {
        "rules": {"weight": 3.0, "rule": "exact_match"},
        "told": {"type": "custom", "function": f"{functions}:told"},
    }
    return {"members": members, **changes}


def test_weighted(functions: str) -> None:
    result = step(weighted(functions), COMPLETIONS, INFOS)
    assert values(result) == [3.5, -2.0, None, None, None]
    details = [metadata[DETAILS] for metadata in result.metadata]
    assert details[0]["components"] == {"rules": 1, "rules/correct": 1, "rules/answered": 1, "told": 0.5}
    assert details[2]["error"] == "told: the function gave no reward"
    assert details[4]["error"].startswith("rules: the sample has no ground_truth") and "; told:" in details[4]["error"]


def fallback(functions: str, **changes: Any) -> dict[str, Any]:
    members = {
        "check": {"type": "rules", "rule": "exact_match"},
        "second": {"type": "custom", "function": f"{functions}:second"},
    }
    return {"mode": "fallback", "members": members, **changes}


SECOND = [
    {"ground_truth": "a", "second": 0.1},
    {"ground_truth": "x", "second": 0.2},
    {"second": 0.3},
    {"ground_truth": "x", "second": None},
    {},
]


@pytest.mark.parametrize(
    ("fallback_on", "want", "asked"),
    [
        (["failed", "wrong"], [1, 0.2, 0.3, None, None], ["b", "c", "d", "e"]),
        (["failed"], [1, 0, 0.3, 0, None], ["c", "e"]),
        (["wrong"], [1, 0.2, None, None, None], ["b", "d"]),
    ],
)
def test_fallback(functions: str, fallback_on: list[str], want: list[Any], asked: list[str]) -> None:
    import sys

    environment = HybridEnvironment(fallback(functions, fallback_on=fallback_on))
    result = environment.step([chat(completion) for completion in "abcde"], SECOND)
    assert values(result) == want
    assert sys.modules["treeward_custom_members"].asked == asked
    assert result.metadata[0][DETAILS]["components"]["check"] == 1


RULES = {"rule": "exact_match"}


class Counting(Environment):
    """Rewards by how many samples it has rewarded, from 1."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.count = 0

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.count += len(conversations)
        return self.evaluation_rewards(conversations, env_infos)

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return [Reward(float(self.count), components={"correct": 0.0}) for _ in conversations]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Broken(Environment):
    """Raises for a completion that says so."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        pass

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        if any("explode" in str(conversation[-1]["content"]) for conversation in conversations):
            raise ConfigError("this environment is broken")
        return [Reward(0.5) for _ in conversations]


COUNTING, BROKEN = {"type": f"{__name__}.Counting"}, {"type": f"{__name__}.Broken"}


@pytest.mark.parametrize("mode", ["weighted", "fallback"])
def test_the_state_is_the_members_and_a_failed_step_leaves_it(mode: str) -> None:
    config = {"mode": mode, "members": {"counting": COUNTING, "broken": BROKEN}}
    environment = HybridEnvironment(config)
    assert environment.is_stateful
    environment.step([chat("4")] * 2, [{}] * 2)
    with pytest.raises(ConfigError, match="is broken"):
        environment.step([chat("explode")] * 3, [{}] * 3)
    assert environment.state_dict() == {"counting": {"count": 2}, "broken": {}}
    evaluated = environment.step([chat("4")], [{}], update=False)
    assert evaluated.metadata[0][DETAILS]["components"]["counting"] == 2
    resumed = HybridEnvironment({"members": {"inner": {"type": "hybrid", **config}}})
    resumed.load_state_dict({"inner": environment.state_dict()})
    result = resumed.step([chat("4")], [{}])
    assert result.metadata[0][DETAILS]["components"]["inner/counting"] == 3
    with pytest.raises(CheckpointError, match="not the state of this hybrid"):
        resumed.load_state_dict(environment.state_dict())
    assert not HybridEnvironment({"members": {"rules": RULES, "broken": BROKEN}}).is_stateful
