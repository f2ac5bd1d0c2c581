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
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from treeward.data.preference import Message
from treeward.evaluation.diagnostics.completions import Floats, completion_text, divided
from treeward.evaluation.diagnostics.rewrites import REWRITES
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.report.blocks import bar_item, bars_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer

__all__ = [
    "PerturbedScores",
    "diagnose_perturbations",
    "perturb",
    "sample_examples",
    "score_perturbed",
    "summarize_perturbations",
]

_EXAMPLES_AT_ONCE = 16
_REFUSAL = re.compile(
    r"^\W*(?:(?:i['’]?m|i am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately|no,|as an ai|"
    r"i (?:can['’]?t|cannot|can not|won['’]?t|will not|am not able|['’]?m not able|am unable|do not|don['’]?t))",
    re.IGNORECASE,
)
_DAMAGES = ", ".join(rewrite.label for rewrite in REWRITES.values() if rewrite.kind == "damage")
_SHIFTS = "In mean margins: at 1, the rewrite moves the score as much as the data's completions differ."
_WORSE_LOST = "A rewrite hardly makes a worse completion the better one: a lost pair is a way to fool the model."
_BETTER_LOST = f"Changes of style should lose none. A damaged completion ({_DAMAGES}) may well be the worse one now."
_FIGURES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "relative_shift": ("Score shift by rewrite", _SHIFTS, {"format": "signed", "reference": 0}),
    "rejected_flips": ("Right pairs lost when the worse completion is rewritten", _WORSE_LOST, {"reference": 0}),
    "chosen_flips": ("Right pairs lost when the better completion is rewritten", _BETTER_LOST, {"reference": 0}),
    "share_gaining": (
        "Completions that score higher rewritten",
        f"Damaged completions ({_DAMAGES}) should not.",
        {"reference_label": "half"},
    ),
}
"""The figures by the number of each rewrite that they show: title, note, and fields of the block."""


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
    folder: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnostic | None:
    """Sample, rewrite, score and sum up; None where no example has a better and a worse completion of text.

    `folder`: where a row of each example is kept as soon as it is scored (perturbations.jsonl); a larger sample scores
    only what it has more. `identity`: what a row depends on besides its example and the rewrites. `on_progress`:
    receives the number of examples that are scored and of all. Raises as `resumable_rows`.
    """
    sampled = sample_examples(examples, num_examples)
    if not sampled:
        return None
    path = None if folder is None else folder / "perturbations.jsonl"
    own = {"rewrites": ", ".join(REWRITES)} | dict(identity or {})
    with resumable_rows(path, own, lambda row, where: PerturbedScores(**row)) as rows:
        known = {one.id: one for one in rows.kept}
        left = [example for example in sampled if example.id not in known]
        on_progress(len(sampled) - len(left), len(sampled))
        for number, one in enumerate(score_perturbed(scorer, left), start=1):
            rows.add(asdict(one))
            known[one.id] = one
            on_progress(len(sampled) - len(left) + number, len(sampled))
    return summarize_perturbations([known[example.id] for example in sampled], model)


def sample_examples(examples: Sequence[EvalExample], num_examples: int) -> list[EvalExample]:
    """At most `num_examples` of the examples that have a pair of text, in their order; always the same.

    They are the first by a hash of their ids, so a smaller sample lies within a larger one, and examples that the data
    gain or lose change no other's place.
    """
    usable = [example for example in examples if _pair(example) is not None]
    hashes = [hashlib.sha256(f"0/{example.id}".encode()).digest() for example in usable]
    drawn = sorted(range(len(usable)), key=lambda i: hashes[i])[:num_examples]
    return [usable[i] for i in sorted(drawn)]


def perturb(example: EvalExample) -> dict[str, tuple[str | None, str | None]]:
    """The rewritten texts of one pair of an example, by rewrite and the better one first; drawn by the example's id.

    None where a rewrite has nothing to change. An example whose better completion is a refusal has no rewrite
    "refusal". The example must have a better and a worse completion of text.
    """
    pair = _pair(example)
    assert pair is not None, "sample_examples leaves such examples out"
    prompt = completion_text([message for message in example.context if message.get("role") == "user"])
    originals = [completion_text(example.completions[i]) for i in pair]
    texts: dict[str, tuple[str | None, str | None]] = {}
    for name, rewrite in REWRITES.items():
        # The same generator for both, so that a rewrite with a choice of phrases takes the same one.
        first, second = (rewrite.apply(prompt, text, random.Random(f"0/{example.id}/{name}")) for text in originals)
        is_refused = name == "refusal" and _REFUSAL.match(originals[0])
        texts[name] = (None, None) if is_refused else (first, second)
    return texts


def score_perturbed(scorer: ConversationScorer, examples: Sequence[EvalExample]) -> Iterator[PerturbedScores]:
    """The scores of each example's pair, in order; a row depends on its example alone."""
    remaining = iter(examples)
    while chunk := list(islice(remaining, _EXAMPLES_AT_ONCE)):
        conversations = [_conversations(example) for example in chunk]
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


def summarize_perturbations(scores: Sequence[PerturbedScores], model: str = "model") -> Diagnostic:
    """The diagnostics of scores (E).

    `robust_accuracy`: pairs that are right and stay so under every rewrite of kind "style", of either completion.
    `num_left_out`: texts without a score.
    """
    prompts = [one.prompt for one in scores]
    before = _table([one.original for one in scores])
    stays = before[:, 0] > before[:, 1]
    numbers = [accuracy_metric(stays.astype(float).tolist(), "accuracy", prompts, of="pairs")]
    for name, rewrite in REWRITES.items():
        after = _table([one.rewritten.get(name, (None, None)) for one in scores])
        numbers += _effects(name, before, after, prompts)
        if rewrite.kind == "style":
            # A rewrite that does not apply, or a text without a score, says nothing against a pair.
            stays &= ~(after[:, 0] <= before[:, 1]) & ~(before[:, 0] <= after[:, 1])
    robust = accuracy_metric(stays.astype(float).tolist(), "robust_accuracy", prompts, of="pairs")
    by_name = {metric.name: metric for metric in (robust, *numbers)}
    num_failed = sum(one.num_failed for one in scores)
    return Diagnostic(by_name, tuple(_figures(by_name, model, num_failed)), num_failed)


def _effects(name: str, before: Floats, after: Floats, prompts: Sequence[str]) -> list[Metric]:
    """What one rewrite does to scores (E, 2), NaN where there is none.

    `shift`: mean of the new score less the old, over both completions; `relative_shift`: in units of the mean absolute
    margin before. `share_gaining`: completions that score higher rewritten. `chosen_flips`, `rejected_flips`: the share
    of the right pairs that is lost when the better or the worse completion alone is rewritten; a tie is lost.
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

    def lost(which: str, where: Any, hits: Any) -> Metric:
        clusters = [prompts[i] for i in np.flatnonzero(where).tolist()]
        return accuracy_metric(hits[where].astype(float).tolist(), f"{name}_{which}", clusters, of="pairs")

    gains = (shifts[there] > 0).astype(float).tolist()
    return [
        shift,
        divided(shift, size, f"{name}_relative_shift"),
        accuracy_metric(gains, f"{name}_share_gaining", of_prompts, of="completions"),
        lost("chosen_flips", right & np.isfinite(after[:, 0]), after[:, 0] <= before[:, 1]),
        lost("rejected_flips", right & np.isfinite(after[:, 1]), before[:, 0] <= after[:, 1]),
    ]


def _figures(numbers: Mapping[str, Metric], model: str, num_failed: int) -> Iterator[Block]:
    """Shifts, and how many pairs each rewrite turns."""
    failed = f" Left out: {num_failed:,} texts without a score." if num_failed else ""
    for what, (title, note, fields) in _FIGURES.items():
        metrics = {one: numbers[f"{name}_{what}"] for name, one in REWRITES.items()}
        items = [bar_item(one.label, metric, one.summary) for one, metric in metrics.items()]
        block = bars_block(title, model, items, note + failed, **fields)
        if what == "relative_shift":
            ends = [abs(end) for one in metrics.values() for end in (one.value, one.low, one.high) if end is not None]
            reach = max(ends, default=0.0) or 1.0
            block["x_range"] = [-reach, reach]
        yield block


def _pair(example: EvalExample) -> tuple[int, int] | None:
    ranks = example.ranks
    is_text = [bool(c) and isinstance(c[-1].get("content"), str) and bool(c[-1]["content"].strip())
               for c in example.completions]  # fmt: skip
    pairs = [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b and is_text[i] and is_text[j]]
    return random.Random(f"0/{example.id}").choice(pairs) if pairs else None


def _conversations(example: EvalExample) -> dict[tuple[str, int], list[Message]]:
    """By rewrite ("" for none) and side; only the last message of a completion is rewritten."""
    rewritten = perturb(example)
    found: dict[tuple[str, int], list[Message]] = {}
    for side, index in enumerate(_pair(example) or ()):
        completion = example.completions[index]
        found["", side] = [*example.context, *completion]
        for name, texts in rewritten.items():
            if (text := texts[side]) is not None:
                found[name, side] = [*example.context, *completion[:-1], {**completion[-1], "content": text}]
    return found


def _table(pairs: Sequence[Sequence[float | None]]) -> Floats:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)  # None becomes NaN
