"""What each process of tests/parallel/test_training.py does, runs of a reward model; and how runs
are compared."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from treeward import processes
from treeward.config.load import load_config
from treeward.data.datasets import RowDataset
from treeward.model.contract import read_contract
from treeward.training.tracking import read_metrics
from treeward.training.train import train


def run_all(
    file: str, folder: str, cases: dict[str, list[str]], begun: dict[str, str] | None = None
) -> dict[str, Any]:
    """Each case's run, in a folder of its own: the validation of the exported model, and how often
    this process has read the rows of the data. `begun`: the checkpoints of other runs, in `folder`,
    from which some cases go on."""
    found: dict[str, Any] = {}
    for name, overrides in cases.items():
        own = Path(folder) / name
        places = [f"checkpointing.checkpoint_dir={own}/checkpoints", f"logger.log_dir={own}/logs"]
        if name in (begun or {}):
            checkpoint = Path(folder) / begun[name]
            processes.on_main(
                partial(shutil.copytree, checkpoint, own / "checkpoints" / checkpoint.name)
            )
        config = load_config(file, [*overrides, *places, f"data.cache_dir={own}/cache"])
        with patch.object(
            RowDataset, "__iter__", autospec=True, side_effect=RowDataset.__iter__
        ) as reads:
            outcome = train(config, show_progress=False)
        found[name] = {
            "validation": outcome.validation,
            "step": outcome.model_step,
            "reads": reads.call_count,
        }
    return found


def assert_close(got: dict[str, float], want: dict[str, float], where: str) -> None:
    assert got.keys() == want.keys(), where
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-5, nan_ok=True), (where, key)


def assert_same_files(got: Path, want: Path, *, but_for: str = "optimizer", after: int = 0) -> None:
    """`but_for`: a folder that only one of them has. `after`: the first step that `got`, which goes
    on from a checkpoint of another run, has taken; its best checkpoint may be another."""
    lines = []
    for folder in (got, want):
        all_lines = read_metrics(folder / "logs" / "metrics.jsonl")
        lines.append([line for line in all_lines if line["step"] >= after])
    for one, other in zip(*lines, strict=True):
        # how many trees share a beginning depends on which are computed together
        left_out = ("time", "timing/", "train/rm/computed_tokens", "train/computed_tokens")
        assert_close(
            *(
                {k: v for k, v in line.items() if not k.startswith(left_out)}
                for line in (one, other)
            ),
            str(got),
        )
    names = []
    for folder in (got, want):
        files = filter(Path.is_file, folder.rglob("*"))
        names.append({path.relative_to(folder) for path in files})
    other = names[0] - names[1] if after else names[0] ^ names[1]
    assert not [name for name in other if {"optimizer", "ranks", but_for}.isdisjoint(name.parts)]
    for file in sorted(got.glob(f"checkpoints/{'step_' if after else ''}*/**/model.safetensors")):
        weights = load_file(file)
        expected = load_file(want / file.relative_to(got))
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            # Adam divides by the size of a gradient, and makes the rounding of a very small one
            # larger
            assert float((weights[key] - weight).abs().max()) < 5e-5, (file, key)
        if (contract := read_contract(file.parent)) is not None:
            own = read_contract((want / file.relative_to(got)).parent)
            assert (
                own is not None
                and contract.read == own.read
                and contract.rendering == own.rendering
            )
            scores = []
            for signed in (contract, own):
                scores.append({one.name: one.score for one in signed.golden})
            assert scores[0] and scores[0] == pytest.approx(scores[1], abs=1e-3)
