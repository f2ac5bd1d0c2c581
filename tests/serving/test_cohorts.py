"""Rollouts that wait for each other: in any order, twice, too few, after their clients have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from treeward.config.served_judge import ServedJudgeConfig
from treeward.scoring.group_rewards import GroupCompletion
from treeward.serving.api_error import APIError
from treeward.serving.cohorts import Cohorts, ComparedPrompt, Rollout

PROMPT = ComparedPrompt(({"role": "user", "content": "2 + 2?"},))


def rollout(text: str, number: int | None = None, **keys: Any) -> Rollout:
    named = {"key": "a", "prompt_digest": "p", "digest": text, "prompt": PROMPT, **keys}
    return Rollout(completion=GroupCompletion(text), number=number, **named)


class Judge:
    """Its rewards are the places at which the rollouts stand, times ten. `groups`: the texts of
    each group. `gate`: what it waits for."""

    cohorts: Cohorts

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        self.groups.append([rollout.completion.answer for rollout in rollouts])
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [10.0 * i for i in range(len(rollouts))]


def run(
    body: Callable[[Judge, Callable[[Rollout], asyncio.Task[float]]], Awaitable[None]], **keys: Any
) -> None:
    """Run a test with a judge, and a function that sends a rollout. It arrives after those that
    were sent before it."""

    async def whole() -> None:
        judge = Judge()
        section = {"model": "m", "num_rollouts_per_prompt": 3, **keys}
        judge.cohorts = Cohorts(ServedJudgeConfig.model_validate(section), judge)
        await body(judge, lambda sent: asyncio.create_task(judge.cohorts.reward(sent)))

    asyncio.run(whole())


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def refusal(task: asyncio.Task[float]) -> tuple[int, str]:
    with pytest.raises(APIError) as caught:
        await task
    return caught.value.status, caught.value.code


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_rollouts_are_judged_by_their_numbers_however_they_arrive(order: Sequence[int]) -> None:
    async def body(judge: Judge, send: Any) -> None:
        tasks = {number: send(rollout(f"text {number}", number)) for number in order}
        assert [await tasks[number] for number in range(3)] == [0, 10, 20]
        assert judge.groups == [["text 0", "text 1", "text 2"]]

    run(body)


@pytest.mark.parametrize("texts", ["abc", "cab", "bca"])
def test_without_numbers_the_order_is_not_that_of_arrival_either(texts: str) -> None:
    async def body(judge: Judge, send: Any) -> None:
        tasks = {text: send(rollout(text)) for text in texts}
        assert [await tasks[text] for text in "abc"] == [0, 10, 20]

    run(body)


def test_without_numbers_equal_responses_are_different_rollouts() -> None:
    async def body(judge: Judge, send: Any) -> None:
        rewards = [await task for task in [send(rollout("a")) for _ in range(3)]]
        assert sorted(rewards) == [0, 10, 20]

    run(body)


def test_a_second_request_for_a_rollout_gets_the_same_reward_and_another_response_is_refused() -> (
    None
):
    async def body(judge: Judge, send: Any) -> None:
        first = send(rollout("a", 0))
        again = send(rollout("a", 0))
        other = send(rollout("b", 0))
        assert await refusal(other) == (409, "conflicting_rollout")
        judge.gate.clear()
        rest = [send(rollout("b", 1)), send(rollout("c", 2))]
        await settle()
        # While the judge thinks: one that is part of the cohort, and one that is not.
        late = send(rollout("a", 0))
        assert await refusal(send(rollout("d", 3))) == (409, "conflicting_rollout")
        judge.gate.set()
        assert [await task for task in (first, again, late, *rest)] == [0, 0, 0, 10, 20]
        assert len(judge.groups) == 1

    run(body)


def test_an_incomplete_cohort_ends_with_an_error_for_all_that_wait_and_can_be_tried_again() -> None:
    async def body(judge: Judge, send: Any) -> None:
        tasks = [send(rollout("a", 0)), send(rollout("b", 1))]
        assert [await refusal(task) for task in tasks] == [(504, "incomplete_cohort")] * 2
        tasks = [send(rollout(text, number)) for number, text in enumerate("xyz")]
        assert [await task for task in tasks] == [0, 10, 20]
        assert judge.groups == [["x", "y", "z"]]

    run(body, cohort_collection_timeout_s=0.05)


def test_a_client_that_leaves_frees_its_place() -> None:
    async def body(judge: Judge, send: Any) -> None:
        gone = send(rollout("gone", 0))
        await settle()
        gone.cancel()
        await settle()
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        assert [await task for task in tasks] == [0, 10, 20]
        assert judge.groups == [["a", "b", "c"]]

    run(body)


def test_one_client_that_leaves_does_not_end_the_judging_and_all_of_them_do() -> None:
    async def body(judge: Judge, send: Any) -> None:
        judge.gate.clear()
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        await settle()
        tasks[0].cancel()
        await settle()
        judge.gate.set()
        assert [await task for task in tasks[1:]] == [10, 20]

        judge.gate.clear()
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        await settle()
        for task in tasks:
            task.cancel()
        await settle()
        judge.gate.set()
        # The place is free at once, and the group is judged again.
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        assert [await task for task in tasks] == [0, 10, 20]
        assert len(judge.groups) == 3

    run(body)


def test_a_group_that_everybody_has_left_is_no_group_for_the_next_rollouts() -> None:
    gate = asyncio.Event()

    async def evaluate(rollouts: Sequence[Rollout]) -> list[float]:
        try:
            await gate.wait()
        finally:
            # As a judge that closes its connections.
            await settle()
        return [1.0] * len(rollouts)

    async def body() -> None:
        section = {"model": "m", "num_rollouts_per_prompt": 2}
        cohorts = Cohorts(ServedJudgeConfig.model_validate(section), evaluate)

        def send(text: str, number: int) -> asyncio.Task[float]:
            return asyncio.create_task(cohorts.reward(rollout(text, number)))

        gone = [send("a", 0), send("b", 1)]
        await settle()
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        gate.set()
        # At once, while the judging still ends.
        assert await asyncio.gather(send("a", 0), send("other", 1)) == [1.0, 1.0]

    asyncio.run(body())


def test_a_judge_that_fails_fails_the_whole_cohort_and_the_next_one_begins_anew() -> None:
    async def body(judge: Judge, send: Any) -> None:
        judge.error = APIError(503, "judge_failed", "down")
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        assert [await refusal(task) for task in tasks] == [(503, "judge_failed")] * 3
        judge.error = ValueError("ours")
        for task in [send(rollout(text, number)) for number, text in enumerate("abc")]:
            with pytest.raises(ValueError, match="ours"):
                await task
        judge.error = None
        tasks = [send(rollout(text, number)) for number, text in enumerate("abc")]
        assert [await task for task in tasks] == [0, 10, 20]

    run(body)


def test_at_the_end_complete_cohorts_are_judged_and_no_other_one_waits() -> None:
    async def body(judge: Judge, send: Any) -> None:
        judge.gate.clear()
        complete = [send(rollout(text, number)) for number, text in enumerate("abc")]
        waiting = send(rollout("d", 0, key="b"))
        await settle()
        judge.cohorts.close()
        assert await refusal(waiting) == (503, "shutting_down")
        assert await refusal(send(rollout("e", 1, key="b"))) == (503, "shutting_down")
        # One that is being judged answers again too.
        complete.append(send(rollout("c", 2)))
        await settle()
        judge.gate.set()
        assert [await task for task in complete] == [0, 10, 20, 20]

    run(body)


def test_cohorts_of_other_keys_do_not_mix() -> None:
    async def body(judge: Judge, send: Any) -> None:
        tasks = []
        for number in range(3):
            for key in "ab":
                tasks.append(send(rollout(f"{key}{number}", number, key=key)))
        assert [await task for task in tasks] == [0, 0, 10, 10, 20, 20]
        assert judge.groups == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]

    run(body)


def test_a_named_cohort_answers_again_and_a_later_attempt_replaces_it() -> None:
    def named(text: str, number: int, attempt: int = 0, **keys: Any) -> Rollout:
        key = f"g::{attempt}"
        return rollout(text, number, key=key, group_id="g", attempt=attempt, **keys)

    async def body(judge: Judge, send: Any) -> None:
        tasks = [send(named(text, number)) for number, text in enumerate("abc")]
        assert [await task for task in tasks] == [0, 10, 20]
        assert await send(named("b", 1)) == 10
        assert await refusal(send(named("z", 1))) == (409, "conflicting_rollout")

        early = send(named("a", 0, attempt=1))
        other_prompt = send(named("b", 1, attempt=1, prompt_digest="q"))
        assert await refusal(other_prompt) == (409, "conflicting_rollout")
        tasks = [send(named(text, number, attempt=2)) for number, text in enumerate("xyz")]
        assert await refusal(early) == (409, "superseded")
        assert await refusal(send(named("a", 0, attempt=1))) == (409, "superseded")
        assert [await task for task in tasks] == [0, 10, 20]
        assert judge.groups == [["a", "b", "c"], ["x", "y", "z"]]

    run(body)


def test_the_judged_cohorts_that_are_kept_are_bounded() -> None:
    async def body(judge: Judge, send: Any) -> None:
        for group in ("g", "h", "g"):
            keys = {"key": group, "group_id": group}
            tasks = [send(rollout(text, number, **keys)) for number, text in enumerate("abc")]
            assert [await task for task in tasks] == [0, 10, 20]
        # `h` pushed `g` out.
        assert len(judge.groups) == 3

    run(body, max_terminal_cohorts=1)
