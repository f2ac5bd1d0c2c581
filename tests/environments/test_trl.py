"""An environment as a reward function of TRL; `tests/compat/test_trl.py` trains with one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from messages import assistant, chat, user

from treeward.data.preference import Message
from treeward.environments.interface import Environment, Reward
from treeward.environments.trl import as_trl
from treeward.scoring.score import Score


class Lengths(Environment):
    """The length of the completion, less `ground_truth`; a completion that says "fail" has no reward."""

    name = "lengths"

    def __init__(self) -> None:
        self.seen: list[tuple[list[Message], Mapping[str, Any]]] = []

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.seen += [(list(c), dict(info)) for c, info in zip(conversations, env_infos, strict=True)]
        return [self._reward(c[-1]["content"], info) for c, info in zip(conversations, env_infos, strict=True)]

    def _reward(self, completion: str, info: Mapping[str, Any]) -> Reward:
        if "fail" in completion:
            return Reward(None, error="it says fail")
        return Reward(len(completion) - info.get("ground_truth", 0.0), score=Score(float(len(completion))))


def test_conversations_and_their_columns() -> None:
    environment = Lengths()
    rewards = as_trl(environment)(
        prompts=[[user("a")], [user("b")]],
        completions=[[assistant("four")], [assistant("three")]],
        completion_ids=[[1], [2]],
        ground_truth=[1.0, 2.0],
        empty=[None, "x"],
        trainer_state=object(),
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
        environments=[object(), object()],
    )
    assert rewards == [3.0, 3.0]
    assert environment.seen == [
        (chat("a", "four"), {"ground_truth": 1.0}),
        (chat("b", "three"), {"ground_truth": 2.0, "empty": "x"}),
    ]


def test_what_has_no_reward_is_none_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reward = as_trl(Lengths(), name="mine")
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        values = reward(["a"] * 4, ["x", "fail", "xxx", "fail"], ground_truth=[0.5] * 4, log_metric=logged.__setitem__)
    assert values == [0.5, None, 2.5, None]
    assert logged == {"mine/failed": 0.5, "mine/raw_mean": 2.0}
    assert [r.getMessage() for r in caplog.records] == [
        "lengths: 2 of 4 samples have no reward; the first: sample 1: it says fail"
    ]
