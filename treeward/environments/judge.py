"""`JudgeEnvironment`: a language model says how good completions are, behind an endpoint or in this process.

    JudgeEnvironment({"base_url": "http://127.0.0.1:8000/v1", "model": "some-model", "api_key_env": None})
    JudgeEnvironment({"model": "Qwen/Qwen3-0.6B", "mode": "pairwise"})

Rewards are from 0 to 1. By `mode`:

- `rating`: each completion alone, as `Rating: [[7]]`.
- `pairwise`: which of two is better (`[[A]]`, `[[B]]`, `[[C]]` for a tie): win 1, tie 0.5, loss 0. A sample with
  reference completions is compared with each of them; samples without are compared with their neighbours among the
  completions of their prompt, in a circle.
- `equivalence`: whether the final answer is that of a reference (`[[A=B]]`, `[[A!=B]]`).

Judges favour a position (Zheng et al. 2023, arXiv 2306.05685, section 3.4). So two texts are compared in both orders: a
judge that always says A gives 0.5 to all. What the first place was worth more than the second is the component
`position_bias`, from -1 to 1; `inconsistent` is the share of pairs whose winner changed with the order. With
`num_samples` every question is asked so often: verdicts by majority, ratings by mean.

A sample of which a question has no verdict has no reward.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.environments.interface import (
    GROUP,
    NO_COMPLETION,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
    completion_text,
    message_text,
    plain,
    transcript,
)
from treeward.environments.judge_endpoint import EndpointJudge
from treeward.environments.judge_local import LocalJudge
from treeward.environments.verdicts import Question, Verdict, make_question
from treeward.scoring.score import Cost


class Judge(Protocol):
    """Answers questions; `cost` counts all of them."""

    cost: Cost

    def ask(self, questions: Sequence[Question]) -> list[Verdict | str]: ...


class JudgeEnvironment(ConfiguredEnvironment[JudgeEnvironmentConfig]):
    """A language model as judge; `JudgeEnvironmentConfig` has the keys.

    Which completions belong to one prompt, the key `GROUP` of `env_infos` may say; otherwise the messages before them.
    Raises `ConfigError` where the package openai or the key is missing, `ModelError` for a model that cannot be loaded,
    and in a step where the endpoint refuses the key, the model, or every request.
    """

    name = "judge_env"
    section = JudgeEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | JudgeEnvironmentConfig) -> None:
        super().__init__(env_config)
        self._judge: Judge = LocalJudge(self.config) if self.config.base_url is None else EndpointJudge(self.config)

    @property
    def cost(self) -> Cost:
        """Requests, tokens and seconds of all steps."""
        return self._judge.cost

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        texts = {i: text for i, one in enumerate(conversations) if (text := completion_text(one)) is not None}
        errors = {i: NO_COMPLETION for i in range(len(conversations)) if i not in texts}
        matches = list(self._matches(conversations, env_infos, texts))
        compared = {i for match in matches for i in match.samples}
        errors |= {i: self._nothing_to_compare_with for i in texts if i not in compared}
        asked: list[tuple[Question, _Match]] = []
        for match in matches:
            about = match.samples[0]
            question = make_question(self.config, transcript(conversations[about][:-1]), match.texts, about)
            asked.append((question, match))
        # A sample that has no reward anyway is not asked about alone.
        asked = [(question, match) for question, match in asked if any(i not in errors for i in match.samples)]
        outcomes: dict[int, list[_Outcome]] = defaultdict(list)
        for (_, match), answer in zip(asked, self._answers([question for question, _ in asked]), strict=True):
            for place, i in enumerate(match.places):
                if i is None:
                    continue
                if isinstance(answer, str):
                    errors.setdefault(i, answer)
                else:
                    verdict, agreement = answer
                    value = self._value_at(place, verdict)
                    outcomes[i].append(_Outcome(match.pair, place, value, verdict, agreement))
        return [
            Reward(None, error=errors[i]) if i in errors else self._reward(outcomes[i])
            for i in range(len(conversations))
        ]

    def _matches(self, conversations: Conversations, env_infos: Infos, texts: Mapping[int, str]) -> Iterator[_Match]:
        """What the judge is asked: each sample alone, or each pair in both orders."""
        if self.config.mode == "rating":
            yield from (_Match(i, (i,), (text,)) for i, text in texts.items())
            return
        pairs: list[tuple[tuple[int, str], tuple[int | None, str]]] = []
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, text in texts.items():
            references = _references(env_infos[i].get(self.config.reference_key))
            pairs += [((i, text), (None, reference)) for reference in references]
            if not references and self.config.mode == "pairwise":
                prompt = json.dumps(conversations[i][:-1], sort_keys=True, default=str)
                groups[env_infos[i].get(GROUP) or prompt].append(i)
        for members in groups.values():
            neighbours = zip(members, members[1:] + members[:1], strict=True)
            pairs += [((i, texts[i]), (j, texts[j])) for i, j in [*neighbours][: None if len(members) > 2 else -1]]
        for number, (first, second) in enumerate(pairs):
            for ordered in ((first, second), (second, first)):
                yield _Match(number, *zip(*ordered, strict=True))

    @property
    def _nothing_to_compare_with(self) -> str:
        alone = ", and it is the only one of its prompt" if self.config.mode == "pairwise" else ""
        return f"the sample has no reference completion: no text in {self.config.reference_key}{alone}"

    def _answers(self, questions: Sequence[Question]) -> list[tuple[Verdict, float] | str]:
        """The verdict of each question, over all samples, with their agreement; or why there is none."""
        count, before = self.config.num_samples, time.perf_counter()
        answers = self._judge.ask([question for question in questions for _ in range(count)])
        self._judge.cost += Cost(seconds=time.perf_counter() - before)
        return [self._majority(answers[i : i + count]) for i in range(0, len(answers), count)]

    def _majority(self, answers: Sequence[Verdict | str]) -> tuple[Verdict, float] | str:
        verdicts = [one for one in answers if isinstance(one, Verdict)]
        if not verdicts:
            return str(answers[0])
        most = statistics.multimode(one.label for one in verdicts)
        agreement = sum(one.label == most[0] for one in verdicts) / len(verdicts)
        if self.config.mode != "rating":
            verdicts = [next(one for one in verdicts if one.label == label) for label in most]  # of a draw, the mean
        masses = [one.mass for one in verdicts if one.mass is not None]
        value = statistics.fmean(one.value for one in verdicts)
        return Verdict(value, most[0], statistics.fmean(masses) if masses else None), agreement

    def _value_at(self, place: int, verdict: Verdict) -> float:
        """What a verdict is worth, from 0 to 1, for the text at a place."""
        if self.config.mode == "rating":
            low, high = self.config.lowest_rating, self.config.highest_rating
            return (verdict.value - low) / (high - low)
        return 1.0 - verdict.value if place == 1 and self.config.mode == "pairwise" else verdict.value

    def _reward(self, outcomes: Sequence[_Outcome]) -> Reward:
        """The reward of a sample from all its outcomes."""
        components: dict[str, float] = {}
        if self.config.num_samples > 1:
            components["agreement"] = statistics.fmean(one.agreement for one in outcomes)
        if masses := [one.verdict.mass for one in outcomes if one.verdict.mass is not None]:
            components["label_mass"] = statistics.fmean(masses)
        reward = statistics.fmean(one.value for one in outcomes)
        if self.config.mode == "rating":
            components["rating"] = statistics.fmean(one.verdict.value for one in outcomes)
            return Reward(reward, components=components)
        for place, name in enumerate(("forward", "swapped")):
            components[name] = statistics.fmean(one.value for one in outcomes if one.place == place)
        components["position_bias"] = components["forward"] - components["swapped"]
        by_pair: dict[int, list[float]] = defaultdict(list)
        for one in outcomes:
            by_pair[one.pair].append(one.value)
        changed = [_winner(first) != _winner(second) for first, second in by_pair.values()]
        components["inconsistent"] = sum(changed) / len(changed)
        if self.config.mode == "equivalence":
            reward = max(map(min, by_pair.values()))
        return Reward(reward, components=components)


class _Match(NamedTuple):
    """One question about a pair: which sample stands at each place, None for a reference, and the texts there."""

    pair: int
    places: tuple[int | None, ...]
    texts: tuple[str, ...]

    @property
    def samples(self) -> list[int]:
        return [i for i in self.places if i is not None]


class _Outcome(NamedTuple):
    """What a question gave a sample, which stood at `place` of the pair."""

    pair: int
    place: int
    value: float
    verdict: Verdict
    agreement: float


def _winner(value: float) -> int:
    return (value > 0.5) - (value < 0.5)


def _references(value: Any) -> list[str]:
    """Reference completions: a text, or a list of texts and message lists, whose last message is the completion."""
    value = plain(value)
    values = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    texts = []
    for each in values:
        if isinstance(each, Sequence) and not isinstance(each, str) and each:
            each = each[-1]
        text = message_text(each) if isinstance(each, Mapping) else each
        if isinstance(text, str):
            texts.append(text)
    return texts
