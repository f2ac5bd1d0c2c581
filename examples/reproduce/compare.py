"""Accuracies of a model on RewardBench's subsets beside the published ones, with the differences.

    python examples/reproduce/compare.py --dtype bfloat16
    python examples/reproduce/compare.py --model results/rm/final --copy downloads/reward-bench

`published.json` has the numbers of NeMo RL's pull request 1026, whose model is the default. It and the suite come from
the hub: 16 GB in bfloat16, twice that without the option. `--copy` names a copy of the suite in its published schema.
Further options go to `treeward eval`. The published model has not been run with it yet.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from treeward.cli.main import main
from treeward.tables import Column, results_table

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PUBLISHED["model"])
    parser.add_argument("--copy", metavar="FOLDER")
    parser.add_argument("--output", metavar="FOLDER", default="results/reproduce")
    given, options = parser.parse_known_args(words)
    source = "rewardbench" if given.copy is None else f"rewardbench={given.copy}"
    code = main(["eval", given.model, "--suite", source, "--output", given.output, *options])
    if code not in (0, 1):  # 1: a few examples have no score
        return code
    (result,) = json.loads((Path(given.output) / "results.json").read_text(encoding="utf-8"))["results"]
    columns = [Column("subset"), Column("count", "of"), Column("here", "treeward", ".3f")]
    for name in PUBLISHED["columns"]:
        columns += [Column(name, format=".3f"), Column(f"{name} difference", "difference", "+.3f")]
    sys.stdout.write(f"\n{PUBLISHED['source']}\n\n{results_table([row(one) for one in result['subsets']], columns)}\n")
    return code


def row(metric: dict[str, Any]) -> dict[str, Any]:
    name, here = metric["name"], metric["value"]
    found = {"subset": name, "count": metric["count"], "here": here}
    for column, values in PUBLISHED["columns"].items():
        found |= {column: values[name], f"{column} difference": None if here is None else here - values[name]}
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
