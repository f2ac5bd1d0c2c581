"""`scorer_identity`: what scores depend on besides the conversation, so that kept rows of another are not mixed in."""

from __future__ import annotations

from typing import Any

from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import RewardScorer


def scorer_identity(scorer: ConversationScorer, name: str) -> dict[str, Any]:
    """What the scores of a scorer depend on besides the conversation, by name; JSON.

    `name`: of the model; with the sum of the weights it stands for a model that has no scoring contract, and alone for
    a scorer that is not one of treeward's. The members of an ensemble have names of their own.
    """
    if isinstance(scorer, RewardScorer):
        section = scorer.shaper.config
        constants = _calibration(scorer.scorer) if section.uses_calibration else None
        shaping = section.model_dump(mode="json", exclude_defaults=True)
        return scorer_identity(scorer.scorer, name) | {"shaping": shaping, "constants": constants}
    if isinstance(scorer, EnsembleScorer):
        return {
            "members": [scorer_identity(*pair) for pair in zip(scorer.members, scorer.names, strict=True)],
            "ensemble": scorer.config.model_dump(mode="json"),
            "calibrations": [_calibration(member) for member in scorer.members],
        }
    if not isinstance(scorer, Scorer):
        return {"model": name}
    renderer, model = scorer.renderer, scorer.contract and scorer.contract.scores_sha256
    if model is None:
        total = sum(float(weight.detach().double().abs().sum()) for weight in scorer.model.parameters())
        model = f"{name}, sum {total:.9g}"
    return {
        "model": model,
        "truncation": renderer.truncation,
        "max_length": renderer.max_length,
        "dtype": str(scorer.model.hf.dtype).removeprefix("torch."),
        "head_weights": scorer.head_weights if scorer.steps is None else scorer.steps.how,
        "rendering": renderer.fingerprint,
    }


def _calibration(scorer: ConversationScorer) -> object:
    """The constants of a model's contract, without where they come from."""
    contract = scorer.contract if isinstance(scorer, Scorer) else None
    if contract is None or contract.calibration is None:
        return None
    return contract.calibration.model_dump(mode="json", exclude={"provenance"})
