"""The words of `treeward serve`, and what they become."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from verbs import call

from treeward.cli import serve
from treeward.cli.main import main
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError


def config_of(*words: str) -> ServerConfig:
    """The configuration, as it is when the command is about to load models."""

    def about_to_load(config: ServerConfig) -> None:
        raise Loading(config)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Loading) as caught:
        patch.setattr("treeward.serving.run.serve", about_to_load)
        call(serve.run, *words)
    config: ServerConfig = caught.value.args[0]
    return config


class Loading(Exception):
    pass


def test_words_are_models_and_settings() -> None:
    config = config_of("x/a/final", "--port", "0", "org/b", "--host", "0.0.0.0", "max_queued=5", "token_env=TOKEN")
    assert [model.served_name for model in config.models] == ["a", "org/b"]
    assert (config.host, config.port, config.max_queued, config.token_env) == ("0.0.0.0", 0, 5, "TOKEN")
    words = ["a", "b", "--shaping", "contract", "--dtype", "bfloat16", "--device", "cpu", "--unchecked"]
    for model in config_of(*words, "--trust-remote-code").models:
        assert (model.shaping, model.dtype, model.device) == ("contract", "bfloat16", "cpu")
        assert model.trust_remote_code and not model.check_contract
    config = config_of("a", "--max-length", "64", "--truncation", "truncate_left", "--batch-tokens", "512")
    assert (config.models[0].max_length, config.models[0].truncation) == (64, "truncate_left")
    assert config.batch_tokens == 512
    [model] = config_of("a", "b", "--ensemble", "worst").models
    assert model.models == ("a", "b") and model.ensemble is not None and model.ensemble.over == "models"
    [model] = config_of("a", "--ensemble", "{method: mean, over: heads}").models
    assert model.models == ("a",) and model.ensemble is not None and model.ensemble.over == "heads"


def test_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("models: [{model: a, name: first}]\nport: 7000\nmax_queued: 3\n")
    config = config_of("--config", str(file), "--port", "7001", "max_queued=4")
    assert (config.models[0].served_name, config.port, config.max_queued) == ("first", 7001, 4)
    assert config_of("--config", str(file), "b").models[0].served_name == "b"
    with pytest.raises(ConfigError, match="named on the command line"):
        call(serve.run, "--config", file, "--shaping=contract")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is nothing to serve"),
        (["a", "prot=1"], "prot"),
        (["a", "--ensemble", "[1]"], "the option is no section"),
        (["a", "--shaping", "{nonsense: 1}"], "nonsense"),
        (["a", "--device", "cuda:0,cuda:1"], "with `replicas` each GPU has a copy"),
    ],
)
def test_wrong_words(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        call(serve.run, *words)
    assert says in str(wrong.value)


def test_without_the_packages_of_the_server(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["serve", "a"]) == 2
    assert "pip install 'treeward[serve]'" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a server says that does not start."""
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and "Serving" not in said
    return said


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("token_env=NO_SUCH_TOKEN", "the server's key is not in the environment"),
        ("host=999.1.1.1", "the address cannot be used"),
    ],
)
def test_what_is_told_before_anything_is_loaded(
    restored_logging: None, capsys: pytest.CaptureFixture[str], word: str, says: str
) -> None:
    """A model that is not there would be the first error, if it were looked at."""
    assert says in refused(capsys, "/nowhere/model", "--port", "0", word)


def test_a_model_that_does_not_keep_its_contract(
    restored_logging: None, capsys: pytest.CaptureFixture[str], model_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    weights = {name: tensor * 1.01 for name, tensor in load_file(broken / "model.safetensors").items()}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "does not keep its scoring contract" in refused(capsys, str(broken), "--port", "0")
