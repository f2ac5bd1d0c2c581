"""`merge_and_sign`: weights averaged, and a scoring contract of what came out.

    merge_and_sign(["results/a/final", "results/b/final"], "results/merged")

The contract has the members' rendering and heads, and golden scores of the merged weights. The members' calibration
and reward shaping are about other scores and are left behind: `treeward calibrate` fits new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from treeward.model.contract import read_contract
from treeward.model.merge import Merge, merge_models
from treeward.model.pretrained import quiet_transformers
from treeward.scoring.golden import sign_folder

__all__ = ["merge_and_sign"]

logger = logging.getLogger(__name__)


def merge_and_sign(
    folders: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Merge:
    """`merge_models`, with a scoring contract in the folder when it appears; the same arguments and errors.

    `device`: where the golden conversations are scored. Raises `ModelError` for merged weights that cannot score.
    """
    quiet_transformers()

    def finish(folder: Path) -> None:
        contracts = [contract for path in folders if (contract := read_contract(path)) is not None]
        like = contracts[0].model_copy(update={"reward_shaping": None}) if contracts else None
        sign_folder(folder, like=like, device=device, trust_remote_code=trust_remote_code)
        if any(contract.calibration or contract.reward_shaping for contract in contracts):
            logger.info(
                "The members' calibration and reward shaping do not hold for merged weights and are left out: "
                "treeward calibrate %s --data FILE fits new ones.",
                output,
            )

    return merge_models(
        folders, output, weights=weights, dtype=dtype, trust_remote_code=trust_remote_code, finish=finish
    )
