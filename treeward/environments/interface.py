"""`Environment`: message logs in, rewards out; what every RL loop calls and every kind of reward implements.

    class LongestAnswer(Environment):
        name = "longest"

        def rewards(self, conversations, env_infos):
            return [Reward(float(len(c[-1]["content"]))) for c in conversations]

    LongestAnswer().step([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]], [{}])

The signature is NeMo RL's. A reward that could not be had is NaN in `EnvironmentReturn.rewards`, with the reason in
`metadata`, and `global_post_process_and_metrics` takes its sample out of the loss: it is never a number that trains.

Rewards may depend on those before, as with running statistics: `state_dict` has what a run must save then, a step that
fails changes nothing of it, and `step(..., update=False)`, for validation, leaves it alone.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeward.data.preference import Message
from treeward.errors import CheckpointError, DataError
from treeward.scoring.score import Reward

if TYPE_CHECKING:
    from treeward.environments.trl import TrlReward

__all__ = ["DETAILS", "Environment", "EnvironmentReturn", "Reward", "conversation_of", "reward_metrics", "rewards_of"]
__all__ += ["step_of", "undone_on_failure"]

DETAILS = "reward_details"
"""The key of `EnvironmentReturn.metadata[i]` under which there is more about the reward of sample i."""

_KEYS_OF_LOOPS = frozenset(
    {
        *("token_ids", "generation_logprobs", "token_loss_mask", "advantages", "prev_logprobs", "routed_experts"),
        *("logprobs", "is_invalid_tool_call", "has_malformed_thinking"),
    }
)
"""What NeMo RL and others note in messages for themselves; whatever else a message has, a template may read."""


class EnvironmentReturn(NamedTuple):
    """What a step gives for B samples; the fields and their order are NeMo RL's.

    `observations`: a message each, empty: nothing is added to the conversation. `metadata`: the sample's `env_info`
    and, under `reward_details`, `raw`, `components` and `error`. `rewards`: float32 (B,), NaN where there is none.
    `terminateds`: bool (B,), all true. `answers`: the text that was scored.
    """

    observations: list[dict[str, str]]
    metadata: list[dict[str, Any]]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None]


class Environment(abc.ABC):
    """Something that rewards conversations. A kind of reward implements `rewards`; the rest is the same for all."""

    name: str = "environment"
    """The prefix of its metrics."""

    @abc.abstractmethod
    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        """One `Reward` per conversation, in order. `env_infos`: what the data says of each, as `ground_truth`.

        A conversation that cannot be rewarded has the value None; what is wrong with the environment itself raises.
        """

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        """`rewards` that leave the state as it is; to be implemented by an environment that has one."""
        return self.rewards(conversations, env_infos)

    def step(
        self,
        message_logs: Sequence[Sequence[Mapping[str, Any]]],
        env_infos: Sequence[Mapping[str, Any] | None],
        *,
        update: bool = True,
    ) -> EnvironmentReturn:
        """Reward a batch of any size.

        Messages keep every key that a chat template may read; what loops note in them (`token_ids`, tensors) is left
        out. A log that is no list of messages has no reward. `update`: off in validation, whose samples then count in
        no running statistics. Raises `DataError` where there is not one `env_info`, or None, for each log.
        """
        if len(message_logs) != len(env_infos):
            raise DataError(
                "there is not one env_info for each message log",
                where=f"a step of {self.name}",
                got=f"{len(message_logs)} message logs and {len(env_infos)} env_infos",
                need="as many of one as of the other; {} or None for a sample of which nothing is known",
            )
        samples = [_sample(*sample) for sample in zip(message_logs, env_infos, strict=True)]
        sound = [sample for sample in samples if sample.error is None]
        reward = self.rewards if update else self.evaluation_rewards
        found = reward([sample.conversation for sample in sound], [dict(sample.info) for sample in sound])
        assert len(found) == len(sound)
        following = iter(found)
        rewards = [next(following) if one.error is None else Reward(None, error=one.error) for one in samples]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in rewards],
            metadata=[one.info | {DETAILS: _details(reward)} for one, reward in zip(samples, rewards, strict=True)],
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor([math.nan if r.value is None else r.value for r in rewards], dtype=torch.float32),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=[_text(sample.conversation) for sample in samples],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Take samples without a reward out of the loss, and sum up the others.

        `batch`: a mapping with `rewards` or `total_reward` (B,) and, where the loop has one, `loss_multiplier` (B,);
        returned with the multiplier 0 where there is no reward. The metrics are those of `reward_metrics`. Raises
        `DataError` for a batch without rewards.
        """
        rewards = torch.as_tensor(rewards_of(batch), dtype=torch.float32).flatten()
        failed = ~torch.isfinite(rewards)
        if "loss_multiplier" in batch and bool(failed.any()):
            multiplier = torch.as_tensor(batch["loss_multiplier"]).clone()
            multiplier[failed.to(multiplier.device)] = 0
            batch["loss_multiplier"] = multiplier
        return batch, reward_metrics(self.name, rewards)

    def as_trl(self, *, name: str | None = None, columns: Mapping[str, str] | None = None) -> TrlReward:
        """This environment as one of the `reward_funcs` of TRL's trainers; see `TrlReward`.

        `name`: what TRL logs it under. `columns`: for keys of `env_infos` the dataset's column, as
        `{"ground_truth": "answer"}`.
        """
        adapter = importlib.import_module("treeward.environments.trl").TrlReward
        return adapter(self, name=name, columns=columns)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """What a run must save to go on exactly, as JSON can hold it: empty where no reward depends on those before."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` for that of another configuration."""
        if state:
            raise CheckpointError(
                f"{self.name} has no state", got=sorted(state), need="the configuration that the run was started with"
            )

    @property
    def is_stateful(self) -> bool:
        """Whether rewards depend on those before, as with running statistics: then a run has one such object only."""
        return bool(self.state_dict())

    def shutdown(self) -> bool:
        """Free what the environment holds: models, workers, connections. It can be called twice."""
        return True


def reward_metrics(name: str, rewards: Tensor) -> dict[str, float]:
    """Of rewards (B,), NaN where there is none: `<name>/num_samples`, `num_failed`, and of the others `mean_reward`,
    `std_reward` (of the population), `min_reward`, `max_reward`.
    """
    valid = rewards[torch.isfinite(rewards)]
    metrics = {"num_samples": float(len(rewards)), "num_failed": float(len(rewards) - len(valid))}
    if len(valid):
        metrics |= {
            "mean_reward": float(valid.mean()),
            "std_reward": float(valid.std(unbiased=False)),
            "min_reward": float(valid.min()),
            "max_reward": float(valid.max()),
        }
    return {f"{name}/{key}": value for key, value in metrics.items()}


def conversation_of(log: Any, where: str | None = None) -> list[Message]:
    """The messages of a message log, with what a chat template may read and without what loops note for themselves.

    Raises `DataError` for what is no list of messages.
    """
    if isinstance(log, np.ndarray):
        log = log.tolist()  # as parquet has lists
    if not isinstance(log, Sequence) or not all(isinstance(message, Mapping) for message in log):
        raise DataError(
            "the message log is not a list of messages",
            where=where,
            got=log,
            need='[{"role": "user", "content": "..."}, ...]',
        )
    return [_message(message) for message in log]


def rewards_of(batch: Any) -> Any:
    """The rewards of a loop's batch: `rewards`, or NeMo RL's `total_reward`. Raises `DataError` if it has neither."""
    for key in ("rewards", "total_reward"):
        if key in batch:
            return batch[key]
    raise DataError(
        "the batch has no rewards",
        field="rewards",
        got=f"keys {sorted(map(str, batch))}",
        need="rewards or total_reward, a number for each sample",
        fix='batch["rewards"] = environment.step(message_logs, env_infos).rewards',
    )


@contextlib.contextmanager
def undone_on_failure(environment: Environment) -> Iterator[None]:
    """What raises in here leaves the environment's state as it was, so that a step that is done again counts once."""
    before = environment.state_dict()
    try:
        yield
    except BaseException:
        environment.load_state_dict(before)
        raise


def step_of(environment: Environment | Any) -> Callable[..., EnvironmentReturn]:
    """The `step` of an environment in this process, or of the Ray actor of one, waiting for its result."""
    remote = getattr(environment.step, "remote", None)
    if remote is None:
        return environment.step
    ray = importlib.import_module("ray")
    return lambda message_logs, env_infos, **options: ray.get(remote(message_logs, env_infos, **options))


class _Sample(NamedTuple):
    """One sample of a step, or why it is none."""

    conversation: list[Message]
    info: dict[str, Any]
    error: str | None


def _sample(log: Any, info: Any) -> _Sample:
    if info is not None and not isinstance(info, Mapping):
        return _Sample([], {}, f"the env_info is of type {type(info).__name__}, not a mapping")
    known = dict(info or {})
    try:
        return _Sample(conversation_of(log), known, None)
    except DataError as error:
        return _Sample([], known, f"{error.summary} (got: {str(error.got)[:100]!r})")


def _message(message: Mapping[str, Any]) -> Message:
    kept: Message = {}
    for key, value in message.items():
        if isinstance(value, np.ndarray) and value.dtype == object:
            value = value.tolist()  # a list that comes from parquet
        if value is not None and key not in _KEYS_OF_LOOPS and not isinstance(value, Tensor | np.ndarray):
            kept[key] = value
    return kept


def _details(reward: Reward) -> dict[str, Any]:
    return {"raw": reward.raw, "components": dict(reward.components), "error": reward.error}


def _text(conversation: Sequence[Message]) -> str | None:
    content = conversation[-1].get("content") if conversation else None
    return content if isinstance(content, str) else None
