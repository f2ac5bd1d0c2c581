"""What is missing on this machine is reported before anything heavy is imported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from messages import write_jsonl

from treeward.config.load import load_config, load_grpo_config
from treeward.config.preflight import check_inputs
from treeward.data.sources import KINDS
from treeward.errors import ConfigError

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "tensorboard",
    "wandb",
    "mlflow",
    "ray",
    "peft",
    "openai",
    "liger_kernel",
    "bitsandbytes",
    "torchao",
}
"""Modules of optional packages that `make env` does not install."""

RM = """
policy: {model_name: org/model}
data: {dataset_name: BinaryPreferenceDataset, train_data_path: pairs.jsonl}
"""
GRPO = """
policy: {model_name: org/model}
data: {train_data_path: pairs.jsonl, input_key: prompt, output_key: chosen}
env: {math: {}, reward_model: {model_name: org/rm}, judge: {model: m, base_url: "http://h"}}
"""


@pytest.fixture
def plain_environment(monkeypatch):
    """No optional package is installed, except those that `make env` installs."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in OPTIONAL else find(name)
    )


@pytest.mark.parametrize(
    ("text", "override", "field", "fix"),
    [
        (RM, "data.train_data_path=pears.jsonl", "data.train[0].data_path", "did you mean"),
        (RM, "policy.model_name=./nowhere", "policy.model_name", "relative paths"),
        (RM, "policy.use_liger_kernel=true", "policy.use_liger_kernel", r"\[liger\]"),
        (GRPO, "data.env_name=judge", "env.judge", r"\[judge\]"),
        (GRPO, "env.reward_model.resources.gpus_per_node=2", "env.reward_model", r"\[ray\]"),
        (
            GRPO,
            "env.reward_model.model_name=results/nowhere/final",
            "env.reward_model.model_name",
            "relative paths",
        ),
        (
            RM,
            "policy={load_in_4bit: true, dtensor_cfg: {lora_cfg: {enabled: true}}}",
            "policy.load_in_4bit",
            "qlora",
        ),
    ],
)
def test_what_is_missing_is_named(
    load, plain_environment, monkeypatch, tmp_path, text, override, field, fix
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "pairs.jsonl", {"prompt": "p", "chosen": "c", "rejected": "r"})
    check_inputs(load(text))
    with pytest.raises(ConfigError, match=f"(?s)fix:.*{fix}") as caught:
        check_inputs(load(text, override))
    assert caught.value.field == field and caught.value.need


@pytest.mark.parametrize("kind", [*KINDS, ".CSV", ".jsonl.gz"])
def test_a_file_in_a_folder_is_no_hub_name(load, kind):
    with pytest.raises(ConfigError, match="no such file") as caught:
        check_inputs(load(RM, f"data.train_data_path=folder/pears{kind}"))
    assert caught.value.field == "data.train[0].data_path"


def test_the_way_out_of_an_environment_of_the_file_is_named(load, monkeypatch, tmp_path):
    """An override of `env` adds to the environments of the file."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "pairs.jsonl", {"prompt": "p", "chosen": "c", "rejected": "r"})
    text = GRPO.replace("org/rm", "results/nowhere/final")
    own = "env={length: {type: custom, function: 'rewards.py:brevity'}}"
    with pytest.raises(ConfigError, match="leave the environment out: ~env.reward_model"):
        check_inputs(load(text, own))
    check_inputs(load(text, own, "~env.reward_model", "data.env_name=length"))


@pytest.mark.parametrize("name", ["quickstart", "rm", "rm_tulu3_8b", "grpo_math_1B", "grpo_rm_1B"])
def test_shipped_configs_run_on_what_make_env_installs(name, plain_environment, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "examples" / "configs" / f"{name}.yaml"
    check_inputs((load_grpo_config if name.startswith("grpo") else load_config)(path))


def test_a_mistake_is_reported_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text(RM.replace("pairs", "nowhere"), encoding="utf-8")
    code = (
        "import sys; from treeward.cli.main import main; "
        f"code = main(['train', '--config', {str(tmp_path / 'run.yaml')!r}]); "
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'} & sys.modules.keys(); "
        "sys.exit(code + len(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and "nowhere.jsonl" in done.stderr
