"""What ranks the checkpoints of a run of GRPO."""

import pytest

from treeward.config.grpo_checkpointing import GRPO_METRICS, GRPOCheckpointingConfig, parse_grpo_metric_name
from treeward.errors import ConfigError


def wrong(section, **keys):
    with pytest.raises(ConfigError) as caught:
        section(**keys)
    return caught.value


@pytest.mark.parametrize(
    "name", ["val_reward", "val:reward", "validation/reward", "val:accuracy", "val_accuracy", "val:validation/reward"]
)
def test_names_of_the_reward(name):
    assert parse_grpo_metric_name(name) == "reward"


def test_which_direction_is_better():
    assert {metric: better for metric, better in GRPO_METRICS.items() if better is not None} == {
        "reward": True,
        "raw_reward": True,
        "proxy": True,
        "gold_reward": True,
        "kl": False,
        "truncation_rate": False,
    }


@pytest.mark.parametrize("metric", GRPO_METRICS)
def test_every_metric_has_its_direction(metric):
    assert parse_grpo_metric_name(f"val_{metric}") == metric
    direction = GRPO_METRICS[metric]
    if direction is None:
        assert wrong(GRPOCheckpointingConfig, metric_name=f"val:{metric}").field == "higher_is_better"
    else:
        assert GRPOCheckpointingConfig(metric_name=f"val:{metric}").metric_is_better_when_higher is direction
        contrary = wrong(GRPOCheckpointingConfig, metric_name=f"val:{metric}", higher_is_better=not direction)
        assert "contradicts" in contrary.summary


@pytest.mark.parametrize("name", ["reward", "train:reward", "train/loss", "val_loss", "val_length_controlled_accuracy"])
def test_other_names_are_refused(name):
    error = wrong(GRPOCheckpointingConfig, metric_name=name)
    assert error.field == "metric_name" and "val:<metric>" in error.need


def test_a_near_name_is_suggested():
    assert wrong(GRPOCheckpointingConfig, metric_name="val:rewards").fix == "did you mean val:reward?"
