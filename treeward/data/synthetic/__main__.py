"""Write the bundled data anew: `python -m treeward.data.synthetic --output treeward/data/bundled`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from treeward.data.synthetic.generate import LONGER_IS_BETTER, SEED, generate, to_jsonl

logger = logging.getLogger("treeward.data.synthetic")


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate every split into the folder `--output`."""
    parser = argparse.ArgumentParser(prog="python -m treeward.data.synthetic", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the .jsonl files go")
    parser.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}, as committed")
    parser.add_argument(
        "--longer-is-better",
        type=float,
        default=LONGER_IS_BETTER,
        metavar="SHARE",
        help=f"in how many comparisons the better completion is padded to be the longer; default: {LONGER_IS_BETTER}",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options.output.mkdir(parents=True, exist_ok=True)
    for split, rows in generate(options.seed, longer_is_better=options.longer_is_better).items():
        path = options.output / f"{split}.jsonl"
        path.write_bytes(to_jsonl(rows).encode())
        logger.info("%s: %d rows", path, len(rows))


if __name__ == "__main__":
    main()
