"""`PreferenceVerdictEnvironment`: rewards of a policy that learns to judge, from comparisons.

    questions = open_questions(config.data.train[0], section)   # a `PromptSet`: two for each pair
    infos = [question.info for question in questions]
    PreferenceVerdictEnvironment(section).rewards(conversations, infos)

Every pair of completions with different ranks is two neighbouring questions: which is better, in
both orders, or a rating of each. Prompt and parser are those of a judge (`verdicts`), so the policy
is asked in use what it was asked in training. Pairs of equal rank or text are left out and counted;
so are strengths, which are not used.

The reward is 1 for the verdict of the label, 0 for the other one or a tie. With `verdict: scores`
it is the distance from the label's numbers, with a minus (the training reward of NVIDIA's GenRMs,
by the card of Nemotron-RLHF-GenRM-v1):

    -|score_1 - G_1| - |score_2 - G_2| - |ranking - G_ranking|

G_ranking follows from the strength of the preference. G_1 and G_2 are grades of the data; without
them these two terms are left out. A rating is compared
with the ratings that the other completion got in the same step: the reward is the share that it is
above, or for the worse completion below. A message that has no verdict, or was cut, has
`no_verdict`.

Components, which the run logs as means: `accuracy` (0 without a verdict), and details under
`judge/`: `no_verdict`, `position_bias` (1 for the first place, -1 for the second), `consistent`
(the g-th messages about both orders have one winner), `rating`, `ranking_error`,
`helpfulness_error` (of the two scores together).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from treeward.config.data import PromptSetConfig
from treeward.config.reward_environments import PreferenceVerdictConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Completion
from treeward.data.prompt_sets import FAMILY, Prompt, PromptSet
from treeward.environments.interface import ConfiguredEnvironment, Conversations, Infos, Reward
from treeward.errors import DataError
from treeward.scoring.pair_scores import (
    HIGHEST_SCORE,
    LOWEST_SCORE,
    MIDDLE_RANKING,
    PairScores,
)
from treeward.scoring.score import completion_text, judged_text, transcript
from treeward.scoring.verdicts import Answer, Verdict, make_question, read_answer

logger = logging.getLogger(__name__)

LABEL = "verdict_label"
"""The key of `info` with the right verdict, `A` or `B`; of ratings, whether the completion is
`better` or `worse`."""

SCORES = "verdict_scores"
"""The key of `info` with the label's numbers, by their names; those that the data lacks are
missing."""

_PLAIN_STRENGTH = 2.0
"""Of a preference without a strength: better, which is neither slightly better nor much better."""
_MIDDLE_STRENGTH = 0.5
"""From here down the ranking of a strength is the middle, or on the side of the worse one."""
_MOST_STRENGTH = 3.0

_NO_QUESTION = "the prompt is no question about a comparison: its data set has another environment"


def open_questions(config: PromptSetConfig, section: PreferenceVerdictConfig) -> PromptSet:
    """The questions about a set of comparisons, with the judge's prompt of `section`.

    `max_samples` counts comparisons. Raises as `open_dataset` does, and `DataError` for a set
    without an order.
    """
    comparisons = config.comparisons
    # Every set with ratings has the grade `score`.
    if section.helpfulness not in (None, "score"):
        comparisons = comparisons.model_copy(update={"attributes": (section.helpfulness,)})
    dataset = open_dataset(comparisons)
    questions: list[Prompt] = []
    num_tied = 0
    num_strong = 0
    for number, (preference, where) in enumerate(itertools.islice(dataset, config.max_samples)):
        num_strong += preference.strength is not None
        try:
            context = transcript(preference.context, preference.template_kwargs.get("tools"))
            texts = [_text(completion) for completion in preference.completions]
        except DataError as error:
            raise error.but(where=where) from None
        for pair in itertools.combinations(zip(preference.completions, texts, strict=True), 2):
            # By rank alone, because completions have no order.
            (better, better_text), (worse, worse_text) = sorted(pair, key=lambda item: item[0].rank)
            if better.rank == worse.rank or better_text == worse_text:
                num_tied += 2  # questions
                continue
            family = f"{config.name or dataset.name}:{number}:{len(questions)}"
            info = {FAMILY: family, "task_name": preference.task_name}
            if config.env_name is not None:
                info["environment"] = config.env_name
            asked: dict[str, tuple[str, ...]]
            if section.mode == "rating":
                asked = {"better": (better_text,), "worse": (worse_text,)}
            else:  # both orders, so that the place alone earns nothing
                asked = {"A": (better_text, worse_text), "B": (worse_text, better_text)}
            for label, shown in asked.items():
                messages = make_question(section, context, shown)
                labelled: dict[str, Any] = {**info, LABEL: label}
                if section.verdict == "scores":
                    labelled[SCORES] = _label_scores(
                        (better, worse), label, preference.strength, section, where
                    )
                questions.append(Prompt(messages, labelled, where))
    if not questions:
        raise DataError(
            "no comparison has a better completion",
            where=dataset.name,
            got=f"{num_tied // 2} pairs of equal rank",
            need="two completions of different rank",
        )
    if num_strong and section.verdict != "scores":
        logger.info(
            "%s: the strength of %d comparisons is not used by verdicts.", dataset.name, num_strong
        )
    counts = Counter(read=len(questions) + num_tied, kept=len(questions), tied=num_tied)
    return PromptSet(dataset.name, questions, counts, config.weight, together=2)


def _label_scores(
    better_and_worse: tuple[Completion, Completion],
    label: str,
    strength: float | None,
    section: PreferenceVerdictConfig,
    where: str,
) -> dict[str, float]:
    """The numbers of the right verdict: the ranking, and the scores that the data has."""
    if strength is None:
        strength = _PLAIN_STRENGTH
    if not _MIDDLE_STRENGTH < strength <= _MOST_STRENGTH:
        raise DataError(
            "the strength of a comparison is not on the scale of rankings",
            where=where,
            field="strength",
            got=strength,
            need="from 1 (slightly better) to 3 (much better)",
            fix="leave it out (strength_key), or learn verdict: label",
        )
    # A strength of 3 is the ranking 1 or 6, one of 1 the ranking 3 or 4.
    distance = strength - _MIDDLE_STRENGTH
    ranking = MIDDLE_RANKING - distance if label == "A" else MIDDLE_RANKING + distance
    numbers = {"ranking": ranking}
    first_and_second = better_and_worse if label == "A" else better_and_worse[::-1]
    for name, completion in zip(("score_1", "score_2"), first_and_second, strict=True):
        grade = None
        if section.helpfulness is not None:
            grade = completion.all_grades.get(section.helpfulness)
        if grade is None:
            continue
        score = grade - section.lowest_helpfulness + LOWEST_SCORE
        if not LOWEST_SCORE <= score <= HIGHEST_SCORE:
            raise DataError(
                "a grade is not on the scale of scores",
                where=where,
                field=section.helpfulness,
                got=grade,
                need=f"five points, from {section.lowest_helpfulness:g}",
                fix="set lowest_helpfulness to the lowest grade of the data",
            )
        numbers[name] = score
    return numbers


def _text(completion: Completion) -> str:
    if len(completion.messages) == 1:
        text = judged_text(completion.messages[0])
        if text is not None:
            return text
    return transcript(completion.messages)  # with tool calls and their results


class PreferenceVerdictEnvironment(ConfiguredEnvironment[PreferenceVerdictConfig]):
    """The rewards of answers to `open_questions`, whose `info` says the label."""

    name = "preference_verdict_env"
    section = PreferenceVerdictConfig

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        verdicts: dict[int, Verdict] = {}
        answers: dict[tuple[Any, Any], list[int]] = defaultdict(list)  # to each question, in order
        for i, (conversation, info) in enumerate(zip(conversations, env_infos, strict=True)):
            answers[info.get(FAMILY), info.get(LABEL)].append(i)
            answer = Answer(completion_text(conversation) or "", is_cut=bool(info.get("truncated")))
            verdict = read_answer(answer, self.config)
            if isinstance(verdict, Verdict):
                verdicts[i] = verdict
        rewards = []
        for i, info in enumerate(env_infos):
            family = info.get(FAMILY)
            label = info.get(LABEL)
            if label not in _OTHER:
                rewards.append(Reward(None, error=_NO_QUESTION))
                continue
            if i not in verdicts:
                parts = {"accuracy": 0.0, "judge/no_verdict": 1.0}
                rewards.append(Reward(self.config.reward_of_no_verdict, components=parts))
                continue
            verdict = verdicts[i]
            others = answers[family, _OTHER[label]]
            if self.config.mode == "rating":
                # The share of the other completion's ratings that this one is above, or for the
                # worse completion below; 0 where the other one has no rating.
                right_sides: list[float] = []
                for j in others:
                    if j not in verdicts:
                        continue
                    lead = verdict.value - verdicts[j].value
                    if label == "worse":
                        lead = -lead
                    right_sides.append(float(lead > 0))
                right = fmean(right_sides) if right_sides else 0.0
                parts = {"accuracy": right, "judge/no_verdict": 0.0, "judge/rating": verdict.value}
            else:
                right = float(verdict.label == label)
                parts = {"accuracy": right, "judge/no_verdict": 0.0}
                # A verdict's value is the chance that the first place wins.
                parts["judge/position_bias"] = 2.0 * verdict.value - 1.0
                # Against the message about the other order that has the same number.
                number = answers[family, label].index(i)
                if number < len(others) and others[number] in verdicts:
                    swapped = verdicts[others[number]]
                    # Exactly: messages are read without log-probabilities, as 0, 1/2 or 1.
                    parts["judge/consistent"] = float(verdict.value == 1.0 - swapped.value)
            value = right
            if verdict.scores is not None:
                value = _distance_reward(verdict.scores, info[SCORES], parts)
            rewards.append(Reward(value, components=parts))
        return rewards


def _distance_reward(
    scores: PairScores, label: Mapping[str, float], parts: dict[str, float]
) -> float:
    """How far the numbers are from the label's, with a minus. Adds the errors to `parts`."""
    ranking_error = abs(scores.ranking - label["ranking"])
    parts["judge/ranking_error"] = ranking_error
    reward = -ranking_error
    # A pair without both grades has none: a row's rewards are compared with each other.
    if "score_1" in label and "score_2" in label:
        first_error = abs(scores.score_1 - label["score_1"])
        second_error = abs(scores.score_2 - label["score_2"])
        parts["judge/helpfulness_error"] = first_error + second_error
        reward -= first_error + second_error
    return reward


_OTHER = {"A": "B", "B": "A", "better": "worse", "worse": "better"}
