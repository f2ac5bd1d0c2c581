"""`lock_folder`: one process for a folder at a time.

descriptor = lock_folder(Path("results/rm"))
if descriptor is None: ...      # another process has it
os.close(descriptor)            # gives it back, as the end of the process does, however it ends
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_folder"]


def lock_folder(folder: Path) -> int | None:
    """Lock a folder that exists until the descriptor is closed; None where another process has locked it.

    Raises `OSError` where it cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
