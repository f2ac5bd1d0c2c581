"""`NemoRLEnvironment`: any environment as NeMo RL makes and calls one, with a rule for samples
without a reward.

    from treeward.environments import nemo_rl
    nemo_rl.register("reward_model")    # before NeMo RL's run_grpo.py, with env.reward_model as is

It needs a NeMo RL whose Python allows treeward's transformers, which its version 0.6.0 does not.
`examples/nemo_rl_over_http.py` asks a server instead, and needs no treeward there.

Environments already have the signature of NeMo RL's loops, but two things differ:

- These loops put `total_reward` into baselines and advantages, whatever `loss_multiplier` is, so
  one NaN spoils its group and the update. Here a sample without a reward fails the step, or takes
  its group's mean, which gives no policy gradient.
- Its processors (`data/processors.py`) write into a user's message what the policy's chat template
  makes of it, with the generation prompt. `policy_tokenizer` takes that off again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from treeward.config.base import Strict
from treeward.config.load import load_section
from treeward.config.policy import ScoringTokenizerConfig
from treeward.config.reward_environments import READ_COMPLETION_ALONE
from treeward.data.chat_template import find_template
from treeward.environments.interface import (
    DETAILS,
    WHERE,
    AnyInfos,
    Conversations,
    Environment,
    EnvironmentReturn,
    Infos,
    Logs,
    Reward,
    conversation_of_log,
)
from treeward.environments.registry import make_environment
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.pretrained import load_tokenizer

logger = logging.getLogger(__name__)

_SECTION = "nemo_rl"
_PROBE = "Quo vadis?"  # words that no template writes by itself
_OBSERVATION = "\n"
"""The environment's last message, not trained on: NeMo RL's asynchronous rollouts fail on one
without tokens."""


class NemoRLConfig(Strict):
    """The section `nemo_rl` of an environment's section: settings for NeMo RL's loop alone."""

    failed_samples: Literal["raise", "group_mean"] = "raise"
    """A sample without a reward stops the run with the reason (`raise`), or gets the mean of the
    other completions of its prompt, and so the advantage 0 (`group_mean`). That needs another
    completion of the prompt with a reward in the same step, or it raises: asynchronous rollouts of
    NeMo RL step one sample at a time."""
    policy_tokenizer: ScoringTokenizerConfig | None = None
    """The policy's tokenizer, as `${policy.tokenizer}`. What its chat template has written around a
    user's message is taken off, so that a reward model, a judge or a function reads the message
    alone. None: messages are read as they come, which is right for rules, and for processors that
    leave the messages as they are."""

    def check(self) -> None:
        if self.policy_tokenizer is not None and self.policy_tokenizer.name is None:
            raise self.error("policy_tokenizer.name", "the policy's tokenizer")


class NemoRLEnvironment(Environment):
    """The environment of a section of `env:`, for NeMo RL.

    `env_config`: the section, with the kind as `type` (default `reward_model`) and a `NemoRLConfig`
    as `nemo_rl`. Raises as the environment does.
    """

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        section = {key: value for key, value in env_config.items() if key != "enabled"}
        self.config = load_section(
            NemoRLConfig, section.pop(_SECTION, None) or {}, where=f"{WHERE}.{_SECTION}"
        )
        self.environment = make_environment("reward_model", section)
        self.name = self.environment.name
        self._template: _UserTemplate | None = None
        kind = section.get("type") or "reward_model"
        if self.config.policy_tokenizer is not None:
            self._template = _UserTemplate(self.config.policy_tokenizer)
        elif kind not in READ_COMPLETION_ALONE:
            logger.warning(
                "NeMo RL's processors write a user's message as the policy's chat template renders "
                "it, and %s would read that. Set %s.policy_tokenizer: ${policy.tokenizer}, unless "
                "your processor leaves messages as they are.",
                self.name,
                _SECTION,
            )

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        return self.environment.rewards(conversations, env_infos)

    def step(
        self, message_logs: Logs, env_infos: AnyInfos, return_extracted_answer: bool = False
    ) -> EnvironmentReturn:
        """The environment's step, every reward finite. Raises `ModelError` for a missing reward
        without a substitute.

        `return_extracted_answer`: of NeMo RL's evaluation; `answers` are always returned.
        """
        if self._template is not None:
            plain_logs = []
            for i, log in enumerate(message_logs):
                plain_logs.append(self._template.taken_off(log, where=f"{self.name}, sample {i}"))
            message_logs = plain_logs
        result = self.environment.step(message_logs, env_infos)
        observations = [{**message, "content": _OBSERVATION} for message in result.observations]
        rewards = self._filled(result, message_logs)
        return result._replace(rewards=rewards, observations=observations)

    def shutdown(self) -> bool:
        return self.environment.shutdown()

    def _filled(self, result: EnvironmentReturn, message_logs: Logs) -> Tensor:
        failed = (~torch.isfinite(result.rewards)).nonzero().flatten().tolist()
        if not failed:
            return result.rewards
        filled = result.rewards
        if self.config.failed_samples == "group_mean":
            groups: list[Hashable] = []
            for log in message_logs:
                messages = conversation_of_log(log)
                # A step ends a sample, so the completion is the last message. The messages before
                # it are the group; a log without a completion has none.
                group = None
                if messages and messages[-1].get("role") == "assistant":
                    before = [(turn.get("role"), turn.get("content")) for turn in messages[:-1]]
                    group = json.dumps(before, default=str)
                groups.append(group)
            filled = fill_with_group_means(filled, groups)
        first = f"sample {failed[0]}: {result.metadata[failed[0]][DETAILS]['error']}"
        if not bool(torch.isfinite(filled).all()):
            raise ModelError(
                f"{len(failed)} of {len(filled)} samples have no reward, and NeMo RL cannot leave "
                "one out",
                got=first,
                fix="correct it; nemo_rl.failed_samples: group_mean needs another completion of "
                "its prompt in the step",
            )
        logger.warning(
            "%d of %d samples have no reward and got the mean of the other completions of their "
            "prompt; %s",
            len(failed),
            len(filled),
            first,
        )
        return filled


class _UserTemplate:
    """What a policy's chat template writes before and after a user's message that stands alone."""

    def __init__(self, section: ScoringTokenizerConfig) -> None:
        tokenizer = load_tokenizer(str(section.name))
        template, _ = find_template(tokenizer, section.chat_template)
        # As NeMo RL's processors call it.
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _PROBE}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **(section.chat_template_kwargs or {}),
        )
        self._before, _, self._after = str(text).partition(_PROBE)

    def taken_off(self, log: Sequence[Mapping[str, Any]], *, where: str) -> list[Mapping[str, Any]]:
        """The log with its users' messages alone. Raises `DataError` where its first one is not as
        the template renders it; later ones may be of an environment."""
        messages: list[Mapping[str, Any]] = []
        is_first = True
        for message in log:
            content = message.get("content")
            if message.get("role") != "user" or not isinstance(content, str):
                messages.append(message)
                continue
            is_rendered = content.startswith(self._before) and content.endswith(self._after)
            if is_rendered:
                end = len(content) - len(self._after)
                messages.append({**message, "content": content[len(self._before) : end]})
            elif is_first:
                raise DataError(
                    "a user's message is not as the policy's chat template renders it",
                    where=where,
                    field=f"{_SECTION}.policy_tokenizer",
                    got=content,
                    need=f"{self._before}...{self._after}",
                    fix="give the policy's tokenizer and template, or leave the key out where the "
                    "processor leaves messages as they are",
                )
            else:
                messages.append(message)
            is_first = False
        return messages


def fill_with_group_means(rewards: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """Give each sample without a reward its group's mean, which makes its group-relative advantage
    0.

    `rewards`: float32 (B,), NaN for none. `groups`: the key of each sample's group, None if
    unknown. The advantage is 0 for the mean of the group and of the others in it (leave-one-out).
    NaN stays for groups that are unknown or without a reward: any other mean would train.
    """
    has_reward = torch.isfinite(rewards)
    filled = rewards.clone()
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(index)
    for indices in members.values():
        rows = torch.tensor(indices)
        mean = rewards[rows[has_reward[rows]]].mean()  # NaN if there is none
        filled[rows[~has_reward[rows]]] = mean
    return filled


def register(name: str = "reward_model") -> None:
    """Make NeMo RL use a `NemoRLEnvironment` for the section `env.<name>`, instead of its own
    class.

    Call it before NeMo RL's script, in the same process. treeward must be installed in the Python
    of Ray's workers. Raises `ConfigError` if NeMo RL is not installed.
    """
    try:
        from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
        from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
        from nemo_rl.environments.utils import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            "NeMo RL is not installed", got=str(error), fix="run this in NeMo RL's own Python"
        ) from error
    path = f"{NemoRLEnvironment.__module__}.{NemoRLEnvironment.__qualname__}"
    ENV_REGISTRY[name] = {**ENV_REGISTRY.get(name, {}), "actor_class_fqn": path}
    # The Python of Ray's workers, where treeward is; NeMo RL has others, one for each extra.
    ACTOR_ENVIRONMENT_REGISTRY[path] = PY_EXECUTABLES.SYSTEM
