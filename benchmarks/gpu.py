"""What a GPU is for, in under nine minutes: exactness, training, scoring, policy updates, a step of
8B.

    make benchmark-gpu                          # = python benchmarks/gpu.py, writes results/benchmark-gpu.md
    python benchmarks/gpu.py --only training "8B with LoRA"
    python benchmarks/gpu.py --tiny             # toy shapes, on a CPU too: whether it runs

Each part is a process of its own with a box of seconds. What fails, or is not done in time, is said
in the table, and the others go on. One Markdown table is printed and written, with date, hardware
and versions.

From a bare machine with an NVIDIA driver, a C compiler (for Triton) and Python 3.11 or newer:

    pip install -c constraints.txt -e '.[lora]' trl prefix-grouper   # torch of PyPI is built with CUDA and has Triton
    pip install flash-attn                      # if there is one for this torch: TRL then trains with it

Models are configurations with random weights; nothing is downloaded. Comparisons are those of HH
harmless where TREEWARD_SHARED_DATA has them, or random tokens with its lengths; the table says
which.

Tokens a second are tokens of the plain rows, the same for every variant of a setting. Model FLOP
utilisation counts the operations that a variant's own tokens need: without padding, without what is
computed again, and on a tree each shared token once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import add_options, describe, use_device
from gpu_parts import PARTS, TREE, run_part

from treeward.tables import Column, markdown_table

Row = dict[str, Any]

NOT_MEASURED = "not measured"


def main() -> None:
    arguments = parse()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL refuses several in one process
    if arguments.rows is not None:  # the process of one part
        (part,) = arguments.only
        run_part(
            part,
            arguments.device,
            tiny=arguments.tiny,
            rows=arguments.rows,
            profile=arguments.profile,
        )
        return
    ends = time.monotonic() + 60 * arguments.minutes
    lines = [*_heading(arguments), ""]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.only:
            box = min(arguments.box or PARTS[part][1], ends - time.monotonic())
            rows = Path(folder) / f"{part}.jsonl"
            rows.touch()
            problem = _run(part, arguments, rows, box)
            table += _cells(part, _read(rows), problem)
            # after each: a run that is ended has written what it measured
            text = "\n".join([*lines, markdown_table(table, COLUMNS), ""])
            arguments.output.write_text(text, encoding="utf-8")
    print(text)


def _run(part: str, arguments: argparse.Namespace, rows: Path, box: float) -> str | None:
    """Run a part in a process group of its own, which ends with its box; returns what went
    wrong."""
    options = [
        *(["--tiny"] if arguments.tiny else []),
        *(["--profile"] if arguments.profile else []),
    ]
    command = [
        sys.executable,
        __file__,
        "--only",
        part,
        "--rows",
        str(rows),
        "--device",
        arguments.device,
        *options,
    ]
    start = time.monotonic()
    sys.stderr.write(f"{part}: at most {box:.0f} s\n")
    if box < 1:
        return "no time was left"
    with subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=box)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"not done in its {box:.0f} s"
    sys.stderr.write(f"{part}: {time.monotonic() - start:.0f} s\n")
    if process.returncode == 0:
        return None
    sys.stderr.write(errors)
    last = (errors.strip() or f"ended with {process.returncode}").splitlines()[-1]
    return f"failed: {last[:200]}"


def _read(rows: Path) -> list[Row]:
    """The last row of each setting and variant, in the order in which they were first written."""
    found: dict[tuple[str, str], Row] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["setting"], row["variant"]] = row
    return list(found.values())


def _cells(part: str, rows: Sequence[Row], problem: str | None) -> Iterator[Row]:
    """Rows of the table; of a part without any, one that says why."""
    ours = {
        row["setting"]: row["seconds"]
        for row in rows
        if row["variant"] == TREE and "seconds" in row
    }
    for row in rows:
        cells: Row = {
            "part": part,
            "setting": row["setting"],
            "variant": row["variant"],
            "note": row.get("note"),
        }
        seconds = row.get("seconds")
        peak = row.get("peak")
        if seconds is not None:
            cells["ms"] = f"{1000 * seconds:,.1f}"
            cells["tokens"] = f"{row['row_tokens'] / seconds:,.0f}"
            if row["setting"] in ours:
                cells["slower"] = f"{seconds / ours[row['setting']]:.2f}"
        elif row.get("note") is None or part != "exactness":
            cells |= {"ms": NOT_MEASURED, "note": row.get("note") or problem}
        if row.get("utilisation") is not None:
            cells["utilisation"] = f"{row['utilisation']:.0%}"
        if peak is not None:
            cells["peak"] = f"{peak / 1e9:.1f}"
        yield cells
    if problem is not None:
        yield {"part": part, "ms": NOT_MEASURED, "note": problem}


COLUMNS = [
    Column("part"),
    Column("setting"),
    Column("variant"),
    Column("ms"),
    Column("slower", title="x the tree's time"),
    Column("tokens", title="row tokens/s"),
    Column("utilisation", title="MFU"),
    Column("peak", title="peak GB"),
    Column("note"),
]


def _heading(arguments: argparse.Namespace) -> list[str]:
    device = use_device(arguments.device)
    hardware = f"{describe(device)}, {platform.processor() or platform.machine()}"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9
        hardware = (
            f"{describe(device)}, {memory:.0f} GB, driver {_driver()}, CUDA {torch.version.cuda}"
        )
    names = (
        "torch",
        "transformers",
        "trl",
        "peft",
        "prefix-grouper",
        "flash-attn",
        "flash-pref",
        "treeward",
    )
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    tiny = (
        " Toy shapes, only to see that it runs: these numbers say nothing."
        if arguments.tiny
        else ""
    )
    return [
        (
            f"{datetime.now(UTC):%Y-%m-%d}. {hardware}. Python {platform.python_version()}, "
            f"{versions}.{tiny}"
        )
    ]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART"
    )
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--minutes", type=float, default=8.8, help="for all of it")
    parser.add_argument("--box", type=float, help="seconds for each part, instead of its own")
    parser.add_argument("--output", type=Path, default=Path("results/benchmark-gpu.md"))
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
