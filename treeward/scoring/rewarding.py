"""From a section's shaping to rewards: `load_shaper` reads the model's constants, `rewards_of` shapes scores.

    rewards = rewards_of(scorer.score(conversations), conversations, load_shaper(config))

`RewardScorer` puts the reward in the place of the score, for code that ranks by scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from treeward.config.scoring import ScoringConfig
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.model.pretrained import load_tokenizer
from treeward.scoring.score import Conversation, ConversationScorer, OnError, Reward, Score
from treeward.scoring.shaping import Shaper


def rewards_of(scores: Sequence[Score], conversations: Sequence[Conversation], shaper: Shaper | None) -> list[Reward]:
    """One reward for each score, in order; without a shaper it is the score."""
    if shaper is None:
        return [Reward(score.score, score, error=score.error) for score in scores]
    return shaper.shape(scores, conversations)


class RewardScorer:
    """Rewards as scores: a `ConversationScorer` whose `Score.score` is the reward of the conversation."""

    def __init__(self, scorer: ConversationScorer, shaper: Shaper) -> None:
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
