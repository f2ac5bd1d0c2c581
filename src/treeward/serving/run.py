"""`serve`: load and verify the models, then listen until a signal.

    serve(ServerConfig(models=[{"models": "results/rm/final"}], port=8000))  # until a signal

The server listens only when every model is loaded and keeps its scoring contract. On a signal
uvicorn accepts nothing new and responds to accepted requests.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from treeward.config.server import ServerConfig
from treeward.errors import ConfigError, pip_install
from treeward.openai_client import key_from
from treeward.serving.app import create_app
from treeward.serving.protocol import BoundedProtocol
from treeward.serving.service import SHUTDOWN_SECONDS, Service

logger = logging.getLogger(__name__)

_BACKLOG = 4096
"""Connections that may wait to be accepted: RL clients open thousands at once."""


def serve(config: ServerConfig) -> int:
    """Serve until a signal, and return the exit code. With several replicas this process is their
    front.

    Raises `ConfigError` for an unusable address or a missing token, and `ModelError` as
    `Service.load` does.
    """
    token = key_from(config.token_env, field="token_env")
    if config.ray_actor_options and not config.needs_ray:
        raise config.error("ray_actor_options replicas", "2 replicas or more")
    with contextlib.closing(_bind(config)) as listener, _service(config, listener) as service:
        server = make_server(service, token=token)
        # uvicorn handles them while it runs, and raises the signal once more at its end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        listener.listen(_BACKLOG)
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        names = list(service.models)
        if config.judge is not None:
            names.append(f"the judge {config.judge.model}")
        logger.info("Serving %s at http://%s:%d", ", ".join(names), address, port)
        server.run(sockets=[listener])
        service.close()
    logger.info("Shut down.")
    return 0


@contextlib.contextmanager
def _service(config: ServerConfig, listener: socket.socket) -> Iterator[Service]:
    """The service, in this process or in replicas, until the context ends."""
    if not config.needs_ray:
        yield Service.load(config)
        return
    try:
        from treeward.serving.replicas import started  # noqa: PLC0415
    except ImportError as error:
        fix = f"{pip_install('serve', 'ray')}, or use one replica"
        raise ConfigError(
            "Ray Serve is not installed",
            field="replicas",
            got=str(error),
            fix=fix,
        ) from error

    # The name follows from the address, so that a new server replaces the replicas of a killed one.
    name = f"treeward-{socket.gethostname()}-{listener.getsockname()[1]}"
    with started(config, name) as service:
        size = config.tensor_parallel_size
        logger.info("%d replicas are ready, of %d processes each.", config.replicas, size)
        yield service


def make_server(service: Service, *, token: str | None = None) -> uvicorn.Server:
    """The HTTP server of a service; `server.serve(sockets=[listener])` runs until it has
    `should_exit`.
    """
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return _Server(
        service,
        uvicorn.Config(
            create_app(service, token=token),
            http=BoundedProtocol,
            # The log is configured by the command; uvicorn's own would replace it.
            log_config=None,
            access_log=service.config.access_log,
            # The version of uvicorn is nobody's business.
            server_header=False,
            # A client could otherwise name its own address, in the log.
            proxy_headers=False,
            ws="none",
            lifespan="off",
            backlog=_BACKLOG,
            # Longer than the 60 seconds after which proxies close an idle connection: a request
            # on a connection that the server closes at that moment is lost.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ),
    )


class _Server(uvicorn.Server):
    """Tells the service of its end before it waits for the accepted requests."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_shutdown()
        await super().shutdown(sockets)


def _bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port shows before minutes of
    loading.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    # Else the port of a server that has just ended stays taken for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "the server cannot use this address",
            where="host, port",
            got=f"{config.host}:{config.port}: {error.strerror or error}",
            need="an address of this machine with a free port",
            fix="port=0 takes a free port",
        ) from error
    return listener
