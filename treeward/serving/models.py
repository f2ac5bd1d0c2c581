"""`ServedModel`: a reward model under the name that requests call it by, scored in two steps.

    served = ServedModel.load(ServedModelConfig(model="results/rm/final"), server_config)
    items = served.prepare([conversation, RenderedText("<|im_start|>user...")])     # a CPU's work: tokens
    scores = served.score(items)                                                    # the model's work

The two steps run in threads of their own. `Item.num_tokens` is what a batch is filled by.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.preference import Message
from treeward.model.contract import ScoringContract, read_contract
from treeward.model.prefix_cache import MIN_PREFIX_TOKENS
from treeward.model.pretrained import DTYPES
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rewarding import load_shaper
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Prepared, Scorer
from treeward.scoring.shaping import Shaper

__all__ = [
    "MESSAGE_CHARACTERS",
    "Asked",
    "Item",
    "RenderedText",
    "ServedModel",
    "Stem",
    "too_long",
    "weight",
]

MESSAGE_CHARACTERS = 64
"""What a message counts beside its characters: a conversation of nothing but empty messages is long as well."""
_PART_CHARACTERS = 16
_MOST_PROMPTS = 4096


@dataclass(frozen=True, slots=True)
class Stem:
    """What token ids have in common with others: those of a `family` begin as the longest of them does, which comes
    first in the request. `num_tokens`: up to where this one is like it. `prompt_length`: tokens that later requests may
    have too, which are kept for them.
    """

    family: int
    num_tokens: int
    prompt_length: int


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A conversation that a client has rendered, or tokenized, itself. `reply`: the text of its answer, if known."""

    text: str | Sequence[int]
    reply: str | None = None
    stem: Stem | None = None

    @property
    def messages(self) -> list[Message] | None:
        """What is known of it as messages: the answer, by which length is measured; None where it is not known."""
        return None if self.reply is None else [{"role": "assistant", "content": self.reply}]


Asked = Conversation | RenderedText


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation that is ready to be scored, or cannot be.

    `num_tokens`: what it costs alone; `shared_tokens` of them it has in common with the items of the same `prompt`.
    `error`: why it cannot be scored, which is the request's fault.
    """

    prepared: Any
    num_tokens: int
    shared_tokens: int = 0
    prompt: int = 0
    error: str | None = None


def weight(asked: Asked, limit: int) -> int:
    """About how many characters a conversation has, or token ids; some number above `limit` for more than that.

    A message counts as 64 more, and every part of one (of its content, a tool call) as 16. What this takes is bounded
    by the limit, whatever the conversation holds.
    """
    if isinstance(asked, RenderedText):
        return len(asked.text)
    total = MESSAGE_CHARACTERS * len(asked)
    if total > limit:
        return total
    left: list[Any] = list(asked)
    while left and total <= limit:
        part = left.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping | Sequence):
            total += _PART_CHARACTERS * len(part)
            if total <= limit:
                left.extend(part.values() if isinstance(part, Mapping) else part)
    return total


def too_long(limit: int) -> Item:
    """In place of a conversation of more weight than the limit."""
    error = (
        f"the conversation is too long: at most {limit} characters (or token ids) are read, where each message counts "
        f"as {MESSAGE_CHARACTERS} more (max_conversation_characters)"
    )
    return Item(None, 0, error=error)


class ServedModel:
    """One scorer with its name, its contracts and its shaping. `members`: the models that it was loaded from."""

    def __init__(
        self,
        name: str,
        scorer: Scorer | EnsembleScorer,
        *,
        shaper: Shaper | None = None,
        contracts: Sequence[ScoringContract] = (),
        members: Sequence[str] = (),
    ) -> None:
        self.name, self.scorer, self.shaper = name, scorer, shaper
        self.contracts, self.members = tuple(contracts), tuple(members)
        self._known_prompts: OrderedDict[int, None] = OrderedDict()

    @classmethod
    def load(cls, config: ServedModelConfig, server: ServerConfig) -> ServedModel:
        """Load what the section names. Raises `ModelError` for a model that does not keep its scoring contract."""
        options: dict[str, Any] = {
            "device": config.device,
            "dtype": DTYPES[config.dtype],
            "batch_tokens": server.batch_tokens,
            "max_length": config.max_length,
            "truncation": config.truncation,
            "check_contract": config.check_contract,
            "prefix_cache_bytes": server.prefix_cache_bytes,
            "trust_remote_code": config.trust_remote_code,
        }
        members = config.members
        scorer: Scorer | EnsembleScorer
        if config.ensemble is None:
            scorer = Scorer.load(members[0], **options)
        else:
            scorer = EnsembleScorer.load(members, config=config.ensemble, **options)
        shaper = load_shaper(
            config.shaping,
            members[0],
            is_ensemble=config.ensemble is not None,
            tokenizer=scorer.renderer.tokenizer,
        )
        contracts = [read_contract(member) for member in members]
        return cls(
            config.served_name,
            scorer,
            shaper=shaper,
            # of a model that was not checked nobody knows whether it keeps its contract
            contracts=[contract for contract in contracts if contract is not None and config.check_contract],
            members=members,
        )

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The members' scorers, each once."""
        members = self.scorer.members if isinstance(self.scorer, EnsembleScorer) else (self.scorer,)
        return tuple(dict.fromkeys(members))

    @property
    def contract_sha256(self) -> str | None:
        """What identifies the scores: of the contract, or of the members' contracts; None where one has none."""
        hashes = [contract.scores_sha256 for contract in self.contracts]
        return "+".join(hashes) if hashes and len(hashes) == len(self.members) else None

    @property
    def max_length(self) -> int | None:
        """Most tokens of a conversation; None for no limit."""
        return self.scorer.renderer.max_length

    @property
    def temperature(self) -> float | None:
        """What scores are divided by to be log-odds, if the contract of the one model says so."""
        if len(self.members) != 1 or not self.contracts or isinstance(self.scorer, EnsembleScorer):
            return None
        calibration = self.contracts[0].calibration
        return None if calibration is None or calibration.temperature is None else calibration.temperature.value

    @property
    def reference_key(self) -> str | None:
        """The key under which rows hold the reference answers that the shaping compares with; None for none."""
        config = None if self.shaper is None else self.shaper.config
        return None if config is None or config.reference is None else config.reference_key

    @property
    def shaping_sha256(self) -> str | None:
        """What identifies the shaping, with its constants; None without one."""
        if self.shaper is None:
            return None
        calibrations = [contract.calibration for contract in self.contracts]
        parts = [
            self.shaper.config.model_dump(mode="json"),
            [None if one is None else one.model_dump(mode="json") for one in calibrations],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def developer_role(self) -> str:
        """The role that stands for the developer of a rollout: most templates know `system`, and some leave out
        silently what they do not know.
        """
        return "developer" if "developer" in self.scorer.renderer.chat_template else "system"

    def prepare(self, asked: Sequence[Asked]) -> list[Item]:
        """Items in order; a conversation that cannot be scored has an error."""
        chats: Sequence[Prepared | tuple[Prepared, ...]] = self.scorer.prepare(
            [one for one in asked if not isinstance(one, RenderedText)], on_error="mask"
        )
        items = iter([_item(chat) for chat in chats])
        texts = iter(self._prepare_texts([one for one in asked if isinstance(one, RenderedText)]))
        return [next(texts) if isinstance(one, RenderedText) else next(items) for one in asked]

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Scores in order; one that is not finite is None with its reason.

        Raises what the model raises. If it has run out of memory, kept prompts are forgotten first.
        """
        try:
            scores = self.scorer.score_prepared([item.prepared for item in items], on_error="mask")
        except (torch.OutOfMemoryError, MemoryError):
            self._free_memory()
            raise
        if self._keeps_prompts:
            for item in items:
                self._known_prompts[item.prompt] = None
                self._known_prompts.move_to_end(item.prompt)
            while len(self._known_prompts) > _MOST_PROMPTS:
                self._known_prompts.popitem(last=False)
        return scores

    def cost(self, item: Item, prompts: Container[int]) -> int:
        """About how many tokens an item adds to a batch that has these prompts. Where it is wrong, as the prompt is not
        kept any more, the scorer makes two passes of one.
        """
        kept = item.shared_tokens >= MIN_PREFIX_TOKENS and item.prompt in self._known_prompts
        return item.num_tokens - (item.shared_tokens if kept or item.prompt in prompts else 0)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the models so far, after sharing."""
        return sum(scorer.num_computed_tokens for scorer in self.scorers)

    @property
    def _keeps_prompts(self) -> bool:
        return all(scorer.prefix_cache is not None and scorer.model.layout == "tree" for scorer in self.scorers)

    def _free_memory(self) -> None:
        self._known_prompts.clear()
        for scorer in self.scorers:
            if scorer.prefix_cache is not None:
                scorer.prefix_cache.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _prepare_texts(self, texts: Sequence[RenderedText]) -> list[Item]:
        if isinstance(self.scorer, EnsembleScorer) and not self.scorer.render_alike:
            error = "the models of this ensemble render conversations in different ways: send messages, not text"
            return [Item(None, 0, error=error) for _ in texts]
        prepared: Sequence[Prepared | tuple[Prepared, ...]] = self.scorer.prepare_texts([one.text for one in texts])
        return [
            _item(one) if text.stem is None else _branch(one, text.stem)
            for one, text in zip(prepared, texts, strict=True)
        ]


def _item(prepared: Prepared | tuple[Prepared, ...]) -> Item:
    parts = (prepared,) if isinstance(prepared, Prepared) else prepared
    first = parts[0]
    prompt = np.asarray(first.ids[: first.prompt_length] if first.ids is not None else [], dtype=np.int32)
    return Item(
        prepared,
        sum(part.num_tokens for part in parts),
        sum(part.prompt_length for part in parts),
        hash(prompt.tobytes()),
        next((part.error for part in parts if part.error is not None), None),
    )


def _branch(prepared: Prepared | tuple[Prepared, ...], stem: Stem) -> Item:
    if isinstance(prepared, Prepared):
        item = _item(replace(prepared, prompt_length=stem.prompt_length))
    else:
        item = _item(tuple(replace(part, prompt_length=stem.prompt_length) for part in prepared))
    members = 1 if isinstance(prepared, Prepared) else len(prepared)
    return replace(item, shared_tokens=members * stem.num_tokens, prompt=stem.family)
