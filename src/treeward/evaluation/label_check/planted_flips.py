"""`plant_flips`: heads that are fitted once more, on labels of which some are flipped on purpose.

    fitted = cross_fit(features)
    planted = plant_flips(features, fitted, pairs)
    planted[0].is_flipped_P, planted[0].pairs.margin_P

To flip a label that the head has not seen only negates its margin; for a single flip no head need
be fitted again. Of many flips that is not true: those in the other folds are learnt, the more so
the more features there are, and the flips are found less often. So the heads are fitted on flipped
labels, under the penalties that were chosen before. To choose again would take three times as long;
heads on worse labels would be given stronger penalties, and find a little more.

Shapes: P pairs, C prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from treeward.evaluation.label_check.cross_fitting import CrossFit, FeaturePairs, cross_fit
from treeward.evaluation.label_check.label_numbers import (
    CheckedPairs,
    PlantedFlips,
    suspects_of,
)

SHARES = (0.05, 0.1, 0.2)
"""Shares of prompts whose labels are flipped."""
TYPICAL_SHARE = 0.1
"""The one of them that stands for all in a sentence."""


def plant_flips(
    features: FeaturePairs,
    fitted: CrossFit,
    pairs: CheckedPairs,
    on_progress: Callable[[int], object] = lambda num_shares_done: None,
) -> tuple[PlantedFlips, ...]:
    """The pairs as they would be checked with each of `SHARES` of their labels flipped.

    `pairs`: what `fitted` says of `features`. The labels of a prompt are flipped together, as a
    ranking is turned round; those of a small share are flipped in a larger one too.
    """
    prompts_C, place_P = np.unique(features.prompt_P, return_inverse=True)
    # The same draw whatever the order of the data, because prompts are sorted.
    order_C = np.random.default_rng(0).permutation(len(prompts_C))
    planted = []
    for num_done, share in enumerate(SHARES, start=1):
        num_flipped = max(1, round(share * len(prompts_C)))
        is_flipped_C = np.zeros(len(prompts_C), dtype=bool)
        is_flipped_C[order_C[:num_flipped]] = True
        is_flipped_P = is_flipped_C[place_P]
        sign_P = np.where(is_flipped_P, -1, 1)
        flipped = replace(
            features,
            differences_PD=features.differences_PD * sign_P[:, None].astype(np.float32),
        )
        refitted = cross_fit(flipped, penalties=fitted.penalties)
        checked = replace(
            pairs,
            margin_P=refitted.margin_P,
            spread_P=refitted.spread_P,
            longer_P=pairs.longer_P * sign_P,
        )
        planted.append(PlantedFlips(share, is_flipped_P, suspects_of(checked), checked))
        on_progress(num_done)
    return tuple(planted)
