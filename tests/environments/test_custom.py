"""Functions of every convention give rewards; what they do wrong costs a sample, never a number."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from environments.conftest import chat, details

from treeward.environments.custom import CustomEnvironment
from treeward.environments.interface import EnvironmentReturn
from treeward.environments.registry import make_environment
from treeward.errors import ConfigError

REWARDS = """
import asyncio
import numpy as np
import torch
from treeward.scoring.score import Reward

def batch(conversations, env_infos, scale=1.0):
    return [scale * len(c[-1]["content"]) + info.get("bonus", 0) for c, info in zip(conversations, env_infos)]

def single(conversation, env_info):
    return {"reward": len(conversation[-1]["content"]), "turns": len(conversation), "note": "text", "nan": float("nan")}

def texts(prompt, response, suffix=""):
    return float(prompt.endswith("?")) + float(response == "4" + suffix)

def trl(completions, answer, **kwargs):
    assert kwargs["prompts"][0][-1]["role"] == "user" and kwargs["missing"] == [None, 1]
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "gsm8k" and extra_info["index"] == 1
    return {"score": float(solution_str == ground_truth) + bonus, "acc": True}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]

def anything(conversation, env_info):
    made = env_info["value"]
    if isinstance(made, BaseException):
        raise made
    return made

def whole(conversations, env_infos, what="list"):
    values = [info["value"] for info in env_infos]
    return {"list": values, "short": values[:1], "text": "ab",
            "reward": Reward(1.0), "error": 1 / 0 if what == "error" else None}[what]

async def slowly(conversation, env_info):
    await asyncio.sleep(0)
    if env_info.get("fail"):
        raise KeyError("lost")
    return 1.0

def hands_on(conversation, env_info):
    return slowly(conversation, env_info) if env_info.get("later") else 0.5

class CustomRewardModel:
    made = 0
    def __init__(self, model_path: str):
        CustomRewardModel.made += 1
        self.model = {"path": model_path}
    def score(self, prompt: str, response: str) -> float:
        return np.float32(len(self.model["path"]) + len(response))

class Predictor:
    def predict(self, prompt, response):
        return torch.tensor(0.5)

class Mute:
    pass
"""


@pytest.fixture
def rewards_file(tmp_path: Path) -> str:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    return str(file)


def step(function: str, chats: list[Any], infos: list[Any], **config: Any) -> EnvironmentReturn:
    return CustomEnvironment({"function": function, **config}).step(chats, infos)


SYSTEM = {"role": "system", "content": "Be brief."}
VERL = [{"data_source": "gsm8k", "ground_truth": truth, "index": 1} for truth in ("4", "5")]


@pytest.mark.parametrize(
    ("function", "kwargs", "chats", "infos", "want"),
    [
        ("batch", {"scale": 2.0}, [chat("abc"), chat("a")], [{"bonus": 1}, {}], [7, 2]),
        ("single", {}, [chat("abc"), chat("a")], [{}, {}], [3, 1]),
        ("texts", {}, [chat("4"), chat("5")], [{}, {}], [2, 1]),
        (
            "trl",
            {},
            [chat("4"), chat("5")],
            [{"answer": "4"}, {"answer": "4", "missing": 1}],
            [1, 0],
        ),
        ("compute_score", {"bonus": 0.5}, [chat("4"), chat("4")], VERL, [1.5, 0.5]),
        ("compute_scores", {}, [chat("4"), chat("4")], VERL, [1, 0]),
        ("Predictor", {}, [chat("4")], [{}], [0.5]),
        ("batch", {}, [chat("4")[:1], chat("4"), []], [{}, {}, {}], [math.nan, 1, math.nan]),
    ],
)
def test_every_convention_gives_rewards(
    rewards_file: str, function: str, kwargs: Any, chats: Any, infos: Any, want: list[float]
) -> None:
    result = step(f"{rewards_file}:{function}", chats, infos, kwargs=kwargs)
    assert result.rewards.tolist() == pytest.approx(want, nan_ok=True)


def test_components_and_prompts_as_text(rewards_file: str) -> None:
    assert details(step(f"{rewards_file}:compute_score", [chat("4")], VERL[:1]), "components") == [
        {"acc": 1}
    ]
    other = Path(rewards_file).with_name("echo.py")
    other.write_text(
        "def echo(prompt, response):\n    return {'score': None, 'error': prompt}\n",
        encoding="utf-8",
    )
    result = step(f"{other}:echo", [chat("4"), [SYSTEM, *chat("4")]], [{}, {}])
    assert details(result, "error") == ["2 + 2?", "system: Be brief.\n\nuser: 2 + 2?"]


def test_the_seeds_class_is_made_once_and_scores(rewards_file: str) -> None:
    environment = CustomEnvironment(
        {"function": f"{rewards_file}:CustomRewardModel", "kwargs": {"model_path": "abc"}}
    )
    for _ in range(2):
        assert environment.step([chat("4"), chat("44")], [{}, {}]).rewards.tolist() == [4, 5]
    (module,) = (m for m in sys.modules.values() if getattr(m, "__file__", "") == rewards_file)
    assert module.CustomRewardModel.made == 1


def test_what_is_no_finite_number_is_no_reward(rewards_file: str) -> None:
    values = [
        math.nan,
        10**400,
        None,
        "1",
        [1.0],
        {"score": math.nan},
        {},
        {"error": "broken"},
        True,
        0,
    ]
    result = step(
        f"{rewards_file}:anything",
        [chat("4")] * len(values),
        [{"value": value} for value in values],
    )
    assert result.rewards.tolist() == pytest.approx([math.nan] * 8 + [1, 0], nan_ok=True)
    errors = details(result, "error")
    assert errors[2] == errors[6] == "the function gave no reward" and errors[7] == "broken"
    assert errors[3] == "the function gave '1', no finite number" and all(errors[:8])


def test_an_exception_costs_its_sample_and_is_logged_once(
    rewards_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    infos = [
        {"value": error} for error in (ValueError("odd\nlines"), 2.0, KeyError("x"), ValueError())
    ]
    with caplog.at_level(logging.DEBUG, logger="treeward.environments"):
        result = step(f"{rewards_file}:anything", [chat("4")] * 4, infos)
    assert details(result, "error") == ["ValueError: odd", None, "KeyError: 'x'", "ValueError"]
    *tracebacks, summary = caplog.records
    assert all(one.levelname == "DEBUG" and one.exc_info is not None for one in tracebacks)
    assert (
        summary.getMessage()
        == "custom_env: 3 of 4 samples have no reward; the first: sample 0: ValueError: odd"
    )


def test_a_batch_that_fails_costs_all_its_samples(rewards_file: str) -> None:
    chats = [chat("4")] * 2
    infos = [{"value": 1}, {"value": None}]
    failed = step(f"{rewards_file}:whole", chats, infos, kwargs={"what": "error"})
    assert details(failed, "error") == ["ZeroDivisionError: division by zero"] * 2
    for what in ("short", "text", "reward"):  # one reward of a batch is not the reward of each
        with pytest.raises(ConfigError, match="one reward per sample"):
            step(f"{rewards_file}:whole", chats, infos, kwargs={"what": what})


@pytest.mark.parametrize("function", ["slowly", "hands_on"])
def test_async_functions_also_inside_a_running_loop(rewards_file: str, function: str) -> None:
    environment = CustomEnvironment({"function": f"{rewards_file}:{function}"})
    infos = [{"later": True}, {"later": True, "fail": True}]

    async def inside() -> EnvironmentReturn:
        return environment.step([chat("4")] * 2, infos)

    assert asyncio.run(inside()).rewards.tolist() == pytest.approx([1, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        ("batch", {}, "not the path of a class or function"),
        ("no_such_module_here:f", {}, "cannot be imported"),
        ("./no_such_file:f", {}, "not the path of a class or function"),
        ("{file}:bach", {}, "did you mean .*:batch"),
        ("{file}:Mute", {}, "no method that scores"),
        ("{file}:CustomRewardModel", {}, "cannot be constructed"),
        ("{file}:batch", {"kwargs": {"scal": 1}}, "cannot be called"),
    ],
)
def test_faulty_paths_and_arguments(
    function: str, config: Any, message: str, rewards_file: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomEnvironment({"function": function.format(file=rewards_file), **config})


def test_a_partial_is_code_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "partial_rewards.py"
    digests = set()
    for number in (1, 2):
        text = f"from functools import partial\ndef n(conversation, env_info, k): return {number}\n"
        file.write_text(f"{text}one = partial(n, k=1)\n", encoding="utf-8")
        digests.add(CustomEnvironment({"function": f"{file}:one"}).user_code)
    assert len(digests) == 2 and "" not in digests


def test_a_function_cannot_change_the_loops_conversation_or_info(tmp_path: Path) -> None:
    file = tmp_path / "greedy.py"
    file.write_text(
        "def clears(conversation, env_info):\n"
        "    for message in conversation:\n"
        "        message.clear()\n"
        "    conversation.clear()\n"
        "    env_info.clear()\n"
        "    return 1.0\n"
    )
    log = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    info = {"ground_truth": "4"}
    environment = make_environment("mine", {"type": "custom", "function": f"{file}:clears"})
    outcome = environment.step([log], [info])
    assert [message["content"] for message in log] == ["2 + 2?", "4"] and info == {
        "ground_truth": "4"
    }
    assert outcome.metadata[0]["ground_truth"] == "4"
    [reward] = environment.rewards([log], [info])
    assert reward.value == 1.0
    assert [message["content"] for message in log] == ["2 + 2?", "4"] and info == {
        "ground_truth": "4"
    }
