"""`Steps`: process reward models, which say of each step of a completion how probably it is right.

    steps = Steps("<extra_0>", "min")
    steps.marked([*context, completion], "row 3")    # the token is written after each step
    steps.score(log_odds)    # the model's values at the tokens: a score, and the probabilities

The score is the product of the probabilities, as in best of n of Qwen2.5-Math-PRM (Zhang et al.
2025, arXiv 2501.07301), the least of them, as in Math-Shepherd's (Wang et al. 2023, arXiv
2312.08935), or the last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from treeward.config.scoring import HeadWeights, StepScore
from treeward.data.conversation import (
    AnyConversation,
    Conversation,
    last_text,
    with_messages,
)
from treeward.data.reasoning import REASONING_END, REASONING_START
from treeward.data.step_marks import check_marks
from treeward.errors import DataError, ModelError
from treeward.scoring.score import message_text

_BLANK_LINE = re.compile(r"\n\s*\n")


class Steps:
    """The steps of a model that reads each at `token`.

    `how`: what makes a score of them, "product" (None), "min" or "last". Raises `ModelError` for
    anything else.
    """

    def __init__(self, token: str, how: HeadWeights | None) -> None:
        if how not in (None, "product", "min", "last"):
            raise ModelError(
                "the steps of a process reward model have no weights",
                field="head_weights",
                got=how,
                need="product, min or last",
            )
        self.token = token
        self.how: StepScore = how or "product"

    def marked(self, messages: AnyConversation, name: str) -> Conversation:
        """The messages with a mark after each step of the completion, and nowhere else.

        The completion's own marks part its steps, or else blank lines. Text after its last mark is
        a step too: no text goes unread. White space around a step is left out, as in training.
        Raises `DataError` for a message that is not text.
        """
        marked_messages = []
        for i, message in enumerate(messages):
            is_completion = i == len(messages) - 1
            if message.get("content") is None and not is_completion:
                marked_messages.append(message)  # a call of a tool, without a text
                continue
            text = message_text(message)
            if text is None:
                raise DataError(
                    "steps are read in text only",
                    where=name,
                    field="messages",
                    got=message,
                    need="a text",
                )
            if not is_completion:
                # A mark in the context would be read as a step.
                marked_messages.append({**message, "content": text.replace(self.token, "")})
                continue
            completion = dict(message)
            reasoning = completion.pop("reasoning_content", None)
            if isinstance(reasoning, str) and reasoning.strip():
                # Reasoning in a field of its own has steps too, as the same text in the content.
                text = f"{REASONING_START}\n{reasoning.strip()}\n{REASONING_END}\n\n{text}"
            completion["content"] = "".join(f"{step}{self.token}" for step in self._parted(text))
            marked_messages.append(completion)
        return with_messages(messages, marked_messages)

    def check(self, text: str, marked: Conversation, name: str) -> None:
        """Raise `DataError` where the rendered `text` of a `marked` conversation has not each of
        its steps with its mark."""
        check_marks(text, self._parted(last_text(marked)), self.token, name)

    def _parted(self, text: str) -> list[str]:
        """The steps of a completion."""
        if self.token in text:
            steps = text.split(self.token)
        else:
            steps = _BLANK_LINE.split(text)
        stripped = [step.strip() for step in steps]
        # A blank step would have a probability, and count in the score.
        return [step for step in stripped if step]

    def score(self, log_odds: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """The score, and the probability of each step."""
        # In float64: a product of many probabilities loses digits in float32.
        probabilities = tuple(torch.tensor(log_odds, dtype=torch.float64).sigmoid().tolist())
        if self.how == "min":
            score = min(probabilities)
        elif self.how == "last":
            score = probabilities[-1]
        else:
            score = math.prod(probabilities)
        return score, probabilities
