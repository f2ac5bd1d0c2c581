"""`CustomModel`: a reward class of the user's own, served as a reward model is.

    # my_module.py, and in the configuration {reward_class: "my_module:MyReward", model: path/to/model}
    class MyReward:
        def __init__(self, model_path: str) -> None: ...
        def score(self, prompt: str, response: str) -> float: ...

It is the custom environment's class, with `kwargs: {model_path: ...}`, called in the server's scoring thread and never
two times at once. A class with `score_batch(prompts, responses) -> list of floats` is given what is queued together. A
conversation for which it fails, or gives no finite number, has no score.
"""

from __future__ import annotations

from collections.abc import Sequence

from treeward.config.reward_shaping import RewardShapingConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.environments.completions import NO_COMPLETION, completion_text
from treeward.environments.custom import CustomEnvironment
from treeward.errors import ConfigError, ModelError
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.models import Item, ServedModel
from treeward.serving.rendered_text import RenderedText

__all__ = ["CustomModel"]

_ITEM_TOKENS = 512
"""The part of a batch's budget of tokens that a conversation takes: what it really has, the class alone knows."""


class CustomModel(ServedModel):
    """A class's rewards under a name."""

    def __init__(self, name: str, environment: CustomEnvironment, *, shaper: Shaper | None = None) -> None:
        self.name, self.environment, self.shaper = name, environment, shaper
        self.contracts, self.members = (), ()

    @classmethod
    def load(cls, config: ServedModelConfig, server: ServerConfig) -> CustomModel:
        """Import the class and make it. Raises `ConfigError` for one that cannot be found, made or called, and for a
        shaping that needs a model's contract or tokenizer.
        """
        section = {"function": config.reward_class, "kwargs": {"model_path": config.members[0]}}
        at = {"field": "reward_class", "got": config.reward_class}
        try:
            environment = CustomEnvironment(section)
        except ConfigError as error:
            raise ConfigError(error.summary, **at, need=error.need, fix=error.fix) from error
        if isinstance(config.shaping, str):
            raise ConfigError("a reward class has no scoring contract", **at, need="shaping: a reward_shaping section")
        shaper = None if config.shaping is None else Shaper(RewardShapingConfig.model_validate(config.shaping))
        return cls(config.served_name, environment, shaper=shaper)

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        return ()

    @property
    def contract_sha256(self) -> str | None:
        return None

    def prepare(self, asked: Sequence[Conversation | RenderedText]) -> list[Item]:
        return [self._item(one) for one in asked]

    def score(self, items: Sequence[Item]) -> list[Score]:
        rewards = self.environment.rewards([item.prepared for item in items], [{} for _ in items])
        if len(rewards) > 1 and all(reward.value is None for reward in rewards):
            raise ModelError(str(rewards[0].error))  # a batch that fails is tried apart
        return [Score(reward.value, error=reward.error) for reward in rewards]

    def _item(self, asked: Conversation | RenderedText) -> Item:
        if isinstance(asked, RenderedText):
            return Item(None, 0, error="this model reads messages: send messages, not rendered text")
        return Item(asked, _ITEM_TOKENS, error=NO_COMPLETION if completion_text(asked) is None else None)
