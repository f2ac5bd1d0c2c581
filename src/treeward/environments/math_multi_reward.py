r"""`MathMultiRewardEnvironment`: three rewards for an answer that is asked for in tags.

    MathMultiRewardEnvironment({}).step([log], [{"ground_truth": "12"}]).rewards    # tensor([3.])

The completion has the form `<think>...</think>\n<answer>12</answer>`. The components are those of
NeMo RL's environment of this name (`environments/math_environment.py`), each 0 or 1:

- `correctness`: the text of the last `<answer>` is the ground truth.
- `integer`: that text consists of digits.
- `format`: the completion has the form, with one answer.

The reward is their sum. They are made for `grpo.adv_estimator: {name: gdpo}`, which normalises each
by itself. A sample without a ground truth has no `correctness`, and so no sum.
"""

from __future__ import annotations

import re

from treeward.config.reward_environments import MathMultiRewardConfig
from treeward.environments.interface import (
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
)
from treeward.environments.rules import UndecidedError, ground_truths
from treeward.scoring.score import NO_COMPLETION, completion_text

_FORM = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class MathMultiRewardEnvironment(ConfiguredEnvironment[MathMultiRewardConfig]):
    """The rewards `correctness`, `integer` and `format`, and their sum."""

    name = "math_multi_reward_env"
    section = MathMultiRewardConfig

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        rewards = []
        for conversation, info in zip(conversations, env_infos, strict=True):
            text = completion_text(conversation)
            if text is None:
                rewards.append(Reward(None, error=NO_COMPLETION))
                continue
            answers = _ANSWER.findall(text)
            answer = answers[-1].strip() if answers else ""
            has_form = _FORM.fullmatch(text.strip()) is not None and len(answers) == 1
            parts = {"integer": float(answer.isdigit()), "format": float(has_form)}
            try:
                golds = ground_truths(info, self.config.answer_key)
            except UndecidedError as error:
                rewards.append(Reward(None, components=parts, error=str(error)))
                continue
            parts["correctness"] = float(answer in golds)
            rewards.append(Reward(sum(parts.values()), components=parts))
        return rewards
