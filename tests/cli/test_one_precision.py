"""Without a precision in the call every way to a score computes in float32, and gives the same
number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verbs import Command

from treeward import RewardModelEnvironment, Scorer
from treeward.environments.verl import compute_score

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETION = "The capital of France is Paris."


def test_every_way_to_a_score_has_one_default_precision(
    treeward: Command,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    (score,) = Scorer.load(model_folder).score_completions(PROMPT, [COMPLETION])
    want = pytest.approx(score.score, abs=1e-5)

    log = [*PROMPT, {"role": "assistant", "content": COMPLETION}]
    environment = RewardModelEnvironment({"model_name": str(model_folder)})
    assert environment.step([log], [{}]).rewards.item() == want

    of_verl = compute_score("facts", COMPLETION, None, {"prompt": PROMPT}, model=str(model_folder))
    assert of_verl["score"] == want

    data = tmp_path / "conversations.jsonl"
    data.write_text(json.dumps({"messages": log}) + "\n", encoding="utf-8")
    output = tmp_path / "scores.jsonl"
    assert treeward("score", model_folder, "--data", data, "--output", output).code == 0
    assert json.loads(output.read_text(encoding="utf-8"))["score"] == want
