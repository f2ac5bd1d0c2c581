"""`RunningStatistics` of rewards, and `RewardLog`, by which the replicas of a server have the same ones.

    log = RewardLog(path=Path("/shared/rewards.jsonl"), size=1000, identity={"model": "3f..."})
    log.add({"hash of a conversation": 1.25})       # {"hash ...": (1.25, RunningStatistics(1, 1.25, 0.0))}

A reward that depends on all rewards before it is another one when it is asked for again. So the log remembers: a
conversation keeps the value and the statistics that it had first, and after `size` conversations the statistics are
fixed. What a conversation gets is a function of the log alone; replicas that share its file agree, and so does a server
that is started again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.errors import ConfigError
from treeward.storage import folder_lock


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
    """The values of the first `size` conversations, by a hash of each, and the statistics at each step.

    `path`: one line of JSON for what came in one request, after a first line with `identity`, which says what the
    values depend on. None: in memory. Raises `ConfigError` for a file of another identity or a damaged one, and
    `OSError` for one that cannot be written.
    """

    def __init__(self, *, size: int, path: Path | None = None, identity: Mapping[str, Any] | None = None) -> None:
        self.size, self.path = size, path
        self.statistics = RunningStatistics()
        self._identity = {"size": size, **(identity or {})}
        self._known: dict[str, tuple[float, RunningStatistics]] = {}
        self._read_bytes = 0
        if path is not None:
            path.touch()
        self.add({})

    def described(self) -> dict[str, float | bool]:
        """Mean, standard deviation and count, and whether they are fixed."""
        found, size = self.statistics, self.size
        return {"mean": found.mean, "std": found.std, "count": found.count, "fixed": found.count >= size}

    def add(self, values: Mapping[str, float]) -> dict[str, tuple[float, RunningStatistics]]:
        """The value and the statistics that count for each: those that it had first, or, if it is new, this value with
        the statistics that include it, until these are fixed.
        """
        if self.statistics.count < self.size:
            with nullcontext() if self.path is None else folder_lock(self.path, wait=True):
                self._catch_up()
                new = {key: value for key, value in values.items() if key not in self._known}
                if new and self.statistics.count < self.size:
                    self._write(new)
                    self._take(new)
        return {key: self._known.get(key, (value, self.statistics)) for key, value in values.items()}

    def _take(self, new: Mapping[str, float]) -> None:
        self.statistics = replace(self.statistics)
        self.statistics.update(new.values())
        self._known |= {key: (value, self.statistics) for key, value in new.items()}

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
            self._take(self._parsed(line))
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
