"""`RubricEnvironment`: rewards by criteria that the data brings, and a language model as judge.

    environment = RubricEnvironment({"model": "Qwen/Qwen3-0.6B", "use_logprobs": True})
    info = {"rubric": [{"title": "Units", "criterion": "It names the unit.", "points": 3}]}
    environment.rewards([conversation], [info])

The judge is asked of each criterion whether it is true of the completion, and `aggregation` makes
the reward. With `use_logprobs` a model in this process answers by the probability of yes, on trees:
all criteria of all completions of a prompt are branches below the prompt and the completion, which
are computed once.

Each criterion is a component of the reward by its name, from 0 to 1: how far it is met, or with a
negative weight how far the bad thing is absent, so that more is better in all of them. A criterion
without a verdict is missing, and no 0. With `mode: rubric` one question has the whole list, and the
answer is a rating.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from treeward.config.reward_environments import RubricEnvironmentConfig
from treeward.data.conversation import Message, template_kwargs_of
from treeward.environments.asked_judge import AskedJudge
from treeward.environments.interface import (
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
)
from treeward.errors import DataError
from treeward.scoring.rubrics import (
    Rubric,
    check_weights,
    read_rubric,
    rubric_reward,
    weight_in,
)
from treeward.scoring.score import NO_COMPLETION, Cost, Score, judged_completion, transcript
from treeward.scoring.verdicts import NoVerdict, Verdict, make_question, share_of_scale

Answers = Sequence[Verdict | NoVerdict]


class RubricEnvironment(ConfiguredEnvironment[RubricEnvironmentConfig]):
    """Criteria and a judge.

    Raises what `AskedJudge` raises. A sample whose rubric cannot be read has no reward.
    """

    name = "rubric_env"
    section = RubricEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | RubricEnvironmentConfig) -> None:
        super().__init__(env_config)
        self._judge = AskedJudge(self.config)

    @property
    def cost(self) -> Cost:
        """Requests, tokens and seconds of all steps."""
        return self._judge.cost

    def check_info(self, info: Mapping[str, Any], where: str | None) -> None:
        self._rubric(info, where)

    def row_components(self, info: Mapping[str, Any]) -> list[str]:
        if self.config.mode == "rubric":
            return []
        return [criterion.name for criterion in self._rubric(info, None).criteria]

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        rewards: list[Reward | None] = []
        asked: list[tuple[int, Rubric, int]] = []
        questions: list[tuple[Message, ...]] = []
        for i, (conversation, info) in enumerate(zip(conversations, env_infos, strict=True)):
            text = judged_completion(conversation)
            if text is None:
                rewards.append(Reward(None, error=NO_COMPLETION))
                continue
            tools = template_kwargs_of(conversation).get("tools")
            try:
                rubric = self._rubric(info, None)
                shown = transcript(conversation[:-1], tools)
            except DataError as error:
                rewards.append(Reward(None, error=f"{error.summary}: {error.field}"))
                continue
            judged_by = [criterion.text for criterion in rubric.criteria]
            if self.config.mode == "rubric":
                judged_by = [rubric.text]
            rewards.append(None)
            asked.append((i, rubric, len(judged_by)))
            # In this order questions begin as the ones before them, which a tree computes once.
            for criteria in judged_by:
                questions.append(make_question(self.config, shown, [text, criteria]))
        answers = self._judge.ask(questions)
        start = 0
        for i, rubric, count in asked:
            rewards[i] = self._reward(rubric, answers[start : start + count])
            start += count
        return [reward for reward in rewards if reward is not None]

    def _rubric(self, info: Mapping[str, Any], where: str | None) -> Rubric:
        rubric = read_rubric(info, self.config.rubric_key, where=where)
        if self.config.mode == "criterion":
            check_weights(rubric, self.config.aggregation)
        return rubric

    def _reward(self, rubric: Rubric, answers: Answers) -> Reward:
        texts = [answer.text for answer in answers if answer.text]
        score = Score(None, judgement="\n\n".join(texts) or None)
        reasons = [answer.reason for answer in answers if isinstance(answer, NoVerdict)]
        if self.config.mode == "rubric":
            answer = answers[0]
            if isinstance(answer, NoVerdict):
                return Reward(None, score, error=answer.reason)
            components = {"judge/rating": answer.value, **_label_mass(answers)}
            return Reward(share_of_scale(answer.value, self.config), score, components)
        met: list[float | None] = []
        components = {}
        weights = {}
        for criterion, answer in zip(rubric.criteria, answers, strict=True):
            if isinstance(answer, NoVerdict):
                met.append(None)
                continue
            is_met = 1.0 - answer.value if criterion.is_met_by_no else answer.value
            met.append(is_met)
            # To whoever weighs components, as `gdpo`, more of each is better.
            components[criterion.name] = is_met if criterion.weight >= 0.0 else 1.0 - is_met
            weights[criterion.name] = abs(weight_in(criterion, self.config.aggregation))
        value = rubric_reward(
            rubric, met, self.config.aggregation, least_weight=self.config.least_weight
        )
        components |= _label_mass(answers)
        if value is None:
            error = f"{len(reasons)} of {len(met)} criteria have no verdict: {reasons[0]}"
            return Reward(None, score, components, error=error, weights=weights)
        if self.config.clip:
            value = min(max(value, 0.0), 1.0)
        return Reward(value, score, components, weights=weights)


def _label_mass(answers: Answers) -> dict[str, float]:
    """The mean probability of all verdicts, where the judge has probabilities."""
    masses = []
    for answer in answers:
        if isinstance(answer, Verdict) and answer.mass is not None:
            masses.append(answer.mass)
    if not masses:
        return {}
    # With a slash: a detail, and no reward of its own to `gdpo`.
    return {"judge/label_mass": statistics.fmean(masses)}
