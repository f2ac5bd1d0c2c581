"""`as_trl`: a reward model, or any environment, as one of the `reward_funcs` of TRL's trainers.

    reward = as_trl("http://host:8000")
    GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=prompts)
    reward = as_trl(RewardModelEnvironment({"model_name": "results/rm/final"}))

TRL calls it with prompts, completions and the columns of the dataset, each a list with an entry per
completion. A missing reward is None, which TRL keeps out of the group's baseline and gives the
advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeward.data.conversation import without_nulls
from treeward.data.rendering import Renderer
from treeward.environments.interface import Environment
from treeward.environments.reward_model import RewardModelEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_COLUMNS = frozenset(
    {"trainer_state", "log_extra", "log_metric", "environments", "completion_ids"}
)
"""TRL's arguments that are not columns of the dataset (`GRPOTrainer._calculate_rewards`)."""


def as_trl(
    reward: Any,
    *,
    name: str | None = None,
    policy_tokenizer: PreTrainedTokenizerBase | None = None,
    policy_template_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Callable[..., list[float | None]]:
    """A reward as one of TRL's `reward_funcs`.

    `reward`: an `Environment`, the address of a `treeward serve` (`http://host:8000`), or the
    folder or hub name of a model. `settings`: for an address or a model, other keys of the section
    `env.reward_model`, as `token_env`. `name`: in TRL's log (`rewards/<name>/mean`). The columns of
    the dataset are the `env_infos`, without empty cells. Passes on the environment's errors.

    `policy_tokenizer`: the trainer's `processing_class`, and `policy_template_kwargs` its
    `chat_template_kwargs`. With it a completion begins with what the generation prompt has written
    of it, as `<think>`, which TRL leaves out.

    It adds to TRL's metrics `<name>/failed`, the share of completions without a reward, and
    `<name>/raw_mean`, the mean reward before shaping.
    """
    environment: Environment = reward
    if isinstance(reward, str):
        environment = RewardModelEnvironment({"model_name": reward, **settings})
    name = name or environment.name
    renderer: Renderer | None = None
    if policy_tokenizer is not None:
        renderer = Renderer(policy_tokenizer, chat_template_kwargs=policy_template_kwargs)

    def rewards_of(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """The rewards of B completions, None for none. `prompts`, `completions`: B lists of
        messages, or B texts."""
        logs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            messages = _messages(completion, "assistant")
            # A text has gone through no template.
            if renderer is not None and not isinstance(prompt, str):
                messages = _opened(prompt, messages, renderer)
            logs.append(without_nulls(_messages(prompt, "user")) + messages)
        log_metric = columns.get("log_metric")
        cells = {column: values for column, values in columns.items() if column not in _NOT_COLUMNS}
        infos = []
        for i in range(len(logs)):
            row = {column: values[i] for column, values in cells.items()}
            # Arrow's tables have a null in every column that a row lacks.
            infos.append(without_nulls(row))
        rewards = environment.reward(logs, infos)
        values = [reward.value for reward in rewards]
        if log_metric is not None and rewards:
            log_metric(f"{name}/failed", values.count(None) / len(rewards))
            raw = [reward.raw for reward in rewards if reward.raw is not None]
            if raw:
                log_metric(f"{name}/raw_mean", sum(raw) / len(raw))
        return values

    rewards_of.__name__ = name  # TRL names the function's metrics by it
    return rewards_of


def _opened(
    prompt: Sequence[Any], completion: list[dict[str, Any]], renderer: Renderer
) -> list[dict[str, Any]]:
    """The completion with the opening of its first message."""
    if not completion or not isinstance(completion[0].get("content"), str):
        return completion
    # TRL has read the reasoning, which the prompt opens, into a key of its own.
    if completion[0].get("reasoning_content") is not None:
        return completion
    first = {**completion[0], "content": renderer.opening(prompt) + completion[0]["content"]}
    return [first, *completion[1:]]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """The messages of a conversational dataset, or text as one message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return list(value)
