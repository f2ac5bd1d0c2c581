"""Time and memory of `treeward check-data` on generated comparisons.

    python benchmarks/check_data.py [--rows 10_000 100_000 1_000_000]

The rows are those of the bundled data, over and over with a number in each prompt, so that no two
are the same: 2.4 completions of 43 tokens on average. Each file is checked by a process of its own,
whose peak memory is read when it has ended; it holds Python with its libraries too, which is what
the smallest file shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from treeward.config.data import DatasetConfig
from treeward.data.bundled import bundled_path
from treeward.data.datasets import open_dataset
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.tables import Column, results_table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="ascending"
    )
    arguments = parser.parse_args()
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        texts = texts_of([open_dataset(DatasetConfig(dataset_name="Bundled"))])
        train_tokenizer(texts, vocab_size=8192).save_pretrained(f"{folder}/tokenizer")
        for count in arguments.rows:
            path = Path(folder) / f"{count}.jsonl"
            write_rows(path, count)
            start = time.perf_counter()
            options = ["--tokenizer", f"{folder}/tokenizer", "--out", folder]
            command = [sys.executable, "-m", "treeward", "check-data", str(path), *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
            # of the largest of them so far
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
            size = path.stat().st_size / 1e6
            found.append(
                {
                    "rows": count,
                    "MB": size,
                    "seconds": seconds,
                    "rows/s": count / seconds,
                    "GB": peak,
                }
            )
            path.unlink()
    columns = [Column(name, format=",.0f") for name in ("rows", "MB", "seconds", "rows/s")]
    sys.stdout.write(
        results_table(found, [*columns, Column("GB", "peak memory, GB", ".2f")]) + "\n"
    )


def write_rows(path: Path, count: int) -> None:
    """Write the bundled comparisons with a number in each, as many as that."""
    bundled = [json.loads(line) for line in bundled_path("train").read_text("utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(itertools.islice(itertools.cycle(bundled), count)):
            *before, last = row["context"]
            context = [*before, last | {"content": f"({number}) {last['content']}"}]
            file.write(json.dumps(row | {"context": context}) + "\n")


if __name__ == "__main__":
    main()
