"""A real reward model on two cores: SmolLM2-135M-Instruct learns what people preferred, in forty
minutes.

python examples/real_demo.py

The model comes from the hub (or PyPI: `real_models.py`). The comparisons are Anthropic/hh-rlhf,
harmless-base: from the hub, or from the folder TREEWARD_SHARED_DATA, which then has `hh_harmless`
and `llmbar`. It may be run again: a run that was stopped goes on, and what is finished is only
shown.

Two models are trained: a head on the frozen model, which shows what the language model knew
already, and the whole model. Both are judged on 300 comparisons that neither has seen and on
LLMBar, beside a rule that counts characters.
"""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from real_models import say, smollm2

from treeward.cli.main import main
from treeward.data.conversation import last_text
from treeward.data.sources import read_rows
from treeward.data.transcripts import from_transcripts
from treeward.evaluation.comparison import read_evaluation
from treeward.evaluation.statistics import wilson
from treeward.tables import Column, results_table

CONFIG = Path(__file__).parent / "configs" / "real_demo.yaml"
RESULTS, LOGS = Path("results/real_demo"), Path("logs/real_demo")
DATA, EVALUATION = RESULTS / "data", RESULTS / "eval"
WHOLE, FROZEN = RESULTS / "model", RESULTS / "frozen"
HUB_NAME, HUB_FILE = "Anthropic/hh-rlhf", "harmless-base/{}.jsonl.gz"
SIZES = {"train": 1_700, "validation": 300}
NUM_PROMPTS = {"train": 400, "validation": 24}
LONGEST_PROMPT = 600  # characters
NEEDED = (
    "set TREEWARD_SHARED_DATA to a folder with hh_harmless/train.jsonl.gz, hh_harmless/validation.jsonl.gz and "
    "llmbar/natural.jsonl.gz."
)
SHORTER: list[str] = []
"""Overrides by which a test makes this a matter of seconds."""

HEAD_ONLY = [
    "policy.reward_model_cfg.freeze_backbone=true",
    "policy.optimizer.kwargs.lr=1.0e-3",
    "rm.max_num_epochs=5",
    "rm.val_at_end=false",
    f"checkpointing.checkpoint_dir={FROZEN}",
    f"logger.log_dir={LOGS}/frozen",
]
MODELS = {"real_demo": "SmolLM2, all weights", "frozen": "SmolLM2, head on the frozen model"}
COLUMNS = [
    Column("set"),
    Column("judge"),
    Column("right", format=".3f"),
    Column("low", title="95 %, from", format=".3f"),
    Column("high", title="to", format=".3f"),
    Column("count", title="pairs", format="d"),
]
NEXT = """
The report, with its biases and its mistakes:  {report}

Next, optimise SmolLM2 itself against this reward model, a quarter of an hour:
  treeward grpo --config grpo_real_demo
"""


def run() -> int:
    llmbar = prepare_data()
    if not llmbar:
        return 1
    base = [
        "train",
        "--config",
        str(CONFIG),
        f"policy.model_name={smollm2(Path('.models'))}",
        *SHORTER,
    ]
    evaluate = [
        "eval",
        f"{WHOLE}/final",
        f"{FROZEN}/final",
        "--data",
        str(DATA / "validation.jsonl"),
    ]
    for command in (
        [*base, *HEAD_ONLY],
        base,
        ["verify", f"{WHOLE}/final"],
        [*evaluate, *llmbar, "--perturbations", "20", "--output", str(EVALUATION)],
    ):
        code = main(command)
        if code != 0:
            return code
    sys.stdout.write(f"\n{results_table(list(rows()), COLUMNS)}\n")
    sys.stdout.write(NEXT.format(report=EVALUATION / "report.html"))
    return 0


def prepare_data() -> list[str]:
    """Write the comparisons and the prompts for `grpo`; returns the options of `eval` for LLMBar,
    none without data."""
    folder = os.environ.get("TREEWARD_SHARED_DATA")
    files = {split: Path(folder or "") / "hh_harmless" / f"{split}.jsonl.gz" for split in SIZES}
    natural = Path(folder or "") / "llmbar" / "natural.jsonl.gz"
    if folder is None:
        try:
            for split, name in (("train", "train"), ("validation", "test")):
                files[split] = Path(
                    hf_hub_download(HUB_NAME, HUB_FILE.format(name), repo_type="dataset")
                )
        except (
            Exception
        ) as error:  # no network, a proxy, no such host: the library's errors are of many kinds
            say(f"{HUB_NAME} cannot be had from the hub ({type(error).__name__}): {NEEDED}")
            return []
    elif missing := [str(file) for file in (*files.values(), natural) if not file.exists()]:
        say(f"There is no {' and no '.join(missing)}: {NEEDED}")
        return []
    DATA.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        with gzip.open(files[split], "rt", encoding="utf-8") as stream:
            (DATA / f"{split}.jsonl").write_text("".join(islice(stream, count)), encoding="utf-8")
        lines = [
            json.dumps({"messages": prompt})
            for prompt in islice(prompts(split), NUM_PROMPTS[split])
        ]
        (DATA / f"{split}_prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if folder is None:
        return ["--suite", "llmbar"]
    (DATA / "llmbar.jsonl").write_text(
        "\n".join(map(json.dumps, instructions(natural))) + "\n", encoding="utf-8"
    )
    return ["--data", str(DATA / "llmbar.jsonl")]


def instructions(file: Path) -> Iterator[dict[str, str]]:
    """The comparisons of a set of LLMBar, as its authors write it: `label` says which output is the
    better one."""
    for row in read_rows(str(file)):
        first, second, is_first = (
            row.values["output_1"],
            row.values["output_2"],
            str(row.values["label"]) == "1",
        )
        better, worse = (first, second) if is_first else (second, first)
        yield {"prompt": row.values["input"], "chosen": better, "rejected": worse}


def prompts(split: str) -> Iterator[list[dict[str, Any]]]:
    """The short contexts of a file's comparisons."""
    for row in read_rows(str(DATA / f"{split}.jsonl")):
        context = [
            dict(message)
            for message in from_transcripts(row.values, row.where, task_name=split).context
        ]
        if sum(len(message["content"]) for message in context) <= LONGEST_PROMPT:
            yield context


def rows() -> Iterator[dict[str, Any]]:
    """The table: on each set both models, and the rule of length that the training data teaches."""
    likes_shorter = shorter_is_better()
    evaluations = {name: read_evaluation(EVALUATION / name) for name in MODELS}
    for suite, examples in evaluations["real_demo"].suites.items():
        for name, evaluation in evaluations.items():
            right = [example.outcome == "right" for example in evaluation.suites[suite]]
            yield row(suite, MODELS[name], right)
        lengths = [
            (example.lengths[i], example.lengths[j])
            for example in examples
            for i, j in example.pairs()
        ]
        rule = f"the {'shorter' if likes_shorter else 'longer'} completion"
        yield row(
            suite,
            rule,
            [better < worse if likes_shorter else better > worse for better, worse in lengths],
        )


def shorter_is_better() -> bool:
    """Whether the better completion of a training pair is the shorter one, more often than the
    longer."""
    signs = 0
    for found in read_rows(str(DATA / "train.jsonl")):
        preference = from_transcripts(found.values, found.where)
        better, worse = (
            len(last_text(completion.messages)) for completion in preference.completions
        )
        signs += (better < worse) - (better > worse)
    return signs > 0


def row(suite: str, judge: str, right: list[bool]) -> dict[str, Any]:
    low, high = wilson(sum(right), len(right))
    return {
        "set": suite,
        "judge": judge,
        "right": sum(right) / len(right),
        "low": low,
        "high": high,
        "count": len(right),
    }


if __name__ == "__main__":
    sys.exit(run())
