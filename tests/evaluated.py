"""`preference(...)`: a preference as a suite gives it, from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from treeward.data.preference import Completion, Message, Preference


def preference(
    id: str,
    subset: str,
    context: Sequence[Message],
    completions: Sequence[Sequence[Message]],
    ranks: Sequence[int],
    grades: Sequence[dict[str, float]] = (),
) -> Preference:
    """`completions`: the messages of each; `grades`: of each, by name."""
    made = [
        Completion(rank, tuple(messages), grades=grades[i] if grades else {})
        for i, (rank, messages) in enumerate(zip(ranks, completions, strict=True))
    ]
    return Preference(tuple(context), tuple(made), task_name=subset, id=id)
