r"""`treeward serve`: reward models, or a judge that compares completions, behind an HTTP address,
in the API formats that RL frameworks use.

examples:
  treeward serve results/quickstart/final
  curl localhost:8000/v1/rewards -d '{"completions": ["12", "13"],
      "context": [{"role": "user", "content": "What is 7 plus 5?"}]}'
  treeward serve MODEL OTHER_MODEL --host 0.0.0.0 --port 8000 token_env=TREEWARD_TOKEN
  treeward serve "{models: [MODEL, OTHER_MODEL], ensemble: worst, \
      shaping: {length_penalty: {coefficient: 0.001}}}"
  treeward serve MODEL --replicas 4 "ray_actor_options={num_gpus: 1}"
  treeward serve --config server.yaml --port 8001 deadline_seconds=30
  treeward serve "judge={model: Qwen/Qwen3-0.6B, use_logprobs: true, num_rollouts_per_prompt: 8}"

http://127.0.0.1:8000/ is a page to try the models. docs/serving.md has every route with an example.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated, Any

import typer

from treeward.cli.options import ModelOptions, model_section, with_model_options
from treeward.config.load import load_file
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError, pip_install


@with_model_options
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|key=value",
            help="Reward models: folders, hub names or sections; and overrides of the server.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A YAML file that configures the server."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen on; default: 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="The port; default: 8000. 0 takes a free port."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Copies of all models, each in a process of Ray Serve."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(help="GPUs that a replica of the model is divided over, by Ray."),
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    overrides = [word for word in words or [] if _is_override(word)]
    models = [word for word in words or [] if not _is_override(word)]
    has_judge = any(override.startswith("judge") for override in overrides)
    if not models and config is None and not has_judge:
        raise ConfigError(
            "there is nothing to serve",
            where="MODEL",
            need="a reward model, a judge, or --config FILE",
        )
    # The models of the file have their own keys, which options would contradict.
    if not models and options.keys != ModelOptions().keys:
        raise ConfigError(
            "options of models need a model on the command line",
            need="MODEL, or the same keys in the file's models",
        )
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "replicas": replicas,
        "tensor_parallel_size": tensor_parallel_size,
        "batch_tokens": options.batch_tokens,
    }
    # An option that is not given leaves the key to the file.
    values = {key: setting for key, setting in settings.items() if setting is not None}
    if models:
        values["models"] = [options.keys | model_section(model) for model in models]
    server = load_file(ServerConfig, config, overrides, values=values)
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "the server needs packages that are not installed",
                got=f"no module {package}",
                fix=pip_install("serve"),
            )
    # Threads that spin between two batches take the processor from those that read requests. torch
    # reads the variable when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    # It imports torch and the packages of the server.
    from treeward.serving.run import serve

    return serve(server)


def _is_override(word: str) -> bool:
    # A section in braces, which is a model, may have an equals sign within, and so may a path. Not
    # `Path.exists`, which raises for an override that is too long for a name.
    is_path = os.path.exists(os.path.expanduser(word))
    return "=" in word and not word.startswith("{") and not is_path
