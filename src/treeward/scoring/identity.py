"""`scorer_identity`: what scores depend on besides the conversation.

Rows that were kept from an earlier run are used again only if they have the same identity.
"""

from __future__ import annotations

from typing import Any

from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import RewardScorer


def scorer_identity(scorer: ConversationScorer, name: str) -> dict[str, Any]:
    """What the scores of a scorer depend on besides the conversation, by name; JSON.

    `name`: of the model; with the sum of the weights it stands for a model that has no scoring
    contract, and alone for a scorer that is not one of treeward's. The members of an ensemble have
    names of their own.
    """
    if isinstance(scorer, RewardScorer):
        section = scorer.shaper.config
        identity = scorer_identity(scorer.scorer, name)
        # Without defaults: an option that a later version adds changes nothing for kept rows.
        identity["shaping"] = section.model_dump(mode="json", exclude_defaults=True)
        identity["constants"] = None
        if section.uses_calibration:
            identity["constants"] = _calibration(scorer.scorer)
        return identity
    if isinstance(scorer, EnsembleScorer):
        members = []
        for member, member_name in zip(scorer.members, scorer.names, strict=True):
            members.append(scorer_identity(member, member_name))
        return {
            "members": members,
            "ensemble": scorer.config.model_dump(mode="json"),
            "calibrations": [_calibration(member) for member in scorer.members],
        }
    if not isinstance(scorer, Scorer):
        return {"model": name}
    if scorer.contract is not None:
        model = scorer.contract.scores_sha256
    else:
        # A hash of all bytes takes about a second per GB; a sum finds other weights of one name.
        weights = scorer.model.parameters()
        total = sum(float(weight.detach().double().abs().sum()) for weight in weights)
        model = f"{name}, sum {total:.9g}"
    head_weights: object = scorer.head_weights
    if scorer.steps is not None:
        head_weights = scorer.steps.how
    identity = {
        "model": model,
        "truncation": scorer.renderer.truncation,
        "max_length": scorer.renderer.max_length,
        "dtype": str(scorer.model.hf.dtype).removeprefix("torch."),
        "head_weights": head_weights,
        "rendering": scorer.renderer.fingerprint,
    }
    # Rows have the spread beside the score, which the hash of the scores leaves out.
    if scorer.contract is not None and scorer.contract.spread is not None:
        identity["spread"] = scorer.contract.spread.sha256
    return identity


def _calibration(scorer: ConversationScorer) -> object:
    """The constants of a model's contract, without where they come from."""
    contract = scorer.contract if isinstance(scorer, Scorer) else None
    if contract is None or contract.calibration is None:
        return None
    return contract.calibration.model_dump(mode="json", exclude={"provenance"})
