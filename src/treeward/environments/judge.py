"""`JudgeEnvironment`: rewards by a language model as judge, behind an endpoint or in this process.

    url = "http://127.0.0.1:8000/v1"
    JudgeEnvironment({"base_url": url, "model": "some-model", "api_key_env": None})
    JudgeEnvironment({"model": "Qwen/Qwen3-0.6B", "mode": "pairwise"})      # in this process

Rewards are from 0 to 1. By `mode`:

- `rating`: each completion alone, as `Rating: [[7]]`.
- `pairwise`: which of two is better (`[[A]]`, `[[B]]`, `[[C]]` for a tie): win 1, tie 0.5, loss 0.
  A sample is compared with each of its reference completions, or without references with its
  neighbours among the completions of its prompt, in a circle.
- `equivalence`: whether the final answer equals a reference's (`[[A=B]]`, `[[A!=B]]`).

Judges favour a position (Zheng et al. 2023, arXiv 2306.05685, section 3.4). So two texts are
compared in both orders: a judge that always says A gives 0.5 to all. The component
`judge/position_bias`, from -1 to 1, is the advantage of the first place; `judge/inconsistent` is
the share of pairs whose winner changed with the order. With a slash: details, and no rewards of
their own to `gdpo`.

A sample with a question without a verdict has no reward. What the judge wrote is in
`Reward.score.judgement`. A judge without a verdict on the first few questions stops the run.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.data.conversation import Message, template_kwargs_of
from treeward.data.preference import split_common_prefix
from treeward.environments.asked_judge import AskedJudge
from treeward.environments.interface import (
    GROUP,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
)
from treeward.errors import DataError
from treeward.scoring.score import (
    NO_COMPLETION,
    Cost,
    Score,
    judged_completion,
    judged_text,
    plain,
    transcript,
)
from treeward.scoring.verdicts import NoVerdict, Verdict, make_question, share_of_scale


class JudgeEnvironment(ConfiguredEnvironment[JudgeEnvironmentConfig]):
    """A language model as judge. The key `GROUP` of `env_infos`, or else the messages, group
    completions by prompt.

    Raises `ConfigError` if the package openai or the key is missing, `ModelError` for a model that
    cannot be loaded, and in a step if the endpoint refuses the key or the model, or none of the
    first questions has a verdict.
    """

    name = "judge_env"
    section = JudgeEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | JudgeEnvironmentConfig) -> None:
        super().__init__(env_config)
        self._judge = AskedJudge(self.config)

    @property
    def cost(self) -> Cost:
        """Requests, tokens and seconds of all steps."""
        return self._judge.cost

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        rewards = [Reward(None, error=NO_COMPLETION)] * len(conversations)
        texts: dict[int, str] = {}
        contexts: dict[int, str] = {}
        for i, conversation in enumerate(conversations):
            text = judged_completion(conversation)
            if text is None:
                continue
            tools = template_kwargs_of(conversation).get("tools")
            try:
                contexts[i] = transcript(conversation[:-1], tools)
            except DataError as error:
                rewards[i] = Reward(None, error=error.in_one_line)
                continue
            texts[i] = text
        matches = list(self._matches(conversations, env_infos, texts))
        questions = [self._question(match, conversations, contexts) for match in matches]
        # Each with the sample's place in the question.
        answers: dict[int, list[tuple[int, Verdict | NoVerdict]]] = {i: [] for i in texts}
        for match, answer in zip(matches, self._judge.ask(questions), strict=True):
            for place, sample_of_place in enumerate(match.places):
                if sample_of_place is not None:
                    answers[sample_of_place].append((place, answer))
        for i, sample_answers in answers.items():
            rewards[i] = self._reward(sample_answers)
        return rewards

    def _question(
        self, match: _Match, conversations: Conversations, contexts: Mapping[int, str]
    ) -> tuple[Message, ...]:
        """What the judge is asked about a match. `contexts`: what is before the last message."""
        samples = [i for i in match.places if i is not None]
        context = contexts[samples[0]]
        if contexts[samples[-1]] == context:
            return make_question(self.config, context, match.texts)
        prompt, completions = split_common_prefix([tuple(conversations[i]) for i in samples])
        if any(completion[0].get("role") != "assistant" for completion in completions):
            # The loop compares completions of different prompts, and the first one's is shown.
            return make_question(self.config, context, match.texts)
        # Completions of several messages, as calls of a tool with their results: what is before the
        # last one is no prompt of the other completion.
        tools = template_kwargs_of(conversations[samples[0]]).get("tools")
        return make_question(
            self.config, transcript(prompt, tools), [transcript(part) for part in completions]
        )

    def _matches(
        self, conversations: Conversations, env_infos: Infos, texts: Mapping[int, str]
    ) -> Iterator[_Match]:
        """The matches to judge: each sample alone, or each pair in both orders."""
        if self.config.mode == "rating":
            yield from (_Match((i,), (text,)) for i, text in texts.items())
            return
        pairs: list[tuple[tuple[int, str], tuple[int | None, str]]] = []
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, text in texts.items():
            references = _references(env_infos[i].get(self.config.reference_key))
            for reference in references:
                pairs.append(((i, text), (None, reference)))
            if not references and self.config.mode == "pairwise":
                group = env_infos[i].get(GROUP)
                if group is None:
                    # Questions name the tools of one of their two samples.
                    prompt = [conversations[i][:-1], template_kwargs_of(conversations[i])]
                    group = json.dumps(prompt, sort_keys=True, default=str)
                groups[group].append(i)
        for members in groups.values():
            neighbours = list(zip(members, members[1:] + members[:1], strict=True))
            # A circle of three has three pairs, but two have one, and one alone has none.
            if len(members) <= 2:
                neighbours.pop()
            for i, j in neighbours:
                pairs.append(((i, texts[i]), (j, texts[j])))
        for (first, text), (second, other_text) in pairs:
            yield _Match((first, second), (text, other_text))
            yield _Match((second, first), (other_text, text))

    def _reward(self, answers: Sequence[tuple[int, Verdict | NoVerdict]]) -> Reward:
        """The reward of a sample from all its answers, each with the place of the sample; pairs
        follow one another."""
        if not answers:
            key = self.config.reference_key
            missing = f"the sample has no reference completion: no text in {key}"
            if self.config.mode == "pairwise":
                missing += ", and it is the only one of its prompt"
            return Reward(None, error=missing)
        texts = [answer.text for _, answer in answers if answer.text]
        score = Score(None, judgement="\n\n".join(texts) or None)
        verdicts: list[Verdict] = []
        values: tuple[list[float], list[float]] = [], []  # by place, in the order of pairs
        for place, answer in answers:
            if isinstance(answer, NoVerdict):
                return Reward(None, score, error=answer.reason)
            verdicts.append(answer)
            value = answer.value
            if place == 1 and self.config.mode == "pairwise":
                # A verdict's value is that of the first place; that of an equivalence is of both.
                value = 1.0 - value
            values[place].append(value)
        components: dict[str, float] = {}
        masses = [verdict.mass for verdict in verdicts if verdict.mass is not None]
        if masses:
            components["judge/label_mass"] = statistics.fmean(masses)
        if self.config.mode == "rating":
            [verdict] = verdicts
            components["judge/rating"] = verdict.value
            return Reward(share_of_scale(verdict.value, self.config), score, components)
        forward, swapped = values
        reward = statistics.fmean(forward + swapped)
        in_first_place = statistics.fmean(forward)
        in_second_place = statistics.fmean(swapped)
        components["judge/forward"] = in_first_place
        components["judge/swapped"] = in_second_place
        components["judge/position_bias"] = in_first_place - in_second_place
        num_changed = 0
        for first, second in zip(forward, swapped, strict=True):
            num_changed += _winner(first) != _winner(second)
        components["judge/inconsistent"] = num_changed / len(forward)
        if self.config.mode == "equivalence":
            # One reference is enough, and it must be equal in both orders.
            reward = max(map(min, forward, swapped))
        return Reward(reward, score, components)


class _Match(NamedTuple):
    """One question: the sample at each place, None for a reference, and the texts."""

    places: tuple[int | None, ...]
    texts: tuple[str, ...]


def _winner(value: float) -> int:
    """1 for the sample, -1 for the other one, 0 for a tie."""
    return (value > 0.5) - (value < 0.5)


def _references(value: Any) -> list[str]:
    """Reference completions: a text, or a list of texts and message lists, whose last message is
    the completion."""
    value = plain(value)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        return []
    texts = []
    for item in value:
        if isinstance(item, Sequence) and not isinstance(item, str) and item:
            item = item[-1]
        text = judged_text(item) if isinstance(item, Mapping) else item
        if isinstance(text, str):
            texts.append(text)
    return texts
