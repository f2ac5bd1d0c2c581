"""`Rewarder`: from conversations to rewards, scoring and shaping in one step; what environments and commands share.

    score = lambda conversations, names: scorer.score(conversations, where=names, on_error="mask")
    rewarder = Rewarder(score, load_shaper(config, "results/rm/final"))
    for rewarded in rewarder.rewards(conversations, reference_answers):
        rewarded.value, rewarded.error, rewarded.score

Reference answers are scored in the same call as the answers that they are compared with, so their prompt is computed
once. `RewardScorer` puts the reward in the place of the score, for whatever ranks by scores:

    RewardScorer(scorer, load_shaper("contract", "results/rm/final")).score(conversations)[0].score
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from treeward.config.reward_shaping import RewardShapingConfig
from treeward.data.preference import Message
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import load_tokenizer
from treeward.scoring.score import Conversation, ConversationScorer, OnError, Score
from treeward.scoring.shaping import Reference, Shaped, Shaper, reference_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RewardPlan", "RewardScorer", "Rewarded", "Rewarder", "check_alone", "check_fixed", "load_shaper"]

_References = list[list[Message]] | str
"""The conversations of a sample's reference answers, or why they cannot be had."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A reward with the score that it was made of: `value` is finite, or None and `error` says why."""

    value: float | None
    score: Score
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RewardPlan:
    """Conversations with their references; `to_score`: both, under `names`."""

    conversations: list[Conversation]
    references: list[_References]
    to_score: list[Conversation]
    names: list[str]


class Rewarder:
    """Makes rewards of conversations.

    `score`: gives one `Score` for each of a list of conversations, in order; it is given their names too, for errors.
    None for one that only plans and finishes. `shaper`: None leaves scores as they are.
    """

    def __init__(
        self, score: Callable[[list[Conversation], list[str]], list[Score]] | None, shaper: Shaper | None = None
    ) -> None:
        self._score = score
        self.shaper = shaper

    @property
    def reference_key(self) -> str | None:
        """The key under which data holds reference answers; None where none are read."""
        config = None if self.shaper is None else self.shaper.config
        return None if config is None or config.reference is None else config.reference_key

    def rewards(
        self,
        conversations: Sequence[Conversation],
        reference_answers: Sequence[Any] | None = None,
        *,
        where: Sequence[str] | None = None,
        update: bool = True,
    ) -> list[Rewarded]:
        """One reward per conversation, in order.

        `reference_answers`: of each sample a text, a list of texts and message lists, or None; read where the shaping
        compares with them, and what cannot be read leaves its sample without a reward. `where` names each sample.
        `update`: running statistics take this batch in.
        """
        assert self._score is not None, "a Rewarder without a score only plans and finishes"
        plan = self.plan(conversations, reference_answers, where=where)
        return self.finish(plan, self._score(plan.to_score, plan.names), update=update)

    def plan(
        self,
        conversations: Sequence[Conversation],
        reference_answers: Sequence[Any] | None = None,
        *,
        where: Sequence[str] | None = None,
    ) -> RewardPlan:
        """What must be scored for `rewards`, for whoever scores it in another way than by a function."""
        names = list(where) if where is not None else [f"conversation {i}" for i in range(len(conversations))]
        references = self._references(conversations, reference_answers, names)
        extra = [conversation for one in references if not isinstance(one, str) for conversation in one]
        of_extra = [
            f"{name}, {self.reference_key}[{m}]"
            for one, name in zip(references, names, strict=True)
            if not isinstance(one, str)
            for m in range(len(one))
        ]
        return RewardPlan(list(conversations), references, [*conversations, *extra], names + of_extra)

    def finish(self, plan: RewardPlan, scores: Sequence[Score], *, update: bool = True) -> list[Rewarded]:
        """The rewards of a plan, of the scores of `plan.to_score`, in order."""
        own, of_references = scores[: len(plan.conversations)], iter(scores[len(plan.conversations) :])
        known = [None if isinstance(one, str) else _scored(one, of_references) for one in plan.references]
        shaped = self._shaped(own, plan.conversations, known, update)
        return [_rewarded(*item) for item in zip(own, shaped, plan.references, strict=True)]

    def _references(
        self, conversations: Sequence[Conversation], reference_answers: Sequence[Any] | None, names: Sequence[str]
    ) -> list[_References]:
        key = self.reference_key
        found: list[_References] = []
        for i, (conversation, name) in enumerate(zip(conversations, names, strict=True)):
            if key is None or reference_answers is None:
                found.append([])
                continue
            try:
                found.append(reference_conversations(conversation, reference_answers[i], where=f"{name}, {key}"))
            except DataError as error:
                found.append(str(error).splitlines()[0])
        return found

    def _shaped(
        self,
        scores: Sequence[Score],
        conversations: Sequence[Conversation],
        references: Sequence[Sequence[Reference] | None],
        update: bool,
    ) -> list[Shaped]:
        if self.shaper is None:
            return [Shaped(score.score, score.score) for score in scores]
        return self.shaper.shape([score.score for score in scores], conversations, references, update=update)


class RewardScorer:
    """Rewards as scores: a `ConversationScorer` whose `Score.score` is the reward of a conversation by itself.

    Raises `ConfigError` for a shaping by which the reward depends on more than the conversation: running statistics,
    or reference answers, which there are none of here.
    """

    def __init__(self, scorer: ConversationScorer, shaper: Shaper, *, where: str = "reward_shaping") -> None:
        check_alone(shaper.config, where)
        self.scorer, self.shaper = scorer, shaper

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        """The reward of each conversation, in the place of the score; what has no reward says why in `error`.

        Raises what the scorer raises, and `ModelError` for a reward that is not finite; with `on_error="mask"` it is
        None instead.
        """
        names = list(where) if where is not None else [f"conversation {i}" for i in range(len(conversations))]

        def score(asked: list[Conversation], of: list[str]) -> list[Score]:
            return self.scorer.score(asked, where=of, on_error=on_error)

        rewarded = Rewarder(score, self.shaper).rewards(conversations, where=names)
        for one, name in zip(rewarded, names, strict=True):
            if on_error == "raise" and one.value is None and one.score.score is not None:
                raise ModelError("the conversation has no reward", where=name, got=one.error)
        return [replace(one.score, score=one.value, error=one.error) for one in rewarded]


def check_fixed(shaping: RewardShapingConfig, where: str) -> None:
    """Raise `ConfigError` for running statistics, with which a reward would depend on what was seen before it."""
    if shaping.running:
        raise ConfigError(
            "with running statistics a reward would depend on the order of the rows",
            where=where,
            field="running",
            got="true",
            need="constants: reward_mean and reward_std, or those of the model's contract",
            fix="treeward calibrate MODEL --data FILE, and leave running out",
        )


def check_alone(shaping: RewardShapingConfig, where: str) -> None:
    """Raise `ConfigError` for a shaping by which the reward depends on more than the conversation."""
    check_fixed(shaping, where)
    if shaping.reference is not None:
        raise ConfigError(
            "the shaping compares with reference answers, and there are none",
            where=where,
            field="reference",
            got=shaping.reference,
            need="a shaping of the conversation alone",
            fix="leave reference out",
        )


def load_shaper(
    shaping: RewardShapingConfig | Literal["contract"] | None,
    model: str,
    *,
    is_ensemble: bool = False,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    trust_remote_code: bool = False,
) -> Shaper | None:
    """The shaper that a configuration asks for, with the constants of the model's contract; None for none.

    `shaping`: "contract" is the section that the contract holds. `is_ensemble`: `model` is one of several, and its
    constants are not those of their common score. `tokenizer`: to count tokens with, or its name; None: the model's.
    Raises `ConfigError` for constants that are needed and not there.
    """
    if shaping is None:
        return None
    if is_ensemble and isinstance(shaping, RewardShapingConfig) and shaping.uses_calibration:
        raise ConfigError(
            "the scores of an ensemble have no fitted constants: a calibration is of one model",
            where="reward_shaping",
            got="a length curve, temperature, mean or standard deviation that is to be the model's own",
            need="constants of the ensemble's scores",
            fix="give reward_mean and reward_std, or set running to true; leave length_calibration and `temperature: "
            "calibrated` out",
        )
    contract = None if is_ensemble else read_contract(model)
    if shaping == "contract":
        shaping = contract.reward_shaping if contract else None
        if shaping is None:
            raise ConfigError(
                "the model's scoring contract has no reward shaping",
                where=model,
                field="reward_shaping",
                got="contract, of an ensemble" if is_ensemble else f"no such section in {CONTRACT_FILE}",
                need="a reward_shaping section in the contract, or one given here",
                fix="give the section itself, as {length_penalty: {coefficient: 0.001}}"
                if is_ensemble
                else "give the section itself, as {length_penalty: {coefficient: 0.001}}; or fit one and keep it in "
                f'the contract: treeward calibrate {model} --data FILE.jsonl --shaping "{{length_calibration: true}}"',
            )
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
    return Shaper(shaping, calibration=contract.calibration if contract else None, tokenizer=tokenizer)


def _scored(conversations: Sequence[list[Message]], scores: Iterator[Score]) -> list[Reference]:
    return [Reference(next(scores).score, conversation) for conversation in conversations]


def _rewarded(score: Score, shaped: Shaped, references: _References) -> Rewarded:
    if isinstance(references, str):
        return Rewarded(None, score, references)
    return Rewarded(shaped.value, score, score.error or shaped.error)
