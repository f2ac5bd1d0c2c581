"""The bundled data: questions of a small closed world, and ranked completions.

    bundled_path("validation")                       # the rank format, a comparison a line

examples/bundled_data.py writes the committed files, byte for byte; examples/gold.py grades any
completion.
"""

from __future__ import annotations

from pathlib import Path

from treeward.errors import ConfigError

SPLITS = ("train", "validation", "length_controlled")


def bundled_path(split: str) -> Path:
    """The file of a split of the bundled data. Raises `ConfigError` for another name, with the
    nearest one."""
    if split not in SPLITS:
        raise ConfigError.unknown(
            "the bundled data has no such split",
            split,
            SPLITS,
            field="split",
        )
    return Path(__file__).with_name("bundled") / f"{split}.jsonl"
