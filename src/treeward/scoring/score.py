"""`Score`: a score of one conversation, or the reason why there is none; and `Reward`, a number made of a score.

score = scorer.score([conversation], on_error="mask")[0]
score.score, score.error        # a float and None, or None and why there is no score
completion_text(conversation)   # what a rule or a judge reads; None unless it ends with a text of the assistant
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from treeward.data.conversation import AnyConversation, Message

if TYPE_CHECKING:
    from torch import Tensor

_EQUAL = 1e-4
"""A difference of scores, as a share of the largest one (at least of 1), below which it is rounding or says nothing:
the log-odds of a preference would be as small."""

OnError = Literal["raise", "mask"]
"""A conversation that cannot be scored makes the call raise, or its score is None with the reason."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one conversation.

    `score`: float32, or None where there is none; `error` then says why. `num_tokens`: as it was scored, or its full
    length; 0 where it could not be rendered. `truncated`: some of its context was cut to make it fit. `heads`: the
    value of each head, in the model's order, and `head_names` their names; `members`: the score of each model of an
    ensemble. `spread`: where the heads are estimates of one score, their standard deviation (of the population), in
    units of the score. `steps`: of a process reward model, the probability that each step is right. `judgement`: what a
    judge wrote.
    """

    score: float | None
    num_tokens: int = 0
    truncated: bool = False
    heads: tuple[float, ...] = ()
    members: tuple[float, ...] = ()
    error: str | None = None
    head_names: tuple[str, ...] = ()
    spread: float | None = None
    steps: tuple[float, ...] = ()
    judgement: str | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The scores of members, the values of several heads and their spread, by name, as `member_0`,
        `head_helpfulness` and `spread`; heads whose names are not distinct are numbered."""
        parts = {f"member_{i}": value for i, value in enumerate(self.members)}
        if len(self.heads) > 1:
            labels = self.head_names or tuple(map(str, range(len(self.heads))))
            keys = [re.sub(r"\W+", "_", label.removeprefix("LABEL_")) for label in labels]
            if len(set(keys)) < len(keys):  # as those of "a b" and "a-b"
                keys = list(map(str, range(len(keys))))
            parts |= {f"head_{key}": value for key, value in zip(keys, self.heads, strict=True)}
        return parts if self.spread is None else parts | {"spread": self.spread}


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one conversation: a finite number, or None and `error` says why.

    `score`: the score that the reward was made of; without a reward model it has at most a judgement. `components`:
    finite numbers by name, the parts of the reward.
    """

    value: float | None
    score: Score = Score(None)
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def raw(self) -> float | None:
        """The reward before shaping: the score, or the value itself where there is no score."""
        return self.value if self.score.score is None else self.score.score


def reward_metrics(name: str, rewards: Tensor) -> dict[str, float]:
    """Metrics of rewards (B,), NaN for none: `<name>/num_samples` and `num_failed`; over the others `mean_reward`,
    `std_reward` (of the population), `min_reward`, `max_reward`.
    """
    valid = rewards[rewards.isfinite()]
    metrics = {"num_samples": float(len(rewards)), "num_failed": float(len(rewards) - len(valid))}
    if len(valid):
        metrics |= {
            "mean_reward": float(valid.mean()),
            "std_reward": float(valid.std(unbiased=False)),
            "min_reward": float(valid.min()),
            "max_reward": float(valid.max()),
        }
    return {f"{name}/{key}": value for key, value in metrics.items()}


def plain(value: Any) -> Any:
    """A value of an `env_info` with arrays and tensors as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


class ConversationScorer(Protocol):
    """A `Scorer`, or an ensemble of them: conversations in, scores out, in order."""

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]: ...


@runtime_checkable
class GroupScorer(Protocol):
    """Scores that may depend on the other completions of a prompt, as a judge's that compares them."""

    def score_groups(
        self, groups: Sequence[Sequence[AnyConversation]], infos: Sequence[Mapping[str, Any]]
    ) -> list[list[Score]]:
        """A list of scores for each group, the completions of one prompt; a score without a value has its `error`.

        `infos`: the data's columns for each group.
        """

    def usage(self) -> dict[str, float]:
        """What scoring has used since the last call, as `seconds`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a language model has used to judge."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


NO_COMPLETION = "the conversation does not end with a text of the assistant"


def completion_text(conversation: Sequence[Message]) -> str | None:
    """The text of the last message; None if it is not the assistant's, or not text."""
    if not conversation or conversation[-1].get("role") != "assistant":
        return None
    return message_text(conversation[-1])


def message_text(message: Mapping[str, Any]) -> str | None:
    """The content of a message: text, or the joined texts of a list of parts; None otherwise."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def transcript(messages: Sequence[Message], tools: Any = None) -> str:
    """`role: text` of each message, with an empty line between them; before them the `tools`, if there are any.

    Tools, and the calls of a message, are JSON on a line.
    """
    parts = [f"tools: {_json(tools)}"] if tools else []
    for message in messages:
        text = f"{message.get('role')}: {message_text(message) or ''}"
        if message.get("tool_calls"):
            text += f"\ntool_calls: {_json(message['tool_calls'])}"
        parts.append(text)
    return "\n\n".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def prompt_text(messages: Sequence[Message]) -> str:
    """The messages before a completion as one text: the user's single message, or a transcript."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return message_text(messages[0]) or ""
    return transcript(messages)


def are_equal(scores: Sequence[float | None]) -> bool:
    """Whether three scores or more are equal to rounding, as those of a collapsed model, which tell nothing apart."""
    numbers = [score for score in scores if score is not None]
    if len(numbers) < 3:
        return False
    largest = max(abs(score) for score in numbers)
    return max(numbers) - min(numbers) <= _EQUAL * max(1.0, largest)
