"""Groups of completions get the rewards that their environments say, each in its place; what is missing is never a
number.

How environments that hang are contained is in `test_asking.py`.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from signed import write_signed_model
from torch import Tensor

from treeward.data.preference import Message
from treeward.environments.interface import Environment, EnvironmentReturn, Reward
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.rewarding import RewardSource, chosen_names, make_reward_source
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5

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
    """Rewards by how many samples it has rewarded before; raises where a completion says so, after it has counted."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        before = self.count
        self.count += len(conversations)
        for conversation in conversations:
            if conversation[-1]["content"] == "explode":
                raise RuntimeError("out of luck")
        return [Reward(float(before)) for _ in conversations]

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return [Reward(float(self.count)) for _ in conversations]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


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
    found = RewardSource({"toy": toy}, {"toy": 1.0}).reward([group("a", "bbb..."), group("cc", "", topic="t")])
    assert rows(found.rewards_PG) == rows(found.raw_PG) == [[1, 6], [2, 0]]
    assert found.rewards_PG.dtype == torch.float32 and found.known_PG.dtype == torch.bool
    assert bool(found.known_PG.all()) and not found.errors
    [(conversations, infos)] = toy.steps  # one step for all
    assert [c[-1] for c in conversations] == [{"role": "assistant", "content": t} for t in ("a", "bbb...", "cc", "")]
    assert all(c[0] == {"role": "user", "content": "Say something."} for c in conversations)
    assert infos == [{"truncated": False}, {"truncated": True}] + [{"topic": "t", "truncated": False}] * 2
    assert found.metrics == {
        "toy/num_samples": 4,
        "toy/num_failed": 0,
        "toy/mean_reward": 2.25,
        "toy/std_reward": pytest.approx(math.sqrt(5.1875)),
        "toy/min_reward": 0,
        "toy/max_reward": 6,
    }


def test_no_groups() -> None:
    found = RewardSource({"toy": Toy(length)}, {"toy": 1.0}).reward([])
    assert found.rewards_PG.shape == (0, 0) and not found.metrics


def test_what_an_environment_does_to_its_samples_stays_with_it() -> None:
    def spoil(text: str, info: Mapping[str, Any]) -> float:
        info["tests"].append("spoilt")
        return float(len(info["tests"]))

    one = group("a", "b", tests=["x"])
    source = RewardSource({"a": Toy(spoil, "a"), "b": Toy(spoil, "b")}, {"a": 1.0, "b": 10.0})
    assert rows(source.reward([one]).rewards_PG) == [[22, 22]]
    assert one.prompt.info == {"tests": ["x"]}


def test_raw_is_before_shaping_and_not_a_number_where_nothing_is_known() -> None:
    judgements: dict[str, Reward] = {
        "shaped": Reward(0.5, raw=8.0),
        "plain": Reward(3.0),
        "only raw": Reward(None, raw=2.0, error="no statistics yet"),
        "nothing": Reward(None, error="it cannot say"),
    }
    source = RewardSource({"toy": Toy(lambda text, _: judgements[text])}, {"toy": 2.0})
    found = source.reward([group(*judgements)])
    assert rows(found.rewards_PG) == [[1, 6, None, None]]
    assert rows(found.raw_PG) == [[16, 6, 4, None]]
    assert found.known_PG.tolist() == [[True, True, False, False]]
    assert found.metrics["toy/mean_reward"] == 1.75  # the environment's own, without its weight


def test_missing_rewards_are_counted_by_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    judgements = {
        "nan": Reward(math.nan),
        "inf": Reward(-math.inf, raw=math.inf),
        "none": Reward(None, error="too long"),
        "huge": Reward(1e300),
        "good": Reward(1.0, components={"style": 4.0, "odd": math.nan}),
        "fine": Reward(2.0, components={"style": 6.0}),
    }
    source = RewardSource({"toy": Toy(lambda text, _: judgements[text])}, {"toy": 1.0})
    with caplog.at_level(logging.WARNING):
        found = source.reward([group("good", "nan", "none"), group("none", "inf", "huge", where="rows.jsonl:7")])
    assert rows(found.rewards_PG) == [[1, None, None], [None, None, None]] == rows(found.raw_PG)
    assert {reason: (one.count, one.example) for reason, one in found.errors.items()} == {
        "toy: the reward is nan": (1, "prompt 0, completion 1"),
        "toy: too long": (2, "prompt 0, completion 2"),
        "toy: the reward is -inf": (1, "rows.jsonl:7, completion 1"),
        "toy: the reward is inf": (1, "rows.jsonl:7, completion 2"),  # in float32
    }
    assert "5 of 6 completions have no reward: 2 x toy: too long (prompt 0, completion 2)" in caplog.text
    assert found.metrics["toy/num_failed"] == 5 and found.metrics["toy/component/style"] == 4
    assert "toy/component/odd" not in found.metrics
    style = source.reward([group("good", "fine")]).metrics["toy/component/style"]
    assert style == 5


MIXED = {"a": Toy(length, "a"), "b": Toy(lambda text, _: None if "?" in text else -1.0, "b")}


@pytest.mark.parametrize(("missing", "last"), [("mask", None), ("renormalise", 4.0)])
def test_mixtures(missing: Any, last: float | None) -> None:
    source = RewardSource(MIXED, {"a": 0.5, "b": 1.5}, missing=missing)
    found = source.reward([group("xx", "yyyy", "?"), group("", "???", "??")])
    # "?" of 1: 0.5 * 1, scaled up by (0.5 + 1.5) / 0.5
    assert rows(found.rewards_PG)[0] == [0.5 * 2 - 1.5, 0.5 * 4 - 1.5, None if last is None else 2.0]
    assert rows(found.rewards_PG)[1] == [-1.5, None if last is None else 6.0, last]
    assert found.metrics["a/num_failed"] == 0 and found.metrics["b/num_failed"] == 3
    assert found.metrics["b/mean_reward"] == -1
    assert dict.fromkeys(found.errors) == ({} if missing == "renormalise" else {"b: it cannot say": None})


def test_a_sum_that_float32_cannot_hold() -> None:
    source = RewardSource({"a": Toy(lambda *_: 3e38, "a"), "b": Toy(lambda *_: 3e38, "b")}, {"a": 1.0, "b": 1.0})
    found = source.reward([group("x", "y")])
    assert rows(found.rewards_PG) == [[None, None]]
    assert [(reason, one.count) for reason, one in found.errors.items()] == [("the weighted sum is not finite", 2)]


def test_each_prompt_may_choose() -> None:
    a, b, c = Toy(length, "a"), Toy(lambda *_: 100.0, "b"), Toy(lambda *_: 7.0, "c")
    source = RewardSource({"a": a, "b": b, "c": c}, {"a": 1.0, "b": 1.0})
    groups = [
        group("x", "yy", environment="a"),
        group("xxx", "y", environment={"b": 0.5, "a": -1}),
        group("x", "y", environment="b"),
        group("x", "yy"),
    ]
    source.check(one.prompt for one in groups)
    assert rows(source.reward(groups).rewards_PG) == [[1, 2], [47, 49], [100, 100], [101, 102]]
    [(conversations, infos)] = a.steps
    assert [c[-1]["content"] for c in conversations] == ["x", "yy", "xxx", "y", "x", "yy"]
    assert infos[0] == {"environment": "a", "truncated": False}  # the row as it is
    assert len(b.steps) == 1 and not c.steps  # what no prompt of the step chose is not asked
    assert chosen_names((g.prompt for g in groups), {"a": {}, "b": {}}) == ("a", "b")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("reward_modle", "did you mean reward_model"),
        ({"reward_model": 1.0, "judg": 1}, "did you mean judge"),
        ({}, "chooses no environment"),
        (["judge"], "chooses no environment"),
        ({"judge": math.nan}, r"environment\.judge"),
        ({"judge": "1"}, "a finite number"),
        ({"judge": True}, "a finite number"),
        (3, "chooses no environment"),
    ],
)
def test_a_choice_that_cannot_be(choice: Any, message: str) -> None:
    source = RewardSource({"reward_model": Toy(length), "judge": Toy(length)}, {"reward_model": 1.0})
    prompts = [group("a").prompt, group("a", environment=choice, where="rows.jsonl:12").prompt]
    source.check(prompts[:1])
    for check in (source.check, lambda them: chosen_names(them, {"reward_model": {}, "judge": {}})):
        with pytest.raises(DataError, match=message) as caught:
            check(prompts)
        assert caught.value.where == "rows.jsonl:12"
    with pytest.raises(DataError, match=message):
        source.reward([group("a", environment=choice)])


def test_weights_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean judge"):
        RewardSource({"judge": Toy(length)}, {"judgy": 1.0})
    with pytest.raises(ConfigError, match="above 0"):
        RewardSource({"judge": Toy(length)}, {"judge": -1.0}, missing="renormalise")
    choosing = RewardSource({"judge": Toy(length)}, {})
    assert rows(choosing.reward([group("a", environment="judge")]).rewards_PG) == [[1]]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt chooses no environment"):
        choosing.check([group("a", where="rows.jsonl:3").prompt])


def test_order_whoever_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps in which threads interleave at random, against sums by hand."""
    chance = random.Random(5)

    def slow(factor: float) -> Judgement:
        def judge(text: str, info: Mapping[str, Any]) -> float | None:
            time.sleep(random.random() / 1000)
            return None if int(text) % 7 == factor else factor * int(text)

        return judge

    names = {f"e{k}": float(k) for k in range(1, 5)}
    source = RewardSource({name: Toy(slow(k), name) for name, k in names.items()}, {"e1": 1.0})
    for _ in range(6):
        groups, want = [], []
        for _ in range(5):
            weights = {name: chance.choice([0.25, 1.0, 2.0]) for name in chance.sample(sorted(names), 2)}
            texts = [str(chance.randrange(100)) for _ in range(3)]
            groups.append(group(*texts, environment=weights))
            want.append(
                [
                    None
                    if any(int(text) % 7 == names[name] for name in weights)
                    else sum(weight * names[name] * int(text) for name, weight in weights.items())
                    for text in texts
                ]
            )
        assert rows(source.reward(groups).rewards_PG) == want


def test_environments_are_asked_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def meet(*_: Any) -> float:
        meeting.wait()
        return 1.0

    source = RewardSource({"a": Toy(meet, "a"), "b": Toy(meet, "b")}, {"a": 1.0, "b": 1.0})
    assert rows(source.reward([group("x")]).rewards_PG) == [[2]]


def test_an_environment_that_raises_for_once_is_masked_and_its_state_is_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counting = Counting()
    source = RewardSource({"counting": counting, "toy": Toy(length)}, {"counting": 1.0})
    source.reward([group("a", "b")])
    both = [group("a", "b", environment="toy"), group("explode", "b")]
    with caplog.at_level(logging.WARNING):
        found = source.reward(both)
    assert rows(found.rewards_PG) == [[1, 1], [None, None]]
    assert [(reason, one.count) for reason, one in found.errors.items()] == [
        ("counting: it raised RuntimeError: out of luck", 2)
    ]
    assert "Traceback" in caplog.text and found.metrics["counting/num_failed"] == 2
    assert source.state_dict() == {"counting": {"count": 2}, "toy": {}} and counting.count == 2
    assert rows(source.reward([group("a", "b")]).rewards_PG) == [[2, 2]]


@pytest.mark.parametrize("kind", [ConfigError, ModelError, CheckpointError])
def test_an_environment_that_is_wrong_stops_the_run_and_no_state_has_changed(kind: type[ValueError]) -> None:
    def broken(text: str, info: Mapping[str, Any]) -> float:
        if text == "stop":
            raise kind("the model is gone")
        return 0.0

    counting = Counting()
    source = RewardSource({"counting": counting, "broken": Toy(broken)}, {"counting": 1.0, "broken": 1.0})
    source.reward([group("a", "b")])
    with pytest.raises(kind, match="the model is gone"):
        source.reward([group("stop", "b")])
    assert source.state_dict()["counting"] == {"count": 2} and counting.count == 2
    assert rows(source.reward([group("a", "b")]).rewards_PG) == [[2, 2]]


def test_an_environment_that_gives_too_few_stops_the_run() -> None:
    class Short(Toy):
        def step(self, *arguments: Any, **options: Any) -> EnvironmentReturn:
            result = super().step(*arguments, **options)
            return result._replace(rewards=result.rewards[1:], metadata=result.metadata[1:])

    with pytest.raises(ConfigError, match="one reward for each sample"):
        RewardSource({"short": Short(length)}, {"short": 1.0}).reward([group("a", "bb")])


def test_validation_and_gold_leave_the_state() -> None:
    counting, gold = Counting(), Counting()
    source = RewardSource({"counting": counting}, {"counting": 1.0}, gold=gold)
    groups = [group("a", "b"), group("c", "d")]
    source.reward(groups)
    assert rows(source.reward(groups, update=False).rewards_PG) == [[4, 4], [4, 4]]
    assert rows(source.gold(groups)) == [[0, 0], [0, 0]] and source.has_gold
    assert source.state_dict() == {"counting": {"count": 4}} and gold.count == 0
    shared = RewardSource({"counting": counting}, {"counting": 1.0}, gold=counting)
    assert rows(shared.gold([group("a")])) == [[4]] and counting.count == 4
    with pytest.raises(ConfigError, match="no gold environment"):
        RewardSource({"counting": counting}, {"counting": 1.0}).gold(groups)


def test_gold_is_that_of_every_completion_whatever_its_prompt_chose() -> None:
    gold = Toy(lambda text, _: None if text == "?" else 3.0 * len(text), "gold")
    source = RewardSource({"a": Toy(length)}, {"a": 1.0}, gold=gold)
    assert rows(source.gold([group("x", "yy", environment="a"), group("?", "z")])) == [[3, 6], [None, 3]]
    assert source.gold([]).shape == (0, 0)


def test_the_state_of_a_run_that_goes_on() -> None:
    first = RewardSource({"counting": Counting(), "toy": Toy(length)}, {"counting": 1.0})
    first.reward([group("a", "b", "c")])
    state = first.state_dict()
    second = RewardSource({"counting": Counting(), "toy": Toy(length)}, {"counting": 1.0})
    second.load_state_dict(state)
    assert rows(second.reward([group("a", "b")]).rewards_PG) == [[3, 3]] and state["counting"] == {"count": 3}
    with pytest.raises(CheckpointError, match="not the state of these environments"):
        second.load_state_dict({"counting": {"count": 1}})
    assert second.shutdown() and second.shutdown()
    with pytest.raises(ModelError, match="were shut down"):
        second.reward([group("a")])


def test_metrics_of_two_environments_of_one_name_are_told_apart() -> None:
    source = RewardSource({"x": Toy(length), "y": Toy(length)}, {"x": 1.0, "y": 1.0})
    metrics = source.reward([group("a")]).metrics
    assert {"x_env/mean_reward", "y_env/mean_reward"} < metrics.keys()


PATH = f"{__name__}.Lengths"


def test_only_what_is_used_is_made() -> None:
    Lengths.made = Lengths.shut = 0
    section = {
        "here": {"type": PATH},
        "chosen": {"type": PATH, "enabled": True},
        "other": {"type": PATH, "fail": True},
        "off": {"type": PATH, "enabled": False},
        "length": {"type": PATH},
    }
    source = make_reward_source(section, {"here": 2.0}, names=["chosen"], gold="length")
    assert Lengths.made == 3 and source.names == ("here", "chosen") and source.timeout_seconds == 600
    found = source.reward([group("abc"), group("x", environment="chosen")])
    assert rows(found.rewards_PG) == [[6], [1]] and rows(source.gold([group("abc")])) == [[3]]
    assert found.metrics["here_env/num_samples"] == 1
    assert source.shutdown() and Lengths.shut == 3
    one = make_reward_source(section, {"here": 1.0}, gold="here")
    assert Lengths.made == 4 and one.shutdown() and Lengths.shut == 4
    with pytest.raises(ConfigError, match="cannot be made"):
        make_reward_source(section, {"here": 1.0, "other": 1.0})
    assert Lengths.made == 5 == Lengths.shut
    for name, message in (("hree", "did you mean here"), ("off", "switched off")):
        with pytest.raises(ConfigError, match=message):
            make_reward_source(section, {"here": 1.0}, gold=name)
    with pytest.raises(ConfigError, match="cannot be a Ray actor"):
        make_reward_source(section, {"here": 1.0}, on_ray=["here"])


def test_nemo_rls_section_of_mathematics() -> None:
    section = {"math": {"num_workers": 1, "math_verify_impl": "hf_math_verify", "stop_strings": None}}
    source = make_reward_source(section, {"math": 1.0}, timeout_seconds=None)
    half = group(r"So it is \boxed{0.5}.", "It is 2.", "I do not know.", ground_truth="1/2")
    found = source.reward([half, group("7", "8", "9", ground_truth="8", environment="math")])
    assert rows(found.rewards_PG) == [[1, 0, 0], [0, 1, 0]]
    assert found.metrics["math_env/component/correct"] == pytest.approx(1 / 3)
    assert source.reward([group("7")]).errors.keys() == {"math: the sample has no ground_truth or expected_answer"}
    source.shutdown()


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_signed_model(tmp_path_factory.mktemp("rewarding") / "model", tiny_tokenizer, seed=3, max_length=160)


COMPLETIONS = [group("Bread.", "Bread, and a little salt.", "No."), group("Well...", "word " * 300, "Good morning!")]


def scores(model: Path) -> list[list[float | None]]:
    scorer = Scorer.load(str(model), device="cpu", dtype=torch.float32)
    return [[one.score for one in scorer.score(each.conversations, on_error="mask")] for each in COMPLETIONS]


def assert_close(got: Tensor, want: Sequence[Sequence[float | None]]) -> None:
    flat = [math.nan if value is None else value for row in want for value in row]
    assert got.flatten().tolist() == pytest.approx(flat, abs=CLOSE, nan_ok=True)


def test_a_reward_model_gives_the_scorers_numbers(model: Path) -> None:
    shaping = {"normalize_rewards": True, "reward_mean": 0.5, "reward_std": 0.25}
    section = {"reward_model": {"model_name": str(model), "precision": "float32", "reward_shaping": shaping}}
    source = make_reward_source(section, {"reward_model": 1.0})
    found = source.reward(COMPLETIONS)
    want = scores(model)
    assert want[1][1] is None  # too long
    assert_close(found.raw_PG, want)
    assert_close(found.rewards_PG, [[None if s is None else (s - 0.5) / 0.25 for s in row] for row in want])
    assert found.known_PG.tolist() == [[True] * 3, [True, False, True]]
    assert found.metrics["reward_model_env/num_failed"] == 1 and len(found.errors) == 1
    assert source.shutdown()


def test_running_statistics_are_saved(model: Path) -> None:
    shaping = {"normalize_rewards": True, "running": True}
    config = {"model_name": str(model), "precision": "float32", "reward_shaping": shaping}
    source = RewardSource({"reward_model": RewardModelEnvironment(config)}, {"reward_model": 1.0})
    source.reward(COMPLETIONS)
    state = source.state_dict()
    assert state["reward_model"]["reward_shaping"]["running"]["count"] == 5
    want = source.reward(COMPLETIONS)
    resumed = RewardSource({"reward_model": RewardModelEnvironment(config)}, {"reward_model": 1.0})
    resumed.load_state_dict(state)
    assert torch.equal(resumed.reward(COMPLETIONS).rewards_PG.nan_to_num(9.0), want.rewards_PG.nan_to_num(9.0))
    assert resumed.state_dict() == source.state_dict() != state


def test_a_ray_actor(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        running = {"normalize_rewards": True, "running": True}
        own = {"model_name": str(model), "precision": "float32", "cpus_per_replica": 0.5, "reward_shaping": running}
        section = {"reward_model": own, "shape": {"type": "rules", "rule": "regex", "pattern": "[.]$"}}
        weights = {"reward_model": 1.0, "shape": 0.5}
        here = make_reward_source(section, weights)
        there = make_reward_source(section, weights, on_ray=["reward_model"])
        want, found = here.reward(COMPLETIONS), there.reward(COMPLETIONS)
        assert_close(found.rewards_PG, want.rewards_PG.tolist())
        assert_close(found.raw_PG, want.raw_PG.tolist())
        assert found.metrics == pytest.approx(dict(want.metrics), abs=1e-4)
        assert there.state_dict()["reward_model"]["reward_shaping"]["running"]["count"] == 5
        state = there.state_dict()
        there.reward(COMPLETIONS)
        there.load_state_dict(state)
        assert_close(there.reward(COMPLETIONS).rewards_PG, here.reward(COMPLETIONS).rewards_PG.tolist())
        kept = there.state_dict()
        ray.kill(there._askers["reward_model"].environment._handle)  # type: ignore[union-attr]
        with pytest.raises(ModelError, match="actor of the environment is gone"):
            there.reward(COMPLETIONS)
        assert there.state_dict() == kept  # with which the run can be saved
        assert not there.shutdown()
    finally:
        if started:
            ray.shutdown()
