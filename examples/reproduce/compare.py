"""Accuracies of a model on the subsets of a suite beside published ones, with the differences.

    python examples/reproduce/compare.py --dtype bfloat16                       # NeMo RL's pull request 1026
    python examples/reproduce/compare.py --suite rewardbench2                   # open-instruct, beside the Tulu 3 run
    python examples/reproduce/compare.py --model results/rm/final --copy downloads/reward-bench

`published.json` has the numbers, their sources and the model that is taken without `--model`. That
of the pull request and the suites come from the hub: 16 GB in bfloat16, twice that without the
option. `--copy` names a copy of the suite in its published schema. Further options go to `treeward
eval`. No 8B model has been run with it yet.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=list(PUBLISHED), default="rewardbench")
    parser.add_argument("--model")
    parser.add_argument("--copy", metavar="FOLDER")
    parser.add_argument("--output", metavar="FOLDER", default="results/reproduce")
    given, options = parser.parse_known_args(words)
    published = PUBLISHED[given.suite]
    source = given.suite if given.copy is None else f"{given.suite}={given.copy}"
    model = given.model or published["model"]
    code = main(["eval", model, "--suite", source, "--output", given.output, *options])
    if code not in (0, 1):  # 1: a few examples have no score
        return code
    (result,) = json.loads((Path(given.output) / "results.json").read_text(encoding="utf-8"))[
        "results"
    ]
    columns = [Column("subset"), Column("count", "of"), Column("here", "treeward", ".3f")]
    for name in published["columns"]:
        columns += [Column(name, format=".3f"), Column(f"{name} difference", "difference", "+.3f")]
    rows = [row(one, published["columns"]) for one in (*result["subsets"], result["headline"])]
    sys.stdout.write(f"\n{published['source']}\n\n{results_table(rows, columns)}\n")
    return code


def row(metric: dict[str, Any], published: dict[str, dict[str, float]]) -> dict[str, Any]:
    name, here = metric["name"], metric["value"]
    found = {"subset": name, "count": metric["count"], "here": here}
    for column, values in published.items():
        theirs = values.get(name)
        found |= {
            column: theirs,
            f"{column} difference": None if None in (here, theirs) else here - theirs,
        }
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
