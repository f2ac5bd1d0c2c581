"""Files and folders that survive a crash, and belong to one process at a time.

write_text(Path("run.json"), text)               # the old file or the new one, never a part
with atomic_file(Path("rows.jsonl")) as stream:  # the same, written piece by piece
    stream.write(line)
is_stream(Path("/dev/stdout"))       # a device or a FIFO, which is written, never replaced
with folder_lock(Path("results/rm")) as locked:  # released however the process ends
    if not locked: ...                           # another process has it
remove_leftovers(Path("results/rm"))             # the parts of writes that were killed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_PARTIAL = ".partial"


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write; it replaces `path` when the block ends, and is removed if the block fails.

    `mode` is "w" (UTF-8, line feeds, lone surrogates as JSON escapes them) or "wb". Raises
    `OSError` where the folder cannot be written. A symlink stays, and the file that it names is
    replaced; a device or a FIFO is written straight.
    """
    text = {}
    if "b" not in mode:
        # Model output may hold half a surrogate pair, which UTF-8 cannot encode.
        text = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    if is_stream(path):
        with open(path, mode, **text) as stream:  # type: ignore[call-overload]
            yield stream
        return
    path = path.resolve()
    # Temporary files are their owner's alone (0600), but servers and colleagues read a model.
    permissions = 0o644
    if path.exists():
        permissions = path.stat().st_mode & 0o777
    # In the same folder: `os.replace` is atomic within one file system only.
    descriptor, partial = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL
    )
    try:
        with open(descriptor, mode, **text) as stream:  # type: ignore[call-overload]
            yield stream
            # Before the rename: after a power cut the new name would else have an empty file.
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(partial, permissions)
        os.replace(partial, path)
    except BaseException:
        # The user's error is the write's, not that of the removal.
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(path.parent)


def is_stream(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, a FIFO, a
    socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path, text: str) -> None:
    """Write a whole file; a crash leaves the old one or the new one."""
    with atomic_file(path) as stream:
        stream.write(text)


def remove_leftovers(*folders: Path) -> None:
    """Remove the temporary files of writes that were killed; nobody may be writing into the
    folders."""
    for folder in folders:
        for partial in folder.glob(f".*{_PARTIAL}"):
            partial.unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock an existing folder or file while the block runs; yields False where another process
    holds it. `wait`: instead of yielding False, wait until it is free. Raises `OSError` where it
    cannot be locked."""
    # An flock belongs to the open file: the kernel drops it with the process, so that no lock
    # outlives a `kill -9`, as a lock file would.
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
