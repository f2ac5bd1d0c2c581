"""What each section and each kind of run refuses: the error is at the key, and says what is
needed."""

import pytest
from omegaconf import OmegaConf

from treeward.config.checkpointing import CheckpointingConfig
from treeward.config.data import DataConfig, PromptDataConfig
from treeward.config.grpo import GRPOConfig, PolicyLossConfig
from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.config.load import load_section
from treeward.config.loss import LOSSES, LabelConfig
from treeward.config.policy import OptimizerConfig, PolicyConfig
from treeward.config.reward_environments import (
    HybridEnvironmentConfig,
    JudgeEnvironmentConfig,
    RewardModelEnvironmentConfig,
)
from treeward.config.scoring import RewardShapingConfig
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError

LINEAR = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 5}}"
BARE = "model_config: {model_type: qwen3, max_position_embeddings: 32, vocab_size: 300}"

SECTIONS = [
    # comparisons
    (DataConfig, "validation: {data_path: v}", "train"),
    (DataConfig, "train: {}", "train[0].data_path"),
    (DataConfig, "train_data_path: t, validation: [{data_path: a}, {data_path: b}]",
     "validation[1].name"),
    (DataConfig, "train_data_path: t, validation: [{data_path: a, weight: 3.0}]",
     "validation[0].weight"),
    (DataConfig, "train_data_path: t, val_split: v", "val_split"),
    (DataConfig, "dataset_name: Tulu3Preference, validation: {name: x}", "validation"),
    (DataConfig, "train: {data_path: t, prompt_key: q, chosen_key: prompt, rejected_key: b}",
     "train[0].chosen_key"),
    (DataConfig, "train: {data_path: t, rejected_key: prompt}", "train[0].rejected_key"),
    (DataConfig, "train: {data_path: t, prompt_key: a, rejected_key: a}", "train[0].prompt_key"),
    (DataConfig, "train: {data_path: t, chosen_key: rejected}", "train[0].chosen_key"),
    # prompts
    (PromptDataConfig, "{}", "train"),
    (PromptDataConfig,
     "train: {data_path: t}, validation: [{data_path: v, name: a}, {data_path: w, name: a}]",
     "validation[1].name"),
    (PromptDataConfig, "train: {data_path: t, processor: sft_processor}", "train[0].processor"),
    # the model that is trained
    (PolicyConfig, "{}", "model_name"),
    (PolicyConfig, f"model_name: m, {BARE}", "model_name"),
    (PolicyConfig, f"{BARE}, tokenizer: {{vocab_size: 400}}", "tokenizer.vocab_size"),
    (PolicyConfig,
     "model_name: m, dtensor_cfg: {tensor_parallel_size: 2, lora_cfg: {enabled: true}}",
     "dtensor_cfg.tensor_parallel_size"),
    (PolicyConfig, "model_name: m, load_in_4bit: true", "load_in_4bit"),
    (PolicyConfig, "model_name: m, lora_cfg: {enabled: true}", "lora_cfg.enabled"),
    (PolicyConfig,
     (
         "model_name: m, reward_model_cfg: {freeze_backbone: true}, dtensor_cfg: {lora_cfg: "
         "{enabled: true}}"
     ),
     "reward_model_cfg.freeze_backbone"),
    (PolicyConfig, "model_name: m, reward_model_cfg: {enabled: false}", "reward_model_cfg.enabled"),
    (PolicyConfig,
     f"model_name: m, scheduler: [{LINEAR}, {LINEAR}, {LINEAR}, {{milestones: [6, 5]}}]",
     "scheduler.milestones"),
    (OptimizerConfig, "name: AdamW", "name"),
    (OptimizerConfig, "kwargs: {}", "kwargs.lr"),
    (OptimizerConfig, "kwargs: {lr: .inf}", "kwargs.lr"),
    (PolicyConfig, "model_name: m, scheduler: 5", "scheduler"),
    (PolicyConfig, "model_name: m, activation_checkpointing_enabled: true, dtensor_cfg: x",
     "dtensor_cfg"),
    (CheckpointingConfig, "metric_name: val_accuracy, higher_is_better: false", "higher_is_better"),
    (CheckpointingConfig, "metric_name: val_loss, higher_is_better: true", "higher_is_better"),
    (CheckpointingConfig, "metric_name: val_chosen_rewards", "higher_is_better"),
    # GRPO
    (GRPOConfig, "batch_multiplier: 2.0", "batch_multiplier"),
    (GRPOConfig, "val_num_generations_per_prompt: 2, num_val_generations: 3",
     "num_val_generations"),
    (PolicyLossConfig,
     "reference_policy_kl_type: k3_unweighted, use_on_policy_kl_approximation: true",
     "reference_policy_kl_type"),
    (PolicyLossConfig, "truncated_importance_sampling_type: icepop",
     "truncated_importance_sampling_type"),
    (PolicyLossConfig,
     "use_importance_sampling_correction: true, truncated_importance_sampling_type: tis",
     "truncated_importance_sampling_ratio"),
    (PolicyLossConfig,
     "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2.0, "
     "truncated_importance_sampling_type: icepop", "truncated_importance_sampling_ratio_min"),
    (PolicyLossConfig,
     "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2.0, "
     "truncated_importance_sampling_ratio_min: 3.0", "truncated_importance_sampling_ratio_min"),
    (PolicyLossConfig,
     "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2.0, "
     "truncated_importance_sampling_ratio_min: 0.5, truncated_importance_sampling_type: "
     "seq-mask-tis, "
     "sequence_level_importance_ratios: true, token_level_loss: false",
     "truncated_importance_sampling_type"),
    (PolicyLossConfig, "sequence_level_importance_ratios: true",
     "sequence_level_importance_ratios"),
    (PolicyLossConfig, "truncated_importance_sampling_type: icepop",
     "truncated_importance_sampling_type"),
    (GRPOPolicyConfig,
     "model_name: m, max_total_sequence_length: 64, generation: {max_new_tokens: 65}",
     "generation.max_new_tokens"),
    (GRPOPolicyConfig, "model_name: m, hf_config_overrides: {max_position_embeddings: 32}",
     "max_total_sequence_length"),
    (GRPOPolicyConfig, BARE, "max_total_sequence_length"),
    (GRPOPolicyConfig,
     "model_name: m, dtensor_cfg: {lora_cfg: {enabled: true, match_all_linear: false}}",
     "dtensor_cfg.lora_cfg.target_modules"),
    (GRPOPolicyConfig,
     "model_name: m, generation: {vllm_cfg: {precision: fp8, gpu_memory_utilization: 0.6}}",
     "generation.vllm_cfg.precision"),
    (GRPOPolicyConfig, "model_name: m, generation: {vllm_cfg: {expert_parallel_size: 2}}",
     "generation.vllm_cfg.expert_parallel_size"),
    (GRPOPolicyConfig, "model_name: m, generation: {url: 'http://h/v1'}", "generation.url"),
    (GRPOPolicyConfig,
     "model_name: m, generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}",
     "generation.url"),
    (GRPOPolicyConfig,
     "model_name: m, generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 3}, "
     "colocated: {enabled: false, resources: {gpus_per_node: 4}}}",
     "generation.colocated.resources.gpus_per_node"),
    # environments, shaping and ensembles
    (RewardModelEnvironmentConfig, "model_name: m, dtensor_cfg: {tensor_parallel_size: 2}",
     "resources.gpus_per_node"),
    (RewardModelEnvironmentConfig,
     "model_name: m, dtensor_cfg: {tensor_parallel_size: 2, cpu_offload: true}",
     "dtensor_cfg.cpu_offload"),
    (RewardModelEnvironmentConfig, "model_name: m, dtensor_cfg: {lora_cfg: {enabled: true}}",
     "dtensor_cfg.lora_cfg.enabled"),
    (RewardModelEnvironmentConfig, "model_name: [a, b]", "model_name"),
    (RewardModelEnvironmentConfig, "model_name: [a, b], ensemble: {}, tokenizer: {name: a}",
     "tokenizer"),
    (RewardShapingConfig, "reward_mean: 1.0", "reward_std"),
    (RewardShapingConfig, "reward_mean: 1.0, reward_std: 2.0", "reward_mean"),
    (RewardShapingConfig, "preference_score: true, reference: par", "reference"),
    (RewardShapingConfig, "temperature: fitted", "temperature"),
    (JudgeEnvironmentConfig, "base_url: u, model: m, api_key: secret", "api_key"),
    (JudgeEnvironmentConfig, "base_url: u, model: m, mode: pairwise, template: '{completion_a}'",
     "template"),
    (JudgeEnvironmentConfig, "base_url: u, model: m, num_samples: 3", "num_samples"),
    (JudgeEnvironmentConfig, "base_url: u, model: m, use_logprobs: true, highest_rating: 10",
     "highest_rating"),
    (JudgeEnvironmentConfig, "model: m, extra_body: {top_p: 0.9}", "extra_body"),
    (JudgeEnvironmentConfig, "model: m, use_logprobs: true, lowest_rating: 8.5", "highest_rating"),
    (JudgeEnvironmentConfig, "base_url: u, model: m, mode: equivalence, use_logprobs: true",
     "mode"),
    (HybridEnvironmentConfig, "mode: fallback, members: {rules: {weight: 2}}",
     "members.rules.weight"),
    # servers
    (ServerConfig, "models: [{}]", "models[0].models"),
    (ServerConfig, "models: [{model: a, models: [b]}]", "models[0].models"),
    (ServerConfig, "models: [{model: a}, {model: b/a}, {model: x, name: a}]", "models"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "text", "field"), SECTIONS)
def test_what_a_section_refuses(section, text, field):
    values = OmegaConf.create(text if text == "{}" else f"{{{text}}}")
    with pytest.raises(ConfigError) as caught:
        load_section(section, values, where="there")
    error = caught.value
    assert (error.field, error.where) == (field, "there")
    assert (error.need or error.fix) and "None" not in str(error)


VALIDATION = "data.val_data_paths={hard_set: h, plain: p}"
URL = "policy.generation.url=http://h/v1"
VLLM = ("policy.generation.backend=vllm", URL)
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
COOLER = ("policy.generation.temperature=0.7", "policy.generation.top_p=0.9")
NO_REFERENCE = "grpo.skip_reference_policy_logprobs_calculation=true"
OF_TYPE = "+policy.reward_model_cfg.reward_model_type="
NO_PENALTY = "loss_fn.reference_policy_kl_penalty=0"

RUNS = [
    ("rm", ["data.max_input_seq_length=9000"], "data.max_input_seq_length"),
    ("rm", ["checkpointing.metric_name=val_loss"], "checkpointing.metric_name"),
    *(("rm", [VALIDATION, f"checkpointing.metric_name='{name}'"],
       "checkpointing.metric_name") for name in
      ("accuracy", "train:loss", "validation-default_f1", "validation-_loss", "validation-loss",
       "val_",
       "validation-hard_loss")),
    ("rm",
     [VALIDATION, "checkpointing.metric_name=val_loss", "rm.val_period=0", "rm.val_at_end=false"],
     "checkpointing.metric_name"),
    ("rm", ["hub={push_to_hub: true, repo_id: a/b}", "checkpointing.enabled=false"],
     "hub.push_to_hub"),
    ("rm", ["evaluation.enabled=true"], "evaluation.enabled"),
    ("grpo", ["policy.train_global_batch_size=24"], "policy.train_global_batch_size"),
    ("grpo", ["loss_fn.force_on_policy_ratio=true", "grpo.updates_per_batch=2"],
     "loss_fn.force_on_policy_ratio"),
    ("grpo", [*VLLM, "loss_fn.use_on_policy_kl_approximation=true", COOLER[1]],
     "loss_fn.use_on_policy_kl_approximation"),
    ("grpo", [*VLLM, "grpo.seq_logprob_error_threshold=2", COOLER[1]],
     "grpo.seq_logprob_error_threshold"),
    ("grpo", ["grpo.val_batch_size=300"], "grpo.val_batch_size"),
    ("grpo", ["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"],
     "grpo.advantage_clip_low"),
    ("grpo",
     ["policy.generation={vllm_cfg: {enforce_eager: true}, vllm_kwargs: {enforce_eager: false}}"],
     "policy.generation.vllm_cfg.enforce_eager"),
    ("grpo", ["~env.math", "~env.shape", "env.reward_model.enabled=false"], "env"),
    ("grpo", [NO_REFERENCE], "grpo.skip_reference_policy_logprobs_calculation"),
    ("grpo", [NO_REFERENCE, NO_PENALTY, "grpo.watch.max_kl=10"],
     "grpo.skip_reference_policy_logprobs_calculation"),
    ("grpo", [*VLLM, CORRECTED, COOLER[1]], "loss_fn.use_importance_sampling_correction"),
    ("grpo", ["data.max_input_seq_length=65"], "data.max_input_seq_length"),
    ("grpo", ["grpo.gold_environment=format"], "grpo.gold_environment"),
    ("grpo", ["data.env_name=maths"], "data.train[0].env_name"),
    ("grpo", ["env.math.enabled=false", "data.env_name=math"], "data.train[0].env_name"),
    ("grpo", ["grpo.gold_environment=math", "data.env_name=math"], "grpo.gold_environment"),
    ("grpo", ["grpo.watch.stop_on=[gold_falls]"], "grpo.watch.stop_on"),
    ("grpo", ["grpo.watch={stop_on: [truncation]}", "~data.val_data_path"], "grpo.watch.stop_on"),
    ("grpo", ["checkpointing.metric_name=val:reward", "~data.val_data_path"],
     "checkpointing.metric_name"),
    ("grpo", ["checkpointing.metric_name=val:reward", "grpo.val_period=0", "grpo.val_at_end=false"],
     "checkpointing.metric_name"),
    ("grpo", ["checkpointing.metric_name=val_gold_reward"], "checkpointing.metric_name"),
    ("grpo", ["checkpointing.metric_name=validation-math/reward"], "checkpointing.metric_name"),
    ("grpo", ["checkpointing.metric_name=val:kl", NO_REFERENCE, NO_PENALTY],
     "checkpointing.metric_name"),
    ("grpo", ["+env.preference_verdict={}", "data.env_name=preference_verdict",
              "policy.trust_remote_code=true"], "policy.trust_remote_code"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "overrides", "field"), RUNS)
def test_what_a_run_refuses(mistake, run, overrides, field):
    error = mistake(run, *overrides)
    assert error.field == field and error.need and error.fix


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("env.reward_model.batch_sise=3", "env.reward_model.batch_sise", "no such key"),
        ("env.math.pattern=x", "env.math.pattern", "rule: regex"),
        ("env.rewad_model={model_name: m}", "env.rewad_model", "no such kind"),
        ("env.mine={type: ruls}", "env.mine.type", "no such kind"),
        ("env.math=3", "env.math", "not a mapping"),
        (
            "env.mix={type: hybrid, members: {math: {pattern: x}}}",
            "env.mix.members.math.pattern",
            "rule: regex",
        ),
        (
            "env.mix={type: hybrid, members: {a: {type: rule}}}",
            "env.mix.members.a.type",
            "no such kind",
        ),
    ],
)
def test_environments_are_checked_by_their_kinds(mistake, override, field, words):
    error = mistake("grpo", override)
    assert (error.field, error.where) == (field, f"command line, {override}") and words in str(
        error
    )


REFUSED_LOSSES = [
    (["rm.loss=hinge"], "rm.loss"),
    (["rm.loss.strength=scores"], "rm.loss.strength"),
    ([OF_TYPE + "plackett_luce", "data.ties=half"], "data.ties"),
    ([OF_TYPE + "regression", "rm.loss.weight=pair"], "rm.loss.weight"),
    ([OF_TYPE + "attributes"], "policy.reward_model_cfg.attributes"),
    (["policy.reward_model_cfg.attributes=[a]"], "policy.reward_model_cfg.attributes"),
    ([OF_TYPE + "attributes",
      "policy.reward_model_cfg={attributes: [help], attribute_weights: {hlep: 1}}"],
     "policy.reward_model_cfg.attribute_weights.hlep"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "field"), REFUSED_LOSSES)
def test_a_loss_that_does_not_fit_is_refused(mistake, overrides, field):
    error = mistake("rm", *overrides)
    assert error.field == field and (error.need or error.fix)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight", "pair"),
        ("strength_scale", 2.0),
        ("label_smoothing", 0.1),
        ("center_rewards_coefficient", 0.2),
    ],
)
def test_an_option_reaches_its_losses_and_is_refused_with_others(
    load, mistake, loss, option, value
):
    attributes = "[help]" if loss == "attributes" else "[]"
    overrides = (
        OF_TYPE + loss,
        f"policy.reward_model_cfg.attributes={attributes}",
        f"rm.loss.{option}={value}",
    )
    if option not in LOSSES[loss].options:
        assert mistake("rm", *overrides).field == f"rm.loss.{option}"
        return
    config = load("rm", *overrides)
    assert getattr(config.rm.loss, option) == value
    assert option in LabelConfig.model_fields or config.rm.loss.arguments(loss)[option] == value
