"""Answers that are the same mathematics are right, and no answer can hold up, fill or kill the
comparison."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from treeward.environments.math_answers import MathChecker, MathVerdict


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    with closing(MathChecker(workers=1, timeout_seconds=30.0)) as made:
        yield made


def test_the_last_box_is_the_answer(checker: MathChecker) -> None:
    right = [
        r"\boxed{1} at first. So it is \boxed{8}.",
        r"\boxed{5} or \boxed{8}",  # near each other
        r"\fbox{8}",
        r"\boxed{3}, no: \fbox{$8$}",
        r"The final answer is $7$. No: \boxed{8}",
        r"\boxed{\fbox{8}}",
        r"\boxed{8}, and a box that is cut: \boxed{7",
        r"\left\{ \boxed {\frac{16}{2}} } {",
    ]
    wrong = [
        r"\boxed{8} or \boxed{5}",
        r"\fbox{8}, no: \fbox{7}",
        r"\fbox{8} and then \boxed{}",
        r"\boxed{\{8, 9\}}",
    ]
    verdicts = checker.check([(("8",), completion) for completion in right + wrong])
    assert [verdict.correct for verdict in verdicts] == [True] * len(right) + [False] * len(wrong)
    assert checker.check([((r"\fbox{8}",), "8")])[0].correct is True


def test_no_answer_is_wrong_and_no_ground_truth_is_undecided(checker: MathChecker) -> None:
    no_answer, no_gold, other_gold = checker.check(
        [(("7",), "I do not know."), (("",), "7"), (("", "7"), "7")]
    )
    assert no_answer == MathVerdict(False, parsed=False)
    assert (
        no_gold.correct is None
        and no_gold.error == "the ground truth is not mathematics that can be parsed"
    )
    assert other_gold.correct is True


def test_a_process_whose_parent_was_killed_ends() -> None:
    """Its own alarm ends it: nobody is left who could wait for it."""
    code = "from treeward.environments.math_answers import serve; serve()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(json.dumps([0.2, ["7"], r"\boxed{(10^9)!}"]).encode() + b"\n")
        process.stdin.close()
        process.stdout.close()
        assert process.wait(timeout=60) == -signal.SIGALRM
    finally:
        process.kill()


@pytest.mark.slow
def test_what_takes_for_ever_is_given_up_and_the_rest_is_compared() -> None:
    with closing(MathChecker(workers=1, timeout_seconds=1.0)) as hurried:
        verdicts = hurried.check(
            [(("7",), r"\boxed{(10^9)!}"), (("7",), "7"), (("(" * 3000 + "7" + ")" * 3000,), "7")]
        )
    assert [v.correct for v in verdicts] == [None, True, None]
    for verdict in verdicts[::2]:
        assert verdict.error in (
            "the answer could not be compared in time",
            "comparing the answer took too much memory",
        )


@pytest.mark.slow
def test_processes_that_die_are_replaced_and_those_that_are_closed_end(
    checker: MathChecker,
) -> None:
    checker.check([(("1",), "1")])
    (process,) = workers()
    process.suspend()
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    dead, alive = checker.check([(("1",), "1"), (("1",), "1")])
    assert dead.correct is None and dead.error == "the process that compared the answer died"
    assert alive.correct is True
    (process,) = workers()
    process.kill()
    process.wait()
    found: list[MathVerdict] = []
    thread = threading.Thread(
        target=lambda: found.extend(checker.check([(("1",), "1"), (("1",), "2")]))
    )
    thread.start()
    thread.join()
    assert [verdict.correct for verdict in found] == [True, False]
    checker.close()
    checker.close()
    assert workers() == [] and checker.check([]) == []


def workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [one for one in children if "math_answers" in " ".join(one.cmdline())]
