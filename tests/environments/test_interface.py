"""A step is NeMo RL's, what has no reward is no number, and the metrics are those of the rewards
that there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from environments.conftest import Lengths, chat

from treeward.environments.interface import DETAILS, EnvironmentReturn
from treeward.environments.registry import make_environment
from treeward.errors import DataError


def test_a_step_returns_six_fields_in_nemo_rls_order() -> None:
    result = Lengths().step([chat("four"), chat("fail")], [{"minus": 1.5, "id": 7}, None])
    observations, metadata, next_stop_strings, rewards, terminateds, answers = result
    assert result._fields == EnvironmentReturn._fields
    assert observations == [
        {"role": "environment", "content": f"Environment: {value}"} for value in (2.5, None)
    ]
    assert next_stop_strings == [None, None]
    assert rewards.dtype == torch.float32 and rewards.shape == (2,)
    assert rewards[0] == 2.5 and math.isnan(rewards[1])
    assert terminateds.dtype == torch.bool and terminateds.tolist() == [True, True]
    assert answers == ["four", "fail"]
    assert metadata[0] == {
        "minus": 1.5, "id": 7, DETAILS: {"raw": 4.0, "components": {"length": 4.0}, "error": None},
    }  # fmt: skip
    assert metadata[1] == {DETAILS: {"raw": None, "components": {}, "error": "it says fail"}}
    assert Lengths().step([chat("four"), chat("five")], []).rewards.shape == (2,), (
        "NeMo RL's test gives no env_infos"
    )


def test_what_is_no_log_raises() -> None:
    for log in (None, "text", ["text"], 3):
        with pytest.raises(DataError, match="sample 1: the message log is not a list of messages"):
            Lengths().step([chat("four"), log], [None, None])  # type: ignore[list-item]
    assert Lengths().step([np.array(chat("sixsix"), dtype=object)], []).rewards.tolist() == [6.0]


def test_there_is_one_env_info_for_each_log() -> None:
    logs = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]] * 2
    with pytest.raises(DataError, match="not one env_info for each") as raised:
        make_environment("math", {}).reward(logs, [{"ground_truth": "4"}])
    assert raised.value.got == "2 message logs and 1 env_infos"
