"""Models that the dialects are tried with: decoders with and without BOS, and an encoder; each with
its service.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
from families import tiny_model
from messages import chat
from starlette.testclient import TestClient
from templates import PROMPTING_CHATML, byte_bpe
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from treeward.config.load import load_section
from treeward.config.server import ServerConfig
from treeward.data.rendering import Renderer
from treeward.model.reward_model import RewardModel
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.app import create_app
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

KINDS = ["plain", "chatml", "bos_written", "bos_added", "bos_of_template", "encoder"]

CHATS = [
    chat("What is the capital of France?", "Paris is the capital of France."),
    chat("What is the capital of France?", "Bread."),
    chat(
        "How much flour?",
        "Mix 500 grams of flour, water, salt and yeast, then let the dough rest.",
    ),
    chat("How much flour?", "\u6570\u5b57 \U0001f642"),
]


@dataclass(frozen=True)
class Served:
    """A service of one model, `rm`, and what the Scorer makes of `CHATS` in every form that a
    client may send.
    """

    client: Any
    scorer: Scorer
    texts: list[str]
    ids: list[list[int]]
    scores: list[float]
    service: Service


def make_renderer(kind: str, tiny_tokenizer: Any) -> Renderer:
    if kind == "plain":  # treeward's default template: EOS ends a completion, and nothing follows
        return Renderer(tiny_tokenizer, max_length=300)
    if kind == "encoder":
        tokenizer = byte_bpe(("[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>"), None, None)
        backend = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            cls_token="[CLS]",
            sep_token="[SEP]",
            pad_token="[SEP]",
        )
        first = backend.cls_token_id
        last = backend.sep_token_id
        backend.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            special_tokens=[("[CLS]", first), ("[SEP]", last)],
        )
        return Renderer(backend, chat_template=PROMPTING_CHATML, max_length=300)
    adds_bos = kind in ("bos_written", "bos_added")
    template = "{{ bos_token }}" + PROMPTING_CHATML if kind == "bos_written" else PROMPTING_CHATML
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer = copy.deepcopy(byte_bpe(special, bos="<s>" if adds_bos else None, adds_bos=adds_bos))
    tokenizer.pad_token = "<|endoftext|>"
    if kind == "bos_of_template":  # as SmolLM2's, which adds no BOS to a text
        tokenizer.bos_token = "<|im_start|>"
    return Renderer(tokenizer, chat_template=template, max_length=300)


@pytest.fixture(scope="session")
def scorers(tiny_tokenizer: Any) -> dict[str, Scorer]:
    result = {}
    for kind in KINDS:
        family, layout = ("bert", "encoder") if kind == "encoder" else ("qwen3", "tree")
        renderer = make_renderer(kind, tiny_tokenizer)
        model = RewardModel(tiny_model(family), layout=layout)  # type: ignore[arg-type]
        result[kind] = Scorer(model, renderer)
    return result


@pytest.fixture(scope="session")
def shared(scorers: dict[str, Scorer]) -> Iterator[Callable[[str], Served]]:
    """A function: kind -> `Served` that all tests share, and none changes."""
    with ExitStack() as stack:
        yield functools.cache(lambda kind: make_served(kind, scorers, stack))


@pytest.fixture
def serve(scorers: dict[str, Scorer]) -> Iterator[Callable[..., Served]]:
    """A function as `make_served`, for tests that need other settings, or count."""
    with ExitStack() as stack:

        def make(kind: str = "chatml", **settings: Any) -> Served:
            return make_served(kind, scorers, stack, **settings)

        yield make


def make_served(
    kind: str,
    scorers: dict[str, Scorer],
    stack: ExitStack,
    *,
    shaper: Shaper | None = None,
    others: int = 0,
    **settings: Any,
) -> Served:
    """`others`: how many models there are besides. `settings`: of `ServerConfig`."""
    scorer = scorers[kind]
    names = ["rm", *[f"other{i}" for i in range(others)]]
    sections = [{"model": f"models/{name}", "name": name} for name in names]
    config = load_section(ServerConfig, {"models": sections, **settings}, where="server")
    pairs = []
    for section in config.models:
        own_scorer = scorer if section.name == "rm" else scorers["plain"]
        pairs.append((ServedModel.of(section, own_scorer), own_scorer))
    service = Service.of(pairs, config)
    service.models["rm"] = replace(service.models["rm"], shaper=shaper)
    stack.callback(service.close)
    client = stack.enter_context(
        TestClient(create_app(service), base_url="http://localhost", raise_server_exceptions=False),
    )
    want = [score.score for score in scorer.score(CHATS)]
    texts = [scorer.renderer.render(chat) for chat in CHATS]
    ids = [scorer.renderer.encode(chat) for chat in CHATS]
    return Served(
        client,
        scorer,
        texts,
        ids,
        [score for score in want if score is not None],
        service,
    )
