"""`EnvironmentRunner`: from groups of completions to their rewards, by the environment of each
prompt.

    runner = make_environment_runner(config, prompts)    # those that config and prompts name
    rewards = runner.reward(groups)                      # rewards_PG, raw_PG, failures, ...
    runner.gold(groups)                                  # the same, to watch; never trained on

`info["environment"]` of a prompt names its environment. Environments run side by side; each gets
raw messages and, as `env_infos`, copies of the prompt's `info` with `truncated`.

A completion without a reward is NaN and listed with the reason; it is never a number that trains.
An environment that raises gives no rewards in this step; one that is wrong itself (`ConfigError`,
`ModelError`) stops the run.

The main process alone has the environments and calls the runner.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treeward import processes
from treeward.config.grpo_run import GRPORunConfig
from treeward.data.conversation import Conversation
from treeward.data.prompt_sets import Prompt
from treeward.environments.interface import Environment
from treeward.environments.registry import make_environments
from treeward.errors import ConfigError, DataError, ModelError
from treeward.rl.generation import CompletionGroup, batch_shape
from treeward.scoring.score import Reward, reward_metrics

logger = logging.getLogger(__name__)

CHOICE = "environment"
"""The key of a prompt's `info` with the environment that rewards it."""

GOLD_LABEL = "gold"
"""The name of the gold environment in metrics, as in `gold/component/<name>`."""

_GOLD = "grpo.gold_environment"
_LARGEST = torch.finfo(torch.float32).max  # a larger reward would be infinite as a tensor
_MOST_COMPONENTS = 32


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """`rewards_PG`: float32, NaN for none. `raw_PG`: before the environments' shaping, NaN if
    unknown. `components`: float32 (P, G) by name, NaN where a reward has no such component, and
    `weights`: how much each counts in the rewards.
    `by_environment`: rewards by the name of their metrics. `failures`: (reason, place) of each
    missing reward.
    """

    rewards_PG: Tensor
    raw_PG: Tensor
    components: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    by_environment: Mapping[str, Sequence[Reward]]
    failures: Sequence[tuple[str, str]]


class EnvironmentRunner:
    """Runs `environments`, by name, and shuts them down.

    `default`: for prompts that name none. `gold`: another environment, for the watch alone.
    `row_components`: of rewards, those that come with the rows of the data.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        default: str | None,
        *,
        gold: Environment | None = None,
        row_components: Collection[str] = (),
    ) -> None:
        self.environments = dict(environments)
        self.row_components = frozenset(row_components)
        self._default = default
        if gold is not None:
            self.environments[_GOLD] = gold

    def reward(self, groups: Sequence[CompletionGroup]) -> GroupRewards:
        """Rewards of every completion of every group.

        Raises `ConfigError` or `ModelError` for an environment that is wrong itself.
        """
        names: list[str] = []
        for group in groups:
            name = str(group.prompt.info.get(CHOICE) or self._default)
            assert name in self.environments, "`make_environment_runner` makes all that are named"
            names += [name] * len(group.completions)
        rewards = self._group_rewards(names, groups)
        _warn_of_failures(rewards, "reward")
        return rewards

    def gold(self, groups: Sequence[CompletionGroup]) -> GroupRewards:
        """Rewards of the gold environment. Raises as `reward` does."""
        rewards = self._group_rewards([_GOLD] * math.prod(batch_shape(groups)), groups)
        _warn_of_failures(rewards, "gold reward")
        return rewards

    def shutdown(self) -> None:
        """Free the models, workers and connections of the environments. Safe to repeat."""
        # All of them, also where one raises: its code may be the user's.
        with contextlib.ExitStack() as opened:
            for environment in self.environments.values():
                opened.callback(environment.shutdown)

    def _group_rewards(
        self, names: Sequence[str], groups: Sequence[CompletionGroup]
    ) -> GroupRewards:
        """`names`: the environment of each completion, through all groups."""
        shape = batch_shape(groups)
        rewards_by_name = self._ask(names, groups)
        # Each environment has kept the order of its completions.
        in_order = {name: iter(rewards) for name, rewards in rewards_by_name.items()}
        rewards = [next(in_order[name]) for name in names]
        failures = []
        for i, reward in enumerate(rewards):
            if reward.value is None:
                # The completions of a group lie side by side.
                p, g = divmod(i, shape[1])
                where = f"{groups[p].prompt.where or f'prompt {p}'}, completion {g}"
                failures.append((f"{names[i]}: {reward.error}", where))
        values = [reward.value for reward in rewards]
        # `_ask` has looked at the values alone, and an infinite raw one would spoil its mean.
        raw_values = [_finite(Reward(reward.raw)).value for reward in rewards]
        names_of_components = dict.fromkeys(key for reward in rewards for key in reward.components)
        components = {}
        weights = {}
        for key in names_of_components:
            parts_N = _tensor([reward.components.get(key) for reward in rewards])
            components[key] = parts_N.reshape(shape)
            weights_N = _tensor([reward.weights.get(key, 1.0) for reward in rewards])
            weights[key] = weights_N.reshape(shape)
        by_environment: dict[str, list[Reward]] = {}
        for name, own_rewards in rewards_by_name.items():
            # Gold may be of a class that rewards completions too.
            label = GOLD_LABEL if name == _GOLD else self.environments[name].name
            by_environment[label] = own_rewards
        return GroupRewards(
            rewards_PG=_tensor(values).reshape(shape),
            raw_PG=_tensor(raw_values).reshape(shape),
            components=components,
            weights=weights,
            by_environment=by_environment,
            failures=failures,
        )

    def _ask(
        self,
        names: Sequence[str],
        groups: Sequence[CompletionGroup],
    ) -> dict[str, list[Reward]]:
        """The rewards of each environment. `names`: as in `_group_rewards`."""
        conversations: list[Conversation] = []
        infos: list[dict[str, Any]] = []
        for group in groups:
            conversations += group.conversations
            for completion in group.completions:
                infos.append({**group.prompt.info, "truncated": completion.truncated})

        def ask(name: str) -> list[Reward]:
            chosen = [i for i, choice in enumerate(names) if choice == name]
            own_conversations = [conversations[i] for i in chosen]
            own_infos = [infos[i] for i in chosen]
            # Copies, which an environment may change.
            copies = copy.deepcopy((own_conversations, own_infos))
            try:
                rewards = self.environments[name].rewards(*copies)
            except (ConfigError, ModelError):
                raise
            except Exception as error:
                # An environment's code is the user's: its fault costs these samples, and the run
                # decides by `grpo.max_failed_share` whether it goes on.
                reason = f"it raised {type(error).__name__}: {error}"
                logger.warning("%s has no rewards in this step: %s", name, reason, exc_info=error)
                return [Reward(None, error=reason)] * len(chosen)
            if len(rewards) != len(chosen):
                summary = f"the environment gives {len(rewards)} rewards for {len(chosen)} samples"
                raise ConfigError(summary, where=name)
            return [_finite(reward) for reward in rewards]

        environments = list(dict.fromkeys(names))
        # Side by side, because most of them wait for a server or for processes.
        with ThreadPoolExecutor(max(len(environments), 1)) as threads:
            return dict(zip(environments, threads.map(ask, environments), strict=True))


def make_environment_runner(config: GRPORunConfig, prompts: Sequence[Prompt]) -> EnvironmentRunner:
    """The runner of a run, with the environments of `env` that the configuration or a prompt names.

    The main process makes them. Raises `DataError` for a prompt that cannot be rewarded, and passes
    on the errors of an environment's constructor, after it has shut the others down.
    """
    default = config.default_environment
    gold = config.grpo.gold_environment
    used: list[str] = []
    if default:
        used.append(default)
    used += config.named_environments
    for prompt in prompts:
        # The data's reader has checked that the environment exists.
        choice: str | None = prompt.info.get(CHOICE) or default
        if choice is not None and choice != gold:
            used.append(choice)
            continue
        summary = "the prompt chooses no environment, and there is no default (env_name of its set)"
        if choice is not None:
            summary = (
                "a prompt is rewarded by grpo.gold_environment: it can show no over-optimisation"
            )
        raise DataError(summary, where=prompt.where, field=CHOICE, got=choice)
    sections = {name: config.env[name] for name in used}
    if gold is not None:
        sections[gold] = config.env[gold]
    # The other processes know the names, and ask the main process for the rewards.
    environments = {}
    row_components: set[str] = set()
    if processes.is_main():
        environments = make_environments(sections)
        with contextlib.ExitStack() as opened:
            for environment in environments.values():
                opened.callback(environment.shutdown)
            for prompt in prompts:
                # Chosen or the default: a prompt without either was refused above.
                name = str(prompt.info.get(CHOICE) or default)
                environments[name].check_info(prompt.info, prompt.where)
                if gold is not None:
                    environments[gold].check_info(prompt.info, prompt.where)
                row_components.update(environments[name].row_components(prompt.info))
            opened.pop_all()  # from here on `EnvironmentRunner.shutdown` frees them
    gold_environment = None
    if gold is not None:
        gold_environment = environments.get(gold)
    used_environments = {}
    for name, environment in environments.items():
        if name in used:
            used_environments[name] = environment
    return EnvironmentRunner(
        used_environments, default, gold=gold_environment, row_components=row_components
    )


def environment_metrics(draws: Sequence[GroupRewards]) -> dict[str, float]:
    """`reward_metrics` of each environment over all draws, and the means
    `<name>/component/<component>` of the most frequent components."""
    by_environment: dict[str, list[Reward]] = defaultdict(list)
    for draw in draws:
        for label, rewards in draw.by_environment.items():
            by_environment[label] += rewards
    metrics: dict[str, float] = {}
    for label, rewards in by_environment.items():
        values_N = _tensor([reward.value for reward in rewards])
        metrics |= reward_metrics(label, values_N)
        components: dict[str, list[float]] = defaultdict(list)
        for reward in rewards:
            for name, value in reward.components.items():
                if math.isfinite(value):
                    components[name].append(value)
        num_known = {name: len(values) for name, values in components.items()}
        for name in most_frequent(num_known):
            metrics[f"{label}/component/{name}"] = sum(components[name]) / num_known[name]
    return metrics


def most_frequent(num_known: Mapping[str, int]) -> list[str]:
    """The components that are measured, of those with so many values: rubrics may have other
    criteria for each prompt, and a tracker of metrics has no place for thousands."""
    kept = sorted(num_known, key=lambda name: num_known[name], reverse=True)[:_MOST_COMPONENTS]
    return [name for name in num_known if name in set(kept)]


def _warn_of_failures(rewards: GroupRewards, what: str) -> None:
    if rewards.failures:
        logger.warning(
            "%d of %d completions have no %s: %s",
            len(rewards.failures),
            rewards.rewards_PG.numel(),
            what,
            failure_summary(rewards.failures),
        )


def failure_summary(failures: Sequence[tuple[str, str]]) -> str:
    """The three most frequent reasons, each with its count and the first completion that has it."""
    first: dict[str, str] = {}
    for reason, place in failures:
        first.setdefault(reason, place)
    counts = Counter(reason for reason, _ in failures)
    parts = []
    for reason, count in counts.most_common(3):
        parts.append(f"{count} x {reason} ({first[reason]})")
    return "; ".join(parts)


def _finite(reward: Reward) -> Reward:
    """The reward; its value is None where it is no finite float32."""
    value = reward.value
    if value is None:
        reason = "no reward"
    elif not abs(value) <= _LARGEST:  # true of NaN too
        reason = f"the reward is {value}"
    else:
        return reward
    return replace(reward, value=None, error=reward.error or reason)


def _tensor(values: Sequence[float | None]) -> Tensor:
    numbers = []
    for value in values:
        numbers.append(math.nan if value is None else value)
    return torch.tensor(numbers, dtype=torch.float32)
