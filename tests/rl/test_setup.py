"""From a configuration to a run: what is checked, what is counted, and what is closed when something is wrong."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from treeward.errors import CheckpointError, ConfigError, DataError, ModelError, TreewardError
from treeward.rl import identity
from treeward.rl import setup as rl_setup
from treeward.rl.generation import LocalGenerator
from treeward.rl.setup import set_up
from treeward.training.checkpoints import Checkpoint

Make = Callable[..., Any]
Write = Callable[[str, Iterable[Any]], str]


def test_prompts_that_are_too_long_are_dropped_and_counted(
    tiny_grpo: Make, write_prompts: Write, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_grpo()
    write_prompts("train.jsonl", ["Say sun.", "Say " + "rain and " * 60, "Say moon."])
    with caplog.at_level(logging.INFO, "treeward"):
        run = set_up(config)
    run.close()
    assert len(run.prompts) == 2 and run.prompts.counts.too_long == 1
    assert "2 of 3 prompts kept (left out: 1 too long)" in caplog.text and "train.jsonl:2" in caplog.text


def test_all_prompts_too_long(tiny_grpo: Make, write_prompts: Write) -> None:
    config = tiny_grpo("data.max_input_seq_length=3")
    with pytest.raises(DataError, match="no prompt is short enough"):
        set_up(config)
    write_prompts("train.jsonl", [])
    with pytest.raises(DataError):
        set_up(tiny_grpo())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 6),
        (["grpo.max_num_steps=null"], 95),  # ceil(9 epochs of 42 prompts / 4)
        (["grpo.max_num_steps=1000000", "grpo.max_num_epochs=1"], 11),
        (["grpo.max_num_steps=null", "grpo.max_num_epochs=1", "data.train.weight=2.0"], 21),
    ],
)
def test_how_long_a_run_is(tiny_grpo: Make, options: list[str], steps: int) -> None:
    run = set_up(tiny_grpo(*options))
    run.close()
    assert run.total_steps == steps


def test_the_schedule_is_in_updates(tiny_grpo: Make) -> None:
    """Three passes in two parts: six updates a step, and the rate reaches zero with the last."""
    options = [
        "grpo.updates_per_batch=3",
        "policy.train_global_batch_size=8",
        "policy.scheduler={name: linear, warmup_steps: 0}",
    ]
    run = set_up(tiny_grpo(*options))
    run.close()
    rates = []
    for _ in range(36):
        rates.append(run.updater.optimizer.param_groups[0]["lr"])
        run.updater.optimizer.step()
        run.scheduler.step()
    assert (
        rates[0] == 0.01 and rates[-1] > 0 and run.updater.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    )


def test_validation_prompts_are_spread_over_the_sets(tiny_grpo: Make, write_prompts: Write) -> None:
    first = write_prompts("a.jsonl", [f"Count to {n}." for n in range(30)])
    second = write_prompts("b.jsonl", [f"Count from {n}." for n in range(10)])
    sets = ", ".join(
        f"{{dataset_name: PromptDataset, data_path: {path}, name: {name}}}"
        for path, name in ((first, "to"), (second, "from"))
    )
    config = tiny_grpo(f"data.validation=[{sets}]", "grpo.max_val_samples=12")
    run = set_up(config)
    run.close()
    assert len(run.validation) == 12 and list(run.validation_sets) == ["to"] * 9 + ["from"] * 3
    asked = [one.prompt.messages[-1]["content"] for one in run.validation]
    assert len(set(asked)) == 12 and asked[0] == "Count to 0." and asked[-1] == "Count from 9."
    whole = set_up(tiny_grpo(f"data.validation=[{sets}]", "grpo.max_val_samples=null"))
    whole.close()
    assert len(whole.validation) == 40


def test_validation_prompts_that_are_trained_on_are_told(
    tiny_grpo: Make, write_prompts: Write, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_grpo()
    write_prompts("held_out.jsonl", ["Say sun and moon.", "Sing."])
    run = set_up(config)
    run.close()
    assert "1 of 2 validation prompts are trained on too" in caplog.text


def test_a_policy_with_fewer_positions_is_refused(tiny_grpo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema sees those of a `model_config` alone."""
    monkeypatch.setattr(rl_setup.PolicyModel, "max_positions", 95)
    with pytest.raises(ConfigError, match="longer than the model's positions") as caught:
        set_up(tiny_grpo())
    assert "policy.max_total_sequence_length=95" in str(caught.value)
    set_up(tiny_grpo("policy.max_total_sequence_length=95")).close()


@pytest.mark.parametrize(
    ("section", "free", "counting"),
    [
        (
            {"model_name": "rm", "precision": "float32"},
            {"resources": {"gpus_per_node": 0}, "num_replicas": 2, "batch_size": 3, "worker_timeout_seconds": 9},
            {"precision": "bfloat16", "max_model_len": 9, "model_name": ["rm", "other"]},
        ),
        (
            {"type": "judge", "model": "m", "base_url": "http://127.0.0.1:1"},
            {"base_url": "http://127.0.0.1:2", "api_key_env": None, "max_concurrency": 1, "timeout_seconds": 1},
            {"model": "n", "temperature": 0.5, "type": "rules"},
        ),
        ({"type": "math"}, {"num_workers": 3, "timeout_seconds": 1}, {"correct": 2}),
        (
            {"type": "custom", "function": "a.b", "kwargs": {"batch_size": 1}},
            {"max_concurrency": 1},
            {"kwargs": {"batch_size": 2}},
        ),
        ({"type": "mine.Own", "batch_size": 1}, {}, {"batch_size": 2}),
        (
            {"type": "hybrid", "members": {"judge": {"model": "m", "settings": {"base_url": "x"}}}},
            {"members": {"judge": {"model": "m", "max_retries": 1, "base_url": "y"}}},
            {"members": {"judge": {"model": "m", "weight": 2}}},
        ),
    ],
)
def test_which_keys_of_an_environment_are_of_the_run(
    section: dict[str, Any], free: dict[str, Any], counting: dict[str, Any]
) -> None:
    def of(**keys: Any) -> Any:
        return identity._section("reward_model", {**section, **keys})

    for key, value in free.items():
        assert of(**{key: value}) == of(), key
    for key, value in counting.items():
        assert of(**{key: value}) != of(), key


def test_a_reward_model_that_was_replaced_is_noticed(tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from signed import write_signed_model

    from treeward.rl.grpo import grpo

    folder = tmp_path / "model"
    section = f"reward_model: {{model_name: {folder}, precision: float32, resources: {{gpus_per_node: 0}}}}"
    inside = f"mixed: {{type: hybrid, members: {{{section}}}}}"
    for number, environment in enumerate((section, inside)):
        where = f"checkpointing.checkpoint_dir={tmp_path}/{number}"
        logs = f"logger.log_dir={tmp_path}/logs_{number}"
        name = environment.partition(":")[0]
        options = (f"env={{{environment}}}", f"grpo.environments=[{name}]", where, logs, "grpo.max_num_steps=1")
        write_signed_model(folder, tiny_tokenizer, seed=3, max_length=256)
        grpo(tiny_grpo(*options), show_progress=False)
        write_signed_model(folder, tiny_tokenizer, seed=4, max_length=256)
        with pytest.raises(CheckpointError, match="of another run: env changed"):
            grpo(tiny_grpo(*options), show_progress=False)


@pytest.mark.parametrize(
    ("section", "moves"),
    [
        ("{planted: {type: custom, function: planted.vowels}}", False),
        ("{planted: {type: planted.Counting}}", True),
        ("{reward_model: {model_name: MODEL, precision: float32, resources: {gpus_per_node: 0}}}", False),
        (
            "{reward_model: {model_name: MODEL, precision: float32, resources: {gpus_per_node: 0}, "
            "reward_shaping: {length_penalty: {threshold: 1}}}}",
            False,
        ),
        (
            "{reward_model: {model_name: MODEL, precision: float32, resources: {gpus_per_node: 0}, "
            "reward_shaping: {normalize_rewards: true, running: true}}}",
            True,
        ),
    ],
)
def test_whether_the_scale_of_the_rewards_moves(
    tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path, section: str, moves: bool
) -> None:
    """Only running statistics move it, not a shaping that stays."""
    from signed import write_signed_model

    if "MODEL" in section:
        write_signed_model(tmp_path / "model", tiny_tokenizer, seed=3, max_length=256)
    run = set_up(tiny_grpo(f"env={section.replace('MODEL', str(tmp_path / 'model'))}"))
    run.close()
    assert run.rewards_move is moves


class Opened:
    """What a run holds, and how often each was closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed: list[str] = []
        for owner, name, what in (
            (LocalGenerator, "close", "generator"),
            (rl_setup.EnvironmentRunner, "shutdown", "rewards"),
        ):
            function = getattr(owner, name)

            def closing(self_: Any, function: Any = function, what: str = what) -> Any:
                self.closed.append(what)
                return function(self_)

            monkeypatch.setattr(owner, name, closing)


@pytest.mark.parametrize(
    ("option", "held"),
    [
        ("data.train.data_path=/nowhere.jsonl", set()),
        ("policy.model_config.model_type=qwen77", {"rewards"}),
        ("policy.optimizer.kwargs.unheard_of=3", {"rewards"}),
    ],
)
def test_what_was_opened_is_closed_when_something_is_wrong(
    tiny_grpo: Make, monkeypatch: pytest.MonkeyPatch, option: str, held: set[str]
) -> None:
    opened = Opened(monkeypatch)
    with pytest.raises(TreewardError):
        set_up(tiny_grpo(option))
    assert held <= set(opened.closed)


def test_the_reference_is_the_policy_that_the_run_begins_with(tiny_grpo: Make) -> None:
    from treeward.rl.grpo import grpo

    options = ("grpo.max_num_steps=1",)
    fresh = set_up(tiny_grpo(*options))
    fresh.close()
    begun = [parameter.clone() for parameter in fresh.policy.parameters()]
    config = tiny_grpo(*options)
    grpo(config, show_progress=False)
    checkpoint = Checkpoint(Path(config.checkpointing.checkpoint_dir) / "step_1", 1)
    resumed = set_up(config, checkpoint)
    resumed.close()
    reference: Any = resumed.updater.reference
    assert all(torch.equal(a, b) for a, b in zip(begun, reference.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(begun, resumed.policy.parameters(), strict=True))


def test_the_same_policy_may_be_named_otherwise_or_lie_elsewhere(
    tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeward.data.rendering import Renderer
    from treeward.model.policy_loading import build_policy, export_policy
    from treeward.rl.grpo import grpo

    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    loaded, other = (build_policy({**fields, "num_attention_heads": 4}, tiny_tokenizer, seed=seed) for seed in (1, 2))
    export_policy(
        loaded.model, tiny_tokenizer, tmp_path / "policy", chat_template=Renderer(tiny_tokenizer).chat_template
    )

    def options(name: str) -> tuple[str, ...]:
        return ("~policy.model_config", "~policy.tokenizer", f"policy.model_name={name}", "grpo.max_num_steps=1")

    monkeypatch.chdir(tmp_path)
    grpo(tiny_grpo(*options("./policy")), show_progress=False)
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step_1", 1)
    set_up(tiny_grpo(*options(str(tmp_path / "policy"))), checkpoint).close()
    shutil.copytree("policy", "copy")
    set_up(tiny_grpo(*options("./copy")), checkpoint).close()
    config = json.loads(Path("copy/config.json").read_text())
    Path("copy/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match="of another run: the policy changed"):
        set_up(tiny_grpo(*options("./copy")), checkpoint)  # the same weights compute something else
    export_policy(other.model, tiny_tokenizer, Path("copy"), chat_template=Renderer(tiny_tokenizer).chat_template)
    with pytest.raises(CheckpointError, match="of another run: the policy changed"):
        set_up(tiny_grpo(*options("./copy")), checkpoint)  # other weights in the same folder
    Path("unknown").mkdir()
    assert [identity._with_weights(name) for name in ("unknown", "hub/name", None)] == ["unknown", "hub/name", None]


def test_a_classifier_is_no_policy(tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from signed import write_signed_model

    folder = write_signed_model(tmp_path / "model", tiny_tokenizer, seed=3, max_length=256)
    with pytest.raises(ModelError, match="classifier"):
        set_up(tiny_grpo("~policy.model_config", "~policy.tokenizer", f"policy.model_name={folder}"))
