"""`CompletionGroup`: the completions that a policy gave to one prompt, and what came of them.

    group = CompletionGroup(prompt, prompt_ids, (SampledCompletion((5, 7, 2), "Yes.", truncated=False), ...))
    group.sequences         # prompt and completion, as the trainer computes them: one tree

Tokens are those that were sampled: they are never decoded and tokenized again, for that can give others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeward.data.encoding import count_tree_tokens
from treeward.data.preference import Message
from treeward.data.prompt_sets import Prompt

__all__ = ["CompletionGroup", "Prompt", "SampledCompletion"]


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """A sampled completion. `token_ids`: up to and with the end of the turn, if it came; `truncated`: it did not.

    `log_probs`: of each token, as the generator says; None where it does not.
    """

    token_ids: tuple[int, ...]
    text: str
    truncated: bool
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    """One prompt with G completions, which share its tokens."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[SampledCompletion, ...]

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and completion of each, G lists of token ids."""
        return [[*self.prompt_ids, *completion.token_ids] for completion in self.completions]

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each, for environments: they render them as their own model reads them."""
        return [
            [*self.prompt.messages, {"role": "assistant", "content": completion.text}]
            for completion in self.completions
        ]

    @property
    def num_tree_tokens(self) -> int:
        """Tokens when each is computed once."""
        return count_tree_tokens([np.asarray(sequence, dtype=np.int32) for sequence in self.sequences])

    @property
    def num_row_tokens(self) -> int:
        """Tokens as plain rows."""
        return sum(len(self.prompt_ids) + len(completion.token_ids) for completion in self.completions)


def prompt_lengths(groups: Sequence[CompletionGroup]) -> list[list[int]]:
    """Of every sequence of every group, the tokens before the completion."""
    return [[len(group.prompt_ids)] * len(group.completions) for group in groups]
