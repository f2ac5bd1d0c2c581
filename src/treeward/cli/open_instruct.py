r"""The options of open-instruct's `reward_modeling.py` as overrides of `treeward train`.

    python -m treeward.cli.open_instruct --config quickstart --learning_rate 3e-6 \
        --model_name_or_path me/sft

`scripts/train/` pass their arguments on to it. An option that has no counterpart is refused with
what to do, and one that open-instruct itself does not read is ignored with a line. Further words
are those of `treeward train`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from treeward.cli.main import main as run
from treeward.errors import ConfigError
from treeward.progress import configure_logging

logger = logging.getLogger(__name__)

_KEYS = {
    "model_name_or_path": "policy.model_name",
    "tokenizer_name_or_path": "policy.tokenizer.name",
    "tokenizer_name": "policy.tokenizer.name",
    "trust_remote_code": "policy.trust_remote_code",
    "chat_template_name": "policy.tokenizer.chat_template",
    "seed": "rm.seed",
    "num_train_epochs": "rm.max_num_epochs",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "eps": "policy.optimizer.kwargs.eps",
    "max_token_length": "policy.max_total_sequence_length",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "per_device_eval_batch_size": "rm.val_micro_batch_size",
    "gradient_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
    "with_tracking": "logger.wandb_enabled",
    "wandb_project_name": "logger.wandb.project",
    "wandb_entity": "logger.wandb.entity",
    "dataset_local_cache_dir": "data.cache_dir",
    "push_to_hub": "hub.push_to_hub",
}
"""An option -> the key that has its value."""

_OTHERS = (
    "add_bos",
    "dataset_mixer_list",
    "dataset_mixer_list_splits",
    "dataset_mixer_eval_list",
    "dataset_mixer_eval_list_splits",
    "exp_name",
    "output_dir",
    "gradient_accumulation_steps",
    "lr_scheduler_type",
    "warm_up_steps",
    "hf_entity",
    "hf_repo_id",
)
"""Options of which several make one key, or whose value has another form."""

_UNREAD_NAMES = """
run_name world_size micro_batch_size local_batch_size batch_size num_training_steps eval_freq
hf_repo_url gs_bucket_path dtype attn_implementation use_cache use_peft lora_r lora_alpha
lora_dropout lora_target_modules lora_modules_to_save lora_task_type load_in_8bit load_in_4bit
bnb_4bit_quant_type use_bnb_nested_quant use_slow_tokenizer use_fast tokenizer_files_hash
ground_truths_key sft_messages_key
"""
_UNREAD = frozenset(_UNREAD_NAMES.split())
"""Options that open-instruct overwrites or does not read, or that change nothing here."""

NO_COUNTERPART: Mapping[str, str] = {
    "total_episodes": "remove it: the schedule ends with the run; rm.max_num_steps ends it earlier",
    "num_evals": "give rm.val_period, the steps from one validation to the next",
    "max_prompt_token_length": "remove it: the limit is of whole conversations, max_token_length",
    "dataset_transform_fn": "remove it: rows are rendered, and too long completions left out",
    "dataset_target_columns": "remove it: data.train[0].dataset_name says which columns are read",
    "dataset_cache_mode": "remove it: tokens are kept in data.cache_dir",
    "dataset_config_hash": "remove it: tokens are found by what they follow from",
    "dataset_config_eval_hash": "remove it: tokens are found by what they follow from",
    "dataset_skip_cache": "give another data.cache_dir",
    "cache_dataset_only": "run treeward check-data, or treeward train --dry-run",
    "get_tokenizer_fn": "remove it: the template is chat_template_name, or the tokenizer's own",
    "model_revision": "download the revision, and give its folder",
    "tokenizer_revision": "download the revision, and give its folder",
    "hf_repo_revision": "remove it: an upload goes to the main branch",
}
"""An option -> what to do instead."""


def overrides(words: Sequence[str]) -> list[str]:
    """The words of `treeward train` for a command line of open-instruct; words that are no options
    stay.

    Raises `ConfigError` for an option that is unknown, has no counterpart, or lacks its value.
    """
    options: dict[str, list[str]] = {}
    kept: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        # Treeward's own words stay, with the value of --config.
        is_ours = word.split("=")[0] in ("--config", "--debug")
        if is_ours or not word.startswith("--"):
            kept.append(word)
            if word == "--config" and position < len(words):
                kept.append(words[position])
                position += 1
            continue
        name, has_value, value = word[2:].partition("=")
        options[name] = []
        if has_value:
            options[name].append(value)
        # Values follow up to the next option, as in a list of data sets.
        while not has_value and position < len(words):
            key, equals, _ = words[position].partition("=")
            # An override of treeward has a dot before its equals sign; a value may be a=b.
            is_override = bool(equals) and "." in key
            if is_override or key.startswith("--"):
                break
            options[name].append(words[position])
            position += 1
    for name in sorted(options.keys() & _UNREAD):
        logger.info(
            "--%s has no effect: open-instruct does not read it, or it changes nothing here.",
            name,
        )
    for name in options.keys() - _KEYS.keys() - set(_OTHERS) - _UNREAD:
        # An option that were ignored would change the run without a word.
        if name in NO_COUNTERPART:
            raise ConfigError(
                "this option has no counterpart",
                field=f"--{name}",
                fix=NO_COUNTERPART[name],
            )
        raise ConfigError.unknown(
            "there is no such option",
            name,
            [*_KEYS, *_OTHERS],
            field=f"--{name}",
        )
    # open-instruct's sizes are those of one process, and ours of all.
    return [*kept, *_translated(options, _num_processes(kept))]


def _num_processes(words: Sequence[str]) -> int:
    """How many processes will train: torchrun's, or those that the overrides ask for."""
    # torchrun sets it for each of its processes.
    world_size = os.environ.get("WORLD_SIZE")
    if world_size:
        return int(world_size)
    number = 1
    for word in words:
        key, _, value = word.partition("=")
        if key in ("cluster.num_nodes", "cluster.gpus_per_node") and value.isdecimal():
            number *= max(1, int(value))
    return number


def _translated(options: Mapping[str, list[str]], num_processes: int) -> list[str]:
    """Overrides of `treeward train` that mean the same as these options."""
    words = []
    for name, key in _KEYS.items():
        if name in options:
            words.append(f"{key}={_value(options, name)}")
    if "add_bos" in options:
        num_bos = int(_value(options, "add_bos") == "true")
        words.append(f"policy.tokenizer.num_bos={num_bos}")
    mixers = {"train": "dataset_mixer_list", "validation": "dataset_mixer_eval_list"}
    for part, name in mixers.items():
        if name in options:
            splits = options.get(f"{name}_splits", ["train"])
            sets = _mixed(name, options[name], splits)
            words.append(f"data.{part}={_yaml(sets)}")
    # The defaults below are open-instruct's.
    if options.keys() & {"exp_name", "output_dir"}:
        folder = _value(options, "output_dir", "output")
        name = _value(options, "exp_name", "reward_modeling")
        words.append(f"checkpointing.checkpoint_dir={folder}/{name}")
    if options.keys() & {"gradient_accumulation_steps", "per_device_train_batch_size"}:
        size = _number(options, "per_device_train_batch_size", "1")
        steps = _number(options, "gradient_accumulation_steps", "8")
        words.append(f"policy.train_global_batch_size={size * steps * num_processes}")
    if options.keys() & {"lr_scheduler_type", "warm_up_steps"}:
        schedule = {
            "name": _value(options, "lr_scheduler_type", "linear"),
            "warmup_steps": _number(options, "warm_up_steps", "0"),
        }
        words.append(f"policy.scheduler={_yaml(schedule)}")
    if "hf_repo_id" in options:
        repository = _value(options, "hf_repo_id")
        if "hf_entity" in options:
            repository = f"{_value(options, 'hf_entity')}/{repository}"
        words.append(f"hub.repo_id={repository}")
    return words


def _value(options: Mapping[str, list[str]], name: str, default: str | None = None) -> str:
    """The value of an option; an option without one is true."""
    if name not in options and default is not None:
        return default
    values = options[name]
    if len(values) > 1:
        raise ConfigError(
            "this option has one value",
            field=f"--{name}",
            got=" ".join(values),
            need="one value",
        )
    value = values[0] if values else "true"
    if value in ("True", "False"):
        return value.lower()
    return value


def _number(options: Mapping[str, list[str]], name: str, default: str) -> int:
    """The value of an option that is a whole number."""
    value = _value(options, name, default)
    if not value.isdecimal():
        raise ConfigError(
            "this option is a whole number", field=f"--{name}", got=value, need=f"as {default}"
        )
    return int(value)


def _mixed(name: str, words: Sequence[str], splits: Sequence[str]) -> list[dict[str, Any]]:
    """The sets of the mixer list `name`: names and shares in turn; a share that is a whole number
    counts rows.
    """
    if len(words) % 2 == 1:
        raise ConfigError(
            "the list of sets is not whole",
            field=f"--{name}",
            got=" ".join(words),
            need="a name and a share, or a number of rows, for each set",
        )
    num_sets = len(words) // 2
    # One split may stand for all sets.
    if len(splits) == 1:
        splits = [*splits] * num_sets
    if len(splits) != num_sets:
        raise ConfigError(
            "there is not one split for each set",
            field=f"--{name}_splits",
            got=" ".join(splits) or "nothing",
            need=f"one split, or {num_sets}",
        )
    sets = []
    for path, amount, split in zip(words[::2], words[1::2], splits, strict=True):
        section: dict[str, Any] = {"dataset_name": "auto", "data_path": path, "split": split}
        if amount.isdecimal():
            section["split"] = f"{split}[:{amount}]"
        else:
            try:
                section["weight"] = float(amount)
            except ValueError:
                raise ConfigError(
                    "this is no share of a set",
                    field=f"--{name}",
                    got=f"{path} {amount}",
                    need="a share as 0.5, or a number of rows",
                ) from None
        sets.append(section)
    return sets


def _yaml(value: Any) -> str:
    # On one line, which a word of the command line is.
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    return text.strip()


def main(words: Sequence[str]) -> int:
    """Train; the exit code, 2 for a mistake in the options."""
    configure_logging()
    try:
        translated = overrides(words)
    except ConfigError as error:
        sys.stderr.write(f"reward_modeling: {error}\n")
        return 2
    return run(["train", *translated])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
