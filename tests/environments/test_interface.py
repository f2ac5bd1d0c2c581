"""A step is NeMo RL's, what has no reward is no number, and the metrics are those of the rewards that there are."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from treeward.data.preference import Message
from treeward.environments.interface import (
    DETAILS,
    Environment,
    EnvironmentReturn,
    Reward,
    undone_on_failure,
)
from treeward.errors import CheckpointError
from treeward.scoring.score import Score


class Lengths(Environment):
    """The length of the last message; an empty one has no reward."""

    name = "lengths"

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[Message]], list[dict[str, Any]]]] = []

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.seen.append(([list(c) for c in conversations], [dict(info) for info in env_infos]))
        return [self._reward(len(c[-1]["content"]), info) for c, info in zip(conversations, env_infos, strict=True)]

    def _reward(self, length: int, info: Mapping[str, Any]) -> Reward:
        if not length:
            return Reward(None, error="the completion is empty")
        return Reward(length - info.get("minus", 0.0), Score(float(length)), components={"length": float(length)})


def chat(completion: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": completion}]


def test_a_step_returns_six_fields_in_nemo_rls_order() -> None:
    result = Lengths().step([chat("four"), chat("")], [{"minus": 1.5, "id": 7}, None])
    observations, metadata, next_stop_strings, rewards, terminateds, answers = result
    assert result._fields == EnvironmentReturn._fields
    assert observations == [{"role": "environment", "content": ""}] * 2
    assert next_stop_strings == [None, None]
    assert rewards.dtype == torch.float32 and rewards.shape == (2,)
    assert rewards[0] == 2.5 and math.isnan(rewards[1])
    assert terminateds.dtype == torch.bool and terminateds.tolist() == [True, True]
    assert answers == ["four", ""]
    assert metadata[0] == {
        "minus": 1.5, "id": 7, DETAILS: {"raw": 4.0, "components": {"length": 4.0}, "error": None},
    }  # fmt: skip
    assert metadata[1] == {DETAILS: {"raw": None, "components": {}, "error": "the completion is empty"}}


def test_tensors_in_a_message_log_are_not_read_and_nothing_given_is_changed() -> None:
    environment = Lengths()
    log = [
        {"role": "user", "content": "Hi", "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": "four", "token_ids": torch.tensor([3]), "generation_logprobs": torch.zeros(1)},
    ]
    info = {"id": 7}
    before = copy.deepcopy(log)
    environment.step([log], [info])
    assert environment.seen == [([chat("four")], [{"id": 7}])]
    assert info == {"id": 7}
    assert [list(message) for message in log] == [list(message) for message in before]


def test_messages_keep_what_a_template_reads() -> None:
    environment = Lengths()
    call = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}], "thinking": "hm", "extra": 1}
    of_loops = {"name": None, "advantages": [0.5], "images": np.zeros(3), "pixel_values": torch.zeros(2)}
    of_parquet = {"tool_responses": np.array([{"name": "f"}], dtype=object)}
    environment.step([[{"role": "tool", "content": "y", "tool_call_id": "1"} | of_parquet, call | of_loops]], [{}])
    assert environment.seen[0][0] == [
        [{"role": "tool", "content": "y", "tool_call_id": "1", "tool_responses": [{"name": "f"}]}, call]
    ]  # fmt: skip


def test_what_is_no_sample_costs_its_own_reward_only() -> None:
    logs: list[Any] = [chat("four"), None, "text", ["text"], 3, np.array(chat("sixsix"), dtype=object), chat("x")]
    infos: list[Any] = [{"id": 0}, {"id": 1}, None, {}, {}, {}, "info"]
    result = Lengths().step(logs, infos)
    assert [None if math.isnan(reward) else reward for reward in result.rewards.tolist()] == [
        4.0, None, None, None, None, 6.0, None,
    ]  # fmt: skip
    errors = [metadata[DETAILS]["error"] for metadata in result.metadata]
    assert errors[1] == "the message log is not a list of messages (got: 'None')"
    assert all("not a list of messages" in error for error in errors[1:5])
    assert "env_info is not a mapping" in errors[6]
    assert [metadata.get("id") for metadata in result.metadata[:2]] == [0, 1]
    assert result.answers[:2] == ["four", None]


class Counting(Lengths):
    """Rewards by how many samples it has rewarded before."""

    count = 0

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.count += len(conversations)
        return self.evaluation_rewards(conversations, env_infos)

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return [Reward(float(self.count)) for _ in conversations]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_the_state_of_an_environment() -> None:
    assert Lengths().state_dict() == {} and not Lengths().is_stateful
    Lengths().load_state_dict({})
    with pytest.raises(CheckpointError, match="lengths has no state"):
        Lengths().load_state_dict({"count": 3})
    environment = Counting()
    assert environment.is_stateful
    assert environment.step([chat("a")] * 2, [{}] * 2).rewards.tolist() == [2.0, 2.0]
    assert environment.step([chat("a")], [{}], update=False).rewards.tolist() == [2.0]
    with pytest.raises(KeyboardInterrupt), undone_on_failure(environment):
        environment.step([chat("a")], [{}])
        raise KeyboardInterrupt
    assert environment.state_dict() == {"count": 2}
    assert Lengths().step([chat("four")], [{}], update=False).rewards.tolist() == [4.0]


def test_metrics_are_those_of_the_rewards_that_there_are() -> None:
    rewards = torch.tensor([1.0, math.nan, 4.0, math.inf, 7.0])
    batch, metrics = Lengths().global_post_process_and_metrics({"rewards": rewards})
    assert batch["rewards"] is rewards
    assert metrics == {
        "lengths/num_samples": 5.0, "lengths/num_failed": 2.0, "lengths/mean_reward": 4.0,
        "lengths/std_reward": pytest.approx(math.sqrt(6.0)), "lengths/min_reward": 1.0, "lengths/max_reward": 7.0,
    }  # fmt: skip


def test_what_has_no_reward_leaves_the_loss() -> None:
    given = torch.tensor([1.0, 1.0, 0.0])
    batch: dict[str, Any] = {"rewards": torch.tensor([math.nan, 2.0, 3.0]), "loss_multiplier": given, "other": 1}
    returned, _ = Lengths().global_post_process_and_metrics(batch)
    assert returned is batch
    assert batch["loss_multiplier"].tolist() == [0.0, 1.0, 0.0]
    assert given.tolist() == [1.0, 1.0, 0.0]  # the loop may hold it elsewhere
