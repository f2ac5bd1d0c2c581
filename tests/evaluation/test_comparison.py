from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from evaluated import preference, rated
from messages import write_jsonl

from treeward.errors import DataError
from treeward.evaluation.comparison import Evaluation, ModelComparison, compare, read_evaluation
from treeward.evaluation.results import ScoredExample, scored_from_row, to_row
from treeward.evaluation.statistics import paired_bootstrap, paired_test


def scored(
    key: int | str,
    margin: float | None,
    *,
    prompt: str | None = None,
    subset: str = "chat",
    ranks: tuple[int, int] = (0, 1),
    answer: str = "Good.",
) -> ScoredExample:
    """An example whose better answer scores `margin` above the other; None: it could not be
    scored."""
    example = preference(
        str(key), subset, f"Question {key}?" if prompt is None else prompt, [answer, "Bad."], ranks
    )
    return rated(example, (margin, 0.0 if margin is not None else None))


def evaluation(
    name: str, *examples: ScoredExample, **suites: Sequence[ScoredExample]
) -> Evaluation:
    return Evaluation(name, f"eval/{name}", suites or {"suite": examples})


def of_margins(first: Sequence[float | None], second: Sequence[float | None]) -> ModelComparison:
    return compare(
        evaluation("a", *map(scored, count(), first)),
        evaluation("b", *map(scored, count(), second)),
    )


def write(folder: Path, examples: Sequence[ScoredExample]) -> Path:
    folder.mkdir(parents=True)
    return Path(write_jsonl(folder / "examples.jsonl", *map(to_row, examples)))


def test_numbers_are_those_of_the_statistics() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0.6, 1, 120)
    b = rng.normal(0.2, 1, 120)
    metrics = of_margins(a.tolist(), b.tolist())
    overall = metrics.overall
    differ = (int(np.sum((a > 0) & (b <= 0))), int(np.sum((b > 0) & (a <= 0))))
    assert (overall.count, overall.num_prompts) == (120, 120)
    assert overall.first.value == np.mean(a > 0) and overall.second.value == np.mean(b > 0)
    assert overall.difference.value == pytest.approx(np.mean(a > 0) - np.mean(b > 0))
    assert (overall.only_first, overall.only_second) == differ
    assert (
        overall.p_value == paired_test((a > 0) * 1.0 - (b > 0), range(120))
        and overall.adjusted_p_value is None
        and metrics.parts == ()
    )
    assert (overall.difference.low, overall.difference.high) == paired_bootstrap(
        a > 0, b > 0, range(120)
    )
    assert metrics.notes == ("p is of McNemar's exact test, two-sided.",)


@pytest.mark.parametrize(("differing", "p_value"), [(4, 0.125), (5, 0.0625)])
def test_the_interval_and_the_test_do_not_contradict_each_other(
    differing: int, p_value: float
) -> None:
    """Few examples that one model alone has right are no evidence, but hardly a resample has
    none."""
    right = [1.0] * 100
    some_wrong = [-1.0] * differing + [1.0] * (100 - differing)
    metrics = of_margins(right, some_wrong)
    low, high = paired_bootstrap(right, [max(margin, 0.0) for margin in some_wrong], range(100))
    assert metrics.overall.p_value == p_value and low is not None and low > 0
    assert (metrics.overall.difference.low, metrics.overall.difference.high) == (0.0, high)
    back = of_margins(some_wrong, right)
    assert (back.overall.difference.high, back.overall.difference.low) == (
        0.0,
        pytest.approx(-(high or 0)),
    )
    clear = of_margins(right, [-1.0] * 9 + [1.0] * 91)
    assert clear.overall.p_value < 0.05 and (clear.overall.difference.low or 0) > 0


def test_of_more_than_two_completions_right_is_said_to_be_stricter() -> None:
    three = [
        rated(preference(str(i), "s", f"{i}?", ["a"] * 3, (0, 1, 1)), (1.0, 0.0, 2.0 * (i % 2)))
        for i in range(4)
    ]
    metrics = compare(evaluation("a", *three), evaluation("b", *three))
    assert metrics.overall.first.value == 0.5
    assert any(
        note.startswith("4 examples with more than two completions") for note in metrics.notes
    )


def test_examples_of_one_prompt_are_one_draw() -> None:
    margins = [(1.0, -1.0)] * 30 + [(-1.0, 1.0)] * 10
    prompts = [f"Prompt {n // 10}?" for n in range(40)]
    of_a = []
    of_b = []
    for n, (margin_a, margin_b) in enumerate(margins):
        of_a.append(scored(n, margin_a, prompt=prompts[n]))
        of_b.append(scored(n, margin_b, prompt=prompts[n]))
    metrics = compare(evaluation("a", *of_a), evaluation("b", *of_b))
    differences = [1] * 30 + [-1] * 10
    assert metrics.overall.num_prompts == 4
    # With four prompts no more than four signs speak; forty independent examples would say p =
    # 0.002.
    assert metrics.overall.p_value == paired_test(differences, prompts) == pytest.approx(10 / 16)
    assert metrics.overall.difference.low is None
    assert "4 prompts" in " ".join(metrics.notes)


@pytest.mark.slow
def test_subsets_are_corrected_for_their_number() -> None:
    wins = {"easy": (9, 0), "hard": (6, 0), "odd": (1, 1)}
    first = []
    second = []
    for subset, (a, b) in wins.items():
        for n in range(20):
            key = f"{subset}-{n}"
            first.append(scored(key, -1.0 if n < b else 1.0, subset=subset))
            second.append(scored(key, -1.0 if b <= n < a + b else 1.0, subset=subset))
    metrics = compare(evaluation("a", *first), evaluation("b", *second))
    assert {part.name: part.p_value for part in metrics.parts} == {
        "easy": 2 / 2**9,
        "hard": 2 / 2**6,
        "odd": 1.0,
    }
    assert [part.adjusted_p_value for part in metrics.parts] == [3 * 2 / 2**9, 2 * 2 / 2**6, 1.0]
    assert "p (Holm) is corrected for looking at 3 parts." in metrics.notes
    several = compare(
        evaluation("a", x=first, y=first[:1]), evaluation("b", x=second, y=second[:1])
    )
    assert [part.name for part in several.parts] == ["x", "x / easy", "x / hard", "x / odd", "y"]


def test_ties_and_failures_are_not_right_and_counted() -> None:
    metrics = of_margins([1.0, 0.0, None, -1.0, 2.0], [1.0, 1.0, 1.0, 1.0, None])
    assert (metrics.overall.only_first, metrics.overall.only_second, metrics.overall.count) == (
        1,
        3,
        5,
    )
    assert "Not correct for a model: 1 example on which it ties." in metrics.notes
    assert "Not correct for a model: 2 examples that it could not score." in metrics.notes


def test_what_only_one_has_or_another_content_is_left_out_and_said() -> None:
    metrics = compare(
        evaluation("a", suite=[scored(i, 1.0) for i in range(1, 6)], other=[scored(1, -1.0)]),
        evaluation(
            "b",
            suite=[
                *(scored(1, 1.0), scored(2, 1.0, answer="Fine."), scored(3, 1.0, prompt="?")),
                scored(4, 1.0, ranks=(1, 0)),
                scored(9, 1.0),
            ],
            third=[scored(1, 1.0), scored(2, 1.0)],
        ),
    )
    assert metrics.overall.count == 1
    assert metrics.notes[0].startswith(
        "Left out: 8 examples that one of them lacks, of other content,"
    )


def test_examples_of_other_tools_are_other_examples() -> None:
    plain = [scored(1, 1.0), scored(2, 1.0)]
    tools = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    with_tools = dataclasses.replace(
        plain[1], example=dataclasses.replace(plain[1].example, template_kwargs=tools)
    )
    metrics = compare(evaluation("a", *plain), evaluation("b", plain[0], with_tools))
    assert metrics.overall.count == 1


def test_folders_and_files_are_one_evaluation(tmp_path: Path) -> None:
    file = write(tmp_path / "eval" / "mine" / "llmbar", [scored(1, 1.0), scored(2, None)])
    for path in (file, tmp_path / "eval" / "mine"):
        read = read_evaluation(path)
        assert (read.name, list(read.suites)) == ("mine", ["llmbar"])
        assert list(read.suites["llmbar"]) == [scored(1, 1.0), scored(2, None)]


@pytest.mark.parametrize("line", ["[]", "3", "{}", '{"ranks": 3}'])
def test_a_line_that_is_no_example_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "m" / "s" / "examples.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"examples\.jsonl"):
        read_evaluation(path.parent.parent)


@pytest.mark.parametrize("line", ["[]", "3"])
def test_a_line_that_is_no_example_is_named_when_an_evaluation_goes_on(
    line: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="not an example of an evaluation"):
        scored_from_row(json.loads(line), "examples.jsonl:1")


def test_evaluations_without_a_common_example_are_an_error() -> None:
    first, second = (
        evaluation("m", rated(preference(id, "all", "2 + 2?", ["4.", "5."]), [1.0, 0.0]))
        for id in ("1", "2")
    )
    with pytest.raises(DataError, match="no example in common") as raised:
        compare(first, second)
    assert str(raised.value.got).startswith("0 examples with an id in common") and raised.value.fix
