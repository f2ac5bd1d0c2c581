"""Write the bundled data anew: `python -m treeward.data.synthetic treeward/data/bundled`."""

from __future__ import annotations

import sys
from pathlib import Path

from treeward.data.synthetic.generate import generate, to_jsonl


def main(folder: str) -> None:
    """Generate every split into the folder."""
    for split, rows in generate().items():
        (Path(folder) / f"{split}.jsonl").write_bytes(to_jsonl(rows).encode())


if __name__ == "__main__":
    main(sys.argv[1])
