"""treeward trains, examines, serves and optimises against reward models; the prompt is computed
once.

    from treeward import Scorer, load_config, train

    outcome = train(load_config("quickstart"))
    Scorer.load(outcome.model_folder).score_completions(context, ["an answer", "another"])

A name is imported when it is first used: `import treeward` loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from treeward.version import VERSION

if TYPE_CHECKING:
    from treeward.client.rewards import RewardClient as RewardClient
    from treeward.config.load import load_config as load_config
    from treeward.config.load import load_grpo_config as load_grpo_config
    from treeward.data.conversation import Conversation as Conversation
    from treeward.data.datasets import open_dataset as open_dataset
    from treeward.data.datasets import register_dataset as register_dataset
    from treeward.data.preference import Completion as Completion
    from treeward.data.preference import Preference as Preference
    from treeward.data.prompt_sets import register_prompt_dataset as register_prompt_dataset
    from treeward.data.rendering import Renderer as Renderer
    from treeward.environments.interface import Environment as Environment
    from treeward.environments.registry import make_environment as make_environment
    from treeward.environments.reward_model import RewardModelEnvironment as RewardModelEnvironment
    from treeward.environments.trl import as_trl as as_trl
    from treeward.errors import ConfigError as ConfigError
    from treeward.errors import DataError as DataError
    from treeward.errors import ModelError as ModelError
    from treeward.errors import TreewardError as TreewardError
    from treeward.http import RewardServerError as RewardServerError
    from treeward.model.reward_model import RewardModel as RewardModel
    from treeward.rl.grpo import grpo as grpo
    from treeward.scoring.score import Score as Score
    from treeward.scoring.scorer import Scorer as Scorer
    from treeward.scoring.scorer import load_reward_model as load_reward_model
    from treeward.scoring.verification import verify as verify
    from treeward.training.train import train as train

__version__ = VERSION

_HOMES = {
    "client.rewards": ("RewardClient",),
    "config.load": ("load_config", "load_grpo_config"),
    "data.conversation": ("Conversation",),
    "data.datasets": ("open_dataset", "register_dataset"),
    "data.preference": ("Completion", "Preference"),
    "data.prompt_sets": ("register_prompt_dataset",),
    "data.rendering": ("Renderer",),
    "environments.interface": ("Environment",),
    "environments.registry": ("make_environment",),
    "environments.reward_model": ("RewardModelEnvironment",),
    "environments.trl": ("as_trl",),
    "errors": ("ConfigError", "DataError", "ModelError", "TreewardError"),
    "http": ("RewardServerError",),
    "model.reward_model": ("RewardModel",),
    "rl.grpo": ("grpo",),
    "scoring.score": ("Score",),
    "scoring.scorer": ("Scorer", "load_reward_model"),
    "scoring.verification": ("verify",),
    "training.train": ("train",),
}
# Beside the imports above, which only type checkers read.
_HOME_OF: dict[str, str] = {}
for _home, _names in _HOMES.items():
    for _name in _names:
        _HOME_OF[_name] = f"treeward.{_home}"

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"treeward has no {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
