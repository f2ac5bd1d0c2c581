"""`write_rl_report`: runs of RL side by side on one page, which needs nothing but a browser.

    runs = [RLRun.read(name, folder) for name, folder in (("clean", a), ("hacked", b), ("cured", c))]
    write_rl_report(runs, Path("report.html"), title="GRPO against a reward model")

The page and its blocks are those of `treeward.evaluation.report`: the verdict in sentences, proxy and gold over the
square root of KL, with the law of Gao et al. 2022 (arXiv 2210.10760, section 3.1) where it describes them, the runs
side by side, what to do next, every metric over the steps, the same prompts completed at the first, a middle and the
last validation, and the settings. Beside it is a JSON file of the same name with all numbers. A metric that no run has
takes no place; steps are thinned to means of neighbours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from treeward.errors import ConfigError
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.report.build import write_report
from treeward.rl.report.distance import DOTTED, SOLID, distance_blocks, spoken
from treeward.rl.report.findings import KINDS, RunSummary, advice, opening, scales_remark, sum_up
from treeward.rl.report.reading import Curve, RLRun

__all__ = ["report_blocks", "write_rl_report"]

_MOST_POINTS = 60
_MOST_PROMPTS = 12
_Z95 = 1.959964
_MUCH_HIGHER = 5.0

_Source = Literal["validation", "train"]
_SOURCES: Mapping[_Source, tuple[str, int]] = {"validation": ("validation", SOLID), "train": ("training", DOTTED)}
"""Of each half of the logs its name in a legend, and how its curves are drawn."""

_OWN_FOLDERS = ("checkpointing.checkpoint_dir", "logger.log_dir")


class _Figure(NamedTuple):
    """A metric over the steps: its title, its name after `train/` and `validation/`, and how to read it.

    `closer`: where one run's values leave nothing to see of the others, these have a second figure without it.
    """

    title: str
    key: str
    y_label: str
    note: str = ""
    format: str = "number"
    error: str = ""
    marked: bool = False
    folded: bool = False
    closer: bool = False


_FIGURES = (
    _Figure("Gold reward", "gold_reward", "gold", error="watch/gold_error", marked=True),
    _Figure("Proxy", "proxy", "reward", "What is optimised.", error="watch/proxy_error", marked=True),
    _Figure(
        "Reward after running statistics", "reward", "reward",
        "It is what is optimised, but its scale moves: early and late steps do not compare.",
    ),
    _Figure("Proxy, before shaping", "raw_reward", "score", "What the reward model says itself."),
    _Figure("KL to the reference", "kl", "nats", "How far the policy has moved.", marked=True, closer=True),
    _Figure("Length of the completions", "mean_gen_tokens_per_sample", "tokens", marked=True),
    _Figure("Entropy of the policy", "entropy", "nats", "Near 0 it says the same every time and learns no more."),
    _Figure("Completions that were cut", "truncation_rate", "share", "At the length limit.", format="percent"),
    _Figure(
        "Groups without signal", "groups_without_signal", "share",
        "All completions of a group have one reward: nothing is learnt from it.", format="percent",
    ),
    _Figure("Rewards that failed", "num_failed", "completions", "Masked, and in no mean.", format="number"),
    _Figure("Spread of rewards", "reward_std", "standard deviation", folded=True),
    _Figure("Loss", "loss", "loss", folded=True),
    _Figure("Gradient norm", "grad_norm", "norm", folded=True),
    _Figure("Learning rate", "lr", "learning rate", folded=True),
    _Figure("Clipped ratios", "clip_fraction", "share", format="percent", folded=True),
    _Figure(
        "Generator against trainer", "token_mult_prob_error", "factor",
        "How far the generator's probabilities are from the trainer's; 1 is none.", folded=True,
    ),
)  # fmt: skip


def write_rl_report(runs: Sequence[RLRun], path: Path, *, title: str) -> Path:
    """Write the page to `path`, which ends in .html, and its numbers to the .json beside it; returns `path`.

    Raises `ConfigError` for no runs, two of one name, or another ending.
    """
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ConfigError("a report needs runs of different names", got=names, need="one run or more")
    if path.suffix != ".html":
        raise ConfigError("the report is a web page", got=str(path), need="a path that ends in .html")
    subtitle = f"{len(runs)} runs: {', '.join(names)}" if len(runs) > 1 else f"Run {names[0]}"
    return write_report(path.parent, title, report_blocks(runs), {}, subtitle=subtitle, name=path.stem)


def report_blocks(runs: Sequence[RLRun]) -> list[dict[str, Any]]:
    """The blocks of the page."""
    summaries = [sum_up(run) for run in runs]
    distance, headline = distance_blocks(summaries), {"kind": "headline", "items": list(_headline(summaries))}
    return [
        {"kind": "text", "markdown": _verdict(summaries)},
        *([*distance, headline, _comparison(summaries)] if len(runs) > 1 else [headline, *distance]),
        *_alarm_blocks(runs),
        *_advice_blocks(summaries),
        {
            "kind": "text",
            "title": "Over the steps",
            "markdown": f"Solid: validation, always on the same prompts; dotted: training batches. {_thinned(runs)}",
        },
        *(block for figure in _FIGURES for block in _figure_blocks(figure, runs)),
        *_sample_blocks(summaries),
        *_setting_blocks(runs),
    ]


def _verdict(summaries: Sequence[RunSummary]) -> str:
    said = "\n".join(f"- {one.sentence()}" for one in summaries)
    return "\n\n".join(filter(None, (opening(summaries), said, scales_remark([one.run for one in summaries]))))


def _advice_blocks(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    parts = []
    for one in summaries:
        if found := advice(one):
            listed = "\n".join(f"- {text}" for text in found)
            parts.append(f"**{one.run.name}**\n\n{listed}" if len(summaries) > 1 else listed)
    return [{"kind": "text", "title": "What to do next", "markdown": "\n\n".join(parts)}] if parts else []


def _headline(summaries: Sequence[RunSummary]) -> Iterator[dict[str, Any]]:
    """Of one run all that counts; of several the change of gold, or of the proxy where there is no gold."""
    several = len(summaries) > 1
    has_gold = any(one.gold is not None for one in summaries)
    for one in summaries:
        changes = [(name, change) for name, change in (("Gold", one.gold), ("Proxy", one.proxy)) if change is not None]
        if several:
            changes = [(name, change) for name, change in changes if name == ("Gold" if has_gold else "Proxy")]
        for name, change in changes:
            label = f"{name}: {one.run.name}" if several else f"{name}, change"
            note = f"from {format_number(change.first)} to {format_number(change.last)}"
            yield {"label": label, **change.cell(), "note": note}
    if several:
        return
    if one.kl is not None:
        yield {"label": "KL to the reference", "value": one.kl, "note": "in nats, at the last measurement"}
    if one.length is not None:
        note = f"tokens; {format_number(one.length.first, 'integer')} at first"
        yield {"label": "Length of the completions", "value": one.length.last, "format": "integer", "note": note}


def _comparison(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    columns = [
        ("run", "Run", "text"), ("gold", "Gold, change", "signed"), ("best", "Best gold", "number"),
        ("best_step", "Best at step", "integer"), ("fall", "Lost since", "number"),
        ("proxy", "Proxy, change", "signed"), ("kl", "KL, nats", "number"),
        ("first_length", "Tokens, first", "integer"), ("length", "Tokens, last", "integer"),
        ("alarm", "Alarm at step", "integer"), ("steps", "Steps", "integer"),
    ]  # fmt: skip
    rows = [
        {
            "run": one.run.name,
            "gold": None if one.gold is None else one.gold.cell(),
            "best": one.best_gold,
            "best_step": one.best_step,
            "fall": one.fall,
            "proxy": None if one.proxy is None else one.proxy.cell(),
            "kl": one.kl,
            "first_length": None if one.length is None else one.length.first,
            "length": None if one.length is None else one.length.last,
            "alarm": one.run.alarm_step,
            "steps": one.run.last_step,
        }
        for one in summaries
    ]
    return {
        "kind": "table",
        "title": "The runs side by side",
        "note": "Changes from the first validation to the last, with 95% intervals that are paired by prompt. "
        + scales_remark([one.run for one in summaries]),
        "columns": [
            {"key": key, "label": label, "format": form}
            for key, label, form in columns
            if any(row[key] is not None for row in rows)
        ],
        "rows": rows,
    }


def _alarm_blocks(runs: Sequence[RLRun]) -> list[dict[str, Any]]:
    rows = [
        {"run": run.name, "step": alarm.step, "kind": KINDS[alarm.kind], "sentence": alarm.sentence}
        for run in runs
        for alarm in run.alarms
    ]
    columns = [
        ("run", "Run", "text"),
        ("step", "Step", "integer"),
        ("kind", "Alarm", "text"),
        ("sentence", "What was found", "text"),
    ]
    if not rows:
        return []
    return [
        {
            "kind": "table",
            "title": "Alarms",
            "columns": [
                {"key": key, "label": label, "format": form}
                for key, label, form in columns[0 if len(runs) > 1 else 1 :]
            ],
            "rows": rows,
        }
    ]


def _figure_blocks(figure: _Figure, runs: Sequence[RLRun]) -> Iterator[dict[str, Any]]:
    block = _over_steps(figure, runs)
    if block is None:
        return
    yield block
    if not figure.closer:
        return
    tops = sorted((max(_values(figure, run), default=0.0), run.name) for run in runs)
    if len(tops) > 1 and tops[-1][0] > _MUCH_HIGHER * tops[-2][0] > 0.0:
        far = tops[-1][1]
        closer = _over_steps(figure._replace(title=f"{figure.title}, without {far}", note=""), runs, without=far)
        if closer is not None:
            yield closer


def _values(figure: _Figure, run: RLRun) -> list[float]:
    return [value for source in _SOURCES for value in _curve(figure, run, source).values]


def _curve(figure: _Figure, run: RLRun, source: _Source) -> Curve:
    """The metric of one run; nothing where another figure shows the same."""
    if figure.key == "proxy":
        return run.proxy(source)
    if figure.key == "reward" and not run.rewards_move:
        return Curve()
    if figure.key == "raw_reward" and all(run.curve(f"{one}/raw_reward") == run.proxy(one) for one in _SOURCES):
        return Curve()
    return run.curve(f"{source}/{figure.key}")


def _over_steps(figure: _Figure, runs: Sequence[RLRun], without: str | None = None) -> dict[str, Any] | None:
    """A metric over the steps; None where no run has it."""
    several = len(runs) > 1
    series: list[dict[str, Any]] = []
    missing = 0
    shown = [(colour, run) for colour, run in enumerate(runs) if run.name != without]
    for colour, run in shown:
        for source, (what, dash) in _SOURCES.items():
            curve = _curve(figure, run, source)
            if not curve:
                continue
            missing += curve.num_missing
            x, y = _means(curve)
            one = {"name": f"{run.name}: {what}" if several else what, "x": x, "y": y, "colour": colour, "dash": dash}
            error = run.curve(figure.error) if figure.error and source == "validation" else Curve()
            if error and len(x) == len(curve.steps):
                halves = [_Z95 * (error.at(step) or math.nan) for step in curve.steps]
                one["low"] = [value - half for value, half in zip(y, halves, strict=True)]
                one["high"] = [value + half for value, half in zip(y, halves, strict=True)]
            series.append(one | {"dots": source == "validation" and len(x) <= _MOST_POINTS // 2})
    if not series:
        return None
    note = figure.note + _missing(missing)
    if figure.key == "proxy":
        moving = [run.name for run in runs if run.rewards_move]
        if moving:
            of = f" of {', '.join(moving)}" if several else ""
            note += f" The reward{of} is shown before shaping, as running statistics move its scale."
        note += f" {scales_remark(runs)}"
    if any("low" in one for one in series):
        note = f"{note.strip()} The band is a 95% interval over prompts."
    lines = [
        {"x": run.alarm_step, "label": f"{run.name}: alarm" if several else "alarm", "colour": colour}
        for colour, run in shown
        if figure.marked and run.alarm_step is not None
    ]
    return {
        "kind": "curves",
        "title": figure.title,
        "note": note.strip(),
        "x_label": "step",
        "y_label": figure.y_label,
        "format": figure.format,
        "series": series,
        "lines": lines,
        "spoken": spoken(series, figure.format),
        "folded": figure.folded or not any(any(one["y"]) for one in series),
    }


def _missing(count: int) -> str:
    if not count:
        return ""
    return f" At {count} {'step' if count == 1 else 'steps'} it is not a finite number, and left out."


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """A curve of at most `_MOST_POINTS` points: means of as many neighbouring steps as that takes."""
    size = math.ceil(len(curve.steps) / _MOST_POINTS)
    columns = []
    for values in (curve.steps, curve.values):
        columns.append([float(np.mean(values[i : i + size])) for i in range(0, len(values), size)])
    return columns[0], columns[1]


def _thinned(runs: Sequence[RLRun]) -> str:
    most = max(math.ceil(len(run.steps) / _MOST_POINTS) for run in runs)
    return "" if most == 1 else f"Where there are many steps, a point is the mean of up to {most} of them."


def _sample_blocks(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The same prompts at the first, a middle and the last validation; the middle one is where gold was best."""
    items: dict[str, dict[str, Any]] = {}
    for colour, one in enumerate(summaries):
        by_prompt: dict[str, list[Mapping[str, Any]]] = {}
        for line in one.run.samples:
            if line["completions"]:
                by_prompt.setdefault(json.dumps(line["prompt"], sort_keys=True), []).append(line)
        for key, lines in by_prompt.items():
            item = items.setdefault(key, {"prompt": lines[0]["prompt"], "rows": []})
            item["rows"].append({
                "name": one.run.name if len(summaries) > 1 else "",
                "colour": colour,
                "completions": [_completion(line, one) for line in _three(lines, one.best_step)],
            })  # fmt: skip
    if not items:
        return []
    dropped = len(items) - _MOST_PROMPTS
    note = "The first completion that was sampled to each prompt, not a chosen one."
    if dropped > 0:
        note += f" {dropped} more prompts are in samples.jsonl."
    return [
        {"kind": "text", "title": "Completions over time", "markdown": note},
        {"kind": "samples", "title": "Prompts and completions", "items": list(items.values())[:_MOST_PROMPTS]},
    ]


def _three(lines: Sequence[Mapping[str, Any]], best_step: int | None) -> list[Mapping[str, Any]]:
    of_step = {line["step"]: line for line in lines}
    steps = sorted(of_step)
    inner = steps[1:-1]
    middle = [best_step] if best_step in inner else inner[len(inner) // 2 : len(inner) // 2 + 1]
    return [of_step[step] for step in dict.fromkeys([steps[0], *middle, steps[-1]])]


_OF_COMPLETION = (
    ("reward", "reward", "signed"), ("raw_reward", "before shaping", "signed"), ("gold_reward", "gold", "number"),
    ("kl", "KL", "number"), ("num_tokens", "tokens", "integer"),
)  # fmt: skip


def _completion(line: Mapping[str, Any], summary: RunSummary) -> dict[str, Any]:
    completion = line["completions"][0]
    known = {key: value for key, value in completion.items() if isinstance(value, int | float)}
    if known.get("raw_reward") == known.get("reward"):
        known.pop("raw_reward", None)
    numbers = [
        {"label": label, "value": known.get(key), "format": form}
        for key, label, form in _OF_COMPLETION
        if key in known or key == "reward"  # a reward that failed shows as a dash
    ]
    flags = ["cut"] if completion.get("truncated") else []
    if line["step"] == summary.best_step:
        flags.append("gold is best on average")
    return {"label": f"step {line['step']:,}", "text": completion["text"], "numbers": numbers, "flags": flags}


def _setting_blocks(runs: Sequence[RLRun]) -> list[dict[str, Any]]:
    """First the settings that differ, then all, folded."""
    settings = [run.settings() for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    if not keys:
        return []
    columns = [{"key": "setting", "label": "Setting"}]
    columns += [{"key": f"run{i}", "label": run.name if len(runs) > 1 else "Value"} for i, run in enumerate(runs)]

    def rows(names: Sequence[str]) -> list[dict[str, Any]]:
        return [{"setting": key, **{f"run{i}": one.get(key) for i, one in enumerate(settings)}} for key in names]

    differing = [key for key in keys if key not in _OWN_FOLDERS and len({one.get(key) for one in settings}) > 1]
    blocks: list[dict[str, Any]] = [{"kind": "text", "title": "Settings", "markdown": _about_settings(runs, differing)}]
    if differing:
        blocks.append({"kind": "table", "title": "What differs", "columns": columns, "rows": rows(differing)})
    return [
        *blocks,
        {"kind": "table", "title": "All settings", "columns": columns, "rows": rows(keys), "most": 400, "folded": True},
    ]


def _about_settings(runs: Sequence[RLRun], differing: Sequence[str]) -> str:
    if len(runs) == 1:
        return "The resolved configuration of the run."
    return "The resolved configurations." if differing else "The resolved configurations are the same, but for folders."
