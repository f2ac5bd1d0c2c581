"""`ScoringWorker`: the reward model of an environment in one process, the caller's or a Ray actor's.

    worker = ScoringWorker(config, "cuda")
    worker.score(conversations)          # one `Score` for each, whose value is None where there is none

With `cpu_offload` its weights are in the CPU's memory, and on the GPU only while `score` runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS, RewardModel
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Scorer

__all__ = ["ScoringWorker"]


class ScoringWorker:
    """Loads what `config` names when it is first needed, and scores on `device`, "cpu" or "cuda"."""

    def __init__(self, config: RewardModelEnvironmentConfig, device: str) -> None:
        self._config = config
        self._device = device
        self._offload = config.dtensor_cfg.cpu_offload and device != "cpu"
        self._scorer: Scorer | EnsembleScorer | None = None

    @property
    def scorer(self) -> Scorer | EnsembleScorer:
        """The model, loaded. Raises `ModelError` or `ConfigError` where it cannot be."""
        if self._scorer is None:
            self._scorer = _load(self._config, "cpu" if self._offload else self._device)
        return self._scorer

    def load(self) -> int:
        """Load the model if it is not loaded yet; gives the process's id."""
        _ = self.scorer
        return os.getpid()

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a conversation that cannot be scored has none, and `Score.error` says why."""
        scorer = self.scorer
        with self._on_device():
            return scorer.score(conversations, on_error="mask")

    @property
    def models(self) -> list[RewardModel]:
        """The reward models, one but for an ensemble."""
        return [member.model for member in _members(self.scorer)]

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        try:
            for model in self.models:
                model.to(self._device)
            yield
        finally:
            for model in self.models:
                model.to("cpu")
            torch.cuda.empty_cache()


def _members(scorer: Scorer | EnsembleScorer) -> Sequence[Scorer]:
    return scorer.members if isinstance(scorer, EnsembleScorer) else [scorer]


def _load(config: RewardModelEnvironmentConfig, device: str) -> Scorer | EnsembleScorer:
    only_size = config.batch_tokens is None and config.batch_size is not None
    options: dict[str, Any] = {
        "device": device,
        "dtype": DTYPES[config.precision],
        "batch_tokens": None if only_size else config.batch_tokens or DEFAULT_BATCH_TOKENS,
        "max_sequences": config.batch_size,
        "max_length": config.max_model_len,
        "truncation": config.truncation,
        "trust_remote_code": config.trust_remote_code,
    }
    if config.head_weights is not None:
        options["head_weights"] = config.head_weights
    if len(config.model_names) == 1:
        name = config.tokenizer.name
        options |= {
            # the model's own, with what its contract says of it
            "tokenizer": None if name == config.model_names[0] else name,
            "chat_template": config.tokenizer.chat_template,
            "chat_template_kwargs": config.tokenizer.chat_template_kwargs,
        }
    if config.ensemble is not None:
        return EnsembleScorer.load(config.model_names, config=config.ensemble, **options)
    return Scorer.load(config.model_names[0], **options)
