"""The numbers of a row: scores, grades and strengths, which may be text, missing, or a probability.

number_of("4.5", "score", "train.csv:2")            # 4.5; None for an empty cell
grades_of({"helpfulness": 4, "verbosity": None}, ["helpfulness", "verbosity"], ...)     # {"helpfulness": 4.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from treeward.errors import DataError

_SURE = 1e-7  # a judge's 0 and 1 count as this and its complement, whose log-odds are finite


def number_of(value: Any, field: str, where: str | None) -> float | None:
    """The number, which may be text; None for null and for empty text, as an empty cell is.

    Raises `DataError` for any other value, and for one that is not finite.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # an integer of a thousand digits overflows
            number = math.nan
    if not math.isfinite(number):
        name = field.rsplit(".", 1)[-1]
        summary = f"{name} is not a finite number"
        need = "a finite number, or no such key"
        raise DataError(summary, where=where, field=field, got=value, need=need)
    return number


def score_of(value: Any, field: str, where: str | None) -> float | None:
    """A score or a strength; of the field `probability` its log-odds, which is the difference of two scores."""
    number = number_of(value, field, where)
    if number is None or not field.endswith("probability"):
        return number
    if not 0 <= number <= 1:
        need = "a number from 0 to 1"
        raise DataError("this is no probability", where=where, field=field, got=value, need=need)
    probability = min(max(number, _SURE), 1 - _SURE)
    return math.log(probability / (1 - probability))


def grades_of(
    about: Mapping[str, Any],
    attributes: Sequence[str],
    where: str | None,
    prefix: str = "",
) -> dict[str, float]:
    """The grades of a completion, without its score; null and NaN mean none. Raises `DataError` for values that are not
    numbers, with `prefix` before the key."""
    values = without_nan(about)
    grades: dict[str, float] = {}
    for name in attributes:
        if name == "score":
            continue
        grade = number_of(values.get(name), f"{prefix}{name}", where)
        if grade is not None:
            grades[name] = grade
    return grades


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without NaN, as which a table of pandas writes a gap in a column of numbers."""
    kept = {}
    for key, value in values.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        if not is_nan:
            kept[key] = value
    return kept
