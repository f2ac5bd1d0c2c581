"""`format_number`: how a number is written for a person, in logs, tables and reports alike.

    format_number(0.9489, "percent")             # 94.9%
    format_number(5.9612), format_number(0.0312)  # 5.961, 0.0312
    metric_text("accuracy", 0.9489)              # 94.9%: the form that metrics of this name have

Formats: percent (of a fraction), points (a difference of fractions, in percentage points), number,
signed, integer.
"""

from __future__ import annotations

import math

ABSENT = "–"

FORMATS = ("percent", "points", "number", "signed", "integer")

# The number of decimals by size: at least three significant digits. The last is that of 0 alone:
# other numbers below 1e-4 have an exponent.
_DECIMALS = ((1000, 0), (100, 1), (10, 2), (0.1, 3), (0.01, 4), (1e-4, 5), (0, 3))


def format_number(value: float | None, format: str = "number", size: float | None = None) -> str:
    """`value` in one of `FORMATS`; a dash for None and for a number that is not finite.

    `size`: the largest of the numbers beside it, from which the number of decimals follows; None:
    its own.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    amount = abs(value)
    if size is None:
        size = amount
    if format == "percent":
        text = f"{amount * 100:.1f}%"
    elif format == "points":
        text = f"{amount * 100:.1f} points"
    elif format == "integer" or (amount == round(amount) and amount >= 100):
        text = f"{math.floor(amount + 0.5):,}"
    elif amount != 0 and (size < 1e-4 or size >= 1e6):
        mantissa, exponent = f"{amount:.2e}".split("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        num_decimals = next(decimals for least, decimals in _DECIMALS if size >= least)
        text = f"{amount:,.{num_decimals}f}"
    text = text.replace("e-", "e\N{MINUS SIGN}")
    # What is written decides, not the value: -0.0001 in per cent is 0.0%, which has no sign.
    is_zero = not any(digit in "123456789" for digit in text)
    if is_zero:
        return text
    if value < 0:
        return "\N{MINUS SIGN}" + text
    return "+" + text if format in ("signed", "points") else text


def metric_format(name: str) -> str:
    """The format of a metric by its name: accuracies and an F1 of them are per cent, differences of
    accuracies points."""
    if name.endswith("accuracy_gap"):
        return "points"
    is_share = "accuracy" in name or name.endswith("_f1")
    return "percent" if is_share else "number"


def metric_text(name: str, value: float | None) -> str:
    """A metric as logs and tables write it."""
    return format_number(value, metric_format(name))
