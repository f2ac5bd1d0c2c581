"""`ServedModel`: the description of a served reward model. `LoadedModel`: its scorer.

    loaded = LoadedModel.load(ServedModelConfig(model="results/rm/final"), server_config)
    prepared = loaded.prepare([conversation, RenderedText("<|im_start|>user...")])    # tokens: a CPU's work
    scores = loaded.score(prepared)                                                   # the model's work

Routes know `ServedModel` alone, which has no weights: with replicas it comes from another process. `prepare` and
`score` run in different threads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.rendering import Renderer
from treeward.model.contract import read_contract
from treeward.model.pretrained import check_device
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.identity import scorer_identity
from treeward.scoring.rewarding import load_shaper
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Prepared, PreparedScorer, Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.rendered_text import Ending, RenderedText
from treeward.tree.prefix import PrefixCache
from treeward.tree.token_tree import common_prefix_length


@dataclass(frozen=True)
class ServedModel:
    """A reward model, or several as one, under its name in requests.

    `members`: their folders or hub names. `scores`: what scores depend on. `contract_sha256`: hash of the scoring
    contract, or of all members' contracts; None if one is missing or unchecked. `temperature`: scores divided by it are
    log-odds.
    """

    name: str
    renderer: Renderer
    members: tuple[str, ...]
    scores: dict[str, Any]
    contract_sha256: str | None
    heads: tuple[str, ...]
    temperature: float | None
    shaper: Shaper | None

    @classmethod
    def of(cls, section: ServedModelConfig, scorer: PreparedScorer) -> ServedModel:
        """The model of a section with this `scorer`. Raises `ConfigError` for shaping by missing constants."""
        contracts = [member.contract for member in scorer.members]
        # An unchecked model may break its contract; other head weights give other scores.
        is_kept = section.check_contract and section.head_weights is None
        hashes = [contract.scores_sha256 for contract in contracts if contract is not None and is_kept]
        calibration = contracts[0].calibration if hashes and isinstance(scorer, Scorer) and contracts[0] else None
        return cls(
            name=section.served_name,
            members=section.models,
            renderer=scorer.renderer,
            scores=scorer_identity(scorer, section.models[0]),
            contract_sha256="+".join(hashes) if hashes and len(hashes) == len(contracts) else None,
            heads=scorer.members[0].head_names if len(scorer.members) == 1 else (),
            temperature=calibration.temperature.value if calibration and calibration.temperature else None,
            shaper=load_shaper(section, tokenizer=scorer.renderer.tokenizer),
        )

    @cached_property
    def ending(self) -> Ending:
        """How rendered text of this model ends."""
        return Ending.of(self.renderer)

    @cached_property
    def identity(self) -> str:
        """Hash of everything that rewards depend on."""
        parts = [self.scores, *(() if self.shaper is None else (self.shaper.config, self.shaper.calibration))]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def described(self, created: int) -> dict[str, Any]:
        """The model as /v1/models lists it. `created`: seconds of the epoch."""
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "treeward",
            "root": self.members[0],
            "max_model_len": self.renderer.max_length,
            "contract": self.contract_sha256,
            "members": list(self.members),
            "heads": list(self.heads),
            "temperature": self.temperature,
            "shaped": self.shaper is not None,
            "identity": self.identity,
        }


class LoadedModel:
    """A served model with its scorer."""

    def __init__(self, section: ServedModelConfig, scorer: PreparedScorer) -> None:
        self.scorer, self.served = scorer, ServedModel.of(section, scorer)

    @classmethod
    def load(cls, section: ServedModelConfig, server: ServerConfig) -> LoadedModel:
        """Load the section's models. Raises `ModelError` for a model that breaks its scoring contract, and
        `ConfigError` for a missing device.
        """
        check_device(section.device, where=section.served_name, field="device")
        contracts = [contract for contract in map(read_contract, section.models) if contract is not None]
        is_known = section.max_length or any(c.rendering.max_length or c.rendering.trained_length for c in contracts)
        config = section if is_known else section.model_copy(update={"max_length": section.default_max_length})
        capacity = {"batch_tokens": server.batch_tokens, "prefix_cache_bytes": server.prefix_cache_bytes}
        return cls(section, load_scorer(config, device=section.device, **capacity))

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.served.name

    @property
    def caches(self) -> list[PrefixCache]:
        """The prefix caches of all members."""
        members = dict.fromkeys(self.scorer.members)
        return [member.prefix_cache for member in members if member.prefix_cache is not None]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the models so far, after sharing."""
        return self.scorer.num_computed_tokens

    def prepare(self, inputs: Sequence[Conversation | RenderedText]) -> list[Prepared]:
        """The tokens of conversations, in order; a conversation that cannot be scored has an error."""
        chats = [item for item in inputs if not isinstance(item, RenderedText)]
        texts = [item.text for item in inputs if isinstance(item, RenderedText)]
        prepared_chats = iter(self.scorer.prepare(chats, on_error="mask"))
        prepared_texts = iter(self.scorer.prepare_texts(texts))
        return [next(prepared_texts if isinstance(item, RenderedText) else prepared_chats) for item in inputs]

    def score(self, prepared: Sequence[Prepared]) -> list[Score]:
        """Scores in order; a score that is not finite is None.

        Passes on the model's errors. If it has run out of memory, cached prompts are dropped first.
        """
        try:
            return self.scorer.score_prepared(prepared, on_error="mask")
        except (torch.OutOfMemoryError, MemoryError):
            for cache in self.caches:
                cache.clear()
            torch.cuda.empty_cache()
            raise

    def cost(self, prepared: Prepared, like: Prepared | None) -> int:
        """About how many tokens a conversation adds to a batch with a conversation `like` it."""
        assert prepared.ids is not None, "what has an error is not queued"
        cached = self.caches[0].match(prepared.ids) if self.caches else 0
        shared = 0 if like is None or like.ids is None else common_prefix_length(prepared.ids, like.ids)
        return math.ceil(prepared.num_tokens * (1 - max(cached, shared) / len(prepared.ids)))
