"""`serve`: load and verify the models, listen, and end without losing what was accepted.

    serve(ServerConfig(models=[{"model": "results/rm/final"}], port=8000))      # until SIGTERM or SIGINT

The port is bound only when every model is loaded and keeps its scoring contract: whoever can connect can score. On a
signal nothing new is accepted, what was accepted is finished, and the exit code says whether all of it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, cast

import torch
import uvicorn

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.errors import ConfigError
from treeward.serving.app import create_app
from treeward.serving.custom_reward import CustomModel
from treeward.serving.engine import Engine
from treeward.serving.metrics import ServerMetrics
from treeward.serving.models import ServedModel
from treeward.serving.protocol import http_protocol
from treeward.serving.service import THREADS, Service

resource: ModuleType | None
try:
    resource = importlib.import_module("resource")
except ImportError:  # there is none for some systems
    resource = None

__all__ = ["Server", "make_server", "make_service", "serve"]

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_LAST_SECONDS = 0.25


def make_service(config: ServerConfig, *, models: Sequence[ServedModel] | None = None) -> Service:
    """Load the models, unless they are given, and start the engine.

    Raises `ModelError` for a model that does not keep its contract.
    """
    loaded = _load(config) if models is None else list(models)
    metrics = ServerMetrics(batch_tokens=config.batch_tokens)
    engine = Engine(
        loaded,
        batch_tokens=config.batch_tokens,
        max_queued=config.max_queued,
        max_characters=config.max_conversation_characters,
        observer=metrics,
    )
    metrics.watch("queued_conversations", "Conversations that wait for a score.", lambda: engine.num_queued)
    for model in loaded:
        _watch(metrics, model)
    return Service(engine, config, metrics)


def _load(config: ServerConfig) -> list[ServedModel]:
    models = []
    for section in config.models:
        _check_device(section)
        started = time.monotonic()
        model = (ServedModel if section.reward_class is None else CustomModel).load(section, config)
        what = "keeps its contract" if model.contracts and section.check_contract else "has no contract to check"
        logger.info(
            "%s: loaded %s in %.1f s; it %s.",
            model.name,
            ", ".join(model.members),
            time.monotonic() - started,
            what if section.check_contract else "is not checked",
        )
        models.append(model)
    return models


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
    """Serve until a signal; 0 if everything that was accepted was answered.

    Raises `ConfigError` for an address that cannot be used, a token that is not there, and TLS files that cannot be
    read; `ModelError` as `make_service`.
    """
    token = _token(config)
    _check_tls(config)
    listener = _bind(config)
    try:
        service = make_service(config)
        _listen(listener, config)
        _allow_many_connections()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_serve(service, config, listener, token))
    finally:
        listener.close()
    _leave_threads(service, code)
    return code


def _leave_threads(service: Service, code: int) -> None:
    """End the process here if a thread is still at work: nobody waits for it, and it cannot be stopped.

    The interpreter would wait for it as long as it takes, or take the model away from under it.
    """
    service.close_pools()
    end = time.monotonic() + _LAST_SECONDS
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    for thread in ours:
        thread.join(max(end - time.monotonic(), 0.0))
    busy = [thread.name for thread in ours if thread.is_alive()]
    if busy:
        logger.warning("Left without waiting for %s.", ", ".join(busy))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _serve(service: Service, config: ServerConfig, listener: socket.socket, token: str | None) -> int:
    server = make_server(service, token=token)
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls_certificate else "http"
    address = f"[{host}]" if ":" in host else host
    names = ", ".join(service.engine.models)
    # Whoever reads this may send a signal at once, so it is said when they are heeded.
    server.on_started = lambda: logger.info("Serving %s at %s://%s:%d", names, scheme, address, port)
    await server.serve(sockets=[listener])
    return 0 if server.finished else 1


def make_server(service: Service, *, token: str | None = None) -> Server:
    """The HTTP server of a service; `server.serve(sockets=[listener])` runs until it has `should_exit`."""
    config = service.config
    return Server(
        uvicorn.Config(
            create_app(service, token=token, allowed_hosts=config.hosts_that_may_be_named),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=http_protocol(service),
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        ),
        service,
    )


class Server(uvicorn.Server):
    """uvicorn, which first answers what was accepted. A signal does not end the process, so the exit code is ours."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.finished = True
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # no signal gets here
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first ends in order; a second SIGINT (Ctrl-C) waits for nothing more, another SIGTERM changes nothing."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """New requests get 503 until the last of those that were accepted is answered; then the listener closes."""
        service, seconds = self.service, self.service.config.shutdown_seconds
        end = time.monotonic() + seconds
        logger.info(
            "Shutting down: %d requests are still to be answered, for which there are %g s.",
            service.num_requests,
            seconds,
        )
        num_left = await service.drain(seconds, stop=lambda: self.force_exit)
        self.finished = not num_left
        if num_left:
            logger.error("%d requests were not answered in time.", num_left)
        await self._stop_listening(sockets or [])
        # What is left is in the hands of the clients: answers that they read slowly.
        self.config.timeout_graceful_shutdown = math.ceil(max(end - time.monotonic(), 1))
        await super().shutdown(sockets)
        logger.info("Shut down.")

    async def _stop_listening(self, listeners: Sequence[socket.socket]) -> None:
        """Without cutting off who has connected: when a listener closes, the system resets those that it has not given
        out, so they are taken first, and have a moment to send what is then refused in order.
        """
        taken = self._close_listeners(listeners)
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self.config.ssl:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": 1.0, "ssl_shutdown_timeout": 1.0}
        await asyncio.gather(
            *(loop.connect_accepted_socket(self._make_protocol, connection, **tls) for connection in taken),
            return_exceptions=True,  # of clients that leave, and handshakes that fail
        )
        await asyncio.sleep(_LAST_SECONDS)

    def _close_listeners(self, listeners: Sequence[socket.socket]) -> list[socket.socket]:
        """Nothing comes between the last connection that is taken and the end, as far as one process can see to it."""
        taken = []
        for listener in listeners:
            listener.setblocking(False)
            while True:
                try:
                    connection, _ = listener.accept()
                except ConnectionAbortedError:  # this client has left; others wait behind it
                    continue
                except OSError:  # none is left (BlockingIOError), or no descriptor is
                    break
                connection.setblocking(False)
                taken.append(connection)
        for server in self.servers:
            server.close()
        return taken

    def _make_protocol(self) -> asyncio.Protocol:
        state, kind = self.server_state, cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return kind(config=self.config, server_state=state, app_state=self.lifespan.state)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:  # there is none for some systems
        return asyncio.new_event_loop
    return factory


def _bind(config: ServerConfig) -> socket.socket:
    """A socket that is bound, so that a taken port is told before minutes of loading; it listens later."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _no_address(config, error) from error
    return listener


def _listen(listener: socket.socket, config: ServerConfig) -> None:
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another process has bound it too, and was faster
        raise _no_address(config, error) from error


def _no_address(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        "the address cannot be used",
        where="host, port",
        got=f"{config.host}:{config.port}: {error.strerror or error}",
        need="an address of this machine, and a port that is free",
        fix="port=0 takes a free one",
    )


def _allow_many_connections() -> None:
    """Every connection needs a file descriptor, and the usual limit is 1024."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _token(config: ServerConfig) -> str | None:
    if config.token_env is None:
        return None
    token = os.environ.get(config.token_env, "").strip()
    if not token:
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
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_certificate,
            config.tls_key,
            password="",  # rather than a question on the terminal
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "the TLS files cannot be used",
            field="tls_certificate, tls_key",
            got=f"{config.tls_certificate}, {config.tls_key}: {error}",
            need="a certificate chain and its private key without a password, as PEM files",
        ) from error


def _watch(metrics: ServerMetrics, model: ServedModel) -> None:
    caches = [scorer.prefix_cache for scorer in model.scorers if scorer.prefix_cache is not None]
    metrics.watch(
        "prefix_cache_bytes", "Keys and values of prompts.", lambda: sum(c.num_bytes for c in caches), model=model.name
    )
    metrics.watch_counter(
        "prefix_cache_reused_tokens",
        "Tokens that were found and not computed again.",
        lambda: sum(c.num_reused_tokens for c in caches),
        model=model.name,
    )
