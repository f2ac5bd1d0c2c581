"""`preference(...)` and `rated(...)`: what a suite gives and a model scores, made of texts."""

from __future__ import annotations

from collections.abc import Sequence

from treeward.data.preference import Completion, Message, Preference
from treeward.evaluation.results import ScoredExample


def preference(
    id: str,
    subset: str,
    prompt: str | Sequence[Message],
    texts: Sequence[str],
    ranks: Sequence[int] | None = None,
) -> Preference:
    """The prompt is a user message, or messages; the best completion comes first unless `ranks` says otherwise."""
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
