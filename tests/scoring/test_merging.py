"""Merged tensors are the average, the folder loads anywhere, and what does not belong together is refused by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from messages import edit_json
from safetensors.torch import load_file, save_file
from signed import signed
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from treeward.cli.main import main
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.scoring.merging import merge_models
from treeward.scoring.scorer import Scorer

WEIGHTS = "model.safetensors"
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Four."}]

Make = Callable[..., Path]


@torch.no_grad()
def a_step_away(seed: int, family: str = "llama", *, step: float = 0.1, **changes: Any) -> Any:
    """The model of seed 0, and a step from it to that of another seed."""
    hf, other = tiny_model(family, **changes), tiny_model(family, seed=seed, **changes)
    for ours, theirs in zip(hf.parameters(), other.parameters(), strict=True):
        ours.lerp_(theirs, step)
    return hf


@pytest.fixture
def make(tiny_tokenizer: Any, tmp_path: Path) -> Make:
    """A member, in a folder with a tokenizer."""

    def member(seed: int, family: str = "llama", *, tokenizer: Any = None, shard: str = "1GB", **how: Any) -> Path:
        folder = tmp_path / f"{family}{seed}-{len(list(tmp_path.iterdir()))}" / "final"
        a_step_away(seed, family, **how).save_pretrained(folder, max_shard_size=shard)
        (tokenizer or copy.deepcopy(tiny_tokenizer)).save_pretrained(folder)
        return folder

    return member


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change(folder: Path, **new: Any) -> None:
    """Replace tensors of a folder; None removes one."""
    held = {name: t for name, t in (tensors(folder) | new).items() if t is not None}
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "weights"),
    [("gemma2", None), ("bert", (0.7, 0.2, 0.1))],
)
def test_tensors_are_the_average(family: str, weights: Any, make: Make, tmp_path: Path) -> None:
    members = [make(seed, family) for seed in (1, 2, 3)]
    assert merge_models(members, tmp_path / "out" / "merged", weights=weights) == tmp_path / "out" / "merged"
    held = [tensors(member) for member in members]
    got = tensors(tmp_path / "out" / "merged")
    assert list(got) == list(held[0])
    for name, tensor in got.items():
        want = sum(w * h[name].double() for w, h in zip(weights or (1 / 3,) * 3, held, strict=True))
        assert torch.equal(tensor, want.float()), name
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "merged")


def test_sharded_checkpoints(make: Make, tmp_path: Path) -> None:
    a = make(1, shard="20KB")
    merge_models([a, make(2, shard="33KB")], tmp_path / "merged")
    merge_models([make(1), make(2)], tmp_path / "whole")
    want = tensors(tmp_path / "whole")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    assert loaded.keys() == want.keys() and all(torch.equal(loaded[name], want[name]) for name in want)
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (a, tmp_path / "merged")]
    assert files[0] == files[1] and len(files[0]) > 2


def test_the_folder_is_complete_and_says_what_it_is_made_of(make: Make, tmp_path: Path) -> None:
    a, b = make(1), make(2)
    (a / "README.md").write_text("of a", encoding="utf-8")
    edit_json(a / "config.json", _name_or_path=str(a))
    assert main(["merge", str(a), str(b), "--output", str(tmp_path / "merged"), "--weights", "0.75,0.25"]) == 0
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert f"| {a.parent.name}/final | 0.75 |" in card and f"| {b.parent.name}/final | 0.25 |" in card
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", WEIGHTS, "README.md", "tokenizer.json", "reward_contract.json"} <= names
    for path in (tmp_path / "merged").iterdir():
        assert path.suffix == ".safetensors" or str(tmp_path) not in path.read_text(encoding="utf-8"), path
        assert path.stat().st_mode & 0o777 == (tmp_path / "merged" / "README.md").stat().st_mode & 0o777
    own, merged = (AutoTokenizer.from_pretrained(folder) for folder in (a, tmp_path / "merged"))
    assert Renderer(merged).encode(CHAT) == Renderer(own).encode(CHAT)


def test_other_ways_to_read_are_named(make: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = Renderer(tokenizer).chat_template
    a = make(1, tokenizer=tokenizer)
    longer, other = (copy.deepcopy(tokenizer) for _ in range(2))
    longer.add_tokens(["quux"])
    other.chat_template = tokenizer.chat_template.replace("<|'", "<||'")
    for changed, field in ((longer, "tokenizer"), (other, "chat_template")):
        b = make(2, tokenizer=changed)
        with pytest.raises(ModelError, match=rf"differ, and cannot be averaged\n  field: {field}\n") as caught:
            merge_models([a, b], tmp_path / "merged")
        assert caught.value.where == str(b) and str(a) in str(caught.value)
        assert not (tmp_path / "merged").exists()


def test_other_tensors_are_named(make: Make, tmp_path: Path) -> None:
    norm, head = "model.norm.weight", "score.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({norm: None}, rf"differ(?s:.*)field: {norm}"),
        ({"model.extra": torch.zeros(2)}, r"differ(?s:.*)field: model\.extra"),
        ({norm: torch.zeros(31)}, rf"differ(?s:.*)field: {norm}\n  got:   \[31\]\n  need:  \[32\]"),
        ({head: torch.full((1, 32), torch.inf)}, rf"NaN or infinity\n  field: {head}"),
        ({head: torch.ones(1, 32, dtype=torch.int8)}, rf"whole numbers(?s:.*)field: {head}"),
    ]
    a = make(1)
    for i, (new, message) in enumerate(cases):
        b = make(2)
        change(b, **new)
        with pytest.raises(ModelError, match=message) as caught:
            merge_models([a, b], tmp_path / "merged" / str(i))
        assert caught.value.where == str(b)
        assert not list((tmp_path / "merged").glob("*")) + list((tmp_path / "merged").glob(".*"))


def test_models_of_unlike_origin_are_warned_of(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = make(1), make(2)
    change(b, **{"score.weight": -tensors(b)["score.weight"]})
    with caplog.at_level(logging.WARNING, logger="treeward"):
        merge_models([a, make(2)], tmp_path / "like")
        assert not caplog.messages
        merge_models([a, make(2, step=1.0)], tmp_path / "unlike")
        assert "point in unlike directions" in caplog.text
        caplog.clear()
        merge_models([a, b], tmp_path / "heads")
    assert "(cosine -0.9" in caplog.text or "(cosine -1.0" in caplog.text


def test_the_output_appears_whole_or_not_at_all(make: Make, tmp_path: Path) -> None:
    a, b = make(1), make(2)
    for member in (a, b):  # the golden conversations have no score, which shows when all else is written
        change(member, **{"score.weight": torch.full((1, 32), 3e38)})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match="not finite"):
        merge_models([a, b], tmp_path / "merged")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "merged").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        merge_models([a, b], tmp_path / "merged")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be written"):
        merge_models([make(1), make(2)], tmp_path / "file" / "merged")


def test_the_contract_of_the_merged_model(tiny_tokenizer: Any, tmp_path: Path) -> None:
    members = [tmp_path / str(seed) for seed in (1, 2)]
    for seed, folder in enumerate(members, start=1):
        signed(folder, tiny_tokenizer, a_step_away(seed), max_length=300, truncation="truncate_left")
    merge_models(members, tmp_path / "merged")
    scorer = Scorer.load(tmp_path / "merged", device="cpu")
    assert scorer.contract is not None and scorer.contract.calibration is None
    assert (scorer.renderer.max_length, scorer.renderer.truncation) == (300, "truncate_left")
    for example in scorer.contract.golden:
        assert scorer.score([example.messages])[0].score == pytest.approx(example.score, abs=1e-5)
    own = Scorer.load(members[0], device="cpu").contract
    assert own is not None and own.golden[0].token_ids == scorer.contract.golden[0].token_ids
    assert abs(own.golden[0].score - scorer.contract.golden[0].score) > 1e-3
    rendering = own.rendering.model_dump(mode="json") | {"max_length": 200}
    edit_json(members[1] / "reward_contract.json", rendering=rendering)
    with pytest.raises(ModelError, match=r"differ(?s:.*)field: rendering\n"):
        merge_models(members, tmp_path / "other")
