"""Where the committed splits of the bundled data lie, and their prompts.

bundled_path("validation")       # .../treeward/data/bundled/validation.jsonl
prompts("train")                 # every different context of the split, in file order
best_completions("train")            # for each of them the best completions
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from treeward.config.base import nearest_name
from treeward.data.preference import Message
from treeward.errors import ConfigError

__all__ = ["SPLITS", "best_completions", "bundled_path", "prompts"]

SPLITS = ("train", "validation", "length_controlled")


def bundled_path(split: str) -> Path:
    """The file of a split of the bundled data.

    Raises `ConfigError` for a split that does not exist, with the nearest name.
    """
    if split not in SPLITS:
        near, need = nearest_name(split, SPLITS), f"one of {', '.join(SPLITS)}"
        fix = f"did you mean {near}?" if near else None
        raise ConfigError("the bundled data has no such split", field="split", got=split, need=need, fix=fix)
    return Path(str(resources.files("treeward.data").joinpath("bundled", f"{split}.jsonl")))


def prompts(split: str) -> list[list[Message]]:
    """The different contexts of a split, in file order; each ends in a user turn that `gold_quality` can grade.

    Raises `ConfigError` for a split that does not exist.
    """
    return [context for context, _ in _by_context(split)]


def best_completions(split: str) -> list[list[str]]:
    """For each of `prompts(split)` the texts of the best completions of its comparisons, each once; at least one.

    Raises `ConfigError` for a split that does not exist.
    """
    return [texts for _, texts in _by_context(split)]


def _by_context(split: str) -> list[tuple[list[Message], list[str]]]:
    found: dict[str, tuple[list[Message], list[str]]] = {}
    for line in bundled_path(split).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        _, known = found.setdefault(json.dumps(row["context"]), (row["context"], []))
        best = min(completion["rank"] for completion in row["completions"])
        texts = [each["completion"][-1]["content"] for each in row["completions"] if each["rank"] == best]
        known += [text for text in texts if text not in known]
    return list(found.values())
