"""The reward server for ten minutes under valid and hostile traffic: flat memory, and no request
lost or wrong.

    python benchmarks/soak.py [--minutes 10] [--clients 24]

Half of the clients send valid conversations and compare each score with that of the Scorer; the
others send what a server sees on a bad day: cut and malformed JSON, wrong types, NaN, unknown
models, conversations without an answer or far too long, bodies above the limit, bodies that arrive
byte by byte, clients that leave while they wait, deadlines of a millisecond, wrong methods. Every
request must get the status that is documented for it. It prints a line every fifteen seconds, and
exits with 1 if a valid request failed or was wrong, a hostile one got another status, or the memory
of the second half rose by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
from common import VOCAB_SIZE, build
from scoring import load_prompts
from serving import Chat, started_server

from treeward.data.rendering import Renderer
from treeward.data.tokenizers import train_tokenizer
from treeward.model.export import export_model
from treeward.scoring.golden import sign_exported
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5
MAX_BODY = 2**20
Hostile = Callable[[httpx.AsyncClient, Chat], Awaitable[httpx.Response]]


class Tally:
    """What came back."""

    def __init__(self) -> None:
        self.valid = self.refused_for_now = 0
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []


async def _valid(
    client: httpx.AsyncClient, chats: list[Chat], scores: list[float], end: float, tally: Tally
) -> None:
    rng = random.Random(id(client))
    while time.monotonic() < end:
        chosen = rng.sample(range(len(chats)), rng.choice((1, 1, 1, 2, 8)))
        answer = await client.post(
            "/v1/rewards", json={"conversations": [chats[i] for i in chosen]}
        )
        if answer.status_code == 429:
            tally.refused_for_now += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            continue
        if answer.status_code != 200:
            tally.problems.append(f"a valid request got {answer.status_code}: {answer.text[:200]}")
            continue
        for i, row in zip(chosen, answer.json()["data"], strict=True):
            if abs(row["score"] - scores[i]) > CLOSE:
                tally.problems.append(
                    f"conversation {i} has the score {row['score']}, not {scores[i]}"
                )
        tally.valid += 1


async def _hostile(client: httpx.AsyncClient, chats: list[Chat], end: float, tally: Tally) -> None:
    rng = random.Random(id(client) + 1)
    while time.monotonic() < end:
        name = rng.choice(list(HOSTILE))
        documented, send = HOSTILE[name]
        try:
            answer = await send(client, rng.choice(chats))
        except httpx.HTTPError as error:
            # A server may close a connection whose body it will not read; nothing else may be cut.
            if name not in ("too large", "left"):
                tally.problems.append(f"{name}: {type(error).__name__} {error}")
            tally.statuses[f"{name} closed"] += 1
            continue
        tally.statuses[f"{name} {answer.status_code}"] += 1
        if answer.status_code not in documented:
            tally.problems.append(
                f"{name}: got {answer.status_code}, documented {documented}: {answer.text[:200]}"
            )


def _post(make: Callable[[Chat], bytes]) -> Hostile:
    async def send(client: httpx.AsyncClient, chat: Chat) -> httpx.Response:
        return await client.post(
            "/v1/rewards", content=make(chat), headers={"content-type": "application/json"}
        )

    return send


def _body(chat: object, **more: object) -> bytes:
    return json.dumps({"conversations": [chat], **more}).encode()


async def _leave(client: httpx.AsyncClient, chat: Chat) -> httpx.Response:
    body = json.dumps({"conversations": [chat] * 64}).encode()
    return await client.post("/v1/rewards", content=body, timeout=httpx.Timeout(5.0, read=0.02))


async def _byte_by_byte(client: httpx.AsyncClient, chat: Chat) -> httpx.Response:
    async def pieces() -> object:
        for piece in (b'{"conversations": ', json.dumps([chat]).encode(), b"}"):
            yield piece
            await asyncio.sleep(0.3)

    return await client.post("/v1/rewards", content=pieces())  # type: ignore[arg-type]


async def _wrong_method(client: httpx.AsyncClient, chat: Chat) -> httpx.Response:
    return await client.request("DELETE", "/v1/rewards")


HOSTILE: dict[str, tuple[tuple[int, ...], Hostile]] = {
    "cut": ((422,), _post(lambda chat: _body(chat)[:-7])),
    "not JSON": ((422,), _post(lambda chat: b"\xff\xfe\x00 hello")),
    "NaN": ((422,), _post(lambda chat: _body(chat)[:-1] + b', "x": NaN}')),
    "wrong type": ((422,), _post(lambda chat: _body({"role": "user"}))),
    "no answer": ((422,), _post(lambda chat: _body(chat[:1]))),
    "no conversations": ((422,), _post(lambda chat: b"{}")),
    "unknown model": ((404,), _post(lambda chat: _body(chat, model="another"))),
    "too long": (
        (422,),
        _post(lambda chat: _body([chat[0], {"role": "assistant", "content": "word " * 20_000}])),
    ),
    "too large": (
        (413,),
        _post(lambda chat: _body([{"role": "user", "content": "x" * 4 * MAX_BODY}])),
    ),
    "slow": ((200, 429), _byte_by_byte),
    "left": ((200, 429), _leave),
    "wrong method": ((405,), _wrong_method),
}


async def _soak(
    port: int, pid: int, chats: list[Chat], scores: list[float], minutes: float, clients: int
) -> Tally:
    tally = Tally()
    end = time.monotonic() + 60 * minutes
    process = psutil.Process(pid)
    memory: list[tuple[float, float]] = []
    url = f"http://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            for _ in range(clients)
        ]
        tasks: list[asyncio.Task[None]] = []
        for n, client in enumerate(opened):
            if n % 2 == 0:
                requests = _valid(client, chats, scores, end, tally)
            else:
                requests = _hostile(client, chats, end, tally)
            tasks.append(asyncio.create_task(requests))
        while time.monotonic() < end:
            await asyncio.sleep(min(15.0, max(end - time.monotonic(), 0.1)))
            memory.append((time.monotonic(), process.memory_info().rss / 2**20))
            print(
                f"{memory[-1][1]:7.0f} MiB  {tally.valid} valid  "
                f"{sum(tally.statuses.values())} hostile  "
                f"{tally.refused_for_now} refused for now  {len(tally.problems)} problems",
                flush=True,
            )
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                tally.problems.append(f"a client broke: {result!r}")
    half = [size for at, size in memory if at > end - 30 * minutes]
    if half and max(half) > 1.05 * half[0]:
        tally.problems.append(
            f"the memory rose from {half[0]:.0f} to {max(half):.0f} MiB in the second half"
        )
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    arguments = parser.parse_args()
    _, prompts = load_prompts()
    tokenizer = train_tokenizer(
        (text for prompt, texts in prompts for text in (prompt, *texts)), vocab_size=VOCAB_SIZE
    )
    chats = []
    for prompt, texts in prompts[:40]:
        if len(prompt) >= 2000:
            continue
        question = {"role": "user", "content": prompt}
        for text in texts[:8]:
            if text:
                chats.append([question, {"role": "assistant", "content": text[:800]}])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "soak"
        model = build("xs", tokenizer).eval()
        renderer = Renderer(tokenizer, max_length=2048)
        export_model(model, tokenizer, folder, chat_template=renderer.chat_template)
        sign_exported(folder, model=model, renderer=renderer)
        scores = [score.score or 0.0 for score in Scorer.load(folder).score(chats)]
        options = [f"max_body_bytes={MAX_BODY}", "max_queued=2000", "prefix_cache_bytes=50000000"]
        with started_server(folder, *options) as (port, pid):
            tally = asyncio.run(
                _soak(port, pid, chats, scores, arguments.minutes, arguments.clients)
            )
    for name, count in sorted(tally.statuses.items()):
        print(f"{count:8d}  {name}")
    for problem, count in Counter(tally.problems).most_common(20):
        print(f"PROBLEM  {count} x {problem}")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
