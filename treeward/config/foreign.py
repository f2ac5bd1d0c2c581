"""Names of other toolkits: NeMo RL's keys that mean nothing here, and what keys of TRL and verl are called here.

A section finds its entries by the name of its class, or of a class that it derives from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["KEYS_ELSEWHERE", "MUST_BE_OFF", "VALUES_ELSEWHERE", "WITHOUT_EFFECT", "command_of"]

WITHOUT_EFFECT: Mapping[str, str] = {
    "BatchingConfig": "algorithm fuse_loss logprob_mb_tokens max_sequences_per_bin sequence_length_round",
    "CheckpointingConfig": "save_consolidated model_cache_dir model_repo_id is_async",
    "GRPOCheckpointingConfig": "save_data_plane load_replay_buffer",
    "ClusterConfig": "master_port_range segment_size",
    "ColocatedConfig": "resources",
    "DataConfig": "processor env_name num_workers",
    "DatasetConfig": "processor env_name",
    "GenerationConfig": "vllm_kwargs sglang_cfg sglang_kwargs mcore_generation_config val_temperature",
    "GRPOConfig": "calculate_advantages_on_gpu deduplicate_multimodal_data debug_payload_metrics",
    "LoggerConfig": "num_val_samples_to_print monitor_gpus gpu_monitoring swanlab",
    "LoraConfig": "use_triton dropout_position",
    "MathEnvironmentConfig": "stop_strings",
    "NemoGymConfig": "entrypoint domain verified verified_url description value name datasets expose_tools_over_mcp "
    "license skills num_workers",
    "PromptDataConfig": "num_workers use_multiple_dataloader",
    "PromptSetConfig": "repeat download_dir",
    "RewardModelEnvironmentConfig": "logprob_batch_size logprob_chunk_size offload_optimizer_for_logprob generation "
    "max_grad_norm make_sequence_length_divisible_by processor env_name",
    "ScoringDTensorConfig": "lora_cfg",
    "ShardingConfig": "_v2 clear_cache_every_n_steps env_vars sequence_parallel",
    "TrainedModelConfig": "logprob_batch_size offload_optimizer_for_logprob make_sequence_length_divisible_by "
    "refit_buffer_size_gb",
}
"""Section -> keys that are accepted in any state, because what they set is always so here, or changes no result."""

_CANNOT = "treeward has no such feature"
MUST_BE_OFF: Mapping[str, Mapping[str, str]] = {
    "DTensorConfig": {"lora_cfg": "the whole reward model is trained: set policy.dtensor_cfg.lora_cfg.enabled=false"},
    "GRPOConfig": {
        "async_grpo": "every completion is sampled by the policy that learns from it",
        "advantage_clip_low": "loss_fn.ratio_clip_c limits negative advantages",
        "advantage_clip_high": "grpo.advantage_std_floor limits advantages",
        "seq_logprob_error_threshold": "token_mult_prob_error is logged",
        "val_start_at": "grpo.val_period says when to validate",
        "stop_at_validation_metric": "grpo.watch.stop ends a run that exploits its reward",
        "stop_at_validation_threshold": "grpo.watch.stop ends a run that exploits its reward",
        "invalid_tool_call_advantage": "there are no tools",
        "malformed_thinking_advantage": "use an environment with a rule for the form",
        "interleave_rollouts": _CANNOT,
    },
    "GRPOPolicyConfig": {
        "reward_model_cfg": "train a reward model with `treeward train`; the reward of GRPO is env.reward_model",
        "draft": "completions are sampled token by token",
        "lora_cfg": "move the section to policy.dtensor_cfg.lora_cfg",
        "router_replay": _CANNOT,
    },
    "GRPORunConfig": {
        "async_rl": "every completion is sampled by the policy that learns from it",
        "data_plane": _CANNOT,
        "on_policy_distillation": _CANNOT,
        "reward_penalties": "use an environment with a rule for the form",
        "rollout_checkpointing": _CANNOT,
        "rollout_recovery": _CANNOT,
        "telemetry": "logger says where metrics go",
        "token_capture": _CANNOT,
    },
    "LoggerConfig": {"swanlab_enabled": "enable tensorboard, wandb or mlflow; metrics.jsonl is always written"},
    "OverlongShapingConfig": {"stop_properly_penalty_coef": "use grpo.truncated=penalty, which is subtracted"},
    "PolicyLossConfig": {
        "disable_ppo_ratio": "set loss_fn.force_on_policy_ratio=true for one update per batch without ratios",
        "use_cispo": "use the clipped surrogate",
        "seq_logprob_error_in_loss": "token_mult_prob_error is logged",
        "positive_example_nll_weight": _CANNOT,
        "truncated_importance_sampling_ratio_min": "only large weights are cut, as tis does",
    },
    "RewardModelEnvironmentConfig": {
        "checkpoint_path": "give the folder of the exported model as model_name",
        "megatron_cfg": "the model runs on PyTorch: set megatron_cfg.enabled=false",
    },
    "TrainedModelConfig": {"megatron_cfg": "the model runs on PyTorch: set megatron_cfg.enabled=false"},
}
"""Section -> keys of features that treeward does not have, with the alternative. They are accepted while they are off:
null, false, 0, -1, empty, or a section in which nothing is on."""

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
