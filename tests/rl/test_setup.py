"""From a configuration to a run: what is checked, what is counted, and what is closed when
something is wrong."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from loopback import serving_on_loopback
from signed import write_signed_model

from treeward.config.load import load_section
from treeward.config.preflight import check_inputs
from treeward.config.server import ServerConfig
from treeward.data.rendering import Renderer
from treeward.errors import TreewardError
from treeward.http import RewardServerError
from treeward.model.export import export_model
from treeward.model.loading import build_policy
from treeward.rl import setup as rl_setup
from treeward.rl.setup import set_up_grpo
from treeward.serving.service import Service

Make = Callable[..., Any]
Write = Callable[[str, Iterable[Any]], str]


def test_validation_prompts_are_spread_over_the_sets(tiny_grpo: Make, write_prompts: Write) -> None:
    first = write_prompts("a.jsonl", [f"Count to {n}." for n in range(30)])
    second = write_prompts("b.jsonl", [f"Count from {n}." for n in range(10)])
    form = "{{dataset_name: PromptDataset, data_path: {}, name: {}}}"
    sets = f"data.validation=[{form.format(first, 'to')}, {form.format(second, 'from')}]"
    with contextlib.closing(set_up_grpo(tiny_grpo(sets, "grpo.max_val_samples=12"))) as run:
        assert len(run.validation) == 12 and list(run.validation_sets) == ["to"] * 9 + ["from"] * 3
        asked = [prompt.messages[-1]["content"] for prompt, _ in run.validation]
        assert len(set(asked)) == 12 and asked[0] == "Count to 0." and asked[-1] == "Count from 9."
    with contextlib.closing(set_up_grpo(tiny_grpo(sets, "grpo.max_val_samples=null"))) as run:
        assert len(run.validation) == 40
    with contextlib.closing(
        set_up_grpo(tiny_grpo(sets, "grpo.max_val_samples=12", "grpo.val_batch_size=5"))
    ) as run:
        assert len(run.validation) == 10, "whole batches, as in NeMo RL"


def test_validation_prompts_that_are_trained_on_are_told(
    tiny_grpo: Make, write_prompts: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_prompts("both.jsonl", ["Count to 3.", "Count to 4."])
    same = [
        f"data.{role}={{dataset_name: PromptDataset, data_path: {path}}}"
        for role in ("train", "validation")
    ]
    with contextlib.closing(set_up_grpo(tiny_grpo(*same))):
        assert "2 of 2 validation prompts are also training prompts" in caplog.text


def test_which_keys_of_an_environment_are_of_the_run() -> None:
    def same(one: dict[str, Any], **changes: Any) -> bool:
        return rl_setup.reward_identity("own", one) == rl_setup.reward_identity(
            "own", {**one, **changes}
        )

    model = {"model_name": "rm", "precision": "float32"}
    assert same(model, resources={"gpus_per_node": 0}, batch_size=3, worker_timeout_seconds=9)
    assert not same(model, precision="bfloat16") and not same(model, model_name=["rm", "other"])
    assert same({"type": "judge", "model": "m", "base_url": "x"}, base_url="y", timeout_seconds=1)
    assert not same({"type": "custom", "kwargs": {"batch_size": 1}}, kwargs={"batch_size": 2})
    assert not same({"type": "mine.Own", "batch_size": 1}, batch_size=2)
    hybrid = {"type": "hybrid", "members": {"judge": {"model": "m", "base_url": "x"}}}
    assert same(hybrid, members={"judge": {"model": "m", "max_retries": 1, "base_url": "y"}})
    assert not same(hybrid, members={"judge": {"model": "m", "weight": 2}})
    here = {"type": "judge", "model": "m", "device": "cpu"}
    assert same(here, device="cuda") and not same(here, model="other")


def test_a_judge_in_the_process_is_known_by_its_weights_and_its_contract(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    contract = tmp_path / "judge_contract.json"
    section = {"type": "judge", "model": str(tmp_path)}
    identities = []
    for file, content in ((weights, "one"), (weights, "two"), (contract, "asked otherwise")):
        file.write_text(content, encoding="utf-8")
        for members in (section, {"type": "hybrid", "members": {"judge": section}}):
            identities.append(str(rl_setup.reward_identity("own", members)))
    assert len(set(identities)) == 6


def test_a_template_that_is_edited_is_another_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    section = {"models": ["rm"], "tokenizer": {"name": "rm", "chat_template": str(file)}}
    identities = []
    for content in ("{{ messages }}", "{{ messages[1:] }}"):
        file.write_text(content, encoding="utf-8")
        for members in (section, {"type": "hybrid", "members": {"reward_model": section}}):
            identities.append(str(rl_setup.reward_identity("reward_model", members)))
    assert len(set(identities)) == 4
    written = {"models": ["rm"], "tokenizer": {"chat_template": "{{ messages }}" * 999}}
    assert "{{ messages }}" in str(rl_setup.reward_identity("reward_model", written))


def test_a_schedule_ends_with_the_last_update(opened: Callable[..., Any]) -> None:
    """Six steps of three passes over the batch, each in two parts: 36 updates."""
    schedule = "policy.scheduler={name: linear, warmup_steps: 0, min_lr_ratio: 0}"
    run = opened("grpo.updates_per_batch=3", "policy.train_global_batch_size=8", schedule)
    rates = []
    for _ in range(36):
        rates.append(run.updater.optimizer.param_groups[0]["lr"])
        run.updater.on_step()
    assert rates == pytest.approx([0.01 * (1 - n / 36) for n in range(36)])


def test_a_run_that_cannot_be_set_up_closes_its_environments(
    tiny_grpo: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(rl_setup.EnvironmentRunner, "shutdown", lambda self: closed.append(self))
    with pytest.raises(TreewardError):
        set_up_grpo(tiny_grpo("policy.optimizer.kwargs.unheard_of=3"))
    assert len(closed) == 1


def identity_now(config: Any) -> dict[str, Any]:
    with contextlib.closing(set_up_grpo(config)) as run:
        return run.identity


def test_models_are_known_by_their_weights_wherever_they_lie(
    tiny_grpo: Make,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    """The policy, a reward model, and one in a hybrid: the same under another name, and others in
    the same folder."""
    monkeypatch.chdir(tmp_path)
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }

    def write_policy(seed: int) -> None:
        loaded = build_policy({**fields, "num_attention_heads": 4}, tiny_tokenizer, seed=seed)
        template = Renderer(tiny_tokenizer).chat_template
        export_model(loaded.model, tiny_tokenizer, Path("model"), chat_template=template)

    def write_model(seed: int) -> None:
        write_signed_model(Path("model"), tiny_tokenizer, seed=seed, max_length=64)

    own = "~policy.model_config ~policy.tokenizer policy.model_name=NAME"
    section = "reward_model: {model_name: NAME, precision: float32, resources: {gpus_per_node: 0}}"
    for write, options in (
        (write_policy, own.split()),
        (write_model, [f"env={{{section}}}"]),
        (write_model, [f"env={{mixed: {{type: hybrid, members: {{{section}}}}}}}", "~env.planted"]),
    ):
        shutil.rmtree("model", ignore_errors=True)
        write(3)
        first = identity_now(tiny_grpo(*(option.replace("NAME", "./model") for option in options)))
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("model", "copy")
        copied = [option.replace("NAME", str(tmp_path / "copy")) for option in options]
        assert identity_now(tiny_grpo(*copied)) == first
        write(4)
        shutil.copytree("model", "copy", dirs_exist_ok=True)
        assert identity_now(tiny_grpo(*copied)) != first
    # the policy's: 96
    assert "env.reward_model was trained on conversations of at most 64 tokens" in caplog.text


@pytest.mark.slow
def test_a_reward_model_at_a_server_is_known_by_its_contract(
    tiny_grpo: Make, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Wherever the server is; one with another model, shaping, weights of heads or ensemble is
    another run."""
    for name, seed in (("rm", 3), ("other", 4)):
        write_signed_model(tmp_path / name, tiny_tokenizer, seed=seed, max_length=256)
    one = str(tmp_path / "rm")
    other = str(tmp_path / "other")
    shaped = {
        "model": one,
        "shaping": {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 2.0},
    }
    pair = {"models": [one, other]}
    mean, least = (
        {**pair, "ensemble": {"method": name, "standardize": False}} for name in ("mean", "worst")
    )
    weighted = {"model": one, "head_weights": [2.0]}
    identities = []
    for served in ({"model": one}, {"model": one}, shaped, {"model": other}, mean, least, weighted):
        service = Service.load(load_section(ServerConfig, {"models": [served]}, where="server"))
        with serving_on_loopback(service) as url:
            config = tiny_grpo(f"env={{reward_model: {{model_name: '{url}/v1'}}}}")
            check_inputs(config)
            identities.append(identity_now(config)["env"])
        service.close()
    assert identities[0] == identities[1]
    assert len({str(identity) for identity in identities}) == 6
    with pytest.raises(RewardServerError, match="cannot be reached"):
        set_up_grpo(config)
