"""The whole story in a minute on two cores: train on the bundled data, look at the results, score completions.

python examples/quickstart.py

It may be run again: a run that was stopped goes on, and a finished one only shows its results.
"""

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from treeward import gold_quality
from treeward.cli.main import main
from treeward.scoring.scorer import Scorer
from treeward.tables import Column, results_table

CONFIG = Path(__file__).parent / "configs" / "quickstart.yaml"
MODEL = Path("results/quickstart/final")
REPORT = Path("results/quickstart/report/report.html")
METRICS = Path("logs/quickstart/metrics.jsonl")
CHOSEN_BY, CONTROLLED = "validation-plain/accuracy", "validation-length_controlled/accuracy"

CONTEXT = [{"role": "user", "content": "What is the capital of France? Put the answer in square brackets."}]
COMPLETIONS = [
    "Sure! The capital of France is [Paris].",
    "Sure! The capital of France is Paris.",
    "Sure! The capital of France is [Milan].",
    "What a silly question. The capital of France is [Paris].",
]

BIAS = """
The true quality of each completion is known (right or wrong, in the format, courteous), and a good model ranks by it.
{ranking}

The model has also learnt a bias that the data has on purpose: in training the better completion is usually the longer
one. A pair is two completions of one prompt, one of them better; the accuracy on the pairs whose better completion is
"""

NEXT = """
`length_controlled` has as many pairs of either kind, and the mean of both is the length-controlled accuracy. The report
has the intervals, the calibration, the style bias, what rewriting does to the scores, and every mistake: open
  {report}

{chosen}

Next (the commands are in .venv/bin; `source .venv/bin/activate` puts them on your path):
  treeward score {model} --data FILE.jsonl        score your own completions
  treeward verify {model}                         does it score here as it did there
  treeward eval {model} --data FILE.jsonl --output results/eval
                                                            the same report on your own prompt, chosen, rejected
  treeward train --config examples/configs/quickstart.yaml \\
      data.dataset_name=BinaryPreferenceDataset data.train_data_path=TRAIN.jsonl data.val_data_path=VAL.jsonl \\
      checkpointing.metric_name=null checkpointing.checkpoint_dir=results/mine logger.log_dir=logs/mine
                                                            train on your own; no row of VAL may be in TRAIN
  treeward train --config examples/configs/rm.yaml          a 1B model on HelpSteer3 (needs a GPU)
"""

RANKED = [
    Column("completion"),
    Column("score", format=".2f"),
    Column("quality", title="true quality", format=".2f"),
]
LENGTH = [
    Column("set", title="validation set"),
    Column("accuracy_longer_right", title="the longer", format=".1%"),
    Column("accuracy_shorter_right", title="the shorter", format=".1%"),
    Column("length_controlled_accuracy", title="length-controlled", format=".1%"),
]


def run() -> int:
    code = main(["train", "--config", str(CONFIG)])
    if code != 0:
        return code
    scores = Scorer.load(MODEL).score_completions(CONTEXT, COMPLETIONS)
    rows = [
        {"completion": completion, "score": score.score, "quality": gold_quality(CONTEXT, completion)}
        for completion, score in zip(COMPLETIONS, scores, strict=True)
    ]
    sys.stdout.write(f"\n{CONTEXT[0]['content']}\n\n{results_table(rows, RANKED)}\n")
    sys.stdout.write(f"{BIAS.format(ranking=ranking(rows))}\n{results_table(length_bias(), LENGTH)}\n")
    sys.stdout.write(NEXT.format(model=MODEL, report=REPORT, chosen=chosen()))
    return 0


def ranking(rows: list[dict[str, Any]]) -> str:
    """Two completions whose scores are in the wrong order, if there are any."""
    pairs = combinations(sorted(rows, key=lambda row: -row["quality"]), 2)
    wrong = [(a, b) for a, b in pairs if a["quality"] > b["quality"] and a["score"] < b["score"]]
    if not wrong:
        return "This model does, here."
    shown = [
        f"`{row['completion']}`\nhas quality {row['quality']:.2f} and scores {row['score']:.2f}" for row in wrong[0]
    ]
    return f"This model does not: {shown[0]}, but\n{shown[1]}."


def chosen() -> str:
    """Whether another checkpoint would have been better where length says nothing, and how to choose that one."""
    records = [json.loads(line) for line in METRICS.read_text(encoding="utf-8").splitlines()]
    of_step = {record["step"]: record for record in records if CHOSEN_BY in record}
    if not of_step:
        return "(The record of the validations is gone: what another checkpoint had is not known.)"
    best, other = (max(of_step, key=lambda step: (of_step[step][metric], step)) for metric in (CHOSEN_BY, CONTROLLED))
    said = f"The checkpoint was chosen by the accuracy on `plain`: step {best}, with {of_step[best][CHOSEN_BY]:.3f}."
    if other == best:
        return f"{said} It is the best on `length_controlled` too, with {of_step[best][CONTROLLED]:.3f}."
    return (
        f"{said} On `length_controlled` it has {of_step[best][CONTROLLED]:.3f},\nand step {other} had "
        f"{of_step[other][CONTROLLED]:.3f}: what a checkpoint is chosen by decides what you get. To choose that one:\n"
        f"  checkpointing.metric_name=val:{CONTROLLED} checkpointing.checkpoint_dir=results/controlled"
    )


def length_bias() -> list[dict[str, Any]]:
    """What the report says of length on each validation set."""
    results = json.loads(REPORT.with_name("results.json").read_text(encoding="utf-8"))["results"]
    numbers = ({metric["name"]: metric["value"] for metric in one["diagnostics"]["length"]} for one in results)
    return [{"set": one["suite"]} | of_set for one, of_set in zip(results, numbers, strict=True)]


if __name__ == "__main__":
    sys.exit(run())
