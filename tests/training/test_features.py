"""Head-only training: with kept features a run is the same run, and the backbone is not asked
again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import WORDS
from families import ENCODER_RUN, ENCODERS, tiny_model
from killed_run import Killed
from messages import replace_text

from treeward.errors import ConfigError, ModelError
from treeward.model.reward_model import FeatureBatch, RewardModel
from treeward.training import features as features_module
from treeward.training import train as train_module
from treeward.training.features import with_features
from treeward.training.setup import set_up
from treeward.training.tracking import read_metrics
from treeward.training.train import train

FROZEN = "+policy.reward_model_cfg.freeze_backbone=true"
GRADES = "policy.reward_model_cfg={reward_model_type: attributes, attributes: [score, terse], freeze_backbone: true}"
KINDS = {
    "rows": (
        FROZEN,
        "policy.attention=rows",
        "policy.reward_model_cfg.reward_model_type=plackett_luce",
    ),
    "parts": (FROZEN, "policy.train_micro_batch_tokens=30", "data.ties=half"),
    "encoder": (FROZEN, *ENCODER_RUN),
    "two heads": (GRADES,),
    "three estimates": (FROZEN, "+policy.reward_model_cfg.num_heads=3"),
}


@pytest.fixture
def options(write_rows: Callable[..., Path], tmp_path: Path) -> tuple[str, ...]:
    """24 training comparisons of three completions, 10 for validation, and a cache of the test's
    own."""
    rows = []
    for n in range(34):
        texts = []
        for k, last in enumerate(("sun", "rain", "rain")):
            texts.append(f"{WORDS[n % 14]} {WORDS[(n + k) % 13]} {last}.")
        graded = [
            {"completion": text, "score": 2 - k, "terse": (n + k) % 3}
            for k, text in enumerate(texts)
        ]
        rows.append({"prompt": f"Name number {n}.", "completions": graded})
    paths = write_rows("train.jsonl", rows[:24]), write_rows("held_out.jsonl", rows[24:])
    return (
        f"data.train={{dataset_name: auto, data_path: {paths[0]}, split: null}}",
        (
            f"data.validation=[{{dataset_name: auto, data_path: {paths[1]}, split: null, name: "
            f"held_out}}]"
        ),
        f"data.cache_dir={tmp_path}/cache",
        "rm={max_num_steps: 4, max_num_epochs: 9, val_period: 2, val_at_start: true, seed: 7}",
        "checkpointing.save_period=2",
        "checkpointing.metric_name=null",
        "policy.optimizer.kwargs.lr=0.01",
    )


def files(tmp_path: Path) -> set[Path]:
    return {
        path for path in (tmp_path / "cache" / "features").glob("*/*") if path.suffix != ".xxh3"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_with_features_and_without(
    kind: str,
    options: tuple[str, ...],
    tiny_runs: Callable[[Path], Callable[..., Any]],
    read_weights: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = []
    weights = []
    for name in ("kept", "computed"):
        (tmp_path / name).mkdir()
        if name == "computed":
            monkeypatch.setattr(train_module, "with_features", lambda setup, shown: setup)
        config = tiny_runs(tmp_path / name)(*options, *KINDS[kind])
        outcome = train(config, show_progress=False)
        lines.append(read_metrics(tmp_path / name / "logs" / "metrics.jsonl"))
        weights.append(read_weights(outcome.model_folder))
        begun = set_up(config).model.hf.state_dict()
        changed = {
            name for name, weight in weights[-1].items() if not torch.equal(weight, begun[name])
        }
        assert changed == (
            {"classifier.weight", "classifier.bias"} if kind == "encoder" else {"score.weight"}
        )
    left_out = ("time", "timing/", "train/rm/computed_tokens")
    for one, other in zip(*lines, strict=True):
        values = []
        for line in (one, other):
            values.append({k: v for k, v in line.items() if not k.startswith(left_out)})
        assert values[0] == pytest.approx(values[1], abs=1e-6, rel=1e-6, nan_ok=True)
    for name, weight in weights[0].items():
        assert float((weight - weights[1][name]).abs().max()) < 1e-6, name
    assert [line["train/rm/computed_tokens"] for line in lines[0] if "train/rm/loss" in line] == [
        0
    ] * 4
    assert all(line["train/rm/computed_tokens"] > 0 for line in lines[1] if "train/rm/loss" in line)


def test_other_weights_tokens_numbers_or_rows_are_read_again(
    options: tuple[str, ...], tiny_run: Callable[..., Any], tmp_path: Path, policy_folder: Path
) -> None:
    changed = shutil.copytree(policy_folder, tmp_path / "changed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(changed)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(changed)
    stretched = shutil.copytree(policy_folder, tmp_path / "stretched")
    replace_text(stretched / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')

    def add(name: Path, *more: str) -> int:
        own = (
            "policy.model_config=null",
            "policy.tokenizer.vocab_size=null",
            f"policy.model_name={name}",
        )
        before = files(tmp_path)
        config = tiny_run(*options, "policy.max_total_sequence_length=128", *own, FROZEN, *more)
        setup = with_features(set_up(config))
        states = setup.features[next(iter(setup.training_sets.values())).fingerprint](3)
        assert states.shape == (3, 1, 32)
        assert states.dtype == (
            torch.bfloat16 if "policy.precision=bfloat16" in more else torch.float32
        )
        return len(files(tmp_path) - before)

    assert add(policy_folder) == 2
    assert add(shutil.copytree(policy_folder, tmp_path / "elsewhere")) == 0
    assert add(policy_folder, "rm.seed=8") == 0, "the head is not of the backbone"
    assert add(policy_folder, "data.ties=half") == 0, "the same tokens, in another file"
    assert add(policy_folder, "policy.precision=bfloat16") == 2
    assert add(policy_folder, "policy.attention=rows") == 2
    assert (
        add(
            policy_folder,
            "policy.tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'",
        )
        == 2
    )
    assert add(changed) == 2
    assert add(stretched) == 2


def test_a_set_whose_reading_was_killed_is_read_again(
    options: tuple[str, ...],
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features_module, "_COMPARISONS_AT_ONCE", 5)
    setup = set_up(tiny_run(*options, FROZEN))
    states = features_module._states
    num_read = 0

    def some(setup: Any, dataset: Any, places: range) -> Any:
        nonlocal num_read
        if num_read == 5:  # the ten of validation, and fifteen of 24
            raise Killed
        num_read += 1
        return states(setup, dataset, places)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(features_module, "_states", some)
        with_features(setup)
    [whole] = [path for path in files(tmp_path) if path.name == "features.bin"]
    with_features(setup)
    assert {path.name for path in files(tmp_path)} == {"features.bin"} and len(files(tmp_path)) == 2
    assert whole in files(tmp_path)
    ordinary = set_up(tiny_run(*options))
    assert with_features(ordinary) is ordinary and not ordinary.features


def test_damaged_features_are_made_again(
    options: tuple[str, ...],
    tiny_run: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = set_up(tiny_run(*options, FROZEN))
    with_features(setup)
    sound = {path: path.read_bytes() for path in files(tmp_path)}
    damaged = max(sound)
    damaged.write_bytes(sound[damaged][:-1] + bytes([sound[damaged][-1] ^ 1]))
    with_features(setup)
    assert f"the features {damaged} are damaged" in caplog.text
    assert {path: path.read_bytes() for path in files(tmp_path)} == sound


def test_a_disk_without_room_for_the_features_is_told_before_the_backbone_reads(
    options: tuple[str, ...], tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = set_up(tiny_run(*options, FROZEN))
    monkeypatch.setattr(setup.model, "features", None)  # it may not be called
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_839))
    # 10 comparisons x 3 completions x 32 numbers x 4 bytes
    words = "held_out.jsonl need 3,840 bytes, 3,839 are free"
    with pytest.raises(ConfigError, match=words) as caught:
        with_features(setup)
    assert caught.value.field == "data.cache_dir"


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoders_head_reads_the_features_alone_or_is_refused(family: str) -> None:
    model = RewardModel(tiny_model(family), layout="encoder")
    batch = model.make_batch([[[5, 6, 7, 8], [5, 9]], [[20, 21, 22]]])
    features = model.features(batch)
    assert features.shape == (3, *model.feature_shape) == (3, 1, 32)
    assert torch.equal(model.heads(FeatureBatch(features)), model.heads(batch))
    if family == "roberta":  # as it is, it reads the first token
        model.head.forward = lambda hidden: hidden.mean(dim=1)[:, :1]
        with pytest.raises(
            ModelError, match=r"more than one hidden state(?s:.*)freeze_backbone=false"
        ):
            model.features(batch)
