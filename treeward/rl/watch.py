"""`OverOptimisationWatch`: says when a policy has begun to exploit its reward model.

    watch = OverOptimisationWatch(WatchConfig(z=3.0, max_kl=50.0))
    for alarm in watch.observe(step, proxy_by_prompt=..., gold_by_prompt=..., kl=...):
        logger.warning(alarm.sentence)
    trackers.log(watch.metrics(), step)

It observes every validation, always on the same prompts. With a gold reward it is a test: gold is lower than at its
best while the proxy, the reward that is optimised, is higher (Gao, Schulman, Hilton 2022, arXiv 2210.10760). Without
one there are only signs, and the sentences say so: completions grow longer (Singhal et al. 2023, arXiv 2310.03716),
entropy collapses (Cui et al. 2025, arXiv 2505.22617), KL leaves its budget, completions are cut, groups carry no
signal.

Each kind is raised once, at the first validation where it holds; `active` has those that hold now. A value that is
None or not finite is passed over.

Shapes: P validation prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from treeward.config.grpo import AlarmKind, WatchConfig
from treeward.errors import DataError
from treeward.storage import write_text

__all__ = [
    "ALARMS_FILE",
    "Alarm",
    "AlarmKind",
    "OverOptimisationWatch",
    "length_correlation",
    "read_alarms",
    "write_alarms",
]

ALARMS_FILE = "alarms.json"
"""The file in a run's log folder that holds its alarms; the report reads it."""

_ROUNDING = 1e-9
_Found = tuple[AlarmKind, str, dict[str, float]] | None


@dataclass(frozen=True, slots=True)
class Alarm:
    """`kind` was first found at `step`. `sentence`: for a person; `numbers`: those in it, by name.

    `stops`: the settings ask for the end of the run.
    """

    kind: AlarmKind
    step: int
    sentence: str
    numbers: Mapping[str, float]
    stops: bool = False


class _Validation(NamedTuple):
    """The rewards of one validation by prompt, NaN where scoring failed; empty where there is no such reward."""

    step: int
    proxy_P: list[float]
    gold_P: list[float]


class _Difference(NamedTuple):
    """The mean over `num_prompts` of later less earlier, and its standard error; NaN where they are not known."""

    value: float
    error: float
    num_prompts: int

    def p_of_a_fall(self) -> float:
        """The chance of a fall as large as this one where nothing has changed; 1 if its error is not known."""
        if math.isnan(self.error) or self.value >= 0:
            return 1.0
        if self.error <= _ROUNDING * abs(self.value):
            # All prompts fell by one amount: no spread to compare with. The chance in a sign test stands.
            return 0.5**self.num_prompts
        return float(special.stdtr(self.num_prompts - 1, self.value / self.error))


@dataclass(slots=True)
class OverOptimisationWatch:
    """Compares each validation with those before; see the module for what it raises.

    **The test of gold.** At the t-th validation with a gold reward, b is the one before it whose gold is highest. With
    d_i = gold_i(t) - gold_i(b) over the n prompts that have both,

        T = mean(d) / (std(d) / sqrt(n)),        p = P(Student's t with n - 1 degrees <= T)

    pairs out how hard a prompt is.
    The alarm is raised where proxy(t) > proxy(b) and

        p <= (1 - Phi(z)) * 2 / ((t - 1) t (t + 1))

    b is the luckiest of t - 1, and there is a test at every t, so each of the t - 1 possible comparisons at t has that
    share; the sum over all of them and all t is 1 - Phi(z), as sum_{t>=2} 2 / (t (t + 1)) = 1 (the union bound, Boole).
    The price is small: for z = 3, the 5th validation needs 4.1 standard errors and the 20th 5.0.
    """

    config: WatchConfig = field(default_factory=WatchConfig)
    alarms: list[Alarm] = field(default_factory=list, init=False)
    """All that were raised so far, in order."""
    active: frozenset[AlarmKind] = field(default=frozenset(), init=False)
    """The kinds that hold at the last validation."""
    _first: _Validation | None = field(default=None, init=False)
    _best: _Validation | None = field(default=None, init=False)
    _num_golds: int = field(default=0, init=False)
    _first_length: float = field(default=math.nan, init=False)
    _first_entropy: float = field(default=math.nan, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)

    def observe(
        self,
        step: int,
        *,
        proxy_by_prompt: ArrayLike | None = None,
        gold_by_prompt: ArrayLike | None = None,
        length: float | None = None,
        length_correlation: float | None = None,
        kl: float | None = None,
        entropy: float | None = None,
        truncation_rate: float | None = None,
        groups_without_signal: float | None = None,
    ) -> list[Alarm]:
        """Take in the validation at `step`; returns the alarms of kinds that were not raised before.

        `proxy_by_prompt`, `gold_by_prompt` (P,): mean reward of each prompt, in the same order every time, NaN where
        scoring failed, on a scale that stays the same over the run (so before a shaping by running statistics).
        `length`: mean tokens of a completion; `length_correlation`: of reward and length within groups, see the
        function of that name. `kl` and `entropy`: in nats.
        """
        if not self.config.enabled:
            return []
        now = _Validation(step, _values(proxy_by_prompt), _values(gold_by_prompt))
        kl, entropy, length, correlation, truncated, without = (
            math.nan if value is None else float(value)
            for value in (kl, entropy, length, length_correlation, truncation_rate, groups_without_signal)
        )
        found = [
            self._gold_falls(now, kl),
            self._kl_budget(kl),
            self._length_growth(now, length, correlation),
            self._entropy_collapse(entropy),
            self._too_many(
                "truncation", truncated, self.config.max_truncation_rate,
                "of the completions reach the length limit and are cut",
            ),
            self._too_many(
                "no_signal", without, self.config.max_groups_without_signal,
                "of the groups have completions with equal rewards, which teach nothing",
            ),
        ]  # fmt: skip
        holding = [one for one in found if one is not None]
        self.active = frozenset(kind for kind, _, _ in holding)
        raised = {alarm.kind for alarm in self.alarms}
        stops = self.config.stop_on if self.config.stop else ()
        new = [
            Alarm(kind, step, sentence, {name: n for name, n in numbers.items() if math.isfinite(n)}, kind in stops)
            for kind, sentence, numbers in holding
            if kind not in raised
        ]
        self.alarms.extend(new)
        self._remember(now, length, entropy)
        return new

    def metrics(self) -> dict[str, float]:
        """The last validation, in the units of the rewards, for the log; without the values that are not known.

        watch/alarm: 1 while an alarm of any kind holds. watch/{proxy,gold}_error: standard errors of the means;
        watch/{proxy,gold}_change and _change_error: since the first validation, paired by prompt;
        watch/gold_fall and _fall_error: from the best validation so far.
        """
        return {"watch/alarm": float(bool(self.active)), **self._metrics}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON holds it."""
        alarms = [asdict(alarm) for alarm in self.alarms]
        return {"alarms": alarms, "active": sorted(self.active)} | {name: getattr(self, name) for name in _REMEMBERED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.alarms, self.active = [Alarm(**alarm) for alarm in state["alarms"]], frozenset(state["active"])
        for name in _REMEMBERED:
            setattr(self, name, state[name])
        for name in ("_first", "_best"):
            setattr(self, name, None if state[name] is None else _Validation(*state[name]))

    def _remember(self, now: _Validation, length: float, entropy: float) -> None:
        gold = _mean(now.gold_P)
        if self._first is None and not (math.isnan(_mean(now.proxy_P)) and math.isnan(gold)):
            self._first = now
        if not math.isnan(gold):
            self._num_golds += 1
            self._best = now if self._best is None or gold > _mean(self._best.gold_P) else self._best
        self._first_length = length if math.isnan(self._first_length) else self._first_length
        self._first_entropy = entropy if math.isnan(self._first_entropy) else self._first_entropy
        first = self._first or now
        found = {"proxy_error": _error(now.proxy_P), "gold_error": _error(now.gold_P)}
        for name, change in (
            ("proxy_change", _difference(first.proxy_P, now.proxy_P)),
            ("gold_change", _difference(first.gold_P, now.gold_P)),
            ("gold_fall", _difference(now.gold_P, [] if self._best is None else self._best.gold_P)),
        ):
            found |= {name: change.value, f"{name}_error": change.error}
        self._metrics = {f"watch/{name}": value for name, value in found.items() if math.isfinite(value)}

    def _gold_falls(self, now: _Validation, kl: float) -> _Found:
        best, t, gold = self._best, self._num_golds + 1, _mean(now.gold_P)
        if best is None or math.isnan(gold) or t < self.config.min_validations:
            return None
        change, proxy_change = _difference(best.gold_P, now.gold_P), _difference(best.proxy_P, now.proxy_P)
        largest_p = float(special.ndtr(-self.config.z)) * 2.0 / ((t - 1) * t * (t + 1))
        if not proxy_change.value > 0 or not change.p_of_a_fall() <= largest_p:
            return None
        needed = -float(special.stdtrit(change.num_prompts - 1, largest_p))
        level = change.error <= _ROUNDING * abs(change.value)
        fell = "the same on every prompt" if level else f"{-change.value / change.error:.1f} standard errors"
        before = _mean(best.gold_P)
        sentence = (
            f"Gold has fallen by {-change.value:.3g} from its best, {before:.3g} at step {best.step}, to {gold:.3g}, "
            f"while the proxy rose by {proxy_change.value:.3g}, from {_mean(best.proxy_P):.3g} to "
            f"{_mean(now.proxy_P):.3g}: the policy exploits the reward model. The fall is {fell}; at validation number "
            f"{t} {needed:.1f} are needed.{'' if math.isnan(kl) else f' KL is {kl:.3g}.'}"
        )
        numbers = {"gold": gold, "best_gold": before, "best_step": float(best.step), "fall": -change.value}
        numbers |= {"fall_error": change.error, "needed": needed, "proxy_rise": proxy_change.value, "kl": kl}
        return "gold_falls", sentence, numbers

    def _kl_budget(self, kl: float) -> _Found:
        budget = self.config.max_kl
        if budget is None or not kl > budget:
            return None
        sentence = (
            f"KL to the reference is {kl:.3g}, above the budget of {budget:.3g}. This is a sign, no proof: the further "
            "from the reference, the less the reward model knows of the completions."
        )
        return "kl_budget", sentence, {"kl": kl, "budget": budget}

    def _length_growth(self, now: _Validation, length: float, correlation: float) -> _Found:
        factor, start = self.config.max_length_growth, self._first_length
        if factor is None or self._first is None or not math.isnan(_mean(now.gold_P)):
            return None  # a gold reward tells more than lengths do
        rise = _difference(self._first.proxy_P, now.proxy_P).value
        if not length > factor * start > 0 or not rise > 0 or correlation < self.config.min_length_correlation:
            return None
        known = not math.isnan(correlation)
        related = f" Within groups reward and length correlate by {correlation:.2f}." if known else ""
        sentence = (
            f"Completions have {length:.0f} tokens on average, {length / start:.1f} times as many as at first, "
            f"and the proxy rose by {rise:.3g}.{related} This is a sign, no proof: the reward model may pay for length."
        )
        numbers = {"length": length, "first_length": start, "proxy_rise": rise, "correlation": correlation}
        return "length_growth", sentence, numbers

    def _entropy_collapse(self, entropy: float) -> _Found:
        share, start = self.config.min_entropy_share, self._first_entropy
        if share is None or not entropy < share * start:
            return None
        sentence = (
            f"The policy's entropy is {entropy:.3g}, {entropy / start:.0%} of that at the first validation. This is a "
            "sign, no proof: it gives nearly the same completion every time and explores no more."
        )
        return "entropy_collapse", sentence, {"entropy": entropy, "first_entropy": start}

    def _too_many(self, kind: AlarmKind, share: float, most: float | None, what: str) -> _Found:
        if most is None or not share > most:
            return None
        sentence = f"{share:.0%} {what}; the limit is {most:.0%}. This is a sign, no proof."
        return kind, sentence, {"share": share, "limit": most}


_REMEMBERED = ("_first", "_best", "_num_golds", "_first_length", "_first_entropy", "_metrics")


def length_correlation(rewards: Sequence[Sequence[float]], lengths: Sequence[Sequence[float]]) -> float | None:
    """How reward and length go together within groups: Pearson's correlation of both less their group's means.

    `rewards`, `lengths`: of each group, of each of its completions; completions whose reward is not finite are left
    out. None where nothing varies within any group.
    """
    rs, ls = [], []
    for group_rewards, group_lengths in zip(rewards, lengths, strict=True):
        r, n = (np.asarray(values, dtype=np.float64) for values in (group_rewards, group_lengths))
        kept = np.isfinite(r) & np.isfinite(n)
        if kept.any():
            rs.append(r[kept] - r[kept].mean())
            ls.append(n[kept] - n[kept].mean())
    if not rs:
        return None
    r, n = np.concatenate(rs), np.concatenate(ls)
    spread = math.sqrt(float(r @ r) * float(n @ n))
    return None if spread == 0.0 else float(r @ n) / spread


def write_alarms(path: Path, alarms: Sequence[Alarm]) -> None:
    """Write all alarms of a run: written anew at each validation, those of a resumed run are exact."""
    write_text(path, json.dumps([asdict(alarm) for alarm in alarms], indent=2, allow_nan=False) + "\n")


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of a file that `write_alarms` wrote. Raises `DataError` for another file."""
    try:
        return [Alarm(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (TypeError, ValueError) as error:
        fix = "remove it: the report is then made without the sentences of the alarms"
        raise DataError("this is no file of alarms", where=str(path), got=str(error), fix=fix) from error


def _values(by_prompt: ArrayLike | None) -> list[float]:
    values = np.asarray([] if by_prompt is None else by_prompt, dtype=np.float64)
    return [value if math.isfinite(value) else math.nan for value in values.tolist()]


def _mean(values_P: Sequence[float]) -> float:
    known = [value for value in values_P if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _error(values_P: Sequence[float]) -> float:
    """The standard error of the mean; NaN where it is not known."""
    known = [value for value in values_P if not math.isnan(value)]
    return float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def _difference(earlier_P: Sequence[float], later_P: Sequence[float]) -> _Difference:
    """Later less earlier, paired over the prompts that have both."""
    same = len(earlier_P) == len(later_P)
    changes = [b - a for a, b in zip(earlier_P, later_P, strict=True) if not math.isnan(b - a)] if same else []
    return _Difference(_mean(changes), _error(changes), len(changes))
