"""`EnvironmentScorer`: an environment instead of a reward model, for `eval` and `bon`.

scorer = EnvironmentScorer(make_environment("judge", {"base_url": url, "model": "m", "mode": "pairwise"}))
scorer.score_groups([[conversation, other], ...], on_error="mask")         # its rewards, as scores
scorer.usage()                     # of a judge: {"num_requests": 120, ..., "seconds": 31.0, "position_bias": 0.12}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from treeward.environments.interface import GROUP, Environment
from treeward.errors import DataError
from treeward.scoring.score import Conversation, Cost, OnError, Score


class EnvironmentScorer:
    """Rewards as scores, one group of completions of a prompt at a time."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._cost = Cost()

    def usage(self) -> dict[str, float]:
        """A judge's usage since the last call, and the mean of each reward component."""
        means = {name: fmean(values) for name, values in self._seen.items()}
        self._seen.clear()
        now: Cost | None = getattr(self.environment, "cost", None)
        if now is None:
            return means
        before, self._cost = self._cost, now
        return asdict(now - before) | means

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        """Each conversation alone. Raises `DataError` for one without a reward, unless `on_error` is "mask"."""
        groups = [[conversation] for conversation in conversations]
        return [score for [score] in self.score_groups(groups, where=where, on_error=on_error)]

    def score_groups(
        self,
        groups: Sequence[Sequence[Conversation]],
        *,
        infos: Sequence[Mapping[str, Any]] | None = None,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[list[Score]]:
        """A list of scores for each group. `infos`: the data's columns for each group, as `ground_truth`."""
        group_infos: Sequence[Mapping[str, Any]] = infos or [{}] * len(groups)
        flat = [conversation for group in groups for conversation in group]
        env_infos = [{**info, GROUP: f"group {g}"} for g, info in enumerate(group_infos) for _ in groups[g]]
        rewards = self.environment.reward(flat, env_infos)
        names = [name for g, name in enumerate(where or map(str, range(len(groups)))) for _ in groups[g]]
        for reward, name in zip(rewards, names, strict=True):
            if reward.value is None and on_error == "raise":
                raise DataError("the completion has no reward", where=name, got=reward.error)
            for part, value in reward.components.items():
                self._seen[part].append(value)
        scores = iter([Score(r.value, error=r.error, judgement=r.score.judgement) for r in rewards])
        return [[next(scores) for _ in group] for group in groups]
