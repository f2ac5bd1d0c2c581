"""`identity_of`: what a resumed run must have in common with the one that it continues.

    check_identity(checkpoint.path, identity_of(config, renderer, prompts, held_out))

Whatever the weights follow from is in it, also what lies in folders that the configuration only names: the weights of
the first policy and of the reward models. What cannot change a reward is not: where a judge listens, how many workers
there are, how long one waits for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import is_enabled
from treeward.data.prompt_encoding import EncodedPrompts
from treeward.data.rendering import Renderer
from treeward.model.contract import CONTRACT_FILE

__all__ = ["identity_of"]

_NOT_OF_THE_RUN = {
    *("max_num_epochs", "max_num_steps", "val_period", "val_at_start", "val_at_end", "val_batch_size"),
    *("watch", "log_period", "num_logged_samples", "gold_environment"),
    *("environment_timeout_seconds", "max_failed_share", "environments_on_ray"),
}
"""Keys of `grpo` that a resumed run may change: no weight depends on them, nor how many prompts a validation completes
and how often (`max_val_samples`, `num_val_generations`), without which its numbers could not be compared."""

_RULES = ("workers", "num_workers", "timeout_seconds")
_NOT_OF_THE_REWARD: Mapping[str, tuple[str, ...]] = {
    "reward_model": (
        *("resources", "num_replicas", "cpus_per_replica", "batch_size", "batch_tokens", "dtensor_cfg", "cpu_offload"),
        *("activation_checkpointing", "dynamic_batching", "sequence_packing", "megatron_cfg", "max_retries"),
        *("worker_timeout_seconds", "start_timeout_seconds"),
    ),
    "rules": _RULES,
    "math": _RULES,
    "judge": (
        *("base_url", "api_key_env", "max_concurrency", "max_retries", "timeout_seconds", "step_timeout_seconds"),
    ),
    "custom": ("max_concurrency",),
}
"""By kind of environment, keys that change where and how fast a reward is computed, or whether there is one in time.
Of kinds that are not ours every key counts."""


def identity_of(
    config: GRPORunConfig, renderer: Renderer, prompts: EncodedPrompts, held_out: EncodedPrompts | None
) -> dict[str, str]:
    """By the name that a person knows it by, each as a short text."""
    policy, generation = config.policy, config.policy.generation
    grpo = config.grpo.model_dump(mode="json", exclude=_NOT_OF_THE_RUN)
    sampling = generation.model_dump(
        mode="json", include={"temperature", "top_p", "top_k", "stop_token_ids", "stop_strings", "max_new_tokens"}
    )
    return {
        "the policy": _with_weights(policy.model_name) or json.dumps(policy.architecture, sort_keys=True),
        "the tokenizer or template": _short(renderer.fingerprint),
        "the training prompts": _short(prompts.fingerprint),
        "the validation prompts": "none" if held_out is None else _short(held_out.fingerprint),
        "grpo": json.dumps(grpo, sort_keys=True),
        "loss_fn": json.dumps(config.loss_fn.model_dump(mode="json"), sort_keys=True),
        "env": json.dumps(_of_the_rewards(config.env), sort_keys=True, default=str),
        "policy.generation": json.dumps(sampling, sort_keys=True),
        "policy.train_global_batch_size": str(policy.train_global_batch_size),
        "policy.max_total_sequence_length": str(policy.max_total_sequence_length),
        "policy.optimizer": json.dumps(policy.optimizer.model_dump(mode="json"), sort_keys=True),
        "policy.scheduler": json.dumps(policy.scheduler.model_dump(mode="json"), sort_keys=True),
        "policy.precision": policy.precision,
        "policy.max_grad_norm": str(policy.max_grad_norm),
        "policy.hf_config_overrides": json.dumps(policy.hf_config_overrides, sort_keys=True),
        "policy.dtensor_cfg.lora_cfg": json.dumps(policy.dtensor_cfg.lora_cfg.model_dump(mode="json"), sort_keys=True),
        "data.shuffle": str(config.data.shuffle),
    }


def _of_the_rewards(env: Mapping[str, Any]) -> dict[str, Any]:
    """What the rewards follow from: of each section the keys that count, with the weights that it names."""
    return {name: _section(name, section) for name, section in env.items() if is_enabled(section)}


def _section(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(section.get("type") or name)
    left_out = _NOT_OF_THE_REWARD.get(kind, ())
    kept = {key: value for key, value in section.items() if key not in left_out}
    if kind == "hybrid" and isinstance(kept.get("members"), Mapping):
        kept["members"] = {member: _section(member, _unfolded(given)) for member, given in kept["members"].items()}
    if "model_name" in kept:
        names = kept["model_name"]
        kept["model_name"] = [_with_weights(one) for one in ([names] if isinstance(names, str) else names)]
    return kept


def _unfolded(member: Mapping[str, Any]) -> dict[str, Any]:
    """A member of a hybrid, whose own keys may stand in `settings` or beside it."""
    own = {key: value for key, value in member.items() if key != "settings"}
    return {**(member.get("settings") or {}), **own}


def _with_weights(name: str | None) -> str | None:
    """What the folder of a model holds now, wherever it lies: with other weights the run would be another. The name of
    a model that has no folder of safetensors.
    """
    folder = None if name is None else Path(name).expanduser()
    weights = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if folder is None or not weights:
        return name
    digests = []
    for path in (*weights, folder / "config.json", folder / CONTRACT_FILE):
        if path.is_file():
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "blake2b").hexdigest())
    return f"weights {_short(' '.join(digests))}"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
