"""`EncodingCounts`: what became of the rows of a data set when they were tokenized.

dataset.counts.summary()
# "90 of 100 comparisons kept (dropped: 10 ties); 12,345 tokens, 6,789 on prefix trees (45% ...
"""

from __future__ import annotations

from dataclasses import dataclass

_MUCH = 0.1  # a warning says when a larger share is left out


@dataclass(frozen=True, slots=True)
class EncodingCounts:
    """The outcomes of the comparisons. `read` is `kept` and the five `dropped_*` together:

    - `too_long`: no two completions of different rank fit.
    - `identical`: no pair of different completions is left.
    - `ties`: no completion outranks another.
    - `ungraded`: no completion has a grade to learn.
    - `suspects`: `data.labels` drops every pair.

    The others are counts of kept comparisons, except `longest`: the tokens of the longest
    conversation before truncation, kept or not. `truncated`: comparisons that lost context.
    `deduplicated`: completions with the tokens of another. `completions`: those that are kept, and
    `completions_too_long` those that are not. `contradicted`: comparisons in which a completion
    outranks one with a higher score. `unanswered`: completions that do not end with a message of
    the assistant. `other_prompts`: comparisons whose sides answer different prompts.

    Of problems with steps: `steps` are the nodes with a label, `step_copies` the labels that they
    merge, and `steps_too_long` the nodes with a label that were left out.
    """

    read: int = 0
    kept: int = 0
    dropped_too_long: int = 0
    dropped_identical: int = 0
    dropped_ties: int = 0
    dropped_ungraded: int = 0
    dropped_suspects: int = 0
    truncated: int = 0
    deduplicated: int = 0
    tied_pairs: int = 0
    tokens: int = 0
    tree_tokens: int = 0
    longest: int = 0
    completions: int = 0
    completions_too_long: int = 0
    contradicted: int = 0
    unanswered: int = 0
    other_prompts: int = 0
    steps: int = 0
    step_copies: int = 0
    steps_too_long: int = 0

    def summary(self) -> str:
        """One line for a person."""
        dropped = {
            "too long": self.dropped_too_long,
            "identical completions": self.dropped_identical,
            "ties": self.dropped_ties,
            "without a grade": self.dropped_ungraded,
            "wrong labels by data.labels": self.dropped_suspects,
        }
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items() if number)
        why = f" (dropped: {reasons})" if reasons else ""
        unit = "comparisons"
        if self.steps:
            unit = "problems"
        parts = [f"{self.kept:,} of {self.read:,} {unit} kept{why}"]
        if self.steps:
            merged = f"{self.steps:,} steps with a label, of {self.step_copies:,} before merging"
            parts.append(f"{self.completions:,} different solutions; {merged}")
        notes = {
            "with truncated context": self.truncated,
            "duplicate completions removed": self.deduplicated,
            "completions of kept comparisons too long": self.completions_too_long,
            "steps too long": self.steps_too_long,
            "tied pairs within them": self.tied_pairs,
            "whose ranks contradict their scores (the ranks count)": self.contradicted,
            "whose sides answer different prompts": self.other_prompts,
        }
        parts += [f"{number:,} {note}" for note, number in notes.items() if number]
        if self.tree_tokens:
            shared = 1 - self.tree_tokens / self.tokens
            on_trees = f"{self.tree_tokens:,} on prefix trees ({shared:.0%} shared)"
            parts.append(f"{self.tokens:,} tokens, {on_trees}")
        is_changed = self.dropped_too_long or self.truncated or self.completions_too_long
        before = ", before any was left out or cut" if is_changed else ""
        parts.append(f"longest conversation {self.longest:,} tokens{before}")
        return "; ".join(parts)

    @property
    def is_much_dropped(self) -> bool:
        """Whether over a tenth of the comparisons, or of the completions or steps of the others, is
        dropped."""
        num_completions = self.completions + self.completions_too_long
        if self.read - self.kept > _MUCH * self.read:
            return True
        if self.steps_too_long > _MUCH * (self.steps + self.steps_too_long):
            return True
        return self.completions_too_long > _MUCH * num_completions
