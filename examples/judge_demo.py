"""A judge from nothing, on two cores: it is taught to write ratings, then learns by GRPO to write
the right ones.

python examples/judge_demo.py

The same comparisons train the quickstart's classifier and a small language model that answers with
a rating. `treeward eval` sets the classifier, the taught judge and the one that has learnt side by
side, on comparisons that none has seen. It may be run again: what is finished is not done again,
and a run that was stopped goes on.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from imitation import SMALL_POLICY
from teach_verdicts import teach

from treeward.cli.main import main
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_grpo_config
from treeward.data.tokenizers import train_tokenizer
from treeward.environments.preference_verdict import open_questions
from treeward.model.loading import build_policy
from treeward.tables import Column, results_table

CONFIGS = Path(__file__).parent / "configs"
RESULTS = Path("results/judge_demo")
TAUGHT, JUDGE, EVALUATION = RESULTS / "taught", RESULTS / "judge" / "final", RESULTS / "eval"
CLASSIFIER = Path("results/quickstart/final")
SPLITS = ("validation", "length_controlled")
TAUGHT_EPOCHS, EXAMPLES = 4, 200
SHORTER: list[str] = []
SHORTER_TRAINING: list[str] = []
"""Overrides of the judge's run, and of the classifier's, by which a test makes this a matter of
seconds."""
COLUMNS = [
    Column("set"),
    Column("judge"),
    Column("right", format=".3f"),
    Column("low", title="95 %, from", format=".3f"),
    Column("high", title="to", format=".3f"),
    Column("count", title="pairs", format="d"),
    Column("tokens", title="tokens read a pair", format=".0f"),
]


def run() -> int:
    config = load_grpo_config(CONFIGS / "judge_demo.yaml", SHORTER)
    train = ["train", "--config", str(CONFIGS / "quickstart.yaml"), *SHORTER_TRAINING]
    code = 0 if CLASSIFIER.is_dir() else main(train)
    code = (
        code
        or taught(config)
        or main(["grpo", "--config", str(CONFIGS / "judge_demo.yaml"), *SHORTER])
        or evaluate()
    )
    if code == 0:
        sys.stdout.write(
            f"\n{results_table(list(rows()), COLUMNS)}\n\nThe reports are in {EVALUATION}.\n"
        )
    return code


def taught(config: GRPORunConfig) -> int:
    """A policy that writes ratings: high ones for the better completion of a pair, low ones for the
    worse."""
    section = config.judged_by(config.data.train[0])
    assert section is not None
    if not TAUGHT.is_dir():
        questions = open_questions(config.data.train[0], section)
        tokenizer = train_tokenizer(
            (m["content"] for question in questions for m in question.messages), vocab_size=4096
        )
        teach(config, build_policy(SMALL_POLICY, tokenizer, seed=0), TAUGHT, epochs=TAUGHT_EPOCHS)
    return 0


def evaluate() -> int:
    """Classifier and judges on comparisons like those of training, and on those where length says
    nothing."""
    named = {"taught": TAUGHT, "learnt": JUDGE}
    judges = [
        f"{{type: judge, name: {name}, model: {folder}, use_logprobs: true, dtype: float32}}"
        for name, folder in named.items()
    ]
    for split in SPLITS:
        data = ["--dataset-name", "Bundled", "--split", split, "--limit", str(EXAMPLES)]
        if code := main(
            ["eval", str(CLASSIFIER), *judges, *data, "--output", str(EVALUATION / split)]
        ):
            return code
    return 0


def rows() -> Iterator[dict[str, object]]:
    """What each of them has right, and what a pair costs a judge."""
    for split in SPLITS:
        for result in json.loads((EVALUATION / split / "results.json").read_text("utf-8"))[
            "results"
        ]:
            headline, usage = result["headline"], result["details"].get("usage", {})
            pairs = headline["count"]
            yield {
                "set": split,
                "judge": result["model"],
                "right": headline["value"],
                **{key: headline[key] for key in ("low", "high", "count")},
                "tokens": usage["num_prompt_tokens"] / pairs if usage else None,
            }


if __name__ == "__main__":
    sys.exit(run())
