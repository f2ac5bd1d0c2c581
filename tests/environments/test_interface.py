"""A step is NeMo RL's, what has no reward is no number, and the metrics are those of the rewards that there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from environments.conftest import Lengths, chat, details, numbers

from treeward.environments.interface import (
    DETAILS,
    EnvironmentReturn,
)


def test_a_step_returns_six_fields_in_nemo_rls_order() -> None:
    result = Lengths().step([chat("four"), chat("fail")], [{"minus": 1.5, "id": 7}, None])
    observations, metadata, next_stop_strings, rewards, terminateds, answers = result
    assert result._fields == EnvironmentReturn._fields
    assert observations == [{"role": "environment", "content": f"Environment: {value}"} for value in (2.5, None)]
    assert next_stop_strings == [None, None]
    assert rewards.dtype == torch.float32 and rewards.shape == (2,)
    assert rewards[0] == 2.5 and math.isnan(rewards[1])
    assert terminateds.dtype == torch.bool and terminateds.tolist() == [True, True]
    assert answers == ["four", "fail"]
    assert metadata[0] == {
        "minus": 1.5, "id": 7, DETAILS: {"raw": 4.0, "components": {"length": 4.0}, "error": None},
    }  # fmt: skip
    assert metadata[1] == {DETAILS: {"raw": None, "components": {}, "error": "it says fail"}}
    assert Lengths().step([chat("four"), chat("five")], []).rewards.shape == (2,), "NeMo RL's test gives no env_infos"


def test_what_is_no_sample_costs_its_own_reward_only() -> None:
    logs: list[Any] = [chat("four"), None, "text", ["text"], 3, np.array(chat("sixsix"), dtype=object), chat("x")]
    infos: list[Any] = [{"id": 0}, {"id": 1}, None, {}, {}, {}, "info"]
    result = Lengths().step(logs, infos)
    assert numbers(result) == [4.0, None, None, None, None, 6.0, None]
    errors = details(result, "error")
    assert errors[1] == "the message log is not a list of messages (got: 'None')"
    assert all("not a list of messages" in error for error in errors[1:5])
    assert "env_info is not a mapping" in errors[6]
    assert [metadata.get("id") for metadata in result.metadata[:2]] == [0, 1]
    assert result.answers[:2] == ["four", None]
