"""Reports of seeded random numbers, as an evaluation and runs of RL make them: `sample_report()`,
`sample_rl_report()`.

Two models on LLMBar-like subsets; the first has a length bias. Some completions hold what must not
act in a page. `summary(score)` is a real summary of 80 comparisons by a rule; `EMPTY` are those
with hardly anything to sum up.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from evaluated import preference, rated

from treeward.data.preference import Preference
from treeward.evaluation.findings import Summary, summarize
from treeward.evaluation.page import evaluation_page
from treeward.evaluation.results import ScoredExample, SuiteResult, by_subset
from treeward.evaluation.suites.interface import Suite
from treeward.rl.logged_run import RLRun
from treeward.rl.report import rl_page
from treeward.rl.watch import Alarm

MODELS = ("qwen3-tiny-bt", "qwen3-tiny-ensemble")
SUBSETS = (
    "natural",
    "adversarial neighbour",
    "adversarial GPTInst",
    "adversarial GPTOut",
    "adversarial manual",
)
NUM_EXAMPLES = 300
HOSTILE = (
    "</script><script>window.injected = 1</script>",
    "<img src=x onerror='window.injected = 1'>\"quotes\" and 'more' & &amp; <!-- <script>",
    (
        "line\u2028separator\u2029paragraph, a bell \x07, null \x00, \u202eoverride\u202c and "
        "half \ud83d a pair"
    ),
    "مرحبا بالعالم. هذا نص من اليمين إلى اليسار with English inside.",
    "{{data}} {{script}} ${window.injected = 1} `code` **bold**",
)
_TOPICS = (
    "a sourdough starter",
    "tail recursion",
    "the water cycle",
    "a cover letter",
    "unit tests",
    "the moon",
)
_WORDS = (
    "the answer is that you should keep it simple and check every step before going on to the "
    "next because small "
    "mistakes grow however many readers prefer a longer explanation with an example which is "
    "not always more correct"
)


@functools.cache
def sample_report() -> dict[str, Any]:
    """Keyword arguments of `build_report` for a report of both models; shared, so not to be
    changed."""
    summaries = [
        summarize(LLMBarLike(), tuple(examples), model)
        for model, examples in sample_examples().items()
    ]
    return {
        "template": "evaluation/page.html",
        "title": "qwen3-tiny-bt against qwen3-tiny-ensemble",
        "page": evaluation_page(summaries),
        "subtitle": "LLMBar, float32, scored with the chat template of each model",
    }


@functools.cache
def sample_rl_report() -> dict[str, Any]:
    """The same for runs of RL, whose prompts and completions are hostile."""
    runs = []
    for number, name in enumerate(MODELS):
        steps = {}
        for step in range(0, 21, 10):
            reward = 0.1 * step * (number + 1)
            steps[step] = {
                "validation/reward": reward,
                "validation/kl": 0.2 * step,
                "train/reward": reward,
            }
        samples = []
        for text in HOSTILE:
            prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            for step, answer in ((0, text), (10, "and on " * 400), (20, "")):
                completion = {"text": answer, "reward": 0.25, "truncated": step == 10}
                samples.append({"step": step, "prompt": prompt, "completions": [completion]})
        alarm = Alarm("length_growth", 10, "Completions grow.")
        runs.append(RLRun(name, steps, tuple(samples), (alarm,)))
    return {
        "template": "rl/report.html",
        "title": "Two runs",
        "page": rl_page(runs),
        "subtitle": "Of nothing",
    }


def sample_rows() -> list[dict[str, Any]]:
    """The rows of the table of examples."""
    (suite,) = sample_report()["page"].suites
    return json.loads(json.dumps(suite.examples))


@functools.cache
def sample_examples() -> dict[str, list[ScoredExample]]:
    """Examples by model: most of two completions, some of four, some failed, some tied."""
    words = random.Random(5)
    examples: dict[str, list[ScoredExample]] = {model: [] for model in MODELS}
    for index in range(NUM_EXAMPLES):
        model = MODELS[index % 2]
        subset = words.choice(SUBSETS)
        ranks = (0, 1, 1, 1) if index % 50 == 7 else (0, 1)
        texts = [_sentences(words, words.randrange(8, 140)) for _ in ranks]
        if index < 2 * len(HOSTILE):
            texts[index % 2] = HOSTILE[index // 2]
        bias = 0.0025 if model == MODELS[0] else 0.0004
        good = 0.35 if subset == "natural" else 0.0
        scores: list[float | None] = [
            words.gauss(good if rank == 0 else 0.0, 1.0) + bias * len(text)
            for rank, text in zip(ranks, texts, strict=True)
        ]
        scores = [scores[1]] * len(ranks) if index % 19 == 0 else scores
        errors: tuple[str | None, ...] = ()
        if index % 97 == 5:
            scores[0] = None
            errors = ("the conversation has 9,000 tokens, the model reads 4,096", None)
        asked = [f"Explain {words.choice(_TOPICS)} to a beginner, in case {index}."]
        asked += (
            [_sentences(words, 30), f"Go on, please: what about case {index}?"]
            if index % 9 == 4
            else []
        )
        roles = ("user", "assistant", "user")
        context = [
            {"role": role, "content": text} for role, text in zip(roles, asked, strict=False)
        ]
        example = preference(f"{subset[:3]}-{index}", subset, context, texts, ranks)
        sizes = tuple(map(len, texts))
        examples[model].append(ScoredExample(example, tuple(scores), sizes, sizes, errors))
    return examples


def _sentences(words: random.Random, count: int) -> str:
    text = " ".join(words.choice(_WORDS.split()) for _ in range(count)).capitalize() + "."
    return text.replace(" because ", ".\n\nBecause ")


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


class LLMBarLike(BestOf):
    """With five subsets, all of pairs."""

    name = "llmbar"
    title = "LLMBar"

    def chance(self, part: str | None = None) -> float | None:
        return 0.5


def scored(
    score: Scoring, count: int = 80, subsets: Sequence[str] = ("hard", "even", "odd")
) -> list[ScoredExample]:
    """Of every other example the better reply is the longer one."""
    found = []
    for n in range(count):
        texts = [
            "right " * (4 if n % 2 else 1),
            "wrong " * (1 if n % 2 else 4),
            *(["wrong."] if n % 10 == 0 else []),
        ]
        example = preference(str(n), subsets[n % len(subsets)], f"Question {n}?", texts)
        found.append(rated(example, [score(n, text) for text in texts]))
    return found


def summary(
    score: Scoring, model: str = "m", suite: Suite | None = None, **options: Any
) -> Summary:
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
