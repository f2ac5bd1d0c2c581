"""The folder is whole: its configuration is one that the server takes, and its rows can be
scored."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml

from treeward.data.responses_items import conversation_of

FOLDER = Path(__file__).parent.parent
APP = runpy.run_path(str(FOLDER / "app.py"))


def test_the_configuration_is_the_servers() -> None:
    merged = yaml.safe_load((FOLDER / "configs" / "reward_model.yaml").read_text(encoding="utf-8"))
    section = merged["reward_model_server"]["resources_servers"]["reward_model"]
    assert (FOLDER / section["entrypoint"]).is_file()
    config = APP["checked"](section | {"model_path": "a/model"}, "Gym").server_config
    assert config.models[0].models == ("a/model",)


@pytest.mark.parametrize(
    "file", ["resources_servers/reward_model/data/example.jsonl", "data/train.jsonl"]
)
def test_the_examples_can_be_scored(file: str) -> None:
    for line in (FOLDER.parents[1] / file).read_text(encoding="utf-8").splitlines():
        params = json.loads(line)["responses_create_params"]
        assert (
            conversation_of(params, [{"role": "assistant", "content": "Yes."}])[-2]["role"]
            == "user"
        )
