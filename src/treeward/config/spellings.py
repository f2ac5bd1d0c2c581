"""The table of other spellings of a configuration, NeMo RL's above all: a `Spelling` for each
section.

    SPELLINGS[grpo.PolicyLossConfig].renamed     # {"use_kl_in_reward": "kl_in_reward"}

A new name of a key, a key without effect and a key that is refused are each a word in the section's
entry. What no name can say is a function here, from what the file has in the section to the
section's own form. `nemo_rl` reads the table; the sections know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treeward.config import (
    checkpointing,
    data,
    grpo,
    grpo_policy,
    policy,
    reward_environments,
    run,
    scoring,
)
from treeward.config.base import Strict
from treeward.config.grpo_run import GRPORunConfig
from treeward.errors import ConfigError, nearest_name

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a file may have in a section beside the section's own keys. A key may be a pattern, as
    `refit_*`.

    `unread`: keys that are left out, with words between spaces: what they set is always so here, or
    changes no result. `off`: key -> remedy. Left out while it is off: null, false, 0, -1, empty, or
    a section in which nothing is on. `fixed`: key -> values and remedy. Left out while it is off or
    has one of these values, which say how it is here. `renamed`: another name of a key -> the key.
    `forms`: keys that `rewrite` turns into keys of the section. `rewrite`: from what the file has
    in the section to the section's form. It may raise `ConfigError`, whose `field` begins at the
    section. `sets`: the section of one data set, where the section holds sets in any of the forms
    of `data_forms`.
    """

    unread: str = ""
    off: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    forms: Sequence[str] = ()
    rewrite: Callable[[Values], Values] | None = None
    sets: type[data.SetConfig] | None = None


# Forms that are more than another name of a key.


_BATCHING_SECTIONS = ("dynamic_batching", "sequence_packing")
_BATCHING_KEYS = ("enabled", "train_mb_tokens")
_BATCHING_KEYS_WITHOUT_EFFECT = (
    "algorithm",
    "fuse_loss",
    "logprob_mb_tokens",
    "max_sequences_per_bin",
    "microbatch_order",
    "sequence_length_round",
)


def _with_batching_budget(values: Values, tokens_key: str, size_key: str) -> Values:
    """Sections on batching: one that is enabled sets the token budget of a forward pass by
    `train_mb_tokens`.

    The budget stands under `tokens_key`, unless that is given, and `size_key` does not count where
    a section sets it.
    """
    known = (*_BATCHING_KEYS, *_BATCHING_KEYS_WITHOUT_EFFECT)
    result = {key: value for key, value in values.items() if key not in _BATCHING_SECTIONS}
    for name in _BATCHING_SECTIONS:
        section = values.get(name) or {}
        if not isinstance(section, Mapping):
            need = "its keys, as enabled: false"
            raise ConfigError("this is not a section", field=name, got=section, need=need)
        for key in section.keys() - set(known):
            field_name = f"{name}.{key}"
            raise ConfigError.unknown("there is no such key", str(key), known, field=field_name)
        sets_budget = section.get("enabled") and section.get("train_mb_tokens") is not None
        if sets_budget and values.get(tokens_key) is None:
            result[tokens_key] = section["train_mb_tokens"]
            # NeMo RL's files give both, and pack by the tokens alone.
            result[size_key] = None
    return result


def _trained_model(values: Values) -> Values:
    values = dict(values)
    # The older place of dtensor_cfg.activation_checkpointing.
    is_enabled = values.pop("activation_checkpointing_enabled", False)
    if is_enabled:
        section = values.get("dtensor_cfg") or {}
        # What is no section stays, to be refused as one.
        if isinstance(section, Mapping) and not section.get("activation_checkpointing"):
            values["dtensor_cfg"] = {**section, "activation_checkpointing": True}
    return _with_batching_budget(values, "train_micro_batch_tokens", "train_micro_batch_size")


def _with_generation_batch_size(values: Values) -> Values:
    """`policy.generation_batch_size`: `policy.generation.batch_size` here."""
    if "generation_batch_size" not in values:
        return values
    values = dict(values)
    size = values.pop("generation_batch_size")
    generation = values.get("generation", {})
    if isinstance(generation, Mapping):
        values["generation"] = {"batch_size": size, **generation}
    return values


SAMPLED_ALIKE = {"val_temperature": "temperature", "val_top_p": "top_p", "val_top_k": "top_k"}
"""A setting of the validation's sampling -> that of the training's, which it must equal."""


def _sampled_alike(values: Values) -> Values:
    kept = {key: value for key, value in values.items() if key not in SAMPLED_ALIKE}
    for key, own_key in SAMPLED_ALIKE.items():
        # A file that leaves the training's setting out has its default.
        default = grpo_policy.GenerationConfig.model_fields[own_key].default
        value = values.get(own_key, default)
        other = values.get(key, value)
        if other != value:
            need = f"the value of {own_key}, or no such key"
            summary = "validation samples as training does"
            raise ConfigError(summary, field=key, got=other, need=need)
    return kept


_ESTIMATOR_KEYS = ("normalize_rewards", "use_leave_one_out_baseline")


def _with_keys_of_the_estimator(values: Values) -> Values:
    """Keys of `grpo` that may stand in `adv_estimator`, where they count more."""
    estimator = values.get("adv_estimator")
    if not isinstance(estimator, Mapping):
        return values
    moved = {key: estimator[key] for key in _ESTIMATOR_KEYS if estimator.get(key) is not None}
    if estimator.get("name") == "leave_one_out":
        # The estimator of Ahmadian et al. does not divide by a deviation.
        moved = {"normalize_rewards": False, **moved}
    kept = {key: value for key, value in estimator.items() if key not in _ESTIMATOR_KEYS}
    return {**values, **moved, "adv_estimator": kept}


_VERIFIERS = {"hf_math_verify": "math", "dapo_math_verify": "dapo"}
"""A verifier of mathematics -> the rule that it is here."""


def _with_rule_of_the_verifier(values: Values) -> Values:
    values = dict(values)
    verifier = values.pop("math_verify_impl", None)
    if verifier is None:
        return values
    if verifier not in _VERIFIERS:
        need = f"one of {', '.join(_VERIFIERS)}"
        summary = "there is no such verifier"
        raise ConfigError(summary, field="math_verify_impl", got=verifier, need=need)
    return {"rule": _VERIFIERS[verifier], **values}


def _with_keys_of_a_class(section: type[data.SetConfig], values: Values) -> Values:
    """Keys of a set of a class by dotted path that are none of ours are arguments of the class.

    One that is nearly a key of ours stays, to be refused with its name: a class that takes any
    keyword would swallow it. `kwargs` can hold such an argument.
    """
    if "." not in str(values.get("dataset_name")):
        return values
    arguments: Values = {}
    others: Values = {}
    for key, value in values.items():
        is_near = key in section.model_fields or nearest_name(key, section.model_fields) is not None
        if is_near:
            others[key] = value
        else:
            arguments[key] = value
    if not arguments:
        return values
    return {**others, "kwargs": {**arguments, **(values.get("kwargs") or {})}}


_ON_POLICY = "every completion is sampled by the policy that learns from it"
_RESUME = "remove the section; a resumed run samples the step again, with the same seeds"
_STOP = "set it to null; grpo.watch.stop_on ends a run that exploits its reward"
_RULE = "use an environment with a rule for the form of completions instead"
_SHARDS = (
    "save memory with dtensor_cfg.activation_checkpointing or fewer policy.train_micro_batch_tokens"
)
_MATH_PROCESSORS = ("math_hf_data_processor", "math_data_processor")

SPELLINGS: Mapping[type[Strict], Spelling] = {
    # the run
    run.RewardModelRunConfig: Spelling(
        off={
            "evaluation": "remove the section: `treeward eval MODEL --data FILE` writes the report"
        },
    ),
    GRPORunConfig: Spelling(
        unread="data_plane",  # how the data of a step travel between processes
        off={
            "async_rl": f"remove the section: {_ON_POLICY}",
            "on_policy_distillation": (
                "remove the section; a teacher can be an environment of your own"
            ),
            "reward_penalties": f"remove the section; {_RULE}",
            "rollout_checkpointing": _RESUME,
            "rollout_recovery": _RESUME,
            "telemetry": "remove the section; logger says where metrics go",
            "token_capture": "remove the section; samples.jsonl has completions of each validation",
        },
    ),
    checkpointing.CheckpointingConfig: Spelling(
        unread="save_consolidated save_optimizer model_cache_dir model_repo_id is_async",
        fixed={
            "model_save_format": (
                ("safetensors",),
                "set it to safetensors: pickled weights would be code",
            )
        },
    ),
    checkpointing.GRPOCheckpointingConfig: Spelling(unread="save_data_plane load_replay_buffer"),
    run.ClusterConfig: Spelling(unread="master_port_range* segment_size"),
    run.LoggerConfig: Spelling(
        unread="num_val_samples_to_print monitor_gpus gpu_monitoring swanlab",
        off={
            "swanlab_enabled": (
                "set it to false; enable tensorboard, wandb or mlflow, metrics.jsonl is always "
                "written"
            ),
        },
    ),
    # the model
    policy.TrainedModelConfig: Spelling(
        unread="logprob_batch_size offload_optimizer_for_logprob make_sequence_length_divisible_by "
        "refit_buffer_size_gb",
        off={
            "lora_cfg": "move the section to policy.dtensor_cfg.lora_cfg",
            "megatron_cfg": "set policy.megatron_cfg.enabled=false: the model runs on PyTorch",
        },
        forms=("activation_checkpointing_enabled", *_BATCHING_SECTIONS),
        rewrite=_trained_model,
    ),
    grpo_policy.GRPOPolicyConfig: Spelling(
        unread="logprob_chunk_size",
        off={
            "reward_model_cfg": (
                "remove it; `treeward train` trains a reward model, and env.reward_model rewards "
                "with one"
            ),
            "draft": "set policy.draft.enabled=false: completions are sampled token by token",
            "router_replay": (
                "set policy.router_replay.enabled=false: experts are routed anew in each update"
            ),
        },
        forms=("generation_batch_size",),
        rewrite=_with_generation_batch_size,
    ),
    policy.ShardingConfig: Spelling(
        unread="_v2 automodel_kwargs clear_cache_every_n_steps enabled env_vars "
        "expert_parallel_size moe_* sequence_parallel",
        off={"custom_parallel_plan": f"set it to null; {_SHARDS}"},
        fixed={"context_parallel_size": ((1,), f"set it to 1; {_SHARDS}")},
    ),
    policy.LoraConfig: Spelling(
        unread="use_triton dropout_position lora_A_init",
        off={
            "dropout": (
                "set it to 0: scores and log-probabilities are functions of the tokens, in "
                "training too"
            ),
        },
    ),
    policy.TokenizerConfig: Spelling(unread="use_fast*"),
    # the data
    data.DatasetConfig: Spelling(
        unread="processor env_name",
        rewrite=partial(_with_keys_of_a_class, data.DatasetConfig),
    ),
    data.DataConfig: Spelling(
        unread="processor env_name num_workers",
        sets=data.DatasetConfig,
    ),
    data.PromptSetConfig: Spelling(
        unread="repeat download_dir",
        fixed={
            "processor": (
                _MATH_PROCESSORS,
                "remove it: the format of the set says how rows are read",
            )
        },
        rewrite=partial(_with_keys_of_a_class, data.PromptSetConfig),
    ),
    data.PromptDataConfig: Spelling(
        unread="num_workers num_prompts_per_dataloader custom_dataloader",
        off={
            "use_multiple_dataloader": (
                "set it to false; data.train[i].weight says how often each set comes"
            ),
        },
        sets=data.PromptSetConfig,
    ),
    # GRPO
    grpo.GRPOConfig: Spelling(
        unread="calculate_advantages_on_gpu deduplicate_multimodal_data debug_payload_metrics",
        off={
            "async_grpo": f"set grpo.async_grpo.enabled=false: {_ON_POLICY}",
            "environment": "name it as env_name of data.default, or of each set",
            "stop_at_validation_metric": _STOP,
            "stop_at_validation_threshold": _STOP,
            "invalid_tool_call_advantage": "set it to null: there are no tools",
            "malformed_thinking_advantage": f"set it to null; {_RULE}",
            "interleave_rollouts": f"set it to false: {_ON_POLICY}",
        },
        fixed={"max_rollout_turns": ((1,), "set it to 1: a prompt is completed once")},
        renamed={"val_num_generations_per_prompt": "num_val_generations"},
        rewrite=_with_keys_of_the_estimator,
    ),
    grpo.AdvantageEstimatorConfig: Spelling(forms=_ESTIMATOR_KEYS),
    grpo.OverlongShapingConfig: Spelling(
        off={
            "stop_properly_penalty_coef": (
                "set it to null, and grpo.overlong_filtering=true: a factor would raise negative "
                "rewards"
            ),
        },
    ),
    grpo.PolicyLossConfig: Spelling(
        off={
            "disable_ppo_ratio": "set it to false; with one update from a batch the ratio is 1",
            "use_cispo": "set it to false: the loss is the clipped surrogate",
            "seq_logprob_error_in_loss": "set it to false; token_mult_prob_error is logged",
            "positive_example_nll_weight": (
                "set it to 0, and fine-tune the policy on examples first"
            ),
        },
        renamed={"use_kl_in_reward": "kl_in_reward"},
    ),
    grpo_policy.GenerationConfig: Spelling(
        unread="sglang_* mcore_generation_config port_range_* real_quant_* refit_* "
        "use_async_rollouts",
        forms=tuple(SAMPLED_ALIKE),
        rewrite=_sampled_alike,
    ),
    grpo_policy.VllmConfig: Spelling(
        unread="async_engine cap_max_tokens_to_context enable_* env_vars expose_http_server "
        "http_server_* load_format logprobs_mode num_first_layers_in_bf16 num_last_layers_in_bf16"
        " skip_tokenizer_init use_deep_gemm use_tqdm vllm_metrics_logger_interval *_refit_* "
        "reset_*_after_weight_update",
        fixed={
            "pipeline_parallel_size": ((1,), "set it to 1: an engine lies on one node"),
            "expert_parallel_size": (
                (1,),
                "set policy.generation.vllm_kwargs={enable_expert_parallel: true} instead",
            ),
        },
    ),
    # models that score, and environments
    scoring.ScoringConfig: Spelling(
        renamed={
            "model": "models",
            "model_name": "models",
            "model_path": "models",
            "precision": "dtype",
            "max_model_len": "max_length",
            "reward_shaping": "shaping",
        },
    ),
    scoring.LengthPenaltyConfig: Spelling(
        fixed={"unit": (("characters",), "give characters, about 4 to a token of English")},
    ),
    scoring.RewardShapingConfig: Spelling(
        unread="reference_key missing_constants",
        off={"reference": "remove it: an environment of type custom can compare with references"},
    ),
    reward_environments.RewardModelEnvironmentConfig: Spelling(
        unread="enabled logprob_batch_size logprob_chunk_size offload_optimizer_for_logprob "
        "generation max_grad_norm make_sequence_length_divisible_by processor env_name",
        off={
            "checkpoint_path": "give the folder of the exported model as model_name",
            "megatron_cfg": "set megatron_cfg.enabled=false: the model runs on PyTorch",
        },
        forms=_BATCHING_SECTIONS,
        rewrite=partial(_with_batching_budget, tokens_key="batch_tokens", size_key="batch_size"),
    ),
    reward_environments.ScoringDTensorConfig: Spelling(
        off={
            "lora_cfg": (
                "set lora_cfg.enabled=false; merge adapters into their model with peft's "
                "merge_and_unload, and give that folder as model_name"
            ),
        },
    ),
    reward_environments.MathEnvironmentConfig: Spelling(
        unread="stop_strings",
        fixed={
            "verifier_type": (
                ("math",),
                "for a choice among letters use the rules exact_match or regex",
            )
        },
        renamed={"num_workers": "workers"},
        forms=("math_verify_impl",),
        rewrite=_with_rule_of_the_verifier,
    ),
    reward_environments.MathMultiRewardConfig: Spelling(
        unread="num_workers stop_strings",
        fixed={
            "verifier_type": (("math",), "there is no other"),
            "math_verify_impl": (("hf_math_verify",), "there is no other"),
        },
    ),
    reward_environments.JudgePromptConfig: Spelling(
        fixed={
            "num_samples": ((1,), "a question is asked once; use_logprobs takes the expectation")
        },
    ),
    reward_environments.HybridEnvironmentConfig: Spelling(
        fixed={"fallback_on": ((["failed", "wrong"],), "remove it: both go to the next member")},
    ),
}


def spellings(section: type[Strict]) -> list[Spelling]:
    """The spellings of a section: of the classes that it derives from, and its own."""
    return [SPELLINGS[base] for base in reversed(section.__mro__) if base in SPELLINGS]
