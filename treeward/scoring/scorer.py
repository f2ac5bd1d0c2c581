"""`Scorer`: conversations in, scores out, in order; the one way from messages to a score.

    scorer = Scorer.load("results/rm/final")
    scorer.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]])
    scorer.score_completions(context, [answer, other_answer])      # the prompt is computed once

Rendering, read position and head are those of training. Whatever the conversations of a call have in common is computed
once, and what else is in the call changes no score. A conversation that is too long is never cut silently: its score is
None, unless the truncation policy cuts its context, and then it says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError
from treeward.model.export import CONTRACT_FILE, read_contract
from treeward.model.loading import load_reward_model, quiet_transformers
from treeward.model.reward_model import RewardModel
from treeward.tree.batch import plan_sequences

__all__ = ["DEFAULT_BATCH_TOKENS", "Score", "Scorer"]

DEFAULT_BATCH_TOKENS = 4096

Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of one conversation.

    `score`: float32, or None where the conversation is longer than `max_length` and may not be cut. `num_tokens`: as it
    was scored, or its full length. `truncated`: some of its context was cut to make it fit.
    """

    score: float | None
    num_tokens: int
    truncated: bool = False


class Scorer:
    """Scores conversations with one reward model.

    `batch_tokens`: most tokens computed in one forward pass, counted after sharing.
    """

    def __init__(self, model: RewardModel, renderer: Renderer, *, batch_tokens: int = DEFAULT_BATCH_TOKENS) -> None:
        self.model = model.eval()
        self.renderer = renderer
        self.batch_tokens = batch_tokens
        self.num_computed_tokens = self.num_row_tokens = 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        trust_remote_code: bool = False,
    ) -> Scorer:
        """Load a reward model from a folder or the hub. `device`: None is a GPU where there is one.

        Raises `ModelError` for a checkpoint without a trained head.
        """
        quiet_transformers()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_reward_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        contract = read_contract(model) or {}
        settings = dict(contract.get("rendering", {}))
        if settings.get("max_length") is None:
            settings["max_length"] = loaded.model.max_positions
        renderer = Renderer(loaded.tokenizer, **settings)
        trained_on = contract.get("read_token")
        if trained_on not in (None, renderer.read_token):
            raise ModelError(
                "conversations do not end as they did in training, so the score would be read at another token",
                where=str(model),
                got=f"{renderer.read_token} at the end",
                need=f"{trained_on}, says {CONTRACT_FILE}",
                fix="restore the tokenizer and the chat template that were exported with the model",
            )
        return cls(loaded.model, renderer, batch_tokens=batch_tokens)

    def score(self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None) -> list[Score]:
        """Score whole conversations. `where` names each in errors.

        Raises `DataError` for a conversation that is empty, has no assistant turn at its end, or that the chat template
        refuses; `ModelError` for a score that is not finite.
        """
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        for conversation, name in zip(conversations, names, strict=True):
            _check_conversation(conversation, name)
        encoded = self.renderer.encode_many(conversations, where=names)
        fitted = [self._fit(*item) for item in zip(conversations, encoded, names, strict=True)]
        scores = iter(self.score_tokens([ids for ids, _ in fitted if ids is not None]))
        return [
            Score(None, len(full)) if ids is None else Score(next(scores), len(ids), truncated)
            for (ids, truncated), full in zip(fitted, encoded, strict=True)
        ]

    def score_completions(self, context: Conversation, completions: Sequence[Conversation | str]) -> list[Score]:
        """Score several completions of one context; a completion is messages, or the text of an assistant message."""
        if isinstance(completions, str) or not completions:
            raise DataError("there is no list of answers", got=completions, need='a list, as ["an answer", "another"]')
        ends = [[{"role": "assistant", "content": c}] if isinstance(c, str) else list(c) for c in completions]
        return self.score([[*context, *end] for end in ends])

    @torch.inference_mode()
    def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Score token sequences, each a whole conversation; float32 values in order."""
        scores = [math.nan] * len(sequences)
        for groups in plan_sequences(sequences, max_tokens=self.batch_tokens, share=self.model.layout == "tree"):
            batch = self.model.make_batch([[sequences[i] for i in group] for group in groups])
            self.num_computed_tokens += batch.num_computed_tokens
            self.num_row_tokens += batch.num_row_tokens
            values = self.model(batch).tolist()
            for i, value in zip((i for group in groups for i in group), values, strict=True):
                scores[i] = value
        if any(not math.isfinite(score) for score in scores):
            bad = next(i for i, score in enumerate(scores) if not math.isfinite(score))
            raise ModelError(
                "the model gives a score that is not finite",
                got=f"{scores[bad]} for sequence {bad} of {len(sequences[bad])} tokens",
                need="a finite number",
                fix="score in float32 (--dtype float32); if it persists, the weights are broken",
            )
        return scores

    def _fit(self, conversation: Conversation, ids: list[int], name: str) -> tuple[list[int] | None, bool]:
        if self.renderer.max_length is None or len(ids) <= self.renderer.max_length:
            return ids, False
        *context, last = conversation
        fitted = self.renderer.fit(context, [[last]], encoded=[ids], where=name)
        return (None, False) if fitted is None else (fitted.token_ids[0], fitted.truncated)


def _check_conversation(conversation: Conversation, name: str) -> None:
    if not conversation:
        raise DataError("the conversation is empty", where=name, got="no messages", need="at least one message")
    role = conversation[-1].get("role")
    if role != "assistant":
        raise DataError(
            "there is no answer to score",
            where=name,
            field="messages",
            got=f"a conversation that ends with a message of {role}",
            need="an assistant message at the end",
        )
