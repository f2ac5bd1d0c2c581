"""`ServedModel`: the description of a served reward model. `LoadedModel`: its scorers.

    loaded = LoadedModel.load(ServedModelConfig(model="results/rm/final"), server_config)
    prepared = loaded.prepare([conversation, RenderedText("<|im_start|>user...")])    # tokens: a CPU's work
    scores = loaded.score(prepared)                                                   # the model's work

Routes know `ServedModel` alone, which has no weights: with replicas it comes from another process. `prepare` and
`score` run in different threads. `ClassScorer` runs a user's reward class (`reward_class: "my:MyReward"`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.rendering import Renderer
from treeward.environments.custom import CustomEnvironment
from treeward.environments.interface import NO_COMPLETION, completion_text
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import read_contract
from treeward.model.pretrained import check_device
from treeward.scoring.ensemble import EnsembleScorer, load_scorer
from treeward.scoring.rewarding import load_shaper
from treeward.scoring.score import Conversation, OnError, Score
from treeward.scoring.scorer import Prepared, PreparedScorer, Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.rendered_text import Ending, RenderedText
from treeward.tree.prefix import PrefixCache
from treeward.tree.token_tree import common_prefix_length


@dataclass(frozen=True)
class ServedModel:
    """A reward model, or several as one, under its name in requests.

    `members`: their folders or hub names. `renderer`: None for a reward class, which reads messages. `reads_text`:
    whether it accepts rendered text; a reward class does not, nor do members that render differently. `scores_id`: hash
    of everything that scores depend on. `contract_sha256`: hash of the scoring contract, or of all members' contracts;
    None if one is missing or unchecked. `temperature`: scores divided by it are log-odds.
    """

    name: str
    members: tuple[str, ...] = ()
    renderer: Renderer | None = None
    reads_text: bool = False
    scores_id: str = ""
    contract_sha256: str | None = None
    heads: tuple[str, ...] = ()
    temperature: float | None = None
    shaper: Shaper | None = None

    @classmethod
    def of(cls, section: ServedModelConfig, scorer: PreparedScorer) -> ServedModel:
        """The model of a section with this `scorer`, not shaped yet (see `shaped`)."""
        contracts = [member.contract for member in scorer.members]
        # An unchecked model may break its contract; other head weights give other scores.
        is_kept = section.check_contract and section.head_weights is None
        hashes = [contract.scores_sha256 for contract in contracts if contract is not None and is_kept]
        calibration = contracts[0].calibration if hashes and isinstance(scorer, Scorer) and contracts[0] else None
        ids = [member.model_id for member in scorer.members]
        weights = [member.head_weights for member in scorer.members]
        names = [] if contracts and all(contracts) else [section.served_name, *section.models]
        ensemble = scorer.config.model_dump() if isinstance(scorer, EnsembleScorer) else None
        return cls(
            name=section.served_name,
            renderer=scorer.renderer,
            reads_text=scorer.reads_text,
            scores_id=_sha256([ids, names, weights, ensemble]),
            contract_sha256="+".join(hashes) if hashes and len(hashes) == len(contracts) else None,
            heads=scorer.members[0].head_names if len(scorer.members) == 1 else (),
            temperature=calibration.temperature.value if calibration and calibration.temperature else None,
        )

    def shaped(self, section: ServedModelConfig) -> ServedModel:
        """The model with its section's names and shaping. Raises `ConfigError` for missing constants."""
        if self.renderer is not None:
            shaper = load_shaper(section, tokenizer=self.renderer.tokenizer)
            return replace(self, members=section.models, shaper=shaper)
        assert section.shaping != "contract", "the section of a reward class refuses it"
        shaper = None if section.shaping is None else Shaper(section.shaping)
        return replace(self, members=(str(section.reward_class), *section.models), shaper=shaper)

    @cached_property
    def ending(self) -> Ending:
        """How rendered text of this model ends."""
        return Ending.of(self.renderer)

    @cached_property
    def shaping_sha256(self) -> str | None:
        """Hash of the shaping and its fitted constants; None without shaping."""
        if self.shaper is None:
            return None
        calibration = self.shaper.calibration
        return _sha256([self.shaper.config.model_dump_json(), calibration and calibration.model_dump_json()])

    @property
    def identity(self) -> str:
        """Hash of everything that rewards depend on."""
        return _sha256([self.scores_id, self.shaping_sha256])

    @property
    def reference_key(self) -> str | None:
        """The rows' key of reference answers for the shaping; None without one."""
        return None if self.shaper is None else self.shaper.reference_key

    @property
    def developer_role(self) -> str:
        """The role of a rollout's developer message."""
        return "system" if self.renderer is None else self.renderer.developer_role

    def described(self, created: int) -> dict[str, Any]:
        """The model as /v1/models lists it. `created`: seconds of the epoch."""
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "treeward",
            "root": self.members[0] if self.members else self.name,
            "max_model_len": None if self.renderer is None else self.renderer.max_length,
            "contract": self.contract_sha256,
            "members": list(self.members),
            "heads": list(self.heads),
            "temperature": self.temperature,
            "shaped": self.shaper is not None,
            "shaping_sha256": self.shaping_sha256,
            "identity": self.identity,
            "reference_key": self.reference_key,
            "developer_role": self.developer_role,
        }


class LoadedModel:
    """The scorers of a served model: `replicas`, one on each device, share a batch."""

    def __init__(self, section: ServedModelConfig, replicas: Sequence[PreparedScorer]) -> None:
        self.replicas, self.scorer = tuple(replicas), replicas[0]
        self.served = ServedModel.of(section, self.scorer).shaped(section)
        self._pool = ThreadPoolExecutor(len(self.replicas), thread_name_prefix="treeward-replica")

    @classmethod
    def load(cls, section: ServedModelConfig, server: ServerConfig) -> LoadedModel:
        """Load the section's models. Raises `ModelError` for a model that breaks its scoring contract, and
        `ConfigError` for a missing device or a reward class that cannot be constructed.
        """
        if section.reward_class is not None:
            replicas: list[PreparedScorer] = [ClassScorer(section.reward_class, section.models[0])]
        else:
            for device in section.device:
                check_device(device, where=section.served_name, field="device")
            contracts = [contract for contract in map(read_contract, section.models) if contract is not None]
            is_known = section.max_length or any(
                c.rendering.max_length or c.rendering.trained_length for c in contracts
            )
            config = section if is_known else section.model_copy(update={"max_length": section.default_max_length})
            capacity = {"batch_tokens": server.batch_tokens, "prefix_cache_bytes": server.prefix_cache_bytes}
            replicas = [load_scorer(config, device=device, **capacity) for device in section.device]
        return cls(section, replicas)

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.served.name

    @property
    def caches(self) -> list[PrefixCache]:
        """The prefix caches of all scorers; of all replicas, the first one's first."""
        members = dict.fromkeys(member for replica in self.replicas for member in replica.members)
        return [member.prefix_cache for member in members if member.prefix_cache is not None]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the models so far, after sharing."""
        return sum(replica.num_computed_tokens for replica in self.replicas)

    def prepare(self, inputs: Sequence[Conversation | RenderedText]) -> list[Prepared]:
        """The tokens of conversations, in order; a conversation that cannot be scored has an error."""
        chats = [item for item in inputs if not isinstance(item, RenderedText)]
        texts = [item.text for item in inputs if isinstance(item, RenderedText)]
        prepared_chats = iter(self.scorer.prepare(chats, on_error="mask"))
        prepared_texts = iter(self.scorer.prepare_texts(texts))
        return [next(prepared_texts if isinstance(item, RenderedText) else prepared_chats) for item in inputs]

    def score(self, prepared: Sequence[Prepared]) -> list[Score]:
        """Scores in order, by all replicas, each with an equal part of the tokens; a score that is not finite is None.

        Passes on the model's errors. If it has run out of memory, cached prompts are dropped first.
        """
        tokens, number = np.array([item.num_tokens for item in prepared]), len(self.replicas)
        # By the middle of each, so that a single conversation goes to the first replica, whose cache `cost` reads.
        middles, shares = tokens.cumsum() - tokens / 2, tokens.sum() * np.arange(1, number) / number
        bounds = pairwise([0, *np.searchsorted(middles, shares, side="right"), len(prepared)])
        parts = zip(self.replicas, [prepared[start:end] for start, end in bounds], strict=True)
        futures = [self._pool.submit(scorer.score_prepared, part, on_error="mask") for scorer, part in parts if part]
        wait(futures)  # all of them, if one fails too: a scorer has one caller at a time
        try:
            return [score for future in futures for score in future.result()]
        except (torch.OutOfMemoryError, MemoryError):
            for cache in self.caches:
                cache.clear()
            torch.cuda.empty_cache()
            raise

    def cost(self, prepared: Prepared, like: Prepared | None) -> int:
        """About how many tokens a conversation adds to a batch with a conversation `like` it."""
        if prepared.ids is None or not len(prepared.ids):
            return prepared.num_tokens
        cached = self.caches[0].match(prepared.ids) if self.caches else 0
        shared = 0 if like is None or like.ids is None else common_prefix_length(prepared.ids, like.ids)
        return math.ceil(prepared.num_tokens * (1 - max(cached, shared) / len(prepared.ids)))


def _sha256(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


NUM_TOKENS = 512
"""A conversation's part of a batch's budget, as the tokens of a reward class are unknown."""


@dataclass(frozen=True, slots=True)
class _Chat(Prepared):
    conversation: Conversation = ()


class ClassScorer(PreparedScorer):
    """A reward class as the custom environment calls it, constructed with the model's path; one call at a time.

    A conversation for which it fails, or gives no finite number, has no score. Raises `ConfigError` for a class that
    cannot be imported, constructed or called.
    """

    renderer = None
    reads_text = False
    members = ()

    def __init__(self, reward_class: str, model: str) -> None:
        try:
            self.environment = CustomEnvironment({"function": reward_class, "kwargs": {"model_path": model}})
        except ConfigError as error:
            raise error.but(where=None, field="reward_class", got=reward_class) from error

    def prepare(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Prepared]:
        errors = [NO_COMPLETION if completion_text(conversation) is None else None for conversation in conversations]
        pairs = enumerate(zip(conversations, errors, strict=True))
        return [_Chat(f"{i}", None, NUM_TOKENS, error=error, conversation=chat) for i, (chat, error) in pairs]

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        error = "this model reads messages: send messages, not rendered text"
        return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        conversations = [item.conversation for item in prepared if isinstance(item, _Chat)]
        rewards = self.environment.rewards(conversations, [{} for _ in conversations])
        if len(rewards) > 1 and all(reward.value is None for reward in rewards):
            raise ModelError(str(rewards[0].error))  # the batcher then isolates the failing conversations
        return [Score(reward.value, error=reward.error) for reward in rewards]
