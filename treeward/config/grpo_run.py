"""`GRPORunConfig`: everything that a run of GRPO is told, and the checks between its sections.

    policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct, max_total_sequence_length: 1024}
    data: {dataset_name: PromptDataset, train_data_path: prompts.jsonl, val_data_path: held_out.jsonl}
    env: {reward_model: {model_name: results/rm/final}}

is a whole configuration: every other key has a default, written once, on its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from treeward.config.base import Strict, nearest_name
from treeward.config.cluster import GRPOClusterConfig
from treeward.config.data import check_longest_input
from treeward.config.env_section import check_environment, is_enabled
from treeward.config.grpo import GRPOConfig
from treeward.config.grpo_checkpointing import GRPOCheckpointingConfig, parse_grpo_metric_name
from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.config.logger import GRPOLoggerConfig
from treeward.config.loss_fn import PolicyLossConfig
from treeward.config.prompt_data import PromptDataConfig
from treeward.errors import ConfigError

__all__ = ["GRPORunConfig"]


class GRPORunConfig(Strict):
    """What `treeward grpo` reads."""

    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "async_rl": "remove it: every answer is of the policy that learns from it",
        "data_plane": "set data_plane.enabled=false",
        "on_policy_distillation": "set on_policy_distillation.enabled=false",
        "reward_penalties": "set its keys to false; use an environment with a rule for the form",
        "rollout_checkpointing": "remove it",
        "rollout_recovery": "remove it",
        "telemetry": "set telemetry.enabled=false; logger says where metrics go",
        "token_capture": "set token_capture.enabled=false",
    }

    grpo: GRPOConfig = GRPOConfig()
    """The length of the run, its groups, their rewards and advantages, and its validations."""
    loss_fn: PolicyLossConfig = PolicyLossConfig()
    """The loss."""
    policy: GRPOPolicyConfig
    """The policy, its batches, its numerics, its optimiser and its generation."""
    data: PromptDataConfig
    """The prompts to train on and to validate on."""
    env: dict[str, Any] = Field(min_length=1)
    """The environments by name, each a section of its kind (below); the kind is the name unless the section says
    `type`. Those that nothing uses are checked and not made."""
    checkpointing: GRPOCheckpointingConfig = GRPOCheckpointingConfig()
    """When the run is saved, and which checkpoints stay."""
    logger: GRPOLoggerConfig = GRPOLoggerConfig()
    """Where the metrics go."""
    cluster: GRPOClusterConfig = GRPOClusterConfig()
    """The machines."""

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments that there are: those that are not switched off."""
        return tuple(name for name, section in self.env.items() if is_enabled(section))

    @property
    def default_environments(self) -> dict[str, float]:
        """What rewards the answers to prompts that name no environment, with weights; empty if each has to name one."""
        if self.grpo.environments is not None:
            return dict(self.grpo.environments)
        if "reward_model" in self.environments:
            return {"reward_model": 1.0}
        return dict.fromkeys(self.environments, 1.0) if len(self.environments) == 1 else {}

    @property
    def named_environments(self) -> tuple[str, ...]:
        """The environments that the sets of data name, each once."""
        sets = (*self.data.train, *self.data.validation)
        return tuple(dict.fromkeys(name for one in sets for name in one.environment_names))

    @property
    def used_environments(self) -> tuple[str, ...]:
        """The environments that the configuration uses to train with, each once; rows of the data may name others."""
        every_set_names = all(one.env_name is not None for one in (*self.data.train, *self.data.validation))
        default = () if every_set_names else tuple(self.default_environments)
        return tuple(dict.fromkeys((*self.named_environments, *default)))

    @property
    def answers_per_update(self) -> int:
        """Answers that one step of the optimiser learns from."""
        return self.policy.train_global_batch_size or self.grpo.answers_per_step

    @property
    def prompts_per_update(self) -> int:
        """Groups that one step of the optimiser learns from."""
        return self.answers_per_update // self.grpo.num_generations_per_prompt

    @property
    def updates_per_pass(self) -> int:
        """Steps of the optimiser each time that the answers of a step are learnt from."""
        return self.grpo.answers_per_step // self.answers_per_update

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt, in tokens: it leaves room for one token of an answer at least."""
        room = self.policy.max_total_sequence_length - 1
        return min(room, self.data.max_input_seq_length or room)

    @property
    def max_new_tokens(self) -> int:
        """Longest answer, in tokens, to the shortest prompt: the room that a prompt leaves limits it further."""
        return self.policy.generation.max_new_tokens or self.policy.max_total_sequence_length

    @property
    def max_response_length(self) -> int:
        """The length at which overlong shaping takes its whole penalty, if the prompt leaves so much room."""
        return self.grpo.reward_shaping.max_response_length or self.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether KL to the reference policy is measured."""
        return not self.grpo.skip_reference_policy_logprobs_calculation

    @property
    def ranking_metric(self) -> str | None:
        """The validation metric that ranks checkpoints, as `reward`; None if none does."""
        name = self.checkpointing.metric_name if self.checkpointing.enabled else None
        return None if name is None else parse_grpo_metric_name(name)

    @property
    def remarks(self) -> list[str]:
        """What is no mistake, and a person may not expect."""
        found = []
        generation = self.policy.generation
        if generation.backend != "hf" and not generation.is_remote:
            found.append(
                f"policy.generation.backend is {generation.backend} and no url is given: the policy itself samples, "
                "in this process"
            )
        found += _without_effect(self)
        if self.cluster.num_processes > 1:
            found.append(
                f"cluster has {self.cluster.num_nodes} x {self.cluster.gpus_per_node} GPUs: the policy is trained in "
                "one process, the others are for environments and servers"
            )
        unused = [
            name for name in self.environments if name not in (*self.used_environments, self.grpo.gold_environment)
        ]
        if unused:
            found.append(f"no set of data uses {', '.join(f'env.{name}' for name in unused)}; its rows may name them")
        if self.grpo.reward_shaping.enabled and self.grpo.truncated == "mask":
            found.append(
                "grpo.reward_shaping penalises long answers, and grpo.truncated: mask leaves the longest out of the "
                "loss"
            )
        if self.grpo.watch.enabled and not self.data.validation:
            found.append("grpo.watch has nothing to watch: data has no validation set")
        return found

    @field_validator("env")
    @classmethod
    def _environments_are_valid(cls, env: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name, section in env.items():
            check_environment(name, section, (info.context or {}).get("ignored"))
        return env

    @model_validator(mode="after")
    def _batches_fit(self) -> GRPORunConfig:
        answers, group, whole = (
            self.policy.train_global_batch_size,
            self.grpo.num_generations_per_prompt,
            self.grpo.answers_per_step,
        )
        if answers is None:
            return self
        got = (
            f"{answers} answers, grpo.num_prompts_per_step: {self.grpo.num_prompts_per_step}, "
            f"grpo.num_generations_per_prompt: {group}"
        )
        if answers % group:
            raise ConfigError(
                "policy.train_global_batch_size would part the answers to a prompt",
                field="policy.train_global_batch_size",
                got=got,
                need="a multiple of grpo.num_generations_per_prompt",
                fix=f"set policy.train_global_batch_size={max(answers // group, 1) * group}",
            )
        if answers > whole or whole % answers:
            raise ConfigError(
                "policy.train_global_batch_size does not divide the answers of a step",
                field="policy.train_global_batch_size",
                got=got,
                need=f"a divisor of {whole}, which is num_prompts_per_step times num_generations_per_prompt",
                fix=f"set policy.train_global_batch_size=null for one update from all {whole}",
            )
        return self

    @model_validator(mode="after")
    def _ratios_have_one_update(self) -> GRPORunConfig:
        updates = self.grpo.updates_per_batch * self.updates_per_pass
        if self.loss_fn.force_on_policy_ratio and updates > 1:
            raise ConfigError(
                "loss_fn.force_on_policy_ratio leaves no limit to several updates from the same answers",
                field="loss_fn.force_on_policy_ratio",
                got=f"true, with {updates} optimiser steps for the answers of a step",
                need="grpo.updates_per_batch: 1 and policy.train_global_batch_size: null",
                fix="set loss_fn.force_on_policy_ratio=false",
            )
        return self

    @model_validator(mode="after")
    def _generator_says_log_probabilities(self) -> GRPORunConfig:
        """As the loss needs them; otherwise the run would end in its first step."""
        loss, generation = self.loss_fn, self.policy.generation
        in_kl = loss.use_on_policy_kl_approximation and loss.reference_policy_kl_penalty > 0 and not loss.kl_in_reward
        key = "use_importance_sampling_correction"
        if not loss.use_importance_sampling_correction:
            key = "use_on_policy_kl_approximation"
            if not in_kl:
                return self
        filtered = generation.top_k is not None or generation.top_p != 1.0
        why = None
        if generation.backend == "openai" and generation.retokenize:
            why = "backend: openai, retokenize: true: text that is tokenized again has none"
        elif generation.is_remote and generation.backend != "sglang" and filtered and generation.temperature != 1.0:
            why = f"backend: {generation.backend}, temperature: {generation.temperature}, with top_k or top_p: none at "
            why += "the temperature and before top_k and top_p"
        if why is not None:
            raise ConfigError(
                f"{key} weighs by the generator's log-probabilities, and there are none",
                field=f"loss_fn.{key}",
                got=f"true, policy.generation.{why}",
                need="a generator that says them for the tokens that it sampled",
                fix=f"set loss_fn.{key}=false, or sample with backend hf or sglang",
            )
        return self

    @model_validator(mode="after")
    def _kl_has_a_reference(self) -> GRPORunConfig:
        if self.needs_reference:
            return self
        if self.loss_fn.reference_policy_kl_penalty > 0:
            raise ConfigError(
                "the KL penalty needs the reference policy",
                field="grpo.skip_reference_policy_logprobs_calculation",
                got=f"true, loss_fn.reference_policy_kl_penalty: {self.loss_fn.reference_policy_kl_penalty}",
                need="false, or a penalty of 0",
                fix="set grpo.skip_reference_policy_logprobs_calculation=false, or "
                "loss_fn.reference_policy_kl_penalty=0",
            )
        if self.grpo.watch.enabled and self.grpo.watch.max_kl is not None:
            raise ConfigError(
                "a budget for the KL needs the reference policy",
                field="grpo.watch.max_kl",
                got=f"{self.grpo.watch.max_kl}, grpo.skip_reference_policy_logprobs_calculation: true",
                need="null, or skip_reference_policy_logprobs_calculation: false",
                fix="set grpo.skip_reference_policy_logprobs_calculation=false",
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> GRPORunConfig:
        check_longest_input(
            self.data.max_input_seq_length,
            self.policy.max_total_sequence_length,
            what_shares_it="; prompt and answer share it",
        )
        shaping = self.grpo.reward_shaping
        if shaping.enabled and shaping.overlong_buffer_length > self.max_response_length:
            raise ConfigError(
                "the overlong penalty would begin before the answer",
                field="grpo.reward_shaping.overlong_buffer_length",
                got=f"{shaping.overlong_buffer_length} tokens, longest answer: {self.max_response_length}",
                need="at most max_response_length, or policy.generation.max_new_tokens where that is null",
                fix=f"set grpo.reward_shaping.overlong_buffer_length={max(self.max_response_length // 4, 1)}",
            )
        return self

    @model_validator(mode="after")
    def _environments_are_there(self) -> GRPORunConfig:
        for field, names in (
            ("grpo.environments", tuple(self.grpo.environments or ())),
            ("grpo.gold_environment", (self.grpo.gold_environment,) if self.grpo.gold_environment else ()),
            ("grpo.environments_on_ray", self.grpo.environments_on_ray),
            *((f"data.train[{i}].env_name", one.environment_names) for i, one in enumerate(self.data.train)),
            *((f"data.validation[{i}].env_name", one.environment_names) for i, one in enumerate(self.data.validation)),
        ):
            for name in names:
                if name not in self.environments:
                    self._refuse_environment(field, name)
        if not self.environments:
            raise ConfigError(
                "no environment is enabled",
                field="env",
                got=f"{', '.join(self.env)}, with enabled: false",
                need="an environment that rewards the answers",
                fix=f"set env.{next(iter(self.env))}.enabled=true",
            )
        return self

    def _refuse_environment(self, field: str, name: str) -> None:
        near = nearest_name(name, self.environments)
        raise ConfigError(
            f"env.{name} is switched off" if name in self.env else f"there is no environment {name} in env",
            field=field,
            got=name,
            need=f"one of {', '.join(self.environments) or 'the sections of env, of which there is none'}",
            fix=f"set env.{name}.enabled=true"
            if name in self.env
            else f"did you mean {near}?"
            if near
            else f"add a section env.{name}",
        )

    @model_validator(mode="after")
    def _gold_is_not_trained_on(self) -> GRPORunConfig:
        gold = self.grpo.gold_environment
        if gold is not None and gold in self.used_environments:
            raise ConfigError(
                "the gold reward is trained on, and could not show over-optimisation",
                field="grpo.gold_environment",
                got=f"{gold}, which rewards the answers too",
                need="an environment that neither grpo.environments nor a set of data names",
                fix="set grpo.gold_environment=null, or grpo.environments to the others",
            )
        stops_on_gold = self.grpo.watch.stop and self.grpo.watch.stop_on == ("gold_falls",)
        if stops_on_gold and gold is None:
            raise ConfigError(
                "grpo.watch is to stop when gold falls, and nothing measures gold",
                field="grpo.watch.stop",
                got="true, stop_on: [gold_falls], grpo.gold_environment: null",
                need="a gold_environment, or another kind of alarm in stop_on",
                fix="set grpo.gold_environment, or grpo.watch.stop_on=[kl_budget]",
            )
        if self.grpo.watch.stop and not (self.data.validation and self.grpo.validates):
            raise ConfigError(
                "grpo.watch is to stop the run, and there is no validation to watch",
                field="grpo.watch.stop",
                got="true, with no set in data.validation, or grpo.val_period: null",
                need="a validation set, and a validation",
                fix="give data.val_data_path, or set grpo.watch.stop=false",
            )
        return self

    @model_validator(mode="after")
    def _resources_fit_the_cluster(self) -> GRPORunConfig:
        cluster, generation = self.cluster, self.policy.generation
        own = generation.colocated.resources
        if not generation.colocated.enabled:
            field = "policy.generation.colocated.resources"
            if cluster.num_nodes == 1:
                self._check_share(f"{field}.gpus_per_node", own.gpus_per_node or 0, "gpus_per_node")
                if own.num_nodes not in (None, 1):
                    self._check_share(f"{field}.num_nodes", own.num_nodes or 0, "num_nodes")
            else:
                if own.num_nodes is None:
                    raise ConfigError(
                        "in a cluster of several nodes generation has whole nodes of its own",
                        field=f"{field}.num_nodes",
                        got=f"null, cluster.num_nodes: {cluster.num_nodes}",
                        need="a number of nodes",
                        fix=f"set {field}.num_nodes=1",
                    )
                self._check_share(f"{field}.num_nodes", own.num_nodes, "num_nodes")
        section = self.env.get("reward_model")
        resources = section.get("resources") if isinstance(section, Mapping) and is_enabled(section) else None
        for key in ("gpus_per_node", "num_nodes"):
            wanted, there = (resources or {}).get(key) or 0, getattr(cluster, key)
            if wanted > max(there, 1):
                raise ConfigError(
                    "the reward model is to have more than the cluster has",
                    field=f"env.reward_model.resources.{key}",
                    got=f"{wanted}, cluster.{key}: {there}",
                    need=f"at most cluster.{key}",
                    fix=f"set cluster.{key}={wanted}, or env.reward_model.resources.{key}={max(there, 1)}",
                )
        return self

    def _check_share(self, field: str, wanted: int, key: str) -> None:
        """What generation has to itself leaves something of the cluster for training."""
        there = getattr(self.cluster, key)
        if wanted >= there:
            raise ConfigError(
                "generation leaves nothing of the cluster for training",
                field=field,
                got=f"{wanted}, cluster.{key}: {there}",
                need=f"less than cluster.{key}, which counts all of them",
                fix=f"set cluster.{key}={wanted + 1}",
            )

    @model_validator(mode="after")
    def _ranking_metric_is_measured(self) -> GRPORunConfig:
        metric, spelt = self.ranking_metric, self.checkpointing.metric_name
        if metric is None:
            return self
        need, fix = None, "or set checkpointing.metric_name=null to keep the latest checkpoints"
        if not self.data.validation:
            why, need, fix = "data has no validation set", "a set in data.validation", f"give data.val_data_path, {fix}"
        elif not self.grpo.validates:
            why, need, fix = "grpo.val_period says never", "a validation", f"set grpo.val_period or val_at_end, {fix}"
        elif metric == "gold_reward" and self.grpo.gold_environment is None:
            why, need, fix = "there is no gold reward", "grpo.gold_environment", f"set grpo.gold_environment, {fix}"
        elif metric == "kl" and not self.needs_reference:
            why, need = "there is no reference policy", "skip_reference_policy_logprobs_calculation: false"
            fix = f"set grpo.skip_reference_policy_logprobs_calculation=false, {fix}"
        if need is not None:
            raise ConfigError(
                f"checkpointing.metric_name is never measured: {why}",
                field="checkpointing.metric_name",
                got=spelt,
                need=need,
                fix=fix,
            )
        return self


def _without_effect(config: GRPORunConfig) -> list[str]:
    """Remarks on keys that were given another value than their default, and that nothing reads."""

    def changed(section: Strict, *keys: str) -> list[str]:
        return [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]

    grpo, generation, found = config.grpo, config.policy.generation, []
    of_a_server = changed(generation, "weight_sync", "weight_folder", "retokenize", "probe_tolerance")
    if of_a_server and not generation.is_remote:
        keys = ", ".join(of_a_server)
        found.append(f"policy.generation.{keys} has no effect without a url: the policy itself samples")
    if generation.is_remote and generation.continuous_batching:
        found.append("policy.generation.continuous_batching has no effect with a url: a server batches as it likes")
    if grpo.estimator == "reinforce_plus_plus":
        unread = [f"grpo.{key}" for key in changed(grpo, "normalize_rewards", "use_leave_one_out_baseline")]
        unread += [f"grpo.adv_estimator.{key}" for key in changed(grpo.adv_estimator, "use_leave_one_out_baseline")]
        if unread:
            found.append(
                f"{', '.join(unread)} has no effect with reinforce_plus_plus: it divides by the standard deviation of "
                "the batch, and grpo.adv_estimator.minus_baseline says what is subtracted"
            )
        return found
    if changed(grpo.adv_estimator, "minus_baseline"):
        found.append(
            f"grpo.adv_estimator.minus_baseline has no effect with {grpo.estimator}: it is of reinforce_plus_plus"
        )
    if grpo.adv_estimator.name == "leave_one_out":
        unread = [f"grpo.{key}" for key in changed(grpo, "use_leave_one_out_baseline")]
        unread += [f"grpo.adv_estimator.{key}" for key in changed(grpo.adv_estimator, "use_leave_one_out_baseline")]
        if unread:
            found.append(
                f"{', '.join(unread)} has no effect with leave_one_out: its baseline is always the mean of the other "
                "answers"
            )
    return found
