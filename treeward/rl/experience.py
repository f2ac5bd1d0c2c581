"""`AnswerGroup`: the answers that a policy gave to one prompt, and what came of them.

    group = AnswerGroup(prompt, prompt_ids, (Answer((5, 7, 2), "Yes.", truncated=False), ...))
    group.sequences         # prompt and answer, as the trainer computes them: one tree

Tokens are those that were sampled: they are never decoded and tokenized again, for that can give others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeward.data.encoding import count_tree_tokens
from treeward.data.preference import Message
from treeward.data.prompt_sets import Prompt

__all__ = ["Answer", "AnswerGroup", "Prompt"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled answer. `token_ids`: up to and with the end of the turn, if it came; `truncated`: it did not.

    `log_probs`: of each token, as the generator says; None where it does not.
    """

    token_ids: tuple[int, ...]
    text: str
    truncated: bool
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """One prompt with G answers, which share its tokens."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and answer of each, G lists of token ids."""
        return [[*self.prompt_ids, *answer.token_ids] for answer in self.answers]

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each, for environments: they render them as their own model reads them."""
        return [[*self.prompt.messages, {"role": "assistant", "content": answer.text}] for answer in self.answers]

    @property
    def num_tree_tokens(self) -> int:
        """Tokens when each is computed once."""
        return count_tree_tokens([np.asarray(sequence, dtype=np.int32) for sequence in self.sequences])

    @property
    def num_row_tokens(self) -> int:
        """Tokens as plain rows."""
        return sum(len(self.prompt_ids) + len(answer.token_ids) for answer in self.answers)


def prompt_lengths(groups: Sequence[AnswerGroup]) -> list[list[int]]:
    """Of every sequence of every group, the tokens before the answer."""
    return [[len(group.prompt_ids)] * len(group.answers) for group in groups]
