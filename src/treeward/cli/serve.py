"""`treeward serve`: reward models behind an HTTP address, in every dialect that RL frameworks speak.

examples:
  treeward serve results/quickstart/final
  curl localhost:8000/v1/rewards -d '{"completions": ["12", "13"],
      "context": [{"role": "user", "content": "What is 7 plus 5?"}]}'
  treeward serve MODEL OTHER_MODEL --host 0.0.0.0 --port 8000 token_env=TREEWARD_TOKEN
  treeward serve "{models: [MODEL, OTHER_MODEL], ensemble: worst, shaping: {length_penalty: {coefficient: 0.001}}}"
  treeward serve MODEL --replicas 4 "ray_actor_options={num_gpus: 1}"
  treeward serve --config server.yaml --port 8001 deadline_seconds=30
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
    words: Annotated[list[str] | None, typer.Argument(metavar="MODEL|key=value", help="Models, and keys.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A YAML file with the configuration.")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="The port; default 8000, 0 takes a free one.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Processes that each hold every model, by Ray Serve.")] = None,
    *,
    options: ModelOptions,
) -> int:
    overrides = [word for word in words or [] if "=" in word and not word.startswith("{")]
    models = [word for word in words or [] if word not in overrides]
    if not models and config is None:
        raise ConfigError("there is nothing to serve", where="MODEL", need="a reward model, or --config FILE")
    if not models and options.keys != ModelOptions().keys:
        summary = "options of models are for models that are named on the command line"
        raise ConfigError(summary, need="MODEL, or the same in the file's models")
    settings = {"host": host, "port": port, "replicas": replicas, "batch_tokens": options.batch_tokens}
    values: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    if models:
        values["models"] = [options.keys | model_section(model) for model in models]
    server = load_file(ServerConfig, config, overrides, values=values)
    # Threads that spin between two batches take the processor from those that read requests. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        got = f"no module {missing[0]}"
        summary = "the server needs packages that are not installed"
        raise ConfigError(summary, got=got, fix=pip_install("serve"))

    from treeward.serving.run import serve

    return serve(server)
