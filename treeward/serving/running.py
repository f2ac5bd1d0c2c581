"""`RunningStatistics` of rewards, and `RewardLog`, by which NeMo Gym's `/verify` normalises.

    log = RewardLog(RunningStatisticsConfig(file="/shared/rewards.jsonl", size=1000), identity="3f...")
    log.normalized(reward, "hash of its conversation").value

A reward that depends on all rewards before it is another one when it is asked for again. So the log remembers: a
conversation keeps the value and the statistics that it had first, and after `size` conversations the statistics are
fixed. What a conversation gets is a function of the log alone; servers that share its file agree, and so does one that
is started again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.config.server import RunningStatisticsConfig
from treeward.errors import ConfigError
from treeward.scoring.score import Reward
from treeward.scoring.shaping import normalize
from treeward.storage import folder_lock

logger = logging.getLogger(__name__)

_EPSILON = 1e-8


@dataclass
class RunningStatistics:
    """Count, mean and variance of all numbers seen so far, without keeping them.

    M2 is the sum of squared differences from the mean. A batch b is added to the numbers a by Chan, Golub and LeVeque
    1979 (the formula of Welford 1962 where b is a single number):
    mean = mean_a + d n_b / n, M2 = M2_a + M2_b + d^2 n_a n_b / n, with d = mean_b - mean_a and n = n_a + n_b.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the population, sqrt(M2 / n); 0 before the first number."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Iterable[float]) -> None:
        """Add finite numbers; their order makes no difference."""
        batch = list(values)
        if not batch:
            return
        mean = math.fsum(batch) / len(batch)
        count, difference = self.count + len(batch), mean - self.mean
        self.m2 += math.fsum((value - mean) ** 2 for value in batch)
        self.m2 += difference**2 * self.count * len(batch) / count
        self.mean += difference * len(batch) / count
        self.count = count


class RewardLog:
    """The rewards of the first `size` conversations, by a hash of each, and the statistics at each step.

    The file has one line of JSON for each, after a first line with `identity`, which says what the rewards depend on.
    Raises `ConfigError` for a file of another identity or a damaged one, and `OSError` for one that cannot be written.
    """

    def __init__(self, config: RunningStatisticsConfig, *, identity: str = "") -> None:
        self.config, self.path = config, Path(config.file).expanduser() if config.file else None
        self.statistics = RunningStatistics()
        self._identity = {"size": config.size, "model": identity}
        self._known: dict[str, tuple[float, RunningStatistics]] = {}
        self._read_bytes = 0
        self._lock = threading.Lock()
        if self.path is None:
            logger.warning("No file for the running statistics: they are this process's alone.")
        else:
            self.path.touch()
            with folder_lock(self.path, wait=True):
                self._catch_up()

    def normalized(self, reward: Reward, key: str) -> Reward:
        """(r - mean) / std, clipped; a reward that is not there stays so.

        r and the statistics are those that the conversation `key` had first. If it is new, they are this reward with
        statistics that include it, until these are fixed.
        """
        if reward.value is None:
            return reward
        with self._lock:
            if self.statistics.count < self.config.size:
                with nullcontext() if self.path is None else folder_lock(self.path, wait=True):
                    self._catch_up()
                    if key not in self._known and self.statistics.count < self.config.size:
                        self._write({key: reward.value})
                        self._take(key, reward.value)
            value, now = self._known.get(key, (reward.value, self.statistics))
        parts = {"running_mean": now.mean, "running_std": now.std, "running_count": float(now.count)}
        normalized = normalize(value, now.mean, now.std + _EPSILON, self.config.reward_clip)
        return replace(reward, value=normalized, components={**reward.components, **parts})

    def _take(self, key: str, value: float) -> None:
        self.statistics = replace(self.statistics)
        self.statistics.update([value])
        self._known[key] = value, self.statistics

    def _catch_up(self) -> None:
        """Take in what other processes have written; the part of a line that one of them was killed in is none."""
        if self.path is None:
            return
        with self.path.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self._read_bytes:
                raise OSError(f"{self.path} has been emptied since the server was started")
            stream.seek(self._read_bytes)
            content = stream.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        if not self._read_bytes:
            first = json.dumps(self._identity).encode() + b"\n"
            if not lines and first.startswith(content):
                self._write(self._identity)
            elif lines[:1] == [first]:
                self._read_bytes = len(lines.pop(0))
            else:
                got, need = content[:200].decode(errors="replace"), f"{first.decode()}, or a file that is not there yet"
                raise ConfigError("these are statistics of other rewards", where=str(self.path), got=got, need=need)
        for line in lines:
            for key, value in self._parsed(line).items():
                self._take(key, value)
            self._read_bytes += len(line)

    def _parsed(self, line: bytes) -> dict[str, float]:
        """The values of the line that is read next. Raises `ConfigError` for a damaged one."""
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and all(isinstance(one, float | int) for one in values.values()):
                return values
        assert self.path is not None
        number = self.path.read_bytes()[: self._read_bytes].count(b"\n") + 1
        got, need = line[:200].decode(errors="replace"), "a JSON object of numbers, as the server writes it"
        fix = "restore the file; or move it away: the statistics begin anew"
        where = f"{self.path}:{number}"
        raise ConfigError("the file of the statistics is damaged", where=where, got=got, need=need, fix=fix)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            content = json.dumps(line).encode() + b"\n"
            with self.path.open("r+b") as stream:
                stream.truncate(self._read_bytes)
                stream.seek(self._read_bytes)
                stream.write(content)
            self._read_bytes += len(content)
