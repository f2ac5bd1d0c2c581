"""`OverOptimisationWatch`: says when a policy has begun to exploit its reward model.

    watch = OverOptimisationWatch(WatchSettings(z=3.0, max_kl=50.0))
    for alarm in watch.observe(step, proxy=..., gold=..., proxy_by_prompt=..., gold_by_prompt=..., kl=...):
        logger.warning(alarm.sentence)
    trackers.log(watch.metrics(), step)

It is told of every validation, always on the same prompts. With a gold reward it is a test: gold is lower than at its
best while the proxy, which is what is optimised, is higher (Gao, Schulman, Hilton 2022, arXiv 2210.10760). Without one
there are only signs, and the sentences say so: completions grow longer (Singhal et al. 2023, arXiv 2310.03716), entropy
collapses (Cui et al. 2025, arXiv 2505.22617), KL leaves its budget, completions are cut, groups carry no signal.

Each kind is raised once, at the first validation where it holds; `active` has those that hold now. A value that is
None or not finite is passed over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from treeward.config.grpo import AlarmKind
from treeward.errors import ConfigError, DataError

__all__ = [
    "ALARMS_FILE",
    "Alarm",
    "AlarmKind",
    "OverOptimisationWatch",
    "WatchSettings",
    "length_correlation",
    "read_alarms",
    "write_alarms",
]

ALARMS_FILE = "alarms.json"
"""The file in a run's log folder that holds its alarms; the report reads it."""

_KINDS: tuple[AlarmKind, ...] = get_args(AlarmKind)
_Name = Literal["proxy", "gold"]
_ROUNDING = 1e-9
_Found = tuple[AlarmKind, str, dict[str, float]] | None


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """When to raise an alarm, and on which to stop.

    `z`: how sure the test of gold is, over the whole run: a run whose gold never changes is accused with probability
    1 - Phi(z) at most, 0.00135 for 3, however many validations it has. `min_validations`: no test before so many.
    `max_kl`: budget for KL(policy || reference), in the unit in which it is observed; None for no budget.
    `max_length_growth`: mean length of the completions as a multiple of that at the first validation, and
    `min_length_correlation`: of reward and length within a group, where it is known. `min_entropy_share`: entropy as a
    share of that at the first validation. `max_truncation_rate`, `max_groups_without_signal`: shares of completions and
    of groups. None for any of these: never. `stop`: end the run at an alarm of a kind in `stop_on`.
    """

    enabled: bool = True
    z: float = 3.0
    min_validations: int = 3
    max_kl: float | None = None
    max_length_growth: float | None = 2.0
    min_length_correlation: float = 0.3
    min_entropy_share: float | None = 0.1
    max_truncation_rate: float | None = 0.5
    max_groups_without_signal: float | None = 0.9
    stop: bool = False
    stop_on: tuple[AlarmKind, ...] = ("gold_falls",)

    def __post_init__(self) -> None:
        def need(holds: bool, name: str, text: str) -> None:
            if not holds:
                raise ConfigError("the watch cannot be set so", where=name, got=getattr(self, name), need=text)

        need(self.z > 0, "z", "a number above 0; 3 is usual")
        need(self.min_validations >= 2, "min_validations", "2 or more: a fall is from one to another")
        need(self.max_kl is None or self.max_kl > 0, "max_kl", "a number above 0, or null")
        need(self.max_length_growth is None or self.max_length_growth > 1, "max_length_growth", "above 1, or null")
        need(-1 <= self.min_length_correlation <= 1, "min_length_correlation", "a correlation, from -1 to 1")
        for name in ("min_entropy_share", "max_truncation_rate", "max_groups_without_signal"):
            value = getattr(self, name)
            need(value is None or 0 < value <= 1, name, "a share above 0, at most 1, or null")
        need(set(self.stop_on) <= set(_KINDS), "stop_on", f"kinds out of {', '.join(_KINDS)}")


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


@dataclass(frozen=True, slots=True)
class _Validation:
    """What was seen at one validation; None for what was not known, for a value by prompt too."""

    step: int
    proxy: float | None
    gold: float | None
    proxy_error: float | None
    gold_error: float | None
    proxy_by_prompt: tuple[float | None, ...] | None = None
    gold_by_prompt: tuple[float | None, ...] | None = None


class _Difference(NamedTuple):
    """Later less earlier, its standard error (NaN: not known), and the degrees of freedom of that (inf: normal)."""

    value: float
    error: float
    degrees: float
    num_prompts: int

    def p_of_a_fall(self) -> float:
        """The chance of a fall as large as this one where nothing has changed; 1 if its error is not known."""
        if math.isnan(self.error) or self.value >= 0:
            return 1.0
        if self.error <= _ROUNDING * abs(self.value):
            # All prompts fell by one amount: no spread to compare with. What so many could say in a sign test stands.
            return 0.5**self.num_prompts if self.num_prompts else 1.0
        t = self.value / self.error
        return float(special.ndtr(t) if math.isinf(self.degrees) else special.stdtr(self.degrees, t))

    def errors_needed(self, p: float) -> float:
        """The fall, in standard errors, whose chance is `p`."""
        return -float(special.ndtri(p) if math.isinf(self.degrees) else special.stdtrit(self.degrees, p))


@dataclass(slots=True)
class OverOptimisationWatch:
    """Compares each validation with those before; see the module for what it raises.

    **The test of gold.** At the t-th validation with a gold reward, b is the one before it whose gold is highest. With
    values by prompt, d_i = gold_i(t) - gold_i(b) over the n prompts that have both,

        T = mean(d) / (std(d) / sqrt(n)),        p = P(Student's t with n - 1 degrees <= T)

    pairs out how hard a prompt is. With standard errors alone they are taken as independent,
    T = (gold(t) - gold(b)) / sqrt(e_t^2 + e_b^2), against a normal; prompts are the same, so this is wider than needed.
    The alarm is raised where proxy(t) > proxy(b) and

        p <= (1 - Phi(z)) * 2 / ((t - 1) t (t + 1))

    b is the luckiest of t - 1, and there is a test at every t, so each of the t - 1 possible comparisons at t has that
    share; the sum over all of them and all t is 1 - Phi(z), as sum_{t>=2} 2 / (t (t + 1)) = 1 (the union bound, Boole).
    The price is small: for z = 3, the 5th validation needs 4.1 standard errors and the 20th 5.0.
    """

    settings: WatchSettings = field(default_factory=WatchSettings)
    alarms: list[Alarm] = field(default_factory=list, init=False)
    """All that were raised so far, in order."""
    active: frozenset[AlarmKind] = field(default=frozenset(), init=False)
    """The kinds that hold at the last validation."""
    _first: _Validation | None = field(default=None, init=False)
    _best: _Validation | None = field(default=None, init=False)
    _num_golds: int = field(default=0, init=False)
    _starts: dict[str, float] = field(default_factory=dict, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)

    def observe(
        self,
        step: int,
        *,
        proxy: float | None = None,
        gold: float | None = None,
        proxy_error: float | None = None,
        gold_error: float | None = None,
        proxy_by_prompt: ArrayLike | None = None,
        gold_by_prompt: ArrayLike | None = None,
        length: float | None = None,
        length_correlation: float | None = None,
        kl: float | None = None,
        entropy: float | None = None,
        truncation_rate: float | None = None,
        groups_without_signal: float | None = None,
    ) -> list[Alarm]:
        """Take in the validation at `step`; the alarms of kinds that were not raised before.

        `proxy`, `gold`: mean rewards, on a scale that stays the same over the run (so before a shaping by running
        statistics); `*_by_prompt` (P,): of each prompt, in the same order every time, NaN where scoring failed; then
        means and errors may be left out. `*_error`: standard errors of the means. `length`: mean tokens of a
        completion; `length_correlation`: of reward and length within groups, see the function of that name. `kl` and
        `entropy`: in nats. A gold reward without error and without values by prompt cannot be tested.
        """
        if not self.settings.enabled:
            return []
        now = _validation(step, proxy, gold, proxy_error, gold_error, proxy_by_prompt, gold_by_prompt)
        kl, entropy, length = _known(kl), _known(entropy), _known(length)
        found = [
            self._gold_falls(now, kl),
            self._kl_budget(kl),
            self._length_growth(now, length, _known(length_correlation)),
            self._entropy_collapse(entropy),
            self._too_many(
                "truncation", _known(truncation_rate), self.settings.max_truncation_rate,
                "of the completions reach the length limit and are cut",
            ),
            self._too_many(
                "no_signal", _known(groups_without_signal), self.settings.max_groups_without_signal,
                "of the groups have completions with equal rewards, which teach nothing",
            ),
        ]  # fmt: skip
        holding = [one for one in found if one is not None]
        self.active = frozenset(kind for kind, _, _ in holding)
        raised = {alarm.kind for alarm in self.alarms}
        stops = self.settings.stop_on if self.settings.stop else ()
        new = [
            Alarm(kind, step, sentence, numbers, kind in stops)
            for kind, sentence, numbers in holding
            if kind not in raised
        ]
        self.alarms.extend(new)
        self._remember(now, length, entropy)
        return new

    def metrics(self) -> dict[str, float]:
        """What to log of the last validation, in the units of the rewards; keys of what is not known are absent.

        watch/alarm: 1 while an alarm of any kind holds. watch/{proxy,gold}_error: standard errors of the means;
        watch/{proxy,gold}_change and _change_error: since the first validation, paired by prompt where possible;
        watch/gold_fall and _fall_error: from the best validation so far.
        """
        return {"watch/alarm": float(bool(self.active)), **self._metrics}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON holds it."""
        return {
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "active": sorted(self.active),
            "first": None if self._first is None else asdict(self._first),
            "best": None if self._best is None else asdict(self._best),
            "num_golds": self._num_golds,
            "starts": dict(self._starts),
            "metrics": dict(self._metrics),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.alarms = [Alarm(**alarm) for alarm in state["alarms"]]
        self.active = frozenset(state["active"])
        self._first, self._best = (_restored(state[name]) for name in ("first", "best"))
        self._num_golds = state["num_golds"]
        self._starts, self._metrics = dict(state["starts"]), dict(state["metrics"])

    def _remember(self, now: _Validation, length: float | None, entropy: float | None) -> None:
        if self._first is None and (now.proxy is not None or now.gold is not None):
            self._first = now
        best = self._best
        if now.gold is not None and (best is None or best.gold is None or now.gold > best.gold):
            self._best = now
        self._num_golds += now.gold is not None
        for start, value in (("length", length), ("entropy", entropy)):
            if value is not None:
                self._starts.setdefault(start, value)
        self._metrics = {}
        names: tuple[_Name, ...] = ("proxy", "gold")
        for name in names:
            self._note(f"{name}_error", getattr(now, f"{name}_error"))
            change = _difference(self._first, now, name)
            if change is not None:
                self._note(f"{name}_change", change.value)
                self._note(f"{name}_change_error", change.error)
        fall = _difference(self._best, now, "gold")
        if fall is not None:
            self._note("gold_fall", -fall.value if fall.value else 0.0)
            self._note("gold_fall_error", fall.error)

    def _note(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._metrics[f"watch/{name}"] = value

    def _gold_falls(self, now: _Validation, kl: float | None) -> _Found:
        best, t = self._best, self._num_golds + 1
        if best is None or now.gold is None or t < self.settings.min_validations:
            return None
        change = _difference(best, now, "gold")
        proxy_change = _difference(best, now, "proxy")
        if change is None or proxy_change is None or proxy_change.value <= 0:
            return None
        largest_p = float(special.ndtr(-self.settings.z)) * 2.0 / ((t - 1) * t * (t + 1))
        if change.p_of_a_fall() > largest_p:
            return None
        needed = change.errors_needed(largest_p)
        level = change.error <= _ROUNDING * abs(change.value)
        fell = "the same on every prompt" if level else f"{-change.value / change.error:.1f} standard errors"
        sentence = (
            f"Gold has fallen by {-change.value:.3g} from its best, {best.gold:.3g} at step {best.step}, to "
            f"{now.gold:.3g}, while the proxy rose by {proxy_change.value:.3g}, from {best.proxy:.3g} to "
            f"{now.proxy:.3g}: the policy exploits the reward model. The fall is {fell}; at the {_ordinal(t)} "
            f"validation {needed:.1f} are needed.{'' if kl is None else f' KL is {kl:.3g}.'}"
        )
        numbers = {
            "gold": now.gold,
            "best_gold": best.gold or 0.0,
            "best_step": float(best.step),
            "fall": -change.value,
        }
        numbers |= {"fall_error": change.error, "needed": needed, "proxy_rise": proxy_change.value}
        return "gold_falls", sentence, numbers | ({} if kl is None else {"kl": kl})

    def _kl_budget(self, kl: float | None) -> _Found:
        budget = self.settings.max_kl
        if kl is None or budget is None or kl <= budget:
            return None
        sentence = (
            f"KL to the reference is {kl:.3g}, above the budget of {budget:.3g}. This is a sign, no proof: the further "
            "from the reference, the less the reward model knows of the completions."
        )
        return "kl_budget", sentence, {"kl": kl, "budget": budget}

    def _length_growth(self, now: _Validation, length: float | None, correlation: float | None) -> _Found:
        factor, start = self.settings.max_length_growth, self._starts.get("length")
        rise = _difference(self._first, now, "proxy")
        if factor is None or length is None or not start or rise is None or now.gold is not None:
            return None  # a gold reward tells more than lengths do
        unrelated = correlation is not None and correlation < self.settings.min_length_correlation
        if length <= factor * start or rise.value <= 0 or unrelated:
            return None
        related = "" if correlation is None else f" Within groups reward and length correlate by {correlation:.2f}."
        sentence = (
            f"Completions have {length:.0f} tokens on average, {length / start:.1f} times as many as at first, "
            f"and the proxy rose by {rise.value:.3g}.{related} This is a sign, no proof: the reward model may pay for "
            "length."
        )
        numbers = {"length": length, "first_length": start, "proxy_rise": rise.value}
        return "length_growth", sentence, numbers | ({} if correlation is None else {"correlation": correlation})

    def _entropy_collapse(self, entropy: float | None) -> _Found:
        share, start = self.settings.min_entropy_share, self._starts.get("entropy")
        if share is None or entropy is None or not start or entropy >= share * start:
            return None
        sentence = (
            f"The policy's entropy is {entropy:.3g}, {entropy / start:.0%} of that at the first validation. This is a "
            "sign, no proof: it gives nearly the same completion every time and explores no more."
        )
        return "entropy_collapse", sentence, {"entropy": entropy, "first_entropy": start}

    def _too_many(self, kind: AlarmKind, share: float | None, most: float | None, what: str) -> _Found:
        if share is None or most is None or share <= most:
            return None
        sentence = f"{share:.0%} {what}; the limit is {most:.0%}. This is a sign, no proof."
        return kind, sentence, {"share": share, "limit": most}


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
    """Write all alarms of a run, whole or not at all: written anew at each validation, a resumed run's are exact."""
    partial = path.with_name(f"{path.name}.partial")
    rows = [asdict(alarm) | {"numbers": {n: _known(v) for n, v in alarm.numbers.items()}} for alarm in alarms]
    partial.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_alarms(path: Path) -> list[Alarm]:
    """What `write_alarms` wrote. Raises `DataError` for a file that is none."""
    try:
        return [Alarm(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (TypeError, ValueError) as error:
        raise DataError(
            "this is no file of alarms",
            where=str(path),
            got=str(error),
            need='[{"kind": "gold_falls", "step": 40, "sentence": ..., "numbers": {}, "stops": false}]',
            fix="remove it: the report is then made without the sentences of the alarms",
        ) from error


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _validation(
    step: int,
    proxy: float | None,
    gold: float | None,
    proxy_error: float | None,
    gold_error: float | None,
    proxy_by_prompt: ArrayLike | None,
    gold_by_prompt: ArrayLike | None,
) -> _Validation:
    """Means and errors that were not given are computed from the values by prompt."""
    proxy, proxy_error, proxies = _summed_up(proxy, proxy_error, proxy_by_prompt)
    gold, gold_error, golds = _summed_up(gold, gold_error, gold_by_prompt)
    return _Validation(step, proxy, gold, proxy_error, gold_error, proxies, golds)


def _summed_up(
    mean: float | None, error: float | None, by_prompt: ArrayLike | None
) -> tuple[float | None, float | None, tuple[float | None, ...] | None]:
    mean, error = _known(mean), _known(error)
    if by_prompt is None:
        return mean, error, None
    values = np.asarray(by_prompt, dtype=np.float64)
    known = values[np.isfinite(values)]
    if mean is None and len(known):
        mean = float(known.mean())
    if error is None and len(known) > 1:
        error = float(known.std(ddof=1)) / math.sqrt(len(known))
    return mean, error, tuple(map(_known, values.tolist()))


def _difference(before: _Validation | None, now: _Validation, name: _Name) -> _Difference | None:
    """`now` less `before`, paired by prompt where both have values of the same prompts; None where one is not known."""
    if before is None:
        return None
    earlier, later = (_by_prompt(one, name) for one in (before, now))
    if earlier is not None and later is not None and len(earlier) == len(later):
        changes = later - earlier
        changes = changes[np.isfinite(changes)]
        n = len(changes)
        if n > 1:
            error = float(changes.std(ddof=1)) / math.sqrt(n)
            return _Difference(float(changes.mean()), error, n - 1, n)
    first, last = getattr(before, name), getattr(now, name)
    if first is None or last is None:
        return None
    errors = (getattr(before, f"{name}_error"), getattr(now, f"{name}_error"))
    error = math.nan if None in errors else math.hypot(*errors)
    return _Difference(last - first, error, math.inf, 0)


def _by_prompt(one: _Validation, name: str) -> NDArray[np.float64] | None:
    values = getattr(one, f"{name}_by_prompt")
    return None if values is None else np.array(values, dtype=np.float64)


def _restored(state: Mapping[str, Any] | None) -> _Validation | None:
    if state is None:
        return None
    columns = {
        name: None if state[name] is None else tuple(state[name]) for name in ("proxy_by_prompt", "gold_by_prompt")
    }
    return _Validation(**{**state, **columns})


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
