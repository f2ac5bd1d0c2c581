r"""`treeward bon`: what best-of-n by a proxy does to gold, from samples of a file.

examples:
  treeward bon --proxy results/quickstart/final --gold other/model --data samples.jsonl \
      --output results/bon
  treeward bon --proxy MODEL --gold "{type: rules, rule: math}" --data samples.jsonl
  treeward bon --proxy scores --gold gold_scores --data samples.jsonl
  treeward bon --proxy "{models: [A, B], ensemble: worst}" --gold OTHER --data samples.jsonl

A row has a `prompt`, with N samples as `responses` or `completions`. Proxy and gold are each a
reward model, a column of the rows with a number for each sample, or an environment as
{type: ..., ...}. To resume, type the same command with its --output again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeward.cli.comparisons import DataOptions, choosing_split, dataset_config, split_data_option
from treeward.cli.options import (
    ModelOptions,
    candidate,
    model_section,
    output_folder,
    with_model_options,
)
from treeward.config.data import DatasetConfig
from treeward.errors import ConfigError, nearest_name
from treeward.progress import ShownProgress
from treeward.tables import results_table

if TYPE_CHECKING:
    from treeward.data.preference import Preference
    from treeward.evaluation.best_of_n.analysis import BestOfN
    from treeward.evaluation.session import Candidate

logger = logging.getLogger(__name__)


@with_model_options
def run(
    proxy: Annotated[
        str,
        typer.Option(metavar="MODEL|YAML|FIELD", help="The reward that chooses the best sample."),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Rows with N samples each: jsonl, json, csv, tsv, parquet or arrow.",
        ),
    ],
    gold: Annotated[
        str,
        typer.Option(
            metavar="MODEL|YAML|FIELD",
            help="The gold reward, which says how good the chosen sample is.",
        ),
    ] = "gold_scores",
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The folder for the report, bon.json and the scores."),
    ] = None,
    data_option: DataOptions = None,
    max_n: Annotated[
        int | None,
        typer.Option(
            min=2, help="The largest n; default: the number of samples that 95 % of the rows have."
        ),
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    # Before hours of scoring.
    folder = output_folder(output)

    # Imports that take seconds come after the checks of the options.
    from treeward.data.sources import read_rows
    from treeward.evaluation.best_of_n.analysis import analyse
    from treeward.evaluation.best_of_n.bon_page import LEGEND, table, write
    from treeward.evaluation.best_of_n.samples import sampled_rows, scores_of

    columns = dataset_config(data, None, None, data_option)
    with choosing_split(split_data_option):
        rows = read_rows(data, split=columns.split, subset=columns.subset)
    # A list, so that an error in the last row comes before any model is loaded.
    samples = list(sampled_rows(rows, columns))
    examples = [row.example for row in samples]
    fields = list(samples[0].fields)
    scores: dict[str, Sequence[Sequence[float | None]]] = {}
    candidates: dict[str, Candidate] = {}
    # What a report calls them.
    names: dict[str, str] = {}
    for role, text in {"gold": gold, "proxy": proxy}.items():
        if text in fields:
            scores[role] = scores_of(samples, text)
            names[role] = text
        else:
            candidates[role] = _candidate(text, f"--{role}", fields, options)
            names[role] = candidates[role].name
    # A curve of a model against itself says nothing, and their files would have one name.
    if names["proxy"] == names["gold"]:
        raise ConfigError(
            "proxy and gold are the same",
            where="--proxy, --gold",
            got=names["gold"],
            need="different ones: {name: ..., model: ...} gives a model a name of its own",
        )
    if candidates:
        identity = _data_identity(data, columns, data_option or ())
        with ShownProgress(unit="prompts") as progress:
            for role, model in candidates.items():
                scores[role] = _score(model, examples, identity, folder, progress)
    prompts = [example.prompt_key for example in examples]
    result = analyse(scores["proxy"], scores["gold"], prompts, max_n=max_n)
    sys.stdout.write(f"{results_table(*table(result))}\n\n{LEGEND}\n\n{result.sentence}\n")
    _warn_of_left_out(result, names)
    if folder is not None:
        report = write(folder, result, names["proxy"], names["gold"], data)
        logger.info("Wrote %s.", report)
    is_complete = not any(result.counts[f"num_without_{role}"] for role in names)
    return 0 if is_complete else 1


def _candidate(text: str, option: str, fields: Iterable[str], options: ModelOptions) -> Candidate:
    """A model or an environment, named or as a section."""
    is_section = text.lstrip().startswith("{")
    # A hub name has a slash, and a path may begin with one.
    may_be_on_hub = "/" in text and not text.startswith((".", "/", "~"))
    if not is_section and not may_be_on_hub and not Path(text).expanduser().exists():
        near = nearest_name(text, fields)
        names = ", ".join(fields) or "(none)"
        raise ConfigError(
            "the reward is not a model, not an environment and not a column of the rows",
            where=option,
            got=text,
            need=f"a folder or hub name; {{type: ...}}; or one of the columns {names}",
            fix=None if near is None else f"did you mean {near}?",
        )
    return candidate(model_section(text, option), option, options)


def _data_identity(data: str, columns: DatasetConfig, data_option: Sequence[str]) -> dict[str, str]:
    """What kept rows depend on beside the model: the rows, and which of their columns are read."""
    from treeward.data.sources import fingerprint

    identity = {"data": fingerprint(data, split=columns.split, subset=columns.subset)}
    if data_option:
        identity["data_option"] = " ".join(sorted(data_option))
    return identity


def _score(
    model: Candidate,
    examples: Sequence[Preference],
    data_identity: Mapping[str, str],
    folder: Path | None,
    progress: ShownProgress,
) -> list[Sequence[float | None]]:
    """The scores of all samples; those that `folder` keeps are not asked for again."""
    from treeward.evaluation.findings import usage_finding
    from treeward.evaluation.results import judge_usage
    from treeward.evaluation.session import score_rows

    scorer, identity = model.load()
    path = None
    if folder is not None:
        path = folder / model.name / "examples.jsonl"
    # Kept rows are those of the same model and the same data.
    identity = {**identity, **data_identity}
    scored = score_rows(scorer, examples, model.name, path, identity, progress.show)
    usage = usage_finding(judge_usage(scorer, scored))
    if usage:
        logger.info("%s: %s", model.name, usage)
    return [row.scores for row in scored]


def _warn_of_left_out(result: BestOfN, names: Mapping[str, str]) -> None:
    """Say which samples and prompts are in no curve: a sample without a score is never a 0.

    `names`: of proxy and gold.
    """
    for role, name in names.items():
        count = result.counts[f"num_without_{role}"]
        if count > 0:
            logger.warning("%d samples have no score of %s and are left out.", count, name)
    fewer = result.counts["num_prompts_with_fewer_samples"]
    if fewer > 0:
        message = "%d prompts have fewer than %d scored samples and are left out."
        logger.warning(message, fewer, result.max_n)
