"""What `benchmarks/gpu.py` compares with computes the same; a part that is ended is in its table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import causal_model, forest, gradient_error, gradients, score_error, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from treeward.model.reward_model import RewardModel

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = ("common", "flash_rows", "gpu_parts", "gpu")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("gpu")
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("share", [False, True])
def test_packed_rows_score_as_trees(benchmark: ModuleType, share: bool) -> None:
    model = RewardModel(tiny_model("llama"))
    want = model(model.make_batch(forest()))
    want_gradients = gradients(model.hf, want)
    rows = sys.modules["flash_rows"].FlashRows(model, share=share)
    got = rows(forest())
    assert score_error(got, want) <= 1e-5
    assert gradient_error(gradients(model.hf, got), want_gradients) <= 1e-5


def test_one_level_is_shared(benchmark: ModuleType) -> None:
    batches = sys.modules["flash_rows"].FlashBatch
    groups = [[[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 1]], [[3, 4], [3, 4]]]
    lengths = [len(batches.from_groups(groups, torch.device("cpu"), share=share).tokens_T) for share in (False, True)]
    assert lengths == [15, 4 + 1 + 2 + 2 + 1]


def test_what_was_not_measured_is_said(benchmark: ModuleType, tmp_path: Path) -> None:
    """A part that was ended after its first variant."""
    rows = tmp_path / "rows"
    written = [
        {"setting": "1b", "variant": benchmark.TREE},
        {"setting": "1b", "variant": "TRL"},
        {"setting": "1b", "variant": benchmark.TREE, "seconds": 0.5, "row_tokens": 1000},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    tree, other, part = benchmark._cells("training", benchmark._read(rows), "not done in its 160 s")
    assert (tree["ms"], tree["tokens"], tree["slower"]) == ("500.0", "2,000", "1.00")
    assert (other["ms"], other["note"]) == ("not measured", "not done in its 160 s")
    assert (part.get("variant"), part["note"]) == (None, "not done in its 160 s")


def test_operations_are_those_that_torch_counts(benchmark: ModuleType) -> None:
    """Plain attention computes every pair of a query and a key, seen or not."""
    model = causal_model("llama")
    tokens = torch.arange(5, 45)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    found = sys.modules["common"].flops(model, 40, 40 * 40, 40, (1, 1, 1))
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)
