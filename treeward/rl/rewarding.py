"""`RewardSource`: from groups of completions to their rewards, by one environment or several.

    source = make_reward_source(env_section, {"reward_model": 1.0}, gold="judge", timeout_seconds=600)
    source.check(prompts)                                # every row names environments that there are
    found = source.reward(groups)                        # rewards_PG, raw_PG, known_PG, errors, metrics
    source.gold(groups)                                  # (P, G), for watching; never trained on

A prompt may choose for itself: `info["environment"]` is a name, or a mapping from names to weights; the reward is then
the weighted sum. Each environment is asked once a step, with all of its completions, while the others are asked too. It
is given raw messages and, as `env_infos`, copies of the prompt's `info` with `truncated`, whether the completion was
cut off.

A completion that has no reward is NaN and counted with its reason; it is never a number that trains. An environment
that is wrong itself (`ConfigError`, `ModelError`) stops the run, and the statistics of all are then those before the
step.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from treeward.config.base import nearest_name
from treeward.environments.hybrid import weighted_sum
from treeward.environments.interface import DETAILS, Environment, EnvironmentReturn, Reward, reward_metrics
from treeward.environments.registry import make_named, sections_of
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.rl.asking import STOPS, Asker, Question
from treeward.rl.experience import CompletionGroup, Prompt

__all__ = ["GroupRewards", "MissingReward", "RewardSource", "chosen_names", "make_reward_source"]

logger = logging.getLogger(__name__)

CHOICE = "environment"
"""The key of a prompt's `info` with the environment, or environments, that reward it."""

_LARGEST = torch.finfo(torch.float32).max
_SHUTDOWN_SECONDS = 30.0
_MOST_LOGGED = 3

Missing = Literal["mask", "renormalise"]


@dataclass(frozen=True, slots=True)
class MissingReward:
    """How many completions have no reward for one reason, and which is the first: its prompt and place in the group."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What came of a step. `rewards_PG`: float32, NaN where there is none. `raw_PG`: the same before the environments'
    own shaping; NaN where it is not known. `known_PG`: bool, which completions have a reward. `errors`: by reason.

    `metrics`: of each environment that was asked, `reward_metrics` and `<name>/component/<component>`, means.
    """

    rewards_PG: Tensor
    raw_PG: Tensor
    known_PG: Tensor
    errors: Mapping[str, MissingReward]
    metrics: Mapping[str, float]


class RewardSource:
    """Asks `environments`, by name: each an `Environment`, or the handle of a Ray actor of one.

    `weights`: of prompts that choose none; may be empty where every prompt does. `missing`: what a completion gets that
    one of several environments could not reward: nothing (`mask`), or the sum of the others, scaled up (`renormalise`).
    `timeout_seconds`: of a step; an environment that takes longer gives no rewards, and `ModelError` stops the run
    when it has done so `max_hangs` times in succession. None: it has all the time.

    The environments are the source's own: nobody else asks them or changes their state.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment | Any],
        weights: Mapping[str, float],
        *,
        gold: Environment | Any | None = None,
        timeout_seconds: float | None = None,
        missing: Missing = "mask",
        max_hangs: int = 3,
    ) -> None:
        self.timeout_seconds, self.missing, self.max_hangs = timeout_seconds, missing, max_hangs
        self._askers = {name: Asker(name, environment) for name, environment in environments.items()}
        self._default = _checked(weights, self._askers, missing, ConfigError, "grpo", "environments") if weights else {}
        same = (self._askers[name] for name, environment in environments.items() if environment is gold)
        self._gold = None if gold is None else next(same, None) or Asker("gold", gold)
        self._labels = _labels(environments)
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The environments that a prompt may choose."""
        return tuple(self._askers)

    @property
    def has_gold(self) -> bool:
        return self._gold is not None

    def check(self, prompts: Iterable[Prompt]) -> None:
        """That each prompt is rewarded by environments that there are. Raises `DataError` with the prompt's place."""
        for prompt in prompts:
            self._weights(prompt)

    def reward(self, groups: Sequence[CompletionGroup], *, update: bool = True) -> GroupRewards:
        """Rewards of every completion of every group, all groups of one size.

        `update`: off in validation, whose completions then count in no running statistics. Raises `ConfigError`,
        `ModelError` or `CheckpointError` for an environment that is wrong itself or hangs again and again, and
        `DataError` for a prompt that chooses an unknown one.
        """
        weights_P = [self._weights(group.prompt) for group in groups]
        chosen: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for p, group in enumerate(groups):
            for name in weights_P[p]:
                chosen[name] += [(p, g) for g in range(len(group.completions))]
        found = self._ask({self._askers[name]: places for name, places in chosen.items()}, groups, update=update)
        parts: dict[tuple[int, int], dict[str, Reward]] = defaultdict(dict)
        metrics: dict[str, float] = {}
        for name, places in chosen.items():
            metrics |= _metrics(self._labels[name], found[name])
            for place, reward in zip(places, found[name], strict=True):
                parts[place][name] = reward
        return self._summed(groups, weights_P, parts, metrics)

    def gold(self, groups: Sequence[CompletionGroup]) -> Tensor:
        """What the gold environment says, float32 (P, G), NaN where it says nothing. It learns no statistics from it.

        Raises `ConfigError` where there is none, and what `reward` raises.
        """
        if self._gold is None:
            raise ConfigError("there is no gold environment", field="gold_environment", got=None, need="a name")
        places = [(p, g) for p, group in enumerate(groups) for g in range(len(group.completions))]
        found = self._ask({self._gold: places}, groups, update=False)[self._gold.name]
        values = [_number(reward.value) for reward in found]
        missing = [reward.error for reward in found if reward.value is None]
        if missing:
            logger.warning(
                "%d of %d completions have no gold reward; the first: %s", len(missing), len(values), missing[0]
            )
        return torch.tensor(values, dtype=torch.float32).reshape(_shape(groups))

    def state_dict(self) -> dict[str, Any]:
        """By name, the state of each environment after the last step; never waits for one that hangs."""
        return {name: asker.state for name, asker in self._askers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` for that of other environments."""
        if state.keys() != self._askers.keys():
            raise CheckpointError(
                "this is not the state of these environments",
                got=", ".join(map(str, state)) or "none",
                need=", ".join(self._askers) or "none",
                fix="resume with the environments that the run was started with",
            )
        for name, asker in self._askers.items():
            asker.load(state[name])

    def shutdown(self) -> bool:
        """Free what the environments hold; False where one does not manage to. It can be called twice."""
        if self._closed:
            return True
        self._closed = True
        askers = {id(asker): asker for asker in (*self._askers.values(), self._gold) if asker is not None}
        return all([asker.shutdown(_SHUTDOWN_SECONDS) for asker in askers.values()])

    def _ask(
        self, chosen: Mapping[Asker, Sequence[tuple[int, int]]], groups: Sequence[CompletionGroup], *, update: bool
    ) -> dict[str, list[Reward]]:
        """By the asker's name, a reward for each of its places, in order. What raises leaves every state as it was."""
        if self._closed:
            raise ModelError("the environments were shut down", got="a step after shutdown()", fix="make new ones")
        deadline = None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds
        questions: dict[Asker, Question] = {}
        try:
            for asker, places in chosen.items():
                questions[asker] = asker.ask(*_samples(groups, places), update=update)
            outcomes = {asker: asker.outcome(question, deadline) for asker, question in questions.items()}
            found = {asker.name: self._rewards(asker, outcomes[asker], len(chosen[asker])) for asker in chosen}
        except BaseException:
            for asker, question in questions.items():
                asker.give_up(question)
                asker.undo(question)
            raise
        for asker, question in questions.items():
            asker.keep(question)
        return found

    def _rewards(self, asker: Asker, outcome: EnvironmentReturn | BaseException | None, count: int) -> list[Reward]:
        if isinstance(outcome, STOPS):
            raise outcome
        if isinstance(outcome, EnvironmentReturn):
            if len(outcome.rewards) != count:
                raise ConfigError(
                    "the environment does not give one reward for each sample",
                    where=asker.name,
                    got=f"{len(outcome.rewards)} rewards for {count} samples",
                    need="as many of one as of the other, in order",
                )
            return [_reward(*sample) for sample in zip(outcome.rewards.tolist(), outcome.metadata, strict=True)]
        if outcome is not None:
            reason = f"it raised {type(outcome).__name__}: {outcome}"
            logger.warning("%s has no rewards in this step: %s", asker.name, reason, exc_info=outcome)
            return [Reward(None, error=reason)] * count
        reason = f"no rewards within {self.timeout_seconds:g} seconds"
        if asker.num_hangs >= self.max_hangs:
            raise ModelError(
                f"the environment {asker.name} hangs",
                where=asker.name,
                got=f"{reason}, {asker.num_hangs} steps in succession",
                need="rewards",
                fix="look at what it waits for, or give it more time with grpo.environment_timeout_seconds",
            )
        logger.warning("%s has no rewards in this step: %s; what it says later is dropped", asker.name, reason)
        return [Reward(None, error=reason)] * count

    def _summed(
        self,
        groups: Sequence[CompletionGroup],
        weights_P: Sequence[Mapping[str, float]],
        parts: Mapping[tuple[int, int], Mapping[str, Reward]],
        metrics: Mapping[str, float],
    ) -> GroupRewards:
        values, raws, errors = [], [], dict[str, MissingReward]()
        for p, group in enumerate(groups):
            for g in range(len(group.completions)):
                by_name = parts[p, g]
                reward = weighted_sum(by_name, weights_P[p], missing=self.missing)
                before = {name: Reward(one.raw, error="") for name, one in by_name.items()}
                values.append(_number(reward.value))
                raws.append(_number(weighted_sum(before, weights_P[p], missing=self.missing).value))
                if math.isnan(values[-1]):
                    reason = reward.error or "the weighted sum is not finite"
                    known = errors.get(reason)
                    example = known.example if known else f"{group.prompt.where or f'prompt {p}'}, completion {g}"
                    errors[reason] = MissingReward(known.count + 1 if known else 1, example)
        rewards_PG = torch.tensor(values, dtype=torch.float32).reshape(_shape(groups))
        if errors:
            _log_missing(errors, len(values))
        return GroupRewards(
            rewards_PG=rewards_PG,
            raw_PG=torch.tensor(raws, dtype=torch.float32).reshape(_shape(groups)),
            known_PG=torch.isfinite(rewards_PG),
            errors=errors,
            metrics=metrics,
        )

    def _weights(self, prompt: Prompt) -> dict[str, float]:
        chosen = _choice(prompt, self._askers, self.missing)
        if chosen is None and not self._default:
            raise DataError(
                "the prompt chooses no environment, and there is no default",
                where=prompt.where,
                field=CHOICE,
                got="nothing",
                need=f"one of {', '.join(self._askers)}; or a default, in grpo.environments or data.env_name",
            )
        return self._default if chosen is None else chosen


def chosen_names(prompts: Iterable[Prompt], env_section: Mapping[str, Any]) -> tuple[str, ...]:
    """The environments that prompts choose for themselves, as they come.

    Raises `DataError`, with the prompt's place, for one that the section `env` does not have.
    """
    there = sections_of(env_section)
    names: dict[str, None] = {}
    for prompt in prompts:
        names |= dict.fromkeys(_choice(prompt, there, "mask") or ())
    return tuple(names)


def make_reward_source(
    env_section: Mapping[str, Any],
    weights: Mapping[str, float],
    *,
    names: Iterable[str] = (),
    gold: str | None = None,
    on_ray: Collection[str] = (),
    timeout_seconds: float | None = 600.0,
    missing: Missing = "mask",
) -> RewardSource:
    """The source of a run, with only those environments of the section `env` that are used.

    Used are those of `weights` and `gold`, and `names`, which rows may choose. They are made in this process, or, those
    in `on_ray`, in a Ray actor, whose reward model has workers of its own. Raises `ConfigError` for a name that the
    section does not have, and what making one raises; those that were made are then shut down.
    """
    used = list(dict.fromkeys((*weights, *names)))
    sections = sections_of(env_section)
    for name in (*used, *on_ray, *(() if gold is None else (gold,))):
        if name not in sections:
            raise _unknown(name, sections, env_section)
    made: dict[str, Environment | Any] = {}
    try:
        for name in dict.fromkeys((*used, *(() if gold is None else (gold,)))):
            made[name] = make_named(name, sections[name], on_ray=name in on_ray)
        return RewardSource(
            {name: made[name] for name in used},
            weights,
            gold=None if gold is None else made[gold],
            timeout_seconds=timeout_seconds,
            missing=missing,
        )
    except BaseException:
        for environment in made.values():
            if isinstance(environment, Environment):  # an actor ends with its handle
                environment.shutdown()
        raise


def _choice(prompt: Prompt, there: Collection[str], missing: Missing) -> dict[str, float] | None:
    """Weights by name, as the prompt itself says; None where it says nothing."""
    chosen = prompt.info.get(CHOICE)
    if chosen is None:
        return None
    weights = {chosen: 1.0} if isinstance(chosen, str) else chosen
    return _checked(weights, there, missing, DataError, prompt.where, CHOICE)


def _checked(
    weights: Any,
    there: Collection[str],
    missing: Missing,
    kind: type[ConfigError | DataError],
    where: str | None,
    field: str,
) -> dict[str, float]:
    """Weights by name, numbers, of environments that are there."""
    if not isinstance(weights, Mapping) or not weights:
        need = "a name, or names with weights"
        raise kind("this chooses no environment", where=where, field=field, got=weights, need=need)
    for name, weight in weights.items():
        if name not in there:
            near = nearest_name(str(name), there)
            raise kind(
                "there is no such environment",
                where=where,
                field=field,
                got=name,
                need=f"one of {', '.join(there) or 'none'}",
                fix=f"did you mean {near}?" if near else None,
            )
        number = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        if not number or (missing == "renormalise" and weight <= 0):
            above = ", above 0 for missing: renormalise" if missing == "renormalise" else ""
            raise kind(
                "an environment's weight cannot be used",
                where=where,
                field=f"{field}.{name}",
                got=weight,
                need=f"a finite number{above}",
            )
    return {name: float(weight) for name, weight in weights.items()}


def _unknown(name: str, sections: Mapping[str, Any], env_section: Mapping[str, Any]) -> ConfigError:
    near = nearest_name(name, sections)
    return ConfigError(
        "this environment is switched off" if name in env_section else "there is no such environment",
        where=f"env.{name}",
        got="enabled: false" if name in env_section else name,
        need=f"one of {', '.join(sections) or 'none'}",
        fix=f"set env.{name}.enabled to true" if name in env_section else f"did you mean {near}?" if near else None,
    )


def _samples(
    groups: Sequence[CompletionGroup], places: Sequence[tuple[int, int]]
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Conversations and env_infos. Copies: what an environment does to them is nobody else's concern."""
    conversations = {p: groups[p].conversations for p in dict.fromkeys(p for p, _ in places)}
    infos = [
        {**copy.deepcopy(dict(groups[p].prompt.info)), "truncated": groups[p].completions[g].truncated}
        for p, g in places
    ]
    return [copy.deepcopy(conversations[p][g]) for p, g in places], infos


def _reward(value: float, metadata: Mapping[str, Any]) -> Reward:
    """A sample's reward as its environment's step says it."""
    details = metadata.get(DETAILS) or {}
    raw, components, error = details.get("raw"), details.get("components") or {}, details.get("error")
    if not math.isfinite(value):
        return Reward(None, raw=raw, components=components, error=error or f"the reward is {value}")
    return Reward(value, raw=value if raw is None else raw, components=components)


def _metrics(label: str, rewards: Sequence[Reward]) -> dict[str, float]:
    values = torch.tensor([_number(reward.value) for reward in rewards], dtype=torch.float32)
    components: dict[str, list[float]] = defaultdict(list)
    for reward in rewards:
        for name, value in reward.components.items():
            if math.isfinite(value):
                components[name].append(value)
    means = {f"{label}/component/{name}": sum(found) / len(found) for name, found in components.items()}
    return reward_metrics(label, values) | means


def _labels(environments: Mapping[str, Any]) -> dict[str, str]:
    """What the metrics of each begin with: the environment's own name, if no other has it."""
    own = {name: one.name if isinstance(one, Environment) else f"{name}_env" for name, one in environments.items()}
    labels = list(own.values())
    return {name: label if labels.count(label) == 1 else f"{name}_env" for name, label in own.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None or not abs(value) <= _LARGEST else value


def _shape(groups: Sequence[CompletionGroup]) -> tuple[int, int]:
    sizes = {len(group.completions) for group in groups}
    assert len(sizes) <= 1, "groups of different sizes"
    return len(groups), next(iter(sizes), 0)


def _log_missing(errors: Mapping[str, MissingReward], num_completions: int) -> None:
    most = sorted(errors.items(), key=lambda item: -item[1].count)
    shown = "; ".join(f"{one.count} x {reason} ({one.example})" for reason, one in most[:_MOST_LOGGED])
    total = sum(one.count for one in errors.values())
    logger.warning("%d of %d completions have no reward: %s", total, num_completions, shown)
