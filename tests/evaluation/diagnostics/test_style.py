"""Markdown is counted as markdown, and a planted liking for it is found and has its size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from treeward.evaluation.diagnostics.style import count_markdown, diagnose_style
from treeward.evaluation.report.blocks import check_blocks

RICH = """# Title

Some **bold words** and __more of them__, a `name` and 2 * 3 * 4.

- first
* second
1. third

| a | b |
|---|---|

```python
# no heading
- no item, **no bold**
```
"""


def test_markdown_is_counted_outside_code_blocks() -> None:
    counts = count_markdown(RICH)
    assert (counts.headings, counts.list_items, counts.bold, counts.code, counts.table_rows) == (1, 3, 2, 2, 2)
    assert counts.density == pytest.approx(100 * 10 / len(RICH.split()))
    plain = count_markdown("It is 2 ** 3, snake__case__name, #hashtag, 3.5 and - so on.\nWell-known | true\n--- \n**")
    assert plain.density == 0
    assert count_markdown("").density == 0
    assert count_markdown("```\nnever closed\n# not a heading").headings == 0
    assert count_markdown("~~~\n# code\n~~~\n# heading").headings == 1


@pytest.fixture(scope="module")
def dressed(make_example: Any) -> list[Any]:
    """Pairs whose better completion (it says "right") has markdown as often as the other, of its own amount."""
    rng = random.Random(3)
    examples = []
    for i in range(300):
        texts = []
        for word in ("right", "wrong"):
            sentences = [f"{word} words {rng.random():.3f}" for _ in range(rng.randint(3, 8))]
            lines = [f"- {s}" if rng.random() < 0.5 else s for s in sentences]
            lines = [line.replace("words", "**words**") if rng.random() < 0.3 else line for line in lines]
            texts.append("\n".join((["## Answer"] if rng.random() < 0.5 else []) + lines))
        examples.append(make_example(str(i), f"question {i}", texts))
    return examples


def planted(effects: dict[str, float], seed: int = 0) -> Any:
    rng = random.Random(seed)

    def score(context: Any, text: str) -> float:
        counts = count_markdown(text)
        quality = 1.0 if "right" in text else 0.0
        return quality + sum(e * getattr(counts, name) for name, e in effects.items()) + rng.gauss(0, 0.2)

    return score


def test_planted_effects_are_recovered(dressed: Any, score_with: Any) -> None:
    effects = {"headings": 0.6, "list_items": 0.2, "bold": -0.3}
    found = diagnose_style(score_with(dressed, planted(effects)))
    by_name = {metric.name: metric for metric in found.metrics()}
    for name, effect in effects.items():
        metric = by_name[f"effect_of_{name}"]
        assert metric.low <= effect <= metric.high and metric.high - metric.low < 0.15
    assert by_name["effect_of_100_characters"].low < 0 < by_name["effect_of_100_characters"].high
    assert by_name["effect_of_code"].value is None  # there is none


def test_density_has_its_effect_and_costs_style_controlled_accuracy(dressed: Any, score_with: Any) -> None:
    fair = diagnose_style(score_with(dressed, planted({})))
    assert fair.density_effect.low < 0 < fair.density_effect.high
    assert fair.style_controlled_accuracy.value > 0.99
    liking = diagnose_style(score_with(dressed, planted({"density": 0.1})))
    assert liking.density_effect.low <= 0.1 <= liking.density_effect.high
    assert liking.relative_density_effect.low > 0
    assert liking.accuracy_more_markdown_right.value == 1 and liking.accuracy_less_markdown_right.value < 0.7
    assert liking.style_controlled_accuracy.value < fair.style_controlled_accuracy.value - 0.1
    only = diagnose_style(score_with(dressed, lambda context, text: count_markdown(text).density))
    assert only.style_controlled_accuracy.value == 0.5
    assert fair.more_markdown_is_right.value == only.more_markdown_is_right.value  # it is of the data
    check_blocks(json.loads(json.dumps(liking.figures, allow_nan=False)), [])


def test_a_completion_without_a_score_is_in_no_accuracy(dressed: Any, score_with: Any) -> None:
    whole = diagnose_style(score_with(dressed, planted({})))
    dropped = {example.completions[0][0]["content"] for example in dressed[:40]}
    judge = planted({})
    holed = diagnose_style(score_with(dressed, lambda context, text: None if text in dropped else judge(context, text)))
    assert holed.num_left_out == 40 and whole.num_left_out == 0
    assert holed.style_controlled_accuracy.value > 0.99 and holed.accuracy_more_markdown_right.value > 0.99
    strata = ("accuracy_more_markdown_right", "accuracy_less_markdown_right", "accuracy_similar_markdown")
    assert sum(getattr(holed, name).count for name in strata) == 260
    assert holed.more_markdown_is_right == whole.more_markdown_is_right  # it is of the data
    assert "40 pairs have no score" in str(holed.style_controlled_accuracy.note)
    assert "40 pairs" in holed.figures[0]["series"][0]["items"][0]["note"]
    assert {metric.name for metric in holed.metrics()} == {metric.name for metric in whole.metrics()}


def test_nothing_scored_is_no_crash() -> None:
    found = diagnose_style([])
    assert all(metric.value is None for metric in found.metrics())
