"""`Environment`: message logs in, rewards out; the interface between RL loops and rewards.

    class LongestCompletion(Environment):
        name = "longest"

        def rewards(self, conversations, env_infos):
            return [Reward(float(len(c[-1]["content"]))) for c in conversations]

    log = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    LongestCompletion().step([log], [{}])              # NeMo RL's signature
    LongestCompletion().reward([log], [{}])            # the same as `Reward`s
    LongestCompletion.remote()                         # a Ray actor with the same methods

A missing reward is NaN in `EnvironmentReturn.rewards`, with the reason in `metadata`, and
`global_post_process_and_metrics` takes its sample out of the loss: it is never a number that
trains.

A reward depends on its conversation and `env_info`, and for a judge on the prompt's other
completions; never on earlier steps. So there is no state to save, and a step may be repeated.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from treeward.config.base import Strict
from treeward.config.load import load_section
from treeward.data.conversation import (
    Conversation,
    Message,
    read_template_kwargs,
    template_kwargs_of,
    with_messages,
)
from treeward.environments.actors import RayActor
from treeward.errors import DataError
from treeward.scoring.score import Reward as Reward
from treeward.scoring.score import completion_text, reward_metrics
from treeward.user_code import source_digest

DETAILS = "reward_details"
"""The key of `EnvironmentReturn.metadata[i]` with the details of reward i."""

GROUP = "reward_group"
"""The key of an `env_info` that groups samples by prompt; without it, equal prompts do."""

WHERE = "env_config"
"""The name of an environment's section in errors; `registry` replaces it by the full name."""

_KEYS_OF_LOOPS = frozenset(
    {
        "token_ids",
        "generation_logprobs",
        "token_loss_mask",
        "advantages",
        "prev_logprobs",
        "routed_experts",
        "logprobs",
        "is_invalid_tool_call",
        "has_malformed_thinking",
    }
)
"""Keys of messages that NeMo RL and other loops use; a template may read every other key."""

logger = logging.getLogger(__name__)

Conversations = Sequence[Sequence[Message]]
Infos = Sequence[Mapping[str, Any]]
Logs = Sequence[Sequence[Mapping[str, Any]]]
"""The messages of a loop, with the loop's own keys."""
AnyInfos = Sequence[Mapping[str, Any] | None]


class EnvironmentReturn(NamedTuple):
    """The result of a step for B samples; the fields and their order are NeMo RL's.

    `observations`: messages with the rewards, which treeward's loop ignores. `metadata`: the
    `env_info` and, under `reward_details`, `raw`, `components` and `error`. `rewards`: float32
    (B,), NaN for none. `terminateds`: bool (B,), all true. `answers`: the scored texts.
    """

    observations: list[dict[str, str]]
    metadata: list[dict[str, Any]]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None]


class Environment(RayActor, abc.ABC):
    """Rewards conversations. A subclass implements `rewards`."""

    name: str = "environment"
    """The prefix of its metrics."""

    @abc.abstractmethod
    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        """One `Reward` per conversation, in order. `env_infos`: the data's other columns, as
        `ground_truth`.

        The value is None for a conversation that cannot be rewarded; a fault of the environment
        raises.
        """

    # Not abstract: most environments need nothing of an `env_info` that could be refused early.
    def check_info(self, info: Mapping[str, Any], where: str | None) -> None:  # noqa: B027
        """Raise `DataError` for an `env_info` with which no completion could be rewarded.

        A run calls it for each of its prompts before it begins. `where`: the prompt's place in its
        file.
        """

    def row_components(self, info: Mapping[str, Any]) -> Collection[str]:
        """The components that come with a row of the data, as the criteria of its rubric; other
        rows may lack them. `info`: as for `check_info`, which has passed it."""
        return ()

    @property
    def user_code(self) -> str:
        """A digest of the code of the user that rewards depend on; empty where there is none."""
        return source_digest(type(self))

    def reward(self, message_logs: Logs, env_infos: AnyInfos) -> list[Reward]:
        """One `Reward` per message log of a loop, in order; a batch may have any size.

        Messages lose the loop's own keys (`token_ids`, tensors). A reward model's chat template
        reads `tools` and `chat_template_kwargs` of the `env_info`. Raises `DataError` for a log
        that is not a list of messages, and unless there are as many `env_infos` (or None) as logs,
        or none at all.
        """
        env_infos = env_infos or [None] * len(message_logs)  # NeMo RL's reward models get none
        if len(message_logs) != len(env_infos):
            got = f"{len(message_logs)} message logs and {len(env_infos)} env_infos"
            raise DataError(
                "there is not one env_info for each message log", where=self.name, got=got
            )
        conversations = []
        for i, (log, info) in enumerate(zip(message_logs, env_infos, strict=True)):
            if not isinstance(info, Mapping | None):
                raise DataError(
                    "the env_info is not a mapping", where=f"{self.name}, sample {i}", got=info
                )
            messages = conversation_of_log(log, where=f"sample {i}")
            variables = {
                **template_kwargs_of(messages),
                **read_template_kwargs(info or {}, f"sample {i}"),
            }
            conversations.append(Conversation(messages, chat_template_kwargs=variables))
        rewards = self.rewards(conversations, [dict(info or {}) for info in env_infos])
        assert len(rewards) == len(conversations), (
            f"{self.name}: {len(rewards)} rewards for {len(conversations)} logs"
        )
        failed = [i for i, reward in enumerate(rewards) if reward.value is None]
        if failed:
            logger.warning(
                "%s: %d of %d samples have no reward; the first: %s",
                self.name,
                len(failed),
                len(rewards),
                f"sample {failed[0]}: {rewards[failed[0]].error}",
            )
        return rewards

    def step(self, message_logs: Logs, env_infos: AnyInfos) -> EnvironmentReturn:
        """`reward`, in the form of NeMo RL."""
        rewards = self.reward(message_logs, env_infos)
        infos = env_infos or [None] * len(rewards)
        observations = []
        metadata = []
        values = []
        for reward, info in zip(rewards, infos, strict=True):
            content = f"Environment: {reward.value}"
            observations.append({"role": "environment", "content": content})
            details = {
                "raw": reward.raw,
                "components": dict(reward.components),
                "error": reward.error,
            }
            metadata.append({**(info or {}), DETAILS: details})
            values.append(math.nan if reward.value is None else reward.value)
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(values, dtype=torch.float32),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=[completion_text(conversation_of_log(log)) for log in message_logs],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Take samples without a reward out of the loss, and compute the `reward_metrics` of the
        others.

        `batch`: a mapping with `rewards` or `total_reward` (B,) and perhaps `loss_multiplier` (B,),
        which is returned as 0 for missing rewards. Raises `DataError` for a batch without rewards.
        """
        values = batch["rewards"] if "rewards" in batch else batch.get("total_reward")
        if values is None:
            raise DataError(
                "the batch has no rewards",
                got=f"keys {sorted(batch)}",
                need="rewards or total_reward",
            )
        rewards = torch.as_tensor(values, dtype=torch.float32).flatten()
        failed = ~torch.isfinite(rewards)
        if "loss_multiplier" in batch and bool(failed.any()):
            # A copy: the caller keeps its tensor.
            multiplier = torch.as_tensor(batch["loss_multiplier"]).clone()
            multiplier[failed.to(multiplier.device)] = 0
            batch["loss_multiplier"] = multiplier
        return batch, reward_metrics(self.name, rewards)

    def shutdown(self) -> bool:
        """Free models, workers and connections. Safe to repeat."""
        return True


_Section = TypeVar("_Section", bound=Strict)


class ConfiguredEnvironment(Environment, Generic[_Section]):
    """An environment made from one section of the configuration: `config`, checked by the
    subclass's `section`.

    Raises `ConfigError` for an invalid section.
    """

    section: ClassVar[type[Strict]]

    def __init__(self, env_config: Mapping[str, Any] | _Section) -> None:
        section: Any = env_config
        if isinstance(env_config, Mapping):
            section = load_section(self.section, env_config, where=WHERE)
        self.config = cast(_Section, section)


def conversation_of_log(log: Any, where: str | None = None) -> Conversation:
    """The messages of a log, without the loop's own keys. Raises `DataError` unless it is a list of
    messages."""
    if isinstance(log, np.ndarray):
        log = log.tolist()  # parquet gives lists as arrays
    if not isinstance(log, Sequence) or not all(isinstance(message, Mapping) for message in log):
        raise DataError("the message log is not a list of messages", where=where, got=log)
    messages: list[Message] = []
    for message in log:
        kept: Message = {}
        for key, value in message.items():
            if isinstance(value, np.ndarray) and value.dtype == object:
                value = value.tolist()  # a list from parquet
            # A loop keeps tensors in messages, and Arrow a null for each key that a row lacks.
            if value is None or isinstance(value, Tensor | np.ndarray):
                continue
            if key not in _KEYS_OF_LOOPS:
                kept[key] = value
        messages.append(kept)
    return with_messages(log, messages)
