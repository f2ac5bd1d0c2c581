"""`treeward check-data`: what is wrong with preference data, before a model is trained on it.

examples:
  treeward check-data train.jsonl
  treeward check-data train.jsonl --tokenizer Qwen/Qwen3-0.6B --out results/data
  treeward check-data train.jsonl --validation val.jsonl --benchmark rewardbench=downloads/rewardbench
  treeward check-data --config run.yaml --out results/data

Findings come with the number, why it matters and what to do, the gravest first. The exit
code is 1 where rows are broken, or where `train` would keep no comparison. --out keeps every
number and the rows concerned.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeward.cli.comparisons import (
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
    from treeward.config.data import DatasetConfig
    from treeward.config.run import RewardModelRunConfig
    from treeward.data.preference import Preference
    from treeward.data.rendering import Renderer
    from treeward.data.table_files import UnchosenSplitError
    from treeward.evaluation.data_check.check import DataCheck

_MOST_ERRORS = 10
_Files = list[str] | None


def run(
    files: Annotated[_Files, typer.Argument(metavar="FILES", help="Comparisons, as training reads them.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A run: its data and tokenizer.")] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
    validation: Annotated[_Files, typer.Option(metavar="FILE", help="Look for its examples in the data.")] = None,
    benchmark: Annotated[_Files, typer.Option(metavar="NAME[=FOLDER]|FILE", help="Likewise, a suite of eval.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="Whose tokens count; else of its own.")] = None,
    out: Annotated[str | None, typer.Option("--out", "--output", metavar="DIR", help="For results.json.")] = None,
) -> int:
    folder = output_folder(out, "--out")
    loaded = None if config is None else load_config(config, [])
    if not files and dataset_name is None and loaded is None:
        raise ConfigError("there is nothing to check", where="FILES", need="FILES, --dataset-name or --config")

    from treeward.evaluation.data_check.check import check_data, open_sets, write_check

    def configured(path: str | None) -> DatasetConfig:
        return dataset_config(path, dataset_name, split, data_option)

    def choose_split(error: UnchosenSplitError) -> str:
        if loaded is None or error.where in (*(files or ()), *(validation or ())):
            return split_option(error)
        return f"{split_key(loaded.data)(error)}, a key of {config}"

    benchmarks = {text.partition("=")[0]: _benchmark(text) for text in benchmark or ()}
    named = [configured(path) for path in (*(files or ()), *([None] if dataset_name and not files else ()))]
    held_out = [*(configured(path) for path in validation or ()), *(loaded.validation_sets if loaded else ())]
    with choosing_split(choose_split), ShownProgress(unit="rows") as progress:
        streams = open_sets(named or (loaded.training_sets if loaded else ()))
        name, renderer = _renderer(tokenizer, loaded, streams)
        checked = check_data(
            streams,
            renderer,
            tokenizer=name,
            validation=open_sets(held_out),
            benchmarks=benchmarks,
            ties=loaded.data.ties if loaded else "drop",
            max_length=_max_length(loaded),
            on_progress=lambda what, done: progress.show(what, done, 0),
        )
    if checked.errors and not checked.numbers["rows"]:
        first = checked.errors[0]
        raise first.but(summary=f"no row can be read; the first: {first.summary}")
    _tell(checked)
    if folder is not None:
        sys.stdout.write(f"\nEvery number is in {write_check(folder, checked)}\n")
    return 1 if checked.errors or checked.refused else 0


def _max_length(loaded: RewardModelRunConfig | None) -> int | None:
    """The tokens beyond which the run leaves a completion out; None without a run, and for one that cuts or refuses."""
    if loaded is None or loaded.data.truncation != "drop":
        return None
    return loaded.max_sequence_length


def _renderer(name: str | None, loaded: RewardModelRunConfig | None, streams: Any) -> tuple[str, Renderer]:
    """The name of the tokenizer that counts, and its renderer, without a limit of the length."""
    from treeward.data.rendering import Renderer
    from treeward.evaluation.data_check.check import trained_renderer

    settings, trusted = dict[str, Any](), False
    if loaded is not None and name is None:
        policy = loaded.policy
        name = None if policy.trained_vocab_size else policy.tokenizer.name or policy.model_name
        settings = policy.tokenizer.rendering
        trusted = policy.trust_remote_code
    if name is None:
        estimated = "a tokenizer trained on the first texts (--tokenizer NAME counts those of a model)"
        return estimated, trained_renderer(streams, **settings)
    from treeward.model.pretrained import load_tokenizer  # it imports torch: seconds

    return name, Renderer(load_tokenizer(name, trust_remote_code=trusted), **settings)


def _benchmark(text: str) -> Sequence[Preference]:
    """The examples of a suite by its name, with its folder or without, or of a file of comparisons."""
    from treeward.evaluation.suites import SUITES, PreferenceSuite, get_suite

    name, _, folder = text.partition("=")
    if name in SUITES or (nearest_name(name, SUITES) and not Path(text).exists()):  # a misspelt one is an error there
        return get_suite(name).load(folder or None)
    return PreferenceSuite(text, dataset_config(text, None, None)).load()


def _tell(checked: DataCheck) -> None:
    from treeward.evaluation.data_check.check import summary_rows

    columns = [Column("what", ", ".join(checked.files)), Column("number"), Column("share", format="percent")]
    lines = [results_table(summary_rows(checked), columns), f"Tokens of {checked.tokenizer}.", ""]
    lines += [str(error) for error in checked.errors[:_MOST_ERRORS]]
    if (more := sum(one.count for one in checked.findings if one.name == "broken") - _MOST_ERRORS) > 0:
        lines.append(f"... and {more:,} more broken rows")
    lines += [f"`treeward train` refuses this: {error}" for error in checked.refused]
    if checked.findings:
        lines.append("Findings:")
    elif not checked.refused:
        lines.append("Nothing was found.")
    for finding in checked.findings:
        sentence = f"{finding.severity}: {finding.text}{finding.places} {finding.why} {finding.fix}"
        lines += textwrap.wrap(sentence, 118, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    sys.stdout.write("\n".join(lines) + "\n")
