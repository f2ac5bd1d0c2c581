"""The server for Ray Serve's own commands, with their HTTP proxies, updates and autoscaling.

serve run treeward.serving.ray_app:app model=results/rm/final replicas=4 "ray_actor_options={num_gpus: 1}"
serve deploy examples/serve.yaml

The arguments are the keys of `ServerConfig`, `config` for a file of them, or `model` for a single model. Host and port
are Serve's `http_options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from treeward.config.load import load_file
from treeward.config.server import ServerConfig
from treeward.openai_client import key_from
from treeward.scoring.replicas import QUIET, deployed
from treeward.serving import logs
from treeward.serving.app import create_app
from treeward.serving.replicas import MANY, Replica, front, of_replicas, options_of
from treeward.serving.service import SHUTDOWN_SECONDS


@serve.ingress()
class Front:
    """The application of a server behind Serve's proxies. `replicas`: Serve's handle of them."""

    def __init__(self, config: ServerConfig, replicas: DeploymentHandle[Any]) -> None:
        logs.configure()
        self._config, self._replicas = config, replicas

    async def __serve_build_asgi_app__(self) -> FastAPI:
        config = self._config
        token = key_from(config.token_env, field="token_env")
        service = front(self._replicas, config, await self._replicas.models.remote())
        return create_app(service, token=token)


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of these arguments. Raises `ConfigError`."""
    arguments = dict(args)
    path = arguments.pop("config", None)
    if "model" in arguments:
        arguments["models"] = [{"model": arguments.pop("model")}]
    texts = [f"{key}={value}" for key, value in arguments.items() if isinstance(value, str)]  # of the command line
    values = {key: value for key, value in arguments.items() if not isinstance(value, str)}
    config = load_file(ServerConfig, path, texts, values=values)
    deploy = serve.deployment(
        name="Front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
        logging_config=QUIET,
    )
    bound: serve.Application = deploy(Front).bind(
        config, deployed(Replica, of_replicas(config), **options_of(config, {}))
    )
    return bound
