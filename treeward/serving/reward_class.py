"""`ClassScorer`: a reward class of the user's own (`reward_class: "my_module:MyReward"`), served as a reward model is.

The class is the custom environment's, made with the path of the model. It is called in the server's scoring thread and
never two times at once. A conversation for which it fails, or gives no finite number, has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeward.environments.completions import NO_COMPLETION, completion_text
from treeward.environments.custom import CustomEnvironment
from treeward.errors import ConfigError, ModelError
from treeward.scoring.score import Conversation, OnError, Score
from treeward.scoring.scorer import Prepared, PreparedScorer

NUM_TOKENS = 512
"""The part of a batch's budget that a conversation takes: what it really has, the class alone knows."""


@dataclass(frozen=True, slots=True)
class _Chat(Prepared):
    conversation: Conversation = ()


class ClassScorer(PreparedScorer):
    """An object of the class at the path `reward_class`. Raises `ConfigError` for one that cannot be found, made or
    called."""

    renderer = None
    reads_text = False
    members = ()

    def __init__(self, reward_class: str, model: str) -> None:
        try:
            self.environment = CustomEnvironment({"function": reward_class, "kwargs": {"model_path": model}})
        except ConfigError as error:
            raise error.but(where=None, field="reward_class", got=reward_class) from error

    def prepare(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Prepared]:
        errors = [NO_COMPLETION if completion_text(one) is None else None for one in conversations]
        pairs = enumerate(zip(conversations, errors, strict=True))
        return [_Chat(f"{i}", None, NUM_TOKENS, error=error, conversation=one) for i, (one, error) in pairs]

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        error = "this model reads messages: send messages, not rendered text"
        return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        conversations = [one.conversation for one in prepared if isinstance(one, _Chat)]
        rewards = self.environment.rewards(conversations, [{} for _ in conversations])
        if len(rewards) > 1 and all(reward.value is None for reward in rewards):
            raise ModelError(str(rewards[0].error))  # a batch that fails is tried apart
        return [Score(reward.value, error=reward.error) for reward in rewards]
