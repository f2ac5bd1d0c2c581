"""`serve`: load and verify the models, then listen until a signal.

    serve(ServerConfig(models=[{"model": "results/rm/final"}], port=8000))      # until SIGTERM or SIGINT

The server listens only when every model is loaded and keeps its scoring contract: whoever can connect can score. On a
signal uvicorn accepts nothing new and answers what was accepted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence

import torch
import uvicorn

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.errors import ConfigError
from treeward.serving.app import create_app
from treeward.serving.custom_reward import CustomModel
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

__all__ = ["make_server", "make_service", "serve"]

logger = logging.getLogger(__name__)

_BACKLOG = 4096


def make_service(config: ServerConfig, *, models: Sequence[ServedModel] | None = None) -> Service:
    """Load the models, unless they are given, and start the threads that score with them.

    Raises `ModelError` for a model that does not keep its contract.
    """
    return Service([_load(section, config) for section in config.models] if models is None else models, config)


def _load(section: ServedModelConfig, config: ServerConfig) -> ServedModel:
    _check_device(section)
    started = time.monotonic()
    model = (ServedModel if section.reward_class is None else CustomModel).load(section, config)
    checked = "it keeps its contract" if model.contracts else "it has no contract to check"
    if not section.check_contract:
        checked = "it is not checked"
    seconds = time.monotonic() - started
    logger.info("%s: loaded %s in %.1f s; %s.", model.name, ", ".join(model.members), seconds, checked)
    return model


def _check_device(section: ServedModelConfig) -> None:
    if section.device is None:
        return
    try:
        torch.empty(0, device=section.device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigError(
            "the device cannot be used",
            where=section.served_name,
            field="device",
            got=f"{section.device}: {str(error).splitlines()[0]}",
            need="cpu, or a GPU that torch sees, as cuda or cuda:1",
        ) from error


def serve(config: ServerConfig) -> int:
    """Serve until a signal, and give the exit code.

    Raises `ConfigError` for an address that cannot be used, a token that is not there, and TLS files that cannot be
    read; `ModelError` as `make_service`.
    """
    token = _token(config)
    _check_tls(config)
    with contextlib.closing(_bind(config)) as listener:
        service = make_service(config)
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.tls_certificate else "http"
        address = f"[{host}]" if ":" in host else host
        words = "Serving %s at %s://%s:%d"
        server = make_server(service, token=token)
        server.on_started = lambda: logger.info(words, ", ".join(service.models), scheme, address, port)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it once more at its end
            signal.signal(number, signal.SIG_IGN)
        server.run(sockets=[listener])
        service.close()
        logger.info("Shut down.")
    return 0


def make_server(service: Service, *, token: str | None = None) -> Server:
    """The HTTP server of a service; `server.serve(sockets=[listener])` runs until it has `should_exit`."""
    config = service.config
    return Server(
        uvicorn.Config(
            create_app(service, token=token, allowed_hosts=config.hosts_that_may_be_named),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(config.shutdown_seconds),
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
    )


class Server(uvicorn.Server):
    """uvicorn, which calls `on_started` when it listens."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.on_started()


def _bind(config: ServerConfig) -> socket.socket:
    """A socket that is bound and does not listen yet, so that a taken port shows before minutes of loading."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "the address cannot be used",
            where="host, port",
            got=f"{config.host}:{config.port}: {error.strerror or error}",
            need="an address of this machine, and a port that is free",
            fix="port=0 takes a free one",
        ) from error
    return listener


def _token(config: ServerConfig) -> str | None:
    token = None if config.token_env is None else os.environ.get(config.token_env, "").strip()
    if token == "":
        raise ConfigError(
            "the bearer token is not there",
            field="token_env",
            got=f"the environment variable {config.token_env} is empty or not set",
            need="the token in it",
        )
    return token


def _check_tls(config: ServerConfig) -> None:
    if config.tls_certificate is None or config.tls_key is None:
        return
    try:
        # With a password, so that a key that has one fails here and does not ask on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            "the TLS files cannot be used",
            field="tls_certificate, tls_key",
            got=f"{config.tls_certificate}, {config.tls_key}: {error}",
            need="a certificate chain and its private key without a password, as PEM files",
        ) from error
