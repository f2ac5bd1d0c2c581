"""A run whose rewards are rubrics, each row with its own: GDPO over criteria, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, between_tags
from killed_run import assert_same_run, dying

from treeward.errors import ConfigError
from treeward.rl.grpo import GRPOOutcome, GRPORun, grpo
from treeward.training.tracking import read_metrics

Make = Callable[..., Any]

LETTER = {"title": "Letter", "criterion": "It has an e.", "points": 3}
LONG = {"title": "Long", "criterion": "It is long.", "points": 1}
RUBRICS = [[LETTER], [LETTER, LONG], [LONG]]


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    def answer(request: dict[str, Any]) -> str:
        text = between_tags(request, "completion")
        is_met = len(text) > 8
        if "It has an e." in request["messages"][1]["content"]:
            is_met = "e" in text
        return "[[YES]]" if is_met else "[[NO]]"

    made = FakeJudge(answer)
    yield made
    made.server.__exit__()


@pytest.fixture
def start(
    tiny_grpo: Make, judge: FakeJudge, tmp_path: Path, write_prompts: Callable[..., str]
) -> Callable[..., GRPOOutcome]:
    """Each batch is one prompt, so that most batches lack a criterion."""
    made = tiny_grpo
    rows = []
    for number in range(12):
        rows.append({"prompt": f"Say {number}.", "rubric": RUBRICS[number % 3]})
    write_prompts("train.jsonl", rows)

    def run(folder: Path, *more: str, weights: str = "null") -> GRPOOutcome:
        section = f"{{type: rubric, base_url: '{judge.url}', model: m, api_key_env: null}}"
        config = made(
            f"env={{rubric: {section}}}",
            "data.default.env_name=rubric",
            "data.validation=null",
            "checkpointing.metric_name=null",
            f"grpo.adv_estimator={{name: gdpo, reward_weights: {weights}}}",
            "grpo.num_prompts_per_step=1",
            "grpo.num_generations_per_prompt=6",
            f"checkpointing.checkpoint_dir={folder}/checkpoints",
            f"logger.log_dir={folder}/logs",
            *more,
        )
        return grpo(config, show_progress=False)

    return run


def test_batches_that_lack_a_criterion_end_no_run_and_it_resumes_exactly(
    start: Callable[..., GRPOOutcome], tmp_path: Path
) -> None:
    weights = "{Letter: 1.0, Long: 0.5}"
    whole = tmp_path / "whole"
    start(whole, weights=weights)
    stopped = tmp_path / "stopped"
    with dying(GRPORun, "step", lambda run, number: number == 4):
        start(stopped, weights=weights)
    assert start(stopped, weights=weights).step == 6
    assert_same_run(stopped, whole)
    lines = read_metrics(whole / "logs" / "metrics.jsonl")
    components = set()
    for line in lines:
        components |= {name for name in line if "/component/" in name}
    assert components == {"rubric_env/component/Letter", "rubric_env/component/Long"}
    # A batch of one criterion is learnt from: something has moved.
    assert any(line.get("train/grad_norm", 0.0) > 0.0 for line in lines)


def test_a_weight_of_a_criterion_that_no_row_has_ends_the_run_at_once(
    start: Callable[..., GRPOOutcome], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no Polite among Letter, Long"):
        start(tmp_path, weights="{Letter: 1.0, Polite: 0.5}")
