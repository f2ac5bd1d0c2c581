"""Groups of completions get the rewards that their environments say; what is missing is never a
number."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_section
from treeward.data.conversation import Message
from treeward.environments.interface import Environment, Reward
from treeward.errors import ConfigError, DataError, ModelError
from treeward.rl.environment_runner import (
    EnvironmentRunner,
    GroupRewards,
    environment_metrics,
    make_environment_runner,
)
from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion
from treeward.scoring.score import Score

Conversations = Sequence[Sequence[Message]]
Infos = Sequence[Mapping[str, Any]]


class Toy(Environment):
    """Rewards a text by `judgement`; None is a failure. Notes what it was given."""

    def __init__(
        self, judgement: Callable[[str], Reward | float | None], name: str = "toy"
    ) -> None:
        self.judgement, self.name = judgement, name
        self.steps: list[tuple[Conversations, Infos]] = []

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        self.steps.append((conversations, env_infos))
        rewards = []
        for conversation in conversations:
            value = self.judgement(str(conversation[-1]["content"]))
            if isinstance(value, Reward):
                rewards.append(value)
            elif value is None:
                rewards.append(Reward(None, error="it cannot say"))
            else:
                rewards.append(Reward(value))
        return rewards


class Lengths(Environment):
    """By its dotted path: the length of the completion."""

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        return [
            Reward(float(len(str(conversation[-1]["content"])))) for conversation in conversations
        ]


def length(text: str) -> float:
    return float(len(text))


def group(
    *texts: str, environment: Any = None, where: str | None = None, **info: Any
) -> CompletionGroup:
    """A prompt with completions; one whose text ends in "..." was cut off."""
    chosen = info if environment is None else {**info, "environment": environment}
    prompt = Prompt(({"role": "user", "content": "Say something."},), chosen, where)
    completions = (SampledCompletion((3,), text, truncated=text.endswith("...")) for text in texts)
    return CompletionGroup(prompt, (1, 2), tuple(completions))


def rows(found: GroupRewards | Tensor) -> list[list[float | None]]:
    """The rewards as lists, rounded; None for none."""
    values_PG = found.rewards_PG if isinstance(found, GroupRewards) else found

    def shown(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 5)

    return [list(map(shown, row)) for row in values_PG.tolist()]


def metrics_of(found: GroupRewards) -> dict[str, float]:
    return environment_metrics([found])


def test_one_environment_as_it_is() -> None:
    toy = Toy(length)
    found = EnvironmentRunner({"toy": toy}, "toy").reward(
        [group("a", "bbb..."), group("cc", "", topic="t")]
    )
    assert rows(found) == rows(found.raw_PG) == [[1, 6], [2, 0]]
    assert found.rewards_PG.dtype == torch.float32 and not found.failures
    [(conversations, infos)] = toy.steps  # one step for all
    assert {conversation[-1]["role"] for conversation in conversations} == {"assistant"}
    completions = [conversation[-1]["content"] for conversation in conversations]
    assert completions == ["a", "bbb...", "cc", ""]
    assert all(c[0] == {"role": "user", "content": "Say something."} for c in conversations)
    assert (
        infos
        == [{"truncated": False}, {"truncated": True}] + [{"topic": "t", "truncated": False}] * 2
    )
    std = pytest.approx(math.sqrt(5.1875))
    want = {
        "num_samples": 4,
        "num_failed": 0,
        "mean_reward": 2.25,
        "std_reward": std,
        "min_reward": 0,
        "max_reward": 6,
    }
    assert metrics_of(found) == {f"toy/{name}": value for name, value in want.items()}


def test_missing_rewards_are_counted_and_raw_is_before_shaping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judgements = {
        "shaped": Reward(0.5, Score(8.0)),
        "nan": Reward(math.nan),
        "raw": Reward(None, Score(2.0), error="too long"),
        "inf": Reward(-math.inf, Score(math.inf)),
        "huge": Reward(1e300),  # beyond float32
        "good": Reward(1.0, components={"style": 4.0, "odd": math.nan}),
    }
    runner = EnvironmentRunner({"toy": Toy(judgements.__getitem__)}, "toy")
    with caplog.at_level(logging.WARNING):
        found = runner.reward(
            [group("shaped", "nan", "raw"), group("good", "inf", "huge", where="rows.jsonl:7")]
        )
    assert rows(found) == [[0.5, None, None], [1, None, None]] and rows(found.raw_PG) == [
        [8, None, 2],
        [1, None, None],
    ]
    assert list(found.failures) == [
        ("toy: the reward is nan", "prompt 0, completion 1"),
        ("toy: too long", "prompt 0, completion 2"),
        ("toy: the reward is -inf", "rows.jsonl:7, completion 1"),
        ("toy: the reward is 1e+300", "rows.jsonl:7, completion 2"),
    ]
    assert (
        "4 of 6 completions have no reward: 1 x toy: the reward is nan (prompt 0, completion 1)"
        in caplog.text
    )
    assert (
        metrics_of(found)["toy/num_failed"] == 4 and metrics_of(found)["toy/component/style"] == 4
    )
    assert metrics_of(found)["toy/mean_reward"] == 0.75
    assert "toy/component/odd" not in metrics_of(found)


def test_each_prompt_may_choose_and_environments_are_asked_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=600)

    def meet(text: str) -> float:
        meeting.wait()
        return float(len(text))

    a = Toy(meet, "a")
    b = Toy(meet, "b")
    c = Toy(lambda _: 7.0, "c")
    runner = EnvironmentRunner({"a": a, "b": b, "c": c}, "a")
    assert rows(runner.reward([group("x", environment="b"), group("xx")])) == [[1], [2]]
    assert [c[-1]["content"] for c in b.steps[0][0]] == ["x"]
    assert b.steps[0][1][0] == {"environment": "b", "truncated": False}  # the row as it is
    assert len(a.steps) == 1 and not c.steps  # what no prompt of the step chose is not asked


@pytest.mark.parametrize("kind", [RuntimeError, ConfigError, ModelError])
def test_an_environment_that_raises(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """One that is wrong itself stops the run; any other error counts for once."""

    def broken(text: str) -> float:
        if text == "explode":
            raise kind("out of luck")
        return 0.0

    runner = EnvironmentRunner({"a": Toy(broken, "a"), "b": Toy(broken, "b")}, "a")
    both = [group("x", "y", environment="b"), group("explode", "y")]
    if kind is RuntimeError:
        found = runner.reward(both)
        assert rows(found) == [[0, 0], [None, None]] and metrics_of(found)["a/num_failed"] == 2
        assert {reason for reason, _ in found.failures} == {
            "a: it raised RuntimeError: out of luck"
        }
        assert "Traceback" in caplog.text
    else:
        with pytest.raises(kind, match="out of luck"):
            runner.reward(both)
    assert rows(runner.reward([group("x", "y")])) == [[0, 0]]  # it goes on


PATH = f"{__name__}.Lengths"


def made(
    env: Mapping[str, Any], prompts: Sequence[CompletionGroup], **grpo: Any
) -> EnvironmentRunner:
    """The runner of a run with this section `env` and these prompts."""
    data = {"train": {"dataset_name": "PromptDataset", "data_path": "prompts.jsonl"}}
    values = {"policy": {"model_name": "m"}, "data": data, "env": dict(env), "grpo": grpo}
    config = load_section(GRPORunConfig, values, where="run")
    return make_environment_runner(config, [one.prompt for one in prompts])


@pytest.mark.parametrize(
    ("choice", "grpo", "message"),
    [
        (None, {}, "chooses no environment"),
        ("b", {"gold_environment": "b"}, "rewarded by grpo.gold_environment"),
    ],
)
def test_a_prompt_that_cannot_be_rewarded_is_named(
    choice: Any, grpo: dict[str, Any], message: str
) -> None:
    section = {name: {"type": PATH} for name in "ab"}
    with pytest.raises(DataError, match=message) as caught:
        made(section, [group("x", environment=choice, where="rows.jsonl:12")], **grpo)
    assert caught.value.where == "rows.jsonl:12"


@pytest.mark.parametrize("given", [1, 3])
def test_rewards_of_another_number_than_the_samples_end_the_run(given: int) -> None:
    """Which sample each belongs to would be a guess."""

    class Miscounts(Toy):
        def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
            return [Reward(1.0)] * given

    runner = EnvironmentRunner({"toy": Miscounts(length)}, "toy")
    with pytest.raises(ConfigError, match=f"gives {given} rewards for 2 samples"):
        runner.reward([group("a", "bb")])


def test_an_environment_that_cannot_be_shut_down_leaves_no_other_open() -> None:
    ended = []

    class Ends(Toy):
        def shutdown(self) -> None:
            ended.append(self.name)
            if self.name == "b":
                raise OSError("the worker is gone")

    environments = {name: Ends(len, name) for name in "abc"}
    with pytest.raises(OSError, match="the worker is gone"):
        EnvironmentRunner(environments, "a").shutdown()
    assert sorted(ended) == ["a", "b", "c"]
