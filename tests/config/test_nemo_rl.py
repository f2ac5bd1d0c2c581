"""Configurations of NeMo RL's GRPO, by keys and values as its files have had them, load unchanged."""

import logging

import pytest

from treeward.config import load_grpo_config, save_config
from treeward.errors import ConfigError

# What the files of all versions have in common.
POLICY = """
policy:
  model_name: "Qwen/Qwen2.5-1.5B"
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  generation_batch_size: 32
  logprob_batch_size: 4
  max_total_sequence_length: 512
  precision: "bfloat16"
  logprob_chunk_size: null
  dtensor_cfg:
    _v2: true
    enabled: true
    cpu_offload: False
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    custom_parallel_plan: null
  megatron_cfg:
    enabled: false
    converter_type: "Qwen2ForCausalLM"
    pipeline_dtype: ${policy.precision}
    moe_router_dtype: "fp64"
    optimizer: {optimizer: "adam", lr: 5.0e-6, bf16: true, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {start_weight_decay: "${policy.megatron_cfg.optimizer.lr}", lr_warmup_iters: 13}
    fp8_cfg: null
    env_vars: null
  dynamic_batching:
    enabled: False
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    sequence_length_round: 64
  sequence_packing:
    enabled: True
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    algorithm: "modified_first_fit_decreasing"
    sequence_length_round: 64
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: "torch.optim.AdamW"
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8, foreach: False, fused: False}
  scheduler:
    - {name: "torch.optim.lr_scheduler.LinearLR", kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: "torch.optim.lr_scheduler.ConstantLR", kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: "vllm"
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    stop_token_ids: null
    stop_strings: null
    vllm_cfg:
      async_engine: false
      precision: ${policy.precision}
      tensor_parallel_size: 1
      gpu_memory_utilization: 0.6
      max_model_len: ${policy.max_total_sequence_length}
      enforce_eager: False
    vllm_kwargs: {}
    colocated:
      enabled: true
      resources: {gpus_per_node: null, num_nodes: null}
"""
LOGGER = """
logger:
  log_dir: "logs"
  num_val_samples_to_print: 0
  wandb_enabled: false
  tensorboard_enabled: false
  mlflow_enabled: false
  swanlab_enabled: false
  monitor_gpus: true
  wandb: {project: "grpo-dev", name: "grpo-dev-logger"}
  swanlab: {project: "grpo-dev", name: "grpo-dev-logger"}
  tensorboard: {}
  mlflow: {experiment_name: "grpo-dev", run_name: "grpo-dev-logger"}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
# The first version of grpo_rm_1B.yaml, a file of its own.
FIRST = (
    """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  max_val_samples: 256
  val_batch_size: 256
  seed: 42
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  sequence_level_importance_ratios: false
  token_level_loss: true
checkpointing:
  enabled: true
  checkpoint_dir: "results/grpo"
  metric_name: "val_reward"
  higher_is_better: true
  keep_top_k: 3
  save_period: 10
  checkpoint_must_save_by: null
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  prompt_file: "examples/prompts/cot.txt"
  system_prompt_file: null
  dataset_name: "OpenMathInstruct-2"
  shuffle: true
env:
  reward_model:
    enabled: true
    model_name: "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    tokenizer: {name: "${env.reward_model.model_name}"}
    precision: "bfloat16"
    batch_size: ${policy.train_micro_batch_size}
    checkpoint_path: null
    max_model_len: 2048
    logprob_batch_size: ${policy.logprob_batch_size}
    resources: {gpus_per_node: 1, num_nodes: 1}
    reward_model_cfg: {enabled: true, reward_model_type: "bradley_terry"}
    dtensor_cfg: {_v2: true, enabled: true, cpu_offload: False, sequence_parallel: false,
                  activation_checkpointing: false, tensor_parallel_size: 1, context_parallel_size: 1,
                  custom_parallel_plan: null}
    dynamic_batching: {enabled: False}
    sequence_packing: {enabled: False}
    max_grad_norm: null
"""
    + POLICY
    + LOGGER
)
# A later grpo_math_1B.yaml: blocks of data, LoRA, dynamic sampling, shaping and scaling of rewards.
MATH = (
    """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_epochs: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  overlong_filtering: false
  max_val_samples: 256
  val_batch_size: 256
  seed: 42
  use_dynamic_sampling: false
  dynamic_sampling_max_gen_batches: 10
  batch_multiplier: 1
  reward_shaping: {enabled: false, overlong_buffer_length: 128, overlong_buffer_penalty: 1,
                   max_response_length: "${policy.max_total_sequence_length}"}
  reward_scaling: {enabled: false, source_min: 0.0, source_max: 1.0, target_min: 0.0, target_max: 1.0}
  async_grpo: {enabled: false, max_trajectory_age_steps: 1, in_flight_weight_updates: false,
               recompute_kv_cache_after_weight_updates: false}
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: "k3"
  kl_input_clamp_value: 20.0
  kl_output_clamp_value: 10.0
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  truncated_importance_sampling_ratio: null
  sequence_level_importance_ratios: false
  token_level_loss: true
  force_on_policy_ratio: false
checkpointing:
  enabled: true
  checkpoint_dir: "results/grpo"
  metric_name: "val:accuracy"
  higher_is_better: true
  keep_top_k: 3
  save_period: 10
  checkpoint_must_save_by: null
  model_save_format: "safetensors"
  save_consolidated: false
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  num_workers: 1
  train:
    dataset_name: OpenMathInstruct-2
    split_validation_size: 0.05
    seed: ${grpo.seed}
  validation: null
  default:
    prompt_file: "examples/prompts/cot.txt"
    system_prompt_file: null
    processor: "math_hf_data_processor"
    env_name: "math"
env:
  math: {num_workers: 8, math_verify_impl: "hf_math_verify"}
"""
    + POLICY.replace(
        "    custom_parallel_plan: null\n",
        """    custom_parallel_plan: null
    lora_cfg: {enabled: False, target_modules: [], exclude_modules: [], match_all_linear: true, dim: 8, alpha: 32,
               dropout: 0.0, dropout_position: "post", lora_A_init: "xavier", use_triton: true}
""",
    ).replace(
        "  precision:",
        """  hf_config_overrides: {}
  offload_optimizer_for_logprob: false
  precision:""",
        1,
    )
    + LOGGER
)
# grpo_rm_1B.yaml over it.
RM = """
defaults: "grpo_math_1B.yaml"
env:
  reward_model:
    enabled: true
    model_name: "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    tokenizer: {name: "${env.reward_model.model_name}"}
    precision: "bfloat16"
    batch_size: ${policy.train_micro_batch_size}
    checkpoint_path: null
    max_model_len: 2048
    resources: {gpus_per_node: 1, num_nodes: 1}
    dtensor_cfg: {_v2: true, enabled: true, sequence_parallel: false, tensor_parallel_size: 1, context_parallel_size: 1,
                  custom_parallel_plan: null}
"""
# The keys that newer versions of the schema have, at their defaults.
NEWEST = """
defaults: "grpo_math_1B.yaml"
grpo:
  advantage_clip_low: null
  advantage_clip_high: null
  val_start_at: -1
  val_at_end: false
  val_num_generations_per_prompt: 4
  stop_at_validation_metric: null
  skip_reference_policy_logprobs_calculation: false
  calculate_advantages_on_gpu: false
  seq_logprob_error_threshold: null
  invalid_tool_call_advantage: null
  async_grpo: null
  adv_estimator: {name: "reinforce_plus_plus", minus_baseline: true}
  reward_shaping: {stop_properly_penalty_coef: null}
loss_fn: {disable_ppo_ratio: false, use_kl_in_reward: true, use_cispo: false, positive_example_nll_weight: 0.0,
          truncated_importance_sampling_type: null, truncated_importance_sampling_ratio_min: null}
reward_penalties: {penalize_duplicated_reasoning: false, penalize_unwanted_tokens: false}
data_plane: {enabled: false, impl: transfer_queue}
policy: {draft: {enabled: false, model_name: null}}
"""
MULTIPLE = """
defaults: "grpo_math_1B.yaml"
data:
  _override_: true
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  num_workers: 1
  train:
    - {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, seed: "${grpo.seed}"}
    - dataset_name: DeepScaler
  validation:
    - {dataset_name: AIME2024, repeat: 16}
  default: {prompt_file: "examples/prompts/cot.txt", system_prompt_file: null, processor: "math_hf_data_processor",
            env_name: "math"}
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "grpo_math_1B.yaml").write_text(MATH, encoding="utf-8")

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def parts(sets):
    return [(one.dataset_name, one.part, one.split_validation_size) for one in sets]


@pytest.mark.parametrize("text", [FIRST, MATH, RM, NEWEST, MULTIPLE], ids=["first", "math", "rm", "newest", "multiple"])
def test_it_loads_and_survives_saving(write, text, tmp_path):
    config = load_grpo_config(write(text))
    save_config(config, tmp_path / "resolved.yaml")
    assert load_grpo_config(tmp_path / "resolved.yaml") == config


def test_the_first_file_means_what_it_meant(write, caplog):
    with caplog.at_level(logging.DEBUG, logger="treeward.config"):
        config = load_grpo_config(write(FIRST))
    assert (config.grpo.completions_per_step, config.prompts_per_update, config.completions_per_update) == (
        512,
        32,
        512,
    )
    assert (config.grpo.estimator, config.grpo.divides_by_std) == ("leave_one_out", True)
    assert config.policy.micro_batch_tokens == 4 * 512
    assert (config.max_new_tokens, config.max_prompt_length) == (512, 511)
    assert config.policy.generated_at_once == 32
    assert config.ranking_metric == "reward"
    assert config.used_environments == ("reward_model",)
    assert config.default_environments == {"reward_model": 1.0}
    assert parts(config.data.train) == [("OpenMathInstruct-2", "train", 0.05)]
    assert parts(config.data.validation) == [("OpenMathInstruct-2", "validation", 0.05)]
    assert {one.prompt_file for one in (*config.data.train, *config.data.validation)} == {"examples/prompts/cot.txt"}
    for key in ("vllm_kwargs", "max_grad_norm", "monitor_gpus"):
        assert f"{key} has no effect" in caplog.text
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "the policy itself samples" in warnings[0]


def test_the_reward_model_replaces_the_rule(write):
    config = load_grpo_config(write(RM), ["data.default.env_name=reward_model"])
    assert config.environments == ("math", "reward_model")
    assert config.used_environments == ("reward_model",)
    assert [one.env_name for one in config.data.validation] == ["reward_model"]
    assert any("env.math" in remark for remark in config.remarks)
    assert load_grpo_config(write(RM)).used_environments == ("math",), "as data.default.env_name says"


def test_newer_names_mean_ours(write):
    config = load_grpo_config(write(NEWEST))
    assert (config.grpo.estimator, config.grpo.divides_by_std) == ("reinforce_plus_plus", True)
    assert config.loss_fn.kl_in_reward
    assert config.grpo.num_val_generations == 4


def test_a_section_may_replace_that_of_the_defaults(write):
    config = load_grpo_config(write(MULTIPLE))
    assert parts(config.data.train) == [("OpenMathInstruct-2", "train", 0.05), ("DeepScaler", None, 0.0)]
    assert [one.name for one in config.data.validation] == ["default", "held_out"]
    assert [one.dataset_name for one in config.data.validation] == ["AIME2024", "OpenMathInstruct-2"]
    own = "{train: {data_path: t}, validation: {data_path: v}, _override_: %s}"
    base = f"defaults: grpo_math_1B.yaml\ndata: {own}\ngrpo: {{environments: math}}"
    replaced = load_grpo_config(write(base % "true")).data.train[0]
    assert (replaced.prompt_file, replaced.split_validation_size) == (None, 0.0)
    assert "_override_" in str(pytest.raises(ConfigError, load_grpo_config, write(base % "false")).value)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("grpo.async_grpo.enabled=true", "grpo.async_grpo.enabled"),
        ("grpo.max_rollout_turns=3", "grpo.max_rollout_turns"),
        ("grpo.advantage_clip_low=-5.0", "grpo.advantage_clip_low"),
        ("grpo.val_start_at=100", "grpo.val_start_at"),
        ("grpo.reward_shaping.stop_properly_penalty_coef=0.5", "grpo.reward_shaping.stop_properly_penalty_coef"),
        ("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.name"),
        ("loss_fn.use_cispo=true", "loss_fn.use_cispo"),
        ("loss_fn.disable_ppo_ratio=true", "loss_fn.disable_ppo_ratio"),
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled"),
        ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.generation.backend=megatron", "policy.generation.backend"),
        ("policy.generation.vllm_cfg.precision=fp8", "policy.generation.vllm_cfg.precision"),
        ("policy.draft.enabled=true", "policy.draft"),
        ("policy.reward_model_cfg.enabled=true", "policy.reward_model_cfg"),
        ("data.train.processor=sft_processor", "data.train.processor"),
        ("env.math.math_verify_impl=dapo_math_verify", "env.math.math_verify_impl"),
        ("reward_penalties.penalize_unwanted_tokens=true", "reward_penalties"),
        ("async_rl.sampler.name=in_order", "async_rl"),
        ("data_plane.enabled=true", "data_plane"),
        ("cluster.gpus_per_node=2", "cluster.gpus_per_node"),
    ],
)
def test_what_cannot_be_done_is_refused_where_it_is_switched_on(write, override, field):
    with pytest.raises(ConfigError) as caught:
        load_grpo_config(write(MATH), [override])
    assert caught.value.field == field
    assert caught.value.need or caught.value.fix
    assert override in caught.value.where
