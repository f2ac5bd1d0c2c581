"""`ServedModel`: a reward model under the name that requests call it by, scored in two steps.

    served = ServedModel.load(ServedModelConfig(model="results/rm/final"), server_config)
    items = served.prepare([conversation, RenderedText("<|im_start|>user...")])     # tokens: a CPU's work
    scores = served.score(items)                                                    # the model's work

The two steps run in different threads. `Item.num_tokens` is what a batch is filled by. `CustomModel` is a reward class
of the user's own (`reward_class: "my_module:MyReward"`), served as a reward model is.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from treeward.config.reward_shaping import RewardShapingConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.rendering import Renderer
from treeward.environments.completions import NO_COMPLETION, completion_text
from treeward.environments.custom import CustomEnvironment
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import ScoringContract, read_contract
from treeward.model.pretrained import DTYPES, check_device
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rewarding import load_shaper
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Prepared, Scorer
from treeward.scoring.shaping import Shaper
from treeward.serving.rendered_text import Ending, RenderedText
from treeward.tree.token_tree import common_prefix_length

logger = logging.getLogger(__name__)

_NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A conversation that is ready to be scored.

    `num_tokens`: what it costs alone. `ids`: its tokens, for the first member of an ensemble; those of one `prompt` are
    batched together. `error`: why it cannot be scored.
    """

    prepared: Any
    num_tokens: int
    ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    prompt: int = 0
    error: str | None = None


class ServedModel:
    """A scorer with its name, its contracts and its shaping. `members`: the models that it was loaded from. `replicas`:
    all copies of the scorer, one on each device, which share a batch.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer | EnsembleScorer,
        *,
        shaper: Shaper | None = None,
        contracts: Sequence[ScoringContract] = (),
        members: Sequence[str] = (),
        replicas: Sequence[Scorer | EnsembleScorer] = (),
    ) -> None:
        self.name, self.scorer, self.shaper = name, scorer, shaper
        self.contracts, self.members = tuple(contracts), tuple(members)
        self.replicas = tuple(replicas) or (scorer,)
        self._pool = ThreadPoolExecutor(len(self.replicas), thread_name_prefix="treeward-replica")

    @classmethod
    def load(cls, config: ServedModelConfig, server: ServerConfig) -> ServedModel:
        """Load what the section names. Raises `ModelError` for a model that does not keep its scoring contract, and
        `ConfigError` for a device that is not there.
        """
        for device in config.device:
            check_device(device, where=config.served_name, field="device")
        same = ("head_weights", "truncation", "check_contract", "trust_remote_code")
        members, ensemble = config.members, config.ensemble
        contracts = [contract for contract in map(read_contract, members) if contract is not None]
        is_limited = any(contract.rendering.max_length for contract in contracts)
        options: dict[str, Any] = {
            "max_length": config.max_length or (None if is_limited else config.default_max_length),
            **{name: getattr(config, name) for name in same},
            "dtype": DTYPES[config.dtype],
            "batch_tokens": server.batch_tokens,
            "prefix_cache_bytes": server.prefix_cache_bytes,
        }
        replicas: list[Scorer | EnsembleScorer] = [
            Scorer.load(members[0], device=device, **options)
            if ensemble is None
            else EnsembleScorer.load(members, config=ensemble, device=device, **options)
            for device in config.device
        ]
        # Nobody knows whether a model that was not checked keeps its contract; other weights make another score.
        found = contracts if config.check_contract and config.head_weights is None else []
        served = cls(config.served_name, replicas[0], contracts=found, members=members, replicas=replicas)
        served.shaper = served.make_shaper(config)
        _ = served.identity  # it may read all weights: now, not while requests wait
        return served

    def face(self) -> ServedModel:
        """The model without its weights and its shaping, for another process: it reads requests and describes itself,
        and cannot score.
        """
        face = copy.copy(self)
        for name in ("_pool", "environment"):
            face.__dict__.pop(name, None)
        face.scorer = _without_weights(self.scorer)
        face.replicas, face.shaper = (face.scorer,), None
        return face

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The members' scorers, each once; of all replicas, the first one's first."""
        return tuple(dict.fromkeys(member for replica in self.replicas for member in replica.members))

    @property
    def renderer(self) -> Renderer | None:
        """What renders conversations; None for a reward class, which reads messages."""
        return self.scorers[0].renderer if self.scorers else None

    @cached_property
    def ending(self) -> Ending:
        """How rendered text of this model ends."""
        return Ending.of(self.renderer)

    @property
    def reads_text(self) -> bool:
        """Whether rendered text has one meaning: not for a reward class, nor for members that render differently."""
        return bool(self.scorers) and (not isinstance(self.scorer, EnsembleScorer) or self.scorer.render_alike)

    @property
    def contract_sha256(self) -> str | None:
        """Hash of the scoring contract, or of all members' contracts; None where one has none."""
        hashes = [contract.scores_sha256 for contract in self.contracts]
        return "+".join(hashes) if hashes and len(hashes) == len(self.members) else None

    @property
    def shaping_sha256(self) -> str | None:
        """Hash of the shaping and its fitted constants; None without shaping."""
        if self.shaper is None:
            return None
        calibrations = [contract.calibration for contract in self.contracts]
        parts = [self.shaper.config.model_dump_json(), *(one and one.model_dump_json() for one in calibrations)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def identity(self) -> str:
        """Hash of what rewards depend on: the contract of each model, or else its name and the sum of its weights;
        weights of heads, the ensemble, and the shaping.
        """
        members = () if self.scorer is None else self.scorer.members
        names = [] if members and all(one.contract for one in members) else [self.name, *self.members]
        ensemble = self.scorer.config.model_dump() if isinstance(self.scorer, EnsembleScorer) else None
        ids, weights = [one.model_id for one in members], [one.head_weights for one in members]
        parts = [ids, names, weights, ensemble, self.shaping_sha256]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

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
        calibration = self.contracts[0].calibration if self.contracts and isinstance(self.scorer, Scorer) else None
        temperature = None if calibration is None or calibration.temperature is None else calibration.temperature.value
        scorers = () if self.scorer is None else self.scorer.members
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "treeward",
            "root": self.members[0] if self.members else self.name,
            "max_model_len": None if self.renderer is None else self.renderer.max_length,
            "contract": self.contract_sha256,
            "members": list(self.members),
            "heads": list(scorers[0].head_names) if len(scorers) == 1 else [],
            "temperature": temperature,  # what scores are divided by to be log-odds
            "shaped": self.shaper is not None,
            "shaping_sha256": self.shaping_sha256,
            "identity": self.identity,
            "reference_key": self.reference_key,
            "developer_role": self.developer_role,
        }

    def prepare(self, asked: Sequence[Conversation | RenderedText]) -> list[Item]:
        """Items in order; a conversation that cannot be scored has an error."""
        asked_chats = [one for one in asked if not isinstance(one, RenderedText)]
        chats: Sequence[Prepared | tuple[Prepared, ...]] = self.scorer.prepare(asked_chats, on_error="mask")
        of_chats = iter([_item(one) for one in chats])
        of_texts = iter(self._prepare_texts([one for one in asked if isinstance(one, RenderedText)]))
        return [next(of_texts if isinstance(one, RenderedText) else of_chats) for one in asked]

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Scores in order; one that is not finite is None with its reason.

        Raises what the model raises. If it has run out of memory, cached prompts are dropped first.
        """
        try:
            return self._score(items)
        except (torch.OutOfMemoryError, MemoryError):
            for cache in [scorer.prefix_cache for scorer in self.scorers if scorer.prefix_cache is not None]:
                cache.clear()
            torch.cuda.empty_cache()
            raise

    def _score(self, items: Sequence[Item]) -> list[Score]:
        """The scores by all replicas, each with an equal part of the tokens; the order keeps prompts together."""
        tokens, number = np.array([item.num_tokens for item in items]), len(self.replicas)
        # By the middle of each: of two, one that comes alone goes to the first, whose cache `cost` asks.
        middles, shares = tokens.cumsum() - tokens / 2, tokens.sum() * np.arange(1, number) / number
        bounds = pairwise([0, *np.searchsorted(middles, shares, side="right"), len(items)])
        parts = [[item.prepared for item in items[start:end]] for start, end in bounds]
        asked = [(replica, part) for replica, part in zip(self.replicas, parts, strict=True) if part]
        futures = [self._pool.submit(replica.score_prepared, part, on_error="mask") for replica, part in asked]
        wait(futures)  # all of them, if one fails too: a scorer has one caller at a time
        return [score for future in futures for score in future.result()]

    def cost(self, item: Item, like: Item | None) -> int:
        """About how many tokens an item adds to a batch that has one `like` it: those that are not known already."""
        if not len(item.ids):
            return item.num_tokens
        cache = self.scorers[0].prefix_cache
        cached = 0 if cache is None else cache.match(item.ids)
        shared = 0 if like is None else common_prefix_length(item.ids, like.ids)
        return math.ceil(item.num_tokens * (1 - max(cached, shared) / len(item.ids)))

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the models so far, after sharing."""
        return sum(scorer.num_computed_tokens for scorer in self.scorers)

    def make_shaper(self, config: ServedModelConfig) -> Shaper | None:
        """What shapes its scores as the section says. Raises `ConfigError` for constants that are missing."""
        assert self.renderer is not None
        other = config.ensemble is not None or config.head_weights is not None
        options: dict[str, Any] = {"of_other_score": other, "tokenizer": self.renderer.tokenizer}
        return load_shaper(config.shaping, config.members[0], **options)

    def _prepare_texts(self, texts: Sequence[RenderedText]) -> list[Item]:
        if not self.reads_text:
            error = "the models of this ensemble render conversations in different ways: send messages, not text"
            return [Item(None, 0, error=error) for _ in texts]
        prepared: Sequence[Prepared | tuple[Prepared, ...]] = self.scorer.prepare_texts([one.text for one in texts])
        return [_item(one, text.prompt_length) for one, text in zip(prepared, texts, strict=True)]


class CustomModel(ServedModel):
    """A reward class: the custom environment's, with `kwargs: {model_path: ...}`, called in the server's scoring thread
    and never two times at once. A conversation for which it fails, or gives no finite number, has no score.
    """

    NUM_TOKENS = 512
    """The part of a batch's budget that a conversation takes: what it really has, the class alone knows."""
    scorers = ()
    contract_sha256 = None

    def __init__(self, name: str, environment: CustomEnvironment, *, members: Sequence[str] = ()) -> None:
        self.name, self.environment, self.shaper = name, environment, None
        self.contracts, self.members = (), tuple(members)
        self.scorer, self.replicas = None, (None,)  # type: ignore[assignment]

    @classmethod
    def load(cls, config: ServedModelConfig, server: ServerConfig) -> CustomModel:
        """Import the class and make it. Raises `ConfigError` for one that cannot be found, made or called, and for a
        shaping that needs a model's contract or tokenizer.
        """
        try:
            kwargs = {"model_path": config.members[0]}
            environment = CustomEnvironment({"function": config.reward_class, "kwargs": kwargs})
        except ConfigError as error:
            raise error.but(where=None, field="reward_class", got=config.reward_class) from error
        served = cls(config.served_name, environment, members=(str(config.reward_class), *config.members))
        served.shaper = served.make_shaper(config)
        return served

    def prepare(self, asked: Sequence[Conversation | RenderedText]) -> list[Item]:
        return [self._item(one) for one in asked]

    def score(self, items: Sequence[Item]) -> list[Score]:
        rewards = self.environment.rewards([item.prepared for item in items], [{} for _ in items])
        if len(rewards) > 1 and all(reward.value is None for reward in rewards):
            raise ModelError(str(rewards[0].error))  # a batch that fails is tried apart
        return [Score(reward.value, error=reward.error) for reward in rewards]

    def make_shaper(self, config: ServedModelConfig) -> Shaper | None:
        if isinstance(config.shaping, str):
            at = {"field": "reward_class", "got": config.reward_class}
            raise ConfigError("a reward class has no scoring contract", **at, need="shaping: a reward_shaping section")
        return None if config.shaping is None else Shaper(RewardShapingConfig.model_validate(config.shaping))

    def _item(self, asked: Conversation | RenderedText) -> Item:
        if isinstance(asked, RenderedText):
            return Item(None, 0, error="this model reads messages: send messages, not rendered text")
        return Item(asked, self.NUM_TOKENS, error=NO_COMPLETION if completion_text(asked) is None else None)


def _without_weights(scorer: Scorer | EnsembleScorer | None) -> Any:
    light: Any = copy.copy(scorer)
    if isinstance(scorer, EnsembleScorer):
        light.members = tuple(map(_without_weights, scorer.members))
    elif scorer is not None:
        light.model = light.prefix_cache = None
    return light


def _item(prepared: Prepared | tuple[Prepared, ...], prompt_length: int | None = None) -> Item:
    parts = (prepared,) if isinstance(prepared, Prepared) else prepared
    if prompt_length is not None:
        parts = tuple(replace(part, prompt_length=prompt_length) for part in parts)
    ids = np.asarray(parts[0].ids or [], dtype=np.int32)
    return Item(
        parts[0] if isinstance(prepared, Prepared) else parts,
        sum(part.num_tokens for part in parts),
        ids,
        hash(ids[: parts[0].prompt_length].tobytes()),
        next((part.error for part in parts if part.error is not None), None),
    )
