"""`Score`: a score of one conversation, or why there is none; `Reward`: a number made of a score.

score = scorer.score([conversation], on_error="mask")[0]
score.score, score.error        # a float and None, or None and why there is no score
completion_text(conversation)   # for rules; None if no assistant's text ends it
judged_completion(conversation) # for judges: with its calls of tools
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from treeward.data.conversation import AnyConversation, Message
from treeward.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_EQUAL = 1e-4
"""A difference of scores that is rounding or says nothing: the log-odds of a preference would be as
small. It is a share of the largest score, or of 1 where that is smaller."""

OnError = Literal["raise", "mask"]
"""A conversation that cannot be scored: the call raises, or its score is None with the reason."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one conversation.

    `score`: float32, or None where there is none; `error` then says why. `num_tokens`: as it was
    scored, or its full length; 0 where it could not be rendered. `truncated`: some of its context
    was cut to make it fit. `heads`: the value of each head, in the model's order, and `head_names`
    their names; `members`: the score of each model of an ensemble. `spread`: how sure the score
    is, a standard deviation in its units: of heads that are estimates of one score (of the
    population), or to the average completion by a Laplace approximation of the head; of an
    ensemble, that of the mixture of its members.
    `steps`: of a process reward model, the probability that each step is right. `judgement`: what a
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
        """The scores of members, the values of several heads and their spread, by name.

        The names are as `member_0`, `head_helpfulness` and `spread`. Heads whose names are not
        distinct are numbered.
        """
        parts = {f"member_{i}": value for i, value in enumerate(self.members)}
        if len(self.heads) > 1:
            labels = self.head_names or tuple(map(str, range(len(self.heads))))
            # Names of metrics: no spaces or slashes, and of transformers' `LABEL_0` the number.
            keys = [re.sub(r"\W+", "_", label.removeprefix("LABEL_")) for label in labels]
            if len(set(keys)) < len(keys):  # as those of "a b" and "a-b"
                keys = list(map(str, range(len(keys))))
            for key, value in zip(keys, self.heads, strict=True):
                parts[f"head_{key}"] = value
        if self.spread is not None:
            parts["spread"] = self.spread
        return parts


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one conversation: a finite number, or None and `error` says why.

    `score`: the score that the reward was made of; without a reward model it has at most a
    judgement. `components`: finite numbers by name, the parts of the reward; more of each is
    better, but for one of weight 0. `weights`: how much a component counts in the reward, where
    that is not 1.
    """

    value: float | None
    score: Score = Score(None)
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def raw(self) -> float | None:
        """The reward before shaping: the score, or the value itself where there is no score."""
        if self.score.score is None:
            return self.value
        return self.score.score


def reward_metrics(name: str, rewards: Tensor) -> dict[str, float]:
    """Metrics of rewards (B,), NaN for none, by names as `<name>/num_samples`.

    They are `num_samples` and `num_failed`, and over the rewards that there are `mean_reward`,
    `std_reward` (of the population), `min_reward` and `max_reward`.
    """
    valid = rewards[rewards.isfinite()]
    metrics = {
        "num_samples": float(len(rewards)),
        "num_failed": float(len(rewards) - len(valid)),
    }
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
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


class ConversationScorer(Protocol):
    """A `Scorer`, or an ensemble of them: conversations in, scores out, in order."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the models so far."""

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]: ...


@runtime_checkable
class GroupScorer(Protocol):
    """Scores that may depend on the other completions of a prompt, as those of a judge."""

    def score_groups(
        self,
        groups: Sequence[Sequence[AnyConversation]],
        infos: Sequence[Mapping[str, Any]],
    ) -> list[list[Score]]:
        """A list of scores for each group, the completions of one prompt.

        A score without a value has its `error`. `infos`: the data's columns for each group.
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
        return Cost(
            self.num_requests + other.num_requests,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_completion_tokens + other.num_completion_tokens,
            self.seconds + other.seconds,
        )


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
    if not content:
        return None
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            text = part.get("text")
        if not isinstance(text, str):  # an image, say: without it the text says something else
            return None
        texts.append(text)
    return "".join(texts)


def judged_text(message: Mapping[str, Any]) -> str | None:
    """A message as a judge reads it: its text, and the JSON of its calls of tools on a line.

    None for a content that is not text, as an image, and for neither text nor calls.
    """
    text = message_text(message)
    calls = message.get("tool_calls")
    if not calls:
        return text
    if text is None and message.get("content"):
        return None
    # A judge that does not see calls takes a message of calls alone for an empty one.
    return f"{text or ''}\ntool_calls: {_json(calls)}"


def judged_completion(conversation: Sequence[Message]) -> str | None:
    """The last message as `judged_text`; None if it is not the assistant's."""
    if not conversation or conversation[-1].get("role") != "assistant":
        return None
    return judged_text(conversation[-1])


def transcript(messages: Sequence[Message], tools: Any = None) -> str:
    """`role: text` of each message, with an empty line between them.

    Before them stand the `tools`, if there are any. Tools, and the calls of a message, are JSON on
    a line. Raises `DataError` for a message that is not text.
    """
    parts = []
    if tools:
        parts.append(f"tools: {_json(tools)}")
    for message in messages:
        text = judged_text(message)
        if text is None and message.get("content"):
            # Without its image the message is another one, and may be no question at all.
            raise DataError(
                "a judge reads text only",
                field="messages",
                got=message,
                need="a text, or text parts",
            )
        parts.append(f"{message.get('role')}: {text or ''}")
    return "\n\n".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def prompt_text(messages: Sequence[Message]) -> str:
    """The messages before a completion as one text: the user's only message, or a transcript.
    Raises `DataError` as `transcript`."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        text = message_text(messages[0])
        if text is not None or not messages[0].get("content"):
            return text or ""
    return transcript(messages)


def are_equal(scores: Sequence[float | None]) -> bool:
    """Whether three scores or more are equal to rounding.

    A collapsed model gives such scores, which tell nothing apart.
    """
    numbers = [score for score in scores if score is not None]
    # Two scores may be equal by chance, as those of two equal completions are.
    if len(numbers) < 3:
        return False
    largest = max(abs(score) for score in numbers)
    return max(numbers) - min(numbers) <= _EQUAL * max(1.0, largest)
