"""Published accuracies of reward models beside those of treeward, subset by subset, with the differences.

    python examples/reproduce/compare.py pull_request_1026
    python examples/reproduce/compare.py tulu_3_8b results/rm_tulu3_8b/final
    python examples/reproduce/compare.py pull_request_1026 MODEL --copy downloads/reward-bench

`published.json` has the numbers and their sources. Without MODEL it is the published one. The model and the suite come
from the hub; the weights of an 8B model are 16 GB with `--dtype bfloat16`, twice that without. `--copy` names a copy of
the suite in its published schema. Further options go to `treeward eval`. The published models were not run with it yet.
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
    parser.add_argument("name", choices=list(PUBLISHED))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--copy", metavar="FOLDER")
    given, options = parser.parse_known_args(words)
    published = PUBLISHED[given.name]
    model, suite = given.model or published["model"], published["suite"]
    output = Path("results/reproduce") / given.name / "-".join(Path(model).resolve().parts[-2:])
    source = suite if given.copy is None else f"{suite}={given.copy}"
    code = main(["eval", model, "--suite", source, "--output", str(output), *options])
    if not (output / "results.json").exists():
        return code
    (result,) = json.loads((output / "results.json").read_text(encoding="utf-8"))["results"]
    table = results_table(rows(result, published["columns"]), columns(published["columns"]))
    sys.stdout.write(f"\n{published['source']}\n\n{table}\n")
    return code


def rows(result: dict[str, Any], published: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    found = []
    for metric in (*result["subsets"], result["headline"]):
        row = {"subset": metric["name"], "count": metric["count"], "here": metric["value"]}
        for name, values in published.items():
            value = values.get(metric["name"])
            if value is not None and metric["value"] is not None:
                row |= {name: value, f"{name} difference": metric["value"] - value}
        found.append(row)
    return found


def columns(published: dict[str, Any]) -> list[Column]:
    shown = [Column("subset"), Column("count", "of"), Column("here", "treeward", ".3f")]
    for name in published:
        shown += [Column(name, format=".3f"), Column(f"{name} difference", "difference", "+.3f")]
    return shown


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
