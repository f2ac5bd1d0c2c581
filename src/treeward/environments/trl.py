"""`as_trl`: a reward model, or any environment, as one of the `reward_funcs` of TRL's trainers.

    GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=as_trl("http://host:8000"), train_dataset=prompts)
    reward = as_trl(RewardModelEnvironment({"model_name": "results/rm/final"}))

TRL calls it with prompts, completions and the columns of the dataset, each a list with an entry per completion. A
missing reward is None, which TRL keeps out of the group's baseline and gives the advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treeward.data.conversation import without_nulls
from treeward.environments.interface import Environment
from treeward.environments.reward_model import RewardModelEnvironment

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments", "completion_ids"})
"""TRL's arguments that are not columns of the dataset (`GRPOTrainer._calculate_rewards`)."""


def as_trl(reward: Any, *, name: str | None = None, **settings: Any) -> Callable[..., list[float | None]]:
    """A reward as one of TRL's `reward_funcs`.

    `reward`: an `Environment`, the address of a `treeward serve` (`http://host:8000`), or the folder or hub name of a
    model. `settings`: for an address or a model, other keys of the section `env.reward_model`, as `token_env`. `name`:
    in TRL's log (`rewards/<name>/mean`). The columns of the dataset are the `env_infos`, without empty cells. Passes on
    the environment's errors.

    It adds to TRL's metrics `<name>/failed`, the share of completions without a reward, and `<name>/raw_mean`, the mean
    reward before shaping.
    """
    environment: Environment = reward
    if isinstance(reward, str):
        environment = RewardModelEnvironment({"model_name": reward, **settings})
    name = name or environment.name

    def rewards_of(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The rewards of B completions, None for none. `prompts`, `completions`: B lists of messages, or B texts."""
        logs = [
            without_nulls(_messages(prompt, "user")) + _messages(completion, "assistant")
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        log_metric = columns.get("log_metric")
        cells = {column: values for column, values in columns.items() if column not in _NOT_COLUMNS}
        # The prompts and the columns come from Arrow's tables.
        infos = [without_nulls({name: values[i] for name, values in cells.items()}) for i in range(len(logs))]
        rewards = environment.reward(logs, infos)
        if log_metric is not None and rewards:
            log_metric(f"{name}/failed", sum(reward.value is None for reward in rewards) / len(rewards))
            raw = [reward.raw for reward in rewards if reward.raw is not None]
            if raw:
                log_metric(f"{name}/raw_mean", sum(raw) / len(raw))
        return [reward.value for reward in rewards]

    rewards_of.__name__ = name
    return rewards_of


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """The messages of a conversational dataset, or text as one message."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)
