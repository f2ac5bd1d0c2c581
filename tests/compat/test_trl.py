"""TRL's trainers on trees give the losses, metrics and models of TRL's own, and compute fewer
tokens."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import causal_model, tiny_model
from transformers import AutoModelForSequenceClassification

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.environments.trl import as_trl
from treeward.scoring.scorer import Scorer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from treeward.compat import trl as compat  # noqa: E402

QUIET = {
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}
FLOAT32 = {"bf16": False, "gradient_checkpointing": False}
TIMES = ("runtime", "per_second", "time", "flos")


def pairs() -> Any:
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="validation"))
    rows = []
    for preference, _ in islice(stream, 48):
        best, *_, worst = sorted(preference.completions, key=lambda completion: completion.rank)
        prompt = [dict(message) for message in preference.context]
        rows.append(
            {"prompt": prompt, "chosen": list(best.messages), "rejected": list(worst.messages)}
        )
    return Dataset.from_list(rows)


def lora(task: str, **options: Any) -> Any:
    return peft.LoraConfig(task_type=task, r=4, target_modules="all-linear", **options)


def train_rewards(
    kind: Any,
    tokenizer: Any,
    folder: Path,
    *,
    family: str = "qwen3",
    adapters: Any = None,
    **options: Any,
) -> Any:
    rows = pairs()
    model = tiny_model(family, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.set_attn_implementation("sdpa")
    args = trl.RewardConfig(
        output_dir=str(folder), learning_rate=1e-3, per_device_train_batch_size=4,
        eval_strategy="steps", eval_steps=3, **{**QUIET, **FLOAT32, **options},
    )  # fmt: skip
    trainer = kind(
        model=model, args=args, train_dataset=rows, eval_dataset=rows.select(range(8)),
        processing_class=copy.deepcopy(tokenizer), peft_config=adapters,
    )  # fmt: skip
    trainer.train()
    return trainer


def assert_same_history(ours: Any, theirs: Any, tolerance: float = 1e-4) -> None:
    """Everything that is logged but times: losses, gradient norms, and the metrics of training and
    evaluation."""
    assert len(ours.state.log_history) == len(theirs.state.log_history)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        numbers = {key: value for key, value in other.items() if isinstance(value, float)}
        for key, value in numbers.items():
            if not any(part in key for part in TIMES):
                assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (
                    key,
                    other["step"],
                )


def assert_fewer_tokens(trainer: Any, most: float) -> None:
    assert trainer.trees
    for tree in trainer.trees:
        assert 0 < tree.num_computed_tokens < most * tree.num_row_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "options", "adapters"),
    [
        (30, {}, None),
        (6, {"gradient_checkpointing": True, "center_rewards_coefficient": 0.1}, None),
        (6, {"gradient_checkpointing": True}, "lora"),
        (6, {"family": "qwen3_5", "gradient_checkpointing": True}, None),
    ],
    ids=["plain", "checkpointing", "lora", "recurrent"],
)
def test_reward_trainer(
    steps: int, options: dict[str, Any], adapters: str | None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    ours, theirs = (
        train_rewards(
            kind, tiny_tokenizer, tmp_path / kind.__module__, max_steps=steps,
            adapters=adapters and lora("SEQ_CLS", modules_to_save=["score"]), **options,
        )
        for kind in (compat.RewardTrainer, trl.RewardTrainer)
    )  # fmt: skip
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert len(losses) == steps and max(losses) - min(losses) > 0.01
    assert_same_history(ours, theirs)
    assert_fewer_tokens(ours, most=0.8)
    weights = dict(theirs.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-4)


def test_the_saved_model_is_a_plain_one(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = train_rewards(
        compat.RewardTrainer, tiny_tokenizer, tmp_path, max_steps=3, gradient_checkpointing=True
    )
    assert trainer.model.config._attn_implementation == "sdpa"
    trainer.save_model(str(tmp_path / "saved"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert plain.state_dict().keys() == trainer.model.state_dict().keys()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    with torch.no_grad():
        want = plain(**batch).logits
        torch.testing.assert_close(trainer.model.eval()(**batch).logits, want, rtol=0, atol=1e-5)
    trainer.model.disable_input_require_grads()  # whose hook cannot be pickled
    torch.save(trainer.model, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    torch.testing.assert_close(whole(**batch).logits, want, rtol=0, atol=1e-5)
    computed = trainer.trees[0].num_computed_tokens
    trainer.model(input_ids=batch["input_ids"])  # no call of a loss: as transformers has it
    copied = copy.deepcopy(trainer.model)  # as for averaged weights
    torch.nn.init.zeros_(copied.score.weight)
    assert not copied(**batch).logits.any()
    assert trainer.trees[0].num_computed_tokens == computed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("minimax", {}, "layers of type linear_attention"),
        (
            "qwen3_5",
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "use_reentrant",
        ),
        ("qwen3", {"disable_dropout": False}, "dropout is on"),
        ("qwen3", {"neftune_noise_alpha": 5.0}, "NEFTune"),
        ("gpt2", {}, "a head of its own"),
    ],
)
def test_what_trees_cannot_do_runs_as_in_trl(
    family: str,
    options: dict[str, Any],
    reason: str,
    tiny_tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapters = (
        {"adapters": lora("SEQ_CLS", lora_dropout=0.1)} if "disable_dropout" in options else {}
    )
    with caplog.at_level(logging.WARNING, "treeward.compat.trl"):
        ours, theirs = (
            train_rewards(
                kind, tiny_tokenizer, tmp_path, family=family, max_steps=3, **adapters, **options
            )
            for kind in (compat.RewardTrainer, trl.RewardTrainer)
        )
    assert [reason in record.getMessage() for record in caplog.records].count(True) == 1
    assert sum(tree.num_computed_tokens for tree in ours.trees) == 0
    assert_same_history(ours, theirs)


def letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def policy(family: str, tokenizer: Any) -> Any:
    return causal_model(family, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)


def train_policy(
    kind: Any,
    tokenizer: Any,
    folder: Path,
    *,
    family: str = "qwen3",
    adapters: Any = None,
    reference: Path | None = None,
    rewards: Any = letters,
    **options: Any,
) -> Any:
    """`reference` is where the untrained policy lies; without it this saves one, which two
    processes cannot do."""
    model = policy(family, tokenizer)
    model.set_attn_implementation("sdpa")
    if reference is None:
        model.save_pretrained(reference := folder)
    model.config._name_or_path = str(reference)  # where TRL reads its reference
    args = trl.GRPOConfig(
        output_dir=str(folder), learning_rate=1e-3, per_device_train_batch_size=8,
        num_generations=4,
        **{"max_steps": 5, "max_completion_length": 16, **QUIET, **FLOAT32, **options},
    )  # fmt: skip
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    trainer = kind(
        model=model, args=args, reward_funcs=rewards, processing_class=tokenizer,
        peft_config=adapters,
        train_dataset=pairs().select_columns("prompt").select(range(12)),
    )  # fmt: skip
    generate: Callable[..., Any] = trainer._generate_single_turn

    def seeded(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(trainer.state.global_step)
            return generate(*args, **kwargs)

    trainer._generate_single_turn = seeded
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        ({"beta": 0.05, "temperature": 0.7, "loss_type": "grpo", "entropy_coef": 0.01}, None),
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
             "max_steps": 6,
             "gradient_checkpointing": True, "top_entropy_quantile": 0.5, "beta": 0.05},
            None,
        ),
        ({"beta": 0.05, "gradient_checkpointing": True}, "lora"),
        (
            {"family": "mixtral", "gradient_accumulation_steps": 3, "num_iterations": 2,
             "max_steps": 4, "beta": 0.05,
             "max_completion_length": 4, "router_aux_loss_coef": 1.0},
            None,
        ),
        ({"family": "lfm2", "beta": 0.05, "gradient_checkpointing": True}, None),
    ],
    ids=["reference", "iterations", "lora", "router", "recurrent"],
)  # fmt: skip
def test_grpo_trainer(
    options: dict[str, Any], adapters: str | None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    ours, theirs = (
        train_policy(
            kind, tiny_tokenizer, tmp_path, adapters=adapters and lora("CAUSAL_LM"), **options
        )
        for kind in (compat.GRPOTrainer, trl.GRPOTrainer)
    )
    assert any(entry.get("loss") for entry in theirs.state.log_history)
    assert_same_history(ours, theirs)
    assert len(ours.trees) == (1 if adapters else 2)
    assert_fewer_tokens(ours, most=0.8)
    assert ours.model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_an_environment_rewards_what_trls_own_trainer_generates(
    signed_model: Callable[..., Path], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    generated: list[list[Any]] = []

    def noted(prompts: list[Any], completions: list[Any], **_: Any) -> list[None]:
        generated.append(
            [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        )
        return [None] * len(prompts)

    folder = signed_model(max_length=160)
    rewards = [as_trl(str(folder), precision="float32"), noted]
    trainer = train_policy(trl.GRPOTrainer, tiny_tokenizer, tmp_path, rewards=rewards, max_steps=2)
    scorer = Scorer.load(folder, device="cpu")
    want = torch.tensor([[score.score for score in scorer.score(step)] for step in generated])
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 2
    for name, values in (("rewards/reward_model_env/mean", want.mean(1)), ("reward_model_env/raw_mean", want.mean(1)),
                         ("reward_model_env/failed", torch.zeros(2))):  # fmt: skip
        assert [entry[name] for entry in history] == pytest.approx(values.tolist(), abs=1e-5)
    assert want.std(1).min() > 1e-3  # the completions differ, and so do the rewards


@pytest.mark.slow
def test_completions_of_a_prompt_share_a_micro_batch_where_the_loss_allows(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """TRL shuffles those of 12 prompts over 6 micro-batches; losses of an optimiser's step do not
    depend on its 3."""
    options = {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 6,
        "max_steps": 4,
        "beta": 0.05,
    }
    options["max_completion_length"] = 8
    ours, theirs, mixed = (
        train_policy(kind, tiny_tokenizer, tmp_path, loss_type=loss, **options)
        for kind, loss in (
            (compat.GRPOTrainer, "dapo"),
            (trl.GRPOTrainer, "dapo"),
            (
                compat.GRPOTrainer,
                "bnpo",
            ),  # its mean is over the tokens of a micro-batch: they stay as they are
        )
    )
    for name in ("loss", "grad_norm", "reward"):
        mine, other = (
            [entry[name] for entry in trainer.state.log_history if name in entry]
            for trainer in (ours, theirs)
        )
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)
    assert_fewer_tokens(ours, most=0.8)
    shares = [t.trees[0].num_computed_tokens / t.trees[0].num_row_tokens for t in (ours, mixed)]
    assert shares[0] < 0.9 * shares[1]


def test_a_completion_that_is_masked_trains_nothing(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """All are cut off at two tokens: no token is predicted, and the loss is TRL's differentiable
    zero."""
    trainer = train_policy(
        compat.GRPOTrainer,
        tiny_tokenizer,
        tmp_path,
        max_completion_length=2,
        mask_truncated_completions=True,
    )
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == [0.0] * 5


@pytest.mark.slow
def test_positions_that_count_the_padding_are_not_shared(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    ours, theirs = (
        train_policy(
            kind,
            tiny_tokenizer,
            tmp_path,
            family="gpt2",
            disable_dropout=True,
            num_iterations=2,
            max_steps=4,
        )
        for kind in (compat.GRPOTrainer, trl.GRPOTrainer)
    )
    assert_same_history(ours, theirs)
    assert [tree.is_exact for tree in ours.trees] == [False]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_two_processes(how: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """`accelerate launch` with gloo; accelerate has no FSDP on a CPU, so there the forward runs in
    PyTorch's own."""
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    policy("qwen3", tiny_tokenizer).save_pretrained(tmp_path / "reference")
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests / "compat"), str(tests.parent)]
    launch = [
        "--multi_gpu",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    command = [
        "accelerate.commands.launch",
        *launch,
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(tests / "trl_processes.py"), how, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{how}{rank}.json").read_text(encoding="utf-8"))
        assert found["processes"] == 2 and found["computed"] < 0.8 * found["rows"]
        assert (
            found["ours"] == pytest.approx(found["theirs"], rel=1e-4, abs=1e-4)
            and len(found["ours"]) >= 4
        )
