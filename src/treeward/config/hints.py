"""Hints in errors for somebody who writes a key or a value of TRL or verl, or a key of the other
command's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KEYS_ELSEWHERE: Mapping[str, Sequence[str]] = {
    "bf16": ("policy.precision",),
    "beta": ("loss_fn.reference_policy_kl_penalty",),
    "kl_coef": ("loss_fn.reference_policy_kl_penalty",),
    "kl_loss_coef": ("loss_fn.reference_policy_kl_penalty",),
    "clip_ratio": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    "epsilon": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    "clip_ratio_c": ("loss_fn.ratio_clip_c",),
    "delta": ("loss_fn.ratio_clip_c",),
    "clip_ratio_high": ("loss_fn.ratio_clip_max",),
    "epsilon_high": ("loss_fn.ratio_clip_max",),
    "clip_ratio_low": ("loss_fn.ratio_clip_min",),
    "kl_loss_type": ("loss_fn.reference_policy_kl_type",),
    "lora_alpha": ("policy.dtensor_cfg.lora_cfg.alpha",),
    "lora_r": ("policy.dtensor_cfg.lora_cfg.dim",),
    "lora_rank": ("policy.dtensor_cfg.lora_cfg.dim",),
    "use_peft": ("policy.dtensor_cfg.lora_cfg.enabled",),
    "eval_steps": ("grpo.val_period", "rm.val_period"),
    "gradient_accumulation_steps": ("policy.train_global_batch_size",),
    "gradient_checkpointing": ("policy.dtensor_cfg.activation_checkpointing",),
    "learning_rate": ("policy.optimizer.kwargs.lr",),
    "lr": ("policy.optimizer.kwargs.lr",),
    "max_completion_length": ("policy.generation.max_new_tokens",),
    "max_length": ("policy.max_total_sequence_length",),
    "max_token_length": ("policy.max_total_sequence_length",),
    "max_prompt_length": ("data.max_input_seq_length",),
    "max_steps": ("grpo.max_num_steps", "rm.max_num_steps"),
    "norm_adv_by_std_in_grpo": ("grpo.normalize_rewards",),
    "num_generations": ("grpo.num_generations_per_prompt",),
    "num_generations_eval": ("grpo.num_val_generations",),
    "num_iterations": ("grpo.updates_per_batch",),
    "ppo_epochs": ("grpo.updates_per_batch",),
    "num_train_epochs": ("grpo.max_num_epochs", "rm.max_num_epochs"),
    "output_dir": ("checkpointing.checkpoint_dir",),
    "per_device_eval_batch_size": ("rm.val_micro_batch_size",),
    "per_device_train_batch_size": ("policy.train_micro_batch_size",),
    "ppo_mini_batch_size": ("policy.train_global_batch_size",),
    "save_steps": ("checkpointing.save_period",),
}
"""A key of TRL or verl -> its full names here; those whose section a run has count."""

# TRL counts what one device takes; ours are of a whole step, whatever the devices.
_ON_ONE_DEVICE = "It counts on each device"
KEY_NOTES: Mapping[str, str] = {
    "per_device_train_batch_size": (
        f"{_ON_ONE_DEVICE}; policy.train_global_batch_size counts all of a step."
    ),
    "per_device_eval_batch_size": (
        f"{_ON_ONE_DEVICE}; rm.val_global_batch_size counts all of a batch."
    ),
    "gradient_accumulation_steps": (
        "That is its product with the batch size of a device and the number of devices."
    ),
    "max_length": "It counts the tokens of a prompt with its completion.",
    "max_token_length": "It counts the tokens of a prompt with its completion.",
    "bf16": "policy.precision=bfloat16 is true, float32 false.",
}
"""What somebody who writes a key of `KEYS_ELSEWHERE` should know of ours."""

VALUES_ELSEWHERE: Mapping[str, str] = {
    "rloo": "leave_one_out",
    "low_var_kl": "k3_unweighted",
    "mse": "k2_unweighted",
    "kl": "k1",
}
"""A value of TRL or verl -> the same value here."""

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("env", "grpo", "loss_fn", "policy.generation", "policy.logprob_chunk_size"),
        "treeward grpo",
    ),
    **dict.fromkeys(("rm", "hub"), "treeward train"),
}
"""Keys of a run -> the only command that reads them."""
