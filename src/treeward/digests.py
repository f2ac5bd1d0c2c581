"""Digests: how damage to files that treeward has written is noticed before it is read.

    write_digest(path), has_its_digest(path)        # of a cache: one file, and its digest beside it
    write_seal(folder, values, digests)             # of a checkpoint: names all its other files
    values, digests = read_seal(folder)             # ValueError if the seal itself is damaged
    damaged_file(folder, digests)                   # the first that is missing or changed, or None
    reseal(path)                                    # a file that is changed on purpose

XXH3 is no defence against people who mean harm: it finds what disks, networks and half copies do,
and reads a file from memory at 10 GB/s, ten times as fast as BLAKE2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from treeward.storage import write_text

SEAL_FILE = "training_state.json"
_FILES = "files"
_SEAL = "digest"


def file_digest(path: Path) -> str:
    """The digest of a file's bytes, 32 hexadecimal digits. Raises `OSError` if it cannot be
    read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_digest(path: Path) -> None:
    """Write the digest of a finished file beside it."""
    write_text(_beside(path), file_digest(path) + "\n")


def has_its_digest(path: Path) -> bool:
    """Whether a file is as `write_digest` has seen it; False for one without a digest, or that
    cannot be read."""
    try:
        expected = _beside(path).read_text(encoding="utf-8").strip()
        return file_digest(path) == expected
    except (OSError, ValueError):  # a ValueError is of a damaged digest, which is not UTF-8
        return False


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.xxh3")


def write_seal(folder: Path, values: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Write the seal of a checkpoint: `values`, `digests` by the files' names in the folder, and a
    digest of both."""
    content = {**values, _FILES: dict(digests)}
    content[_SEAL] = _digest_of(content)
    write_text(folder / SEAL_FILE, json.dumps(content, indent=2) + "\n")


def read_seal(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values and the digests of a seal. Raises `OSError` if it cannot be read, and `ValueError`
    if it is not as it was written."""
    content = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.pop(_SEAL, None) != _digest_of(content):
        raise ValueError("its content is not what its digest is of")
    digests = content.pop(_FILES)
    return content, digests


def _digest_of(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damaged_file(folder: Path, digests: Mapping[str, str]) -> tuple[Path, str] | None:
    """The first file that differs from its digest, and how."""
    for name, expected in digests.items():
        path = folder / name
        try:
            digest = file_digest(path)
        except OSError as error:
            return path, error.strerror or str(error)
        if digest != expected:
            return path, f"the digest {digest}, which was {expected} when it was saved"
    return None


def reseal(path: Path) -> None:
    """Enter a file's new digest in the seal of the checkpoint that it belongs to, if there is one;
    a damaged seal stays as it is."""
    path = path.absolute()  # a name without a folder has no parents
    # A checkpoint is `step_N/model/FILE` with the seal in `step_N`.
    folder = path.parent.parent
    try:
        values, digests = read_seal(folder)
    except (OSError, ValueError):
        return
    name = str(path.relative_to(folder))
    if name in digests:
        write_seal(folder, values, {**digests, name: file_digest(path)})
