"""Teach a language model to write verdicts, before a run of GRPO on comparisons: it imitates those
of the labels.

python examples/teach_verdicts.py --config judge.yaml --output results/taught
treeward grpo --config judge.yaml policy.model_name=results/taught

The questions are those of the run. A message is the verdict alone; a model that reasons already
needs no such step.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from imitation import Group, imitate

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_grpo_config
from treeward.data.rendering import Renderer
from treeward.environments.preference_verdict import LABEL, open_questions
from treeward.model.export import export_model
from treeward.model.loading import Loaded, load_policy
from treeward.model.policy_model import PolicyModel
from treeward.progress import configure_logging
from treeward.scoring.trained_judge import write_judge_contract
from treeward.scoring.verdicts import verdict_line

# any of them, so that a run of GRPO has something to choose from
RATINGS = {
    "better": "6789",
    "worse": "1234",
}


def teach(
    config: GRPORunConfig,
    loaded: Loaded[PolicyModel],
    folder: Path,
    *,
    max_questions: int | None = None,
    **how: Any,
) -> None:
    """Train `loaded` on the run's first questions, and write it to `folder`. `how`: keywords of
    `imitate`."""
    dataset = config.data.train[0]
    section = config.judged_by(dataset)
    if section is None:
        sys.exit("the run has no environment of the kind preference_verdict")
    variables = config.policy.tokenizer.chat_template_kwargs
    renderer = Renderer(loaded.tokenizer, chat_template_kwargs=variables)
    groups, draw = list[Group](), random.Random(0)
    for question in open_questions(dataset, section)[:max_questions]:
        label = question.info[LABEL]
        line = verdict_line(draw.choice(RATINGS.get(label, label)), section)
        whole = renderer.encode([*question.messages, {"role": "assistant", "content": line}])
        prompt = renderer.encode_prompt(question.messages)
        if len(whole) <= config.policy.max_total_sequence_length:
            groups.append((prompt, [whole[len(prompt) :]]))
    imitate(loaded.model, groups, **how)
    making = folder.with_name(f"{folder.name}.making")
    export_model(loaded.model, loaded.tokenizer, making, chat_template=renderer.chat_template)
    write_judge_contract(making, section, variables)
    making.rename(folder)


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="of the run of GRPO")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--questions", type=int, default=1000, help="the first ones")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("overrides", nargs="*", help="of the configuration, as key=value")
    arguments = parser.parse_args()
    configure_logging()
    config = load_grpo_config(arguments.config, arguments.overrides)
    loaded = load_policy(str(config.policy.model_name))
    how = {"epochs": 1, "learning_rate": arguments.lr, "groups_per_step": 16, "log_period": 5}
    teach(config, loaded, arguments.output, max_questions=arguments.questions, **how)


if __name__ == "__main__":
    run()
