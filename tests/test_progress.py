"""Progress is a bar on a terminal, and lines in a log elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from treeward import progress
from treeward.progress import ShownProgress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `progress` reads, to be moved by a test; event loops of other threads keep the
    real one."""
    seconds = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_lines_without_a_terminal(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treeward")
    with ShownProgress(unit="rows") as shown:
        for done in range(0, 3001, 300):
            shown.show("first", done, 3000)
            now[0] += 4.0
        shown.show("second", 7, 0)
        now[0] += 10.0
        shown.show("second", 1234, 0)
    assert caplog.messages == [
        "first: 900 of 3,000 rows", "first: 1,800 of 3,000 rows", "first: 2,700 of 3,000 rows",
        "second: 1,234 rows",
    ]  # fmt: skip


def test_a_line_of_training_has_numbers_rate_and_time_left_of_this_session(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The first step and the last always have a line; a pause lowers the time left and not the
    rate."""
    caplog.set_level("INFO", "treeward")
    with ShownProgress(unit="steps") as shown:
        shown.show("training", 900, 904)
        for step in range(901, 905):
            now[0] += 2.0
            shown.show("training", step, 904, {"loss": 0.5, "accuracy": 0.75}, tokens=4000)
            with shown.paused("validating"):
                now[0] += 1.0
        shown.message("set  accuracy\nplain  0.9")
    numbers = "loss 0.500  accuracy 75.0%  2,000 tokens/s"
    first, last = (
        f"training: {n} of 904 steps  {numbers}  0:00:0{left} left"
        for n, left in ((901, 6), (904, 0))
    )
    assert caplog.messages == [first, last, "set  accuracy", "plain  0.9"]


def test_a_later_task_of_the_same_name_has_its_own_start(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treeward")
    with ShownProgress(unit="steps") as shown:
        for _ in range(2):
            shown.show("training", 0, 2)
            for step in (1, 2):
                now[0] += 3.0
                shown.show("training", step, 2, {"loss": 0.5})
    assert (
        caplog.messages[0].endswith("0:00:03 left") and caplog.messages[:2] == caplog.messages[2:]
    )


def test_long_work_without_steps_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treeward")
    with ShownProgress(line_seconds=0.02) as shown, shown.paused("saving"):
        time.sleep(0.2)
    assert 2 <= caplog.messages.count("saving ...") == len(caplog.messages)


@pytest.mark.parametrize("logger", ["huggingface_hub.utils._http", "treeward.config.load"])
def test_what_others_repeat_is_shown_once(logger: str) -> None:
    """Five attempts of the hub's client, and a configuration that is read again with what was
    chosen."""
    script = f"""
import logging
import subprocess
import sys
from huggingface_hub.utils import _http  # it has a handler of its own
from treeward.progress import configure_logging
configure_logging()
for attempt in range(5):
    logging.getLogger({logger!r}).warning("Retrying in %ds [Retry %d/5].", 2 ** attempt, attempt + 1)
logging.getLogger({logger!r}).warning("Another message.")
for attempt in range(2):
    logging.getLogger("treeward.training").warning("Not among them.")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    shown = done.stderr + done.stdout
    counts = [
        shown.count(words)
        for words in ("Retrying in 1s", "Retrying", "Another message", "Not among them")
    ]
    assert counts == [1, 1, 1, 2]


def test_a_configuration_that_is_read_twice_speaks_once() -> None:
    """As `train --config FILE --model NAME` reads it."""
    script = """
from treeward.config.load import load_file
from treeward.config.run import RewardModelRunConfig
from treeward.progress import configure_logging
configure_logging()
words = ["policy.model_name=a/b", "data.train_data_path=rows.jsonl", "data.num_workers=1"]
for _ in range(2):
    load_file(RewardModelRunConfig, None, words)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("These keys have no effect here: data.num_workers") == 1


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_one_of_several_processes_shows_its_log(rank: str, shown: bool) -> None:
    code = (
        "import logging; from treeward.progress import configure_logging; configure_logging()\n"
        "logging.getLogger('treeward').warning('a message')"
    )
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("a message" in done.stderr) == shown
