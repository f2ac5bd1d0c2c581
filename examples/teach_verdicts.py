"""Teach a language model to write verdicts, before a run of GRPO on comparisons: it imitates those
of the labels.

python examples/teach_verdicts.py --config judge.yaml --output results/taught
treeward grpo --config judge.yaml policy.model_name=results/taught

The questions are those of the run. A message is the verdict alone; a model that reasons already
needs no such step.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imitation import Group, imitate

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_grpo_config
from treeward.config.reward_environments import PreferenceVerdictConfig
from treeward.data.rendering import Renderer
from treeward.environments.preference_verdict import LABEL, SCORES, open_questions
from treeward.model.export import export_model
from treeward.model.loading import Loaded, load_policy
from treeward.model.policy_model import PolicyModel
from treeward.progress import configure_logging
from treeward.scoring.pair_scores import all_pair_scores, pair_scores_line
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
        line = verdict_line(right_label(question.info, section, draw), section)
        whole = renderer.encode([*question.messages, {"role": "assistant", "content": line}])
        prompt = renderer.encode_prompt(question.messages)
        if len(whole) <= config.policy.max_total_sequence_length:
            groups.append([(prompt, whole[len(prompt) :])])
    imitate(loaded.model, groups, **how)
    making = folder.with_name(f"{folder.name}.making")
    export_model(loaded.model, loaded.tokenizer, making, chat_template=renderer.chat_template)
    write_judge_contract(making, section, variables)
    making.rename(folder)


def right_label(
    info: Mapping[str, Any], section: PreferenceVerdictConfig, draw: random.Random
) -> str:
    """One of the verdicts that the label of a question allows."""
    label: str = info[LABEL]
    if section.verdict == "label":
        return draw.choice(RATINGS.get(label, label))
    allowed = []
    for scores in all_pair_scores():
        numbers = dataclasses.asdict(scores)
        fits = all(abs(numbers[name] - value) <= 0.5 for name, value in info[SCORES].items())
        # Grades may contradict the preference, and then the label's side is not asked for.
        if fits and (scores.label == label or "score_1" in info[SCORES]):
            allowed.append(pair_scores_line(scores))
    return draw.choice(allowed)


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
