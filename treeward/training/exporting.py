"""The folder of a finished run: the model, its card, and its scoring contract with what rewards are made of.

    export_final(run, model, step, validation, folder)

Where the configuration has a `reward_shaping` section, the contract carries it, and the constants that it needs are
fitted on the run's validation sets, which the model has not been trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from treeward.config.reward_shaping import RewardCalibration
from treeward.data.datasets import open_dataset
from treeward.model.contract import write_contract
from treeward.model.export import export_model
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import RewardModel
from treeward.scoring.calibration import calibrate
from treeward.scoring.golden import exact_scoring, sign_folder
from treeward.scoring.scorer import Scorer
from treeward.training.card import model_card
from treeward.training.setup import Run

__all__ = ["export_final"]

logger = logging.getLogger(__name__)


def export_final(
    run: Run, model: RewardModel, step: int, validation: Mapping[str, Mapping[str, float]], folder: Path
) -> None:
    """Write `model`, which the run had after `step` steps, and `validation`, what it measured then, to `folder`."""
    config = run.config
    export_model(
        model,
        run.tokenizer,
        folder,
        rendering=run.renderer.settings,
        dtype=DTYPES[config.checkpointing.export_dtype],
        card=model_card(run, step, validation),
    )
    contract = sign_folder(
        folder, model=model, renderer=run.renderer, trust_remote_code=config.policy.trust_remote_code
    )
    shaping = config.reward_shaping
    if shaping is not None:
        calibration = _fitted(run, model) if shaping.uses_calibration else None
        write_contract(contract.model_copy(update={"reward_shaping": shaping, "calibration": calibration}), folder)


def _fitted(run: Run, model: RewardModel) -> RewardCalibration:
    datasets = run.config.data.validation
    names = ", ".join(dataset.name or dataset.dataset_name for dataset in datasets)
    logger.info("Fitting the constants of reward_shaping on the validation sets: %s.", names)
    rows = chain.from_iterable(open_dataset(dataset) for dataset in datasets)
    with exact_scoring(model):
        scorer = Scorer(model, run.renderer)
        return calibrate(scorer, (preference for preference, _ in rows), name=f"validation sets of the run ({names})")
