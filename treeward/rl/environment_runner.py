"""`EnvironmentRunner`: from groups of completions to their rewards, by one environment or several side by side.

    runner = make_environment_runner(env_section, {"reward_model": 1.0}, gold="judge", timeout_seconds=600)
    runner.check(prompts)                                # every row names environments that exist
    found = runner.reward(groups)                        # rewards_PG, raw_PG, by_environment, failures
    runner.gold(groups)                                  # (P, G), for watching; never trained on

A prompt may choose for itself: `info["environment"]` is a name, or a mapping from names to weights; the reward is then
the weighted sum. An environment gets raw messages and, as `env_infos`, copies of the prompt's `info` with `truncated`.

A completion without a reward is NaN and listed with the reason; it is never a number that trains. An environment that
takes too long, or raises, gives no rewards in this step; one that is wrong itself (`ConfigError`, `ModelError`) stops
the run. Each step starts from the states after the last step that succeeded, so a step is retried as a whole.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from treeward.config.base import nearest_name
from treeward.data.preference import Message
from treeward.environments.hybrid import weighted_sum
from treeward.environments.interface import Environment, Reward, reward_metrics
from treeward.environments.registry import make_named, sections_of
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.rl.experience import CompletionGroup, Prompt, batch_shape

__all__ = ["EnvironmentRunner", "GroupRewards", "chosen_names", "environment_metrics", "failure_summary"]
__all__ += ["make_environment_runner"]

logger = logging.getLogger(__name__)

CHOICE = "environment"
"""The key of a prompt's `info` with the environment, or environments, that reward it."""

_LARGEST = torch.finfo(torch.float32).max
_SHUTDOWN_SECONDS = 60.0

Missing = Literal["mask", "renormalise"]
Place = tuple[int, int]
"""Prompt and place in its group."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """`rewards_PG`: float32, NaN where there is none. `raw_PG`: before the environments' own shaping; NaN where not
    known. `by_environment`: the rewards of each, by the name of its metrics. `failures`: (reason, place) of each
    completion without a reward.
    """

    rewards_PG: Tensor
    raw_PG: Tensor
    by_environment: Mapping[str, Sequence[Reward]]
    failures: Sequence[tuple[str, str]]


class EnvironmentRunner:
    """Runs `environments`, by name; they are its own: nobody else calls them or changes their state.

    `weights`: for prompts that choose none; may be empty where every prompt does. `missing`: the reward of a completion
    that one of several environments could not reward: none (`mask`), or the sum of the others, scaled up
    (`renormalise`). `timeout_seconds`: for a step; None: no limit.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        weights: Mapping[str, float],
        *,
        gold: Environment | None = None,
        timeout_seconds: float | None = None,
        missing: Missing = "mask",
    ) -> None:
        self.timeout_seconds, self.missing = timeout_seconds, missing
        self._workers = {name: _Worker(name, environment) for name, environment in environments.items()}
        self._default = _checked(weights, environments, missing, ConfigError, "grpo", "environments") if weights else {}
        same = (self._workers[name] for name, environment in environments.items() if environment is gold)
        self._gold = None if gold is None else next(same, None) or _Worker("gold", gold)
        names = [environment.name for environment in environments.values()]
        self._labels = {
            name: one.name if names.count(one.name) == 1 else f"{name}_env" for name, one in environments.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The environments that a prompt may choose."""
        return tuple(self._workers)

    @property
    def has_gold(self) -> bool:
        return self._gold is not None

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check that each prompt is rewarded by environments that exist. Raises `DataError` with the prompt's place."""
        for prompt in prompts:
            self._weights(prompt)

    def reward(self, groups: Sequence[CompletionGroup], *, update: bool = True) -> GroupRewards:
        """Rewards of every completion of every group.

        `update`: off in validation, whose completions then count in no running statistics. Raises `ConfigError`,
        `ModelError` or `CheckpointError` for an environment that is wrong itself, and `DataError` for a prompt that
        chooses an unknown one; the states are then as before.
        """
        weights_P = [self._weights(group.prompt) for group in groups]
        places: dict[str, list[Place]] = defaultdict(list)
        for p, group in enumerate(groups):
            for name in weights_P[p]:
                places[name] += [(p, g) for g in range(len(group.completions))]
        found = self._run({self._workers[name]: chosen for name, chosen in places.items()}, groups, update=update)
        parts: dict[Place, dict[str, Reward]] = defaultdict(dict)
        for name, chosen in places.items():
            for place, reward in zip(chosen, found[name], strict=True):
                parts[place][name] = reward
        by_environment = {self._labels[name]: found[name] for name in places}
        return self._summed(groups, weights_P, parts, by_environment)

    def gold(self, groups: Sequence[CompletionGroup]) -> Tensor:
        """Rewards of the gold environment, float32 (P, G), NaN where it gives none; its state does not change.

        Raises `ConfigError` where there is none, and what `reward` raises.
        """
        if self._gold is None:
            raise ConfigError("there is no gold environment", field="gold_environment", got=None, need="a name")
        places = [(p, g) for p, group in enumerate(groups) for g in range(len(group.completions))]
        found = self._run({self._gold: places}, groups, update=False)[self._gold.name]
        missing = [reward.error for reward in found if reward.value is None]
        if missing:
            logger.warning("%d of %d completions have no gold reward: %s", len(missing), len(found), missing[0])
        return _tensor([reward.value for reward in found], groups)

    def state_dict(self) -> dict[str, Any]:
        """By name, the state of each environment after the last step that succeeded."""
        return {name: copy.deepcopy(worker.state) for name, worker in self._workers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` for that of other environments."""
        if state.keys() != self._workers.keys():
            raise CheckpointError(
                "this is not the state of these environments",
                got=", ".join(map(str, state)) or "none",
                need=", ".join(self._workers) or "none",
                fix="resume with the environments that the run was started with",
            )
        for name, worker in self._workers.items():
            worker.load(state[name])

    def shutdown(self) -> bool:
        """Free the models, workers and connections of the environments; False where one fails to. Safe to repeat."""
        workers = {id(worker): worker for worker in (*self._workers.values(), self._gold) if worker is not None}
        futures = {worker.name: _in_thread(worker.environment.shutdown) for worker in workers.values()}
        wait(futures.values(), timeout=_SHUTDOWN_SECONDS)
        for name, future in futures.items():
            if not future.done() or future.exception() is not None:
                logger.warning("%s did not shut down: %s", name, future.exception() if future.done() else "it hangs")
        return all(one.done() and one.exception() is None and one.result() for one in futures.values())

    def _run(
        self, chosen: Mapping[_Worker, Sequence[Place]], groups: Sequence[CompletionGroup], *, update: bool
    ) -> dict[str, list[Reward]]:
        """By the worker's name, a reward for each of its places, in order."""
        futures = {worker: worker.start(*_samples(groups, places), update=update) for worker, places in chosen.items()}
        wait(futures.values(), timeout=self.timeout_seconds)
        found: dict[str, list[Reward]] = {}
        states: dict[_Worker, dict[str, Any]] = {}
        for worker, future in futures.items():
            count = len(chosen[worker])
            if not future.done():
                future.cancel()
                found[worker.name] = self._failed(worker, count, f"no rewards within {self.timeout_seconds:g} seconds")
            elif (error := future.exception()) is not None:
                if isinstance(error, ConfigError | ModelError | CheckpointError):
                    raise error
                found[worker.name] = self._failed(worker, count, f"it raised {type(error).__name__}: {error}", error)
            else:
                rewards, states[worker] = future.result()
                if len(rewards) != count:
                    raise ConfigError(
                        "the environment does not give one reward for each sample",
                        where=worker.name,
                        got=f"{len(rewards)} rewards for {count} samples",
                        need="as many of one as of the other, in order",
                    )
                found[worker.name] = [_finite(reward) for reward in rewards]
        if update:
            for worker, state in states.items():
                worker.state = state
        return found

    def _failed(self, worker: _Worker, count: int, reason: str, error: BaseException | None = None) -> list[Reward]:
        logger.warning("%s has no rewards in this step: %s", worker.name, reason, exc_info=error)
        return [Reward(None, error=reason)] * count

    def _summed(
        self,
        groups: Sequence[CompletionGroup],
        weights_P: Sequence[Mapping[str, float]],
        parts: Mapping[Place, Mapping[str, Reward]],
        by_environment: Mapping[str, Sequence[Reward]],
    ) -> GroupRewards:
        values: list[float | None] = []
        raws: list[float | None] = []
        failures: list[tuple[str, str]] = []
        for p, group in enumerate(groups):
            for g in range(len(group.completions)):
                reward = _finite(weighted_sum(parts[p, g], weights_P[p], missing=self.missing))
                before = {name: Reward(one.raw, error="") for name, one in parts[p, g].items()}
                values.append(reward.value)
                raws.append(weighted_sum(before, weights_P[p], missing=self.missing).value)
                if reward.value is None:
                    failures.append((reward.error or "", f"{group.prompt.where or f'prompt {p}'}, completion {g}"))
        if failures:
            said = failure_summary(failures)
            logger.warning("%d of %d completions have no reward: %s", len(failures), len(values), said)
        return GroupRewards(_tensor(values, groups), _tensor(raws, groups), by_environment, failures)

    def _weights(self, prompt: Prompt) -> dict[str, float]:
        chosen = _choice(prompt, self._workers, self.missing)
        if chosen is None and not self._default:
            raise DataError(
                "the prompt chooses no environment, and there is no default",
                where=prompt.where,
                field=CHOICE,
                got="nothing",
                need=f"one of {', '.join(self._workers)}; or a default, in grpo.environments or data.env_name",
            )
        return self._default if chosen is None else chosen


class _Worker:
    """One environment, called in threads. `state`: after the last step that counts."""

    def __init__(self, name: str, environment: Environment) -> None:
        self.name, self.environment = name, environment
        self.state = copy.deepcopy(environment.state_dict())
        self._last: Future[Any] | None = None

    def start(
        self, conversations: list[list[Message]], infos: list[dict[str, Any]], *, update: bool
    ) -> Future[tuple[list[Reward], dict[str, Any]]]:
        """Reward samples in a thread, from `state`; gives the rewards and the state after them.

        A step that took too long still runs in its thread: the next one waits for it, within its own time.
        """
        before = self._last

        def step() -> tuple[list[Reward], dict[str, Any]]:
            if self.state:
                self.environment.load_state_dict(copy.deepcopy(self.state))
            reward = self.environment.rewards if update else self.environment.evaluation_rewards
            return reward(conversations, infos), copy.deepcopy(self.environment.state_dict())

        self._last = _in_thread(step, after=before)
        return self._last

    def load(self, state: Mapping[str, Any]) -> None:
        if self._last is None or self._last.done():
            self.environment.load_state_dict(copy.deepcopy(dict(state)))
        self.state = copy.deepcopy(dict(state))


def chosen_names(prompts: Iterable[Prompt], env_section: Mapping[str, Any]) -> tuple[str, ...]:
    """The environments that prompts choose for themselves, in order.

    Raises `DataError`, with the prompt's place, for one that the section `env` does not have.
    """
    there = sections_of(env_section)
    names: dict[str, None] = {}
    for prompt in prompts:
        names |= dict.fromkeys(_choice(prompt, there, "mask") or ())
    return tuple(names)


def make_environment_runner(
    env_section: Mapping[str, Any],
    weights: Mapping[str, float],
    *,
    names: Iterable[str] = (),
    gold: str | None = None,
    on_ray: Collection[str] = (),
    timeout_seconds: float | None = 600.0,
    missing: Missing = "mask",
) -> EnvironmentRunner:
    """The runner of a run, with only those environments of the section `env` that are used.

    Used are those of `weights` and `gold`, and `names`, which rows may choose. They are made in this process, or, those
    in `on_ray`, in a Ray actor, whose reward model has workers of its own. Raises `ConfigError` for a name that the
    section does not have, and what making one raises; those that were made are then shut down.
    """
    used = list(dict.fromkeys((*weights, *names)))
    everything = dict.fromkeys((*used, *(() if gold is None else (gold,))))
    sections = sections_of(env_section)
    _checked(dict.fromkeys((*everything, *on_ray), 1.0), sections, "mask", ConfigError, "env", "name")
    made: dict[str, Environment] = {}
    try:
        for name in everything:
            made[name] = _made(name, sections[name], on_ray=name in on_ray)
        return EnvironmentRunner(
            {name: made[name] for name in used},
            weights,
            gold=None if gold is None else made[gold],
            timeout_seconds=timeout_seconds,
            missing=missing,
        )
    except BaseException:
        for environment in made.values():
            environment.shutdown()
        raise


def environment_metrics(by_environment: Mapping[str, Sequence[Reward]]) -> dict[str, float]:
    """`reward_metrics` of each environment, and the means `<name>/component/<component>`."""
    metrics: dict[str, float] = {}
    for label, rewards in by_environment.items():
        values = [math.nan if reward.value is None else reward.value for reward in rewards]
        metrics |= reward_metrics(label, torch.tensor(values, dtype=torch.float32))
        components: dict[str, list[float]] = defaultdict(list)
        for reward in rewards:
            for name, value in reward.components.items():
                if math.isfinite(value):
                    components[name].append(value)
        metrics |= {f"{label}/component/{name}": sum(found) / len(found) for name, found in components.items()}
    return metrics


def failure_summary(failures: Sequence[tuple[str, str]]) -> str:
    """The three most frequent reasons, each with its count and the first completion that has it."""
    first: dict[str, str] = {}
    for reason, place in failures:
        first.setdefault(reason, place)
    counts = Counter(reason for reason, _ in failures)
    return "; ".join(f"{count} x {reason} ({first[reason]})" for reason, count in counts.most_common(3))


def _made(name: str, section: Mapping[str, Any], *, on_ray: bool) -> Environment:
    made = make_named(name, section, on_ray=on_ray)
    if isinstance(made, Environment):
        return made
    from treeward.environments.remote import RemoteEnvironment

    return RemoteEnvironment(name, made)


def _in_thread(work: Callable[[], Result], *, after: Future[Any] | None = None) -> Future[Result]:
    """Do `work` in a daemon thread, when `after` is done. One that hangs does not keep the process alive, as a thread
    of `ThreadPoolExecutor` would.
    """
    future: Future[Result] = Future()

    def run() -> None:
        if after is not None:
            wait([after])
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


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
    """Weights by name: finite numbers, of environments that exist."""
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


def _samples(
    groups: Sequence[CompletionGroup], places: Sequence[Place]
) -> tuple[list[list[Message]], list[dict[str, Any]]]:
    """Conversations and env_infos: copies, which an environment may change."""
    conversations = {p: groups[p].conversations for p, _ in places}
    infos = [
        {**copy.deepcopy(dict(groups[p].prompt.info)), "truncated": groups[p].completions[g].truncated}
        for p, g in places
    ]
    return [copy.deepcopy(conversations[p][g]) for p, g in places], infos


def _finite(reward: Reward) -> Reward:
    """The reward; its value is None where it is no finite float32."""
    value = reward.value
    if value is None or not abs(value) <= _LARGEST:
        said = "no reward" if value is None else f"the reward is {value}"
        return replace(reward, value=None, error=reward.error or said)
    return reward


def _tensor(values: Sequence[float | None], groups: Sequence[CompletionGroup]) -> Tensor:
    """Float32 (P, G), NaN for None."""
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float32).reshape(batch_shape(groups))
