"""`Rewarder`: conversations to rewards, scoring and shaping in one step; environments, commands and server share it.

    score = lambda conversations, names: scorer.score(conversations, where=names, on_error="mask")
    rewarder = Rewarder(score, load_shaper(config, "results/rm/final"))
    for reward in rewarder.rewards(conversations, reference_completions):
        reward.value, reward.error, reward.score

Reference completions are scored in the same call as the completions, so their prompt is computed once. `RewardScorer`
puts the reward in the place of the score, for code that ranks by scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeward.config.scoring import RewardShapingConfig, ScoringConfig
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import load_tokenizer
from treeward.scoring.score import Conversation, ConversationScorer, OnError, Reward, Score
from treeward.scoring.shaping import Shaper, reference_conversations


class Rewarder:
    """Turns conversations into rewards.

    `score`: conversations and their names, for errors, to one `Score` each, in order. `shaper`: None leaves scores as
    they are.
    """

    def __init__(
        self, score: Callable[[list[Conversation], list[str]], list[Score]], shaper: Shaper | None = None
    ) -> None:
        self._score = score
        self.shaper = shaper

    @property
    def reference_key(self) -> str | None:
        """That of the shaper, if there is one."""
        return None if self.shaper is None else self.shaper.reference_key

    def rewards(
        self,
        conversations: Sequence[Conversation],
        reference_completions: Sequence[Any] | None = None,
        *,
        where: Sequence[str] | None = None,
    ) -> list[Reward]:
        """One reward per conversation, in order. `where` names each sample.

        `reference_completions`: for each sample a text, a list of texts and message lists, or None. They are read where
        the shaping compares with them; a sample whose references cannot be read gets no reward.
        """
        names = list(where) if where is not None else [f"conversation {i}" for i in range(len(conversations))]
        to_score, all_names = list(conversations), list(names)
        references: list[list[Conversation] | str] = []  # or why they cannot be read
        if self.reference_key is not None:
            samples = zip(conversations, reference_completions or [None] * len(names), names, strict=True)
            for conversation, completions, name in samples:
                place = f"{name}, {self.reference_key}"
                try:
                    chats: list[Conversation] = [*reference_conversations(conversation, completions, place)]
                except DataError as error:
                    references.append(str(error).splitlines()[0])
                    continue
                references.append(chats)
                to_score += chats
                all_names += [f"{place}[{m}]" for m in range(len(chats))]
        scores = self._score(to_score, all_names)
        if self.shaper is None:
            return [Reward(score.score, score, error=score.error) for score in scores]
        own_scores, reference_scores = scores[: len(names)], iter(scores[len(names) :])
        scored = [
            None if isinstance(chats, str) else [(next(reference_scores), c) for c in chats] for chats in references
        ]
        rewards = self.shaper.shape(own_scores, conversations, scored or None)
        for i, chats_or_why in enumerate(references):
            if isinstance(chats_or_why, str):
                rewards[i] = replace(rewards[i], value=None, error=chats_or_why)
        return rewards


class RewardScorer:
    """Rewards as scores: a `ConversationScorer` whose `Score.score` is the reward of the conversation.

    Raises `ConfigError` for a shaping with reference completions, on which a reward would depend too.
    """

    def __init__(self, scorer: ConversationScorer, shaper: Shaper, *, where: str = "reward_shaping") -> None:
        refuse_references(shaper.config, where)
        self.scorer, self.shaper = scorer, shaper

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        """Scores whose `score` is the reward, or None with the reason in `error`. Raises what the scorer raises, and
        `ModelError` for a reward that is not finite; with `on_error="mask"` such a reward is None."""
        scores = self.scorer.score(conversations, where=where, on_error=on_error)
        rewards = self.shaper.shape(scores, conversations)
        for i, reward in enumerate(rewards):
            if on_error == "raise" and reward.value is None and reward.raw is not None:
                name = where[i] if where is not None else f"conversation {i}"
                raise ModelError("the conversation has no reward", where=name, got=reward.error)
        return [replace(reward.score, score=reward.value, error=reward.error) for reward in rewards]


def refuse_references(shaping: RewardShapingConfig, where: str) -> None:
    """Raise `ConfigError` for a shaping with reference completions: a reward depends on more than its conversation."""
    if shaping.reference is not None:
        summary = "the shaping compares with reference completions, and there are none"
        fix = "shape where they are: by the reward_shaping of an environment (a server's scores too), or treeward score"
        raise ConfigError(summary, where=where, field="reference", got=shaping.reference, fix=fix)


def load_shaper(config: ScoringConfig, *, tokenizer: PreTrainedTokenizerBase | None = None) -> Shaper | None:
    """The shaper of a section, with the constants of the model's contract; None without shaping.

    `tokenizer`: counts the tokens of completions; None: that of the section, or the model's own. Raises `ConfigError`
    for constants that are needed and missing.
    """
    shaping, model = config.shaping, config.models[0]
    if shaping is None:
        return None
    contract = None if config.has_other_score else read_contract(model)
    if shaping == "contract":
        shaping = contract.reward_shaping if contract else None
    if shaping is None:
        raise ConfigError(
            "the model's scoring contract has no reward shaping",
            where=model,
            field="reward_shaping",
            got="an ensemble, or weights of heads" if config.has_other_score else f"none in {CONTRACT_FILE}",
            fix="give the section itself, as {length_penalty: {coefficient: 0.001}}; or fit one and keep it in the "
            f'contract: treeward calibrate {model} --data FILE.jsonl --shaping "{{length_calibration: true}}"',
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(config.tokenizer.name or model, trust_remote_code=config.trust_remote_code)
    return Shaper(shaping, calibration=contract.calibration if contract else None, tokenizer=tokenizer)
