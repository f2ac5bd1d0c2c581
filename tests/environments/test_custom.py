"""Functions of every convention give rewards; what they do wrong costs a sample, never a number."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from treeward.environments.custom import CustomEnvironment
from treeward.environments.interface import DETAILS, EnvironmentReturn
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

def trl_strict(prompts, completions):
    return [None if len(p) > 1 else 1.0 for p in prompts]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "gsm8k" and extra_info["index"] == 1
    return {"score": float(solution_str == ground_truth) + bonus, "acc": True}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]

def unclear(x, y):
    return 1.0

def anything(conversation, env_info):
    made = env_info["value"]
    if isinstance(made, BaseException):
        raise made
    return made

def whole(conversations, env_infos, what="list"):
    values = [info["value"] for info in env_infos]
    return {"list": values, "tensor": torch.tensor([1.0, 2.0]), "short": values[:1], "text": "ab",
            "reward": Reward(1.0), "error": 1 / 0 if what == "error" else None}[what]

running = 0
most = 0
async def slowly(conversation, env_info):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02)
    running -= 1
    if env_info.get("fail"):
        raise KeyError("lost")
    return 1.0

def hands_on(conversation, env_info):
    return slowly(conversation, env_info) if env_info.get("later") else 0.5

def hands_on_all(conversations, env_infos):
    return slowly_all(conversations, env_infos)

async def slowly_all(conversations, env_infos):
    await asyncio.sleep(0)
    return [2.0] * len(conversations)

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

CONSTANT = 3
"""


@pytest.fixture
def rewards_file(tmp_path: Path) -> str:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    return str(file)


def chat(completion: Any, *earlier: dict[str, Any]) -> list[dict[str, Any]]:
    return [*earlier, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": completion}]


def step(function: str, chats: list[Any], infos: list[Any], **config: Any) -> EnvironmentReturn:
    return CustomEnvironment({"function": function, **config}).step(chats, infos)


def test_once_per_step(rewards_file: str) -> None:
    result = step(f"{rewards_file}:batch", [chat("abc"), chat("a")], [{"bonus": 1}, {}], kwargs={"scale": 2.0})
    assert result.rewards.tolist() == [7, 2]


def test_prompt_and_response(rewards_file: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert step(f"{rewards_file}:texts", [chat("4"), chat("5")], [{}, {}]).rewards.tolist() == [2, 1]
    assert step(f"{rewards_file}:texts", [chat("4!")], [{}], kwargs={"suffix": "!"}).rewards.tolist() == [2]
    code = "def echo(prompt, response):\n    return {'score': None, 'error': prompt}\n"
    other = Path(rewards_file).with_name("echo.py")
    other.write_text(code, encoding="utf-8")
    result = step(f"{other}:echo", [chat("4"), chat("4", system)], [{}, {}])
    assert [m[DETAILS]["error"] for m in result.metadata] == ["2 + 2?", "system: Be brief.\n\nuser: 2 + 2?"]


def test_the_seeds_class_is_made_once_and_scores(rewards_file: str) -> None:
    environment = CustomEnvironment({"function": f"{rewards_file}:CustomRewardModel", "kwargs": {"model_path": "abc"}})
    for _ in range(2):
        assert environment.step([chat("4"), chat("44")], [{}, {}]).rewards.tolist() == [4, 5]
    assert sys.modules["treeward_custom_my_rewards"].CustomRewardModel.made == 1
    assert step(f"{rewards_file}:Predictor", [chat("4")], [{}]).rewards.tolist() == [0.5]


def test_trls_functions(rewards_file: str) -> None:
    infos = [{"answer": "4"}, {"answer": "4", "missing": 1}]
    assert step(f"{rewards_file}:trl", [chat("4"), chat("5")], infos).rewards.tolist() == [1, 0]
    longer = chat("5", {"role": "system", "content": "x"})
    result = step(f"{rewards_file}:trl_strict", [chat("4"), longer], infos)
    assert result.rewards[0] == 1 and math.isnan(result.rewards[1])


def test_verls_functions(rewards_file: str) -> None:
    infos = [{"data_source": "gsm8k", "ground_truth": truth, "index": 1} for truth in ("4", "5")]
    chats = [chat("4"), chat("4")]
    result = step(f"{rewards_file}:compute_score", chats, infos, kwargs={"bonus": 0.5})
    assert result.rewards.tolist() == [1.5, 0.5]
    assert result.metadata[0][DETAILS]["components"] == {"acc": 1}
    assert step(f"{rewards_file}:compute_scores", chats, infos).rewards.tolist() == [1, 0]


def test_what_is_no_finite_number_is_no_reward(rewards_file: str) -> None:
    values = [math.nan, 10**400, None, "1", [1.0], {"score": math.nan}, {}, {"error": "broken"}, True, 0]
    result = step(f"{rewards_file}:anything", [chat("4")] * len(values), [{"value": value} for value in values])
    assert [math.isnan(reward) for reward in result.rewards.tolist()] == [True] * 8 + [False] * 2
    assert result.rewards.tolist()[8:] == [1, 0]
    errors = [metadata[DETAILS]["error"] for metadata in result.metadata]
    assert errors[2] == errors[6] == "the function gave no reward" and errors[7] == "broken"
    assert errors[3] == "the function gave '1', no finite number" and all(errors[:8])


def test_an_exception_costs_its_sample_and_is_logged_once(rewards_file: str, caplog: pytest.LogCaptureFixture) -> None:
    infos = [{"value": error} for error in (ValueError("odd\nlines"), 2.0, KeyError("x"), ValueError())]
    with caplog.at_level(logging.DEBUG, logger="treeward.environments"):
        result = step(f"{rewards_file}:anything", [chat("4")] * 4, infos)
    assert [metadata[DETAILS]["error"] for metadata in result.metadata] == [
        "ValueError: odd",
        None,
        "KeyError: 'x'",
        "ValueError",
    ]
    *tracebacks, summary = caplog.records
    assert all(one.levelname == "DEBUG" and one.exc_info is not None for one in tracebacks)
    assert summary.getMessage() == "custom_env: 3 of 4 samples have no reward; the first: sample 0: ValueError: odd"


def test_a_batch_that_fails_costs_all_its_samples(rewards_file: str) -> None:
    chats, infos = [chat("4")] * 2, [{"value": 1}, {"value": None}]
    one, none = step(f"{rewards_file}:whole", chats, infos).rewards.tolist()
    assert one == 1 and math.isnan(none)
    assert step(f"{rewards_file}:whole", chats, infos, kwargs={"what": "tensor"}).rewards.tolist() == [1, 2]
    failed = step(f"{rewards_file}:whole", chats, infos, kwargs={"what": "error"})
    assert [m[DETAILS]["error"] for m in failed.metadata] == ["ZeroDivisionError: division by zero"] * 2
    for what in ("short", "text", "reward"):  # one reward of a batch is not the reward of each
        with pytest.raises(ConfigError, match="one reward per sample"):
            step(f"{rewards_file}:whole", chats, infos, kwargs={"what": what})


def test_async_functions_also_inside_a_running_loop(rewards_file: str) -> None:
    environment = CustomEnvironment({"function": f"{rewards_file}:slowly", "max_concurrency": 3})

    async def inside() -> EnvironmentReturn:
        return environment.step([chat("4")] * 9, [{}] * 8 + [{"fail": True}])

    result = asyncio.run(inside())
    assert result.rewards.tolist()[:8] == [1] * 8 and math.isnan(result.rewards[8])
    assert sys.modules["treeward_custom_my_rewards"].most == 3
    assert step(f"{rewards_file}:slowly_all", [chat("4")] * 2, [{}, {}]).rewards.tolist() == [2, 2]


def test_a_function_that_returns_an_awaitable_is_awaited(rewards_file: str) -> None:
    infos = [{"later": True}, {}, {"later": True, "fail": True}]
    one, other, none = step(f"{rewards_file}:hands_on", [chat("4")] * 3, infos).rewards.tolist()
    assert (one, other) == (1, 0.5) and math.isnan(none)
    assert step(f"{rewards_file}:hands_on_all", [chat("4")] * 2, [{}, {}]).rewards.tolist() == [2, 2]


def test_a_conversation_without_a_completion_is_not_shown_to_the_function(rewards_file: str) -> None:
    result = step(f"{rewards_file}:batch", [chat("4")[:1], chat("4"), []], [{}, {}, {}])
    assert [math.isnan(reward) for reward in result.rewards.tolist()] == [True, False, True]
    assert step(f"{rewards_file}:batch", [], []).rewards.shape == (0,)


def test_a_function_cannot_change_what_the_loop_goes_on_with(tmp_path: Path) -> None:
    file = tmp_path / "rude.py"
    file.write_text("def f(conversation, env_info):\n    env_info.clear()\n    conversation.clear()\n    return 1\n")
    result = step(f"{file}:f", [chat("4")], [{"ground_truth": "4"}])
    assert result.metadata[0]["ground_truth"] == "4" and result.answers == ["4"]


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        ("batch", {}, "not the path of a class or function"),
        ("no_such_module_here:f", {}, "cannot be imported"),
        ("no/such/file.py:f", {}, "does not exist"),
        ("{file}:bach", {}, "did you mean .*:batch"),
        ("{file}:CONSTANT", {}, "not a function or class"),
        ("{file}:Mute", {}, "no method that scores"),
        ("builtins:print", {}, "fit no known signature"),
        ("{file}:CustomRewardModel", {}, "cannot be constructed"),
        ("{file}:batch", {"kwargs": {"scal": 1}}, "cannot be called"),
        ("{file}:single", {"signature": "conversations", "kwargs": {"x": 1}}, "cannot be called"),
    ],
)
def test_faulty_paths_and_arguments(function: str, config: Any, message: str, rewards_file: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomEnvironment({"function": function.format(file=rewards_file), **config})
