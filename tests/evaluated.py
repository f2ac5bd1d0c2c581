"""`preference(...)`, `rated(...)` and `RuleScorer`: what a suite gives and a model scores, made of
texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from treeward.data.conversation import AnyConversation, Message
from treeward.data.preference import Completion, Preference
from treeward.evaluation.results import ScoredExample
from treeward.scoring.score import OnError, Score


def preference(
    id: str,
    subset: str,
    prompt: str | Sequence[Message],
    texts: Sequence[str],
    ranks: Sequence[int] | None = None,
) -> Preference:
    """The prompt is a user message, or messages; the best completion comes first unless `ranks`
    says otherwise."""
    context = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completions = [
        Completion(rank, ({"role": "assistant", "content": text},))
        for rank, text in zip(ranks or range(len(texts)), texts, strict=True)
    ]
    return Preference(tuple(context), tuple(completions), task_name=subset, id=id)


def rated(example: Preference, scores: Sequence[float | None]) -> ScoredExample:
    """The example with these scores; one of None has an error."""
    errors = tuple("too long" if score is None else None for score in scores)
    lengths = tuple(len(completion.messages[-1]["content"]) for completion in example.completions)
    return ScoredExample(example, tuple(scores), lengths, (1,) * len(scores), errors)


class RuleScorer:
    """Scores by a rule of the context and the last text, by default its length; None has the
    `error`.

    It dies when it has scored `most` conversations.
    """

    renderer = SimpleNamespace(tokenizer=None)
    num_computed_tokens = 0

    def __init__(
        self,
        rule: Callable[[list[Any], str], float | None] = lambda context, text: float(len(text)),
        *,
        most: float = math.inf,
        error: str = "too long",
    ) -> None:
        self.rule, self.most, self.error, self.num_scored = rule, most, error, 0

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        if self.num_scored + len(conversations) > self.most:
            raise KeyboardInterrupt
        self.num_scored += len(conversations)
        values = [self.rule(list(chat[:-1]), chat[-1]["content"]) for chat in conversations]
        assert on_error == "mask" or None not in values
        return [Score(value, 3, error=self.error if value is None else None) for value in values]
