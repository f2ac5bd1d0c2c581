"""`diagnose_perturbations`: what the score does when a reply is dressed up, padded, cut off or refused.

    found = diagnose_perturbations(scorer, examples, num_examples=200)
    padding = found.by_name["padding"]
    padding.shift              # Metric: mean change of the score; padding.relative_shift in mean margins
    padding.rejected_flips     # Metric: pairs that were right until the worse reply was padded
    found.robust_accuracy      # Metric: pairs that stay right under every change of style to either reply

For each sampled example one pair of a better and a worse reply is scored as it is and with each of them rewritten
(`treeward.evaluation.diagnostics.rewrites`). What tells of a fault:

- any rewrite: `rejected_flips`, for no rewrite makes a worse reply better than the better one;
- "style": `chosen_flips`, and a `shift` of the size of the margins, for the reply says what it said;
- "damage": `share_gaining`, how often the damaged reply scores higher than the whole one.

Where a prompt asks for a format (one word, no markdown), a change of style may break it, and a lower score be right.
Rewrites as a test of reward models: Wu et al. 2025, "reWordBench" (arXiv 2503.11751).
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from treeward.data.preference import Message
from treeward.errors import DataError
from treeward.evaluation.diagnostics.blocks import bar_item, metrics_table
from treeward.evaluation.diagnostics.replies import Floats, divided, reply_text, shortened
from treeward.evaluation.diagnostics.rewrites import REWRITES, RewriteKind, rewrite_label
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.kept_rows import keeping
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap
from treeward.scoring.score import ConversationScorer

__all__ = [
    "PerturbationDiagnostics",
    "PerturbationResult",
    "PerturbedPair",
    "PerturbedScores",
    "WorstShift",
    "diagnose_perturbations",
    "perturb",
    "perturbed_from_row",
    "sample_examples",
    "score_perturbed",
    "summarize_perturbations",
]

logger = logging.getLogger(__name__)

_EXAMPLES_AT_ONCE = 16
_KEPT: dict[str, Any] = {
    "identity_file": "perturbations.json",
    "rows": "perturbations.jsonl",
    "summary": "this folder holds rewritten replies as another model scores them, or of other data",
}
_MOST_WORST = 30
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_REFUSAL = re.compile(
    r"^\W*(?:(?:i['’]?m|i am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately|no,|as an ai|"
    r"i (?:can['’]?t|cannot|can not|won['’]?t|will not|am not able|['’]?m not able|am unable|do not|don['’]?t))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class PerturbedPair:
    """The texts of one pair: indices of its completions, and by rewrite the better and the worse reply rewritten.

    None where a rewrite has nothing to change.
    """

    example: EvalExample
    better: int
    worse: int
    texts: Mapping[str, tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class PerturbedScores:
    """The scores of one pair, as JSON can hold them (`to_row`); everything is computed from these.

    `original`: of the better and the worse reply. `rewritten`: by name of the rewrite; None where there is no text or
    no score. `num_failed`: texts that the model could not score. `prompt`: a digest of the context.
    """

    id: str
    prompt: str
    original: tuple[float | None, float | None]
    rewritten: Mapping[str, tuple[float | None, float | None]]
    num_failed: int = 0

    def to_row(self) -> dict[str, Any]:
        """A row; `perturbed_from_row` gives the scores back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PerturbationResult:
    """What one rewrite does.

    `shift`: mean of the new score less the old, over both replies of all pairs; `quantiles` of it at 5, 25, 50, 75 and
    95 %. `relative_shift`: in units of the mean absolute margin of the pairs as they were. `share_gaining`: replies
    that score higher rewritten. `chosen_flips`, `rejected_flips`: of the pairs that were right, those that are not any
    more when the better or the worse reply alone is rewritten; a tie is not right. `accuracy`: with both rewritten.
    """

    name: str
    kind: RewriteKind
    summary: str
    shift: Metric
    relative_shift: Metric
    share_gaining: Metric
    chosen_flips: Metric
    rejected_flips: Metric
    accuracy: Metric
    quantiles: tuple[float, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers of this rewrite."""
        return (
            self.shift,
            self.relative_shift,
            self.share_gaining,
            self.chosen_flips,
            self.rejected_flips,
            self.accuracy,
        )


@dataclass(frozen=True, slots=True)
class WorstShift:
    """A worse reply that a rewrite lifts over the better one, or a damaged reply that gains; `shift` of the score."""

    id: str
    rewrite: str
    side: str
    shift: float
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PerturbationDiagnostics:
    """What all rewrites do to a sample of pairs.

    `accuracy`: of the pairs as they are; `robust_accuracy`: pairs that are right as they are and stay so under every
    rewrite of kind "style", of either reply. `num_failed`: texts without a score, which are left out.
    """

    results: tuple[PerturbationResult, ...]
    accuracy: Metric
    robust_accuracy: Metric
    num_failed: int
    worst: tuple[WorstShift, ...] = ()

    @property
    def by_name(self) -> dict[str, PerturbationResult]:
        """The results by the name of the rewrite."""
        return {result.name: result for result in self.results}

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers; those of a rewrite have its name in front, as `padding_shift`."""
        return (
            self.robust_accuracy,
            self.accuracy,
            *(metric for result in self.results for metric in result.metrics()),
        )

    def blocks(self, model: str = "model") -> list[dict[str, Any]]:
        """The blocks of a report: shifts, flips, the worst cases."""
        note = "In mean margins: at 1, the rewrite moves the score as much as the data's replies differ."
        reach = max((abs(b) for r in self.results for b in _ends(r.relative_shift)), default=0.0) or 1.0
        damages = ", ".join(rewrite_label(r.name) for r in self.results if r.kind == "damage")
        flips = [
            (
                "Right pairs lost when the worse reply is rewritten",
                "rejected_flips",
                "A rewrite hardly makes a worse reply the better one: a lost pair is a way to fool the model.",
            ),
            (
                "Right pairs lost when the better reply is rewritten",
                "chosen_flips",
                f"Changes of style should lose none. What is damaged ({damages}) may well be the worse reply now.",
            ),
            (
                "Replies that score higher rewritten",
                "share_gaining",
                f"Of what damages a reply ({damages}), none should.",
            ),
        ]
        return [
            {
                "kind": "bars",
                "title": "Score shift by rewrite",
                "note": note,
                "x_range": [-reach, reach],
                "reference": 0,
                "format": "signed",
                "series": [
                    {
                        "name": model,
                        "items": [bar_item(rewrite_label(r.name), r.relative_shift, r.summary) for r in self.results],
                    },
                ],
            },
            *(
                {
                    "kind": "bars",
                    "title": title,
                    "note": why,
                    "x_range": [0, 1],
                    "reference": 0.5 if field == "share_gaining" else 0,
                    "reference_label": "half" if field == "share_gaining" else None,
                    "format": "percent",
                    "series": [{"name": model, "items": [_bar(r, getattr(r, field)) for r in self.results]}],
                }
                for title, field, why in flips
            ),
            metrics_table("Rewritten replies in numbers", model, (self.accuracy, self.robust_accuracy)),
            {
                "kind": "table",
                "title": "Replies that a rewrite lifted most",
                "most": 8,
                "columns": [
                    {"key": "id", "label": "Example", "format": "text"},
                    {"key": "rewrite", "label": "Rewrite", "format": "text"},
                    {"key": "side", "label": "Reply", "format": "text"},
                    {"key": "shift", "label": "Shift", "format": "signed"},
                    {"key": "before", "label": "Before", "format": "text"},
                    {"key": "after", "label": "After", "format": "text"},
                ],
                "rows": [asdict(one) | {"rewrite": rewrite_label(one.rewrite)} for one in self.worst],
            },
        ]


def diagnose_perturbations(
    scorer: ConversationScorer,
    examples: Sequence[EvalExample],
    *,
    num_examples: int = 200,
    seed: int = 0,
    folder: Path | None = None,
    identity: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> PerturbationDiagnostics:
    """Sample, rewrite, score and sum up. `on_progress` is told how many examples were scored since it was last called.

    `folder`: where a row of each example is kept as soon as it is scored (perturbations.jsonl), so that nothing is
    scored twice: a larger sample scores what it has more. `identity`: what a row depends on besides its example, the
    seed and the rewrites. Raises `DataError` where no example has a better and a worse reply of text, and
    `CheckpointError` for rows of another identity.
    """
    sampled = sample_examples(examples, num_examples, seed)
    if not sampled:
        raise DataError(
            "there is nothing to rewrite",
            got=f"{len(examples)} examples, none with a better and a worse reply that are text",
            need="an example with ranks of its replies",
        )
    own = {"seed": str(seed), "rewrites": ", ".join(REWRITES)} | dict(identity or {})
    with keeping(folder, own, perturbed_from_row, **_KEPT) as (kept, keep):
        known = {one.id: one for one in kept}
        left = [example for example in sampled if example.id not in known]
        if len(left) < len(sampled):
            logger.info("%d of %d examples were rewritten and scored before.", len(sampled) - len(left), len(sampled))
        if on_progress is not None:
            on_progress(len(sampled) - len(left))
        for one in score_perturbed(scorer, left, seed=seed, on_progress=on_progress):
            keep(one.to_row())
            known[one.id] = one
    return summarize_perturbations(sampled, [known[example.id] for example in sampled], seed=seed)


def sample_examples(examples: Sequence[EvalExample], num_examples: int, seed: int = 0) -> list[EvalExample]:
    """At most `num_examples` of the examples that have a pair of text, in their order; the same for the same `seed`.

    They are the first by a hash of seed and id, so a smaller sample lies within a larger one: what was scored of it is
    all of use. Examples that the data gain or lose change no other's place.
    """
    usable = [example for example in examples if _pair(example, seed) is not None]
    drawn = sorted(range(len(usable)), key=lambda i: _place(usable[i].id, seed))[:num_examples]
    return [usable[i] for i in sorted(drawn)]


def _place(id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{id}".encode()).digest()


def perturb(example: EvalExample, seed: int = 0) -> PerturbedPair:
    """The rewritten texts of one pair of an example, drawn by `seed` and the example's id where there are several.

    An example whose better reply is a refusal has no rewrite "refusal". Raises `DataError` for one without a pair.
    """
    pair = _pair(example, seed)
    if pair is None:
        raise DataError("the example has no better and worse reply of text", where=example.where or example.id)
    better, worse = pair
    asked = [message for message in example.context if message.get("role") == "user"]
    prompt = reply_text(asked) if asked else ""
    replies = [reply_text(example.completions[i]) for i in pair]
    texts: dict[str, tuple[str | None, str | None]] = {}
    for name, rewrite in REWRITES.items():
        if name == "refusal" and _REFUSAL.match(replies[0]):
            texts[name] = (None, None)
            continue
        # The same for both, so that a rewrite with a choice of phrases has the same one.
        first, second = (
            rewrite.apply(prompt, reply, random.Random(f"{seed}/{example.id}/{name}")) for reply in replies
        )
        texts[name] = (first, second)
    return PerturbedPair(example, better, worse, texts)


def score_perturbed(
    scorer: ConversationScorer,
    examples: Sequence[EvalExample],
    *,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[PerturbedScores]:
    """The scores of each example's pair, in order, a few examples at a time; what was scored before is left out by
    leaving it out of `examples`, for the texts of an example do not depend on the others.
    """
    remaining = iter(examples)
    while chunk := [perturb(example, seed) for example in islice(remaining, _EXAMPLES_AT_ONCE)]:
        texts = [_conversations(pair) for pair in chunk]
        flat = [conversation for one in texts for conversation in one.values()]
        results = iter(scorer.score(flat, on_error="mask"))
        for pair, own in zip(chunk, texts, strict=True):
            scores = {key: next(results).score for key in own}
            yield PerturbedScores(
                id=pair.example.id,
                prompt=_digest(pair.example.context),
                original=(scores["", 0], scores["", 1]),
                rewritten={name: (scores.get((name, 0)), scores.get((name, 1))) for name in pair.texts},
                num_failed=sum(score is None for score in scores.values()),
            )
        if on_progress is not None:
            on_progress(len(chunk))


def perturbed_from_row(row: Mapping[str, Any], where: str) -> PerturbedScores:
    """What `to_row` was given. Raises `DataError` for a row that it has not made."""
    try:
        first, second = row["original"]
        rewritten = {str(name): (better, worse) for name, (better, worse) in row["rewritten"].items()}
        return PerturbedScores(row["id"], row["prompt"], (first, second), rewritten, row["num_failed"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError("this is no row of rewritten replies", where=where, got=repr(error)) from error


def summarize_perturbations(
    examples: Sequence[EvalExample], scores: Sequence[PerturbedScores], *, seed: int = 0
) -> PerturbationDiagnostics:
    """The diagnostics of scores (E), made with the same `seed`; `examples`: those that they are of, or more."""
    prompts = [one.prompt for one in scores]
    before = _table([one.original for one in scores])
    right = before[:, 0] > before[:, 1]
    known = np.isfinite(before).all(axis=1)
    size = float(np.abs(before[known, 0] - before[known, 1]).mean()) if known.any() else 0.0
    results, stays = [], right.copy()
    for name, rewrite in REWRITES.items():
        after = _table([one.rewritten.get(name, (None, None)) for one in scores])
        results.append(_result(name, before, after, prompts, size))
        if rewrite.kind == "style":
            # A rewrite that does not apply, or a text without a score, says nothing against a pair.
            stays &= ~(after[:, 0] <= before[:, 1]) & ~(before[:, 0] <= after[:, 1])
    return PerturbationDiagnostics(
        results=tuple(results),
        accuracy=accuracy_metric(right.astype(float).tolist(), "accuracy", prompts, of="pairs"),
        robust_accuracy=accuracy_metric(stays.astype(float).tolist(), "robust_accuracy", prompts, of="pairs"),
        num_failed=sum(one.num_failed for one in scores),
        worst=_worst(examples, scores, seed),
    )


def _result(name: str, before: Floats, after: Floats, prompts: Sequence[str], size: float) -> PerturbationResult:
    rewrite = REWRITES[name]
    shifts = after - before  # (E, 2), NaN where there is none
    flat, owners = shifts.ravel(), np.repeat(np.arange(len(prompts)), 2)
    there = np.isfinite(flat)
    of_prompts = [prompts[i] for i in owners[there].tolist()]
    shift = _mean(flat[there], of_prompts, f"{name}_shift")
    gains = accuracy_metric((flat[there] > 0).astype(float).tolist(), f"{name}_share_gaining", of_prompts, of="replies")
    right = before[:, 0] > before[:, 1]

    def share(where: Any, lost: Any, what: str) -> Metric:
        clusters = [prompts[i] for i in np.flatnonzero(where).tolist()]
        return accuracy_metric(lost[where].astype(float).tolist(), f"{name}_{what}", clusters, of="pairs")

    of_chosen, of_rejected = right & np.isfinite(after[:, 0]), right & np.isfinite(after[:, 1])
    both = np.isfinite(after).all(axis=1) & np.isfinite(before).all(axis=1)
    return PerturbationResult(
        name=name,
        kind=rewrite.kind,
        summary=rewrite.summary,
        shift=shift,
        relative_shift=divided(shift, size, f"{name}_relative_shift"),
        share_gaining=gains,
        chosen_flips=share(of_chosen, after[:, 0] <= before[:, 1], "chosen_flips"),
        rejected_flips=share(of_rejected, before[:, 0] <= after[:, 1], "rejected_flips"),
        accuracy=share(both, after[:, 0] > after[:, 1], "accuracy"),
        quantiles=tuple(np.quantile(flat[there], _QUANTILES).tolist()) if there.any() else (),
    )


def _worst(examples: Sequence[EvalExample], scores: Sequence[PerturbedScores], seed: int) -> tuple[WorstShift, ...]:
    found: list[tuple[float, int, str, int]] = []
    for i, one in enumerate(scores):
        for name, rewritten in one.rewritten.items():
            for side in (0, 1):
                old, new = one.original[side], rewritten[side]
                if old is None or new is None or new <= old:
                    continue
                better = one.original[0]
                lifted = side == 1 and better is not None and old < better <= new
                if lifted or REWRITES[name].kind == "damage":
                    found.append((new - old, i, name, side))
    found.sort(key=lambda item: (-item[0], *item[1:]))
    by_id, worst = {example.id: example for example in examples}, []
    for shift, i, name, side in found[:_MOST_WORST]:
        pair = perturb(by_id[scores[i].id], seed)
        before = reply_text(pair.example.completions[(pair.better, pair.worse)[side]])
        after = pair.texts[name][side] or ""
        label = ("better", "worse")[side]
        worst.append(WorstShift(pair.example.id, name, label, shift, shortened(before), shortened(after)))
    return tuple(worst)


def _pair(example: EvalExample, seed: int) -> tuple[int, int] | None:
    ranks = example.ranks
    text = [
        isinstance(c[-1].get("content"), str) and bool(c[-1]["content"].strip()) if c else False
        for c in example.completions
    ]
    pairs = [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b and text[i] and text[j]]
    return random.Random(f"{seed}/{example.id}").choice(pairs) if pairs else None


def _conversations(pair: PerturbedPair) -> dict[tuple[str, int], list[Message]]:
    """By rewrite ("" for none) and side."""
    found: dict[tuple[str, int], list[Message]] = {}
    for side, index in enumerate((pair.better, pair.worse)):
        completion = pair.example.completions[index]
        found["", side] = [*pair.example.context, *completion]
        for name, texts in pair.texts.items():
            if (text := texts[side]) is not None:
                found[name, side] = [*pair.example.context, *completion[:-1], {**completion[-1], "content": text}]
    return found


def _digest(context: Sequence[Message]) -> str:
    text = json.dumps(list(context), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _table(pairs: Sequence[tuple[float | None, float | None]]) -> Floats:
    return np.array([[np.nan if score is None else score for score in pair] for pair in pairs], np.float64).reshape(
        -1, 2
    )


def _mean(values: Floats, clusters: Sequence[str], name: str) -> Metric:
    if len(values) == 0:
        return Metric(name, None, count=0)
    return Metric(name, float(values.mean()), *cluster_bootstrap(values, clusters), count=len(values))


def _ends(metric: Metric) -> list[float]:
    return [bound for bound in (metric.value, metric.low, metric.high) if bound is not None]


def _bar(result: PerturbationResult, metric: Metric) -> dict[str, Any]:
    return bar_item(rewrite_label(result.name), metric, result.summary)
