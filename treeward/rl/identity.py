"""`identity_of`: what a resumed run must have in common with the run that it continues.

It has everything that the weights depend on, also the weights of the first policy and of the reward models, which the
configuration only names. It leaves out keys that cannot change a reward: the address of a judge, the number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import is_enabled
from treeward.data.prompt_encoding import EncodedPrompts
from treeward.data.rendering import Renderer
from treeward.model.contract import CONTRACT_FILE
from treeward.training.setup import short_hash

__all__ = ["identity_of"]

_NOT_OF_THE_RUN = {
    *("max_num_epochs", "max_num_steps", "val_period", "val_at_start", "val_at_end", "val_batch_size"),
    *("watch", "log_period", "num_logged_samples", "gold_environment"),
    *("environment_timeout_seconds", "max_failed_share", "environments_on_ray"),
}
"""Keys of `grpo` that a resumed run may change: no weight depends on them, nor how many prompts a validation completes
and how often (`max_val_samples`, `num_val_generations`), without which its numbers could not be compared."""
_NOT_OF_THE_REWARD = {
    *("resources", "num_replicas", "cpus_per_replica", "batch_size", "batch_tokens", "dtensor_cfg", "cpu_offload"),
    *("activation_checkpointing", "dynamic_batching", "sequence_packing", "megatron_cfg", "max_retries"),
    *("worker_timeout_seconds", "start_timeout_seconds", "step_timeout_seconds", "timeout_seconds"),
    *("workers", "num_workers", "max_concurrency", "base_url", "api_key_env"),
}
"""Keys of our environments that change where and how fast a reward is computed, or whether there is one in time."""


def identity_of(
    config: GRPORunConfig, renderer: Renderer, prompts: EncodedPrompts, held_out: EncodedPrompts | None
) -> dict[str, Any]:
    """By the name that a person knows it by, as JSON."""
    policy = config.policy
    sampled_by = {"temperature", "top_p", "top_k", "stop_token_ids", "stop_strings", "max_new_tokens"}
    trained_by = {"train_global_batch_size", "max_total_sequence_length", "precision", "max_grad_norm"}
    return {
        "the policy": _with_weights(policy.model_name) or policy.architecture,
        "the tokenizer or template": short_hash(renderer.fingerprint),
        "the training prompts": short_hash(prompts.fingerprint),
        "the validation prompts": "none" if held_out is None else short_hash(held_out.fingerprint),
        "data": {"shuffle": config.data.shuffle},
        "grpo": config.grpo.model_dump(mode="json", exclude=_NOT_OF_THE_RUN),
        "loss_fn": config.loss_fn.model_dump(mode="json"),
        "env": {name: _section(section) for name, section in config.env.items() if is_enabled(section)},
        "policy": {
            **policy.model_dump(mode="json", include={*trained_by, "optimizer", "scheduler", "hf_config_overrides"}),
            "generation": policy.generation.model_dump(mode="json", include=sampled_by),
            "dtensor_cfg.lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json"),
        },
    }


def _section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an environment's section that rewards depend on, with the weights of the models that it names.

    Of classes that are not ours every key counts.
    """
    left_out = set() if "." in str(section.get("type", "")) else _NOT_OF_THE_REWARD
    kept = {key: value for key, value in section.items() if key not in left_out}
    if isinstance(kept.get("members"), Mapping):  # of a hybrid; a member's own keys may stand in `settings`, or beside
        members = {name: {**(one.get("settings") or {}), **one} for name, one in kept["members"].items()}
        kept["members"] = {name: _section({**one, "settings": None}) for name, one in members.items()}
    if "model_name" in kept:
        names = kept["model_name"]
        kept["model_name"] = [_with_weights(one) for one in ([names] if isinstance(names, str) else names)]
    return kept


def _with_weights(name: str | None) -> str | None:
    """The hash of a model's weights, wherever its folder lies; the name of a model without a folder of safetensors."""
    folder = Path(name or "").expanduser()
    weights = sorted(folder.glob("*.safetensors")) if name else []
    if not weights:
        return name
    digest = hashlib.blake2b()
    for path in (*weights, folder / "config.json", folder / CONTRACT_FILE):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return f"weights {short_hash(digest.hexdigest())}"
