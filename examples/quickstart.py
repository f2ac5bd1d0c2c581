"""The whole story on two cores: train on the bundled data, look at the results, score completions.

python examples/quickstart.py

It may be run again: a run that was stopped goes on, and a finished one only shows its results.
"""

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from gold import gold_quality

from treeward.cli.main import main
from treeward.data.bundled import bundled_path
from treeward.scoring.scorer import Scorer
from treeward.tables import Column, results_table

CONFIG = Path(__file__).parent / "configs" / "quickstart.yaml"
MODEL = Path("results/quickstart/final")
REPORT = Path("results/quickstart/report/report.html")

CONTEXT = [
    {"role": "user", "content": "What is the capital of France? Put the answer in square brackets."}
]
COMPLETIONS = [
    "Sure! The capital of France is [Paris].",
    "Sure! The capital of France is Paris.",
    "Sure! The capital of France is [Milan].",
    "What a silly question. The capital of France is [Paris].",
]

LEARNT = """
The true quality of these completions is known (right or wrong, in the format, courteous): of the {pairs} pairs among
them the model has {right} in its order. In the data of the report it is correct this often where the better completion
is the longer one, and where it is the shorter:

{length}

What it has learnt: to tell good completions from bad ones, and a bias, which the data has on purpose: there the better
one is usually the longer. How large it is, with intervals, and every mistake:  {report}

Next, score completions of your own:
  echo '{row}' | {treeward} score {model} --data -
"""
ROW = """{"prompt": "What is 7 plus 5?", "responses": ["7 plus 5 is 12.", "7 plus 5 is 13."]}"""

RANKED = [
    Column("completion"),
    Column("score", format="number"),
    Column("quality", title="true quality", format="number"),
]
LENGTH = [
    Column("set"),
    Column("accuracy_longer_right", title="the longer", format="percent"),
    Column("accuracy_shorter_right", title="the shorter", format="percent"),
    Column("length_controlled_accuracy", title="length-controlled", format="percent"),
]


def run() -> int:
    evaluate = ["eval", str(MODEL), "--perturbations", "50", "--output", str(REPORT.parent)]
    for split in ("validation", "length_controlled"):
        evaluate += ["--data", str(bundled_path(split))]
    code = main(["train", "--config", str(CONFIG)])
    code = code or main(evaluate)
    if code != 0:
        return code
    scores = Scorer.load(MODEL).score_completions(CONTEXT, COMPLETIONS)
    rows: list[dict[str, Any]] = [
        {
            "completion": completion,
            "score": score.score,
            "quality": gold_quality(CONTEXT, completion),
        }
        for completion, score in zip(COMPLETIONS, scores, strict=True)
    ]
    sys.stdout.write(f"\n{CONTEXT[0]['content']}\n\n{results_table(rows, RANKED)}\n")
    pairs = [(a, b) for a, b in combinations(rows, 2) if a["quality"] != b["quality"]]
    right = sum((a["quality"] > b["quality"]) == (a["score"] > b["score"]) for a, b in pairs)
    told = {"pairs": len(pairs), "right": right, "length": results_table(length_bias(), LENGTH)}
    command = Path(sys.executable).with_name("treeward")
    command = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    sys.stdout.write(LEARNT.format(**told, report=REPORT, model=MODEL, row=ROW, treeward=command))
    return 0


def length_bias() -> list[dict[str, Any]]:
    """What the report says of length on each set."""
    results = json.loads(REPORT.with_name("results.json").read_text(encoding="utf-8"))["results"]
    numbers = (
        {metric["name"]: metric["value"] for metric in one["diagnostics"]["length"]}
        for one in results
    )
    return [{"set": one["suite"]} | of_set for one, of_set in zip(results, numbers, strict=True)]


if __name__ == "__main__":
    sys.exit(run())
