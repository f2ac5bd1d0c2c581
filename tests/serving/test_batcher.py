"""The batcher with a model that only counts: who is in which batch, what becomes of failures, and
who is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from messages import chat

from treeward.config.load import load_section
from treeward.config.server import ServerConfig
from treeward.scoring.score import Score
from treeward.scoring.scorer import Prepared, Scorer
from treeward.serving.api_error import APIError
from treeward.serving.batcher import Batcher, FailedScore, ServerMetrics
from treeward.serving.rendered_text import RenderedText

TOKENS = 40
BATCH = 20 * TOKENS


@dataclass(frozen=True, slots=True)
class Asked(Prepared):
    prompt: Any = None
    number: int = 0


class FakeModel:
    """Scores `(prompt, number)` with the number. Each has 40 tokens, 32 of them of its prompt.

    `num_tokens`: of numbers with another cost. `gate`: what a batch waits for; `fail`: what raises
    or changes a score, by number.
    """

    num_computed_tokens = 0
    members = ()

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.num_tokens: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[Any]] = []
        self.started = threading.Semaphore(0)
        self.prepared: list[Any] = []
        self.fail: dict[Any, BaseException | float | Score] = {}
        self.fail_to_prepare: dict[Any, BaseException | str] = {}

    def prepare(self, asked: Sequence[Any], on_error: str) -> list[Prepared]:
        items: list[Prepared] = []
        for prompt, number in asked:
            wrong = self.fail_to_prepare.get(number)
            if isinstance(wrong, BaseException):
                raise wrong
            ids = np.array(
                [zlib.crc32(str(prompt).encode()) >> 1] * 32 + [number] * 8,
                dtype=np.int32,
            )
            items.append(
                Asked(
                    f"{number}",
                    ids,
                    self.num_tokens.get(number, TOKENS),
                    error=wrong,
                    prompt=prompt,
                    number=number,
                ),
            )
        self.prepared += [number for _, number in asked]
        return items

    def prepare_texts(self, texts: Sequence[Any]) -> list[Prepared]:
        assert not texts
        return []

    def score_prepared(self, items: Sequence[Prepared], on_error: str) -> list[Score]:
        self.started.release()
        assert self.gate.wait(600)
        values = [item.number for item in items if isinstance(item, Asked)]
        self.batches.append(values)
        scores = []
        for value in values:
            given = self.fail.get(value, float(value))
            if isinstance(given, BaseException):
                raise given
            scores.append(given if isinstance(given, Score) else Score(given, TOKENS))
        return scores


def make_batcher(scorers: Any, **settings: Any) -> Batcher:
    config = load_section(
        ServerConfig,
        {"models": [{"model": "x"}], "batch_tokens": BATCH, **settings},
        where="server",
    )
    return Batcher(scorers, config, ServerMetrics())


@pytest.fixture
def model() -> Iterator[FakeModel]:
    fake = FakeModel()
    yield fake
    fake.gate.set()


@pytest.fixture
def run(model: FakeModel) -> Callable[..., Any]:
    """Run a coroutine function with a batcher, which is closed at the end and must then be
    empty.
    """

    def run(story: Callable[[Batcher], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
        async def whole() -> Any:
            batcher = make_batcher({model.name: model}, **settings)
            try:
                return await asyncio.wait_for(story(batcher), 60)
            finally:
                model.gate.set()
                await asyncio.to_thread(batcher.close)
                assert batcher.num_queued == 0

        return asyncio.run(whole())

    return run


@pytest.fixture
def score(model: FakeModel) -> Callable[..., Any]:
    """A coroutine function: the scores of conversations."""

    async def score(
        batcher: Batcher,
        asked: Sequence[Any],
        *,
        by: Any = model,
        **options: Any,
    ) -> list[float | None]:
        batcher.scorers[by.name] = by
        return [one.score for one in await batcher.score(by.name, asked, **options)]

    return score


def conversations(numbers: Sequence[int], prompt: Any = None) -> list[Any]:
    """Conversations with these numbers as scores; with no prompt each has its own."""
    return [(prompt if prompt is not None else f"own {number}", number) for number in numbers]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.002)


async def blocked(batcher: Batcher, model: FakeModel, score: Any) -> asyncio.Task[Any]:
    """A request that the model is at, and stays at until its gate opens."""
    model.gate.clear()
    task = asyncio.create_task(score(batcher, conversations([-1])))
    await until(lambda: model.started.acquire(blocking=False))
    return task


def test_each_request_gets_its_own_scores_in_order(run: Any, model: FakeModel, score: Any) -> None:
    async def story(batcher: Batcher) -> Any:
        rows = [random.Random(i).sample(range(1000), i % 7) for i in range(200)]
        return rows, await asyncio.gather(*(score(batcher, conversations(row)) for row in rows))

    rows, scores = run(story)
    assert scores == rows
    assert sum(map(len, model.batches)) == sum(map(len, rows))
    assert max(len(set(batch)) * TOKENS for batch in model.batches) <= BATCH


def test_one_prompt_of_several_requests_is_in_one_batch(
    run: Any,
    model: FakeModel,
    score: Any,
) -> None:
    async def story(batcher: Batcher) -> None:
        first = await blocked(batcher, model, score)
        # 192 tokens hold 4 conversations with prompts of their own, or two times the 32 + 8 * 8 of
        # one prompt.
        rows = [conversations([i], prompt=f"prompt {i % 4}") for i in range(1, 33)]
        remaining = [asyncio.create_task(score(batcher, row)) for row in rows]
        await until(lambda: len(model.prepared) == 33)
        model.gate.set()
        await asyncio.gather(first, *remaining)

    run(story, batch_tokens=192)
    prompts = [{number % 4 for number in batch} for batch in model.batches[1:]]
    assert len(prompts) == 2
    assert all(len(of_batch) == 2 for of_batch in prompts)


def test_a_full_queue_refuses(run: Any, model: FakeModel, score: Any) -> None:
    async def story(batcher: Batcher) -> None:
        with pytest.raises(APIError, match="1001 conversations in one request; at most 1000"):
            await score(batcher, conversations(range(1001)))
        first = await blocked(batcher, model, score)
        tasks = [asyncio.create_task(score(batcher, conversations([i]))) for i in range(3000)]
        await until(lambda: sum(task.done() for task in tasks) == 2001)
        for task in tasks:
            if task.done():
                error = task.exception()
                assert isinstance(error, APIError)
                assert (error.status, error.code) == (429, "queue_full")
                assert error.retry_after is not None
                assert error.retry_after >= 1
        assert batcher.num_queued == 1000
        model.gate.set()
        assert await asyncio.gather(*tasks[:999]) == [[float(i)] for i in range(999)]
        await first

    run(story, max_queued=1000)


@pytest.mark.parametrize("seconds", [0.05, -1.0])
def test_at_the_deadline_a_request_is_forgotten(
    run: Any,
    model: FakeModel,
    score: Any,
    seconds: float,
) -> None:
    async def story(batcher: Batcher) -> None:
        first = await blocked(batcher, model, score)
        with pytest.raises(APIError, match="300 of 300") as error:
            await score(batcher, conversations(range(300)), deadline=time.monotonic() + seconds)
        assert (error.value.status, error.value.code) == (504, "deadline_exceeded")
        assert batcher.num_queued == 1
        model.gate.set()
        assert await first == [-1.0]
        assert await score(batcher, conversations([7])) == [7.0]

    run(story)
    assert model.batches == [[-1], [7]]


@pytest.mark.parametrize(
    ("fault", "wrong", "says"),
    [
        ("fail", RuntimeError("device-side assert"), "the server failed: RuntimeError"),
        ("fail", math.nan, "the model gave nan"),
        ("fail", Score(None, TOKENS, error="the score is not finite"), "the score is not finite"),
        ("fail_to_prepare", "there is no completion to score", "there is no completion to score"),
        (
            "fail_to_prepare",
            BaseException("a panic of the tokenizer"),
            "the server failed: BaseException",
        ),
    ],
    ids=["exception", "nan", "masked", "refused", "panic"],
)
def test_a_failed_conversation_fails_alone_and_is_no_number(
    run: Any,
    model: FakeModel,
    score: Any,
    fault: str,
    wrong: Any,
    says: str,
) -> None:
    setattr(model, fault, {13: wrong})

    async def story(batcher: Batcher) -> list[Score]:
        scores, others = await asyncio.gather(
            batcher.score(model.name, conversations(range(10, 20))),
            score(batcher, conversations(range(5))),
        )
        assert others == list(range(5))
        assert batcher.is_alive
        return scores

    scores = run(story)
    assert [one.score for one in scores] == [10, 11, 12, None, 14, 15, 16, 17, 18, 19]
    assert says in (scores[3].error or "")
    assert isinstance(scores[3], FailedScore) == (not isinstance(wrong, str))


def test_a_model_that_fails_at_everything_is_not_alive(
    run: Any,
    model: FakeModel,
    score: Any,
) -> None:
    async def story(batcher: Batcher) -> None:
        assert await score(batcher, conversations([1])) == [1.0]
        lost = RuntimeError("the device is lost")
        model.fail = {1: lost, 2: lost}
        for _ in range(8):
            assert batcher.is_alive
            assert await score(batcher, conversations([2])) == [None]
        await until(lambda: not batcher.is_alive)
        assert await score(batcher, conversations([3]), by=FakeModel("other")) == [3.0]
        assert not batcher.is_alive  # another model does not make up for it
        assert await score(batcher, conversations([3])) == [3.0]
        await until(lambda: batcher.is_alive)

    run(story)


def test_conversations_that_cannot_be_scored_do_not_make_a_server_unhealthy(
    run: Any,
    model: FakeModel,
    score: Any,
) -> None:
    model.fail = {2: RuntimeError("this conversation is too much"), 4: math.nan}
    model.fail_to_prepare = {6: "the chat template refuses it"}

    async def story(batcher: Batcher) -> None:
        for _ in range(2):  # before it has scored anything, and after
            for number in (2, 4, 6) * 8:
                assert await score(batcher, conversations([number])) == [None]
                assert batcher.is_alive
            assert await score(batcher, conversations([1])) == [1.0]

    run(story)


def test_a_closed_batcher_refuses(run: Any, model: FakeModel, score: Any) -> None:
    async def story(batcher: Batcher) -> None:
        tasks = [
            await blocked(batcher, model, score),
            asyncio.create_task(score(batcher, conversations([1] * 30))),
        ]
        await until(lambda: batcher.num_queued == 31)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        with pytest.raises(APIError, match="shutting down") as error:
            await tasks[1]
        assert (error.value.status, error.value.code) == (503, "shutting_down")
        model.gate.set()
        assert await tasks[0] == [-1.0]
        await closing
        with pytest.raises(APIError, match="shutting down"):
            await score(batcher, conversations([1]))
        assert not batcher.is_alive

    run(story)


def test_scores_are_those_of_the_scorer_in_any_company(
    served_scorer: Scorer,
    conversations: Any,
) -> None:
    scorer = served_scorer
    want = {i: scorer.score([one])[0].score for i, one in enumerate(conversations)}
    texts = [RenderedText(scorer.renderer.render(one)) for one in conversations]
    rng = random.Random(5)
    chosen = []
    asked = []
    for _ in range(40):
        row = [rng.randrange(8) for _ in range(rng.randrange(1, 12))]
        chosen.append(row)
        asked.append([rng.choice([conversations[i], texts[i]]) for i in row])
    batcher = make_batcher({"tiny": served_scorer}, batch_tokens=128)

    async def story() -> list[list[Score]]:
        return await asyncio.gather(*(batcher.score("tiny", row) for row in asked))

    for row, scores in zip(chosen, asyncio.run(story()), strict=True):
        assert [one.score for one in scores] == pytest.approx([want[i] for i in row], abs=1e-5)
    batcher.close()


def test_a_prompt_is_computed_once_for_all_requests(served_scorer: Scorer) -> None:
    prompt = "Tell me, in a few sentences, why the sky is blue at noon, and red at night. " * 2
    chats = [chat(prompt, completion) for completion in ("A.", "B.", "C.")]
    batcher = make_batcher({"tiny": served_scorer}, batch_tokens=4096)
    computed = []
    for one in [*chats, chats[0]]:  # one after the other, in requests of their own
        before = served_scorer.num_computed_tokens
        asyncio.run(batcher.score("tiny", [one]))
        computed.append(served_scorer.num_computed_tokens - before)
    batcher.close()
    rows = [served_scorer.members[0].renderer.encode(one) for one in chats]
    shared = len(os.path.commonprefix(rows))
    assert shared >= 32
    assert computed == [len(rows[0]), len(rows[1]) - shared, len(rows[2]) - shared, 1]
