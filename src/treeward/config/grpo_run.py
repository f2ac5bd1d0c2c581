"""`GRPORunConfig`: the configuration of a run of GRPO, and the checks between its sections.

    policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct, max_total_sequence_length: 1024}
    data:
      dataset_name: PromptDataset
      train_data_path: prompts.jsonl
      val_data_path: held_out.jsonl
    env: {reward_model: {model_name: results/rm/final}}

is a whole configuration: every other key has a default, written once, on its field.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from treeward.config.base import Strict
from treeward.config.checkpointing import GRPOCheckpointingConfig, parse_grpo_metric_name
from treeward.config.data import PromptDataConfig, PromptSetConfig
from treeward.config.grpo import GRPOConfig, PolicyLossConfig
from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.config.reward_environments import (
    ENVIRONMENTS,
    JudgeModelConfig,
    PreferenceVerdictConfig,
    RewardModelEnvironmentConfig,
    check_environments,
    environment_sections,
    is_enabled,
)
from treeward.config.run import ClusterConfig, GRPOLoggerConfig
from treeward.errors import ConfigError


class GRPORunConfig(Strict):
    """What `treeward grpo` reads."""

    grpo: GRPOConfig = GRPOConfig()
    loss_fn: PolicyLossConfig = PolicyLossConfig()
    policy: GRPOPolicyConfig
    """The policy, its batches, its numerics, its optimiser and its generation."""
    data: PromptDataConfig
    env: dict[str, Any] = Field(min_length=1)
    """The environments by name, each a section of its kind, which is the name unless the section
    has `type`."""
    checkpointing: GRPOCheckpointingConfig = GRPOCheckpointingConfig()
    logger: GRPOLoggerConfig = GRPOLoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments that are not switched off."""
        return tuple(name for name, section in self.env.items() if is_enabled(section))

    @property
    def default_environment(self) -> str | None:
        """The environment of prompts that name none; None if every prompt has to name one."""
        names = [name for name in self.environments if name != self.grpo.gold_environment]
        if "reward_model" in names:
            return "reward_model"
        if len(names) == 1:
            return names[0]
        return None

    @property
    def named_environments(self) -> tuple[str, ...]:
        """The environments that the sets of data name, each once."""
        names: dict[str, None] = {}  # a set that keeps its order
        for dataset in (*self.data.train, *self.data.validation):
            if dataset.env_name is not None:
                names[dataset.env_name] = None
        return tuple(names)

    @property
    def used_environments(self) -> tuple[str, ...]:
        """The environments that reward training, each once; rows of the data may name others."""
        used = list(self.named_environments)
        default = self.default_environment
        sets = (*self.data.train, *self.data.validation)
        needs_default = any(dataset.env_name is None for dataset in sets)
        if needs_default and default is not None and default not in used:
            used.append(default)
        return tuple(used)

    @property
    def used_sections(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The name, kind and keys of each environment that the run starts, and of the members of
        hybrids."""
        used = {name: self.env[name] for name in self.used_environments}
        gold = self.grpo.gold_environment
        if gold:
            used[gold] = self.env[gold]
        return list(environment_sections(used))

    def judged_by(self, dataset: PromptSetConfig) -> PreferenceVerdictConfig | None:
        """The section of `preference_verdict` that rewards a set, whose rows are then comparisons;
        None for prompts."""
        name = dataset.env_name or self.default_environment
        if name not in self.env:
            return None
        # A hybrid's members count too.
        for _, kind, keys in environment_sections({name: self.env[name]}):
            if kind == "preference_verdict":
                return PreferenceVerdictConfig.model_validate(keys)
        return None

    @property
    def has_other_gpus(self) -> bool:
        """Whether engines, or replicas of a reward model, have other GPUs than those that train."""
        return (
            any(reward_model.needs_ray for reward_model in self.reward_models.values())
            or self._has_engines_apart
        )

    @property
    def training_cluster(self) -> ClusterConfig:
        """The processes that train: `cluster` without the GPUs of engines and replicas, as NeMo RL
        counts them.

        Raises `ConfigError` where none is left.
        """
        models = self.reward_models.values()
        num_gpus = sum(model.num_gpus for model in models if model.needs_ray)
        generation = self.policy.generation
        if self._has_engines_apart:
            num_gpus += generation.num_engines * generation.vllm_cfg.tensor_parallel_size
        return self.cluster.without(num_gpus)

    @property
    def reward_models(self) -> dict[str, RewardModelEnvironmentConfig]:
        """The environments that are reward models, members of hybrids too, by their names."""
        models: dict[str, RewardModelEnvironmentConfig] = {}
        for name, kind, keys in self.used_sections:
            if kind == "reward_model":
                models[name] = RewardModelEnvironmentConfig.model_validate(keys)
        return models

    @property
    def judges(self) -> list[JudgeModelConfig]:
        """The environments that ask a language model, members of hybrids too."""
        sections: list[JudgeModelConfig] = []
        for _, kind, keys in self.used_sections:
            known = ENVIRONMENTS.get(kind)
            if known is not None and issubclass(known.section, JudgeModelConfig):
                sections.append(known.section.model_validate(keys))
        return sections

    @property
    def _has_engines_apart(self) -> bool:
        return (
            self.policy.generation.starts_engines and not self.policy.generation.colocated.enabled
        )

    @property
    def prompts_per_update(self) -> int:
        """Groups that one optimiser step learns from."""
        completions = self.policy.train_global_batch_size or self.grpo.completions_per_step
        return completions // self.grpo.num_generations_per_prompt

    @property
    def updates_per_pass(self) -> int:
        """Optimiser steps in one pass over the completions of a step."""
        return self.grpo.num_prompts_per_step // self.prompts_per_update

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt, in tokens; it leaves room for at least one token of a completion."""
        room = self.policy.max_total_sequence_length - 1
        return min(room, self.data.max_input_seq_length or room)

    @property
    def max_new_tokens(self) -> int:
        """Longest completion, in tokens, of the shortest prompt; the room that a prompt leaves
        limits it further."""
        return self.policy.generation.max_new_tokens or self.policy.max_total_sequence_length

    @property
    def max_response_length(self) -> int:
        """The length that costs `overlong_buffer_penalty`, if the prompt leaves that much room."""
        return self.grpo.reward_shaping.max_response_length or self.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether KL to the reference policy is measured."""
        return not self.grpo.skip_reference_policy_logprobs_calculation

    @property
    def ranking_metric(self) -> str | None:
        """The validation metric that ranks checkpoints, as `reward`; None if none does."""
        name = self.checkpointing.metric_name
        if name is None or not self.checkpointing.enabled:
            return None
        return parse_grpo_metric_name(name)

    @property
    def remarks(self) -> list[str]:
        """Warnings about settings that are valid and may surprise."""
        remarks: list[str] = []
        generation = self.policy.generation
        samples_here = not generation.url and not generation.starts_engines
        if generation.backend != "hf" and samples_here:
            remarks.append(
                f"policy.generation.backend is {generation.backend} and no url is given: the "
                "policy itself samples, in this process"
            )
        if not self.data.validation:
            remarks.append("grpo.watch has nothing to watch: data has no validation set")
        return remarks

    @field_validator("env")
    @classmethod
    def _environments_are_valid(cls, env: dict[str, Any]) -> dict[str, Any]:
        check_environments(env)
        return env

    def check(self) -> None:
        self._check_update()
        self._check_environments()
        self._check_watch_and_metric()
        if self.policy.trust_remote_code and any(map(self.judged_by, self.data.train)):
            need = (
                "false with preference_verdict: whoever loads the judge could not ask its golden "
                "questions"
            )
            fix = "set policy.trust_remote_code=false, with a model whose code transformers has"
            raise self.error("policy.trust_remote_code", need, fix)
        skip = "grpo.skip_reference_policy_logprobs_calculation"
        needs_reference = {
            "loss_fn.reference_policy_kl_penalty": self.loss_fn.reference_policy_kl_penalty > 0,
            "grpo.watch.max_kl": self.grpo.watch.max_kl is not None,
        }
        for key, needs in needs_reference.items():
            if needs and not self.needs_reference:
                raise self.error(
                    f"{skip} {key}", f"the reference policy for {key}", f"set {skip}=false"
                )
        if (self.data.max_input_seq_length or 0) > self.policy.max_total_sequence_length:
            keys = "data.max_input_seq_length policy.max_total_sequence_length"
            fix = "set data.max_input_seq_length=null"
            raise self.error(keys, "at most policy.max_total_sequence_length", fix)

    def _check_update(self) -> None:
        size = self.policy.train_global_batch_size
        whole = self.grpo.completions_per_step
        loss = self.loss_fn
        sampling = self.policy.generation
        estimator = self.grpo.adv_estimator
        if loss.kl_in_reward and estimator.takes_components:
            need = f"false: {estimator.name} reads the components, and the penalty is of their sum"
            fix = "set loss_fn.kl_in_reward=false, with the penalty in the loss"
            raise self.error("loss_fn.kl_in_reward grpo.adv_estimator.name", need, fix)
        if size is not None and (size % self.grpo.num_generations_per_prompt or whole % size):
            keys = "policy.train_global_batch_size grpo.num_prompts_per_step "
            keys += "grpo.num_generations_per_prompt"
            need = f"a multiple of grpo.num_generations_per_prompt that divides {whole}, the "
            need += "completions of a step"
            fix = f"set policy.train_global_batch_size=null for one update from all {whole}"
            raise self.error(keys, need, fix)
        if loss.force_on_policy_ratio and self.updates_per_pass * self.grpo.updates_per_batch > 1:
            keys = "loss_fn.force_on_policy_ratio policy.train_global_batch_size "
            keys += "grpo.updates_per_batch"
            need = (
                f"one update from the {whole} completions of a step: with more the ratio is not 1"
            )
            fix = "set policy.train_global_batch_size=null and grpo.updates_per_batch=1"
            raise self.error(keys, need, fix)
        lacks_log_probs = (sampling.url or sampling.starts_engines) and not sampling.gives_log_probs
        # In this order: where the first is true the second is too, and the first's key is the cause.
        compares_with_generator = {
            "loss_fn.use_importance_sampling_correction": loss.use_importance_sampling_correction,
            "loss_fn.use_on_policy_kl_approximation": loss.needs_generator_log_probs,
            "grpo.seq_logprob_error_threshold": self.grpo.seq_logprob_error_threshold is not None,
        }
        for key, compares in compares_with_generator.items():
            if compares and lacks_log_probs:
                keys = f"{key} policy.generation.backend policy.generation.top_k "
                keys += "policy.generation.top_p"
                need = "a generator that returns log-probabilities of its tokens; with these "
                need += "settings it does not"
                raise self.error(keys, need, f"remove {key}, or sample with backend hf or sglang")

    def _check_environments(self) -> None:
        if not self.environments:
            first = next(iter(self.env))
            fix = f"set env.{first}.enabled=true"
            raise self.error("env", "an environment that is enabled", fix)
        # Every key that names an environment -> the name. Rows may name more, which are read later.
        named = {"grpo.gold_environment": self.grpo.gold_environment}
        for kind, sets in (("train", self.data.train), ("validation", self.data.validation)):
            for i, dataset in enumerate(sets):
                named[f"data.{kind}[{i}].env_name"] = dataset.env_name
        for field, name in named.items():
            if name is None or name in self.environments:
                continue
            fix = f"add or enable the section env.{name}, or name another environment here"
            if name in self.env:
                need = f"one of {', '.join(self.environments)}"
                raise ConfigError(
                    f"env.{name} is switched off", field=field, got=name, need=need, fix=fix
                )
            summary = f"there is no environment {name} in env"
            raise ConfigError.unknown(summary, name, self.environments, field=field, fix=fix)

    def _check_watch_and_metric(self) -> None:
        gold = self.grpo.gold_environment
        watch = self.grpo.watch
        metric = self.ranking_metric
        # A policy that is trained on the gold reward learns to exploit that one too.
        if gold is not None and gold in self.used_environments:
            need = (
                "a gold environment that is not trained on: no set of data names it as its env_name"
            )
            raise self.error(
                "grpo.gold_environment", need, "set grpo.gold_environment=null, or another env_name"
            )
        if "gold_falls" in watch.stop_on and gold is None:
            need = "a gold_environment, or other kinds of alarms in stop_on"
            fix = "set grpo.gold_environment, or grpo.watch.stop_on=[kl_budget]"
            raise self.error("grpo.watch.stop_on grpo.gold_environment", need, fix)
        validates = bool(self.data.validation) and self.grpo.validates
        if watch.stop_on and not validates:
            fix = "give data.val_data_path, or set grpo.watch.stop_on=[]"
            need = "a set in data.validation to validate on"
            raise self.error("grpo.watch.stop_on grpo.val_period", need, fix)
        if metric is None:
            return
        missing: str | None = None
        if not validates:
            missing = "a set in data.validation, and grpo.val_period or grpo.val_at_end"
        elif metric == "gold_reward" and gold is None:
            missing = "grpo.gold_environment"
        elif metric == "kl" and not self.needs_reference:
            missing = "grpo.skip_reference_policy_logprobs_calculation: false"
        if missing is not None:
            fix = "set checkpointing.metric_name=null to keep the latest checkpoints"
            raise self.error("checkpointing.metric_name", f"{missing}, to measure it", fix)
