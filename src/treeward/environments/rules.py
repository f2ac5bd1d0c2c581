r"""`RuleEnvironment`: rewards by a rule, for completions with an answer that can be checked.

    RuleEnvironment({"rule": "math"}).step(
        [[{"role": "user", "content": "1/4 + 1/4?"}, {"role": "assistant", "content": r"It is \boxed{0.5}."}]],
        [{"ground_truth": "1/2"}],
    ).rewards                                                                                        # tensor([1.])

The reward is 1 for a right answer and 0 for any other, as the component `correct`; `answered` is 1
for a completion with an answer. Exact match and mathematics read what comes after the reasoning. A
sample without a valid ground truth or pattern has no reward. Patterns from data can backtrack for
ever: the package `regex` matches them with a time limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from treeward.environments.math_answers import MathChecker, MathVerdict, marked, number_text
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
        self._strips_reasoning = self.config.strips_reasoning
        math = self.config.rule == "math"
        self._checker = (
            MathChecker(workers=self.config.workers, timeout_seconds=self.config.timeout_seconds)
            if math
            else None
        )

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        results: list[Reward | _Answer] = []
        for conversation, info in zip(conversations, env_infos, strict=True):
            try:
                answer = self._read(conversation, info)
                if answer is None:
                    results.append(self._reward(False, answered=False))
                else:
                    results.append(answer if self._checker else self._reward(self._matches(answer)))
            except _UndecidedError as error:
                results.append(Reward(None, error=str(error)))
        compared = [
            (result.golds, result.text) for result in results if isinstance(result, _Answer)
        ]
        verdicts = iter(self._checker.check(compared) if self._checker else [])
        return [
            result if isinstance(result, Reward) else self._judged(next(verdicts))
            for result in results
        ]

    def shutdown(self) -> bool:
        if self._checker is not None:
            self._checker.close()
        return True

    def _judged(self, verdict: MathVerdict) -> Reward:
        if verdict.correct is None:
            return Reward(None, error=verdict.error)
        return self._reward(verdict.correct, answered=verdict.parsed)

    def _reward(self, correct: bool, *, answered: bool = True) -> Reward:
        return Reward(
            float(correct), components={"correct": float(correct), "answered": float(answered)}
        )

    def _read(self, conversation: Sequence[Message], info: Mapping[str, Any]) -> _Answer | None:
        """The answer in the completion, and its ground truths; None if `extract` does not match."""
        text = completion_text(conversation)
        if text is None:
            raise _UndecidedError(NO_COMPLETION)
        if self._strips_reasoning:
            text = without_reasoning(text)
        golds = (
            (self.config.pattern,)
            if self.config.pattern is not None
            else _golds(info, self.config.answer_key)
        )
        if self.config.rule == "dapo" and self.config.extract is None:
            answer = find_answer(text)
            return None if answer is None else _Answer(answer, golds)
        if self.config.extract is None:
            return _Answer(text, golds)
        matches = self._find(self.config.extract, text)
        if not matches:
            return None
        last = matches[-1]
        extracted = next((group for group in last.groups() if group is not None), last[0])
        return _Answer(marked(extracted) if self._checker else extracted, golds)

    def _matches(self, answer: _Answer) -> bool:
        if self.config.rule == "regex":
            flags = regex.IGNORECASE if self.config.ignore_case else 0
            return any(self._find(pattern, answer.text, flags) for pattern in answer.golds)
        return self._normal(answer.text) in {self._normal(gold) for gold in answer.golds}

    def _find(self, pattern: str, text: str, flags: int = 0) -> list[regex.Match[str]]:
        seconds = self.config.timeout_seconds
        try:
            return list(regex.finditer(pattern, text, flags=flags, timeout=seconds))
        except regex.error as error:
            raise _UndecidedError(f"the pattern is not a regular expression: {error}") from None
        except TimeoutError:
            raise _UndecidedError(
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


class _UndecidedError(Exception):
    """The rule cannot decide on this sample."""


def _golds(info: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """The ground truths of a sample, as texts."""
    key = next((key for key in keys if info.get(key) is not None), None)
    if key is None:
        raise _UndecidedError(f"the sample has no {' or '.join(keys)}")
    value = plain(info[key])
    values = (
        value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    )
    if not values:
        raise _UndecidedError(f"{key} is empty")
    return tuple(_gold_text(plain(gold), key) for gold in values)


def _gold_text(value: Any, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _UndecidedError(f"{key} is of type {type(value).__name__}, not text or a number")
    return number_text(value)
