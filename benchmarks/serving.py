"""The reward server under load, against scoring in the process (its limit) and a server that takes
one at a time.

    python benchmarks/serving.py [--size xs|s|m|l] [--requests 192] [--rounds 3] [--connections 1 8 32 128]
    python benchmarks/serving.py --model results/real_demo/model/final --vllm .venv-vllm/bin

Each request holds one conversation, over loopback, as rollouts are scored while they finish. Two
kinds of traffic of real answers (alpaca_eval): every conversation with a prompt of its own, and
eight answers to each prompt. The limit is `Scorer.score` on the same conversations in one call. The
peer is what people write by hand: FastAPI, transformers, one forward pass a request, under a lock.
`--replicas N` adds our server with N replicas, and `--vllm` a vLLM whose binaries lie in that
folder, with `/classify`, in float32 and for 2,048 tokens. In every round each variant has the same
conversations, new to that round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import SIZES, VOCAB_SIZE, build, median_ratio, use_device
from scoring import load_prompts

from treeward.data.rendering import Renderer
from treeward.data.tokenizers import train_tokenizer
from treeward.model.export import export_model
from treeward.scoring.golden import sign_exported
from treeward.scoring.scorer import Scorer
from treeward.tables import Column, results_table

Chat = list[dict[str, str]]
Taken = tuple[float, list[float], list[float]]
"""Seconds for all requests, seconds of each, and the scores."""

COLUMNS = [
    Column("traffic"),
    Column("variant"),
    Column("connections"),
    Column("rate", title="requests / s", format=".1f"),
    Column("limit", title="of the limit", format=".0%"),
    Column("peer", title="x one at a time", format=".2f"),
    Column("p50", title="p50 ms", format=".0f"),
    Column("p99", title="p99 ms", format=".0f"),
    Column("difference", title="largest difference", format=".1e"),
]


def main() -> None:
    arguments = parse()
    if arguments.peer is not None:
        _serve_peer(Path(arguments.peer))
        return
    use_device("cpu")
    data, prompts = load_prompts(str(arguments.model or arguments.size))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or _export(
            Path(temporary) / arguments.size, arguments.size, prompts
        )
        scorer = Scorer.load(folder)
        name = f"Qwen3 {arguments.size}" if arguments.model is None else str(folder)
        print(f"{data}, {name}, {torch.get_num_threads()} threads, {arguments.requests} requests\n")
        for answers in (1, 8):
            traffic = [
                _traffic(prompts, answers, arguments.requests, n)
                for n in range(arguments.rounds + 1)
            ]
            print(
                results_table(_measure(scorer, folder, traffic, answers, arguments), COLUMNS),
                flush=True,
            )


def _export(folder: Path, size: str, prompts: list[Any]) -> Path:
    texts = (text for prompt, answers in prompts for text in (prompt, *answers))
    tokenizer = train_tokenizer(texts, vocab_size=VOCAB_SIZE)
    model = build(size, tokenizer).eval()
    renderer = Renderer(tokenizer, max_length=2048)
    export_model(model, tokenizer, folder, chat_template=renderer.chat_template)
    sign_exported(folder, model=model, renderer=renderer)
    return folder


def _measure(
    scorer: Scorer,
    folder: Path,
    traffic: list[list[Chat]],
    answers: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    connections = arguments.connections
    replicas = arguments.replicas
    seconds: dict[tuple[str, int], list[float]] = {}
    latencies: dict[tuple[str, int], list[float]] = {}
    differences: dict[tuple[str, int], float] = {}
    variants = [
        ("in the process", 0),
        ("one at a time", 8),
        *(("treeward serve", level) for level in connections),
    ]
    peer_command = [sys.executable, __file__, "--peer", str(folder)]
    with ExitStack() as servers:
        ours, _ = servers.enter_context(started_server(folder))
        peer, _ = servers.enter_context(_started(peer_command, r"on http://127\.0\.0\.1:(\d+)"))
        ports = {"treeward serve": ours, "one at a time": peer}
        if replicas > 1:
            name = f"{replicas} replicas"
            ports[name], _ = servers.enter_context(started_server(folder, f"replicas={replicas}"))
            variants += [(name, level) for level in connections]
        if arguments.vllm is not None:
            ports["vLLM"] = servers.enter_context(_vllm(arguments.vllm, folder))
            variants += [("vLLM", level) for level in connections]
        for number, chats in enumerate(traffic):
            for name, level in variants:
                # marked, so that no variant finds the prompts of another in the prefix cache
                marked = [_marked(chat, f"{name} {level}") for chat in chats]
                if level:
                    took, waited, scores = asyncio.run(
                        _load(ports[name], marked, level, is_vllm=name == "vLLM")
                    )
                else:
                    took, waited, scores = _score(scorer, marked)
                if number == 0:  # it warms up, and shows that the scores are the same
                    wanted = _score(scorer, marked)[2]
                    differences[name, level] = max(
                        abs(a - b) for a, b in zip(scores, wanted, strict=True)
                    )
                else:
                    seconds.setdefault((name, level), []).append(took)
                    latencies.setdefault((name, level), []).extend(waited)
            sys.stderr.write(f"\rround {number} of {len(traffic) - 1} ")
    sys.stderr.write("\n")
    rows = []
    for (name, level), spent in seconds.items():
        in_order = sorted(latencies[name, level])
        rows.append(
            {
                "traffic": "a prompt each" if answers == 1 else f"{answers} answers a prompt",
                "variant": name,
                "connections": level or None,
                "rate": len(traffic[0]) / sorted(spent)[len(spent) // 2],
                "limit": median_ratio(seconds["in the process", 0], spent),
                "peer": median_ratio(seconds["one at a time", 8], spent),
                "p50": 1000 * in_order[len(in_order) // 2] if level else None,
                "p99": 1000 * in_order[int(0.99 * len(in_order))] if level else None,
                "difference": differences.get((name, level)),
            }
        )
    return rows


def _score(scorer: Scorer, chats: list[Chat]) -> Taken:
    started = time.perf_counter()
    scores = []
    for score in scorer.score(chats):
        scores.append(math.nan if score.score is None else score.score)
    return time.perf_counter() - started, [0.0], scores


def _traffic(prompts: list[Any], answers: int, requests: int, number: int) -> list[Chat]:
    """Conversations of one round; the mark in their first message makes them new."""
    chats: list[Chat] = []
    for n in range(len(prompts)):
        prompt, texts = prompts[(n + 7 * number) % len(prompts)]
        if len(chats) + answers > requests:
            break
        if len(texts) >= answers and 100 < len(prompt) + len(texts[0]) < 2000:
            question = {"role": "user", "content": f"[{number}] {prompt}"}
            chats += [
                [question, {"role": "assistant", "content": text[:1500]}]
                for text in texts[:answers]
            ]
    return chats


def _marked(chat: Chat, mark: str) -> Chat:
    return [chat[0] | {"content": f"({mark}) {chat[0]['content']}"}, *chat[1:]]


async def _load(port: int, chats: list[Chat], connections: int, *, is_vllm: bool = False) -> Taken:
    """Every connection sends its next request after an answer."""
    path = b"/v1/rewards"
    bodies = [json.dumps({"conversations": [chat]}).encode() for chat in chats]
    if is_vllm:
        path = b"/classify"
        options = {"model": "model", "use_activation": False}
        bodies = [json.dumps({**options, "messages": chat}).encode() for chat in chats]
    head = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        % path
    )
    scores = [0.0] * len(bodies)
    waited = [0.0] * len(bodies)
    left = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in left:
            began = time.perf_counter()
            writer.write(head + b"%d\r\n\r\n" % len(bodies[i]) + bodies[i])
            answer = await _read(reader)
            waited[i] = time.perf_counter() - began
            (found,) = json.loads(answer)["data"]
            scores[i] = found["probs"][0] if is_vllm else found["score"]
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    return time.perf_counter() - started, waited, scores


async def _read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server refused: {head!r}")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length is not None
    return await reader.readexactly(int(length[1]))


@contextmanager
def started_server(folder: Path, *options: str) -> Iterator[tuple[int, int]]:
    """`treeward serve` in a process of its own: its port and process id."""
    command = [
        sys.executable,
        "-m",
        "treeward.cli.main",
        "serve",
        str(folder),
        "--port",
        "0",
        "access_log=false",
    ]
    with _started([*command, *options], r"at http://127\.0\.0\.1:(\d+)") as found:
        yield found


@contextmanager
def _vllm(binaries: Path, folder: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(binaries / "vllm"),
        "serve",
        str(folder),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    command += ["--served-model-name", "model", "--dtype", "float32", "--max-model-len", "2048"]
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # By default it leaves one core to its scheduler, and computes on the others alone.
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    with _started([*command, "--disable-uvicorn-access-log"], "Application startup complete"):
        yield port


@contextmanager
def _started(command: list[str], pattern: str) -> Iterator[tuple[int, int]]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(pattern, line):
                threading.Thread(
                    target=process.stderr.read, daemon=True
                ).start()  # so that its log never blocks it
                yield int(found[1] if found.groups() else 0), process.pid
                return
        raise RuntimeError("the server did not start:\n" + "".join(said))
    finally:
        process.terminate()
        process.wait(30)


def _serve_peer(folder: Path) -> None:
    """One request after another through plain transformers, as a hand-written server does it."""
    import uvicorn
    from fastapi import FastAPI
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    app = FastAPI()
    lock = threading.Lock()

    @app.post("/v1/rewards")
    def rewards(body: dict[str, Any]) -> dict[str, Any]:
        text = tokenizer.apply_chat_template(body["conversations"][0], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with lock, torch.inference_mode():
            score = model(**ids).logits[0, 0].item()
        return {"data": [{"score": score}]}

    uvicorn.run(app, port=0, access_log=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="xs", choices=tuple(SIZES))
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", type=Path, help="an export instead of random weights")
    parser.add_argument("--vllm", type=Path, help="the folder with `vllm` of another environment")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
