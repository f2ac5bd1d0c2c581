"""The bundled data: questions of a small closed world, and ranked completions.

    prompts("validation")[0]                         # a context to complete, as RL needs it

examples/bundled_data.py writes the committed files, byte for byte; examples/gold.py grades any completion.
"""

from __future__ import annotations

import json
from pathlib import Path

from treeward.data.preference import Message
from treeward.errors import ConfigError

SPLITS = ("train", "validation", "length_controlled")


def bundled_path(split: str) -> Path:
    """The file of a split of the bundled data. Raises `ConfigError` for another name, with the nearest one."""
    if split not in SPLITS:
        raise ConfigError.unknown("the bundled data has no such split", split, SPLITS, field="split")
    return Path(__file__).with_name("bundled") / f"{split}.jsonl"


def prompts(split: str) -> list[list[Message]]:
    """The different contexts of a split, in file order; each ends in a user turn."""
    return [context for context, _ in _by_context(split)]


def best_completions(split: str) -> list[list[str]]:
    """For each of `prompts(split)` the texts of the best completions of its comparisons, each once; at least one."""
    return [texts for _, texts in _by_context(split)]


def _by_context(split: str) -> list[tuple[list[Message], list[str]]]:
    best_by_context: dict[str, tuple[list[Message], list[str]]] = {}
    for line in bundled_path(split).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        _, best_texts = best_by_context.setdefault(json.dumps(row["context"]), (row["context"], []))
        best = min(completion["rank"] for completion in row["completions"])
        texts = [item["completion"][-1]["content"] for item in row["completions"] if item["rank"] == best]
        best_texts += [text for text in texts if text not in best_texts]
    return list(best_by_context.values())
