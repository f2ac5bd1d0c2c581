"""`treeward bon`: what best-of-n by one or several proxies does to gold, from samples of a file."""

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
    write_table,
)
from treeward.config.base import nearest_name
from treeward.config.load import load_section
from treeward.config.server import ServedModelConfig
from treeward.errors import ConfigError
from treeward.progress import ShownProgress

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward bon --proxy results/quickstart/final --gold other/model --data samples.jsonl --output results/bon
  treeward bon --proxy MODEL --gold "{type: rules, rule: math}" --data samples.jsonl
  treeward bon --proxy MODEL --gold gold_scores --data samples.jsonl
  treeward bon --proxy scores --gold rank --data comparisons.jsonl
  treeward bon --proxy A --proxy "{model: A, shaping: contract}" --proxy "{models: [A, B], ensemble: worst}" \\
      --gold OTHER --data samples.jsonl --output results/bon

Rows hold `prompt` (text), or `context` or `messages`, with `responses` or
`completions`: N samples of one prompt. A proxy and a gold are each a reward model, a
field of the rows with a number for each sample (of preference files also `score` or
`rank`), an environment as {type: ..., ...}, which sees the row's other columns, or
`synthetic`: the gold quality of the bundled data's world. A reward model may be one of
{model: NAME} or {models: [NAME, ...], ensemble: ...}, with shaping and a name of its
own. Several proxies are compared on the same samples. With --output an interrupted run
goes on where it stopped."""

_DEFAULT_GOLD = "gold_scores"
_SYNTHETIC = "synthetic"
_RULES = ("exact_match", "math", "regex")
_MOST_REASONS = 5


@with_model_options
def run(
    proxy: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL|YAML|FIELD",
            help="What chooses: a reward model, {model: NAME, shaping: contract}, {models: [A, B], ensemble: worst}, "
            "or as --gold. Given several times, each proxy is compared with the first.",
        ),
    ],
    data: Annotated[str, typer.Option(metavar="FILE", help="jsonl, json, csv, parquet or arrow.")],
    gold: Annotated[
        str,
        typer.Option(
            metavar="MODEL|YAML|FIELD",
            help="What is right: a reward model, {type: rules, rule: math}, a field of the rows, or synthetic.",
        ),
    ] = _DEFAULT_GOLD,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where scores, bon.json and a report go.")] = None,
    max_n: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="The largest n; default: what 95 % of rows have.")
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    from treeward.data.sources import read_rows
    from treeward.evaluation.best_of_n.analysis import SampledPrompt, analyse_several
    from treeward.evaluation.best_of_n.samples import by_field, fields_of, rate, sampled_rows

    first = next(sampled_rows(read_rows(data)))
    fields = fields_of(first)
    proxies = [_rater(text, "--proxy", fields, first.where, options) for text in proxy]
    right = _rater(gold, "--gold", fields, first.where, options)
    names = [one.name for one in proxies]
    if len({*names, right.name}) <= len(names):
        need, fix = "different ones", "{name: ..., model: ...} gives a model a name of its own"
        raise ConfigError(
            "two of the proxies and gold are the same", where="--proxy, --gold", got=[*names, right.name], need=need,
            fix=fix,
        )  # fmt: skip
    clusters = []
    for row in sampled_rows(read_rows(data)):  # an error in the last row comes before anything is loaded
        clusters.append((row.cluster, row.where))
        for name in (gold, *proxy):
            if name in fields:
                by_field(name)([row])
    folder = None if output is None else Path(output)
    with ShownProgress(unit="prompts") as progress:
        of_gold, *every = (
            rate(data, one, folder and folder / "scores", len(clusters), progress.show) for one in (right, *proxies)
        )
    scores = dict(zip(names, every, strict=True))
    failed = _tell_failures({"gold": of_gold, **({"proxy": every[0]} if len(names) == 1 else scores)})
    results = analyse_several(
        {
            name: [
                SampledPrompt([one.score for one in p], [one.score for one in g], *cluster)
                for p, g, cluster in zip(own, of_gold, clusters, strict=True)
            ]
            for name, own in scores.items()
        },
        max_n=max_n,
    )
    _show(results, right.name)
    if folder is not None:
        from treeward.evaluation.best_of_n.blocks import write

        logger.info("Wrote %s.", write(folder, results, right.name, data, scores, of_gold))
    return 1 if failed else 0


def _rater(text: str, option: str, fields: Sequence[str], where: str, options: ModelOptions) -> Any:
    """What a proxy or gold is: a field of the rows, a model, an environment, or the bundled world's gold quality."""
    from treeward.evaluation.best_of_n.samples import Rater, by_field, by_gold_quality, by_scorer
    from treeward.evaluation.session import scorer_identity

    section = parse_yaml(text, option) if text.lstrip().startswith("{") else None
    if text in fields:
        return Rater(text, lambda stack: (by_field(text), {"field": text}))
    if text == _SYNTHETIC:
        return Rater(text, lambda stack: (by_gold_quality, {"synthetic": True}))
    if text in _RULES:
        section = {"type": "rules", "rule": text}
    if section is not None and "type" in section:
        environment = section
        return Rater(
            text.strip(), lambda stack: (_by_environment(environment, option, stack), {"section": environment})
        )
    if section is None:
        if not Path(text).expanduser().exists() and ("/" not in text or text.startswith((".", "/", "~"))):
            near = nearest_name(text, [*fields, _SYNTHETIC, *_RULES])
            raise ConfigError(
                "this is no model, no environment and no field of the rows",
                where=option,
                got=text,
                need="a folder or hub name; {type: rules, rule: math}; synthetic; or a field with a number for each "
                f"completion ({where} has {', '.join(fields) or 'none'})",
                fix=f"did you mean {near}?" if near else None,
            )
        section = {"model": text, "name": text}
    if isinstance(section.get("ensemble"), str):
        section["ensemble"] = {"method": section["ensemble"]}
    model = load_section(ServedModelConfig, {**options.keys, "name": text.strip(), **section}, where=option)
    check_shaping(model, alone=True)

    def by_model(stack: ExitStack) -> Any:
        scorer = load_rewards(model, options.batch_tokens)
        return by_scorer(scorer), scorer_identity(scorer, model.members[0])

    return Rater(model.served_name, by_model)


def _by_environment(section: Mapping[str, Any], option: str, stack: ExitStack) -> Any:
    from treeward.environments.registry import make_environment
    from treeward.scoring.score import Score

    environment = make_environment("rules", section, where=option)
    stack.callback(environment.shutdown)

    def grade(rows: Sequence[Any]) -> list[list[Score]]:
        conversations = [conversation for row in rows for conversation in row.conversations]
        rewards = iter(environment.rewards(conversations, [row.info for row in rows for _ in row.conversations]))
        scores = (Score(reward.value, error=reward.error) for reward in rewards)
        return [[next(scores) for _ in row.conversations] for row in rows]

    return grade


def _tell_failures(scores: Mapping[str, Sequence[Sequence[Any]]]) -> int:
    """How many scores are missing, told by their reasons."""
    from treeward.evaluation.running import common_reasons

    reasons = [
        (f"{name}: {reason}", count)
        for name, rows in scores.items()
        for reason, count in common_reasons(Counter(one.error for row in rows for one in row if one.score is None))
    ]
    for reason, count in sorted(reasons, key=lambda pair: -pair[1])[:_MOST_REASONS]:
        logger.warning("%d samples are left out: %s", count, reason)
    if len(reasons) > _MOST_REASONS:
        logger.warning("Samples are left out for %d other reasons.", len(reasons) - _MOST_REASONS)
    return sum(count for _, count in reasons)


def _show(results: Mapping[str, Any], gold: str) -> None:
    from treeward.evaluation.best_of_n.blocks import legend, sentences, table

    write_table(*table(results))
    sys.stdout.write("\n".join(["", legend(gold), "", *sentences(results)]) + "\n")
    first = next(iter(results.values()))
    if fewer := first.counts["num_prompts_with_fewer_samples"]:
        logger.warning("%d prompts have fewer than %d scored samples and are left out.", fewer, first.max_n)
