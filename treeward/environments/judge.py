"""`JudgeEnvironment`: a language model says how good completions are, behind an endpoint or in this process.

    JudgeEnvironment({"base_url": "http://127.0.0.1:8000/v1", "model": "some-model", "api_key_env": None})
    JudgeEnvironment({"model": "Qwen/Qwen3-0.6B", "mode": "tournament", "use_logprobs": True})

Rewards are from 0 to 1. By `mode`:

- `rating`: each completion alone, as `Rating: [[7]]`.
- `pairwise`: against reference completions (`[[A]]`, `[[B]]`, `[[C]]` for a tie): win 1, tie 0.5, loss 0.
- `equivalence`: whether the final answer is that of a reference (`[[A=B]]`, `[[A!=B]]`).
- `tournament`: every two completions of a prompt against each other; the mean outcome.
- `groupwise`: all completions of a prompt in one question, which rates each.

Judges favour a position (Zheng et al. 2023, arXiv 2306.05685, section 3.4). So two texts are compared in both orders,
and a group in `num_orders`, each turned by as many places: a judge that always says A gives 0.5 to all. What the
earliest place was worth more than the latest is the component `position_bias`, from -1 to 1; `inconsistent` is the
share of pairs whose winner changed with the order. With `num_samples` every question is asked so often: verdicts by
majority, ratings by mean.

A sample of which a question has no verdict has no reward.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.environments.completions import NO_COMPLETION, completion_text, message_text, plain, transcript
from treeward.environments.interface import GROUP, ConfiguredEnvironment, Conversations, Infos, Reward
from treeward.environments.judge_endpoint import EndpointJudge
from treeward.environments.judge_local import LocalJudge
from treeward.environments.verdicts import Question, Verdict, make_question
from treeward.scoring.score import Cost

_OWN, _REFERENCE = 0, 1


class Judge(Protocol):
    """Answers questions; `cost` counts all of them."""

    cost: Cost

    def ask(self, questions: Sequence[Question]) -> list[Verdict | str]: ...


class JudgeEnvironment(ConfiguredEnvironment[JudgeEnvironmentConfig]):
    """A language model as judge; `JudgeEnvironmentConfig` has the keys.

    Completions of one prompt are a group for `tournament` and `groupwise`, unless the key `GROUP` of `env_infos` says
    which are.
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
        texts = [completion_text(conversation) for conversation in conversations]
        errors = {i: NO_COMPLETION for i, text in enumerate(texts) if text is None}
        asked: list[_Asked] = []
        for members in self._groups(conversations, env_infos, errors):
            first = members[0]
            matches, own = self._matches([texts[i] or "" for i in members], env_infos[first])
            if not matches:
                errors |= dict.fromkeys(members, self._nobody_to_compare_with)
            for order in matches:
                question = make_question(self.config, transcript(conversations[first][:-1]), own, order, first)
                if question.num_characters > self.config.max_characters:
                    limit = self.config.max_characters
                    why = f"the prompt of the judge has {question.num_characters} characters, max_characters is {limit}"
                    errors |= dict.fromkeys((members[i] for i in order if i < len(members)), why)
                else:
                    asked.append(_Asked(question, members))
        # A sample that has no reward anyway is not asked about alone.
        asked = [one for one in asked if any(i not in errors for i in one.samples)]
        places: dict[int, list[_Place]] = defaultdict(list)
        for one, verdict in zip(asked, self._answers([one.question for one in asked]), strict=True):
            for place, i in enumerate(one.question.order):
                if i >= len(one.members):
                    continue
                if isinstance(verdict, str):
                    errors.setdefault(one.members[i], verdict)
                else:
                    others = tuple(sorted(one.question.order))
                    places[one.members[i]].append(
                        _Place(place, others, self._scaled(verdict[0].values[place]), *verdict)
                    )
        return [
            Reward(None, error=errors[i]) if i in errors else self._reward(places[i]) for i in range(len(conversations))
        ]

    def _groups(
        self, conversations: Conversations, env_infos: Infos, without: Mapping[int, str]
    ) -> list[tuple[int, ...]]:
        """The samples that are judged together, in order."""
        found: dict[Any, list[int]] = defaultdict(list)
        for i, (conversation, info) in enumerate(zip(conversations, env_infos, strict=True)):
            if i in without:
                continue
            key: Any = i
            if self.config.compares_group:
                key = info.get(GROUP) or json.dumps(conversation[:-1], sort_keys=True, default=str)
            found[key].append(i)
        return [tuple(members) for members in found.values()]

    def _matches(self, texts: list[str], info: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], list[str]]:
        """In which orders the texts are shown, and the texts, which references follow."""
        count, mode = len(texts), self.config.mode
        if mode == "rating":
            return [(0,)], texts
        if mode == "groupwise":
            turns = sorted({count * turn // self.config.num_orders for turn in range(self.config.num_orders)})
            return [tuple((turn + i) % count for i in range(count)) for turn in turns], texts
        if mode == "tournament":
            pairs = list(itertools.combinations(range(count), 2))
        else:
            references = _references(info.get(self.config.reference_key))
            pairs = [(_OWN, _REFERENCE + r) for r in range(len(references))]
            texts = [*texts, *references]
        return [order for a, b in pairs for order in ((a, b), (b, a))], texts

    @property
    def _nobody_to_compare_with(self) -> str:
        if self.config.mode == "tournament":
            return "the completion is the only one of its prompt: a tournament needs two"
        return f"the sample has no reference completion: no text in {self.config.reference_key}"

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
        if not (self.config.rates or self.config.use_logprobs):
            verdicts = [next(one for one in verdicts if one.label == label) for label in most]  # of a draw, the mean
        masses = [one.mass for one in verdicts if one.mass is not None]
        values = tuple(statistics.fmean(own) for own in zip(*(one.values for one in verdicts), strict=True))
        return Verdict(values, most[0], statistics.fmean(masses) if masses else None), agreement

    def _scaled(self, value: float) -> float:
        low, high = self.config.lowest_rating, self.config.highest_rating
        return (value - low) / (high - low) if self.config.rates else value

    def _reward(self, places: Sequence[_Place]) -> Reward:
        """Of a sample from all the places in which it stood."""
        components: dict[str, float] = {}
        if self.config.num_samples > 1:
            components["agreement"] = statistics.fmean(one.agreement for one in places)
        if masses := [one.verdict.mass for one in places if one.verdict.mass is not None]:
            components["label_mass"] = statistics.fmean(masses)
        reward = statistics.fmean(one.value for one in places)
        if self.config.rates:
            components["rating"] = statistics.fmean(one.verdict.values[one.place] for one in places)
        earliest, latest = min(one.place for one in places), max(one.place for one in places)
        if earliest == latest:
            return Reward(reward, components=components)
        components["forward"] = statistics.fmean(one.value for one in places if one.place == earliest)
        components["swapped"] = statistics.fmean(one.value for one in places if one.place == latest)
        components["position_bias"] = components["forward"] - components["swapped"]
        if self.config.mode == "groupwise":
            return Reward(reward, components=components)
        by_pair: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for one in places:
            by_pair[one.texts].append(one.value)
        changed = [_winner(pair[0]) != _winner(pair[1]) for pair in by_pair.values()]
        components["inconsistent"] = sum(changed) / len(changed)
        if self.config.mode == "equivalence":
            reward = max(map(min, by_pair.values()))
        return Reward(reward, components=components)


class _Asked(NamedTuple):
    """A question, and the samples of its group: text i is of `members[i]`, and further texts are references."""

    question: Question
    members: tuple[int, ...]

    @property
    def samples(self) -> list[int]:
        return [self.members[i] for i in self.question.order if i < len(self.members)]


class _Place(NamedTuple):
    """A sample in one question: where it stood, beside which texts, and what that gave it."""

    place: int
    texts: tuple[int, ...]
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
