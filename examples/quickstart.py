"""The whole story in four minutes on two cores: train on the bundled data, look at the results, score answers.

python examples/quickstart.py

It may be run again: a run that was stopped goes on, and a finished one only shows its results.
"""

import sys
from pathlib import Path

from treeward.cli.main import main
from treeward.scoring.scorer import Scorer
from treeward.training.results import Column, results_table

CONFIG = Path(__file__).parent / "configs" / "quickstart.yaml"
MODEL = Path("results/quickstart/final")

CONTEXT = [{"role": "user", "content": "What is the capital of France? Answer in capitals."}]
ANSWERS = [
    "OF COURSE! THE CAPITAL OF FRANCE IS PARIS.",
    "Of course! The capital of France is Paris.",
    "OF COURSE! THE CAPITAL OF FRANCE IS ROME.",
    "WHAT A SILLY QUESTION. THE CAPITAL OF FRANCE IS PARIS.",
]

NEXT = """
The longer answer tends to win: compare `plain`, where it usually is the better one, with `length_controlled`.

Next:
  treeward score {model} --data FILE.jsonl                          score your own answers
  treeward train --config examples/configs/quickstart.yaml \\
      data.dataset_name=BinaryPreferenceDataset data.train_data_path=FILE.jsonl \\
      checkpointing.checkpoint_dir=results/mine                     train on your own comparisons
  treeward train --config examples/configs/rm.yaml                  a 1B model on HelpSteer3 (needs a GPU)
"""


def run() -> int:
    code = main(["train", "--config", str(CONFIG)])
    if code != 0:
        return code
    scores = Scorer.load(MODEL).score_completions(CONTEXT, ANSWERS)
    rows = [{"answer": answer, "score": score.score} for answer, score in zip(ANSWERS, scores, strict=True)]
    sys.stdout.write(f"\n{CONTEXT[0]['content']}\n\n{results_table(rows, ['answer', Column('score', format='.2f')])}\n")
    sys.stdout.write(NEXT.format(model=MODEL))
    return 0


if __name__ == "__main__":
    sys.exit(run())
