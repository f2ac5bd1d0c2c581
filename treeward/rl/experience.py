"""`CompletionGroup`: the completions that a policy sampled to one prompt.

    group = CompletionGroup(prompt, prompt_ids, (SampledCompletion((5, 7, 2), "Yes.", truncated=False), ...))
    group.sequence(0)                   # prompt and completion, as the trainer computes them
    completion_lengths(groups)          # (P, G)

The token ids are the sampled ones, never decoded and tokenized again, which can give others. All groups of a batch have
the same number of completions.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeward.data.preference import Message
from treeward.data.prompt_sets import Prompt


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """`token_ids`: with the end token; `truncated`: it has none. `text`: without the end token.

    `log_probs`: the generator's, per token; None if it gives none.
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

    def sequence(self, g: int) -> tuple[int, ...]:
        """Token ids of the prompt and completion g."""
        return (*self.prompt_ids, *self.completions[g].token_ids)

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids of prompt and completion, for each."""
        return [list(self.sequence(g)) for g in range(len(self.completions))]

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each completion, for environments, which render them for their own model."""
        return [
            [*self.prompt.messages, {"role": "assistant", "content": completion.text}]
            for completion in self.completions
        ]

    @property
    def num_row_tokens(self) -> int:
        """Tokens as plain rows."""
        return sum(len(self.prompt_ids) + len(completion.token_ids) for completion in self.completions)


def completion_lengths(groups: Sequence[CompletionGroup]) -> Tensor:
    """Tokens of each completion, int64 (P, G)."""
    lengths = [[len(completion.token_ids) for completion in group.completions] for group in groups]
    return torch.tensor(lengths, dtype=torch.int64).reshape(batch_shape(groups))


def truncated_completions(groups: Sequence[CompletionGroup]) -> Tensor:
    """Which completions the length limit cut, bool (P, G), as their generator says."""
    truncated = [[completion.truncated for completion in group.completions] for group in groups]
    return torch.tensor(truncated, dtype=torch.bool).reshape(batch_shape(groups))


def prompt_lengths(groups: Sequence[CompletionGroup]) -> list[list[int]]:
    """Prompt length of each sequence of each group."""
    return [[len(group.prompt_ids)] * len(group.completions) for group in groups]


def batch_shape(groups: Sequence[CompletionGroup]) -> tuple[int, int]:
    """(P, G)."""
    return len(groups), len(groups[0].completions) if groups else 0
