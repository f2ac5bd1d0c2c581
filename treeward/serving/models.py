"""`ServedModel`: what a server says of a reward model. `LoadedModel`: the scorers behind it.

    loaded = LoadedModel.load(ServedModelConfig(model="results/rm/final"), server_config)
    loaded.served.described(created=0)                                                # as /v1/models lists it
    prepared = loaded.prepare([conversation, RenderedText("<|im_start|>user...")])    # tokens: a CPU's work
    scores = loaded.score(prepared)                                                   # the model's work

Routes know the first alone, which has no weights: with replicas it comes from another process. The two steps of the
second run in different threads. `ClassScorer` is a reward class of the user's own (`reward_class: "my:MyReward"`).
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
    """A reward model, or several as one, under the name that requests call it by.

    `members`: the folders or hub names that it was loaded from. `renderer`: what renders conversations; None for a
    reward class, which reads messages. `reads_text`: rendered text has one meaning, which it has not for a reward class
    and for members that render differently. `scores_id`: hash of what scores depend on. `contract_sha256`: hash of the
    scoring contract, or of all members' contracts; None where one has none, or was not checked. `temperature`: what
    scores are divided by to be log-odds.
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
        """The model of a section as `scorer` has it; `shaped` adds the rest."""
        contracts = [member.contract for member in scorer.members]
        # Nobody knows whether a model that was not checked keeps its contract; other weights make another score.
        is_kept = section.check_contract and section.head_weights is None
        hashes = [contract.scores_sha256 for contract in contracts if contract is not None and is_kept]
        calibration = contracts[0].calibration if hashes and isinstance(scorer, Scorer) and contracts[0] else None
        ids, weights = [one.model_id for one in scorer.members], [one.head_weights for one in scorer.members]
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
        """The model with the names and the shaping of its section. Raises `ConfigError` for missing constants."""
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
        """Hash of what rewards depend on."""
        return _sha256([self.scores_id, self.shaping_sha256])

    @property
    def reference_key(self) -> str | None:
        """The key under which rows hold the reference answers that the shaping compares with; None for none."""
        config = None if self.shaper is None else self.shaper.config
        return None if config is None or config.reference is None else config.reference_key

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
        """Load what the section names. Raises `ModelError` for a model that does not keep its scoring contract, and
        `ConfigError` for a device that is not there, and for a reward class that cannot be made.
        """
        if section.reward_class is not None:
            replicas: list[PreparedScorer] = [ClassScorer(section.reward_class, section.models[0])]
        else:
            for device in section.device:
                check_device(device, where=section.served_name, field="device")
            contracts = [contract for contract in map(read_contract, section.models) if contract is not None]
            is_limited = section.max_length or any(contract.rendering.max_length for contract in contracts)
            config = section if is_limited else section.model_copy(update={"max_length": section.default_max_length})
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

    def prepare(self, asked: Sequence[Conversation | RenderedText]) -> list[Prepared]:
        """The tokens of conversations, in order; one that cannot be scored has an error."""
        chats = [one for one in asked if not isinstance(one, RenderedText)]
        texts = [one.text for one in asked if isinstance(one, RenderedText)]
        prepared_chats = iter(self.scorer.prepare(chats, on_error="mask"))
        prepared_texts = iter(self.scorer.prepare_texts(texts))
        return [next(prepared_texts if isinstance(one, RenderedText) else prepared_chats) for one in asked]

    def score(self, prepared: Sequence[Prepared]) -> list[Score]:
        """Scores in order, by all replicas, each with an equal part of the tokens; one that is not finite is None.

        Raises what the model raises. If it has run out of memory, cached prompts are dropped first.
        """
        tokens, number = np.array([one.num_tokens for one in prepared]), len(self.replicas)
        # By the middle of each: of two, one that comes alone goes to the first, whose cache `cost` asks.
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
        """About how many tokens a conversation adds to a batch that has one `like` it: those that are not known."""
        if prepared.ids is None or not len(prepared.ids):
            return prepared.num_tokens
        cached = self.caches[0].match(prepared.ids) if self.caches else 0
        shared = 0 if like is None or like.ids is None else common_prefix_length(prepared.ids, like.ids)
        return math.ceil(prepared.num_tokens * (1 - max(cached, shared) / len(prepared.ids)))


def _sha256(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


NUM_TOKENS = 512
"""The part of a batch's budget that a conversation takes: what it really has, the class alone knows."""


@dataclass(frozen=True, slots=True)
class _Chat(Prepared):
    conversation: Conversation = ()


class ClassScorer(PreparedScorer):
    """A reward class as the custom environment calls it, made with the path of the model; never two times at once.

    A conversation for which it fails, or gives no finite number, has no score. Raises `ConfigError` for a class that
    cannot be found, made or called.
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
        errors = [NO_COMPLETION if completion_text(one) is None else None for one in conversations]
        pairs = enumerate(zip(conversations, errors, strict=True))
        return [_Chat(f"{i}", None, NUM_TOKENS, error=error, conversation=one) for i, (one, error) in pairs]

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        error = "this model reads messages: send messages, not rendered text"
        return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        conversations = [one.conversation for one in prepared if isinstance(one, _Chat)]
        rewards = self.environment.rewards(conversations, [{} for _ in conversations])
        if len(rewards) > 1 and all(reward.value is None for reward in rewards):
            raise ModelError(str(rewards[0].error))  # a batch that fails is tried apart
        return [Score(reward.value, error=reward.error) for reward in rewards]
