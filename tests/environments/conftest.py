"""What tests of environments share: a small reward model, a server of one, and how samples are
written and read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge
from families import tiny_model
from loopback import serving_on_loopback

from treeward.config.load import load_section
from treeward.data.conversation import Message
from treeward.data.rendering import Renderer
from treeward.environments.interface import DETAILS, Environment, EnvironmentReturn, Reward
from treeward.environments.judge import JudgeEnvironment
from treeward.scoring.score import Score


def chat(completion: Any, question: str = "2 + 2?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    made = FakeJudge()
    yield made
    made.server.__exit__()


def judge(endpoint: FakeJudge, **config: Any) -> JudgeEnvironment:
    base = {"base_url": endpoint.url, "model": "m", "api_key_env": None, "timeout_seconds": 10.0}
    return JudgeEnvironment(base | config)


class Lengths(Environment):
    """The length of the completion, less the sample's `minus`; a completion that says "fail" has no
    reward."""

    name = "lengths"

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        self.seen: list[tuple[list[Message], Mapping[str, Any]]] = []

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        self.seen += [
            (list(c), dict(info)) for c, info in zip(conversations, env_infos, strict=True)
        ]
        return [
            self._reward(str(c[-1]["content"]), info)
            for c, info in zip(conversations, env_infos, strict=True)
        ]

    def _reward(self, completion: str, info: Mapping[str, Any]) -> Reward:
        if "fail" in completion:
            return Reward(None, error="it says fail")
        length = float(len(completion))
        return Reward(length - info.get("minus", 0.0), Score(length), components={"length": length})


def details(result: EnvironmentReturn, key: str) -> list[Any]:
    """`error`, `components` or `raw` of each sample."""
    return [metadata[DETAILS][key] for metadata in result.metadata]


def numbers(result: EnvironmentReturn) -> list[float | None]:
    """The rewards; None where there is none."""
    return [None if math.isnan(reward) else round(reward, 6) for reward in result.rewards.tolist()]


@pytest.fixture(scope="session")
def make_folder(
    tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """A function that writes a random reward model, without a contract."""

    def make() -> str:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = Renderer(tokenizer).chat_template
        tokenizer.save_pretrained(folder)
        tiny_model("qwen3").save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def folder(make_folder: Callable[..., str]) -> str:
    """A random reward model."""
    return make_folder()


@pytest.fixture(scope="session")
def signed_folder(signed_model: Callable[..., Path]) -> Path:
    """A signed reward model."""
    return signed_model(seed=5, max_length=160)


@pytest.fixture(scope="session")
def served(signed_folder: Path) -> Iterator[str]:
    """The address of a server of the signed model: as it is (`rm`), and shaped by constants
    (`shaped`)."""
    from treeward.config.server import ServerConfig
    from treeward.serving.service import Service

    constants = {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 0.5}
    shapings = {"rm": None, "shaped": constants}
    one = {"model": str(signed_folder), "device": "cpu"}
    models = [{**one, "name": name, "shaping": shaping} for name, shaping in shapings.items()]
    service = Service.load(load_section(ServerConfig, {"models": models}, where="server"))
    with serving_on_loopback(service, token="a-token") as url:
        yield url
    service.close()
