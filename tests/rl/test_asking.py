"""An environment that hangs costs its samples their rewards, never the run its state; what it says later is dropped."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from treeward.data.preference import Message
from treeward.environments.interface import Environment, Reward
from treeward.errors import ModelError
from treeward.rl.asking import Asker
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.rewarding import RewardSource

SOON, NEVER = 0.05, 60.0


class Hanging(Environment):
    """Counts its samples and then waits for `go`, if the completions say "wait"; notes how many ask it at once."""

    name = "hanging"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.count = self.calls = self.at_once = self.most_at_once = 0
        self.fails_to_load = self.loaded_meanwhile = False

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.count += len(conversations)
        self.begun.set()
        if any(conversation[-1]["content"] == "wait" for conversation in conversations):
            assert self.go.wait(NEVER)
        self.at_once -= 1
        return [Reward(float(self.count)) for _ in conversations]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.fails_to_load:
            raise OSError("no room")
        self.loaded_meanwhile |= self.at_once > 0
        self.count = state["count"]


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    environment = Hanging()
    yield environment
    environment.go.set()


def group(*texts: str) -> CompletionGroup:
    return CompletionGroup(
        Prompt(({"role": "user", "content": "?"},)), (1,), tuple(SampledCompletion((2,), t, False) for t in texts)
    )


def values(source: RewardSource, *texts: str, timeout: float) -> list[float | None]:
    source.timeout_seconds = timeout
    return [None if math.isnan(v) else v for v in source.reward([group(*texts)]).rewards_PG[0].tolist()]


def ended(source: RewardSource) -> None:
    """Wait for the threads that were given up."""
    for asker in source._askers.values():
        if asker._last is not None:
            asker._last.join(NEVER)
            assert not asker._last.is_alive()


def test_late_completions_are_dropped_and_undone(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    source = RewardSource({"hanging": hanging}, {"hanging": 1.0})
    assert values(source, "a", "b", timeout=NEVER) == [2, 2]
    with caplog.at_level(logging.WARNING):
        assert values(source, "wait", "b", "c", timeout=SOON) == [None, None, None]
    assert "no rewards within 0.05 seconds" in caplog.text
    assert hanging.begun.wait(NEVER) and hanging.count == 5
    assert source.state_dict() == {"hanging": {"count": 2}}  # at once, whatever it does
    hanging.go.set()
    assert values(source, "d", timeout=NEVER) == [3]  # after the late one, of which nothing is left
    assert hanging.calls == 3 and hanging.most_at_once == 1
    assert source.state_dict() == {"hanging": {"count": 3}} == {"hanging": hanging.state_dict()}


def test_a_question_that_was_given_up_before_it_began_is_never_asked(hanging: Hanging) -> None:
    source = RewardSource({"hanging": hanging}, {"hanging": 1.0})
    values(source, "wait", timeout=SOON)
    assert hanging.begun.wait(NEVER)
    assert values(source, "b", timeout=SOON) == [None]
    hanging.go.set()
    ended(source)
    assert hanging.calls == 1 and hanging.count == 0


def test_after_some_hangs_in_succession_the_run_stops(hanging: Hanging) -> None:
    source = RewardSource({"hanging": hanging}, {"hanging": 1.0}, max_hangs=3)
    assert values(source, "a", timeout=NEVER) == [1]
    values(source, "wait", timeout=SOON)
    values(source, "b", timeout=SOON)
    with pytest.raises(ModelError, match="the environment hanging hangs") as caught:
        values(source, "c", timeout=SOON)
    assert "3 steps in succession" in str(caught.value)
    assert source.state_dict() == {"hanging": {"count": 1}}
    hanging.go.set()
    assert values(source, "d", timeout=NEVER) == [2]
    hanging.go.clear()
    assert values(source, "wait", timeout=SOON) == [None]  # counted from the start again


def test_the_others_keep_their_rewards(hanging: Hanging) -> None:
    quick = Hanging()
    source = RewardSource({"hanging": hanging, "quick": quick}, {"hanging": 1.0}, timeout_seconds=1.0)
    chosen = CompletionGroup(
        Prompt(({"role": "user", "content": "?"},), {"environment": "quick"}), (1,), group("x").completions
    )
    found = source.reward([group("wait"), chosen])
    assert found.known_PG.tolist() == [[False], [True]] and found.rewards_PG[1].tolist() == [1]
    assert found.metrics["hanging_env/num_failed"] == 1 and found.metrics["quick_env/num_failed"] == 0
    assert [one.count for one in found.errors.values()] == [1]
    assert source.state_dict() == {"hanging": {"count": 0}, "quick": {"count": 1}}


def test_a_state_that_is_loaded_meanwhile_is_what_it_goes_on_from(hanging: Hanging) -> None:
    source = RewardSource({"hanging": hanging}, {"hanging": 1.0})
    values(source, "wait", timeout=SOON)
    assert hanging.begun.wait(NEVER)
    source.load_state_dict({"hanging": {"count": 40}})
    assert source.state_dict() == {"hanging": {"count": 40}}
    hanging.go.set()
    assert values(source, "a", timeout=NEVER) == [41] and not hanging.loaded_meanwhile


def test_an_interrupt_leaves_the_state(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Hanging()
    source = RewardSource({"quick": quick, "hanging": hanging}, {"quick": 1.0, "hanging": 1.0})

    def interrupted(self: Asker, question: Any, deadline: float | None) -> Any:
        if self.name == "hanging":
            raise KeyboardInterrupt
        return outcome(self, question, deadline)

    outcome = Asker.outcome
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Asker, "outcome", interrupted)
        quick.go.set()  # so that its step is done, and counted, when the interrupt comes
        values(source, "wait", timeout=NEVER)
    hanging.go.set()
    ended(source)
    assert quick.calls == 1
    assert quick.count == 0 == hanging.count
    assert source.state_dict() == {"quick": {"count": 0}, "hanging": {"count": 0}}


def test_a_state_that_cannot_be_brought_back_stops_the_run(hanging: Hanging) -> None:
    class Failing(Hanging):
        def rewards(self, *samples: Any) -> list[Reward]:
            super().rewards(*samples)
            raise RuntimeError("out of luck")

    failing = Failing()
    source = RewardSource({"failing": failing}, {"failing": 1.0})
    assert values(source, "a", timeout=NEVER) == [None] and failing.count == 0
    failing.fails_to_load = True
    with pytest.raises(ModelError, match="cannot go back to the state"):
        values(source, "a", timeout=NEVER)


def test_an_environment_that_hangs_does_not_hang_the_shutdown(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Hanging):
        def shutdown(self) -> bool:
            return self.go.wait(NEVER)

    stuck = Stuck()
    with caplog.at_level(logging.WARNING):
        assert not Asker("stuck", stuck).shutdown(SOON)
    assert "stuck did not shut down" in caplog.text
    stuck.go.set()
    assert Asker("stuck", stuck).shutdown(NEVER)


def test_a_shutdown_that_fails_is_said_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Hanging):
        def shutdown(self) -> bool:
            raise OSError("no such pipe")

    with caplog.at_level(logging.WARNING):
        assert not Asker("failing", Failing()).shutdown(NEVER)
    assert "failing did not shut down: OSError: no such pipe" in caplog.text
