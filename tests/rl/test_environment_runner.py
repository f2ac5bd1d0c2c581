"""Groups of completions get the rewards that their environments say, each in its place; what is missing is never a
number.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from treeward.config.grpo_run import GRPORunConfig
from treeward.data.preference import Message
from treeward.environments.interface import Environment, Reward
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.rl.environment_runner import (
    EnvironmentRunner,
    GroupRewards,
    environment_metrics,
    make_environment_runner,
)
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.scoring.score import Score

CLOSE = 1e-5
SOON, NEVER = 0.05, 60.0

Judgement = Callable[[str, Mapping[str, Any]], Reward | float | None]


class Toy(Environment):
    """Rewards a text by `judgement`; None is a failure. Notes what it was given."""

    def __init__(self, judgement: Judgement, name: str = "toy") -> None:
        self.judgement, self.name = judgement, name
        self.steps: list[tuple[list[list[Message]], list[dict[str, Any]]]] = []

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.steps.append(([list(c) for c in conversations], [dict(info) for info in env_infos]))
        found = [self.judgement(str(c[-1]["content"]), i) for c, i in zip(conversations, env_infos, strict=True)]
        return [
            one if isinstance(one, Reward) else Reward(one, error="it cannot say" if one is None else None)
            for one in found
        ]


class Lengths(Environment):
    """By its dotted path: the length of the completion, and how many of it were made and shut down."""

    made = 0
    shut = 0

    def __init__(self, section: Mapping[str, Any]) -> None:
        if section.get("fail"):
            raise ConfigError("cannot be made")
        Lengths.made += 1

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return [Reward(float(len(str(conversation[-1]["content"])))) for conversation in conversations]

    def shutdown(self) -> bool:
        Lengths.shut += 1
        return True


class Counting(Environment):
    """Rewards by how many samples it has rewarded; completions tell it to raise, or to wait for `go`."""

    name = "counting"

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.count = self.calls = self.at_once = self.most_at_once = 0
        self.loaded_meanwhile = False

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        texts = {conversation[-1]["content"] for conversation in conversations}
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.count += len(conversations)
        self.begun.set()
        if "explode" in texts:
            raise RuntimeError("out of luck")
        if "wait" in texts:
            assert self.go.wait(NEVER)
        self.at_once -= 1
        return self.evaluation_rewards(conversations, env_infos)

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return [Reward(float(self.count)) for _ in conversations]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded_meanwhile |= self.at_once > 0
        self.count = state["count"]


@pytest.fixture
def hanging() -> Iterator[Counting]:
    environment = Counting()
    yield environment
    environment.go.set()


def metrics_of(found: GroupRewards) -> dict[str, float]:
    return environment_metrics(found.by_environment)


def reasons_of(found: GroupRewards) -> dict[str, int]:
    return dict(Counter(reason for reason, _ in found.failures))


def length(text: str, info: Mapping[str, Any]) -> float:
    return float(len(text))


def group(*texts: str, environment: Any = None, where: str | None = None, **info: Any) -> CompletionGroup:
    """A prompt with completions; one whose text ends in "..." was cut off."""
    chosen = info if environment is None else {**info, "environment": environment}
    prompt = Prompt(({"role": "user", "content": "Say something."},), chosen, where)
    return CompletionGroup(
        prompt, (1, 2), tuple(SampledCompletion((3,), text, truncated=text.endswith("...")) for text in texts)
    )


def rows(values_PG: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(v) else round(v, 5) for v in row] for row in values_PG.tolist()]


def test_one_environment_as_it_is() -> None:
    toy = Toy(length)
    found = EnvironmentRunner({"toy": toy}, {"toy": 1.0}).reward([group("a", "bbb..."), group("cc", "", topic="t")])
    assert rows(found.rewards_PG) == rows(found.raw_PG) == [[1, 6], [2, 0]]
    assert found.rewards_PG.dtype == torch.float32 and not found.failures
    [(conversations, infos)] = toy.steps  # one step for all
    assert [c[-1] for c in conversations] == [{"role": "assistant", "content": t} for t in ("a", "bbb...", "cc", "")]
    assert all(c[0] == {"role": "user", "content": "Say something."} for c in conversations)
    assert infos == [{"truncated": False}, {"truncated": True}] + [{"topic": "t", "truncated": False}] * 2
    assert metrics_of(found) == {
        "toy/num_samples": 4,
        "toy/num_failed": 0,
        "toy/mean_reward": 2.25,
        "toy/std_reward": pytest.approx(math.sqrt(5.1875)),
        "toy/min_reward": 0,
        "toy/max_reward": 6,
    }


def test_raw_is_before_shaping_and_not_a_number_where_nothing_is_known() -> None:
    judgements: dict[str, Reward] = {
        "shaped": Reward(0.5, Score(8.0)),
        "plain": Reward(3.0),
        "only raw": Reward(None, Score(2.0), error="no statistics yet"),
        "nothing": Reward(None, error="it cannot say"),
    }
    runner = EnvironmentRunner({"toy": Toy(lambda text, _: judgements[text])}, {"toy": 2.0})
    found = runner.reward([group(*judgements)])
    assert rows(found.rewards_PG) == [[1, 6, None, None]]
    assert rows(found.raw_PG) == [[16, 6, 4, None]]
    assert found.rewards_PG.isfinite().tolist() == [[True, True, False, False]]
    assert metrics_of(found)["toy/mean_reward"] == 1.75  # the environment's own, without its weight


def test_missing_rewards_are_counted_by_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    judgements = {
        "nan": Reward(math.nan),
        "inf": Reward(-math.inf, Score(math.inf)),
        "none": Reward(None, error="too long"),
        "huge": Reward(1e300),
        "good": Reward(1.0, components={"style": 4.0, "odd": math.nan}),
        "fine": Reward(2.0, components={"style": 6.0}),
    }
    runner = EnvironmentRunner({"toy": Toy(lambda text, _: judgements[text])}, {"toy": 1.0})
    with caplog.at_level(logging.WARNING):
        found = runner.reward([group("good", "nan", "none"), group("none", "inf", "huge", where="rows.jsonl:7")])
    assert rows(found.rewards_PG) == [[1, None, None], [None, None, None]] == rows(found.raw_PG)
    assert list(found.failures) == [
        ("toy: the reward is nan", "prompt 0, completion 1"),
        ("toy: too long", "prompt 0, completion 2"),
        ("toy: too long", "rows.jsonl:7, completion 0"),
        ("toy: the reward is -inf", "rows.jsonl:7, completion 1"),
        ("toy: the reward is 1e+300", "rows.jsonl:7, completion 2"),  # beyond float32
    ]
    assert "5 of 6 completions have no reward: 2 x toy: too long (prompt 0, completion 2)" in caplog.text
    assert metrics_of(found)["toy/num_failed"] == 5 and metrics_of(found)["toy/component/style"] == 4
    assert "toy/component/odd" not in metrics_of(found)
    assert metrics_of(runner.reward([group("good", "fine")]))["toy/component/style"] == 5


MIXED = {"a": Toy(length, "a"), "b": Toy(lambda text, _: None if "?" in text else -1.0, "b")}


@pytest.mark.parametrize(("missing", "last"), [("mask", None), ("renormalise", 4.0)])
def test_mixtures(missing: Any, last: float | None) -> None:
    runner = EnvironmentRunner(MIXED, {"a": 0.5, "b": 1.5}, missing=missing)
    found = runner.reward([group("xx", "yyyy", "?"), group("", "???", "??")])
    # "?" of 1: 0.5 * 1, scaled up by (0.5 + 1.5) / 0.5
    assert rows(found.rewards_PG)[0] == [0.5 * 2 - 1.5, 0.5 * 4 - 1.5, None if last is None else 2.0]
    assert rows(found.rewards_PG)[1] == [-1.5, None if last is None else 6.0, last]
    assert metrics_of(found)["a/num_failed"] == 0 and metrics_of(found)["b/num_failed"] == 3
    assert metrics_of(found)["b/mean_reward"] == -1
    assert reasons_of(found) == ({} if missing == "renormalise" else {"b: it cannot say": 3})


def test_each_prompt_may_choose() -> None:
    a, b, c = Toy(length, "a"), Toy(lambda *_: 100.0, "b"), Toy(lambda *_: 7.0, "c")
    runner = EnvironmentRunner({"a": a, "b": b, "c": c}, {"a": 1.0, "b": 1.0})
    groups = [
        group("x", "yy", environment="a"),
        group("xxx", "y", environment={"b": 0.5, "a": -1}),
        group("x", "y", environment="b"),
        group("x", "yy"),
    ]
    assert rows(runner.reward(groups).rewards_PG) == [[1, 2], [47, 49], [100, 100], [101, 102]]
    [(conversations, infos)] = a.steps
    assert [c[-1]["content"] for c in conversations] == ["x", "yy", "xxx", "y", "x", "yy"]
    assert infos[0] == {"environment": "a", "truncated": False}  # the row as it is
    assert len(b.steps) == 1 and not c.steps  # what no prompt of the step chose is not asked


def test_environments_are_asked_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def meet(*_: Any) -> float:
        meeting.wait()
        return 1.0

    runner = EnvironmentRunner({"a": Toy(meet, "a"), "b": Toy(meet, "b")}, {"a": 1.0, "b": 1.0})
    assert rows(runner.reward([group("x")]).rewards_PG) == [[2]]


def test_an_environment_that_raises_for_once_is_masked_and_its_state_is_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counting = Counting()
    runner = EnvironmentRunner({"counting": counting, "toy": Toy(length)}, {"counting": 1.0})
    runner.reward([group("a", "b")])
    both = [group("a", "b", environment="toy"), group("explode", "b")]
    with caplog.at_level(logging.WARNING):
        found = runner.reward(both)
    assert rows(found.rewards_PG) == [[1, 1], [None, None]]
    assert reasons_of(found) == {"counting: it raised RuntimeError: out of luck": 2}
    assert "Traceback" in caplog.text and metrics_of(found)["counting/num_failed"] == 2
    assert runner.state_dict() == {"counting": {"count": 2}, "toy": {}}
    assert rows(runner.reward([group("a", "b")]).rewards_PG) == [[4, 4]]


@pytest.mark.parametrize("kind", [ConfigError, ModelError, CheckpointError])
def test_an_environment_that_is_wrong_stops_the_run_and_no_state_has_changed(kind: type[ValueError]) -> None:
    def broken(text: str, info: Mapping[str, Any]) -> float:
        if text == "stop":
            raise kind("the model is gone")
        return 0.0

    counting = Counting()
    runner = EnvironmentRunner({"counting": counting, "broken": Toy(broken)}, {"counting": 1.0, "broken": 1.0})
    runner.reward([group("a", "b")])
    with pytest.raises(kind, match="the model is gone"):
        runner.reward([group("stop", "b")])
    assert runner.state_dict()["counting"] == {"count": 2}
    assert rows(runner.reward([group("a", "b")]).rewards_PG) == [[4, 4]]


def test_validation_and_gold_leave_the_state() -> None:
    counting, gold = Counting(), Counting()
    runner = EnvironmentRunner({"counting": counting}, {"counting": 1.0}, gold=gold)
    groups = [group("a", "b"), group("c", "d")]
    runner.reward(groups)
    assert rows(runner.reward(groups, update=False).rewards_PG) == [[4, 4], [4, 4]]
    assert rows(runner.gold(groups)) == [[0, 0], [0, 0]] and runner.has_gold
    assert runner.state_dict() == {"counting": {"count": 4}} and gold.count == 0


def test_the_state_of_a_run_that_goes_on() -> None:
    first = EnvironmentRunner({"counting": Counting(), "toy": Toy(length)}, {"counting": 1.0})
    first.reward([group("a", "b", "c")])
    state = first.state_dict()
    second = EnvironmentRunner({"counting": Counting(), "toy": Toy(length)}, {"counting": 1.0})
    second.load_state_dict(state)
    assert rows(second.reward([group("a", "b")]).rewards_PG) == [[5, 5]] and state["counting"] == {"count": 3}
    second.shutdown()
    second.shutdown()


def values(runner: EnvironmentRunner, *texts: str, timeout: float) -> list[float | None]:
    runner.timeout_seconds = timeout
    return [None if math.isnan(v) else v for v in runner.reward([group(*texts)]).rewards_PG[0].tolist()]


def test_late_completions_are_dropped_and_undone(hanging: Counting, caplog: pytest.LogCaptureFixture) -> None:
    runner = EnvironmentRunner({"hanging": hanging}, {"hanging": 1.0})
    assert values(runner, "a", "b", timeout=NEVER) == [2, 2]
    with caplog.at_level(logging.WARNING):
        assert values(runner, "wait", "b", "c", timeout=SOON) == [None, None, None]
    assert "no rewards within 0.05 seconds" in caplog.text
    assert hanging.begun.wait(NEVER) and hanging.count == 5
    assert runner.state_dict() == {"hanging": {"count": 2}}  # at once, whatever it does
    hanging.go.set()
    assert values(runner, "d", timeout=NEVER) == [3]  # after the late one, of which nothing is left
    assert hanging.calls == 3 and hanging.most_at_once == 1
    assert runner.state_dict() == {"hanging": {"count": 3}} == {"hanging": hanging.state_dict()}


PATH = f"{__name__}.Lengths"


def made(env: Mapping[str, Any], prompts: Sequence[CompletionGroup] = (), **grpo: Any) -> EnvironmentRunner:
    """The runner of a run with this section `env` and these prompts."""
    data = {"train": {"dataset_name": "PromptDataset", "data_path": "prompts.jsonl"}}
    config = GRPORunConfig(policy={"model_name": "m"}, data=data, env=env, grpo=grpo)
    return make_environment_runner(config, [one.prompt for one in prompts])


def test_only_what_is_used_is_made() -> None:
    Lengths.made = Lengths.shut = 0
    section = {
        "here": {"type": PATH},
        "chosen": {"type": PATH, "enabled": True},
        "other": {"type": PATH, "fail": True},
        "length": {"type": PATH},
    }
    choosing = group("x", environment="chosen")
    runner = made(section, [choosing], environments={"here": 2.0}, gold_environment="length")
    assert Lengths.made == 3 and runner.timeout_seconds == 600
    found = runner.reward([group("abc"), choosing])
    assert rows(found.rewards_PG) == [[6], [1]] and rows(runner.gold([group("abc")])) == [[3]]
    assert metrics_of(found)["here_env/num_samples"] == 1
    runner.shutdown()
    assert Lengths.shut == 3
    with pytest.raises(ConfigError, match="cannot be made"):
        made(section, environments={"here": 1.0, "other": 1.0})
    assert Lengths.made == Lengths.shut == 4


@pytest.mark.parametrize(
    ("choice", "grpo", "message"),
    [
        (None, {}, "chooses no environment"),
        ("b", {"environments": ["a"], "gold_environment": "b"}, "rewarded by grpo.gold_environment"),
        ({"a": -1.0, "b": 1.0}, {"environments": ["a"], "missing_rewards": "renormalise"}, "cannot be renormalised"),
    ],
)
def test_a_prompt_that_cannot_be_rewarded_is_named(choice: Any, grpo: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        made(
            {"a": {"type": PATH}, "b": {"type": PATH}}, [group("x", environment=choice, where="rows.jsonl:12")], **grpo
        )
    assert caught.value.where == "rows.jsonl:12"
