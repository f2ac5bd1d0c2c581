r"""`treeward check-data`: what is wrong with preference data, before a model is trained on it.

examples:
  treeward check-data train.jsonl
  treeward check-data train.jsonl --tokenizer Qwen/Qwen3-0.6B --output results/data
  treeward check-data train.jsonl --validation val.jsonl \
      --benchmark rewardbench=downloads/rewardbench
  treeward check-data --config run.yaml --output results/data

Each finding says how often it occurs, why it matters and what to do. The gravest comes first. The
exit code is 1 if rows are broken, or if `train` would keep no comparison.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from treeward.cli.comparisons import (
    ChooseSplit,
    DataOptions,
    DatasetName,
    Split,
    choosing_split,
    dataset_config,
    split_key,
    split_option,
)
from treeward.cli.options import output_folder
from treeward.config.load import load_config
from treeward.errors import ConfigError, nearest_name
from treeward.progress import ShownProgress
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.config.data import DatasetConfig, Ties
    from treeward.config.run import RewardModelRunConfig
    from treeward.data.preference import Preference
    from treeward.data.rendering import Renderer
    from treeward.data.table_files import UnchosenSplitError
    from treeward.evaluation.data_check.check import DataCheck

_MOST_ERRORS = 10
"""Broken rows that are shown; the others are counted."""
_WIDTH = 118
"""Columns of a finding."""
_Files = list[str] | None


def run(
    files: Annotated[
        _Files,
        typer.Argument(metavar="FILES", help="Comparisons, in any format of docs/data.md."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The configuration of a run: check its data, with its tokenizer."
        ),
    ] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
    validation: Annotated[
        _Files,
        typer.Option(
            metavar="FILE", help="Validation data: find its examples that are in the data too."
        ),
    ] = None,
    benchmark: Annotated[
        _Files,
        typer.Option(
            metavar="NAME[=FOLDER]|FILE",
            help="A benchmark: find its examples that are in the data too.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Count tokens with this tokenizer; default: one trained on the data.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--output",
            "--out",
            metavar="DIR",
            help="The folder for results.json: every number, with the rows concerned.",
        ),
    ] = None,
) -> int:
    folder = output_folder(out)
    loaded = None if config is None else load_config(config, [])
    if not files and dataset_name is None and loaded is None:
        need = "FILES, --dataset-name or --config"
        raise ConfigError("there is nothing to check", where="FILES", need=need)

    # Imports that take seconds come after the checks of the options.
    from treeward.evaluation.data_check.check import check_data, open_sets, write_check

    def configured(path: str | None) -> DatasetConfig:
        return dataset_config(path, dataset_name, split, data_option)

    benchmarks = _benchmarks(benchmark or ())
    paths: list[str | None] = [*(files or [])]
    if not paths and dataset_name is not None:
        paths = [None]  # a dataset that brings its own data
    data = _Data(
        training=[configured(path) for path in paths],
        held_out=[configured(path) for path in validation or ()],
    )
    choose_split: ChooseSplit = split_option
    if config is not None and loaded is not None:
        data = _with_data_of(loaded, data)
        choose_split = _split_of_run([*(files or []), *(validation or [])], loaded, config)
    with choosing_split(choose_split), ShownProgress(unit="rows") as progress:
        streams = open_sets(data.training)
        name, renderer = _renderer(tokenizer, loaded, streams)
        checked = check_data(
            streams,
            renderer,
            tokenizer=name,
            validation=open_sets(data.held_out),
            benchmarks=benchmarks,
            ties=data.ties,
            max_length=data.max_length,
            on_progress=lambda what, done: progress.show(what, done, 0),
        )
    # Without a row there is nothing to report on.
    if checked.errors and not checked.numbers["rows"]:
        first = checked.errors[0]
        raise first.but(summary=f"no row can be read; the first: {first.summary}")
    _tell(checked)
    if folder is not None:
        sys.stdout.write(f"\nEvery number is in {write_check(folder, checked)}\n")
    return 1 if checked.errors or checked.refused else 0


class _Data(NamedTuple):
    """The data sets, and what a run makes of their comparisons: `max_length`, in tokens, beyond
    which one is left out; None for no limit."""

    training: Sequence[DatasetConfig]
    held_out: Sequence[DatasetConfig]
    ties: Ties = "drop"
    max_length: int | None = None


def _with_data_of(run: RewardModelRunConfig, data: _Data) -> _Data:
    """The named data as the run would read it, with the run's own."""
    max_length = None
    # A run that cuts long completions, or refuses them, leaves none out.
    if run.data.truncation == "drop":
        max_length = run.max_sequence_length
    return _Data(
        # Data that is named goes before the run's; validation data is added to it.
        training=data.training or run.training_sets,
        held_out=[*data.held_out, *run.validation_sets],
        ties=run.data.ties,
        max_length=max_length,
    )


def _split_of_run(named: Sequence[str], run: RewardModelRunConfig, file: str) -> ChooseSplit:
    """The words that choose a split: an option for the `named` data, and else a key of the run's
    file."""

    def choose(error: UnchosenSplitError) -> str:
        if error.where in named:
            return split_option(error)
        return f"{split_key(run.data)(error)}, a key of {file}"

    return choose


def _renderer(
    name: str | None,
    loaded: RewardModelRunConfig | None,
    streams: Any,
) -> tuple[str, Renderer]:
    """The name of the tokenizer that counts, and its renderer, without a limit of the length."""
    from treeward.data.rendering import Renderer
    from treeward.evaluation.data_check.check import trained_renderer

    settings: dict[str, Any] = {}
    trusted = False
    if loaded is not None and name is None:
        policy = loaded.policy
        settings = policy.tokenizer.rendering
        trusted = policy.trust_remote_code
        # A run that trains its tokenizer has none yet.
        if not policy.trained_vocab_size:
            name = policy.tokenizer.name or policy.model_name
    if name is None:
        estimated = "a tokenizer trained on the first texts"
        advice = "--tokenizer NAME counts those of a model"
        return f"{estimated} ({advice})", trained_renderer(streams, **settings)
    # It imports torch, which takes seconds.
    from treeward.model.pretrained import load_tokenizer

    tokenizer = load_tokenizer(name, trust_remote_code=trusted)
    return name, Renderer(tokenizer, **settings)


def _benchmarks(texts: Sequence[str]) -> dict[str, Sequence[Preference]]:
    """The examples of each benchmark, by its name."""
    names = [text.partition("=")[0] for text in texts]
    if len(set(names)) < len(names):
        raise ConfigError(
            "two benchmarks have one name",
            where="--benchmark",
            got=names,
            fix="check them one after the other",
        )
    return dict(zip(names, map(_benchmark, texts), strict=True))


def _benchmark(text: str) -> Sequence[Preference]:
    """The examples of a suite by its name, with its folder or without, or of a file of
    comparisons.
    """
    from treeward.evaluation.suites import SUITES, PreferenceSuite, get_suite

    name, _, folder = text.partition("=")
    # `get_suite` has the error for a misspelt name.
    is_misspelt = nearest_name(name, SUITES) is not None and not Path(text).exists()
    if name in SUITES or is_misspelt:
        return get_suite(name).load(folder or None)
    return PreferenceSuite(text, dataset_config(text, None, None)).load()


def _tell(checked: DataCheck) -> None:
    """Write the numbers, the broken rows and the findings."""
    from treeward.evaluation.data_check.check import summary_rows

    columns = [
        Column("what", ", ".join(checked.files)),
        Column("number"),
        Column("share", format="percent"),
    ]
    table = results_table(summary_rows(checked), columns)
    lines = [table, f"Tokens of {checked.tokenizer}.", ""]
    lines += [str(error) for error in checked.errors[:_MOST_ERRORS]]
    num_broken = sum(one.count for one in checked.findings if one.name == "broken")
    if num_broken > _MOST_ERRORS:
        lines.append(f"... and {num_broken - _MOST_ERRORS:,} more broken rows")
    for error in checked.refused:
        lines.append(f"`treeward train` refuses this: {error}")
    if checked.findings:
        lines.append("Findings:")
    elif not checked.refused:
        lines.append("Nothing was found.")
    for finding in checked.findings:
        sentence = f"{finding.severity}: {finding.text}{finding.places} {finding.why} {finding.fix}"
        # Neither paths nor names of columns are torn apart, which one may want to copy.
        lines += textwrap.wrap(
            sentence,
            _WIDTH,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    sys.stdout.write("\n".join(lines) + "\n")
