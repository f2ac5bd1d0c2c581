r"""`treeward bon`: what best-of-n by a proxy does to gold, from samples of a file.

examples:
  treeward bon --proxy results/quickstart/final --gold other/model --data samples.jsonl --output results/bon
  treeward bon --proxy MODEL --gold "{type: rules, rule: math}" --data samples.jsonl
  treeward bon --proxy scores --gold rank --data comparisons.jsonl
  treeward bon --proxy "{models: [A, B], ensemble: worst}" --gold OTHER --data samples.jsonl --output results/bon

Rows hold `prompt` (or as docs/data.md has it) or `messages`, with N samples as `responses`
or `completions`. A proxy and a gold are each a reward model, a field of the rows with a
number for each sample, an environment as {type: ..., ...}, or `synthetic`, the gold
quality of the bundled data's world.
With --output an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from treeward.cli.options import (
    ModelOptions,
    check_shaping,
    load_rewards,
    parse_yaml,
    with_model_options,
)
from treeward.config.load import load_section
from treeward.config.server import ServedModelConfig
from treeward.errors import ConfigError, nearest_name
from treeward.progress import ShownProgress
from treeward.tables import results_table

logger = logging.getLogger(__name__)

_SYNTHETIC = "synthetic"
_RULES = ("exact_match", "math", "regex")
_MOST_REASONS = 5


@with_model_options
def run(
    proxy: Annotated[str, typer.Option(metavar="MODEL|YAML|FIELD", help="What chooses.")],
    data: Annotated[str, typer.Option(metavar="FILE", help="jsonl, json, csv, parquet or arrow.")],
    gold: Annotated[str, typer.Option(metavar="MODEL|YAML|FIELD", help="What is right.")] = "gold_scores",
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where scores, bon.json and a report go.")] = None,
    max_n: Annotated[int | None, typer.Option(min=2, help="The largest n; default: what 95 % of rows have.")] = None,
    *,
    options: ModelOptions,
) -> int:
    from treeward.data.sources import read_rows
    from treeward.evaluation.best_of_n.analysis import analyse, legend, table, write
    from treeward.evaluation.best_of_n.samples import by_field, fields_of, rate, sampled_rows
    from treeward.evaluation.session import common_reasons

    fields = fields_of(next(sampled_rows(read_rows(data))))
    raters = {"gold": _rater(gold, "--gold", fields, options), "proxy": _rater(proxy, "--proxy", fields, options)}
    names = {role: rater.name for role, rater in raters.items()}
    if names["proxy"] == names["gold"]:
        need = "different ones: {name: ..., model: ...} gives a model a name of its own"
        raise ConfigError("proxy and gold are the same", where="--proxy, --gold", got=names["gold"], need=need)
    prompts = []
    for row in sampled_rows(read_rows(data)):  # an error in the last row comes before anything is loaded
        prompts.append(row[0].context_key)
        for name in (gold, proxy):
            if name in fields:
                by_field(name)([row])
    folder = None if output is None else Path(output)
    with ShownProgress(unit="prompts") as progress:
        scores = {
            role: rate(data, rater, folder and folder / "scores", len(prompts), progress.show)
            for role, rater in raters.items()
        }
    errors = {
        role: Counter(str(score.error) for row in rows for score in row if score.score is None)
        for role, rows in scores.items()
    }
    for role, counts in errors.items():
        for reason, count in common_reasons(counts)[:_MOST_REASONS]:
            logger.warning("%d samples are left out: %s: %s", count, role, reason)
    values = {role: [[score.score for score in row] for row in rows] for role, rows in scores.items()}
    result = analyse(values["proxy"], values["gold"], prompts, max_n=max_n)
    sys.stdout.write(results_table(*table(result)) + "\n")
    sys.stdout.write("\n".join(["", legend(names["gold"]), "", result.verdict.sentence]) + "\n")
    if fewer := result.counts["num_prompts_with_fewer_samples"]:
        logger.warning("%d prompts have fewer than %d scored samples, left out.", fewer, result.max_n)
    if folder is not None:
        logger.info("Wrote %s.", write(folder, result, names["proxy"], names["gold"], data))
    return 1 if any(errors.values()) else 0


def _rater(text: str, option: str, fields: Sequence[str], options: ModelOptions) -> Any:
    """What a proxy or gold is: a field of the rows, a model, an environment, or the bundled world's gold quality."""
    from treeward.evaluation.best_of_n.samples import Rater, by_field, by_gold_quality, by_scorer
    from treeward.model.pretrained import check_device

    if text in fields:
        return Rater(text, lambda stack: (by_field(text), {"field": text}))
    if text == _SYNTHETIC:
        return Rater(text, lambda stack: (by_gold_quality, {"synthetic": True}))
    section: dict[str, Any]
    if text in _RULES:
        section = {"type": "rules", "rule": text}
    elif text.lstrip().startswith("{"):
        section = parse_yaml(text, option)
    else:
        if not Path(text).expanduser().exists() and ("/" not in text or text.startswith((".", "/", "~"))):
            near = nearest_name(text, [*fields, _SYNTHETIC, *_RULES])
            names = ", ".join(fields) or "(none)"
            need = f"a folder or hub name; {{type: ...}}; synthetic; or one of the fields {names}"
            summary, fix = "this is no model, no environment and no field of the rows", near and f"did you mean {near}?"
            raise ConfigError(summary, where=option, got=text, need=need, fix=fix)
        section = {"model": text, "name": text}
    if "type" in section:
        return Rater(text.strip(), lambda stack: (_by_environment(section, option, stack), {"section": section}))
    if isinstance(section.get("ensemble"), str):
        section["ensemble"] = {"method": section["ensemble"]}
    model = load_section(ServedModelConfig, {**options.keys, "name": text.strip(), **section}, where=option)
    check_device(model.device, where=option, field="device")
    check_shaping(model)

    def by_model(stack: ExitStack) -> Any:
        scorer, identity = load_rewards(model, options.batch_tokens)
        return by_scorer(scorer), identity

    return Rater(model.served_name, by_model)


def _by_environment(section: Mapping[str, Any], option: str, stack: ExitStack) -> Any:
    from treeward.environments.registry import make_environment
    from treeward.environments.scorer import EnvironmentScorer
    from treeward.evaluation.findings import usage_finding

    scorer = EnvironmentScorer(make_environment("rules", section, where=option))
    stack.callback(scorer.environment.shutdown)
    stack.callback(lambda: logger.info("%s: %s", option, usage) if (usage := usage_finding(scorer.usage())) else None)

    def grade(rows: Sequence[Any]) -> Any:
        conversations, infos = zip(*((samples.conversations, columns) for samples, columns in rows), strict=True)
        return scorer.score_groups(conversations, infos=infos, on_error="mask")

    return grade
