"""The words of `treeward serve`, and what they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from verbs import Command

from treeward.config.server import ServerConfig

pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def config_of(treeward: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerConfig]:
    """The configuration, as it is when the command is about to load models."""
    configs: list[ServerConfig] = []
    monkeypatch.setattr("treeward.serving.run.serve", configs.append)

    def parse(*words: object) -> ServerConfig:
        treeward("serve", *words)
        return configs.pop()

    return parse


def test_words_are_models_and_settings(config_of: Callable[..., ServerConfig]) -> None:
    config = config_of(
        "x/a/final",
        "--port",
        "0",
        "org/b",
        "--host",
        "0.0.0.0",
        "max_queued=5",
        "token_env=TOKEN",
    )
    assert [model.served_name for model in config.models] == ["a", "org/b"]
    assert (config.host, config.port, config.max_queued, config.token_env) == (
        "0.0.0.0",
        0,
        5,
        "TOKEN",
    )
    words = [
        "a",
        "{models: b, shaping: {preference_score: true}}",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
    ]
    plain, shaped = config_of(*words, "--unchecked", "--trust-remote-code").models
    assert plain.shaping is None
    assert shaped.shaping is not None
    assert shaped.shaping.preference_score
    for model in (plain, shaped):
        assert (model.dtype, model.device) == ("bfloat16", "cpu")
        assert model.trust_remote_code
        assert not model.check_contract
    config = config_of(
        "a",
        "--max-length",
        "64",
        "--truncation",
        "truncate_left",
        "--batch-tokens",
        "512",
    )
    assert (config.models[0].max_length, config.models[0].truncation) == (64, "truncate_left")
    assert config.batch_tokens == 512
    [model] = config_of("{models: [a, b], ensemble: worst}").models
    assert model.models == ("a", "b")
    assert model.ensemble is not None


def test_a_file_and_the_command_line(
    treeward: Command,
    config_of: Callable[..., ServerConfig],
    tmp_path: Path,
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("models: [{model: a, name: first}]\nport: 7000\nmax_queued: 3\n")
    config = config_of("--config", file, "--port", "7001", "max_queued=4")
    assert (config.models[0].served_name, config.port, config.max_queued) == ("first", 7001, 4)
    assert config_of("--config", file, "b").models[0].served_name == "b"
    assert "need a model on the command line" in treeward("serve", "--config", file, "--unchecked").err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is nothing to serve"),
        (["a", "prot=1"], "prot"),
        (["{models: [a, b], ensemble: [1]}"], "ensemble"),
        (["{models: a, shaping: {nonsense: 1}}"], "nonsense"),
        (
            ["/nowhere", "--port", "0", "token_env=NO_SUCH_TOKEN"],
            "the server's key is not in the environment",
        ),
        (["/nowhere", "--port", "0", "host=999.1.1.1"], "the server cannot use this address"),
    ],
)
def test_what_is_told_before_anything_is_loaded(
    words: list[str],
    says: str,
    treeward: Command,
) -> None:
    """A model that is not there would be the first error, if it were looked at."""
    ended = treeward("serve", *words)
    assert ended.code == 2
    assert says in ended.err


def test_a_model_that_does_not_keep_its_contract(treeward: Command, own_model: Path) -> None:
    weights = {name: tensor * 1.01 for name, tensor in load_file(own_model / "model.safetensors").items()}
    save_file(weights, own_model / "model.safetensors", metadata={"format": "pt"})
    ended = treeward("serve", own_model, "--port", 0)
    assert ended.code == 2
    assert "does not keep its scoring contract" in ended.err
    assert "Serving" not in ended.err
