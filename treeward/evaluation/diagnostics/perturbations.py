"""`diagnose_perturbations`: what the score does when a completion is dressed up, padded, cut off or refused.

    found = diagnose_perturbations(scorer, examples, num_examples=200)
    found.padding_shift              # Metric: mean change of the score; padding_relative_shift in mean margins
    found.padding_rejected_flips     # Metric: pairs that were right until the worse completion was padded
    found.robust_accuracy            # Metric: pairs that stay right under every change of style to either completion

For each sampled example one pair of a better and a worse completion is scored as it is and with each of them rewritten
(`treeward.evaluation.diagnostics.rewrites`). Signs of a fault:

- any rewrite: `rejected_flips`, for no rewrite makes the worse completion the better one;
- "style": `chosen_flips`, and a `shift` of the size of the margins, for the content is the same;
- "damage": `share_gaining`, how often the damaged completion scores higher than the whole one.

Where a prompt asks for a format (one word, no markdown), a change of style may break it, and a lower score be right.
Rewrites as a test of reward models: Wu et al. 2025, "reWordBench" (arXiv 2503.11751).
"""

from __future__ import annotations

import hashlib
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
from treeward.evaluation.diagnostics.blocks import bar_item, bars_block, table_block
from treeward.evaluation.diagnostics.completions import Floats, completion_text, divided, shortened
from treeward.evaluation.diagnostics.rewrites import REWRITES
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer

__all__ = [
    "PerturbedPair",
    "PerturbedScores",
    "diagnose_perturbations",
    "perturb",
    "sample_examples",
    "score_perturbed",
    "summarize_perturbations",
]

logger = logging.getLogger(__name__)

_EXAMPLES_AT_ONCE = 16
_MOST_WORST = 30
_REFUSAL = re.compile(
    r"^\W*(?:(?:i['’]?m|i am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately|no,|as an ai|"
    r"i (?:can['’]?t|cannot|can not|won['’]?t|will not|am not able|['’]?m not able|am unable|do not|don['’]?t))",
    re.IGNORECASE,
)
_NO_SCORES = (None, None)


@dataclass(frozen=True, slots=True)
class PerturbedPair:
    """One pair of an example: indices of its completions, and both rewritten texts by rewrite, the better one first.

    None where a rewrite has nothing to change.
    """

    better: int
    worse: int
    texts: Mapping[str, tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class PerturbedScores:
    """The scores of one pair, a row of `perturbations.jsonl`.

    `original`: of the better and the worse completion. `rewritten`: by name of the rewrite; None where there is no text
    or no score. `num_failed`: texts that the model could not score. `prompt`: a digest of the context.
    """

    id: str
    prompt: str
    original: Sequence[float | None]
    rewritten: Mapping[str, Sequence[float | None]]
    num_failed: int = 0


def diagnose_perturbations(
    scorer: ConversationScorer,
    examples: Sequence[EvalExample],
    model: str = "model",
    *,
    num_examples: int = 200,
    seed: int = 0,
    folder: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnostic | None:
    """Sample, rewrite, score and sum up; None where no example has a better and a worse completion of text.

    `folder`: where a row of each example is kept as soon as it is scored (perturbations.jsonl); a larger sample scores
    only what it has more. `identity`: what a row depends on besides its example, the seed and the rewrites.
    `on_progress`: receives the number of examples that are scored and of all. Raises as `resumable_rows`.
    """
    sampled = sample_examples(examples, num_examples, seed)
    if not sampled:
        return None
    path = None if folder is None else folder / "perturbations.jsonl"
    own = {"seed": seed, "rewrites": ", ".join(REWRITES)} | dict(identity or {})
    with resumable_rows(path, own, _from_row) as rows:
        known = {one.id: one for one in rows.kept}
        left = [example for example in sampled if example.id not in known]
        on_progress(len(sampled) - len(left), len(sampled))
        for number, one in enumerate(score_perturbed(scorer, left, seed=seed), start=1):
            rows.add(asdict(one))
            known[one.id] = one
            on_progress(len(sampled) - len(left) + number, len(sampled))
    return summarize_perturbations(sampled, [known[example.id] for example in sampled], model, seed=seed)


def sample_examples(examples: Sequence[EvalExample], num_examples: int, seed: int = 0) -> list[EvalExample]:
    """At most `num_examples` of the examples that have a pair of text, in their order; the same for the same `seed`.

    They are the first by a hash of seed and id, so a smaller sample lies within a larger one, and examples that the
    data gain or lose change no other's place.
    """
    usable = [example for example in examples if _pair(example, seed) is not None]
    hashes = [hashlib.sha256(f"{seed}/{example.id}".encode()).digest() for example in usable]
    drawn = sorted(range(len(usable)), key=lambda i: hashes[i])[:num_examples]
    return [usable[i] for i in sorted(drawn)]


def perturb(example: EvalExample, seed: int = 0) -> PerturbedPair:
    """The rewritten texts of one pair of an example, drawn by `seed` and the example's id where there are several.

    An example whose better completion is a refusal has no rewrite "refusal". Raises `DataError` for one without a pair.
    """
    pair = _pair(example, seed)
    if pair is None:
        raise DataError("the example has no better and worse completion of text", where=example.where or example.id)
    asked = [message for message in example.context if message.get("role") == "user"]
    prompt = completion_text(asked)
    originals = [completion_text(example.completions[i]) for i in pair]
    texts: dict[str, tuple[str | None, str | None]] = {}
    for name, rewrite in REWRITES.items():
        if name == "refusal" and _REFUSAL.match(originals[0]):
            texts[name] = (None, None)
            continue
        # The same generator for both, so that a rewrite with a choice of phrases takes the same one.
        first, second = (
            rewrite.apply(prompt, text, random.Random(f"{seed}/{example.id}/{name}")) for text in originals
        )
        texts[name] = (first, second)
    return PerturbedPair(*pair, texts)


def score_perturbed(
    scorer: ConversationScorer, examples: Sequence[EvalExample], *, seed: int = 0
) -> Iterator[PerturbedScores]:
    """The scores of each example's pair, in order; a row depends on its example and the seed alone."""
    remaining = iter(examples)
    while chunk := list(islice(remaining, _EXAMPLES_AT_ONCE)):
        conversations = [_conversations(example, perturb(example, seed)) for example in chunk]
        flat = [conversation for one in conversations for conversation in one.values()]
        results = iter(scorer.score(flat, on_error="mask"))
        for example, own in zip(chunk, conversations, strict=True):
            scores = {key: next(results).score for key in own}
            yield PerturbedScores(
                id=example.id,
                prompt=hashlib.blake2b(example.prompt_key.encode(), digest_size=8).hexdigest(),
                original=[scores["", 0], scores["", 1]],
                rewritten={name: [scores.get((name, 0)), scores.get((name, 1))] for name in REWRITES},
                num_failed=sum(score is None for score in scores.values()),
            )


def summarize_perturbations(
    examples: Sequence[EvalExample], scores: Sequence[PerturbedScores], model: str = "model", *, seed: int = 0
) -> Diagnostic:
    """The diagnostics of scores (E), made with the same `seed`; `examples`: those that they are of, or more.

    `robust_accuracy`: pairs that are right and stay so under every rewrite of kind "style", of either completion.
    `details`: `num_failed`, the texts without a score, which are left out.
    """
    prompts = [one.prompt for one in scores]
    before = _table([one.original for one in scores])
    stays = before[:, 0] > before[:, 1]
    numbers = [accuracy_metric(stays.astype(float).tolist(), "accuracy", prompts, of="pairs")]
    for name, rewrite in REWRITES.items():
        after = _table([one.rewritten.get(name, _NO_SCORES) for one in scores])
        numbers += _effects(name, before, after, prompts)
        if rewrite.kind == "style":
            # A rewrite that does not apply, or a text without a score, says nothing against a pair.
            stays &= ~(after[:, 0] <= before[:, 1]) & ~(before[:, 0] <= after[:, 1])
    robust = accuracy_metric(stays.astype(float).tolist(), "robust_accuracy", prompts, of="pairs")
    by_name = {metric.name: metric for metric in (robust, *numbers)}
    figures = (*_figures(by_name, model), _worst_table(examples, scores, seed))
    return Diagnostic(by_name, figures, details={"num_failed": sum(one.num_failed for one in scores)})


def _effects(name: str, before: Floats, after: Floats, prompts: Sequence[str]) -> list[Metric]:
    """What one rewrite does to scores (E, 2), NaN where there is none.

    `shift`: mean of the new score less the old, over both completions; `relative_shift`: in units of the mean absolute
    margin before. `share_gaining`: completions that score higher rewritten. `chosen_flips`, `rejected_flips`: the share
    of the right pairs that is lost when the better or the worse completion alone is rewritten; a tie is lost.
    `accuracy`: with both rewritten.
    """
    shifts, owners = (after - before).ravel(), np.repeat(np.arange(len(prompts)), 2)
    there, known = np.isfinite(shifts), np.isfinite(before).all(axis=1)
    of_prompts = [prompts[i] for i in owners[there].tolist()]
    size = float(np.abs(before[known, 0] - before[known, 1]).mean()) if known.any() else 0.0
    right = before[:, 0] > before[:, 1]
    shift = Metric(f"{name}_shift", None, count=0)
    if there.any():
        bounds = cluster_bootstrap(shifts[there], of_prompts)
        shift = Metric(f"{name}_shift", float(shifts[there].mean()), *bounds, count=int(there.sum()))

    def share(which: str, where: Any, hits: Any) -> Metric:
        clusters = [prompts[i] for i in np.flatnonzero(where).tolist()]
        return accuracy_metric(hits[where].astype(float).tolist(), f"{name}_{which}", clusters, of="pairs")

    gains = (shifts[there] > 0).astype(float).tolist()
    return [
        shift,
        divided(shift, size, f"{name}_relative_shift"),
        accuracy_metric(gains, f"{name}_share_gaining", of_prompts, of="completions"),
        share("chosen_flips", right & np.isfinite(after[:, 0]), after[:, 0] <= before[:, 1]),
        share("rejected_flips", right & np.isfinite(after[:, 1]), before[:, 0] <= after[:, 1]),
        share("accuracy", known & np.isfinite(after).all(axis=1), after[:, 0] > after[:, 1]),
    ]


def _figures(numbers: Mapping[str, Metric], model: str) -> list[Block]:
    """Shifts, and how many pairs each rewrite turns."""
    shifts = [numbers[f"{name}_relative_shift"] for name in REWRITES]
    ends = [abs(bound) for metric in shifts for bound in (metric.value, metric.low, metric.high) if bound is not None]
    reach = max(ends, default=0.0) or 1.0
    damages = ", ".join(rewrite.label for rewrite in REWRITES.values() if rewrite.kind == "damage")

    def bars(title: str, what: str, note: str, **axis: Any) -> Block:
        items = [bar_item(one.label, numbers[f"{name}_{what}"], one.summary) for name, one in REWRITES.items()]
        return bars_block(title, model, items, note, **({"reference": 0} | axis))

    return [
        bars(
            "Score shift by rewrite",
            "relative_shift",
            "In mean margins: at 1, the rewrite moves the score as much as the data's completions differ.",
            x_range=[-reach, reach],
            format="signed",
        ),
        bars(
            "Right pairs lost when the worse completion is rewritten",
            "rejected_flips",
            "A rewrite hardly makes a worse completion the better one: a lost pair is a way to fool the model.",
        ),
        bars(
            "Right pairs lost when the better completion is rewritten",
            "chosen_flips",
            f"Changes of style should lose none. A damaged completion ({damages}) may well be the worse one now.",
        ),
        bars(
            "Completions that score higher rewritten",
            "share_gaining",
            f"Damaged completions ({damages}) should not.",
            reference=0.5,
            reference_label="half",
        ),
    ]


def _worst_table(examples: Sequence[EvalExample], scores: Sequence[PerturbedScores], seed: int) -> Block:
    """Worse completions that a rewrite lifts over the better ones, and damaged completions that gain."""
    found: list[tuple[float, int, str, int]] = []
    for i, one in enumerate(scores):
        for name, rewritten in one.rewritten.items():
            for side in (0, 1):
                old, new, better = one.original[side], rewritten[side], one.original[0]
                if old is None or new is None or new <= old:
                    continue
                lifted = side == 1 and better is not None and old < better <= new
                if lifted or REWRITES[name].kind == "damage":
                    found.append((new - old, i, name, side))
    found.sort(key=lambda item: (-item[0], *item[1:]))
    by_id, rows = {example.id: example for example in examples}, []
    for shift, i, name, side in found[:_MOST_WORST]:
        example = by_id[scores[i].id]
        pair = perturb(example, seed)
        before = completion_text(example.completions[(pair.better, pair.worse)[side]])
        rows.append(
            {
                "id": example.id,
                "rewrite": REWRITES[name].label,
                "side": ("better", "worse")[side],
                "shift": shift,
                "before": shortened(before),
                "after": shortened(pair.texts[name][side] or ""),
            }
        )
    columns = {"id": ("Example", "text"), "rewrite": ("Rewrite", "text"), "side": ("Completion", "text")}
    columns |= {"shift": ("Shift", "signed"), "before": ("Before", "text"), "after": ("After", "text")}
    return table_block("Completions that a rewrite lifted most", columns, rows, most=8)


def _pair(example: EvalExample, seed: int) -> tuple[int, int] | None:
    ranks = example.ranks
    text = [
        isinstance(c[-1].get("content"), str) and bool(c[-1]["content"].strip()) if c else False
        for c in example.completions
    ]
    pairs = [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b and text[i] and text[j]]
    return random.Random(f"{seed}/{example.id}").choice(pairs) if pairs else None


def _conversations(example: EvalExample, pair: PerturbedPair) -> dict[tuple[str, int], list[Message]]:
    """By rewrite ("" for none) and side; only the last message of a completion is rewritten."""
    found: dict[tuple[str, int], list[Message]] = {}
    for side, index in enumerate((pair.better, pair.worse)):
        completion = example.completions[index]
        found["", side] = [*example.context, *completion]
        for name, texts in pair.texts.items():
            if (text := texts[side]) is not None:
                found[name, side] = [*example.context, *completion[:-1], {**completion[-1], "content": text}]
    return found


def _from_row(row: Mapping[str, Any], where: str) -> PerturbedScores:
    try:
        return PerturbedScores(**row)
    except TypeError as error:
        raise DataError("this is no row of rewritten completions", where=where, got=repr(error)) from error


def _table(pairs: Sequence[Sequence[float | None]]) -> Floats:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)  # None becomes NaN
