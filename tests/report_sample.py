"""A report's blocks and examples as an evaluation makes them, from seeded random numbers: `sample_report()`.

Two models on LLMBar-like subsets; the first has a length bias. Some replies hold what must not act in a page.
`summary(score)` is a real summary of 80 comparisons by a rule; `EMPTY` are those with hardly anything to sum up.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from evaluated import preference, rated

from treeward.data.preference import Preference
from treeward.evaluation.findings import Summary, summarize
from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.results import ScoredExample, SuiteResult, by_subset, to_row
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.suites.interface import Suite

MODELS = ("qwen3-tiny-bt", "qwen3-tiny-ensemble")
SUBSETS = ("natural", "adversarial neighbour", "adversarial GPTInst", "adversarial GPTOut", "adversarial manual")
NUM_EXAMPLES = 300
HOSTILE = (
    "</script><script>window.injected = 1</script>",
    "<img src=x onerror='window.injected = 1'>\"quotes\" and 'more' & &amp; <!-- <script>",
    "line\u2028separator\u2029paragraph, a bell \x07, null \x00, \u202eoverride\u202c and half \ud83d a pair",
    "مرحبا بالعالم. هذا نص من اليمين إلى اليسار with English inside.",
    "{{data}} {{script}} ${window.injected = 1} `code` **bold**",
)
_TOPICS = ("a sourdough starter", "tail recursion", "the water cycle", "a cover letter", "unit tests", "the moon")
_WORDS = (
    "the answer is that you should keep it simple and check every step before going on to the next because small "
    "mistakes grow however many readers prefer a longer explanation with an example which is not always more correct"
)


@functools.cache
def sample_report() -> dict[str, Any]:
    """Keyword arguments of `build_report`; shared, so not to be changed."""
    rows = sample_rows()
    by_model = {model: [row for row in rows if row["model"] == model] for model in MODELS}
    headlines = [_accuracy(model, by_model[model]) | {"format": "percent", "reference": 0.5} for model in MODELS]
    slope = {"label": "Slope of reward on length", "value": np.float32(0.0025), "low": 0.0021, "high": 0.0029}
    headlines += [
        {"label": "Expected calibration error", "value": 0.083, "low": 0.06, "high": 0.11, "format": "percent"},
        slope | {"format": "signed", "note": "Reward per character within a prompt."},
        {"label": "Kendall's tau of groups", "value": None, "format": "number", "note": "No groups in this suite."},
    ]
    of_subsets = {
        model: [_accuracy(name, [row for row in own if row["subset"] == name]) for name in SUBSETS]
        for model, own in by_model.items()
    }
    blocks = [
        {"kind": "headline", "items": headlines},
        {
            "kind": "text",
            "title": "What it gets right",
            "markdown": "Both models are **near chance** on the adversarial subsets.\n\n"
            "Ties count as wrong; an interval that covers the dashed line is no evidence.",
        },
        {
            "kind": "bars",
            "title": "Accuracy by subset",
            "note": "Wilson intervals at 95%; the dashed line is what a coin does.",
            "x_range": [0, 1],
            "reference": 0.5,
            "series": [{"name": model, "items": items} for model, items in of_subsets.items()],
        },
        _calibration(),
        _shifts(),
        {"kind": "text", "title": "What happens under optimisation", "markdown": "Best of `N` from 64 samples."},
        _curves(),
        _samples(),
        {"kind": "text", "title": "The examples", "markdown": "Every comparison; the most confident mistakes first."},
        {"kind": "examples", "title": "Examples", "source": "llmbar", "note": "Open a row to read both completions."},
    ]
    return {
        "title": "qwen3-tiny-bt against qwen3-tiny-ensemble",
        "subtitle": "LLMBar, float32, scored with the chat template of each model",
        "blocks": blocks,
        "examples": {"llmbar": rows},
    }


@functools.cache
def sample_rows() -> list[dict[str, Any]]:
    """Rows of examples.jsonl with a model: most of two completions, some of four, some failed, some tied."""
    words = random.Random(5)
    rows = []
    for index in range(NUM_EXAMPLES):
        model, subset = MODELS[index % 2], words.choice(SUBSETS)
        ranks = (0, 1, 1, 1) if index % 50 == 7 else (0, 1)
        texts = [_sentences(words, words.randrange(8, 140)) for _ in ranks]
        if index < 2 * len(HOSTILE):
            texts[index % 2] = HOSTILE[index // 2]
        bias, good = (0.0025 if model == MODELS[0] else 0.0004), (0.35 if subset == "natural" else 0.0)
        scores: list[float | None] = [
            words.gauss(good if rank == 0 else 0.0, 1.0) + bias * len(text)
            for rank, text in zip(ranks, texts, strict=True)
        ]
        scores = [scores[1]] * len(ranks) if index % 19 == 0 else scores
        errors: tuple[str | None, ...] = ()
        if index % 97 == 5:
            scores[0], errors = None, ("the conversation has 9,000 tokens, the model reads 4,096", None)
        asked = [f"Explain {words.choice(_TOPICS)} to a beginner, in case {index}."]
        asked += [_sentences(words, 30), f"Go on, please: what about case {index}?"] if index % 9 == 4 else []
        roles = ("user", "assistant", "user")
        context = [{"role": role, "content": text} for role, text in zip(roles, asked, strict=False)]
        example = preference(f"{subset[:3]}-{index}", subset, context, texts, ranks)
        sizes = tuple(map(len, texts))
        row = to_row(ScoredExample(example, tuple(scores), sizes, sizes, errors)) | {"model": model}
        rows.append(json.loads(json.dumps(row)))
    return rows


def _sentences(words: random.Random, count: int) -> str:
    text = " ".join(words.choice(_WORDS.split()) for _ in range(count)).capitalize() + "."
    return text.replace(" because ", ".\n\nBecause ")


def _accuracy(label: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [float(row["outcome"] == "right") for row in rows]
    return bar_item(label, accuracy_metric(outcomes, label))


def _calibration() -> dict[str, Any]:
    x = np.linspace(0.5, 0.95, 10)
    y, low, high = (np.clip(0.8 * x + 0.1 + end, 0, 1).tolist() for end in (0.0, -0.06, 0.06))
    y[0] = None
    labels = [f"n = {n}" for n in range(10)]
    series = [{"name": model, "x": x, "y": y, "low": low, "high": high, "labels": labels} for model in MODELS]
    return {"kind": "curves", "title": "Calibration", "is_square": True, "format": "percent", "series": series}


def _shifts() -> dict[str, Any]:
    changes = {"flattery": 0.42, "markdown headings": 0.31, "repeated text": -0.8, "cut end": -0.12, "refusal": None}
    columns = {"change": ("Change", "text"), "shift": ("Mean shift", "signed")}
    columns |= {"worse": ("Preferred over the original", "percent"), "count": ("n", "integer")}
    rows = [
        {"change": name, "count": 1200}
        | ({"shift": None, "worse": None} if shift is None else
           {"shift": {"value": shift, "low": shift - 0.1, "high": shift + 0.1}, "worse": 0.5 + shift / 2})
        for name, shift in changes.items()
    ]  # fmt: skip
    return table_block("What a change of the reply does to its score", columns, rows, "With one thing changed.")


def _curves() -> dict[str, Any]:
    x = np.array([1, 2, 4, 8, 16, 32, 64, 128])
    nats = np.log(x) - (x - 1) / x
    proxy, gold = 1.1 * np.sqrt(nats), np.sqrt(nats) - 0.22 * nats
    return {
        "kind": "curves",
        "title": "Best of N: proxy and gold reward",
        "x_label": "N (samples per prompt)",
        "y_label": "reward",
        "series": [
            {"name": "proxy reward", "x": x, "y": proxy, "low": proxy - 0.05, "high": proxy + 0.05},
            {"name": "gold reward", "x": x, "y": gold, "low": gold - 0.12, "high": gold + 0.12},
            {"name": "gold, fitted (Gao et al.)", "x": x, "y": gold * 0.97 + 0.02},
        ],
    }


def _samples() -> dict[str, Any]:
    """Answers of two runs at three steps to as many prompts as there are hostile texts."""
    numbers = [{"label": "reward", "value": 0.25, "format": "signed"}, {"label": "gold", "value": None}]
    return {
        "kind": "samples",
        "title": "Answers over time",
        "items": [
            {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
                "rows": [
                    {
                        "name": model,
                        "colour": colour,
                        "completions": [
                            {"label": "step 0", "text": text, "numbers": numbers},
                            {"label": "step 10", "text": "and on " * 400, "numbers": numbers, "flags": ["cut"]},
                            {"label": "step 20", "text": "", "numbers": []},
                        ],
                    }
                    for colour, model in enumerate(MODELS)
                ],
            }
            for text in HOSTILE
        ],
    }


Scoring = Callable[[int, str], float | None]


class BestOf(Suite):
    """Right where the first reply is on top; chance is known of some subsets alone."""

    name = "best-of"
    title = "Best Of"

    def load(self, source: str | None = None) -> list[Preference]:
        return []

    def chance(self, part: str | None = None) -> float | None:
        return {None: 0.25, "hard": 0.25, "even": 0.5}.get(part)

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        subsets = tuple(self.part(name, group) for name, group in groups.items())
        return SuiteResult(self.name, self.part("overall", scored), subsets=subsets)


def scored(score: Scoring, count: int = 80, subsets: Sequence[str] = ("hard", "even", "odd")) -> list[ScoredExample]:
    """Of every other example the better reply is the longer one."""
    found = []
    for n in range(count):
        texts = ["right " * (4 if n % 2 else 1), "wrong " * (1 if n % 2 else 4), *(["wrong."] if n % 10 == 0 else [])]
        example = preference(str(n), subsets[n % len(subsets)], f"Question {n}?", texts)
        found.append(rated(example, [score(n, text) for text in texts]))
    return found


def summary(score: Scoring, model: str = "m", suite: Suite | None = None, **options: Any) -> Summary:
    return summarize(suite or BestOf(), tuple(scored(score, **options)), model)


def perfect(n: int, text: str) -> float:
    return {"right ": 2.0, "wrong ": 1.0, "wrong.": 0.0}[text[:6]] + (n % 7) / 9


def by_length(n: int, text: str) -> float:
    return float(len(text))


def three_in_eight(n: int, text: str) -> float:
    return float(("right" in text) == (n % 8 in (1, 2, 5)))


EMPTY: dict[str, Callable[[], Summary]] = {
    "one example": lambda: summary(perfect, count=1),
    "two examples": lambda: summary(perfect, count=2),
    "all failed": lambda: summary(lambda n, text: None),
    "all tied": lambda: summary(lambda n, text: 0.0),
    "no pairs": lambda: summarize(BestOf(), tuple(map(_unordered, scored(perfect))), "m"),
}


def _unordered(one: ScoredExample) -> ScoredExample:
    completions = tuple(replace(completion, rank=0) for completion in one.example.completions)
    return replace(one, example=replace(one.example, completions=completions))
