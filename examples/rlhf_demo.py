"""RLHF on two cores: a policy is fine-tuned, then optimised against the quickstart's reward model.

python examples/rlhf_demo.py

The bundled data's true quality ("gold") is known and never trained on, so it shows what each run
really does:

    close     KL to the fine-tuned policy costs: near the completions of its training the reward model is right
    hacked    no KL: the policy finds what the reward model likes besides quality, and the alarm says so
    cured     no KL either: the worst of three reward models that have also seen completions of other prompts, less what
              a completion is too long

It may be run again: what is finished is not done again, and a run that was stopped goes on.
"""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from imitation import SMALL_POLICY, Group, imitate

from treeward.cli.main import main
from treeward.config.data import DatasetConfig
from treeward.data.bundled import bundled_path
from treeward.data.datasets import open_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.model.export import export_model
from treeward.model.loading import build_policy
from treeward.rl.logged_run import RLRun
from treeward.rl.report import write_rl_report
from treeward.storage import atomic_file
from treeward.tables import Column, results_table

CONFIGS = Path(__file__).parent / "configs"
RESULTS, LOGS = Path("results/rlhf_demo"), Path("logs/rlhf_demo")
SFT, REPORT = RESULTS / "sft", RESULTS / "report.html"
REWARD_MODEL = Path("results/quickstart/final")
MEMBERS = [RESULTS / f"reward_model_{seed}" for seed in range(3)]
SFT_EPOCHS = 10
SHORTER: list[str] = []
SHORTER_TRAINING: list[str] = []
"""Overrides of the runs of optimisation, and of training, by which a test makes this a matter of
seconds."""

RUNS = {
    "close": ["loss_fn.reference_policy_kl_penalty=0.2"],
    "hacked": ["loss_fn.reference_policy_kl_penalty=0.0"],
    "cured": [
        "loss_fn.reference_policy_kl_penalty=0.0",
        f"env.reward_model.model_name=[{','.join(map(str, MEMBERS))}]",
        "+env.reward_model.ensemble={method: worst}",
        "+env.reward_model.reward_shaping={length_penalty: {coefficient: 0.015, threshold: 80}}",
    ],
}
COLUMNS = [
    Column("run"),
    Column("step", format="d"),
    Column("reward", format=".2f"),
    Column("gold", title="gold quality", format=".3f"),
    Column("kl", title="KL", format=".1f"),
    Column("length", title="tokens", format=".1f"),
    Column("alarm", title="gold falls"),
]


def run() -> int:
    steps: list[Callable[[], int]] = [
        reward_models,
        partial(fine_tuned_policy, SFT_EPOCHS),
    ]
    for name, overrides in RUNS.items():
        steps.append(partial(optimise, name, overrides))
    for step in steps:
        code = step()
        if code != 0:
            return code
    runs = [RLRun.read(name, LOGS / name) for name in RUNS]
    write_rl_report(runs, REPORT, title="RLHF on the bundled data")
    sys.stdout.write(f"\n{results_table([row for one in runs for row in summary(one)], COLUMNS)}\n")
    sys.stdout.write(f"\nAll three, with sample completions over time:  {REPORT}\n")
    return 0


def reward_models() -> int:
    """The quickstart's reward model, and three for the ensemble."""
    train = ["train", "--config", str(CONFIGS / "quickstart.yaml"), *SHORTER_TRAINING]
    code = 0 if REWARD_MODEL.is_dir() else main(train)
    for seed, member in enumerate(MEMBERS):
        code = code or (0 if member.is_dir() else train_member(train, seed, member))
    return code


def train_member(train: list[str], seed: int, member: Path) -> int:
    """A reward model that also sees, for each prompt, a good completion of another one as the worst
    of all.

    It is calibrated, so that its scores can be compared with those of the others.
    """
    folder, others = RESULTS / f"training_{seed}", RESULTS / "others.jsonl"
    if not others.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        with atomic_file(others) as file:
            file.writelines(json.dumps(row) + "\n" for row in with_other_answers())
    code = main(
        [
            *train,
            "rm.max_num_epochs=3",
            f"rm.seed={seed}",
            f"+data.train={{dataset_name: PreferenceDataset, data_path: {others}}}",
            "+data.validation={plain: {}, length_controlled: {}}",
            f"checkpointing.checkpoint_dir={folder}",
            f"logger.log_dir={LOGS}/reward_model_{seed}",
        ]
    )
    if code == 0:
        making = member.with_name(f"{member.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(folder / "final", making)
        code = main(
            ["calibrate", str(making), "--dataset-name", "Bundled", "--split", "validation"]
        )
        if code == 0:
            making.rename(member)
    return code


def with_other_answers() -> Iterator[dict[str, Any]]:
    """The training data, each row with the best completion of another question as its worst (Liu et
    al. 2024)."""
    rows = [
        json.loads(line) for line in bundled_path("train").read_text(encoding="utf-8").splitlines()
    ]
    generator = random.Random(0)
    for row in rows:
        question, own = row["context"][-1], [one["completion"] for one in row["completions"]]
        drawn = iter(lambda: generator.choice(rows), None)
        best = (
            min(one["completions"], key=itemgetter("rank"))
            for one in drawn
            if one["context"][-1] != question
        )
        other = next(one for one in best if one["completion"] not in own)
        yield row | {"completions": [*row["completions"], other | {"rank": len(own)}]}


def fine_tuned_policy(epochs: int) -> int:
    """A policy that imitates all completions of the training data, good and bad."""
    if SFT.is_dir():
        return 0
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="train"))
    tokenizer = train_tokenizer(texts_of([stream]), vocab_size=1024)
    renderer = Renderer(tokenizer)
    groups: list[Group] = []
    for preference, _ in stream:
        prompt = renderer.encode_prompt(preference.context)
        whole = [
            renderer.encode([*preference.context, *completion.messages])
            for completion in preference.completions
        ]
        groups.append([(prompt, tokens[len(prompt) :]) for tokens in whole])
    policy = build_policy(SMALL_POLICY, tokenizer, seed=0).model
    imitate(policy, groups, epochs=epochs)
    making = SFT.with_name("sft.making")
    export_model(policy, tokenizer, making, chat_template=renderer.chat_template)
    making.rename(SFT)
    return 0


def optimise(name: str, overrides: list[str]) -> int:
    folders = [f"checkpointing.checkpoint_dir={RESULTS / name}", f"logger.log_dir={LOGS / name}"]
    return main(
        ["grpo", "--config", str(CONFIGS / "rlhf_demo.yaml"), *folders, *overrides, *SHORTER]
    )


def summary(one: RLRun) -> list[dict[str, object]]:
    """The first and the last validation of a run."""
    curves = {
        key: one.curve(f"validation/{name}")
        for key, name in {
            "reward": "reward",
            "gold": "gold_reward",
            "kl": "kl",
            "length": "mean_gen_tokens_per_sample",
        }.items()
    }
    alarm = one.gold_alarm
    return [
        {
            "run": one.name,
            "step": step,
            **{key: curve.get(step) for key, curve in curves.items()},
            "alarm": "" if alarm is None or alarm.step > step else f"alarm after step {alarm.step}",
        }
        for step in (0, one.last_step)
    ]


if __name__ == "__main__":
    sys.exit(run())
