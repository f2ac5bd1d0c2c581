"""A first run without YAML: what `treeward train --model MODEL --data FILE` chooses, as overrides.

    values = named_values("some/model", "pairs.csv", None)
    config = load_file(RewardModelRunConfig, None, values=values)
    for choice in choose(config, facts_of(config), model=True, data=True, run=True):
        choice.text      # "policy.optimizer.kwargs.lr=1.0e-05", which the command takes too

The learning rates are a table, `RATES`, which docs/training.md shows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from treeward.config.run import RewardModelRunConfig


class Rate(NamedTuple):
    """A learning rate that trained a reward model: all weights of `model`, which has so many
    `parameters`."""

    model: str
    parameters: float
    lr: float
    comparisons: str
    source: str


RATES = (
    Rate("all-MiniLM-L6-v2", 22.7e6, 1e-4, "16", "run here, an encoder"),
    Rate("SmolLM2-135M-Instruct", 135e6, 5e-5, "16", "run here, the recipe `real_demo`"),
    Rate(
        "Qwen2-0.5B-Instruct",
        494e6,
        1e-5,
        "8 on each device",
        "TRL, `examples/scripts/reward_modeling.py`",
    ),
    Rate(
        "Llama-3.2-1B-Instruct", 1.24e9, 2e-6, "128", "the recipe `rm`, after NeMo RL's `rm.yaml`"
    ),
    Rate("Llama-2-7b-chat", 6.74e9, 9e-6, "128", "OpenRLHF, `examples/scripts/train_rm_llama.sh`"),
    Rate("Llama-3-8B-Instruct", 8.03e9, 2e-6, "512", "RLHFlow, `bradley-terry-rm/llama3_rm.py`"),
    Rate("Llama-3.1-Tulu-3-8B-SFT", 8.03e9, 3e-6, "256", "Tulu 3, the recipe `rm_tulu3_8b`"),
)
_TIMES_FOR_ADAPTERS = 10  # TRL has 1e-4 for LoRA beside 1e-5, for the same model
_HEAD_ALONE = 1e-3  # docs/real-demo.md: of SmolLM2 frozen
_BATCH_SIZES = (128, 64, 32)
_SMALLEST_BATCH = 16
_STEPS_WANTED = 50  # of an epoch; fewer leave a warm-up and nothing else
_MOST_HELD_OUT = 1000  # comparisons: their accuracy is known to 3 %
_FEW_COMPARISONS = 200
_FEWEST_TO_HOLD_OUT = 20
"""With fewer prompts the chance that a share of 0.2 holds out none is above one in a hundred."""
_WARMUP_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run before it is configured.

    `parameters`: of the model. `positions`: the longest sequence that it reads, None without a
    limit. `has_bfloat16`: whether there is a GPU that computes in it. `data_keys`: the keys of
    `data` that say the format. `comparisons`: how many the data has, the held-out ones too; for a
    process reward model, problems.
    """

    parameters: int
    positions: int | None
    has_bfloat16: bool
    data_keys: Mapping[str, str]
    comparisons: int


class Choice(NamedTuple):
    """A value that was chosen for a key, and why."""

    key: str
    value: str
    why: str

    @property
    def text(self) -> str:
        """The choice as an override."""
        return f"{self.key}={self.value}"


def named_values(model: str | None, data: str | None, validation: str | None) -> dict[str, Any]:
    """The sections that a command's --model, --data and --validation stand for, laid over a
    configuration's."""
    values: dict[str, Any] = {}
    if model is not None:
        values["policy"] = {"model_name": model}
    if data is not None:
        # The other file's keys, as its columns' names, mean nothing here.
        values["data"] = {"_override_": True, "dataset_name": "auto", "train_data_path": data}
        if validation is None:
            values["data"]["split_validation_size"] = 0.1
        else:
            values["data"]["val_data_path"] = validation
    return values


def rate_of(parameters: float) -> Rate:
    """The row of `RATES` that is nearest in size."""
    # By the ratio of the sizes: 1B lies between 500M and 2B, not beside 500M.
    return min(RATES, key=lambda rate: abs(math.log(parameters / rate.parameters)))


def choose(
    config: RewardModelRunConfig, facts: RunFacts, *, model: bool, data: bool, run: bool
) -> list[Choice]:
    """What a named `model`, named `data` and a whole `run` without a configuration leave open."""
    choices: list[Choice] = []
    if data:
        choices += _data_choices(config, facts)
    if model:
        near = rate_of(facts.parameters)
        lr = near.lr
        why = f"{near.model} is nearest in size to {facts.parameters / 1e6:,.0f} million parameters"
        if config.policy.reward_model_cfg.freeze_backbone:
            lr = _HEAD_ALONE
            why = "the head alone is trained"
        elif config.policy.dtensor_cfg.lora_cfg.enabled:
            lr *= _TIMES_FOR_ADAPTERS
            why += ", and adapters need ten times its rate"
        # With a point: YAML reads 1e-05 as a text, and 1.0e-05 as a number.
        choices.append(Choice("policy.optimizer.kwargs.lr", f"{lr:.1e}", why))
        precision, why = "float32", "there is no GPU that computes in bfloat16"
        if facts.has_bfloat16:
            precision, why = "bfloat16", "there is a GPU"
        choices.append(Choice("policy.precision", precision, why))
    if run:
        choices += _run_choices(config, facts)
    return choices


def values_of(choices: Iterable[Choice], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with the choices laid over them."""
    merged = copy.deepcopy(dict(values))
    for choice in choices:
        *parents, key = choice.key.split(".")
        section = merged
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = yaml.safe_load(choice.value)
    return merged


def _data_choices(config: RewardModelRunConfig, facts: RunFacts) -> Iterable[Choice]:
    """The format of the data, and its held-out part where no validation data is named."""
    for key, value in facts.data_keys.items():
        yield Choice(f"data.{key}", value, "by the keys of the first row")
    # No part is held out: --validation, or an override, names another set.
    if all(dataset.part is None for dataset in config.data.validation):
        return
    unit = config.policy.reward_model_cfg.unit
    if facts.comparisons < _FEWEST_TO_HOLD_OUT:
        why = f"{facts.comparisons} {unit} are too few to hold some out; "
        why += "--validation names a file"
        yield Choice("data.split_validation_size", "0", why)
        return
    share = 0.1
    if facts.comparisons < _FEW_COMPARISONS:
        share = 0.2
    if facts.comparisons * share > _MOST_HELD_OUT:
        share = _MOST_HELD_OUT / facts.comparisons
    why = f"of the prompts; there are {facts.comparisons:,} {unit} and no --validation"
    yield Choice("data.split_validation_size", f"{share:.2g}", why)


def _run_choices(config: RewardModelRunConfig, facts: RunFacts) -> Iterable[Choice]:
    """What a configuration would say besides: steps and lengths that fit the data and the model."""
    size = _SMALLEST_BATCH
    # From the smallest to the largest, so that the largest that fits stays.
    for candidate in reversed(_BATCH_SIZES):
        if facts.comparisons >= candidate * _STEPS_WANTED:
            size = candidate
    most_steps = math.ceil(facts.comparisons / size)
    why = f"{config.policy.reward_model_cfg.unit} a step; steps an epoch: at most {most_steps:,}"
    yield Choice("policy.train_global_batch_size", str(size), why)
    yield Choice(
        "policy.scheduler.warmup_ratio", str(_WARMUP_RATIO), "pretrained weights need a warm-up"
    )
    if facts.positions is not None and facts.positions < config.policy.max_total_sequence_length:
        yield Choice(
            "policy.max_total_sequence_length",
            str(facts.positions),
            "the model has no more positions",
        )
