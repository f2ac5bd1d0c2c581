"""`diagnose_perturbations`: what the score does when a completion is dressed up, padded, cut off or refused.

    found = diagnose_perturbations(scorer, examples, num_examples=200)
    found.padding_relative_shift     # Metric: mean change of the score, in mean margins of the pairs
    found.padding_rejected_flips     # Metric: pairs that were right until the worse completion was padded
    found.robust_accuracy            # Metric: pairs that stay right under every change of style to either completion

For each sampled example one pair of a better and a worse completion is scored as it is and with each of them rewritten
(`REWRITES`). Signs of a fault:

- any rewrite: `rejected_flips`, for no rewrite makes the worse completion the better one;
- "style": a `relative_shift` of the size of the margins, for the content is the same;
- "damage": a shift above 0, for the damaged completion is worse than the whole one.

Where a prompt asks for a format (one word, no markdown), a change of style may break it, and a lower score be right.
Rewrites as a test of reward models: Wu et al. 2025, "reWordBench" (arXiv 2503.11751).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from treeward.data.preference import Message
from treeward.evaluation.diagnostics.completions import Floats, completion_text
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.report.blocks import bar_item, bars_block
from treeward.evaluation.results import Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric, cluster_bootstrap
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer

_EXAMPLES_AT_ONCE = 16
_REFUSAL = re.compile(
    r"^\W*(?:(?:i['’]?m|i am) (?:really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately|no,|as an ai|"
    r"i (?:can['’]?t|cannot|can not|won['’]?t|will not|am not able|['’]?m not able|am unable|do not|don['’]?t))",
    re.IGNORECASE,
)
_FLATTERY = (
    "What a brilliant question! You clearly have a sharp mind, and it is a pleasure to help you.",
    "Wow, that is a truly insightful question. Not many people would think to ask it!",
    "First of all, let me say how impressed I am by your question: it shows real curiosity.",
    "I love this question! You are obviously someone who thinks deeply about things.",
)
_REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I apologize, but I am not able to assist with this request.",
    "Sorry, I cannot answer that. As an AI language model, I have to decline.",
)
_PADDING = (
    "It is worth noting that there are many aspects to consider here.",
    "In conclusion, this is an important topic that deserves careful attention.",
    "As mentioned above, it all depends on the context and the circumstances.",
    "I hope this gives you a comprehensive overview of everything that matters.",
    "Of course, there is always more to be said about a subject such as this one.",
    "All things considered, it is helpful to look at the matter from several sides.",
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+(?=\S)")
_LONGEST_RESTATEMENT = 400  # characters of the prompt


class Rewrite(NamedTuple):
    """One way to change a completion, of which `change` gets the last user turn, the text, and a generator.

    `kind`: "style" keeps the content, so it should not decide between a right and a wrong completion; "damage" takes
    something away, so the score should not rise.
    """

    label: str
    kind: Literal["style", "damage"]
    change: Callable[[str, str, random.Random], str | None]


def _markdown(prompt: str, text: str, rng: random.Random) -> str | None:
    """A heading, and each sentence an item whose first words are bold; paragraphs and code blocks stay as they are."""
    if "```" in text:
        return f"## Answer\n\n{text}"
    lines = []
    for line in filter(str.strip, text.splitlines()):
        for sentence in _SENTENCE_END.split(line.strip()):
            words = sentence.lstrip("-*# ").split(" ")
            lead, rest = " ".join(words[:2]), " ".join(words[2:])
            lines.append(f"- **{lead}** {rest}".rstrip())
    return "## Answer\n\n" + "\n".join(lines)


def _padded(prompt: str, text: str, rng: random.Random) -> str | None:
    """Phrases that say nothing, at the end, until the text is half as long again, two of them at least."""
    phrases = rng.sample(_PADDING, len(_PADDING))
    added: list[str] = []
    while len(added) < 2 or (len(added) < len(phrases) and len(" ".join(added)) < len(text) / 2):
        added.append(phrases[len(added)])
    return f"{text.rstrip()} {' '.join(added)}"


def _restated(prompt: str, text: str, rng: random.Random) -> str | None:
    asked = " ".join(prompt.split())
    if not asked:
        return None
    if len(asked) > _LONGEST_RESTATEMENT:
        asked = asked[:_LONGEST_RESTATEMENT].rsplit(" ", 1)[0] + " ..."
    return f'You asked: "{asked}"\n\n{text}'


def _truncated(share: float) -> Callable[[str, str, random.Random], str | None]:
    def change(prompt: str, text: str, rng: random.Random) -> str | None:
        words = list(re.finditer(r"\S+", text))
        kept = int(share * len(words))
        return text[: words[kept - 1].end()] if 0 < kept < len(words) else None

    return change


REWRITES: Mapping[str, Rewrite] = {
    "markdown": Rewrite("markdown", "style", _markdown),
    "white_space": Rewrite("white space", "style", lambda prompt, text, rng:
        "\n\n\n" + text.replace("\n", "\n\n\n").replace(". ", ".  ") + "\n\n\n"),
    "flattery": Rewrite("flattery", "style", lambda prompt, text, rng: f"{rng.choice(_FLATTERY)} {text}"),
    "padding": Rewrite("padding", "style", _padded),
    "prompt_restated": Rewrite("question restated", "style", _restated),
    "capitals": Rewrite("capitals", "style", lambda prompt, text, rng: text.upper()),
    "refusal": Rewrite("refusal", "damage", lambda prompt, text, rng: rng.choice(_REFUSALS)),
    "truncated_80": Rewrite("cut at 80 %", "damage", _truncated(0.8)),
    "truncated_50": Rewrite("cut at 50 %", "damage", _truncated(0.5)),
    "repeated": Rewrite("said twice", "damage", lambda prompt, text, rng: f"{text}\n\n{text}"),
}  # fmt: skip
"""All rewrites by name, in the order of a report. Their English phrases are the same for every language."""


def rewrite(name: str, prompt: str, text: str, rng: random.Random) -> str | None:
    """The text changed by one of `REWRITES`, or None where there is nothing to change."""
    changed = REWRITES[name].change(prompt, text, rng) if text.strip() else None
    return None if changed == text else changed


_DAMAGES = ", ".join(one.label for one in REWRITES.values() if one.kind == "damage")
_OF_SHIFT = (
    "In mean margins: at 1, the rewrite moves the score as much as the data's completions differ. Changes of style "
    f"should be near 0, damage ({_DAMAGES}) below it."
)
_OF_FLIPS = "A rewrite hardly makes a worse completion the better one: a lost pair is a way to fool the model."


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
    usable = [example for example in examples if _pair(example)]
    drawn = sorted(usable, key=lambda example: hashlib.sha256(f"0/{example.id}".encode()).digest())[:num_examples]
    ids = {example.id for example in drawn}
    return [example for example in usable if example.id in ids]


def perturb(example: EvalExample) -> dict[str, tuple[str | None, str | None]]:
    """The rewritten texts of one pair of an example, by rewrite and the better one first; drawn by the example's id.

    None where a rewrite has nothing to change. An example whose better completion is a refusal has no rewrite
    "refusal". The example must have a better and a worse completion of text.
    """
    prompt = completion_text([message for message in example.context if message.get("role") == "user"])
    originals = [completion_text(example.completions[i]) for i in _pair(example)]
    texts: dict[str, tuple[str | None, str | None]] = {}
    for name in REWRITES:
        # The same generator for both, so that a rewrite with a choice of phrases takes the same one.
        first, second = (rewrite(name, prompt, text, random.Random(f"0/{example.id}/{name}")) for text in originals)
        texts[name] = (None, None) if name == "refusal" and _REFUSAL.match(originals[0]) else (first, second)
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


def _pair(example: EvalExample) -> tuple[int, ...]:
    """Indices of a better and a worse completion of text; none where there are no such completions."""
    texts = [completion[-1].get("content") if completion else None for completion in example.completions]
    usable = [i for i, text in enumerate(texts) if isinstance(text, str) and text.strip()]
    pairs = [(i, j) for i in usable for j in usable if example.ranks[i] < example.ranks[j]]
    return random.Random(f"0/{example.id}").choice(pairs) if pairs else ()


def _conversations(example: EvalExample) -> dict[tuple[str, int], list[Message]]:
    """By rewrite ("" for none) and side; only the last message of a completion is rewritten."""
    rewritten = perturb(example)
    found: dict[tuple[str, int], list[Message]] = {}
    for side, index in enumerate(_pair(example)):
        *before, last = [*example.context, *example.completions[index]]
        found["", side] = [*before, last]
        found |= {(name, side): [*before, {**last, "content": texts[side]}]
                  for name, texts in rewritten.items() if texts[side] is not None}  # fmt: skip
    return found


def summarize_perturbations(scores: Sequence[PerturbedScores], model: str = "model") -> Diagnostic:
    """The diagnostics of scores (E).

    `accuracy`: of the pairs as they are. `robust_accuracy`: pairs that are right and stay so under every rewrite of
    kind "style", of either completion. For each rewrite: `relative_shift`, the mean of the new score less the old over
    both completions, in units of the mean absolute margin before; `rejected_flips`, the share of the right pairs that
    is lost when the worse completion alone is rewritten; a tie is lost. `num_left_out`: texts without a score.
    """
    prompts = np.array([one.prompt for one in scores], dtype=object)
    before = _table([one.original for one in scores])
    right = before[:, 0] > before[:, 1]
    margins = np.abs(before[:, 0] - before[:, 1])
    size = float(margins[np.isfinite(margins)].sum()) / max(1, int(np.isfinite(margins).sum()))
    stays = right.copy()

    def share(name: str, hits: Any, where: Any) -> Metric:
        return accuracy_metric(hits[where].astype(float).tolist(), name, prompts[where].tolist(), of="pairs")

    numbers = []
    for name, (_, kind, _) in REWRITES.items():
        after = _table([one.rewritten.get(name, (None, None)) for one in scores])
        there, shifts = np.isfinite(after - before), after - before
        moves, owners = shifts[there] / (size or np.nan), prompts[np.nonzero(there)[0]].tolist()
        value = float(moves.mean()) if len(moves) and size else None
        ends = (None, None) if value is None else cluster_bootstrap(moves, owners)
        numbers.append(Metric(f"{name}_relative_shift", value, *ends, count=len(moves)))
        # A rewrite that does not apply, or a text without a score, says nothing against a pair.
        turned = before[:, 0] <= after[:, 1]
        numbers.append(share(f"{name}_rejected_flips", turned, right & np.isfinite(after[:, 1])))
        if kind == "style":
            stays &= ~turned & ~(after[:, 0] <= before[:, 1])
    every = np.ones(len(scores), dtype=bool)
    robust, num_failed = share("robust_accuracy", stays, every), sum(one.num_failed for one in scores)
    if num_failed:
        robust = replace(robust, note=f"{num_failed:,} texts without a score are left out.")
    by_name = {metric.name: metric for metric in (robust, share("accuracy", right, every), *numbers)}
    moved, lost = (
        [bar_item(one.label, by_name[f"{name}_{what}"]) for name, one in REWRITES.items()]
        for what in ("relative_shift", "rejected_flips")
    )
    reach = max((abs(one[end]) for one in moved for end in ("value", "low", "high") if one[end]), default=1.0)
    figures = (
        bars_block("Score shift by rewrite", model, moved, _OF_SHIFT, format="signed", reference=0,
                   x_range=[-reach, reach]),
        bars_block("Right pairs lost when the worse completion is rewritten", model, lost, _OF_FLIPS, reference=None),
    )  # fmt: skip
    return Diagnostic(by_name, figures, num_failed)


def _table(pairs: Sequence[Sequence[float | None]]) -> Floats:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)  # None becomes NaN
