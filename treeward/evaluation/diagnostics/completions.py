"""`Pairs`: scored examples as arrays; `slopes_within_prompts`: the regression within prompts.

    pairs = collect_pairs(scored)
    slopes_within_prompts(("slope", "relative"), scores, np.column_stack([lengths / 100, places]), prompts)

Biases are looked for among the completions of one prompt: a score that rises with length across prompts may only say
that long completions go with prompts that the model likes.

Shapes: N completions with a score, P pairs of a better and a worse completion of one prompt, F features, G prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEWEST_PROMPTS = 10
"""With fewer prompts slopes have no interval: it would hold the truth less often than it says."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Every pair of completions of an example with different ranks.

    `margins` (P,): the better one's score less the other's, NaN where one has none. `prompts` (P,): one number for each
    different context; `examples` (P,): index of the example; `sides` (P, 2): indices of its completions, the better
    first.
    """

    margins: Floats
    prompts: Integers
    examples: Integers
    sides: Integers

    @property
    def outcomes(self) -> Floats:
        """1 where the better completion scores higher, else 0: a tie and a missing score count as wrong. (P,)"""
        return (self.margins > 0).astype(np.float64)  # NaN is not above 0

    @property
    def with_scores(self) -> Pairs:
        """The pairs whose completions both have a score."""
        mask = ~np.isnan(self.margins)
        return Pairs(self.margins[mask], self.prompts[mask], self.examples[mask], self.sides[mask])


def collect_pairs(scored: Sequence[ScoredExample]) -> Pairs:
    """The ordered pairs of scored examples; those without a score are among them."""
    rows = []
    for i, (example, prompt) in enumerate(zip(scored, prompt_numbers(scored), strict=True)):
        scores = np.array(example.scores, dtype=np.float64)  # None becomes NaN
        rows += [(scores[a] - scores[b], prompt, i, a, b) for a, b in example.pairs()]
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 5)
    integers = table[:, 1:].astype(np.int64)
    return Pairs(margins=table[:, 0], prompts=integers[:, 0], examples=integers[:, 1], sides=integers[:, 2:])


def prompt_numbers(scored: Sequence[ScoredExample]) -> list[int]:
    """A number for each example, the same for those with the same context."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(example.example.context_key, len(numbers)) for example in scored]


def residuals_within_prompts(
    scores: Floats, features_NF: Floats, prompts: Integers
) -> tuple[Floats, Floats, Floats, Integers]:
    """What prompts and the other features leave of the first feature and of the scores (Frisch and Waugh 1933).

    Four arrays of the completions that have another of the same prompt: the first feature and the scores, both less the
    mean of their prompt and what the other features say of them; the scores less the mean of their prompt alone; and
    their prompts, numbered from 0.
    """
    kept = np.bincount(prompts, minlength=1)[prompts] > 1
    groups = np.unique(prompts[kept], return_inverse=True)[1]
    x, y = _demeaned(features_NF[kept], groups), _demeaned(scores[kept, None], groups)[:, 0]

    def unexplained(column: Floats) -> Floats:
        return column - x[:, 1:] @ np.linalg.lstsq(x[:, 1:], column, rcond=None)[0]

    return unexplained(x[:, 0]), unexplained(y), y, groups


def slopes_within_prompts(
    names: tuple[str, str], scores: Floats, features_NF: Floats, prompts: Integers
) -> dict[str, Metric]:
    """The coefficient b_1 of the first feature in s_ij = a_i + x_ij b + e_ij, with an intercept a_i for each prompt i.

    By the first of `names`; by the second the same in standard deviations of scores within prompts, pooled and taken as
    known: sqrt(sum (s_ij - mean_i)^2 / (N - G)).

    The interval is 95 %, of Student's t with G - 1 degrees of freedom for G prompts, and robust to errors that go
    together within a prompt: the jackknife over prompts (CV3: MacKinnon, Nielsen and Webb 2023, Journal of Applied
    Econometrics 38, page 671; the usual CR1 is too narrow for skewed lengths), which leaves a prompt out of the last
    least squares. `count`: completions that have another of the same prompt. No value where the feature does not vary
    within prompts, or only together with the others; no interval for fewer than `FEWEST_PROMPTS`, or where one prompt
    alone decides.
    """
    feature, residuals, y, groups = residuals_within_prompts(scores, features_NF, prompts)
    count, num_prompts = len(y), len(np.unique(groups))
    xy_G, xx_G = (np.bincount(groups, weights=feature * column, minlength=1) for column in (residuals, feature))
    xy, xx = float(xy_G.sum()), float(xx_G.sum())
    note = f"{num_prompts} prompts"
    if xx <= 1e-12 * float(np.abs(features_NF[:, 0]).max(initial=1.0)) ** 2:
        note += ": it does not vary within them, or only with the others"
        return {name: Metric(name, None, count=count, note=note) for name in names}
    value, low, high = xy / xx, None, None
    if num_prompts < FEWEST_PROMPTS:
        note += ": too few for an interval"
    elif (xx - xx_G).min() > 1e-9 * xx:
        changes_G = (xy - xy_G) / (xx - xx_G) - value
        error = math.sqrt((num_prompts - 1) / num_prompts * float(changes_G @ changes_G))
        half = float(special.stdtrit(num_prompts - 1, 0.975)) * error
        low, high = value - half, value + half
    spread = math.sqrt(float(y @ y) / (count - num_prompts))
    slope = Metric(names[0], value, low, high, count, note)
    low, high, relative = (None if not spread or end is None else end / spread for end in (low, high, value))
    return {slope.name: slope, names[1]: Metric(names[1], relative, low, high, count, note)}


def _demeaned(values_NF: Floats, groups: Integers) -> Floats:
    counts = np.maximum(np.bincount(groups, minlength=1), 1)
    means = np.stack([np.bincount(groups, weights=column, minlength=1) / counts for column in values_NF.T], axis=1)
    return np.asarray(values_NF - means[groups])
