"""The engine with a model that only counts: who is in which batch, what becomes of what fails, and who is forgotten."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from treeward.errors import ModelError
from treeward.scoring.score import Score
from treeward.serving.engine import Engine, Outcome, _tell
from treeward.serving.models import Item, RenderedText, ServedModel
from treeward.serving.queueing import Line, Work
from treeward.serving.refusals import Refusal

TOKENS = 10
BATCH = 20 * TOKENS


class FakeModel:
    """Scores `(prompt, number)` with the number. Each has 10 tokens, 8 of them of its prompt.

    `gate`: what a batch waits for; `fail`: what raises or changes a score, by number.
    """

    num_computed_tokens = 0

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[Any]] = []
        self.started = threading.Semaphore(0)
        self.prepared: list[Any] = []
        self.fail: dict[Any, BaseException | float | Score] = {}
        self.fail_to_prepare: dict[Any, BaseException | str] = {}

    def prepare(self, asked: Sequence[Any]) -> list[Item]:
        items = []
        for prompt, number in asked:
            wrong = self.fail_to_prepare.get(number)
            if isinstance(wrong, BaseException):
                raise wrong
            items.append(Item((prompt, number), TOKENS, 8, hash(prompt), error=wrong))
        self.prepared += [number for _, number in asked]
        return items

    def score(self, items: Sequence[Item]) -> list[Score]:
        self.started.release()
        assert self.gate.wait(30)
        values = [item.prepared[1] for item in items]
        self.batches.append(values)
        scores = []
        for value in values:
            answer = self.fail.get(value, float(value))
            if isinstance(answer, BaseException):
                raise answer
            scores.append(answer if isinstance(answer, Score) else Score(answer, TOKENS))
        return scores

    def cost(self, item: Item, prompts: set[int]) -> int:
        return item.num_tokens - (item.shared_tokens if item.prompt in prompts else 0)


class CountingObserver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def batch(self, model: str, num_conversations: int, num_tokens: int, num_computed: int, seconds: float) -> None:
        self.counts["batches"] += 1

    def outcome(self, model: str, outcome: Outcome) -> None:
        self.counts["scored" if outcome.score.score is not None else "failed"] += 1

    def forgotten(self, model: str, num_conversations: int) -> None:
        self.counts["forgotten"] += num_conversations


@pytest.fixture
def model() -> Iterator[FakeModel]:
    fake = FakeModel()
    yield fake
    fake.gate.set()


@pytest.fixture
def observer() -> CountingObserver:
    return CountingObserver()


@pytest.fixture
def run(model: FakeModel, observer: CountingObserver) -> Callable[..., Any]:
    """Run a coroutine function with an engine of the model, which is closed at the end and must then be empty."""

    def run(story: Callable[[Engine], Coroutine[Any, Any, Any]], **options: Any) -> Any:
        models: Any = options.pop("models", [model])

        async def whole() -> Any:
            engine = Engine(models, observer=observer, **{"batch_tokens": BATCH, **options})
            try:
                return await asyncio.wait_for(story(engine), 60)
            finally:
                model.gate.set()
                await engine.close()
                assert engine.num_queued == 0 and engine._ready_tokens == 0 and not engine._open
                assert not engine._arrived and not engine._waiting

        return asyncio.run(whole())

    return run


def conversations(numbers: Sequence[int], prompt: Any = None) -> list[Any]:
    """Conversations with these numbers as scores; with no prompt each has its own."""
    return [(prompt if prompt is not None else f"own {number}", number) for number in numbers]


async def score(engine: Engine, asked: Sequence[Any], **options: Any) -> list[float | None]:
    outcomes = await engine.score(engine.model(options.pop("name", None)), asked, **options)
    return [outcome.score.score for outcome in outcomes]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.002)


def test_each_request_gets_its_own_scores_in_order(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> Any:
        rows = [random.Random(i).sample(range(1000), i % 7 + 1) for i in range(200)]
        return rows, await asyncio.gather(*(score(engine, conversations(row)) for row in rows))

    rows, scores = run(story)
    assert scores == rows
    assert sum(map(len, model.batches)) == sum(map(len, rows))
    assert max(len(set(batch)) * TOKENS + (len(batch) - len(set(batch))) * 2 for batch in model.batches) <= BATCH


def test_nothing_is_scored_for_no_conversations(run: Any, model: FakeModel) -> None:
    assert run(lambda engine: score(engine, [])) == []
    assert model.batches == []


def test_what_is_queued_goes_in_one_batch(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        first = asyncio.create_task(score(engine, conversations([0])))
        await until(lambda: model.started.acquire(blocking=False))
        rest = [asyncio.create_task(score(engine, conversations([i]))) for i in range(1, 21)]
        await until(lambda: len(model.prepared) == 21)
        model.gate.set()
        await asyncio.gather(first, *rest)

    run(story)
    assert [len(batch) for batch in model.batches] == [1, 20]


@pytest.mark.parametrize("tokens_a_batch", [BATCH, TOKENS], ids=["20 in a batch", "one in a batch"])
def test_a_large_request_does_not_hold_up_a_single_one_behind_it(
    run: Any, model: FakeModel, tokens_a_batch: int
) -> None:
    async def story(engine: Engine) -> int:
        large = asyncio.create_task(score(engine, conversations(range(4096))))
        await until(lambda: len(model.batches) >= 3)
        model.gate.clear()
        await until(lambda: model.started.acquire(blocking=False) and not model.gate.is_set())
        single = asyncio.create_task(score(engine, conversations([-1])))
        await until(lambda: engine.num_queued and -1 in model.prepared)
        before = len(model.batches)
        model.gate.set()
        assert await single == [-1.0]
        return before, large.cancel()

    before, _ = run(story, batch_tokens=tokens_a_batch)
    at = next(i for i, batch in enumerate(model.batches) if -1 in batch)
    assert at - before <= 3, f"{at - before} batches went before it, the one that was running included"


def test_no_stream_of_small_requests_holds_up_a_large_one(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        large = asyncio.create_task(score(engine, conversations(range(100))))

        async def ask_without_end(i: int) -> None:
            while not large.done():
                await score(engine, conversations([-i]))

        await asyncio.gather(large, *(ask_without_end(i) for i in range(1, 101)))

    run(story)
    last = max(i for i, batch in enumerate(model.batches) if any(number >= 0 for number in batch))
    # at least every second batch has a turn of the oldest request, of 8
    assert last <= 2 * math.ceil(100 / 8) + 4


def test_every_second_turn_begins_with_the_oldest() -> None:
    line, model = Line(), FakeModel()

    def work(num_taken: int) -> Work:
        chats: Any = [("prompt", 1)]
        made = Work(model, chats, asyncio.Future(loop=loop), [None], 1, num_taken=num_taken)  # type: ignore[arg-type]
        line.add(made)
        return made

    loop = asyncio.new_event_loop()
    oldest, *small = [work(80), work(0), work(7), work(8)]
    orders = [line.next_works(lambda one: one.num_taken) for _ in range(4)]
    loop.close()
    assert sorted(orders, key=lambda order: order[0] is oldest) == [[*small, oldest]] * 2 + [[oldest, *small]] * 2
    assert (orders[0][0] is oldest) != (orders[1][0] is oldest)


def test_requests_for_another_model_have_their_turn(run: Any, model: FakeModel) -> None:
    other = FakeModel("other")

    async def story(engine: Engine) -> None:
        model.gate.clear()
        large = asyncio.create_task(score(engine, conversations(range(400))))
        await until(lambda: model.started.acquire(blocking=False))
        single = asyncio.create_task(score(engine, conversations([5]), name="other"))
        await until(lambda: other.prepared == [5])
        other.score = lambda items: seen.append(len(model.batches)) or [Score(5.0)]  # type: ignore[method-assign, func-returns-value]
        model.gate.set()
        assert await single == [5.0]
        assert len(await large) == 400

    seen: list[int] = []
    run(story, models=[model, other])
    assert seen in ([1], [2])


def test_one_prompt_of_several_requests_is_in_one_batch(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        first = asyncio.create_task(score(engine, conversations([0])))
        await until(lambda: model.started.acquire(blocking=False))
        # 48 tokens hold 4 conversations with prompts of their own, or two times the 8 + 8 * 2 of those with one prompt
        rows = [conversations([i], prompt=f"prompt {i % 4}") for i in range(1, 33)]
        rest = [asyncio.create_task(score(engine, row)) for row in rows]
        await until(lambda: len(model.prepared) == 33)
        model.gate.set()
        await asyncio.gather(first, *rest)

    run(story, batch_tokens=48)
    prompts = [{number % 4 for number in batch} for batch in model.batches[1:]]
    assert len(prompts) == 2 and all(len(of_batch) == 2 for of_batch in prompts)


def test_tokens_are_made_only_some_batches_ahead(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> int:
        model.gate.clear()
        large = asyncio.create_task(score(engine, conversations(range(4096))))
        await until(lambda: engine._ready_tokens >= 32 * BATCH)
        await asyncio.sleep(0.05)
        ahead = len(model.prepared)
        model.gate.set()
        assert await large == list(range(4096))
        return ahead

    assert 32 * 20 <= run(story) <= 36 * 20 + 64


def test_a_full_queue_refuses(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(score(engine, conversations([i]))) for i in range(10_000)]
        await until(lambda: sum(task.done() for task in tasks) == 9000)
        refused = [task.exception() for task in tasks if task.done()]
        assert all(isinstance(error, Refusal) for error in refused)
        assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}  # type: ignore[union-attr]
        assert all(error.retry_after >= 1 for error in refused)  # type: ignore[union-attr, operator]
        assert engine.num_queued == 1000
        model.gate.set()
        accepted = [task for task in tasks if not task.done()]
        assert await asyncio.gather(*accepted) == [[float(i)] for i in range(1000)]
        assert await score(engine, conversations([7])) == [7.0]

    run(story, max_queued=1000)


def test_a_request_beyond_the_queue_is_taken_if_nothing_waits(run: Any) -> None:
    assert len(run(lambda engine: score(engine, conversations(range(50))), max_queued=10)) == 50


def test_at_the_deadline_work_is_forgotten(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        blocking = asyncio.create_task(score(engine, conversations([-1])))
        await until(lambda: model.started.acquire(blocking=False))
        with pytest.raises(Refusal) as refused:
            await score(engine, conversations(range(300)), deadline=time.monotonic() + 0.05)
        assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
        assert "300 of 300" in refused.value.message
        assert engine.num_queued == 1
        model.gate.set()
        assert await blocking == [-1.0]
        assert await score(engine, conversations([7])) == [7.0]

    run(story)
    assert model.batches == [[-1], [7]]
    assert observer.counts == {"batches": 2, "scored": 2, "forgotten": 300}


def test_a_deadline_that_has_passed_queues_nothing(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        with pytest.raises(Refusal, match="not answered in time"):
            await score(engine, conversations([1]), deadline=time.monotonic() - 1)

    run(story)
    assert model.prepared == []


def test_who_is_cancelled_is_forgotten_and_nobody_else(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        blocking = asyncio.create_task(score(engine, conversations([-1])))
        await until(lambda: model.started.acquire(blocking=False))
        tasks = [asyncio.create_task(score(engine, conversations([i, i]))) for i in range(40)]
        await until(lambda: len(model.prepared) == 81)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        assert await blocking == [-1.0]
        assert await asyncio.gather(*tasks[1::2]) == [[float(i)] * 2 for i in range(1, 40, 2)]

    run(story)
    assert sorted(number for batch in model.batches for number in batch) == [-1, *sorted([*range(1, 40, 2)] * 2)]
    assert observer.counts["forgotten"] == 40 and observer.counts["scored"] == 41


def test_cancelled_while_it_is_scored(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        task = asyncio.create_task(score(engine, conversations([1, 2])))
        await until(lambda: model.started.acquire(blocking=False))
        task.cancel()
        await until(task.done)
        assert engine.num_queued == 0
        model.gate.set()
        assert await score(engine, conversations([3])) == [3.0]

    run(story)
    assert observer.counts["forgotten"] == 2 and observer.counts["scored"] == 1


def test_cancelled_at_random_nothing_leaks(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    """The engine's fixture looks at the end whether it is empty."""
    rng = random.Random(3)

    async def story(engine: Engine) -> tuple[int, int]:
        tasks = []
        for _ in range(600):
            numbers = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
            task = asyncio.create_task(score(engine, conversations(numbers)))
            tasks.append((numbers, task))
            if rng.random() < 0.5:
                asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.002)
        results = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        for (numbers, _), result in zip(tasks, results, strict=True):
            assert result == numbers or isinstance(result, asyncio.CancelledError)
        assert engine.num_queued == 0
        return len(tasks), sum(map(len, (numbers for numbers, _ in tasks)))

    _, num_asked = run(story)
    assert observer.counts["scored"] + observer.counts["forgotten"] == num_asked


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (RuntimeError("device-side assert"), "the server failed: RuntimeError"),
        (MemoryError(), "the server failed: MemoryError"),
        (ModelError("it has no positions left"), "it has no positions left"),
        (SystemExit(1), "the server failed: SystemExit"),
        (BaseException("a panic in native code"), "the server failed: BaseException"),
        (math.nan, "the model gave nan"),
        (-math.inf, "the model gave -inf"),
        (Score(None, TOKENS, error="the score is not finite"), "the score is not finite"),
    ],
    ids=["exception", "memory", "model error", "exit", "panic", "nan", "inf", "masked"],
)
def test_what_fails_fails_alone(run: Any, model: FakeModel, wrong: Any, says: str) -> None:
    model.fail = {13: wrong}

    async def story(engine: Engine) -> list[Outcome]:
        outcomes, others = await asyncio.gather(
            engine.score(engine.model(None), conversations(range(10, 20))), score(engine, conversations(range(5)))
        )
        assert others == list(range(5))
        assert engine.is_alive
        return outcomes

    outcomes = run(story)
    assert [outcome.score.score for outcome in outcomes] == [10, 11, 12, None, 14, 15, 16, 17, 18, 19]
    assert says in (outcomes[3].score.error or "") and not outcomes[3].by_request


@pytest.mark.parametrize(
    ("wrong", "by_request", "says"),
    [
        ("there is no answer to score", True, "there is no answer to score"),
        (KeyError("bug"), False, "the server failed: KeyError"),
        (BaseException("a panic of the tokenizer"), False, "the server failed: BaseException"),
    ],
    ids=["refused", "exception", "panic"],
)
def test_what_cannot_be_prepared_fails_alone(
    run: Any, model: FakeModel, wrong: Any, by_request: bool, says: str
) -> None:
    model.fail_to_prepare = {13: wrong}
    outcomes = run(lambda engine: engine.score(engine.model(None), conversations(range(10, 20))))
    assert [o.score.score for o in outcomes] == [10, 11, 12, None, 14, 15, 16, 17, 18, 19]
    assert says in outcomes[3].score.error and outcomes[3].by_request == by_request


def test_a_wrong_number_of_scores_is_no_score(run: Any, model: FakeModel) -> None:
    model.score = lambda items: [Score(1.0)] * (len(items) + 1)  # type: ignore[method-assign]
    outcomes = run(lambda engine: engine.score(engine.model(None), conversations([1, 2])))
    assert [o.score.score for o in outcomes] == [None, None]
    assert "2 results for 1 conversations" in outcomes[0].score.error


def test_the_threads_outlive_everything(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    """Errors where none can come from: in the engine's own steps, and in the observer."""

    async def story(engine: Engine) -> None:
        take, choose = engine._take_batch, engine._take_unprepared
        failing = {"batch": 2, "prepare": 2}

        def fail(step: str, function: Callable[[], Any]) -> Any:
            if failing[step]:
                failing[step] -= 1
                raise BaseException(step)
            return function()

        engine._take_batch = lambda: fail("batch", take)  # type: ignore[method-assign]
        engine._take_unprepared = lambda: fail("prepare", choose)  # type: ignore[method-assign]
        observer.batch = observer.outcome = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        assert await score(engine, conversations(range(30))) == list(range(30))
        assert engine.is_alive and failing == {"batch": 0, "prepare": 0}

    run(story)


def test_a_model_that_fails_at_everything_is_not_alive(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        model.fail = {2: RuntimeError("this one only")}
        assert await score(engine, conversations([1])) == [1.0]
        assert await score(engine, conversations([2])) == [None]
        await until(lambda: model.batches[-1] == [1])  # it still scores what it has scored before
        assert engine.is_alive
        model.fail = {1: RuntimeError("the device is lost"), 2: RuntimeError("the device is lost")}
        assert await score(engine, conversations([2])) == [None]
        await until(lambda: not engine.is_alive)
        model.fail = {}
        assert await score(engine, conversations([3])) == [3.0]
        await until(lambda: engine.is_alive)

    run(story)


def test_closing_finishes_what_was_accepted(run: Any, model: FakeModel) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(score(engine, conversations([i]))) for i in range(100)]
        await until(lambda: engine.num_queued == 100)
        closing = asyncio.create_task(engine.close(30))
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as refused:
            await score(engine, conversations([1]))
        assert refused.value.status == 503
        model.gate.set()
        assert await closing
        assert await asyncio.gather(*tasks) == [[float(i)] for i in range(100)]
        assert not engine.is_alive

    run(story)


def test_what_is_not_finished_in_time_is_refused(run: Any, model: FakeModel, observer: CountingObserver) -> None:
    async def story(engine: Engine) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(score(engine, conversations([i] * 30))) for i in range(3)]
        await until(lambda: model.started.acquire(blocking=False))
        asyncio.get_running_loop().call_later(0.1, model.gate.set)
        assert not await engine.close(0.05)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [(error.status, error.code) for error in errors] == [(503, "shutting_down")] * 3  # type: ignore[union-attr]

    run(story)
    assert observer.counts["forgotten"] == 90


def test_requests_of_two_event_loops(model: FakeModel) -> None:
    models: Any = [model]
    engine = Engine(models, batch_tokens=BATCH)
    answers: dict[int, Any] = {}

    def ask(start: int) -> None:
        async def all_of_them() -> Any:
            return await asyncio.gather(*(score(engine, conversations([start + i])) for i in range(50)))

        answers[start] = asyncio.run(all_of_them())

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    asyncio.run(engine.close())
    assert answers == {start: [[float(start + i)] for i in range(50)] for start in (0, 1000)}


def test_each_event_loop_is_told_of_its_own() -> None:
    loops = [asyncio.new_event_loop() for _ in range(2)]
    models: Any = FakeModel()
    works = [Work(models, [], loop.create_future(), [], 0) for loop in loops]
    _tell(works, lambda work: work.future.set_result([]))
    for loop, work in zip(loops, works, strict=True):
        assert not work.future.done()  # it is for its loop to do
        assert loop.run_until_complete(asyncio.wait_for(work.future, 5)) == []
        loop.close()


def test_an_unknown_model(run: Any) -> None:
    async def story(engine: Engine) -> None:
        with pytest.raises(Refusal) as refused:
            engine.model("x" * 10**6)
        assert refused.value.status == 404 and len(refused.value.message) < 300

    run(story)


def test_scores_are_those_of_the_scorer_in_any_company(loaded_model: ServedModel, conversations: Any) -> None:
    scorer = loaded_model.scorer
    want = {i: scorer.score([one])[0].score for i, one in enumerate(conversations)}
    texts = [RenderedText(scorer.renderer.render(one)) for one in conversations]

    async def story() -> list[tuple[int, float | None]]:
        engine = Engine([loaded_model], batch_tokens=128)
        rng = random.Random(5)
        chosen = [[rng.randrange(8) for _ in range(rng.randrange(1, 12))] for _ in range(40)]
        asked = [[rng.choice([conversations[i], texts[i]]) for i in row] for row in chosen]
        try:
            scores = await asyncio.gather(*(score(engine, row) for row in asked))
        finally:
            await engine.close()
        return [pair for row, of_row in zip(chosen, scores, strict=True) for pair in zip(row, of_row, strict=True)]

    for i, got in asyncio.run(story()):
        assert got == pytest.approx(want[i], abs=1e-5)


def test_a_prompt_is_computed_once_for_all_requests(loaded_model: ServedModel) -> None:
    prompt = (
        "Tell me, in a few short sentences, why the sky over the sea is blue in the morning, and red at night. " * 2
    )
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for answer in ("A.", "B.", "C.")
    ]
    shared = loaded_model.prepare(chats)[0].shared_tokens
    assert shared >= 32

    async def story() -> list[int]:
        engine = Engine([loaded_model])
        counts = [loaded_model.num_computed_tokens]
        try:
            for chat in chats:  # one after the other, in requests of their own
                await score(engine, [chat])
                counts.append(loaded_model.num_computed_tokens)
        finally:
            await engine.close()
        return [after - before for before, after in zip(counts, counts[1:], strict=False)]

    first, second, third = asyncio.run(story())
    tokens = [item.num_tokens for item in loaded_model.prepare(chats)]
    assert first == tokens[0]
    assert (second, third) == (tokens[1] - shared, tokens[2] - shared)
