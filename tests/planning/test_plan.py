"""A plan against what a run takes: arithmetic, the memory of a process, the guide."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import families
import pytest
import yaml
from transformers import LlamaConfig

from treeward.cli.main import main
from treeward.cli.plan import GpuName
from treeward.config.load import load_run
from treeward.errors import ConfigError
from treeward.planning.bare_models import bare_reward_model
from treeward.planning.plan import GPUS, Plan, plan

SMALL = {
    "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 6000,
}  # fmt: skip
ADAMW_8BIT = "policy.optimizer.name=torchao.optim.AdamW8bit"
OFFLOAD, BFLOAT16 = "policy.dtensor_cfg.cpu_offload=true", "policy.precision=bfloat16"
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=16")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`treeward plan` silences the log of its process; other tests come after it in this one."""
    logger = logging.getLogger("treeward")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """A file of a run, and its plans."""

    class Run:
        file = tmp_path / "run.yaml"

        def write(self, model: dict[str, Any] | str, *, tokens: int = 1024, **others: Any) -> None:
            policy = {"train_micro_batch_tokens": tokens, "max_total_sequence_length": tokens}
            policy |= {"model_name": model} if isinstance(model, str) else {"model_config": model}
            if not others:
                policy["train_global_batch_size"] = 16
            data = {"train_data_path": "train.jsonl"} | (
                {"dataset_name": "PromptDataset"} if others else {}
            )
            self.file.write_text(
                yaml.safe_dump({"policy": policy, "data": data, **others}), encoding="utf-8"
            )

        def __call__(self, *overrides: str, gpu: str = "h100") -> Plan:
            return plan(load_run(self.file, overrides), gpu)

    return Run()


FAMILIES = {
    "llama": SMALL,
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 48},
    "gemma3": SMALL | {"model_type": "gemma3_text", "head_dim": 48, "sliding_window": 512},
}
_LAYERS = {
    key: SMALL[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
} | {"num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
HYBRIDS = {
    "qwen3_5": _LAYERS | {
        "model_type": "qwen3_5_text", "num_hidden_layers": 3, "head_dim": 48,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 48,
        "linear_value_head_dim": 64,
    },
    "falcon_h1": _LAYERS | {  # Mamba 2 beside attention
        "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_n_heads": 12,
        "mamba_d_head": 32, "mamba_d_ssm": 384, "mamba_n_groups": 2, "mamba_d_state": 32,
    },
    "nemotron_h": _LAYERS | {  # Mamba 2, attention and MLPs as layers of their own
        "model_type": "nemotron_h", "head_dim": 48,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"], "mamba_num_heads": 12,
        "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32,
    },
    # The states of a token are larger than the 64 KiB from which `measured_peak` has the allocator
    # return a tensor: with 16 numbers each they are not, and the process takes 14 % more.
    "mamba": {key: SMALL[key] for key in ("hidden_size", "vocab_size")} | {
        "model_type": "mamba", "num_hidden_layers": 2, "state_size": 24,
    },
    "lfm2": _LAYERS | {
        "model_type": "lfm2", "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}  # fmt: skip
CHECKPOINTING = "policy.dtensor_cfg.activation_checkpointing=true"
MEASURED = """
import gc, sys
import torch
from treeward.config.load import load_run
from treeward.planning.bare_models import bare_reward_model
from treeward.training.models import adapt
from treeward.training.optimisation import build_optimizer

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

config = load_run(sys.argv[1], sys.argv[2:])

def make():
    model = bare_reward_model(config.policy)
    adapt(model, config.policy, seed=0, checkpoint=None)
    if config.policy.dtensor_cfg.activation_checkpointing:
        model.recompute_activations()
    return model.train(), build_optimizer(model, config.policy.optimizer)

def step(model, optimizer, length):
    prompt = [1] * (length // 3)
    for _ in range(2):  # the second adds to gradients that are there
        batch = model.make_batch([[prompt + [n] * (length // 3) for n in (2, 3)]])
        model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step(*make(), 64)  # what is loaded when it is first used
gc.collect()
before = resident("VmRSS")
model, optimizer = make()
step(model, optimizer, config.max_sequence_length)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the highest from now on
step(model, optimizer, config.max_sequence_length)
print(resident("VmHWM") - before)
"""


def measured_peak(file: Path, words: tuple[str, ...], program: str = MEASURED) -> int:
    """The bytes that a process of its own takes for the run, at their highest."""
    words = (sys.executable, "-c", program, str(file), *words)
    each_is_returned = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=each_is_returned)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (CHECKPOINTING,), LORA])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_that_of_a_measured_run(
    family: str, overrides: tuple[str, ...], planned: Any
) -> None:
    planned.write(FAMILIES[family], tokens=3072)
    measured = measured_peak(planned.file, overrides)
    assert planned(*overrides, gpu="cpu").memory["peak"] == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1536, 3072])
@pytest.mark.parametrize("overrides", [(), (CHECKPOINTING,), LORA])
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_peak_of_recurrent_layers_is_that_of_a_measured_run(
    family: str, overrides: tuple[str, ...], tokens: int, planned: Any
) -> None:
    planned.write(HYBRIDS[family], tokens=tokens)
    measured = measured_peak(planned.file, overrides)
    assert planned(*overrides, gpu="cpu").memory["peak"] == pytest.approx(measured, rel=0.1)


def test_the_plan_of_a_small_run(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    planned.write(SMALL)
    words = ["plan", "--config", str(planned.file), "--gpu", "a100", BFLOAT16]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "1 x a100: fits" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = planned(BFLOAT16, "policy.dtensor_cfg.activation_checkpointing=true")
    assert again.memory["peak"] < found["memory"]["peak"]


def test_what_is_held_by_every_kind_of_training(planned: Any, tmp_path: Path) -> None:
    """By weight, in bytes: what docs/training.md says of layouts."""
    sizes = {key: value for key, value in SMALL.items() if key != "model_type"}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path / "base")
    planned.write(str(tmp_path / "base"))
    kinds = {(): (2, 4, 12), (ADAMW_8BIT,): (2, 2, 2), (OFFLOAD,): (2, 4, 0)}
    plans = {overrides: planned(BFLOAT16, *overrides) for overrides in kinds}
    for overrides, bytes_of_each in kinds.items():
        found = plans[overrides]
        for name, each in zip(("weights", "gradients", "optimizer"), bytes_of_each, strict=True):
            assert found.memory[name] == pytest.approx(
                each * found.parameters, rel=0.05, abs=1e5
            ), (overrides, name)
        assert found.memory["peak"] > sum(
            found.memory[name] for name in ("weights", "gradients", "optimizer")
        )
    plain = plans[()]
    offloaded = plans[OFFLOAD,]
    assert offloaded.memory["host"] == pytest.approx(plain.memory["optimizer"], rel=0.01)
    assert offloaded.memory["activations"] == pytest.approx(plain.memory["activations"], rel=0.05)
    lora = planned(BFLOAT16, *LORA)
    assert lora.memory["gradients"] == pytest.approx(4 * lora.trained, rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides", "named"),
    [
        ({}, (*LORA, "policy.load_in_4bit=true"), "4 bits"),
        ({"model_type": "xlnet", "d_model": 64, "n_layer": 2, "n_head": 4}, (), "XLNet"),
    ],
    ids=["four bits", "layers unmarked"],
)
def test_what_the_formula_does_not_know_is_named(
    model: dict[str, Any], overrides: tuple[str, ...], named: str, planned: Any
) -> None:
    sizes = {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    fields = model if "d_model" in model else sizes | model
    planned.write(fields if model else SMALL)
    with pytest.raises(ConfigError, match=f"cannot be planned(?s:.*){named}"):
        planned(*overrides)


UNKNOWN = {
    "hidden_size": 384, "num_hidden_layers": 2, "vocab_size": 6000, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "model_type": "minimax", "num_local_experts": 4,
}  # fmt: skip


def test_of_unknown_layers_all_but_the_activations_is_planned(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.write(UNKNOWN)
    found = planned()
    assert (found.fits, found.unknown) == (None, "layers of type linear_attention")
    assert "activations" not in found.memory
    for name in ("weights", "gradients"):
        assert found.memory[name] == pytest.approx(4 * found.parameters, rel=0.01)
    # What does not fit without its activations does not fit with them.
    monkeypatch.setitem(GPUS, "h100", 1e3)
    assert planned().fits is False


@pytest.mark.parametrize("family", ["kimi_linear", "zamba", "zamba2"])
def test_kimis_delta_attention_and_layers_within_layers_are_unknown(
    family: str, planned: Any
) -> None:
    sizes = {"hidden_size": 32, "vocab_size": 600, "pad_token_id": 1, "num_hidden_layers": 2}
    planned.write(sizes | families.HYBRIDS[family])
    found = planned()
    assert found.fits is None
    assert found.unknown is not None and "linear_attention" in found.unknown
    assert "activations" not in found.memory


def test_the_command_knows_the_gpus_of_the_plan() -> None:
    assert set(get_args(GpuName)) == {*GPUS, "cpu"}


def test_a_gpus_fused_kernels_are_named_and_not_planned(
    planned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write(HYBRIDS["qwen3_5"])
    words = ["plan", "--config", str(planned.file)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "1 x h100: fits" in text
    assert "Fused kernels (causal-conv1d, flash-linear-attention) keep others" in text
    assert main([*words, "--gpu", "cpu"]) == 0
    assert "Fused kernels" not in capsys.readouterr().out
    # The activations alone are too much: kernels that keep fewer may fit.
    found = planned()
    rest = found.memory["peak"] - found.memory["activations"]
    monkeypatch.setitem(GPUS, "h100", (rest + found.memory["activations"] / 2) / 0.95)
    assert planned().fits is None
    assert main(words) == 0
    assert "may fit with fused kernels, but not with PyTorch's own" in capsys.readouterr().out
    monkeypatch.setitem(GPUS, "h100", 0.9 * rest)
    assert planned().fits is False


GRPO: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
    "env": {"math": {}},
}
COMPLETIONS = ("policy.generation.max_new_tokens=128", "policy.generation.batch_size=32")


def test_grpo_on_recurrent_layers_has_states(planned: Any) -> None:
    planned.write(HYBRIDS["qwen3_5"], **GRPO)
    found = planned(*COMPLETIONS)
    # Of one attention layer with four heads of 48 numbers, in float32.
    assert found.memory["KV cache"] == 2 * 4 * 4 * 48 * (32 * 128 + 8 * 896)
    # Of two layers: a convolution of four taps, and 8 heads of 48 x 64 numbers; two copies.
    of_state = 2 * 4 * (3 * (2 * 4 * 48 + 8 * 64) + 8 * 48 * 64)
    assert found.memory["recurrent states"] == 2 * 32 * of_state
    assert planned(*COMPLETIONS, gpu="cpu").memory["recurrent states"] == 32 * of_state
    for name in ("reference", "activations", "prompts"):
        assert found.memory[name] > 0
    server = ("policy.generation.backend=vllm", "policy.generation.url=http://localhost:8000/v1")
    served = planned(*COMPLETIONS, *server)
    assert not {"prompts", "KV cache", "recurrent states"} & set(served.memory)
    planned.write(HYBRIDS["mamba"], **GRPO)
    assert "KV cache" not in planned(*COMPLETIONS).memory


def test_the_prompts_of_a_sampling_may_be_the_most(planned: Any) -> None:
    """A Mamba 1 makes a state of each token, and reads 8192 tokens of prompts at once."""
    planned.write(HYBRIDS["mamba"], tokens=1024, **GRPO)
    memory = planned(*COMPLETIONS).memory
    held = memory["weights"] + memory["optimizer"] + memory["reference"]
    assert memory["peak"] == held + memory["prompts"]
    assert memory["prompts"] > memory["gradients"] + memory["activations"]


def test_of_unknown_layers_grpo_is_planned_but_for_what_they_keep(
    planned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write(UNKNOWN, **GRPO)
    found = planned()
    assert (found.fits, found.unknown) == (None, "layers of type linear_attention")
    assert not {"activations", "prompts", "KV cache", "recurrent states"} & set(found.memory)
    assert found.memory["reference"] == pytest.approx(found.memory["weights"], rel=0.01)
    assert main(["plan", "--config", str(planned.file)]) == 0
    text = capsys.readouterr().out
    assert "may fit, as it is not known what layers of type linear_attention keep" in text
    monkeypatch.setitem(GPUS, "h100", 1e3)
    assert planned().fits is False


MEASURED_GRPO = """
import copy, gc, sys
import torch
from treeward.config.load import load_run
from treeward.planning.bare_models import bare_policy
from treeward.rl.sampling import SampledRow, sample, uniforms
from treeward.training.models import adapt
from treeward.training.optimisation import build_optimizer

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

config = load_run(sys.argv[1], sys.argv[3:])
longest, new_tokens = config.policy.max_total_sequence_length, config.max_new_tokens

def make():
    policy = bare_policy(config.policy)
    adapt(policy, config.policy, seed=0, checkpoint=None)
    reference = None
    if not config.policy.dtensor_cfg.lora_cfg.enabled:
        reference = copy.deepcopy(policy).requires_grad_(False)
    return policy, build_optimizer(policy, config.policy.optimizer), reference

def update(policy, optimizer, length):
    prompt = [1] * (length // 3)
    for _ in range(2):  # the second adds to gradients that are there
        group = [prompt + [n] * (length // 3) for n in (2, 3)]
        policy.log_probs([group], [[len(prompt)] * 2]).values_SL.sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def sampling(policy, prompt_tokens, new_tokens):
    rows = []
    for s in range(config.policy.generation.batch_size):
        prompt = (3 + s // config.grpo.num_generations_per_prompt,) * prompt_tokens
        rows.append(SampledRow(prompt, new_tokens, uniforms(0, 0, s, new_tokens)))
    policy.eval()
    sample(policy, rows, ended=lambda tokens: False)
    policy.train()

models = make()  # what is loaded when it is first used
update(*models[:2], 64)
sampling(models[0], 40, 3)
del models
gc.collect()
before = resident("VmRSS")
policy, optimizer, reference = make()
update(policy, optimizer, config.policy.micro_batch_tokens)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the highest from now on
if sys.argv[2] == "update":
    update(policy, optimizer, config.policy.micro_batch_tokens)
else:
    sampling(policy, longest - new_tokens, new_tokens)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), LORA], ids=["", "adapters"])
@pytest.mark.parametrize("family", ["llama", *HYBRIDS])
def test_the_peaks_of_grpo_are_those_of_a_measured_run(
    family: str, overrides: tuple[str, ...], planned: Any
) -> None:
    """Of an update as near as of a reward model; of the prompts of a sampling up to a third more:
    of a layer the sum of its most is planned, and of the pass as many tokens as there may be."""
    planned.write({**FAMILIES, **HYBRIDS}[family], tokens=1536, **GRPO)
    few = ("policy.generation.max_new_tokens=64", "policy.generation.batch_size=8")
    overrides = (*overrides, *few)
    memory = planned(*overrides, gpu="cpu").memory
    held = memory["weights"] + memory["optimizer"] + memory.get("reference", 0)
    updating = held + memory["gradients"] + memory["activations"]
    prompts = held + memory["prompts"]
    assert memory["peak"] == max(updating, prompts)
    measured = measured_peak(planned.file, ("update", *overrides), MEASURED_GRPO)
    assert updating == pytest.approx(measured, rel=0.1)
    measured = measured_peak(planned.file, ("sampling", *overrides), MEASURED_GRPO)
    assert 0.95 * measured <= prompts <= 1.35 * measured


def test_a_run_of_grpo_has_a_reference_keys_and_values_and_reward_models(
    planned: Any, tmp_path: Path
) -> None:
    LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path / "rm"
    )
    grpo = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
    planned.write(SMALL, grpo=grpo, env={"reward_model": {"model_name": str(tmp_path / "rm")}})
    found = planned()
    assert found.memory["reference"] == pytest.approx(found.memory["weights"], rel=0.01)
    each = 2 * 3 * 4 * (384 // 8) * 4  # keys and values of three layers with four heads, in float32
    assert found.memory["KV cache"] == 64 * 1024 * each  # completions that fill the whole length
    of_rewards = found.memory["reward models"]
    assert of_rewards > 2 * 32_000 * 64
    lora = planned(*LORA)
    assert "reference" not in lora.memory and lora.trained < found.trained
    apart = planned(
        "env.reward_model.resources.gpus_per_node=2",
        "env.reward_model.dtensor_cfg.tensor_parallel_size=2",
    )
    assert "reward models" not in apart.memory
    assert apart.memory["peak"] == found.memory["peak"] - of_rewards
    sharded = planned("cluster.gpus_per_node=2")
    assert sharded.memory["reference"] == pytest.approx(found.memory["reference"] / 2, rel=0.01)
    assert sharded.memory["whole policy"] == pytest.approx(4 * found.parameters, rel=0.01)


def test_judges_of_the_process_are_beside_the_policy(planned: Any, tmp_path: Path) -> None:
    judge = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    judge.save_pretrained(tmp_path / "judge")
    section = {"model": str(tmp_path / "judge")}
    members = {"judge": section, "form": {"type": "rules", "rule": "regex", "pattern": "x"}}
    grpo = {"num_prompts_per_step": 8, "gold_environment": "gold"}
    gold = {"type": "rubric", **section, "dtype": "float32"}
    planned.write(
        SMALL, grpo=grpo, env={"both": {"type": "hybrid", "members": members}, "gold": gold}
    )
    in_process = planned().memory
    each = in_process["reward models"] / (2 + 4)  # one in bfloat16, one in float32
    assert each > 2 * 32_000 * 64
    elsewhere = planned("env.gold.device=cpu").memory
    assert elsewhere["reward models"] == 2 * each
    at_endpoint = planned("env.gold.device=cpu", "+env.both.members.judge.base_url=http://x/v1")
    assert "reward models" not in at_endpoint.memory
    assert in_process["peak"] == at_endpoint.memory["peak"] + 6 * each


@pytest.mark.slow
def test_the_tables_of_the_guide_are_what_is_planned() -> None:
    path = Path(__file__).parent.parent.parent / "docs" / "scaling_tables.py"
    spec = importlib.util.spec_from_file_location("scaling_tables", path)
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.planned(page) == page


def test_a_model_whose_padding_is_token_0_is_planned() -> None:
    """A probe of the model would draw tokens other than the padding; without weights there is
    none."""
    config = load_run("quickstart", ["policy.model_config.pad_token_id=0"])
    assert plan(config, "cpu").memory["peak"] > 0


def test_a_process_model_is_planned_with_its_own_head() -> None:
    """The plan named a sequence classifier, which has one label, and not two."""
    found = plan(load_run("process_demo", []), "cpu")
    config = load_run("process_demo", ["policy.reward_model_cfg.reward_model_type=bradley_terry"])
    other = plan(config, "cpu")
    assert found.model == other.model.replace("Sequence", "Token")
    hidden_size = bare_reward_model(config.policy).hf.config.hidden_size
    # Two weights of each feature, and their biases, in place of one weight.
    assert found.parameters - other.parameters == hidden_size + 2
