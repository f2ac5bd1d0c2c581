"""How a judge was trained to be asked lies beside its weights, and anyone can replay its golden
questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import edit_json
from safetensors.torch import load_file, save_file

from treeward.cli.main import main
from treeward.config.reward_environments import (
    JUDGE_FILE,
    JudgeEnvironmentConfig,
    PreferenceVerdictConfig,
)
from treeward.config.scoring import ScoringConfig
from treeward.config.served_judge import ServedJudgeConfig
from treeward.errors import CheckpointError, ConfigError
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.trained_judge import read_judge_contract, verify_judge, write_judge_contract
from treeward.scoring.verdicts import TEMPLATES, make_question

SHORT = PreferenceVerdictConfig(
    system_prompt="Judge.", template="{completion_a} {completion_b} A or B?"
)


@pytest.fixture
def judge(own_policy_folder: Path) -> Path:
    write_judge_contract(own_policy_folder, SHORT)
    return own_policy_folder


@pytest.mark.parametrize("mode", ["pairwise", "rating", "scores"])
def test_golden_questions_replay_and_changed_weights_show(
    mode: str, judge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mode == "rating":
        write_judge_contract(
            judge,
            PreferenceVerdictConfig(mode="rating", system_prompt="Judge.", template="{completion}"),
        )
    if mode == "scores":
        scored = {"verdict": "scores", "template": "{completion_a}", "system_prompt": "Judge."}
        scored["template"] += "{completion_b}"
        write_judge_contract(judge, PreferenceVerdictConfig(**scored))
    result = verify_judge(judge)
    assert result.equal and result.num_scores == 6
    assert main(["verify", str(judge)]) == 0 and "equal: 6 golden scores" in capsys.readouterr().out
    tensors = load_file(judge / "model.safetensors")
    negative = {name: -tensor for name, tensor in tensors.items()}
    save_file(negative, judge / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(judge)]) == 1
    assert "a golden verdict has changed" in capsys.readouterr().out


def test_questions_that_a_model_is_too_short_for_are_no_golden_ones(judge: Path) -> None:
    write_judge_contract(judge, PreferenceVerdictConfig())  # of more than its 256 positions
    contract = read_judge_contract(judge)
    assert contract is not None and contract.golden == ()
    assert contract.prompt.template == TEMPLATES["pairwise"]


def test_a_contract_from_before_there_were_scores_is_of_labels(judge: Path) -> None:
    contract = json.loads((judge / JUDGE_FILE).read_text(encoding="utf-8"))
    del contract["prompt"]["verdict"]
    edit_json(judge / JUDGE_FILE, prompt=contract["prompt"])
    assert ServedJudgeConfig(model=str(judge)).verdict == "label"
    write_judge_contract(judge, PreferenceVerdictConfig(verdict="scores"))
    assert JudgeEnvironmentConfig(model=str(judge)).verdict == "scores"


def test_a_judge_is_asked_as_it_was_trained_unless_it_is_told_otherwise(judge: Path) -> None:
    write_judge_contract(judge, SHORT.model_copy(update={"temperature": 0.7}))
    asked = JudgeEnvironmentConfig(model=str(judge))
    assert (asked.mode, asked.system_prompt, asked.highest_rating) == ("pairwise", "Judge.", 9.0)
    assert asked.temperature == 0.7
    assert make_question(asked, "user: Hi", ("a", "b")) == make_question(
        SHORT, "user: Hi", ("a", "b")
    )
    other = JudgeEnvironmentConfig(model=str(judge), mode="rating", template="{completion}?")
    assert (other.mode, other.template, other.system_prompt) == (
        "rating",
        "{completion}?",
        "Judge.",
    )
    # of a model without a contract
    assert JudgeEnvironmentConfig(model=str(judge.parent)).mode == "rating"


def test_a_judge_is_no_reward_model(judge: Path) -> None:
    with pytest.raises(ConfigError, match="type: judge"):
        load_scorer(ScoringConfig(models=(str(judge),)))


def test_a_damaged_contract_is_named(judge: Path) -> None:
    edit_json(judge / JUDGE_FILE, version=2)
    with pytest.raises(CheckpointError, match=r"judge_contract\.json[\s\S]*version"):
        read_judge_contract(judge)


@pytest.mark.parametrize("content", [b'{"prompt": {', b"\xff\xfe", b"[]", b'{"prompt": "x"}'])
def test_half_a_contract_is_named(judge: Path, content: bytes) -> None:
    file = judge / JUDGE_FILE
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="contract is damaged") as read:
        read_judge_contract(judge)
    assert read.value.where == str(file)
    # Whoever names the judge in a configuration is told too, and not asked to mend the section.
    with pytest.raises(ConfigError, match="contract is damaged") as configured:
        JudgeEnvironmentConfig(model=str(judge))
    assert configured.value.field == "model"
    assert str(file) in str(configured.value)


def test_a_judge_below_the_home_folder_is_asked_as_it_was_trained(
    judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML knows no ~: the path comes as it is written."""
    monkeypatch.setenv("HOME", str(judge.parent))
    name = f"~/{judge.name}"
    assert JudgeEnvironmentConfig(model=name).system_prompt == "Judge."
    with pytest.raises(ConfigError, match="type: judge"):
        load_scorer(ScoringConfig(models=(name,)))
