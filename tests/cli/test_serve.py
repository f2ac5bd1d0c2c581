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
    options = ["--port", "0", "--host", "0.0.0.0"]
    config = config_of("x/a/final", *options, "org/b", "max_queued=5", "token_env=TOKEN")
    assert [model.served_name for model in config.models] == ["a", "org/b"]
    assert config.host == "0.0.0.0"
    assert config.port == 0
    assert config.max_queued == 5
    assert config.token_env == "TOKEN"


def test_a_path_may_have_an_equals_sign(
    config_of: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    folder = tmp_path / "lr=1e-5" / "final"
    folder.mkdir(parents=True)
    config = config_of(folder, "port=0")
    assert [model.models for model in config.models] == [(str(folder),)]
    assert config.port == 0
    # No file can have a name of this length.
    assert config_of(folder, f"host={'h' * 300}").host == "h" * 300


def test_options_of_models_are_for_all_models(config_of: Callable[..., ServerConfig]) -> None:
    section = "{models: b, shaping: {preference_score: true}}"
    options = ["--dtype", "bfloat16", "--device", "cpu", "--unchecked", "--trust-remote-code"]
    plain, shaped = config_of("a", section, *options).models
    assert plain.shaping is None
    assert shaped.shaping is not None
    assert shaped.shaping.preference_score
    for model in (plain, shaped):
        assert model.dtype == "bfloat16"
        assert model.device == "cpu"
        assert model.trust_remote_code
        assert not model.check_contract


def test_lengths_and_batches_are_options(config_of: Callable[..., ServerConfig]) -> None:
    options = ["--max-length", "64", "--truncation", "truncate_left", "--batch-tokens", "512"]
    config = config_of("a", *options)
    assert config.models[0].max_length == 64
    assert config.models[0].truncation == "truncate_left"
    assert config.batch_tokens == 512


def test_a_section_may_be_an_ensemble(config_of: Callable[..., ServerConfig]) -> None:
    [model] = config_of("{models: [a, b], ensemble: worst}").models
    assert model.models == ("a", "b")
    assert model.ensemble is not None


def test_a_judge_needs_no_model(config_of: Callable[..., ServerConfig], tmp_path: Path) -> None:
    config = config_of("judge={model: j, num_rollouts_per_prompt: 4}", "port=0")
    assert config.models == ()
    assert config.judge is not None and config.judge.num_rollouts_per_prompt == 4
    # A GenRM writes scores, unless it is told otherwise.
    assert config.judge.verdict == "scores"
    file = tmp_path / "judge.yaml"
    file.write_text("judge: {model: j}\n")
    both = config_of("a", "--config", file, "judge.verdict=label")
    assert both.judge is not None and both.judge.verdict == "label"
    assert both.models[0].served_name == "a"


@pytest.fixture
def server_file(tmp_path: Path) -> Path:
    """A configuration of one model."""
    file = tmp_path / "server.yaml"
    file.write_text("models: [{model: a, name: first}]\nport: 7000\nmax_queued: 3\n")
    return file


def test_the_command_line_goes_before_the_file(
    config_of: Callable[..., ServerConfig],
    server_file: Path,
) -> None:
    config = config_of("--config", server_file, "--port", "7001", "max_queued=4")
    assert config.models[0].served_name == "first"
    assert config.port == 7001
    assert config.max_queued == 4
    assert config_of("--config", server_file, "b").models[0].served_name == "b"


def test_options_of_models_are_not_for_those_of_a_file(
    treeward: Command,
    server_file: Path,
) -> None:
    ended = treeward("serve", "--config", server_file, "--unchecked")
    assert "need a model on the command line" in ended.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is nothing to serve"),
        (["a", "prot=1"], "prot"),
        (["judge={model: j, num_rollout_per_prompt: 4}"], "num_rollouts_per_prompt"),
        (["judge={model: j}", "replicas=2"], "serve the judge by itself"),
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
    weights = load_file(own_model / "model.safetensors")
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(weights, own_model / "model.safetensors", metadata={"format": "pt"})
    ended = treeward("serve", own_model, "--port", 0)
    assert ended.code == 2
    assert "does not keep its scoring contract" in ended.err
    assert "Serving" not in ended.err
