from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import write_jsonl
from safetensors.torch import load_file, save_file
from verbs import Command, Ended

from treeward.training.train import RewardModelRun


@pytest.fixture
def train(treeward: Command, tiny_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Ended]:
    """`treeward train` of the tiny configuration, of two steps, with overrides."""
    tiny_run()
    return lambda *words: treeward(
        "train",
        "--config",
        tmp_path / "run.yaml",
        "rm.max_num_steps=2",
        *words,
    )


def test_a_run_ends_with_its_results_and_what_to_do_next(
    treeward: Command,
    train: Callable[..., Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = train()
    assert ended.code == 0
    assert "\nheld_out: accuracy " in ended.out
    assert "chance, 50%; the loss, " in ended.out
    assert f"The model of step 2 of 2 is in {tmp_path / 'checkpoints' / 'final'}" in ended.out
    limit = "trained on conversations of at most 512 tokens"
    assert f"{limit}; longer ones are scored with a warning" in ended.out
    rows = write_jsonl(tmp_path / "rows.jsonl", {"prompt": "2 + 2?", "responses": ["4", "5"]})
    advice = ended.out.partition("Score with it:")[2].partition("\n")[0].split()
    monkeypatch.chdir(tmp_path)
    words = [rows if word == "FILE.jsonl" else word for word in advice[1:]]
    assert treeward(*words).code == 0
    assert len(json.loads((tmp_path / "scores.jsonl").read_text())["scores"]) == 2


def test_the_end_of_a_run_and_a_report_say_one_interval_of_one_accuracy(
    treeward: Command,
    train: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    ended = train("rm.val_batches=100")
    model = tmp_path / "checkpoints" / "final"
    report = treeward("eval", model, "--dataset-name", "Bundled", "--split", "length_controlled")
    (of_run,) = re.findall(r"held_out: accuracy (\S+ \(\S+ to \S+\))", ended.out)
    (of_report,) = re.findall(r"accuracy (\S+ \(\S+ to \S+\)) of", report.out)
    assert of_run == of_report


def test_a_collapsed_model_is_called_so_and_not_recommended(
    treeward: Command,
    train: Callable[..., Ended],
    model_folder: Path,
    tmp_path: Path,
) -> None:
    collapsed = shutil.copytree(model_folder, tmp_path / "collapsed")
    weights = load_file(collapsed / "model.safetensors")
    head = next(name for name in weights if name.startswith("score"))
    weights[head] = torch.zeros_like(weights[head])
    save_file(weights, collapsed / "model.safetensors", metadata={"format": "pt"})
    (collapsed / "reward_contract.json").unlink()

    overrides = ("~policy.model_config", "~policy.tokenizer", f"+policy.model_name={collapsed}")
    ended = train(
        *overrides,
        "policy.optimizer.kwargs.lr=1e-9",
        "policy.max_total_sequence_length=96",
    )
    assert ended.code == 0
    assert "It is collapsed: it gives everything the same score. Do not score with it." in ended.out
    assert "treeward score" not in ended.out

    report = treeward(
        "eval",
        tmp_path / "checkpoints" / "final",
        "--dataset-name",
        "Bundled",
        "--limit",
        "20",
    )
    assert "it is collapsed: it gives everything the same score, " in report.out
    assert "chance" not in report.out


def test_a_mistake_is_one_message_and_exit_code_2(train: Callable[..., Ended]) -> None:
    ended = train("policy.optimizer.name=torch.optim.Adamm")
    assert ended.code == 2
    assert "torch.optim.Adamm" in ended.err
    assert "treeward train: " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Saved. The same command resumes the run."),
        (["checkpointing.enabled=false"], "Nothing was saved"),
    ],
)
def test_what_ctrl_c_has_saved_is_told(
    train: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    step = RewardModelRun.step

    def interrupted_step(*at: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(*at)

    monkeypatch.setattr(RewardModelRun, "step", interrupted_step)
    ended = train(*options)
    assert ended.code == 130
    assert "Stopped after step 1 of 2 (SIGINT)." in ended.err
    assert message in ended.err
    if not options:
        monkeypatch.undo()
        assert train().code == 0
