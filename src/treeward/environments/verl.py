"""verl's `compute_score`: verl loads this file by its path or as a package, and gets rewards from
treeward.

    reward.custom_reward_function.path=pkg://treeward.environments.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.model=results/rm/final        # or http://host:8000

The other `reward_kwargs` are those of `RewardSourceConfig`. verl does not pass the prompt on, so
the data has it in `extra_info`, under `prompt` (messages, or the text of one); the other keys of
`extra_info`, `ground_truth` and `data_source` are the environment's `env_info`.

verl knows no missing rewards. NaN makes the mini-batch's gradient NaN, so that verl drops the whole
update; 0 would train. So a completion without a reward raises, unless `on_failure` is `nan`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from treeward.config.reward_environments import READ_COMPLETION_ALONE
from treeward.data.conversation import without_nulls
from treeward.environments.interface import Reward
from treeward.environments.source import RewardSourceConfig, reward_source
from treeward.errors import DataError

_PROMPT_KEYS = ("prompt", "messages", "raw_prompt", "question")
_FROM_VERL = ("reward_router_address", "reward_model_tokenizer")
"""Arguments that verl adds for its own reward model; unused here."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **reward_kwargs: Any,
) -> dict[str, float]:
    """The reward of one completion: `{"score": shaped, "raw": before shaping}`.

    verl's reward managers call it from several threads, which share one model; simultaneous calls
    are one step. Raises `DataError` for a sample without a prompt, and for a missing reward.
    """
    future, config = _submit(data_source, solution_str, ground_truth, extra_info, reward_kwargs)
    return _score(future.result(), config, data_source)


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **reward_kwargs: Any,
) -> dict[str, float]:
    """`compute_score` for verl's reward loop: a worker sends all of its samples at once, so steps
    are larger."""
    # The first call loads the model, which must not block the loop.
    future, config = await asyncio.to_thread(
        _submit, data_source, solution_str, ground_truth, extra_info, reward_kwargs
    )
    return _score(await asyncio.wrap_future(future), config, data_source)


def compute_scores(
    data_sources: Iterable[str],
    solution_strs: Sequence[str],
    ground_truths: Iterable[Any],
    extra_infos: Iterable[Mapping[str, Any] | None] | None = None,
    **reward_kwargs: Any,
) -> list[dict[str, float]]:
    """The rewards of B completions, in order, for verl's `batch` reward manager."""
    if extra_infos is None:
        extra_infos = [None] * len(solution_strs)
    # All are submitted before the first is waited for: they are one step.
    submissions = []
    for sample in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True):
        future, config = _submit(*sample, reward_kwargs)
        data_source = sample[0]
        submissions.append((future, config, data_source))
    scores = []
    for future, config, data_source in submissions:
        scores.append(_score(future.result(), config, data_source))
    return scores


def _submit(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None,
    reward_kwargs: Mapping[str, Any],
) -> tuple[Future[Reward], RewardSourceConfig]:
    settings = {key: value for key, value in reward_kwargs.items() if key not in _FROM_VERL}
    source, config = reward_source(settings)
    info = dict(extra_info or {})
    has_prompt = any(info.get(key) is not None for key in _PROMPT_KEYS)
    is_rule = False
    if config.environment is not None:
        is_rule = config.environment.get("type") in READ_COMPLETION_ALONE
    prompt: list[Mapping[str, Any]] = []
    if has_prompt or not is_rule:
        prompt = _prompt(info, data_source)
    messages = [*prompt, {"role": "assistant", "content": solution_str}]
    env_info = {**info, "data_source": data_source, "ground_truth": ground_truth}
    # verl's rows come from parquet, which has a null for every key that a row lacks.
    return source.submit(messages, without_nulls(env_info)), config


def _prompt(extra_info: Mapping[str, Any], data_source: str) -> list[Mapping[str, Any]]:
    for key in _PROMPT_KEYS:
        prompt = extra_info.get(key)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if prompt is not None:
            # From parquet it is a list, or an array.
            return [without_nulls(message) for message in prompt]
    raise DataError(
        "a reward model reads the prompt too, and verl does not pass it on",
        where=f"data_source {data_source}",
        got=f"extra_info with {sorted(map(str, extra_info))}",
        need=f"one of {', '.join(_PROMPT_KEYS)}",
        fix='when you write the parquet: row["extra_info"]["prompt"] = row["prompt"]',
    )


def _score(reward: Reward, config: RewardSourceConfig, data_source: str) -> dict[str, float]:
    # verl gathers the keys of a batch's first sample, so every sample has the same keys.
    if reward.value is not None:
        raw = reward.value if reward.raw is None else reward.raw
        return {"score": reward.value, "raw": raw}
    if config.on_failure == "nan":
        return {"score": math.nan, "raw": math.nan}
    raise DataError(
        f"a completion has no reward: {reward.error}",
        where=f"data_source {data_source}",
        fix="correct the sample, or set reward_kwargs.on_failure=nan: verl then drops the update",
    )
