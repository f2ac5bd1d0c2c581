"""A reward model as an environment in this process: rewards are the Scorer's, shaped; failures are
never numbers."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environments.conftest import details
from messages import chat

from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError
from treeward.model.contract import RewardCalibration, write_contract
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5


LOGS = [
    chat(question, answer)
    for question in (
        "What is bread?",
        "And why is it that so many people like it, all over the world?",
    )
    for answer in ("Flour.", "Flour, water, salt and time.", "I do not know." * 4, "")
] + [[*chat("Hi", "Hello!"), *chat("Bye", "Goodbye.")]]
INFOS: list[dict[str, Any]] = [{} for _ in LOGS]


@pytest.fixture(scope="module")
def scores(folder: str) -> list[float]:
    """What the Scorer says of each of `LOGS`, alone."""
    scorer = Scorer.load(folder, device="cpu")
    return [scorer.score([log])[0].score or math.nan for log in LOGS]


def make(folder: str | list[str], **keys: Any) -> RewardModelEnvironment:
    return RewardModelEnvironment({"model_name": folder} | keys)


def test_the_metrics_of_a_batch_and_the_precision_of_the_weights(folder: str) -> None:
    """`tests/documents/test_nemo_gym_rlhf.py` has the section of the guide and the fields of a
    step."""
    environment = make(folder, precision="bfloat16", batch_size=32)
    rewards = environment.step(LOGS, INFOS).rewards
    want = Scorer.load(folder, device="cpu", dtype=torch.bfloat16).score(LOGS)
    assert rewards.tolist() == pytest.approx([s.score for s in want], abs=CLOSE)
    batch, metrics = environment.global_post_process_and_metrics(
        {"rewards": rewards, "message_log": LOGS}
    )
    values = {
        "num_samples": len(LOGS),
        "num_failed": 0,
        "mean_reward": rewards.mean(),
        "min_reward": rewards.min(),
    }
    values |= {"std_reward": np.std(rewards.numpy()), "max_reward": rewards.max()}
    assert batch["rewards"] is rewards
    assert metrics == pytest.approx(
        {f"reward_model_env/{name}": float(value) for name, value in values.items()}
    )
    assert environment.shutdown()
    assert environment.shutdown()  # safe to repeat
    assert environment.shutdown()  # safe to repeat


def test_a_spread_is_a_component_that_is_no_reward(spread_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(spread_folder, tmp_path / "other")
    models = [str(spread_folder), str(other)]
    environment = make(models, ensemble={"method": "mean", "standardize": False})
    [reward] = environment.rewards([LOGS[0]], INFOS[:1])
    # Nothing is learnt from a component with a slash, nor does a report say that it fell.
    assert set(reward.components) == {"member_0", "member_1", "score/spread"}


def test_what_cannot_be_scored_is_masked_and_counted(
    folder: str, scores: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    environment = make(folder, max_model_len=60)
    bad: list[Any] = [[], LOGS[0][:1], chat("word " * 80, "Short."), [{"role": "assistant"}]]
    with caplog.at_level(logging.WARNING, logger="treeward"):
        step = environment.step([LOGS[0], *bad, LOGS[1]], [{"id": i} for i in range(6)])
    assert step.rewards[[0, 5]].tolist() == pytest.approx(scores[:2], abs=CLOSE)
    assert bool(step.rewards[1:5].isnan().all())
    reasons = details(step, "error")
    assert reasons[0] is None and reasons[5] is None and all(reasons[1:5])
    assert "no completion" in str(reasons[2]) and "too long" in str(reasons[3])
    assert [metadata["id"] for metadata in step.metadata] == list(range(6))
    assert "4 of 6 samples have no reward" in caplog.text
    batch, metrics = environment.global_post_process_and_metrics(
        {"rewards": step.rewards, "loss_multiplier": torch.ones(6)}
    )
    assert batch["loss_multiplier"].tolist() == [1, 0, 0, 0, 0, 1]
    assert metrics["reward_model_env/num_failed"] == 4
    assert metrics["reward_model_env/mean_reward"] == pytest.approx(sum(scores[:2]) / 2, abs=CLOSE)


def test_the_constants_are_those_of_the_contract(
    make_folder: Callable[..., str], scores: list[float]
) -> None:
    name = make_folder()
    with pytest.raises(ConfigError, match="treeward calibrate"):
        make(name, reward_shaping={"normalize_rewards": True})
    calibration = RewardCalibration.model_validate({"normalization": {"mean": 0.25, "std": 0.5}})
    contract = sign_folder(Path(name))
    write_contract(contract.model_copy(update={"calibration": calibration}), Path(name))
    want = ((np.array(scores) - 0.25) / 0.5).clip(-5, 5).tolist()
    step = make(name, reward_shaping={"normalize_rewards": True}).step(LOGS, INFOS)
    assert step.rewards.tolist() == pytest.approx(want, abs=1e-4)
    assert make(name).step(LOGS, INFOS).rewards.tolist() == pytest.approx(scores, abs=CLOSE)


@pytest.mark.gpu
def test_offloaded_weights_are_on_the_gpu_for_a_step_only(folder: str, scores: list[float]) -> None:
    environment = make(folder, dtensor_cfg={"cpu_offload": True})
    model = environment.reward_model_policy
    seen: list[str] = []
    model.hf.register_forward_pre_hook(lambda *_: seen.append(model.device.type))
    model.backbone.register_forward_pre_hook(lambda *_: seen.append(model.device.type))
    assert model.device.type == "cpu"
    assert environment.step(LOGS, INFOS).rewards.tolist() == pytest.approx(scores, abs=1e-4)
    assert model.device.type == "cpu" and set(seen) == {"cuda"}
