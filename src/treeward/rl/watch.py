"""`OverOptimisationWatch`: says when a policy has begun to exploit its reward model.

    watch = OverOptimisationWatch(WatchConfig(z=3.0, max_kl=50.0))
    for alarm in watch.observe(step, proxy_by_prompt=..., gold_by_prompt=..., kl=...):
        logger.warning(alarm.sentence)
    trackers.log(watch.metrics(), step)

It observes every validation, always on the same prompts. With a gold reward it is a test: gold is
lower than at its best while the proxy, the reward that is optimised, is higher (Gao, Schulman,
Hilton 2022, arXiv 2210.10760). Without one there are only signs, and the sentences say so:
completions grow longer (Singhal et al. 2023, arXiv 2310.03716), entropy collapses (Cui et al. 2025,
arXiv 2505.22617), KL leaves its budget, completions are cut, groups carry no signal. Each kind is
raised once, at the first validation where it holds. Values that are None or not finite are ignored.

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
from treeward.errors import ConfigError, DataError
from treeward.storage import write_text

ALARMS_FILE = "alarms.json"
"""The file in a run's log folder that holds its alarms; the report reads it."""

_ROUNDING = 1e-9
"""A relative spread below this is that of rounding: there is none."""
_MIN_VALIDATIONS = 3
"""Validations with a gold reward before the first test."""
_MIN_LENGTH_CORRELATION = 0.3
"""Below this correlation of reward and length within groups, longer completions are no alarm."""
_MIN_ENTROPY_SHARE = 0.1
"""Share of the first validation's entropy."""
_MAX_TRUNCATION_RATE = 0.5
_MAX_GROUPS_WITHOUT_SIGNAL = 0.9


@dataclass(frozen=True, slots=True)
class Alarm:
    """`kind` first held at `step`. `sentence`: for a person. `stops`: it ends the run."""

    kind: AlarmKind
    step: int
    sentence: str
    stops: bool = False


class _Validation(NamedTuple):
    """What is observed at one step; NaN for what is not known. `proxy`, `gold` and each of
    `components` (P,): by prompt. Names of components begin with whose they are, as in
    `component/right` of the proxy and `gold_component/right` of gold."""

    proxy: list[float]
    gold: list[float]
    components: dict[str, list[float]]
    length: float
    correlation: float
    kl: float
    entropy: float
    truncated: float
    without_signal: float


class _Difference(NamedTuple):
    """The mean over `num_prompts` of later less earlier, and its standard error; NaN if unknown."""

    value: float
    error: float
    num_prompts: int

    def p_of_a_fall(self) -> float:
        """The probability of so large a fall if nothing has changed; 1 if its error is unknown."""
        if math.isnan(self.error) or self.value >= 0:
            return 1.0
        if self.error <= _ROUNDING * abs(self.value):
            # All prompts fell by the same amount, so there is no spread: the probability of a sign
            # test.
            return 0.5**self.num_prompts
        return float(special.stdtr(self.num_prompts - 1, self.value / self.error))


@dataclass(slots=True)
class OverOptimisationWatch:
    """Compares each validation with the earlier ones; the module lists the alarms.

    **The test of gold.** At the t-th validation with a gold reward, b is the one before it whose
    gold is highest. With d_i = gold_i(t) - gold_i(b) over the n prompts that have both,

        T = mean(d) / (std(d) / sqrt(n)),        p = P(Student's t with n - 1 degrees <= T)

    Pairing by prompt removes how hard each prompt is. The alarm is raised where
    proxy(t) > proxy(b) and

        p <= (1 - Phi(z)) * 2 / ((t - 1) t (t + 1))

    b is the luckiest of t - 1, and there is a test at every t, so each of the t - 1 possible
    comparisons at t has that share; the sum over all of them and all t is 1 - Phi(z), as sum_{t>=2}
    2 / (t (t + 1)) = 1 (the union bound, Boole). The price is small: for z = 3, the 5th validation
    needs 4.1 standard errors and the 20th 5.0.
    """

    config: WatchConfig = field(default_factory=WatchConfig)
    alarms: list[Alarm] = field(default_factory=list, init=False)
    """All raised so far, in order."""
    active: frozenset[AlarmKind] = field(default=frozenset(), init=False)
    """The kinds that hold at the last validation."""
    _first: dict[str, Any] = field(default_factory=dict, init=False)
    """The first finite value of each quantity; of proxy and gold (P,), by prompt."""
    _best: dict[str, Any] | None = field(default=None, init=False)
    """Step, proxy and gold of the validation whose mean gold is highest."""
    _num_golds: int = field(default=0, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)

    def observe(
        self,
        step: int,
        *,
        proxy_by_prompt: ArrayLike | None = None,
        gold_by_prompt: ArrayLike | None = None,
        components_by_prompt: Mapping[str, ArrayLike] | None = None,
        gold_components_by_prompt: Mapping[str, ArrayLike] | None = None,
        length: float | None = None,
        length_correlation: float | None = None,
        kl: float | None = None,
        entropy: float | None = None,
        truncation_rate: float | None = None,
        groups_without_signal: float | None = None,
    ) -> list[Alarm]:
        """Observe the validation at `step`; returns the alarms of kinds that were not raised yet.

        `proxy_by_prompt`, `gold_by_prompt` (P,): mean reward of each prompt, in the same order
        every time, NaN where scoring failed; `components_by_prompt` and
        `gold_components_by_prompt`: the same of each of their components, by name. `length`: mean
        tokens of a completion; `length_correlation`: of reward and length within groups, see the
        function of that name.
        `kl` and `entropy`: in nats.
        """
        components: dict[str, list[float]] = {}
        for name, values in (components_by_prompt or {}).items():
            components[f"component/{name}"] = _values(values)
        for name, values in (gold_components_by_prompt or {}).items():
            components[f"gold_component/{name}"] = _values(values)
        now = _Validation(
            proxy=_values(proxy_by_prompt),
            gold=_values(gold_by_prompt),
            components=components,
            length=_known(length),
            correlation=_known(length_correlation),
            kl=_known(kl),
            entropy=_known(entropy),
            truncated=_known(truncation_rate),
            without_signal=_known(groups_without_signal),
        )
        holding: dict[AlarmKind, str] = {}
        fall = self._gold_falls(now)
        if fall is not None:
            holding["gold_falls"] = fall
        holding |= self._signs(now)
        self.active = frozenset(holding)
        # Each kind is raised once: a run of days would repeat it at every validation.
        raised = {alarm.kind for alarm in self.alarms}
        new = []
        for kind, sentence in holding.items():
            if kind not in raised:
                new.append(Alarm(kind, step, sentence, stops=kind in self.config.stop_on))
        self.alarms.extend(new)
        self._remember(step, now)
        return new

    def metrics(self) -> dict[str, float]:
        """Metrics of the last validation, in the units of the rewards; without unknown values.

        watch/alarm: 1 while an alarm of any kind holds. watch/{proxy,gold}_error: standard errors
        of the means. watch/{proxy,gold}_change, watch/component/<name>_change,
        watch/gold_component/<name>_change and their _change_error: since the first validation,
        paired by prompt. watch/gold_fall and _fall_error: from the best validation so far.
        """
        return {"watch/alarm": float(bool(self.active)), **self._metrics}

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as JSON values."""
        state: dict[str, Any] = {
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "active": sorted(self.active),
        }
        for name in _REMEMBERED:
            state[name] = getattr(self, name)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.alarms = [Alarm(**alarm) for alarm in state["alarms"]]
        self.active = frozenset(state["active"])
        for name in _REMEMBERED:
            setattr(self, name, state[name])

    def _remember(self, step: int, now: _Validation) -> None:
        first: dict[str, Any] = {
            "proxy": now.proxy,
            "gold": now.gold,
            "length": now.length,
            "entropy": now.entropy,
        }
        first |= now.components
        for name, value in first.items():
            if not math.isnan(_mean(value)):
                self._first.setdefault(name, value)
        # After the test: the best validation is among those before the one that is tested.
        gold = _mean(now.gold)
        if not math.isnan(gold):
            self._num_golds += 1
            if self._best is None or gold > _mean(self._best["gold"]):
                self._best = {"step": step, "proxy": now.proxy, "gold": now.gold}
        # From the best so far, which may be this one: then nothing has fallen.
        best_gold: list[float] = []
        if self._best is not None:
            best_gold = self._best["gold"]
        changes = {
            "proxy_change": _difference(self._first.get("proxy", []), now.proxy),
            "gold_change": _difference(self._first.get("gold", []), now.gold),
            "gold_fall": _difference(now.gold, best_gold),
        }
        for name, values in now.components.items():
            changes[f"{name}_change"] = _difference(self._first.get(name, []), values)
        metrics = {"proxy_error": _error(now.proxy), "gold_error": _error(now.gold)}
        for name, change in changes.items():
            metrics[name] = change.value
            metrics[f"{name}_error"] = change.error
        # What is not known is not logged.
        self._metrics = {}
        for name, value in metrics.items():
            if math.isfinite(value):
                self._metrics[f"watch/{name}"] = value

    def _gold_falls(self, now: _Validation) -> str | None:
        """The sentence of the alarm, if the test of the class's docstring rejects."""
        best = self._best
        t = self._num_golds + 1
        gold = _mean(now.gold)
        if best is None or math.isnan(gold) or t < _MIN_VALIDATIONS:
            return None
        change = _difference(best["gold"], now.gold)
        rise = _difference(best["proxy"], now.proxy).value
        # The union bound of the class's docstring.
        largest_p = float(special.ndtr(-self.config.z)) * 2.0 / ((t - 1) * t * (t + 1))
        # Both are false for NaN: what is not known is no reason for an alarm.
        has_risen = rise > 0
        is_significant = change.p_of_a_fall() <= largest_p
        if not has_risen or not is_significant:
            return None
        # The same test in standard errors, which a reader can compare with the fall.
        needed = -float(special.stdtrit(change.num_prompts - 1, largest_p))
        # Without a spread, standard errors would be infinitely many.
        if change.error <= _ROUNDING * abs(change.value):
            fall = "the same on every prompt"
        else:
            fall = f"{-change.value / change.error:.1f} standard errors"
        sentence = (
            f"Gold has fallen by {-change.value:.3g} from its best, {_mean(best['gold']):.3g} at "
            f"step {best['step']}, to {gold:.3g}, while the proxy rose by {rise:.3g}, from "
            f"{_mean(best['proxy']):.3g} to {_mean(now.proxy):.3g}: the policy exploits the reward "
            f"model. The fall is {fall}; validation {t} asks for {needed:.1f}."
        )
        if not math.isnan(now.kl):
            sentence += f" KL is {now.kl:.3g}."
        return sentence

    def _signs(self, now: _Validation) -> dict[AlarmKind, str]:
        """The other alarms that hold: quantities beyond their limits, none of them a proof.

        A comparison with NaN is false, so what is not known raises none.
        """
        signs: dict[AlarmKind, str] = {}
        budget = self.config.max_kl
        if budget and now.kl > budget:
            signs["kl_budget"] = (
                f"KL to the reference is {now.kl:.3g}, above the budget of {budget:.3g}: the "
                "further from the reference, the less the reward model knows of the completions."
            )
        first_length = self._first.get("length", math.nan)
        rise = _difference(self._first.get("proxy", []), now.proxy).value
        growth = self.config.max_length_growth
        grows = bool(growth) and now.length > growth * first_length
        # A gold reward tells more than lengths do.
        has_gold = not math.isnan(_mean(now.gold))
        # Reward and length may be correlated where the correlation is not known.
        is_uncorrelated = now.correlation < _MIN_LENGTH_CORRELATION
        if grows and rise > 0 and not has_gold and not is_uncorrelated:
            signs["length_growth"] = (
                f"Completions have {now.length:.0f} tokens on average, at first "
                f"{first_length:.0f}, and the proxy rose by {rise:.3g}: the reward model may "
                "pay for length."
            )
        first_entropy = self._first.get("entropy", math.nan)
        if now.entropy < _MIN_ENTROPY_SHARE * first_entropy:
            signs["entropy_collapse"] = (
                f"The policy's entropy is {now.entropy:.3g}, at the first validation "
                f"{first_entropy:.3g}: it gives nearly the same completion every time and explores "
                "no more."
            )
        if now.truncated > _MAX_TRUNCATION_RATE:
            share = f"{now.truncated:.0%} of the completions"
            signs["truncation"] = f"{share} reach the length limit and are cut."
        if now.without_signal > _MAX_GROUPS_WITHOUT_SIGNAL:
            share = f"{now.without_signal:.0%} of the groups"
            without = "completions with equal rewards, which teach nothing."
            signs["no_signal"] = f"{share} have {without}"
        return {kind: f"{sentence} This is a sign, no proof." for kind, sentence in signs.items()}


_REMEMBERED = ("_first", "_best", "_num_golds", "_metrics")


def write_alarms(path: Path, alarms: Sequence[Alarm]) -> None:
    """Write all alarms of a run, replacing the file. Raises `ConfigError` if it cannot be
    written."""
    try:
        rows = [asdict(alarm) for alarm in alarms]
        write_text(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(
            "the alarms cannot be written",
            where=str(path),
            got=str(error),
            fix="make room and start the same command again: it resumes from the last checkpoint",
        ) from error


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of a file that `write_alarms` wrote. Raises `DataError` for another file."""
    try:
        return [Alarm(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (TypeError, ValueError) as error:
        raise DataError(
            "this is not a file of alarms",
            where=str(path),
            got=str(error),
            fix="remove it",
        ) from error


def _known(value: float | None) -> float:
    """NaN for a quantity that is not known."""
    if value is None:
        return math.nan
    return float(value)


def _values(by_prompt: ArrayLike | None) -> list[float]:
    """(P,): NaN for a prompt whose reward is not finite; none at all without rewards."""
    if by_prompt is None:
        return []
    values = []
    for value in np.asarray(by_prompt, dtype=np.float64).tolist():
        if not math.isfinite(value):
            value = math.nan
        values.append(value)
    return values


def _finite(values: float | Sequence[float]) -> list[float]:
    return [value for value in np.atleast_1d(values).tolist() if not math.isnan(value)]


def _mean(values: float | Sequence[float]) -> float:
    """The mean of the values that are known; NaN where none is."""
    known = _finite(values)
    if not known:
        return math.nan
    return float(np.mean(known))


def _error(values_P: Sequence[float]) -> float:
    """The standard error of the mean; NaN for fewer than two values."""
    known = _finite(values_P)
    if len(known) < 2:
        return math.nan
    return float(np.std(known, ddof=1)) / math.sqrt(len(known))


def _difference(earlier_P: Sequence[float], later_P: Sequence[float]) -> _Difference:
    """Later less earlier, paired over the prompts that have both."""
    changes: list[float] = []
    # Rewards of other prompts, or none, are not paired.
    if len(earlier_P) == len(later_P):
        for earlier, later in zip(earlier_P, later_P, strict=True):
            changes.append(later - earlier)
    changes = _finite(changes)
    return _Difference(_mean(changes), _error(changes), len(changes))
