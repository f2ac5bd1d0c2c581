"""`Sample`, `cross_validate`: which labels a small model, trained on the other rows, is sure to be wrong.

    sample = Sample()
    sample.add(preference, "train.jsonl:17")            # of every row, in any number: at most 50,000 are kept
    noise = cross_validate(sample)
    noise.agreement, noise.disagreements[:10]           # Metric; [(file and line, probability of the label), ...]

A pair is its best completion against its worst. The model is a Bradley-Terry model of words and style: the probability
that a beats b is sigma(w . (x_a - x_b)), where x has log(1 + count) of each word, scaled to length 1, and the traits of
`TRAITS`, each divided by its standard deviation. w minimises sum_i -log sigma(w . d_i) + |w|^2 / 2 over four fifths of
the prompts and predicts the last (Pang and Lee 2002 have such a model of words; for labels that a model out of the fold
is sure to be wrong, Northcutt et al. 2021, arXiv 1911.00068). It knows words and no facts: what it disagrees with is
worth a look, and is no proof. Where it is no better than chance, its disagreements tell nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse, special

from treeward.data.preference import Preference, last_text
from treeward.evaluation.data_check.reading import TRAITS, key_of
from treeward.evaluation.diagnostics.overlap import words_of
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric

MOST_PAIRS = 50_000
CONFIDENT = 0.1
"""A label of less probability is one that the model is sure to be wrong."""

_FOLDS = 5
_FEWEST = 50
_MOST_WORDS = 2000  # of a text


@dataclass
class Sample:
    """Pairs as differences of features, at most `MOST_PAIRS`, each row with the same chance (reservoir sampling).

    `seen`: rows with a better and a worse completion.
    """

    seen: int = 0
    rows: list[tuple[str, int, NDArray[np.int32], NDArray[np.float32], list[float]]] = field(default_factory=list)
    vocabulary: dict[str, int] = field(default_factory=dict)
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, preference: Preference, where: str) -> None:
        """Take the row into the sample, or do not."""
        by_rank = sorted(preference.completions, key=lambda one: one.rank)
        better, worse = (last_text(one.messages) for one in (by_rank[0], by_rank[-1]))
        if by_rank[0].rank == by_rank[-1].rank or better == worse:
            return
        self.seen += 1
        place = len(self.rows) if self.seen <= MOST_PAIRS else self.generator.randrange(self.seen)
        if place >= MOST_PAIRS:
            return
        words = self._scaled(better)
        for word, value in self._scaled(worse).items():
            words[word] = words.get(word, 0.0) - value
        traits = [of_text(better) - of_text(worse) for _, of_text in TRAITS.values()]
        columns, values = np.array([*words], np.int32), np.array([*words.values()], np.float32)
        row = (where, key_of(preference.context or preference.completions[0].messages), columns, values, traits)
        self.rows[place : place + 1] = [row]

    def _scaled(self, text: str) -> dict[int, float]:
        counts = Counter(words_of(text)[:_MOST_WORDS])
        logs = np.log1p([*counts.values()])
        numbers = (self.vocabulary.setdefault(word, len(self.vocabulary)) for word in counts)
        return dict(zip(numbers, (logs / max(float(np.linalg.norm(logs)), 1e-9)).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class LabelNoise:
    """`agreement`: the share of labels that the model, out of the fold, gives too. `disagreements`: the labels of a
    probability below `CONFIDENT`, the least first. `pairs`: of the sample, and of the data."""

    agreement: Metric
    disagreements: list[tuple[str, float]]
    pairs: tuple[int, int]


def cross_validate(sample: Sample) -> LabelNoise | None:
    """The labels against those of a model of the other prompts; None for fewer than 50 pairs."""
    if len(sample.rows) < _FEWEST:
        return None
    wheres, prompts, columns, values, traits = zip(*sample.rows, strict=True)
    ends = np.cumsum([0, *map(len, columns)])
    shape = (len(wheres), len(sample.vocabulary))
    words = sparse.csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=shape)
    styles = np.array(traits)
    styles /= np.maximum(np.sqrt(np.mean(styles**2, axis=0)), 1e-9)
    features = sparse.hstack([words, sparse.csr_matrix(styles)], format="csr")
    fold = np.array(prompts) % _FOLDS
    margins = np.zeros(len(wheres))
    for own in range(_FOLDS):
        margins[fold == own] = features[fold == own] @ _fit(features[fold != own])
    probabilities = special.expit(margins)
    agreement = accuracy_metric((margins > 0).astype(float).tolist(), "agreement", prompts, of="pairs")
    order = np.argsort(probabilities, kind="stable")
    found = [(wheres[i], float(probabilities[i])) for i in order if probabilities[i] < CONFIDENT]
    return LabelNoise(agreement, found, (len(wheres), sample.seen))


def _fit(differences: sparse.csr_matrix) -> NDArray[np.float64]:
    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        margins = differences @ weights
        value = -special.log_expit(margins).sum() + weights @ weights / 2
        return float(value), weights - differences.T @ special.expit(-margins)

    start = np.zeros(differences.shape[1])
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 200})
    return np.asarray(found.x)
