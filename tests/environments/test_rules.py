"""A rule says right or wrong; where it cannot say, there is no reward, and no pattern can hold up a
step."""

from __future__ import annotations

from typing import Any

import pytest
from environments.conftest import chat, details, numbers

from treeward.environments.interface import EnvironmentReturn
from treeward.environments.rules import MathEnvironment, RuleEnvironment
from treeward.errors import ConfigError


def step(config: dict[str, Any], *samples: tuple[Any, Any]) -> EnvironmentReturn:
    environment = RuleEnvironment(config)
    try:
        return environment.step(
            [chat(completion) for completion, _ in samples], [info for _, info in samples]
        )
    finally:
        environment.shutdown()


def rewards(config: dict[str, Any], *samples: tuple[Any, Any]) -> list[float | None]:
    return numbers(step(config, *samples))


def truth(value: Any) -> dict[str, Any]:
    return {"ground_truth": value}


def test_exact_match() -> None:
    config = {"rule": "exact_match"}
    samples = [
        (" Paris\n", truth("Paris")),
        ("Paris.", truth("Paris")),
        ("paris", truth("Paris")),
        ("4", truth(4)),
        ("4.5", truth([3, 4.5])),
        ("", truth("Paris")),
        ([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}], truth("Paris")),
    ]
    assert rewards(config, *samples) == [1, 0, 0, 1, 1, 0, 1]
    assert rewards(config | {"ignore_case": True}, *samples) == [1, 0, 1, 1, 1, 0, 1]


def test_numbers_as_tables_of_pandas_have_them() -> None:
    nan = float("nan")
    samples = [
        ("5", truth(5.0)),
        ("5.0", truth(5.0)),
        ("50", truth(5.0)),
        ("NaN", truth(nan)),
        ("7", {"ground_truth": nan, "expected_answer": 7}),
        ("7", truth([nan, 7])),
    ]
    result = step({"rule": "exact_match"}, *samples)
    assert numbers(result) == [1, 1, 0, None, 1, None]
    errors = details(result, "error")
    assert errors[3] == "the sample has no ground_truth or expected_answer"
    assert errors[5] == "ground_truth has nan, which is no number"


def test_the_part_that_is_the_answer_is_the_last_one_that_matches() -> None:
    config = {"rule": "exact_match", "extract": r"Answer: (\w+)|#### (\w+)"}
    completion = "Answer: 3? No. Answer: 4"
    assert rewards(
        config, (completion, truth("4")), (completion, truth("3")), ("#### 4", truth("4"))
    ) == [1, 0, 1]
    nothing = step(config, ("4", truth("4")))
    assert nothing.rewards.tolist() == [0]
    assert details(nothing, "components") == [{"correct": 0, "answered": 0}]
    assert details(step(config, (completion, truth("3"))), "components") == [
        {"correct": 0, "answered": 1}
    ]
    # no group: all of it
    assert rewards({"rule": "exact_match", "extract": r"\d+"}, ("1 or 2", truth("2"))) == [1]


@pytest.mark.parametrize("kind", [{"rule": "dapo"}, {"math_verify_impl": "dapo_math_verify"}])
def test_the_form_of_dapo(kind: dict[str, Any]) -> None:
    """The values are those of NeMo RL's and verl's verifiers, run on the same texts."""
    samples = [
        ("So 34.\nAnswer: 34", 34),
        ("Answer: 33\nanswer : $\\boxed{34}$.", "34"),
        ("Answer: x = 1,234 dollars", "1234"),
        ("Answer: \\frac12", "\\frac{1}{2}"),
        ("Answer: 0.5", "1/2"),
        ("It is 34.", "34"),
        ("Answer: 34" + " so it is" * 40, "34"),
        ("<think>Answer: 34</think>It is 35.", "34"),
    ]
    make = RuleEnvironment if "rule" in kind else MathEnvironment
    environment = make(kind)
    result = environment.step(
        [chat(text) for text, _ in samples], [truth(gold) for _, gold in samples]
    )
    environment.shutdown()
    assert numbers(result) == [1, 1, 1, 1, 0, 0, 0, 0]
    answered = [part["answered"] for part in details(result, "components")]
    assert answered == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_verifier_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="hf_math_verify, dapo_math_verify"):
        MathEnvironment({"math_verify_impl": "sympy"})


def test_regex() -> None:
    config = {"rule": "regex", "pattern": r"^<think>.*</think>"}
    assert rewards(config, ("<think>a</think> b", None), ("b", None), ("<THINK></think>", {})) == [
        1,
        0,
        0,
    ]
    assert rewards(config | {"ignore_case": True}, ("<THINK></think>", {})) == [1]
    from_data = {"rule": "regex", "answer_key": "pattern"}
    assert rewards(
        from_data, ("abc", {"pattern": "b"}), ("abc", {"pattern": ["x", "c$"]}), ("a", {})
    ) == [1, 1, None]


REASONED = [
    r"<think>So x is \boxed{8}</think>It is \boxed{9}.",
    r"So x is \boxed{8}</think>It is \boxed{9}.",  # the prompt had opened it
    r"<think>So x is \boxed{8}",  # cut off
    r"<think>So x is \boxed{8}</think>",
    r"<think>one</think><think>So x is \boxed{8}",
    r"<think>Is it \boxed{9}?</think>It is \boxed{8}.",
    "<think>\n\n</think>\n\n8",
]


@pytest.mark.parametrize("kind", [RuleEnvironment, MathEnvironment])
def test_mathematics_reads_what_comes_after_the_reasoning(kind: type[RuleEnvironment]) -> None:
    def results(**settings: Any) -> EnvironmentReturn:
        environment = kind({"rule": "math", "workers": 1, **settings})
        try:
            return environment.step([chat(text) for text in REASONED], [truth("8")] * len(REASONED))
        finally:
            environment.shutdown()

    result = results()
    assert numbers(result) == [0, 0, 0, 0, 0, 1, 1]
    assert [parts["answered"] for parts in details(result, "components")] == [1, 1, 0, 0, 0, 1, 1]
    assert numbers(results(strip_reasoning=False)) == [0, 0, 1, 1, 1, 1, 1]


def test_which_rules_read_the_reasoning() -> None:
    samples = [("<think>4?</think>\n5", truth("5")), ("<think>5", truth("5"))]
    for config in ({"rule": "exact_match"}, {"rule": "exact_match", "extract": r"\d"}):
        assert rewards(config, *samples) == [1, 0]
    assert rewards(
        {"rule": "exact_match", "extract": r"\d", "strip_reasoning": False}, *samples
    ) == [1, 1]
    form = {"rule": "regex", "pattern": "^<think>"}
    assert rewards(form, *samples) == [1, 1]
    assert rewards({"rule": "regex", "pattern": "5", "strip_reasoning": True}, *samples) == [1, 0]
    for rule in ("exact_match", "math"):  # it would find nothing, ever
        with pytest.raises(
            ConfigError, match=r"(?s)extract and strip_reasoning.*strip_reasoning: false"
        ):
            RuleEnvironment({"rule": rule, "extract": "</think>(.*)"})


def test_what_cannot_be_said_is_no_reward_and_has_its_reason() -> None:
    result = step(
        {"rule": "exact_match"},
        ("4", {}),
        ("4", truth(None)),
        ("4", truth([])),
        ("4", truth({"a": 1})),
        ("4", truth(True)),
        (None, truth("4")),
        ("4", truth("4")),
    )
    errors = details(result, "error")
    assert numbers(result) == [None] * 6 + [1]
    assert errors[0] == errors[1] == "the sample has no ground_truth or expected_answer"
    assert errors[2:5] == [
        "ground_truth is empty",
        "ground_truth is of type dict, not text or a number",
        "ground_truth is of type bool, not text or a number",
    ]
    assert errors[5] == "the conversation does not end with a text of the assistant"
    assert errors[6] is None
    unanswered = RuleEnvironment({"rule": "exact_match"}).step(
        [chat("4")[:1], []], [truth("4"), truth("4")]
    )
    assert numbers(unanswered) == [None, None]


def test_a_pattern_that_backtracks_for_ever_is_given_up() -> None:
    # in time exponential in the length, also for the package regex
    samples = [("a" * 60 + "b", {"p": r"^(a|aa)+$"}), ("a", {"p": r"^(a|aa)+$"}), ("a", {"p": "("})]
    result = step({"rule": "regex", "answer_key": "p", "timeout_seconds": 0.2}, *samples)
    assert numbers(result) == [None, 1, None]
    slow, _, wrong = details(result, "error")
    assert "took more than 0.2 seconds" in slow and "not a regular expression" in wrong
    extracting = {"rule": "exact_match", "extract": r"(a|aa)+$", "timeout_seconds": 0.2}
    assert rewards(extracting, ("a" * 60 + "b", truth("a"))) == [None]


@pytest.mark.slow
def test_math() -> None:
    samples = [
        (r"So it is \boxed{0.5}.", truth("1/2")),
        (r"So it is \boxed{0.6}.", truth("1/2")),
        ("I do not know.", truth("1/2")),
        ("It is 0.0000001.", truth(1e-7)),  # whose text in Python has an e
        ("The answer is 7", truth(["6", "7"])),
        (r"\boxed{1}", truth("")),
        ("", truth("7")),
    ]
    result = step({"rule": "math", "workers": 1}, *samples)
    assert numbers(result) == [1, 0, 0, 1, 1, None, 0]
    assert details(result, "components")[1:3] == [
        {"correct": 0, "answered": 1},
        {"correct": 0, "answered": 0},
    ]
    assert "ground truth" in details(result, "error")[5]
    extracted = {"rule": "math", "workers": 1, "extract": r"Answer:(.*)"}
    assert rewards(extracted, (r"Answer: \frac{1}{2}", truth("0.5")), ("1/2", truth("0.5"))) == [
        1,
        0,
    ]
