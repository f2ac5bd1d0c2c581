"""`diagnose_perturbations`: what the score does when completions are rewritten.

    names = rewrites_of("usual")
    sampled = sample_examples(examples, 200)
    rewritten = score_examples(scorer, [perturbed(one, names) for one in sampled], at_once=16)
    numbers = diagnose_perturbations(sampled, list(rewritten), names)
    numbers.padding_relative_shift, numbers.padding_accuracy_after, numbers.robust_accuracy

For each sampled example one pair of a better and a worse completion is scored as it is and with
each of them rewritten (`rewrites.py`). Signs of a fault are `rejected_flips`; `flips` and a
`relative_shift` of the size of the margins under a rewrite of kind "style", for the content is the
same; and a shift above 0 under "damage". Where a prompt asks for a format, a change of style may
break it, and a lower score be right.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeward.data.conversation import last_text
from treeward.data.preference import Completion, Preference
from treeward.data.reasoning import split_answer
from treeward.evaluation.diagnostics.rewrites import REWRITES, rewrite
from treeward.evaluation.results import Diagnostic, Metric, ScoredExample
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap

_REFUSAL = re.compile(
    r"^\W*(?:(?:i['’]?m|i am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately|no,|"
    r"as an ai|i (?:can['’]?t|cannot|can not|won['’]?t|will not|am not able|['’]?m not able|"
    r"am unable|do not|don['’]?t))",
    re.IGNORECASE,
)


def sample_examples(examples: Sequence[Preference], num_examples: int) -> list[Preference]:
    """At most `num_examples` of the examples that have a pair of text, in their order: the first by
    a hash of their ids, so that a smaller sample lies within a larger one.
    """
    usable = [example for example in examples if _pair(example)]
    hashes: dict[str, bytes] = {}
    for example in usable:
        hashes[example.id] = hashlib.sha256(f"0/{example.id}".encode()).digest()
    sampled_ids = set(sorted(hashes, key=hashes.__getitem__)[:num_examples])
    return [example for example in usable if example.id in sampled_ids]


def perturbed(example: Preference, names: Sequence[str]) -> Preference:
    """The pair of an example and its rewrites of these names as completions of one preference: of
    rank 0 those of the better one.

    Only the last message of a completion is rewritten, and of that the answer after its reasoning.
    """
    pair = _pair(example)
    completions = []
    for (_, side), text in _texts(example, names).items():
        *before, last = example.completions[pair[side]].messages
        rewritten = {**last, "content": text}
        completions.append(Completion(side, (*before, rewritten)))
    return replace(example, completions=tuple(completions))


def _texts(example: Preference, names: Sequence[str]) -> dict[tuple[str, int], str]:
    """The text of each completion of `perturbed` by its rewrite ("" for none) and side, 0 for the
    better one.

    A rewrite that changes nothing is left out, and so is a refusal in the place of one.
    """
    pair = [last_text(example.completions[i].messages) for i in _pair(example)]
    texts = {("", side): text for side, text in enumerate(pair)}
    for name in names:
        # Where a refusal is right, another one is no damage.
        if name == "refusal" and _REFUSAL.match(split_answer(pair[0])[1]):
            continue
        for side, text in enumerate(pair):
            # The same generator for both, so that both get the same phrases, and one that the id
            # seeds, so that an evaluation that goes on makes the same texts.
            changed = rewrite(name, text, random.Random(f"0/{example.id}/{name}"))
            if changed is not None:
                texts[name, side] = changed
    return texts


def _pair(example: Preference) -> tuple[int, ...]:
    """Indices of a better and a worse completion of text, drawn by the example's id; none where
    there are no such completions.
    """
    usable = []
    for i, completion in enumerate(example.completions):
        text = completion.messages[-1].get("content")
        # Without an answer there is nothing to rewrite.
        if isinstance(text, str) and split_answer(text)[1].strip():
            usable.append(i)
    pairs = []
    for i in usable:
        pairs += [(i, j) for j in usable if example.ranks[i] < example.ranks[j]]
    if not pairs:
        return ()
    return random.Random(f"0/{example.id}").choice(pairs)


def diagnose_perturbations(
    examples: Sequence[Preference], scored: Sequence[ScoredExample], names: Sequence[str]
) -> Diagnostic:
    """The diagnostics of E examples whose `perturbed` preferences were scored, with the rewrites of
    these names.

    `accuracy`: of the pairs as they are. `robust_accuracy`: pairs that are right and stay so under
    every rewrite of kind "style", of either completion. For each rewrite: `relative_shift`, the
    mean of the new score less the old over both completions, in units of the mean absolute margin
    before; `rejected_flips`, the share of the right pairs that is lost when the worse completion
    alone is rewritten; a tie is lost. For each of kind "style", over the pairs in which it changes
    both completions: `accuracy_before` and `accuracy_after` of the pair with both rewritten, and
    `flips`, the share that is right in one of them alone. Texts without a score are left out.
    """
    scores_by_rewrite: dict[str, list[list[float | None]]] = {name: [] for name in ("", *names)}
    for example, row in zip(examples, scored, strict=True):
        scores = dict(zip(_texts(example, names), row.scores, strict=True))
        for name, rows in scores_by_rewrite.items():
            rows.append([scores.get((name, 0)), scores.get((name, 1))])
    prompts = np.array([example.prompt_key for example in examples], dtype=object)
    before = _as_array(scores_by_rewrite.pop(""))
    is_right = before[:, 0] > before[:, 1]
    margins = np.abs(before[:, 0] - before[:, 1])
    margins = margins[np.isfinite(margins)]
    # A model that scores all alike has no margin to tell a shift in.
    mean_margin = float(margins.mean()) if margins.any() else None

    def share(
        name: str, hits: NDArray[np.bool_], where: NDArray[np.bool_] | slice = slice(None)
    ) -> Metric:
        return accuracy_metric(hits[where].astype(float).tolist(), name, prompts[where].tolist())

    is_robust = is_right.copy()
    metrics = []
    for name, rows in scores_by_rewrite.items():
        after = _as_array(rows)
        # A rewrite that does not apply, or a text without a score, says nothing against a pair.
        # NaN is neither lower nor equal, so `<=` is not the same as "not >" here.
        is_lost = before[:, 0] <= after[:, 1]
        metrics.append(_shift(f"{name}_relative_shift", after - before, prompts, mean_margin))
        could_be_lost = is_right & np.isfinite(after[:, 1])
        metrics.append(share(f"{name}_rejected_flips", is_lost, could_be_lost))
        if REWRITES[name].kind == "style":
            is_robust &= ~is_lost & ~(after[:, 0] <= before[:, 1])
            is_right_after = after[:, 0] > after[:, 1]
            # NaN, if one of the four scores is.
            is_scored = np.isfinite(before.sum(axis=1) + after.sum(axis=1))
            metrics.append(share(f"{name}_accuracy_before", is_right, is_scored))
            metrics.append(share(f"{name}_accuracy_after", is_right_after, is_scored))
            metrics.append(share(f"{name}_flips", is_right != is_right_after, is_scored))
    accuracies = [share("robust_accuracy", is_robust), share("accuracy", is_right)]
    return Diagnostic({metric.name: metric for metric in [*accuracies, *metrics]})


def _as_array(scores: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """(E, 2): a row of both completions' scores for each example; None becomes NaN."""
    return np.array(scores, dtype=np.float64).reshape(-1, 2)


def _shift(
    name: str, shifts: NDArray[np.float64], prompts: NDArray[Any], mean_margin: float | None
) -> Metric:
    """The mean shift (E, 2) in mean margins; no value where there is none, or all margins are 0."""
    has_shift = np.isfinite(shifts)
    count = int(has_shift.sum())
    if not count or mean_margin is None:
        return Metric(name, None, count=count)
    moves = shifts[has_shift] / mean_margin
    examples_of_moves, _ = np.nonzero(has_shift)
    low, high = cluster_bootstrap(moves, prompts[examples_of_moves].tolist())
    return Metric(name, float(moves.mean()), low, high, count)
