"""Models of a configuration before their weights are read: as large and as cut as in the run.

with torch.device("meta"):
    model = bare_reward_model(config.policy)
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.config.policy import PolicyConfig, TrainedModelConfig
from treeward.data.step_marks import TRAINED_MARK
from treeward.model.checks import choose_layout, tree_or_rows
from treeward.model.loading import classifier_class, step_classifier_class
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import bare_config, read_config
from treeward.model.reward_model import RewardModel


def bare_reward_model(policy: PolicyConfig) -> RewardModel:
    """The reward model of a run of `treeward train`."""
    section = policy.reward_model_cfg
    config = _config_of(policy)
    if section.learns_steps:
        config.num_labels = 2
        config.step_token_id = 0  # any: the tokenizer knows it, and no step is read here
        family = step_classifier_class(config, section.step_token or TRAINED_MARK)
        hf = _without_weights(family, config)
    else:
        num_heads = len(section.head_names) or 1
        hf = bare_classifier(config, policy.trust_remote_code, num_labels=num_heads)
    return RewardModel(hf, layout=choose_layout(hf, policy.attention))


def bare_policy(policy: GRPOPolicyConfig) -> PolicyModel:
    """The policy of a run of `treeward grpo`."""
    hf = bare_causal_model(_config_of(policy))
    return PolicyModel(hf, layout=tree_or_rows(hf, policy.attention))


def bare_causal_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model of transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def bare_classifier(
    config: PreTrainedConfig, trust_remote_code: bool = False, num_labels: int = 1
) -> PreTrainedModel:
    """A sequence classifier of transformers."""
    config.num_labels = num_labels
    return _without_weights(classifier_class(config, trust_remote_code), config)


def _without_weights(family: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = family._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def _config_of(policy: TrainedModelConfig) -> PreTrainedConfig:
    if policy.architecture is None:
        return read_config(str(policy.model_name), policy.trust_remote_code)
    fields = dict(policy.architecture)
    # A tokenizer that the run trains is not there yet, only the size that it is to have.
    if policy.trained_vocab_size is not None:
        fields.setdefault("vocab_size", policy.trained_vocab_size)
    return bare_config(fields)
