"""A rubric of three criteria on two cores: a small judge learns them, and a policy is optimised
against it, by the sum of the criteria and by GDPO.

python examples/rubric_demo.py

A completion of the bundled data is right or not, has the form that was asked for or not, and is
courteous or not. All three are known, so the judge is taught to say yes or no to each, and each run
shows what it truly gains and gives up:

    sum     the reward is the mean of the criteria
    gdpo    each criterion is compared within its group by itself, then they are summed

It may be run again: what is finished is not done again, and a run that was stopped goes on.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gold import CRITERIA, criteria, parse_question
from imitation import SMALL_POLICY, Group, imitate
from rlhf_demo import SFT_EPOCHS, fine_tuned_policy

from treeward.cli.main import main
from treeward.config.load import load_grpo_config
from treeward.config.reward_environments import RubricEnvironmentConfig
from treeward.data.bundled import bundled_path
from treeward.data.conversation import Message, last_text
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import train_tokenizer
from treeward.environments.rubric import RubricEnvironment
from treeward.model.export import export_model
from treeward.model.loading import build_policy
from treeward.rl.logged_run import Change, RLRun
from treeward.rl.report import write_rl_report
from treeward.scoring.score import transcript
from treeward.scoring.verdicts import make_question, verdict_line
from treeward.storage import atomic_file
from treeward.tables import Column, results_table

CONFIG = Path(__file__).parent / "configs" / "rubric_demo.yaml"
RESULTS, LOGS = Path("results/rubric_demo"), Path("logs/rubric_demo")
JUDGE, REPORT = RESULTS / "judge", RESULTS / "report.html"
JUDGE_EPOCHS = 9
JUDGED_ROWS = 3500
SHORTER: list[str] = []
"""Overrides of the runs, by which a test makes this a matter of seconds."""

QUESTIONS = {
    "right": "It names the right answer.",
    "format": "It has the form that was asked for.",
    "courteous": "It is polite.",
}
RUBRIC = [{"title": name, "criterion": QUESTIONS[name], "points": 1} for name in CRITERIA]
RUNS = {"sum": [], "gdpo": ["+grpo.adv_estimator={name: gdpo}"]}

JUDGE_COLUMNS = [
    Column("criterion"),
    Column("agreement", title="judge is right", format=".3f"),
    Column("true", title="truly met", format=".3f"),
    Column("count", title="completions", format="d"),
]
COLUMNS = [
    Column("run"),
    Column("criterion"),
    Column("first", title="truly met at first", format=".3f"),
    Column("last", title="at the end", format=".3f"),
    Column("low", title="change, from", format="+.3f"),
    Column("high", title="to (95 %)", format="+.3f"),
    Column("judged", title="judge at the end", format=".3f"),
]


def run() -> int:
    config = load_grpo_config(CONFIG, SHORTER)
    section = RubricEnvironmentConfig.model_validate(config.env["rubric"])
    write_prompts()
    taught_judge(section)
    sys.stdout.write(f"\n{results_table(agreement(section), JUDGE_COLUMNS)}\n\n")
    steps: list[Callable[[], int]] = [partial(fine_tuned_policy, SFT_EPOCHS)]
    for name, overrides in RUNS.items():
        steps.append(partial(optimise, name, overrides))
    for step in steps:
        code = step()
        if code != 0:
            return code
    runs = [RLRun.read(name, LOGS / name) for name in RUNS]
    write_rl_report(runs, REPORT, title="A rubric of three criteria")
    rows: list[dict[str, Any]] = []
    for one in runs:
        rows += criteria_of(one)
    sys.stdout.write(f"\n{results_table(rows, COLUMNS)}\n")
    sys.stdout.write(f"\nBoth runs, with the changes of all criteria:  {REPORT}\n")
    return 0


def rows_of(split: str) -> list[dict[str, Any]]:
    lines = bundled_path(split).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_prompts() -> None:
    """The prompts of the bundled data, each with the rubric."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        file_name = RESULTS / f"{split}.jsonl"
        if file_name.exists():
            continue
        with atomic_file(file_name) as file:
            for row in rows_of(split):
                file.write(json.dumps({"messages": row["context"], "rubric": RUBRIC}) + "\n")


def truth_of(context: list[Message], text: str) -> dict[str, bool]:
    """Whether each criterion is met."""
    met = criteria(parse_question(context), text)
    return dict(zip(CRITERIA, met, strict=True))


def completions_of(row: Mapping[str, Any]) -> Iterator[str]:
    for completion in row["completions"]:
        yield last_text(completion["completion"])


def taught_judge(section: RubricEnvironmentConfig) -> None:
    """A language model that imitates true verdicts on the criteria of the training completions."""
    if JUDGE.is_dir():
        return
    questions: list[list[tuple[tuple[Message, ...], str]]] = []
    for row in rows_of("train")[:JUDGED_ROWS]:
        context = row["context"]
        # All questions about a prompt are one group: the prompt is computed once, and each
        # completion too.
        group = []
        for text in completions_of(row):
            for name, is_met in truth_of(context, text).items():
                messages = make_question(section, transcript(context), [text, QUESTIONS[name]])
                label = "YES" if is_met else "NO"
                group.append((messages, verdict_line(label, section)))
        questions.append(group)
    texts = []
    for group in questions:
        for messages, verdict in group:
            texts += [str(message["content"]) for message in messages]
            texts.append(verdict)
    tokenizer = train_tokenizer(texts, vocab_size=4096)
    renderer = Renderer(tokenizer)
    groups: list[Group] = []
    for group in questions:
        sequences = []
        for messages, verdict in group:
            prompt = renderer.encode_prompt(messages)
            whole = renderer.encode([*messages, {"role": "assistant", "content": verdict}])
            sequences.append((prompt, whole[len(prompt) :]))
        groups.append(sequences)
    judge = build_policy(SMALL_POLICY, tokenizer, seed=0).model
    imitate(judge, groups, epochs=JUDGE_EPOCHS, learning_rate=2e-3, groups_per_step=32)
    making = JUDGE.with_name("judge.making")
    export_model(judge, tokenizer, making, chat_template=renderer.chat_template)
    making.rename(JUDGE)


def agreement(section: RubricEnvironmentConfig) -> list[dict[str, Any]]:
    """How often the judge is right about completions that it has not seen."""
    conversations: list[list[Message]] = []
    truths: list[dict[str, bool]] = []
    for row in rows_of("validation"):
        for text in completions_of(row):
            conversations.append([*row["context"], {"role": "assistant", "content": text}])
            truths.append(truth_of(row["context"], text))
    environment = RubricEnvironment(section)
    rewards = environment.rewards(conversations, [{"rubric": RUBRIC}] * len(conversations))
    rows = []
    for name in CRITERIA:
        num_right = 0
        for reward, truth in zip(rewards, truths, strict=True):
            # A judge without a verdict is not right either.
            verdict = reward.components.get(name)
            num_right += verdict is not None and (verdict > 0.5) == truth[name]
        rows.append(
            {
                "criterion": name,
                "agreement": num_right / len(truths),
                "true": sum(truth[name] for truth in truths) / len(truths),
                "count": len(truths),
            }
        )
    return rows


def optimise(name: str, overrides: list[str]) -> int:
    folders = [f"checkpointing.checkpoint_dir={RESULTS / name}", f"logger.log_dir={LOGS / name}"]
    return main(["grpo", "--config", str(CONFIG), *folders, *overrides, *SHORTER])


def criteria_of(one: RLRun) -> list[dict[str, Any]]:
    """What has become of each criterion in a run."""
    rows = []
    for name, change in one.gold_components.items():
        judged: Change = one.components[f"rubric/{name}"]
        rows.append(
            {
                "run": one.name,
                "criterion": name,
                "first": change.first,
                "last": change.last,
                "low": change.by.low,
                "high": change.by.high,
                "judged": judged.last,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run())
