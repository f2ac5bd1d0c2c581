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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treeward.errors import ConfigError
from treeward.evaluation.report.blocks import bar_item, format_number, table_block
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block
from treeward.rl.report.distance import DOTTED, SOLID, distance_blocks
from treeward.rl.report.findings import KINDS, Z95, Change, RunSummary, advice, opening, scales_remark, sum_up
from treeward.rl.report.reading import Curve, RLRun, Source

__all__ = ["report_blocks", "write_rl_report"]

_MOST_POINTS = 60
_MOST_PROMPTS = 12
_MUCH_HIGHER = 5.0
_SOURCES: Mapping[Source, tuple[str, int]] = {"validation": ("validation", SOLID), "train": ("training", DOTTED)}
"""Of each half of the logs its name in a legend, and how its curves are drawn."""

_OWN_FOLDERS = ("checkpointing.checkpoint_dir", "logger.log_dir")


class _Figure(NamedTuple):
    """A metric over the steps: its title, its name after `train/` and `validation/`, and how to read it."""

    title: str
    key: str
    y_label: str
    note: str = ""
    format: str = "number"
    error: str = ""
    folded: bool = False


_FIGURES = (
    _Figure("Gold reward", "gold_reward", "gold", error="watch/gold_error"),
    _Figure("Proxy", "proxy", "reward", "What is optimised.", error="watch/proxy_error"),
    _Figure("Reward as it is optimised", "reward", "reward", "Running statistics move its scale: early and late steps "
            "do not compare."),
    _Figure("Proxy, before shaping", "raw_reward", "score", "What the reward model says itself."),
    _Figure("KL to the reference", "kl", "nats", "How far the policy has moved."),
    _Figure("Length of the completions", "mean_gen_tokens_per_sample", "tokens"),
    _Figure("Entropy of the policy", "entropy", "nats", "Near 0 it says the same every time and learns no more."),
    _Figure("Completions that were cut", "truncation_rate", "share", "At the length limit.", "percent"),
    _Figure("Groups without signal", "groups_without_signal", "share", "All completions of a group have one reward: "
            "nothing is learnt from it.", "percent"),
    _Figure("Rewards that failed", "num_failed", "completions", "Masked, and in no mean."),
    _Figure("Spread of rewards", "reward_std", "standard deviation", folded=True),
    _Figure("Loss", "loss", "loss", folded=True),
    _Figure("Gradient norm", "grad_norm", "norm", folded=True),
    _Figure("Learning rate", "lr", "learning rate", folded=True),
    _Figure("Clipped ratios", "clip_fraction", "share", format="percent", folded=True),
    _Figure("Generator against trainer", "token_mult_prob_error", "factor", "How far the generator's probabilities are "
            "from the trainer's; 1 is none.", folded=True),
)  # fmt: skip


def write_rl_report(runs: Sequence[RLRun], path: Path, *, title: str) -> Path:
    """Write the page to `path`, which ends in .html, and its numbers to the .json beside it; returns `path`.

    Raises `ConfigError` for no runs, or two of one name.
    """
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ConfigError("a report needs runs of different names", got=names, need="one run or more")
    subtitle = f"{len(runs)} runs: {', '.join(names)}" if len(runs) > 1 else f"Run {names[0]}"
    return write_report(path.parent, title, report_blocks(runs), {}, subtitle=subtitle, name=path.stem)


def report_blocks(runs: Sequence[RLRun]) -> list[Block]:
    """The blocks of the page."""
    summaries = [sum_up(run) for run in runs]
    distance, headline = distance_blocks(summaries), {"kind": "headline", "items": _headline(summaries)}
    said = "\n".join(f"- {one.sentence()}" for one in summaries)
    steps = (
        "Solid: validation, always on the same prompts; dotted: training batches. A band is a 95% interval over "
        "prompts. Of many steps, a point is the mean of neighbours. Values that are not finite are left out."
    )
    return [
        {"kind": "text", "markdown": "\n\n".join(filter(None, (opening(summaries), said, scales_remark(runs))))},
        *([*distance, headline, _comparison(summaries)] if len(runs) > 1 else [headline, *distance]),
        *_alarms(runs),
        *_advice(summaries),
        {"kind": "text", "title": "Over the steps", "markdown": steps},
        *(block for figure in _FIGURES if (block := _over_steps(figure, runs)) is not None),
        *_samples(summaries),
        *_settings(runs),
    ]


def _headline(summaries: Sequence[RunSummary]) -> list[Block]:
    """Of one run all that counts; of several the change of gold, or of the proxy where there is no gold."""
    one, several = summaries[0], len(summaries) > 1
    name = "gold" if any(each.gold is not None for each in summaries) else "proxy"
    changes: dict[str, Change | None] = {"Gold, change": one.gold, "Proxy, change": one.proxy}
    if several:
        changes = {f"{name.capitalize()}: {each.run.name}": getattr(each, name) for each in summaries}
    items = []
    for label, change in changes.items():
        if change is not None:
            note = f"from {format_number(change.first)} to {format_number(change.last)}"
            items.append(bar_item(label, change.by, note) | {"format": "signed"})
    if not several and one.kl is not None:
        items.append({"label": "KL to the reference", "value": one.kl, "note": "in nats, at the last measurement"})
    if not several and one.length is not None:
        note = f"tokens; {format_number(one.length[0], 'integer')} at first"
        items.append({"label": "Length of the completions", "value": one.length[1], "format": "integer", "note": note})
    return items


def _comparison(summaries: Sequence[RunSummary]) -> Block:
    columns = {
        "run": ("Run", "text"), "gold": ("Gold, change", "signed"), "best": ("Best gold", "number"),
        "best_step": ("Best at step", "integer"), "proxy": ("Proxy, change", "signed"), "kl": ("KL, nats", "number"),
        "first_length": ("Tokens, first", "integer"), "length": ("Tokens, last", "integer"),
        "alarm": ("Alarm at step", "integer"), "steps": ("Steps", "integer"),
    }  # fmt: skip
    rows: list[Block] = []
    for one in summaries:
        gold, proxy = (None if change is None else bar_item("", change.by) for change in (one.gold, one.proxy))
        first_length, length = one.length or (None, None)
        row = {"run": one.run.name, "gold": gold, "best": one.best_gold, "best_step": one.best_step, "proxy": proxy}
        row |= {"kl": one.kl, "first_length": first_length, "length": length, "alarm": one.run.alarm_step}
        rows.append(row | {"steps": one.run.last_step})
    known = {key: column for key, column in columns.items() if any(row[key] is not None for row in rows)}
    note = "Changes from the first validation to the last, with 95% intervals that are paired by prompt."
    return table_block("The runs side by side", known, rows, note)


def _alarms(runs: Sequence[RLRun]) -> list[Block]:
    rows = [
        {"run": run.name, "step": alarm.step, "kind": KINDS[alarm.kind], "sentence": alarm.sentence}
        for run in runs
        for alarm in run.alarms
    ]
    columns = {"run": ("Run", "text")} if len(runs) > 1 else {}
    columns |= {"step": ("Step", "integer"), "kind": ("Alarm", "text"), "sentence": ("What was found", "text")}
    return [table_block("Alarms", columns, rows)] if rows else []


def _advice(summaries: Sequence[RunSummary]) -> list[Block]:
    parts = []
    for one in summaries:
        if found := advice(one):
            parts += [f"**{one.run.name}**"] if len(summaries) > 1 else []
            parts.append("\n".join(f"- {text}" for text in found))
    return [{"kind": "text", "title": "What to do next", "markdown": "\n\n".join(parts)}] if parts else []


def _over_steps(figure: _Figure, runs: Sequence[RLRun]) -> Block | None:
    """A metric over the steps; None where no run has it."""
    series: list[Block] = []
    for colour, run in enumerate(runs):
        for source, (what, dash) in _SOURCES.items():
            curve = _curve(figure, run, source)
            if not curve:
                continue
            num_points = min(len(curve), _MOST_POINTS)
            x, y = ([float(part.mean()) for part in np.array_split(list(values), num_points)]
                    for values in (curve.keys(), curve.values()))  # fmt: skip
            name = f"{run.name}: {what}" if len(runs) > 1 else what
            one: Block = {"name": name, "x": x, "y": y, "colour": colour, "dash": dash}
            error = run.curve(figure.error) if source == "validation" else {}
            if error and len(x) == len(curve):
                halves = [Z95 * error.get(step, math.nan) for step in curve]
                one["low"] = [value - half for value, half in zip(y, halves, strict=True)]
                one["high"] = [value + half for value, half in zip(y, halves, strict=True)]
            series.append(one | {"dots": source == "validation" and len(x) <= _MOST_POINTS // 2})
    if not series:
        return None
    tops = sorted(max(max(one["y"]) for one in series if one["colour"] == i)
                  for i in range(len(runs)) if any(one["colour"] == i for one in series))  # fmt: skip
    is_far = figure.key == "kl" and len(tops) > 1 and tops[-1] > _MUCH_HIGHER * tops[-2] > 0.0
    return {
        "kind": "curves",
        "title": figure.title,
        "note": figure.note + (" One run went much further: the axis is logarithmic above 1." if is_far else ""),
        "x_label": "step",
        "y_label": figure.y_label,
        "y_scale": "symlog" if is_far else "linear",
        "format": figure.format,
        "series": series,
        "lines": [
            {"x": run.alarm_step, "label": f"{run.name}: alarm" if len(runs) > 1 else "alarm", "colour": colour}
            for colour, run in enumerate(runs)
            if run.alarm_step is not None and figure.key in ("gold_reward", "proxy", "kl", "mean_gen_tokens_per_sample")
        ],
        "folded": figure.folded or not any(any(one["y"]) for one in series),
    }


def _curve(figure: _Figure, run: RLRun, source: Source) -> Curve:
    """The metric of one run; nothing where another figure shows the same."""
    if figure.key == "proxy":
        return run.proxy(source)
    is_shown = {
        "reward": not run.rewards_move,
        "raw_reward": all(run.curve(f"{one}/raw_reward") == run.proxy(one) for one in _SOURCES),
    }
    return {} if is_shown.get(figure.key) else run.curve(f"{source}/{figure.key}")


def _samples(summaries: Sequence[RunSummary]) -> list[Block]:
    """The same prompts at the first, a middle and the last validation; the middle one is where gold was best."""
    items: dict[str, Block] = {}
    for colour, one in enumerate(summaries):
        by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
        for line in one.run.samples:
            if line["completions"]:
                by_prompt.setdefault(json.dumps(line["prompt"], sort_keys=True), {})[line["step"]] = line
        for key, lines in by_prompt.items():
            first, *inner, last = [*sorted(lines), max(lines)] if len(lines) == 1 else sorted(lines)
            middle = [one.best_step] if one.best_step in inner else inner[len(inner) // 2 :][:1]
            shown = [lines[step] for step in dict.fromkeys([first, *middle, last]) if step is not None]
            item = items.setdefault(key, {"prompt": lines[first]["prompt"], "rows": []})
            completions = [_completion(line, one) for line in shown]
            name = one.run.name if len(summaries) > 1 else ""
            item["rows"].append({"name": name, "colour": colour, "completions": completions})
    if not items:
        return []
    note = "The first completion that was sampled to each prompt, not a chosen one."
    if len(items) > _MOST_PROMPTS:
        note += f" {len(items) - _MOST_PROMPTS} more prompts are in samples.jsonl."
    return [
        {"kind": "text", "title": "Completions over time", "markdown": note},
        {"kind": "samples", "title": "Prompts and completions", "items": list(items.values())[:_MOST_PROMPTS]},
    ]


def _completion(line: Mapping[str, Any], summary: RunSummary) -> Block:
    completion = line["completions"][0]
    shown = {"reward": ("reward", "signed"), "raw_reward": ("before shaping", "signed")}
    shown |= {"gold_reward": ("gold", "number"), "kl": ("KL", "number"), "num_tokens": ("tokens", "integer")}
    if completion.get("raw_reward") == completion.get("reward"):
        del shown["raw_reward"]
    numbers = [
        {"label": label, "value": completion.get(key), "format": form}
        for key, (label, form) in shown.items()
        if completion.get(key) is not None or key == "reward"  # a reward that failed shows as a dash
    ]
    flags = ["cut"] if completion.get("truncated") else []
    flags += ["gold is best on average"] if line["step"] == summary.best_step else []
    return {"label": f"step {line['step']:,}", "text": completion["text"], "numbers": numbers, "flags": flags}


def _settings(runs: Sequence[RLRun]) -> list[Block]:
    """First the settings that differ, then all, folded."""
    settings = [run.settings() for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    if not keys:
        return []
    columns = {"setting": ("Setting", "text")}
    columns |= {f"run{i}": (run.name if len(runs) > 1 else "Value", "text") for i, run in enumerate(runs)}

    def rows(names: Sequence[str]) -> list[Block]:
        return [{"setting": key, **{f"run{i}": one.get(key) for i, one in enumerate(settings)}} for key in names]

    differing = [key for key in keys if key not in _OWN_FOLDERS and len({one.get(key) for one in settings}) > 1]
    return [
        {"kind": "text", "title": "Settings", "markdown": "The resolved configuration of each run."},
        *([table_block("What differs", columns, rows(differing))] if differing else []),
        table_block("All settings", columns, rows(keys), most=400, folded=True),
    ]
