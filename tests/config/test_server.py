"""`ServerConfig`: names of models, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treeward.config.load import load_section
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("results/rm/final", "rm"),
        ("results/rm/final/", "rm"),
        ("results/rm/checkpoints/step_4", "step_4"),
        ("/final", "final"),
        ("org/model-7B", "org/model-7B"),
    ],
)
def test_what_a_model_is_called(model: str, name: str) -> None:
    assert ServedModelConfig(model=model).served_name == name


def test_a_folder_that_looks_like_a_hub_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "final").mkdir(parents=True)
    assert ServedModelConfig(model="runs/final").served_name == "runs"
    monkeypatch.chdir(tmp_path / "runs")
    assert ServedModelConfig(model="final").served_name == "runs"


def test_an_ensemble_is_called_by_its_members() -> None:
    section = {"models": ["runs/a/final", "runs/b/final"], "ensemble": {"method": "worst"}}
    assert ServedModelConfig.model_validate(section).served_name == "worst-of-a-b"


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"models": [{}]}, "model"),
        ({"models": [{"model": "a", "models": ["b"]}]}, "model"),
        ({"models": [{"models": ["a", "b"]}]}, "ensemble"),
        ({"models": [{"model": "a"}, {"model": "b/a"}, {"model": "x", "name": "a"}]}, "models"),
        ({"models": [{"model": "a"}], "tls_key": "k"}, "tls_certificate"),
        ({"models": [{"model": "a"}], "tls_certificate": "c"}, "tls_key"),
    ],
)
def test_what_does_not_go_together(section: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_section(ServerConfig, section, where="server")
    assert field in str(wrong.value)
