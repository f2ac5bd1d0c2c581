"""How a server gets weights from a folder, and what is left there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import GenerationError
from treeward.rl.weight_sync import FolderSync

POLICY: Any = None  # only handed on


def test_a_folder_of_weights_has_the_last_alone_and_is_left_empty(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    def export(policy: PolicyModel, folder: Path) -> None:
        assert not folder.exists() and names() <= {*others, "version-3", "version-4"}
        folder.mkdir()
        (folder / "weights").touch()

    def announce(folder: Path, version: int) -> None:
        seen.append(names() - others)
        if version == 5:
            raise GenerationError("the server is dead")

    others = {"version-of-mine", "something"}
    seen: list[set[str]] = []
    for name in (*others, "version-3", "version-12", "version-13.partial"):  # of a run that was killed
        (tmp_path / name / "model").mkdir(parents=True)
    sync = FolderSync(tmp_path, export, announce)
    sync.close()
    assert len(names()) == 5  # it has written nothing
    for version in (3, 3, 4):
        sync(POLICY, version)
        assert names() == {*others, f"version-{version}"}
    # the server may read its weights again until it has the next
    assert seen == [{"version-3"}, {"version-3"}, {"version-3", "version-4"}]
    with pytest.raises(GenerationError):
        sync(POLICY, 5)
    sync.close()
    sync.close()
    assert names() == others
