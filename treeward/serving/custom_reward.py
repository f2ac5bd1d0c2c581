"""`CustomModel`: a reward class of the user's own, served as a reward model is.

    # my_module.py, and in the configuration {reward_class: "my_module:MyReward", model: path/to/model}
    class MyReward:
        def __init__(self, model_path: str) -> None: ...
        def score(self, prompt: str, response: str) -> float: ...

It is called in the server's scoring thread, never two times at once. A class with `score_batch(prompts, responses) ->
list of floats` is given what is queued together. The prompt is a lone message of the user as it is, anything longer
`role: text` of each message. A conversation for which it fails, or gives no finite number, has no score.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any

from treeward.config.reward_shaping import RewardShapingConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.environments.completions import NO_COMPLETION, completion_text, prompt_text
from treeward.errors import ConfigError
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.models import Item, ServedModel
from treeward.serving.rendered_text import RenderedText
from treeward.user_code import import_object

__all__ = ["CustomModel"]

logger = logging.getLogger(__name__)

_ITEM_TOKENS = 512
"""The part of a batch's budget of tokens that a conversation takes: what it really has, the class alone knows."""

_TEXT_ONLY = "this model reads messages: send messages, not rendered text"


class CustomModel(ServedModel):
    """An object with `score`, or `score_batch`, under a name."""

    def __init__(self, name: str, reward: Any, *, shaper: Shaper | None = None) -> None:
        self.name, self.reward, self.shaper = name, reward, shaper
        self.contracts, self.members = (), ()

    @classmethod
    def load(cls, config: ServedModelConfig, server: ServerConfig) -> CustomModel:
        """Import the class and make it. Raises `ConfigError` for one that cannot be found, made or called, and for a
        shaping that needs a model's contract or tokenizer.
        """
        path = config.reward_class or ""
        found = _import(path)
        shaper = None
        if config.shaping is not None:
            if not isinstance(config.shaping, RewardShapingConfig):
                raise ConfigError(
                    "a reward class has no scoring contract",
                    field="shaping",
                    got=f"contract, of {path}",
                    need="a reward_shaping section",
                )
            shaper = Shaper(config.shaping)
        return cls(config.served_name, found(config.members[0]), shaper=shaper)

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        return ()

    @property
    def contract_sha256(self) -> str | None:
        return None

    def prepare(self, asked: Sequence[Conversation | RenderedText]) -> list[Item]:
        return [self._item(one) for one in asked]

    def score(self, items: Sequence[Item]) -> list[Score]:
        if hasattr(self.reward, "score_batch"):
            prompts, responses = zip(*(item.prepared for item in items), strict=True)
            values = list(self.reward.score_batch(list(prompts), list(responses)))
            if len(values) != len(items):
                raise ValueError(f"score_batch gave {len(values)} scores for {len(items)} responses")
            return [_score(value) for value in values]
        return [self._one(*item.prepared) for item in items]

    def _item(self, asked: Conversation | RenderedText) -> Item:
        if isinstance(asked, RenderedText):
            return Item(None, 0, error=_TEXT_ONLY)
        completion = completion_text(asked)
        if completion is None:
            return Item(None, 0, error=NO_COMPLETION)
        return Item((prompt_text(asked[:-1]), completion), _ITEM_TOKENS)

    def _one(self, prompt: str, response: str) -> Score:
        try:
            return _score(self.reward.score(prompt, response))
        except Exception as error:  # a user's class may raise anything; it costs this conversation its score
            logger.exception("%s could not score a conversation.", type(self.reward).__name__)
            return Score(None, error=f"{type(self.reward).__name__}: {type(error).__name__}: {error}")


def _score(value: Any) -> Score:
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int | float) and math.isfinite(number):
        return Score(float(number))
    return Score(None, error=f"the reward class gave {number!r:.100}, which is no finite number")


def _import(path: str) -> Any:
    found = import_object(path, field="reward_class")
    methods = [getattr(found, name) for name in ("score", "score_batch") if callable(getattr(found, name, None))]
    if not isinstance(found, type) or not methods or any(map(inspect.iscoroutinefunction, methods)):
        raise ConfigError(
            "this is no class that scores",
            field="reward_class",
            got=path,
            need="a class with score(prompt, response), or score_batch(prompts, responses), which are no coroutines",
        )
    try:
        inspect.signature(found).bind("model_path")
    except TypeError as error:
        raise ConfigError(
            f"the class cannot be constructed: {error}",
            field="reward_class",
            got=f"{path}{inspect.signature(found)}",
            need="__init__(self, model_path)",
        ) from None
    return found
