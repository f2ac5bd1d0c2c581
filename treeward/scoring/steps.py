"""`Steps`: process reward models, which say of each step of a completion how probably it is right.

    steps = Steps("<extra_0>", tokenizer, "min")
    steps.marked([*context, completion], "row 3")    # blank lines part its steps, each of which ends with the token
    steps.beginnings(ids)    # up to each mark, where a step is read: one inside the other, so one pass reads them all
    steps.score(log_odds)    # the probabilities of the steps, and the score of the completion

The score is the product of the probabilities, as in best of n of Qwen2.5-Math-PRM (Zhang et al. 2025, arXiv
2501.07301), or the least of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeward.data.preference import Message
from treeward.errors import DataError
from treeward.scoring.score import Conversation, message_text

_BLANK_LINE = re.compile(r"\n\s*\n")


class Steps:
    """The steps of a model that reads each at `token`. `how`: what makes a score of them."""

    def __init__(self, token: str, tokenizer: PreTrainedTokenizerBase, how: Literal["product", "min"]) -> None:
        self.token, self.how = token, how
        self._token_id = tokenizer.convert_tokens_to_ids(token)

    def marked(self, messages: Conversation, name: str) -> list[Message]:
        """The messages with a mark after each step of the completion: blank lines part steps where it has no marks.
        Raises `DataError` for a completion that is not text."""
        *context, completion = messages
        text = message_text(completion)
        if text is None:
            raise DataError("steps are read in text only", where=name, field="messages", got=completion, need="a text")
        if self.token not in text:
            text = "".join(f"{step}{self.token}" for step in _BLANK_LINE.split(text.strip()))
        return [*context, {**completion, "content": text}]

    def beginnings(self, ids: np.ndarray) -> list[np.ndarray]:
        """The tokens up to each mark."""
        return [ids[: end + 1] for end in np.flatnonzero(ids == self._token_id)]

    def score(self, log_odds: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """The score, and the probability of each step."""
        probabilities = tuple(torch.tensor(log_odds, dtype=torch.float64).sigmoid().tolist())
        return min(probabilities) if self.how == "min" else math.prod(probabilities), probabilities
