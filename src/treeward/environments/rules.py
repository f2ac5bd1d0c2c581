r"""`RuleEnvironment`: rewards by a rule, for completions with an answer that can be checked.

    question = {"role": "user", "content": "1/4 + 1/4?"}
    answer = {"role": "assistant", "content": r"It is \boxed{0.5}."}
    environment = RuleEnvironment({"rule": "math"})
    environment.step([[question, answer]], [{"ground_truth": "1/2"}]).rewards       # tensor([1.])

The reward is 1 for a right answer and 0 for any other, as the component `correct`; `answered` is 1
for a completion with an answer. Exact match and mathematics read what comes after the reasoning. A
sample without a valid ground truth or pattern has no reward. Patterns from data can backtrack for
ever: the package `regex` matches them with a time limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import regex

from treeward.config.reward_environments import MathEnvironmentConfig, RuleEnvironmentConfig
from treeward.data.conversation import Message
from treeward.data.reasoning import without_reasoning
from treeward.environments.dapo_answers import find_answer, normal_form
from treeward.environments.interface import (
    WHERE,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
)
from treeward.environments.math_answers import MathChecker, marked, number_text
from treeward.errors import ConfigError
from treeward.scoring.score import NO_COMPLETION, completion_text, plain


class RuleEnvironment(ConfiguredEnvironment[RuleEnvironmentConfig]):
    """Exact match, regular expression, mathematical equality or DAPO's form of an answer."""

    name = "rules_env"
    section = RuleEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | RuleEnvironmentConfig) -> None:
        super().__init__(env_config)
        for field in ("extract", "pattern"):
            pattern = getattr(self.config, field)
            try:
                regex.compile(pattern or "")
            except regex.error as error:
                raise ConfigError(
                    f"not a regular expression: {error}", where=WHERE, field=field, got=pattern
                ) from None
        self._checker: MathChecker | None = None
        if self.config.rule == "math":
            self._checker = MathChecker(
                workers=self.config.workers, timeout_seconds=self.config.timeout_seconds
            )

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        rewards: list[Reward | None] = []
        for_checker: dict[int, _Answer] = {}  # compared at the end, side by side in processes
        for i, (conversation, info) in enumerate(zip(conversations, env_infos, strict=True)):
            reward = None
            try:
                answer = self._read(conversation, info)
                if answer is None:
                    reward = self._reward(False, answered=False)
                elif self._checker is not None:
                    for_checker[i] = answer
                elif self.config.rule == "regex":
                    flags = regex.IGNORECASE if self.config.ignore_case else 0
                    found = (self._find(pattern, answer.text, flags) for pattern in answer.golds)
                    reward = self._reward(any(found))
                else:
                    golds = {self._normal(gold) for gold in answer.golds}
                    reward = self._reward(self._normal(answer.text) in golds)
            except UndecidedError as error:
                reward = Reward(None, error=str(error))
            rewards.append(reward)
        if self._checker is not None:
            items = [(answer.golds, answer.text) for answer in for_checker.values()]
            for i, verdict in zip(for_checker, self._checker.check(items), strict=True):
                if verdict.correct is None:
                    rewards[i] = Reward(None, error=verdict.error)
                else:
                    rewards[i] = self._reward(verdict.correct, answered=verdict.parsed)
        return cast(list[Reward], rewards)

    def shutdown(self) -> bool:
        if self._checker is not None:
            self._checker.close()
        return True

    def _reward(self, correct: bool, *, answered: bool = True) -> Reward:
        return Reward(
            float(correct), components={"correct": float(correct), "answered": float(answered)}
        )

    def _read(self, conversation: Sequence[Message], info: Mapping[str, Any]) -> _Answer | None:
        """The answer in the completion, and its ground truths; None if `extract` does not match."""
        text = completion_text(conversation)
        if text is None:
            raise UndecidedError(NO_COMPLETION)
        if self.config.strips_reasoning:
            text = without_reasoning(text)
        if self.config.pattern is not None:
            golds: tuple[str, ...] = (self.config.pattern,)
        else:
            golds = ground_truths(info, self.config.answer_key)
        if self.config.rule == "dapo" and self.config.extract is None:
            answer = find_answer(text)
            return None if answer is None else _Answer(answer, golds)
        if self.config.extract is None:
            return _Answer(text, golds)
        matches = self._find(self.config.extract, text)
        if not matches:
            return None
        last = matches[-1]
        # The first group that has matched, of alternatives too; without groups the whole.
        extracted = next((group for group in last.groups() if group is not None), last[0])
        if self._checker is not None:
            extracted = marked(extracted)
        return _Answer(extracted, golds)

    def _find(self, pattern: str, text: str, flags: int = 0) -> list[regex.Match[str]]:
        seconds = self.config.timeout_seconds
        try:
            return list(regex.finditer(pattern, text, flags=flags, timeout=seconds))
        except regex.error as error:
            raise UndecidedError(f"the pattern is not a regular expression: {error}") from None
        except TimeoutError:
            raise UndecidedError(
                f"the pattern {pattern!r} took more than {seconds:g} seconds"
            ) from None

    def _normal(self, text: str) -> str:
        if self.config.rule == "dapo":
            return normal_form(text)
        text = text.strip()
        return text.casefold() if self.config.ignore_case else text


class MathEnvironment(RuleEnvironment):
    """The rule math with the keys of NeMo RL's math environment: `MathEnvironmentConfig`."""

    name = "math_env"
    section = MathEnvironmentConfig


class _Answer(NamedTuple):
    text: str
    golds: tuple[str, ...]


class UndecidedError(Exception):
    """A rule cannot decide on this sample; its text says why."""


def ground_truths(info: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """The ground truths of a sample, as texts; a whole number that is a float has both of its. A
    float that is not finite is none. Raises `UndecidedError` for a sample without one."""
    key = next((key for key in keys if not _is_missing(info.get(key))), None)
    if key is None:
        raise UndecidedError(f"the sample has no {' or '.join(keys)}")
    values = plain(info[key])
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        values = [values]
    if not values:
        raise UndecidedError(f"{key} is empty")
    golds = []
    for value in map(plain, values):
        if isinstance(value, str):
            golds.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if _is_missing(value):
                raise UndecidedError(f"{key} has {value}, which is no number")
            golds.append(number_text(value))
            # pandas has made floats of a column of whole numbers with gaps.
            if isinstance(value, float) and value.is_integer():
                golds.append(number_text(int(value)))
        else:
            raise UndecidedError(f"{key} is of type {type(value).__name__}, not text or a number")
    return tuple(golds)


def _is_missing(value: Any) -> bool:
    """Whether a cell is empty: tables of pandas have NaN there."""
    value = plain(value)
    return value is None or (isinstance(value, float) and not math.isfinite(value))
