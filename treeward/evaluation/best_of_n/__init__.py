"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold).

    result = analyse([SampledPrompt(proxy=scores_of_a_model, gold=scores_of_a_better_one), ...])

`selection` is the arithmetic of choosing, `laws` fits the laws of Gao et al., `verdict` says whether gold falls again,
`samples` reads and scores the samples of a file, and `blocks` shows the result.
"""

from treeward.evaluation.best_of_n.analysis import BestOfN, Curve, FittedLaw, SampledPrompt, analyse, analyse_several
from treeward.evaluation.best_of_n.laws import GaoLaw, fit_gao
from treeward.evaluation.best_of_n.selection import expected_best_of, kl_of_best_of, selection_weights, size_of_kl
from treeward.evaluation.best_of_n.verdict import Verdict

__all__ = [
    "BestOfN",
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
    "selection_weights",
    "size_of_kl",
]
