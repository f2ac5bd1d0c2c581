"""`Rubric`: the criteria of a prompt, from any of the forms in which data sets have them.

    criterion = {"title": "Units", "criterion": "It names the unit.", "points": 3}
    rubric = read_rubric({"rubric": [criterion, "It is polite."]})
    rubric.criteria[0]      # Criterion(name="Units", text="It names the unit.", weight=3.0)

A rubric is a text, a list, a mapping that has the list under `rubrics`, `rubric` or `criteria`, or
JSON text of one of these. An item of the list is a text or a mapping, whose keys have several
names:

- its text: `TEXT_KEYS`; its name: `NAME_KEYS`, else it is numbered
- its weight: `WEIGHT_KEYS`, or `modifiers: {severity: 2}`; 1 if there is none. A negative weight is
  of something bad, as in HealthBench: the criterion is met where the bad thing is there.
- `pass_criteria: NO`: the criterion is met where the answer is no (NeMo Gym's multichallenge)
- `modifiers: {category: must_pass}`: where it is not met, the reward is 0 (finance_agent_v2)
- `sub_tasks`: a tree as PaperBench's. Its leaves are the criteria, and each has the product of the
  shares along its path as its weight.

Rubrics as Rewards (Gunjal et al. 2025, arXiv 2507.17746) writes the category of a criterion into
its text, as "Essential Criteria: ...", or a mapping has it as `category`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from treeward.config.reward_environments import RUBRIC_KEYS, Aggregation
from treeward.errors import DataError
from treeward.scoring.score import plain

Category = Literal["essential", "important", "optional", "pitfall"]
CATEGORIES: tuple[str, ...] = get_args(Category)

TEXT_KEYS = (
    "criterion",
    "criteria",
    "description",
    "question",
    "requirements",
    "text",
    "rubric_item",
    "rubric_str",
    "Ingredient",
)
NAME_KEYS = ("title", "name", "id")
WEIGHT_KEYS = ("weight", "points", "score")
_LISTS = ("rubrics", "rubric", "criteria", "rubric_items")
_CATEGORY = re.compile(rf"({'|'.join(CATEGORIES)}) criteria: *", re.IGNORECASE)
_NEED = "a text, a list of texts and mappings, or JSON text of such a list"


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing to look for in a completion.

    `is_met_by_no`: it is met where the judge says no. `is_veto`: the reward is 0 where it is not
    met. `category`: of Rubrics as Rewards; None if it has none.
    """

    name: str
    text: str
    weight: float = 1.0
    is_met_by_no: bool = False
    is_veto: bool = False
    category: Category | None = None


@dataclass(frozen=True, slots=True)
class Rubric:
    """The criteria of a prompt; their names are distinct."""

    criteria: tuple[Criterion, ...]

    @property
    def text(self) -> str:
        """The whole rubric as a list, for a judge that answers for all of it at once."""
        lines = []
        for criterion in self.criteria:
            lines.append(f"- {criterion.text} ({criterion.weight:+g} points)")
        return "\n".join(lines)


def read_rubric(
    row: Mapping[str, Any], keys: Sequence[str] = RUBRIC_KEYS, *, where: str | None = None
) -> Rubric:
    """The rubric in the first of `keys` that the row has.

    Raises `DataError`, with the place in the rubric as its field, for a row without one and for a
    rubric in another form.
    """
    for key in keys:
        value = _without_arrays(row.get(key))
        if value not in (None, "", []):
            break
    else:
        raise DataError(
            "the row has no rubric", where=where, field=keys[0], need=f"one of {', '.join(keys)}"
        )
    try:
        criteria = list(_criteria(_parsed(value), key))
    except DataError as error:
        raise error.but(where=where) from None
    if not criteria:
        raise DataError("the rubric has no criteria", where=where, field=key, need=_NEED)
    # Criteria without a name are numbered, and of a name that is there twice all but the first.
    named = []
    taken: set[str] = set()
    for number, criterion in enumerate(criteria, 1):
        # A slash becomes a dash: a component with a slash is a detail of a reward, from which
        # nothing is learnt.
        name = criterion.name.replace("/", "-") or f"criterion_{number}"
        # More than once: of the titles a, a_3 and a the third would be a_3 too.
        while name in taken:
            name = f"{name}_{number}"
        taken.add(name)
        named.append(replace(criterion, name=name))
    return Rubric(tuple(named))


def _without_arrays(value: Any) -> Any:
    """The value with lists for arrays, which parquet has at any depth."""
    value = plain(value)
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    return value


def _parsed(value: Any) -> Any:
    """The value, or what it is the JSON text of."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # the latter for thousands of brackets
        return value  # a text that begins with a bracket


def _criteria(value: Any, field: str) -> Iterator[Criterion]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping) and "sub_tasks" in value:
        yield from _leaves(value, field, weight=1.0)
        return
    if isinstance(value, Mapping):
        inner = next((key for key in _LISTS if isinstance(value.get(key), list | str)), None)
        if inner is None:
            raise DataError("this is no rubric", field=field, got=value, need=_NEED)
        field = f"{field}.{inner}"
        value = _parsed(value[inner])
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError("this is no rubric", field=field, got=value, need=_NEED)
    if isinstance(value, str):
        value = [value]
    for number, item in enumerate(value):
        place = f"{field}[{number}]"
        if isinstance(item, Mapping) and "sub_tasks" in item:
            yield from _leaves(item, place, weight=_weight(item, place))
        else:
            yield _criterion(item, place)


def _leaves(task: Mapping[str, Any], field: str, *, weight: float) -> Iterator[Criterion]:
    """The leaves of a tree of tasks. `weight`: of the task itself, which its children share."""
    children = task.get("sub_tasks")
    if not children:
        yield replace(_criterion(task, field), weight=weight)
        return
    if not isinstance(children, Sequence) or not all(isinstance(one, Mapping) for one in children):
        need = "a list of tasks, each with requirements and a weight"
        raise DataError("these are no tasks", field=f"{field}.sub_tasks", got=children, need=need)
    places = [f"{field}.sub_tasks[{number}]" for number in range(len(children))]
    weights = [_weight(child, place) for child, place in zip(children, places, strict=True)]
    total = math.fsum(weights)
    if min(weights) < 0.0 or total == 0.0:
        need = "weights that are not negative, and not all 0"
        raise DataError("tasks share their weight", field=field, got=weights, need=need)
    for child, place, share in zip(children, places, weights, strict=True):
        if share > 0.0:
            yield from _leaves(child, place, weight=weight * share / total)


def _criterion(item: Any, field: str) -> Criterion:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, Mapping):
        raise DataError("this is no criterion", field=field, got=item, need="a text or a mapping")
    key = next((key for key in TEXT_KEYS if isinstance(item.get(key), str)), None)
    text = "" if key is None else item[key].strip()
    if not text:
        need = f"its text in one of {', '.join(TEXT_KEYS)}"
        raise DataError("the criterion has no text", field=field, got=dict(item), need=need)
    modifiers = item.get("modifiers")
    category = None
    if isinstance(modifiers, Mapping):
        category = modifiers.get("category")
    category = str(item.get("category") or category or "").lower()
    is_veto = category == "must_pass"
    in_text = _CATEGORY.match(text)
    if in_text is not None:
        category = in_text[1].lower()
        text = text[in_text.end() :]
    name = next((str(item[key]) for key in NAME_KEYS if item.get(key) not in (None, "")), "")
    weight = _weight(item, field)
    pass_criteria = item.get("pass_criteria")
    answer = str("YES" if pass_criteria is None else pass_criteria).strip().upper()
    if answer not in ("YES", "NO"):
        place = f"{field}.pass_criteria"
        raise DataError(
            "this is no answer to a criterion", field=place, got=pass_criteria, need="YES or NO"
        )
    return Criterion(
        name=name,
        text=text,
        weight=weight,
        is_met_by_no=answer == "NO",
        is_veto=is_veto,
        category=category if category in CATEGORIES else None,  # type: ignore[arg-type]
    )


def _weight(item: Mapping[str, Any], field: str) -> float:
    found: Any = None
    key = next((key for key in WEIGHT_KEYS if item.get(key) is not None), None)
    modifiers = item.get("modifiers")
    if key is not None:
        found = item[key]
    elif isinstance(modifiers, Mapping):
        key = "modifiers.severity"
        found = modifiers.get("severity")
    if found is None:
        return 1.0
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        place = f"{field}.{key}"
        raise DataError("this is no weight", field=place, got=found, need="a finite number")
    return float(found)


_CATEGORY_WEIGHTS: Mapping[Category, float] = {
    "essential": 1.0,
    "important": 0.7,
    "optional": 0.3,
    "pitfall": 0.9,
}
"""Of Rubrics as Rewards, section 4."""


def rubric_reward(
    rubric: Rubric,
    met: Sequence[float | None],
    aggregation: Aggregation,
    *,
    least_weight: float,
) -> float | None:
    """The reward of a completion, from how far it meets each criterion.

    `met`: for each criterion from 0 to 1, as the judge's probability; None where there is no
    verdict. Such criteria are left out. The reward is None where those with a verdict have less
    than `least_weight` of the sum of all |weight|, where what is left cannot be divided by, and
    where a veto has no verdict. A veto that is not met makes the reward 0.

    With weights w and c how far each is met:

    - weighted: sum w c / sum of the positive w. HealthBench (Arora et al. 2025, arXiv 2505.08775);
      it is below 0 where more bad things are there than good ones.
    - signed: sum w c / sum w. NeMo Gym's multichallenge, `weighted`. Where verdicts are missing it
      is sum w c / sum |w| of the others, times sum |w| / sum w of all: what is left of a sum with
      both signs can be near 0, and the reward would be huge.
    - absolute: sum w c / sum |w|. open-instruct's RubricVerifier.
    - categories: sum v c / sum v, where v is 1, 0.7, 0.3 and 0.9 for essential, important, optional
      and pitfall (Gunjal et al. 2025, arXiv 2507.17746), and |w| without a category.
    - mean, min, max: of all c.

    In the last two lines a criterion with a negative weight counts as 1 - c: the bad thing is not
    there.
    """
    vetoes = [c for one, c in zip(rubric.criteria, met, strict=True) if one.is_veto]
    known = [(one, c) for one, c in zip(rubric.criteria, met, strict=True) if c is not None]
    everything = math.fsum(abs(one.weight) for one in rubric.criteria)
    share = math.fsum(abs(one.weight) for one, _ in known)
    if not known or share < least_weight * everything or None in vetoes:
        return None
    if any(c is not None and c < 0.5 for c in vetoes):
        return 0.0
    good = []
    for one, c in known:
        if one.weight < 0.0:
            c = 1.0 - c  # the bad thing is not there
        good.append(c)
    if aggregation == "min":
        return min(good)
    if aggregation == "max":
        return max(good)
    weights = [weight_in(one, aggregation) for one, _ in known]
    total = _denominator(weights, aggregation)
    if aggregation == "signed":
        total = share * math.fsum(one.weight for one in rubric.criteria) / everything
    if total <= 0.0:
        return None
    values = good
    if aggregation in ("weighted", "signed", "absolute"):
        # Here the weight has the sign.
        values = [c for _, c in known]
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total


def check_weights(rubric: Rubric, aggregation: Aggregation) -> None:
    """Raise `DataError` for weights that the aggregation cannot divide by, as only negative
    ones."""
    weights = [weight_in(one, aggregation) for one in rubric.criteria]
    if _denominator(weights, aggregation) <= 0.0:
        raise DataError(
            "the weights of the rubric have no sum to divide by",
            field="weight",
            got=weights,
            need=f"weights whose sum is above 0, for aggregation: {aggregation}",
            fix="set aggregation to absolute or mean",
        )


def weight_in(criterion: Criterion, aggregation: Aggregation) -> float:
    """How much a criterion counts; a negative weight is of something bad."""
    if aggregation in ("mean", "min", "max"):
        return 1.0
    if aggregation == "categories":
        if criterion.category is None:
            return abs(criterion.weight)
        return _CATEGORY_WEIGHTS[criterion.category]
    return criterion.weight


def _denominator(weights: Sequence[float], aggregation: Aggregation) -> float:
    if aggregation == "weighted":
        return math.fsum(weight for weight in weights if weight > 0.0)
    if aggregation == "absolute":
        return math.fsum(map(abs, weights))
    return math.fsum(weights)
