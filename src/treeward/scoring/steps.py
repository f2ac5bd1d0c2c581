"""`Steps`: process reward models, which say of each step of a completion how probably it is right.

    steps = Steps("<extra_0>", "min")
    steps.marked([*context, completion], "row 3")    # blank lines part its steps, each of which ends with the token
    steps.score(log_odds)    # of the model's values at the marks: the score of the completion, and the probabilities

The score is the product of the probabilities, as in best of n of Qwen2.5-Math-PRM (Zhang et al. 2025, arXiv
2501.07301), or the least of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from treeward.config.scoring import HeadWeights
from treeward.data.conversation import AnyConversation, Conversation, with_messages
from treeward.errors import DataError, ModelError
from treeward.scoring.score import message_text

_BLANK_LINE = re.compile(r"\n\s*\n")


class Steps:
    """The steps of a model that reads each at `token`. `how`: what makes a score of them, "product" (None) or "min".
    Raises `ModelError` for anything else."""

    def __init__(self, token: str, how: HeadWeights | None) -> None:
        if how not in (None, "product", "min"):
            summary, need = "the steps of a process reward model have no weights", "product, or min"
            raise ModelError(summary, field="head_weights", got=how, need=need)
        self.token = token
        self.how = how or "product"

    def marked(self, messages: AnyConversation, name: str) -> Conversation:
        """The messages with a mark after each step of the completion, and nowhere else: its own marks part its steps,
        or else blank lines. What stands after its last mark is a step too: no text goes unread. Raises `DataError` for
        a message that is not text."""
        texts = [message_text(message) for message in messages]
        if None in texts:
            got = messages[texts.index(None)]
            raise DataError("steps are read in text only", where=name, field="messages", got=got, need="a text")
        *context, completion = map(str, texts)
        parts = completion.split(self.token) if self.token in completion else _BLANK_LINE.split(completion.strip())
        marked = "".join(f"{part}{self.token}" for part in parts if part.strip())
        contents = [*(text.replace(self.token, "") for text in context), marked]
        marked_messages = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        return with_messages(messages, marked_messages)

    def score(self, log_odds: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """The score, and the probability of each step."""
        probabilities = tuple(torch.tensor(log_odds, dtype=torch.float64).sigmoid().tolist())
        return min(probabilities) if self.how == "min" else math.prod(probabilities), probabilities
