"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold).

    result = analyse([SampledPrompt(proxy=scores_of_a_model, gold=scores_of_a_better_one), ...])

`selection` is the arithmetic of choosing, `laws` fits the laws of Gao et al., `verdict` says whether gold falls again,
`several` sets several proxies side by side, `samples` reads and scores the samples of a file, `blocks` and
`several_blocks` show the result.
"""

from __future__ import annotations

from treeward.evaluation.best_of_n.analysis import BestOfN, Curve, FittedLaw, SampledPrompt, analyse
from treeward.evaluation.best_of_n.laws import GaoLaw, fit_gao
from treeward.evaluation.best_of_n.selection import expected_best_of, kl_of_best_of, selection_weights, size_of_kl
from treeward.evaluation.best_of_n.several import ComparedProxy, analyse_several, same_samples
from treeward.evaluation.best_of_n.verdict import Verdict

__all__ = [
    "BestOfN",
    "ComparedProxy",
    "Curve",
    "FittedLaw",
    "GaoLaw",
    "SampledPrompt",
    "Verdict",
    "analyse",
    "analyse_several",
    "expected_best_of",
    "fit_gao",
    "kl_of_best_of",
    "same_samples",
    "selection_weights",
    "size_of_kl",
]
