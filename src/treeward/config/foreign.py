"""Names of other toolkits: NeMo RL's keys that mean nothing here, and what keys of TRL and verl are called here.

A section finds its entries by the name of its class, or of a class that it derives from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Only(NamedTuple):
    """A key that can have these values alone, which say how it is here; `fix`: the remedy for others."""

    values: tuple[Any, ...]
    fix: str


Rule = str | Only | None

_ON_POLICY = "every completion is sampled by the policy that learns from it"
_RESUME = "remove the section; a resumed run samples the step again, with the same seeds"
_STOP = "set it to null; grpo.watch.stop_on ends a run that exploits its reward"
_RULE = "use an environment with a rule for the form of completions instead"
_SHARDS = "save memory with dtensor_cfg.activation_checkpointing or fewer policy.train_micro_batch_tokens"


def _unread(keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys.split())


FOREIGN_KEYS: Mapping[str, Mapping[str, Rule]] = {
    "CheckpointingConfig": _unread("save_consolidated save_optimizer model_cache_dir model_repo_id is_async")
    | {"model_save_format": Only(("safetensors",), "set it to safetensors: pickled weights would be code")},
    "GRPOCheckpointingConfig": _unread("save_data_plane load_replay_buffer"),
    "ClusterConfig": _unread("master_port_range* segment_size"),
    "DataConfig": _unread("processor env_name num_workers"),
    "DatasetConfig": _unread("processor env_name"),
    "GRPOConfig": _unread("calculate_advantages_on_gpu deduplicate_multimodal_data debug_payload_metrics")
    | {
        "async_grpo": f"set grpo.async_grpo.enabled=false: {_ON_POLICY}",
        "environment": "name it as env_name of data.default, or of each set",
        **dict.fromkeys(("stop_at_validation_metric", "stop_at_validation_threshold"), _STOP),
        "invalid_tool_call_advantage": "set it to null: there are no tools",
        "malformed_thinking_advantage": f"set it to null; {_RULE}",
        "interleave_rollouts": f"set it to false: {_ON_POLICY}",
        "max_rollout_turns": Only((1,), "set it to 1: a prompt is completed once"),
    },
    "RewardCalibration": _unread("heads"),
    "RewardShapingConfig": _unread("reference_key missing_constants")
    | {"reference": "remove it: an environment of type custom can compare with references"},
    "GRPOPolicyConfig": _unread("logprob_chunk_size")
    | {
        "reward_model_cfg": "remove it; `treeward train` trains a reward model, and env.reward_model rewards with one",
        "draft": "set policy.draft.enabled=false: completions are sampled token by token",
        "router_replay": "set policy.router_replay.enabled=false: experts are routed anew in each update",
    },
    # `data_plane` says how the data of a step travel between processes.
    "GRPORunConfig": _unread("data_plane")
    | {
        "async_rl": f"remove the section: {_ON_POLICY}",
        "on_policy_distillation": "remove the section; a teacher can be an environment of your own",
        "reward_penalties": f"remove the section; {_RULE}",
        **dict.fromkeys(("rollout_checkpointing", "rollout_recovery"), _RESUME),
        "telemetry": "remove the section; logger says where metrics go",
        "token_capture": "remove the section; samples.jsonl has completions of each validation",
    },
    "GenerationConfig": _unread(
        "sglang_* mcore_generation_config port_range_* real_quant_* refit_* use_async_rollouts "
        "val_temperature val_top_?"
    ),
    "JudgePromptConfig": {"num_samples": Only((1,), "a question is asked once; use_logprobs takes the expectation")},
    "HybridEnvironmentConfig": {"fallback_on": Only((["failed", "wrong"],), "remove it: both go to the next member")},
    "LengthCurve": _unread("unit"),
    "LengthPenaltyConfig": {"unit": Only(("characters",), "give characters, about 4 to a token of English")},
    "LoggerConfig": _unread("num_val_samples_to_print monitor_gpus gpu_monitoring swanlab")
    | {"swanlab_enabled": "set it to false; enable tensorboard, wandb or mlflow, metrics.jsonl is always written"},
    "LoraConfig": _unread("use_triton dropout_position lora_A_init")
    | {"dropout": "set it to 0: scores and log-probabilities are functions of the tokens, in training too"},
    "MathEnvironmentConfig": _unread("stop_strings")
    | {
        "verifier_type": Only(("math",), "for a choice among letters use the rules exact_match or regex"),
    },
    "NemoGymConfig": _unread(
        "entrypoint domain verified verified_url description value datasets expose_tools_over_mcp license skills "
        "num_workers"
    ),
    "OverlongShapingConfig": {
        "stop_properly_penalty_coef": "set it to null, and grpo.overlong_filtering=true: a factor would raise negative "
        "rewards"
    },
    "PolicyLossConfig": {
        "disable_ppo_ratio": "set it to false; with one update from a batch the ratio is 1",
        "use_cispo": "set it to false: the loss is the clipped surrogate",
        "seq_logprob_error_in_loss": "set it to false; token_mult_prob_error is logged",
        "positive_example_nll_weight": "set it to 0, and fine-tune the policy on examples first",
    },
    "PromptDataConfig": _unread("num_workers num_prompts_per_dataloader custom_dataloader")
    | {"use_multiple_dataloader": "set it to false; data.train[i].weight says how often each set comes"},
    "PromptSetConfig": _unread("repeat download_dir")
    | {
        "processor": Only(
            ("math_hf_data_processor", "math_data_processor"), "remove it: the format of the set says how rows are read"
        )
    },
    "RewardModelEnvironmentConfig": _unread(
        "enabled logprob_batch_size logprob_chunk_size offload_optimizer_for_logprob generation max_grad_norm "
        "make_sequence_length_divisible_by processor env_name"
    )
    | {
        "checkpoint_path": "give the folder of the exported model as model_name",
        "megatron_cfg": "set megatron_cfg.enabled=false: the model runs on PyTorch",
    },
    "RewardModelRunConfig": {"evaluation": "remove the section: `treeward eval MODEL --data FILE` writes the report"},
    "ScoringDTensorConfig": {
        "lora_cfg": "set lora_cfg.enabled=false; merge adapters into their model with peft's merge_and_unload, and "
        "give that folder as model_name"
    },
    "ShardingConfig": _unread(
        "_v2 automodel_kwargs clear_cache_every_n_steps enabled env_vars expert_parallel_size moe_* sequence_parallel"
    )
    | {
        "context_parallel_size": Only((1,), f"set it to 1; {_SHARDS}"),
        "custom_parallel_plan": f"set it to null; {_SHARDS}",
    },
    "TrainedModelConfig": _unread(
        "logprob_batch_size offload_optimizer_for_logprob make_sequence_length_divisible_by refit_buffer_size_gb"
    )
    | {
        "lora_cfg": "move the section to policy.dtensor_cfg.lora_cfg",
        "megatron_cfg": "set policy.megatron_cfg.enabled=false: the model runs on PyTorch",
    },
    "TokenizerConfig": _unread("use_fast*"),
    "VllmConfig": _unread(
        "async_engine cap_max_tokens_to_context enable_* env_vars expose_http_server http_server_* load_format "
        "logprobs_mode num_first_layers_in_bf16 num_last_layers_in_bf16 skip_tokenizer_init use_deep_gemm use_tqdm "
        "vllm_metrics_logger_interval *_refit_* reset_*_after_weight_update"
    )
    | {
        "pipeline_parallel_size": Only((1,), "set it to 1: an engine lies on one node"),
        "expert_parallel_size": Only((1,), "set policy.generation.vllm_kwargs={enable_expert_parallel: true} instead"),
    },
}
"""Section -> keys, or patterns of keys, that it accepts and does not have. None: in any state, because what the key
sets is always so here, or changes no result. A text, the remedy: only while the key is off (null, false, 0, -1, empty,
or a section in which nothing is on). `Only`: off too, or with some values."""

_TABLE = """
bf16: policy.precision
beta kl_coef kl_loss_coef: loss_fn.reference_policy_kl_penalty
clip_ratio epsilon: loss_fn.ratio_clip_min loss_fn.ratio_clip_max
clip_ratio_c delta: loss_fn.ratio_clip_c
clip_ratio_high epsilon_high: loss_fn.ratio_clip_max
clip_ratio_low: loss_fn.ratio_clip_min
kl_loss_type: loss_fn.reference_policy_kl_type
lora_alpha: policy.dtensor_cfg.lora_cfg.alpha
lora_r lora_rank: policy.dtensor_cfg.lora_cfg.dim
use_peft: policy.dtensor_cfg.lora_cfg.enabled
eval_steps: grpo.val_period rm.val_period
gradient_accumulation_steps: policy.train_global_batch_size
gradient_checkpointing: policy.dtensor_cfg.activation_checkpointing
learning_rate lr: policy.optimizer.kwargs.lr
max_completion_length: policy.generation.max_new_tokens
max_length max_token_length: policy.max_total_sequence_length
max_prompt_length: data.max_input_seq_length
max_steps: grpo.max_num_steps rm.max_num_steps
norm_adv_by_std_in_grpo: grpo.normalize_rewards
num_generations: grpo.num_generations_per_prompt
num_generations_eval: grpo.num_val_generations
num_iterations ppo_epochs: grpo.updates_per_batch
num_train_epochs: grpo.max_num_epochs rm.max_num_epochs
output_dir: checkpointing.checkpoint_dir
per_device_eval_batch_size: rm.val_micro_batch_size
per_device_train_batch_size: policy.train_micro_batch_size
ppo_mini_batch_size: policy.train_global_batch_size
save_steps: checkpointing.save_period
"""
_ROWS = [row.split(": ") for row in _TABLE.strip().splitlines()]
KEYS_ELSEWHERE: Mapping[str, list[str]] = {key: ours.split() for theirs, ours in _ROWS for key in theirs.split()}
"""A key of TRL or verl -> its full names here; those whose section a run has count."""

_ON_ONE_DEVICE = "It counts on each device"
KEY_NOTES: Mapping[str, str] = {
    "per_device_train_batch_size": f"{_ON_ONE_DEVICE}; policy.train_global_batch_size counts all of a step.",
    "per_device_eval_batch_size": f"{_ON_ONE_DEVICE}; rm.val_global_batch_size counts all of a batch.",
    "gradient_accumulation_steps": "That is its product with the batch size of a device and the number of devices.",
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
    **dict.fromkeys(("env", "grpo", "loss_fn", "policy.generation", "policy.logprob_chunk_size"), "treeward grpo"),
    **dict.fromkeys(("rm", "hub"), "treeward train"),
}
"""Keys of a run -> the only command that reads them."""
