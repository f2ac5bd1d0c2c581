"""Keys and values of TRL and verl, as docs/coming-to-grpo.md lists them, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["KEYS_ELSEWHERE", "VALUES_ELSEWHERE", "command_of"]

KEYS_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "beta": ("loss_fn.reference_policy_kl_penalty",),
    "clip_ratio": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    "clip_ratio_c": ("loss_fn.ratio_clip_c",),
    "clip_ratio_high": ("loss_fn.ratio_clip_max",),
    "clip_ratio_low": ("loss_fn.ratio_clip_min",),
    "delta": ("loss_fn.ratio_clip_c",),
    "epsilon": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    "epsilon_high": ("loss_fn.ratio_clip_max",),
    "kl_coef": ("loss_fn.reference_policy_kl_penalty",),
    "kl_loss_coef": ("loss_fn.reference_policy_kl_penalty",),
    "kl_loss_type": ("loss_fn.reference_policy_kl_type",),
    "learning_rate": ("policy.optimizer.kwargs.lr",),
    "lr": ("policy.optimizer.kwargs.lr",),
    "max_completion_length": ("policy.generation.max_new_tokens",),
    "max_prompt_length": ("data.max_input_seq_length",),
    "max_steps": ("grpo.max_num_steps", "rm.max_num_steps"),
    "norm_adv_by_std_in_grpo": ("grpo.normalize_rewards",),
    "num_generations": ("grpo.num_generations_per_prompt",),
    "num_generations_eval": ("grpo.num_val_generations",),
    "num_iterations": ("grpo.updates_per_batch",),
    "num_train_epochs": ("grpo.max_num_epochs", "rm.max_num_epochs"),
    "ppo_epochs": ("grpo.updates_per_batch",),
    "ppo_mini_batch_size": ("policy.train_global_batch_size",),
}
"""A key of TRL or verl -> its full names here; those that a run has count."""

VALUES_ELSEWHERE: Mapping[str, str] = {"rloo": "leave_one_out", "low_var_kl": "k3", "mse": "k2", "kl": "k1"}
"""A value of TRL or verl -> the same value here."""

_COMMANDS = {
    **dict.fromkeys(("env", "grpo", "loss_fn", "policy.generation", "policy.logprob_chunk_size"), "treeward grpo"),
    **dict.fromkeys(("rm", "hub", "evaluation", "reward_shaping"), "treeward train"),
}


def command_of(location: Sequence[str]) -> str | None:
    """The only command that reads a key, as `treeward grpo` for `("env",)`; None for a key of both or of neither."""
    return _COMMANDS.get(".".join(location))
