"""How a server gets the policy's weights after an update: from a folder, or by a function of the user's.

    sync = FolderSync(Path("/shared/weights"), export, announce)
    sync(policy, 3)             # writes /shared/weights/version-3 and has the server load it
    sync = sync_function("my_module.broadcast")

A function is called with the policy and the version, and returns when the server samples from the new weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treeward.model.policy_model import PolicyModel
from treeward.user_code import import_object

__all__ = ["FolderSync", "WeightSync", "sync_function"]

_VERSION = re.compile(r"version-\d+(\.partial)?")


WeightSync = Callable[[PolicyModel, int], Any]
"""Called after each change of the weights, before the next completions."""


class FolderSync:
    """Writes the weights to `folder/version-N`, which the server must see under the same path, and announces them.

    `export(policy, folder)` writes a model folder; `announce(folder, version)` returns when the server has loaded it.
    `folder` belongs to one run and keeps only the version that the server has: versions of a run that was killed are
    removed before the first is written, and `close` removes the last.
    """

    def __init__(
        self, folder: Path, export: Callable[[PolicyModel, Path], None], announce: Callable[[Path, int], None]
    ) -> None:
        self.folder, self._export, self._announce = folder, export, announce
        self._last: Path | None = None
        self._wrote = False

    def __call__(self, policy: PolicyModel, version: int) -> None:
        target, partial = self.folder / f"version-{version}", self.folder / f"version-{version}.partial"
        self._clear(keep=None if self._last == target else self._last)
        self._wrote = True
        self._export(policy, partial)
        partial.rename(target)
        self._announce(target.resolve(), version)
        self._last = target
        self._clear(keep=target)

    def close(self) -> None:
        """Remove the versions, if any was written. It can be called twice."""
        if self._wrote:
            self._clear(keep=None)
        self._last, self._wrote = None, False

    def _clear(self, *, keep: Path | None) -> None:
        for found in self.folder.glob("version-*"):
            if found != keep and _VERSION.fullmatch(found.name):
                shutil.rmtree(found, ignore_errors=True)


def sync_function(path: str) -> WeightSync:
    """The function at a dotted path. Raises `ConfigError` if there is none."""
    found: WeightSync = import_object(path, field="weight_sync")
    return found
