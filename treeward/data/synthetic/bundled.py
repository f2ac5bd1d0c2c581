"""Where the committed splits of the bundled data lie, and their prompts.

bundled_path("validation")       # .../treeward/data/bundled/validation.jsonl
prompts("train")                 # every different context of the split, in file order
"""

from __future__ import annotations

import difflib
import json
from importlib import resources
from pathlib import Path

from treeward.data.preference import Message
from treeward.errors import ConfigError

__all__ = ["SPLITS", "bundled_path", "prompts"]

SPLITS = ("train", "validation", "length_controlled")


def bundled_path(split: str) -> Path:
    """The file of a split of the bundled data.

    Raises `ConfigError` for a split that does not exist, with the nearest name.
    """
    if split not in SPLITS:
        nearest = difflib.get_close_matches(split, SPLITS, n=1)
        raise ConfigError(
            "the bundled data has no such split",
            field="split",
            got=split,
            need=f"one of {', '.join(SPLITS)}",
            fix=f"did you mean {nearest[0]}?" if nearest else None,
        )
    return Path(str(resources.files("treeward.data").joinpath("bundled", f"{split}.jsonl")))


def prompts(split: str) -> list[list[Message]]:
    """The different contexts of a split, in file order; each ends in a user turn that `gold_quality` can grade.

    Raises `ConfigError` for a split that does not exist.
    """
    contexts: dict[str, list[Message]] = {}
    for line in bundled_path(split).read_text(encoding="utf-8").splitlines():
        context = json.loads(line)["context"]
        contexts.setdefault(json.dumps(context), context)
    return list(contexts.values())
