"""Numbers with their intervals, as a report writes them.

    interval_text(Metric("accuracy", 0.71, 0.621, 0.79, 100), "percent")
    # ("71.0%", "(62.1% to 79.0%, n = 100)")

Numbers that stand beside each other have one number of decimals (`size_of`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

from treeward.evaluation.results import Metric
from treeward.formatting import format_number


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number."""
    # A float32 of numpy is a real number, and no `float`.
    return isinstance(value, numbers.Real) and math.isfinite(value)


def known_ends(metric: Metric) -> list[float]:
    """The value of a metric and the ends of its interval, those that are numbers."""
    ends = (metric.value, metric.low, metric.high)
    return [number for number in ends if is_number(number)]


def size_of(metrics: Iterable[Metric]) -> float:
    """The largest of these metrics' numbers, whatever its sign."""
    size = 0.0
    for metric in metrics:
        for number in known_ends(metric):
            size = max(size, abs(number))
    return size


def interval_text(
    metric: Metric, format: str, *, with_count: bool = True, size: float | None = None
) -> tuple[str, str]:
    """The value of a metric as text, and in brackets its interval and count.

    The second text is empty where neither is known. `size`: that of all metrics beside this one
    (`size_of`), so that they have one number of decimals; None: of this one.
    """
    if size is None:
        size = size_of([metric])
    parts = []
    if is_number(metric.low) or is_number(metric.high):
        low = format_number(metric.low, format, size)
        high = format_number(metric.high, format, size)
        # "+4.8 to +18.0": the value before it says already that these are points.
        parts.append(f"{low} to {high}".replace(" points", ""))
    if with_count and is_number(metric.count):
        parts.append(f"n = {format_number(metric.count, 'integer')}")
    text = ""
    if parts:
        text = f"({', '.join(parts)})"
    return format_number(metric.value, format, size), text
