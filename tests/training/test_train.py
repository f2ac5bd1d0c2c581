from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl, constants
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from treeward.cli.main import main
from treeward.config.checkpointing import METRICS
from treeward.errors import ConfigError
from treeward.evaluation.diagnostics.scores import GATE_METRICS
from treeward.losses import METRIC_NAMES
from treeward.model.contract import CONTRACT_FILE, read_contract
from treeward.scoring.verification import verify
from treeward.training.card import model_card
from treeward.training.setup import set_up
from treeward.training.tracking import read_metrics
from treeward.training.train import train

Lines = list[dict[str, Any]]
Trained = Callable[..., tuple[Any, Lines]]
PLAIN = ("rm.max_num_steps=4", "+policy.scheduler.name=constant")


@pytest.fixture
def trained(tiny_run: Callable[..., Any], tmp_path: Path) -> Trained:
    """Train as configured in a folder of its own; the outcome and the lines of its metrics."""
    numbers = iter(range(1000))

    def run(*overrides: str) -> tuple[Any, Lines]:
        folder = tmp_path / f"run_{next(numbers)}"
        paths = [
            f"checkpointing.checkpoint_dir={folder}/checkpoints",
            f"logger.log_dir={folder}/logs",
        ]
        outcome = train(tiny_run(*paths, *overrides), show_progress=False)
        return outcome, read_metrics(folder / "logs" / "metrics.jsonl")

    return run


def column(lines: Lines, name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def losses(lines: Lines) -> list[float]:
    return column(lines, "train/rm/loss")


@pytest.fixture(scope="module")
def plain(
    tiny_runs: Callable[[Path], Callable[..., Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Lines]:
    """The outcome of the tiny run, and the lines of its metrics; trained once."""
    folder = tmp_path_factory.mktemp("plain")
    outcome = train(tiny_runs(folder)("rm.val_at_start=true", *PLAIN), show_progress=False)
    return outcome, read_metrics(folder / "logs" / "metrics.jsonl")


def test_metrics_have_the_names_that_are_promised_and_come_when_they_should(
    plain: tuple[Any, Lines],
) -> None:
    outcome, lines = plain
    names = set(chain.from_iterable(lines))
    metrics = ["loss", "accuracy", "chosen_rewards", "rejected_rewards", "reward_margin"]
    assert names >= {
        f"{group}/{m}" for group in ("train/rm", "validation-held_out", "eval/rm") for m in metrics
    }
    assert names >= {
        f"{group}/{m}" for group in ("validation-held_out", "eval/rm") for m in GATE_METRICS
    }
    assert names >= {
        "train/rm/lr",
        "train/rm/grad_norm",
        "episode",
        "epoch",
        "timing/train/total_step_time",
    }
    assert names >= {"timing/validation/total_validation_time", "data/train/Bundled/kept"}
    of_steps = {"first_error_accuracy", "processbench_f1"}  # tests/training/test_process.py
    assert set(METRICS) == {*metrics, *GATE_METRICS, "mse", "pearson", *of_steps}
    assert [line["step"] for line in lines if "train/rm/loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/rm/loss" in line] == [0, 2, 4]
    assert column(lines, "train/rm/lr") == [1e-3] * 4
    assert outcome.validation_sizes == {"held_out": 16}
    card = (outcome.model_folder / "README.md").read_text()
    contract = read_contract(outcome.model_folder)
    assert (
        contract is not None and contract.readme_sha256 == hashlib.sha256(card.encode()).hexdigest()
    )
    assert "| held_out | 16 |" in card and "a meaning: P(a is preferred to b) = sigmoid(" in card


def test_the_card_says_where_transformers_has_no_class(trained: Trained) -> None:
    outcome, _ = trained("policy.model_config.model_type=cohere2", *PLAIN, "rm.max_num_steps=1")
    card = (outcome.model_folder / "README.md").read_text()
    assert "transformers has no sequence classifier of cohere2" in card
    assert "AutoModelForSequenceClassification" not in card
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(outcome.model_folder)


def test_the_card_of_a_model_below_the_home_folder_has_no_path(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "own").mkdir(parents=True)
    setup = set_up(tiny_run())
    policy = setup.policy.model_copy(update={"model_name": "~/models/own"})
    card = model_card(replace(setup, policy=policy), step=1, validation={})
    assert "\nown, 1 optimiser steps" in card
    assert "~" not in card and "base_model" not in card


def test_a_run_may_be_logged_and_validated_less_and_keep_nothing(
    trained: Trained, tmp_path: Path
) -> None:
    outcome, lines = trained(
        "rm.max_num_steps=5", "rm.log_period=3", "rm.val_period=0", "rm.val_at_end=false",
        "rm.val_at_start=true",
        "checkpointing.metric_name=null", "checkpointing.enabled=false",
    )  # fmt: skip
    assert [line["step"] for line in lines if "train/rm/loss" in line] == [3, 5]
    assert [line["step"] for line in lines if "eval/rm/loss" in line] == [0]
    assert outcome.model_folder is None and outcome.validation == {}
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_pooled_metrics_count_every_comparison_once(
    trained: Trained, write_rows: Callable[..., Path]
) -> None:
    sizes = {"small": 3, "large": 13}
    sets = []
    for name, size in sizes.items():
        rows = [
            {"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"{name} {n}."}
            for n in range(size)
        ]
        sets.append(f"{{data_path: {write_rows(f'{name}.jsonl', rows)}, name: {name}}}")
    options = ["rm.val_batches=null", "rm.max_num_steps=1", "checkpointing.metric_name=val_loss"]
    _, lines = trained(f"data.validation=[{', '.join(sets)}]", *options)
    line = next(line for line in lines if "eval/rm/loss" in line)
    for metric in METRIC_NAMES:
        expected = (
            sum(line[f"validation-{name}/{metric}"] * size for name, size in sizes.items()) / 16
        )
        assert line[f"eval/rm/{metric}"] == pytest.approx(expected)
    worst = min(line[f"validation-{name}/worst_subset"] for name in sizes)
    assert line["eval/rm/worst_subset"] == worst, "subsets of one name in two sets stay two"


@pytest.mark.parametrize(
    "options",
    [
        ["policy.train_micro_batch_tokens=70"],
        [
            "policy.train_micro_batch_tokens=null",
            "+policy.train_micro_batch_size=3",
            "+policy.attention=rows",
        ],
        ["+policy.activation_checkpointing_enabled=true"],
        [],
    ],
)
def test_how_a_step_is_computed_does_not_change_the_trajectory(
    trained: Trained, plain: tuple[Any, Lines], read_weights: Callable[..., Any], options: list[str]
) -> None:
    outcome, expected = plain
    again, lines = trained(*PLAIN, *options)
    if not options:  # one seed is one run, bit for bit
        assert losses(lines) == losses(expected)
        weights = read_weights(again.model_folder)
        assert all(
            torch.equal(one, weights[name])
            for name, one in read_weights(outcome.model_folder).items()
        )
    for name in ("train/rm/loss", "train/rm/grad_norm", "validation-held_out/loss"):
        found = column(expected, name)[-len(column(lines, name)) :]
        assert column(lines, name) == pytest.approx(found, rel=1e-3, abs=1e-4), name
    # The first step differs by rounding alone; Adam, which divides by tiny numbers, lets it grow.
    assert losses(lines)[0] == pytest.approx(losses(expected)[0], rel=1e-5)


def test_the_trajectory_is_that_of_a_plain_loop(
    plain: tuple[Any, Lines], tiny_run: Callable[..., Any]
) -> None:
    """Written out in PyTorch: one conversation at a time, one loss per step."""
    run = set_up(tiny_run(*PLAIN))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    expected = []
    norms = []
    for step in range(4):
        groups = []
        for which, row in run.order.batch(step, 8):
            comparison = list(run.training_sets.values())[which][row]
            scores = [run.model(run.model.make_batch([[ids]]))[0] for ids in comparison.token_ids]
            ranked = list(zip(scores, comparison.ranks, strict=True))
            pairs = []
            for (a, rank_a), (b, rank_b) in permutations(ranked, 2):
                if rank_a < rank_b:
                    pairs.append(-F.logsigmoid(a - b))
            groups.append(torch.stack(pairs).mean())
        loss = torch.stack(groups).mean()
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)))
        optimizer.step()
    assert losses(plain[1]) == pytest.approx(expected, rel=1e-3)
    assert column(plain[1], "train/rm/grad_norm") == pytest.approx(norms, rel=1e-3)


@pytest.mark.slow
def test_bfloat16_stays_near_and_is_exported_as_it_was_validated(
    trained: Trained, plain: tuple[Any, Lines], read_weights: Callable[..., Any]
) -> None:
    outcome, lines = trained(*PLAIN, "policy.precision=bfloat16")
    assert losses(lines) == pytest.approx(losses(plain[1]), abs=0.1) and losses(lines) != losses(
        plain[1]
    )
    weights = read_weights(outcome.model_folder)
    assert {weight.dtype for name, weight in weights.items() if name != "score.weight"} == {
        torch.bfloat16
    }
    assert weights["score.weight"].dtype == torch.float32
    checkpoint = outcome.model_folder.parent / f"step_{outcome.model_step}" / "model"
    for file in checkpoint.iterdir():
        assert (
            file.name == CONTRACT_FILE
            or file.read_bytes() == (outcome.model_folder / file.name).read_bytes()
        )
    exported = read_contract(outcome.model_folder)
    saved = read_contract(checkpoint)
    assert exported is not None and saved is not None and exported.golden == saved.golden
    assert verify(outcome.model_folder, device="cpu").equal


def test_the_model_is_pushed_to_the_hub(
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failed upload hides no result and is not hidden by it, and the same command uploads, as
    often as it is run."""
    calls: list[dict[str, Any]] = []

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> RepoUrl:
        calls.append({"created": repo_id, **options})
        return RepoUrl(f"https://huggingface.co/{repo_id if '/' in repo_id else f'me/{repo_id}'}")

    def upload_folder(self: HfApi, **options: Any) -> None:
        calls.append(options)
        if len(calls) in (2, 4):
            raise OSError("the network is down")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    folder = tmp_path / "my first run"
    words = [
        "rm.max_num_steps=1",
        "+hub.push_to_hub=true",
        f"checkpointing.checkpoint_dir={folder}",
    ]
    config = tiny_run(*words)
    failed = train(config, show_progress=False)
    assert failed.exit_code == 1 and "the network is down" in str(failed.upload_error)
    assert "nobody is logged in to the hub" in caplog.text
    assert (
        failed.model_folder == folder / "final"
        and failed.validation["held_out"]["accuracy"] is not None
    )
    assert main(["train", "--config", str(tmp_path / "run.yaml"), *words]) == 1
    results, _, warning = capsys.readouterr().out.partition("WARNING: the model is not on the hub")
    assert "held_out" in results and "the network is down" in warning
    assert train(config, show_progress=False).exit_code == 0
    assert "hf upload my-first-run" in str(failed.upload_error) and "--private" in str(
        failed.upload_error
    )
    assert [call["created"] for call in calls[::2]] == ["my-first-run"] * 3 and calls[0][
        "private"
    ] is True
    assert [(call["repo_id"], Path(call["folder_path"])) for call in calls[1::2]] == [
        ("me/my-first-run", folder / "final")
    ] * 3
    with pytest.raises(ConfigError, match=r"hub\.repo_id"):
        train(tiny_run("+hub={push_to_hub: true, repo_id: team/rm/one}"), show_progress=False)


def test_a_file_alone_is_trained_on_and_what_is_left_out_is_said_at_the_end(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Of three completions the long one goes."""
    rows = []
    for n in range(24):
        texts = [f"It is {n + 1}.", "No.", "Well. " * (150 if n % 2 else 1)]
        rows.append({"prompt": f"{n} + 1?", "completions": texts, "scores": [3, 2, 1]})
    path = write_rows("mine.jsonl", rows)
    held_out = f"data.validation=[{{data_path: {path}, name: held_out}}]"
    sets = [
        f"data.train=[{{data_path: {path}}}]",
        held_out,
        "policy.max_total_sequence_length=64",
        "rm.max_num_steps=2",
    ]
    caplog.set_level(logging.INFO)
    outcome = train(tiny_run(*sets), show_progress=False)
    assert "mine.jsonl: read as PreferenceDataset" in caplog.text
    said = "12 completions of kept comparisons too long"
    assert said in caplog.text and said in outcome.caveats["training data, mine.jsonl"]
