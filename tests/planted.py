"""Rewards that a small policy can learn in seconds, and environments that fail as tests tell them
to.

`env: {planted: {type: custom, function: planted.vowels}}`: the folder of this file is on Python's
path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeward.data.conversation import Message
from treeward.environments.interface import Environment, Reward
from treeward.errors import ConfigError
from treeward.scoring.score import Score

__all__ = [
    "Scaled",
    "Troubled",
    "Unmakeable",
    "consonants",
    "fails",
    "length",
    "vowels",
    "vowels_and_order",
]

Conversation = Sequence[Message]


def vowels(prompt: str, response: str) -> float:
    """The share of characters that are vowels."""
    return sum(character in "aeiou" for character in response) / max(len(response), 1)


def consonants(prompt: str, response: str) -> float:
    """What `vowels` leave."""
    return 1 - vowels(prompt, response)


def fails(prompt: str, response: str) -> float:
    """Never a reward."""
    raise RuntimeError("told to fail")


def vowels_and_order(prompt: str, response: str) -> dict[str, float | None]:
    """Two rewards: the vowels, and the share of neighbours in alphabetical order; of an empty
    response the second is missing."""
    pairs = list(zip(response, response[1:], strict=False))
    in_order = sum(first <= second for first, second in pairs)
    share = in_order / len(pairs) if pairs else None
    return {"reward/vowels": vowels(prompt, response), "reward/order": share}


def length(prompt: str, response: str) -> float:
    """A character counts a hundredth."""
    return len(response) / 100


class Scaled(Environment):
    """Ten times the vowels, with the vowels as the score."""

    name = "scaled_env"

    def __init__(self, section: Mapping[str, Any]) -> None:
        assert section is not None

    def rewards(
        self, conversations: Sequence[Conversation], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        raw = [vowels("", str(conversation[-1]["content"])) for conversation in conversations]
        return [Reward(10 * value, Score(value)) for value in raw]


class Troubled(Scaled):
    """`Scaled` that does what the JSON file `orders` says, read at every step.

    {"fail": share of the samples} raises for the whole step at 1, else gives no reward; {"after":
    n} obeys only when this object has rewarded n samples.
    """

    name = "troubled_env"

    def __init__(self, section: Mapping[str, Any]) -> None:
        super().__init__(section)
        self.orders = Path(section["orders"])
        self.count = 0

    def rewards(
        self, conversations: Sequence[Conversation], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        orders = json.loads(self.orders.read_text(encoding="utf-8"))
        self.count += len(conversations)
        if self.count <= orders.get("after", 0):
            orders = {}
        found = super().rewards(conversations, env_infos)
        if orders.get("fail") == 1:
            raise RuntimeError("told to fail")
        for i in range(round(orders.get("fail", 0.0) * len(found))):
            found[i] = Reward(None, error="told to fail")
        return found


class Unmakeable(Scaled):
    """Is refused when it is made."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        raise ConfigError("told not to be made")
