"""`LABELS`: how a report shows every number of a diagnostic."""

from __future__ import annotations

from collections.abc import Mapping

LABELS: Mapping[str, tuple[str, str, str]] = {
    # of any comparisons
    "pair_accuracy": ("Pairs in the right order", "percent", "ties and missing scores count as wrong"),
    "ties": ("Ties", "percent", "pairs whose two scores are the same"),
    "auroc": ("AUROC", "number", "how often a best completion outscores any other of any prompt: 0.5 is chance"),
    "kendall_tau": ("Kendall's tau", "signed", "order of three completions or more: 1 right, 0 random, -1 reversed"),
    "group_accuracy": ("Comparisons all in order", "percent", "every pair of the comparison is right"),
    "best_of_k": ("Best completion scores highest", "percent", "a missing score or a tie with others is wrong"),
    "mse": ("Squared error of grades", "number", "mean over the grades of the data, and over attributes"),
    "pearson": ("Correlation with grades", "signed", "1 is a straight line; mean over attributes"),
    "ece": ("Calibration error (ECE)", "percent", "mean distance of sigmoid(margin) from how often it holds"),
    "ece_fitted": ("Calibration error, rescaled", "percent", "the same, with margins divided by the temperature"),
    "brier": ("Brier score", "number", "squared error of sigmoid(margin): 0 is perfect, 0.25 a coin"),
    "temperature": ("Fitted temperature", "number", "above 1 the margins are overconfident, below 1 underconfident"),
    "worst_subset": ("Worst subset", "percent", "the lowest accuracy of all subsets"),
    "score_mean": ("Mean score", "number", "of all completions"),
    "score_std": ("Standard deviation of the scores", "number", "of all completions"),
    # length
    "slope_given_rank": ("Length: score per 100 characters", "signed", "the bias itself, at equal rank: 0 is fair"),
    "relative_slope": ("Length bias in standard deviations", "signed", "of the scores of one prompt's completions"),
    "longer_is_right": ("Better completion is the longer", "percent", "of the data alone"),
    "accuracy_longer_right": ("Longer completion is right", "percent", "accuracy: high if it likes length"),
    "accuracy_shorter_right": ("Shorter completion is right", "percent", "accuracy: low if it likes length"),
    "accuracy_similar_length": ("Similar lengths", "percent", "accuracy within 10 %: no help from length"),
    "accuracy_gap": ("Length gap in accuracy", "points", "longer right less shorter right: 0 is fair"),
    "length_controlled_accuracy": ("Length-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # style
    "density_effect": ("Score per markdown mark in 100 words", "signed", "at equal rank and length; 0 is fair"),
    "relative_density_effect": ("Markdown bias in standard deviations", "signed", "of scores of the same prompt"),
    "more_markdown_is_right": ("Better completion has more markdown", "percent", "of the data alone"),
    "accuracy_more_markdown_right": ("More markdown is right", "percent", "accuracy: high if it likes markdown"),
    "accuracy_less_markdown_right": ("Less markdown is right", "percent", "accuracy: low if it likes markdown"),
    "accuracy_similar_markdown": ("Similar markdown", "percent", "accuracy: no help from markdown"),
    "markdown_gap": ("Markdown gap in accuracy", "points", "more right less less right: 0 is fair"),
    "style_controlled_accuracy": ("Style-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # rewrites
    "accuracy": ("Rewritten pairs, before", "percent", "pairs in the right order; ties count as wrong"),
    "robust_accuracy": ("Robust accuracy", "percent", "right before and after every rewrite of style"),
    # overlap
    "flagged": ("Examples with a duplicate in training", "percent", "exact or near"),
    "flagged_exact": ("The same, word for word", "percent", "a prompt, a conversation or a long completion"),
    "accuracy_clean": ("Accuracy without a duplicate", "percent", "what is left of the headline on new examples"),
    "accuracy_flagged": ("Accuracy with a duplicate", "percent", "of the others"),
}
"""By the name in `results.json`: the name in a report, the format, and how to read it."""
