"""A resources server of NeMo Gym as a class, with NeMo Gym's names and fields, without NeMo Gym.

Import the names from `treeward.compat.nemo_gym`, which takes NeMo Gym's if it is installed. Unlike there, a `verify`
that raises, or gives no finite number, fails its rollout and not the whole collection.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from treeward.config.nemo_gym import handed_over
from treeward.errors import ConfigError, TreewardError
from treeward.serving import logs
from treeward.serving.dialects.bodies import JSONRoute
from treeward.serving.dialects.nemo_gym import ROLLOUT_PREFIX, VERDICT_KEYS, failure, sessions

logger = logging.getLogger(__name__)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())


class BaseResourcesServerConfig(_Open):
    """The server's section of the configuration; its further keys are attributes too."""

    name: str = "resources_server"
    host: str = "127.0.0.1"
    port: int = 8000


class _CreateParams(_Open):
    input: str | list[Any]


class _PolicyResponse(_Open):
    output: list[Any]


class BaseVerifyRequest(_Open):
    """A rollout with the keys of its row, without those of an earlier verdict. `input`: a text or items of the
    Responses API; `output`: items.
    """

    responses_create_params: _CreateParams
    response: _PolicyResponse

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, raw: Any) -> Any:
        if "reward" in cls.model_fields or not isinstance(raw, Mapping):
            return raw
        return {key: value for key, value in raw.items() if key not in VERDICT_KEYS}


class BaseVerifyResponse(BaseVerifyRequest):
    """A rollout with its reward."""

    reward: float
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class SimpleResourcesServer(_Open):
    """A resources server. A subclass defines `verify`, and loads its models in `model_post_init`."""

    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """The reward of a rollout."""
        raise NotImplementedError

    def setup_webserver(self) -> FastAPI:
        """The application: /verify and the other routes of a resources server. Raises `ConfigError` unless `verify` is
        a coroutine.
        """
        if not inspect.iscoroutinefunction(inspect.unwrap(self.verify)):
            got = f"def verify of {type(self).__name__}"
            raise ConfigError("verify must be a coroutine", got=got, need="async def verify")
        app = FastAPI(title=self.config.name)
        app.router.route_class = JSONRoute
        for prefix in ("", ROLLOUT_PREFIX):
            app.post(f"{prefix}/verify", response_model=None)(_masking(self.verify))
        app.include_router(sessions)
        return app

    @classmethod
    def run_webserver(cls) -> None:
        """Make the server of the section that NeMo Gym passes, then serve until a signal. Exits with 2 for a mistake in
        the configuration.
        """
        logs.configure("text")
        try:
            where, section = handed_over()
            settings: Any = {"name": where.split(".")[0]} | OmegaConf.to_container(section, resolve=True)  # type: ignore
            server = cls(config=settings)  # nothing listens before the model is loaded
            app = server.setup_webserver()
        except (TreewardError, ValidationError) as error:  # pydantic's holds what model_post_init raises
            sys.stderr.write(f"{cls.__name__}: {error}\n")
            sys.exit(2)
        config = server.config
        uvicorn.run(app, host=config.host, port=config.port, log_level="warning")


def _masking(verify: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[JSONResponse]]:
    """`verify` as a route that masks failures instead of giving them a number."""

    @functools.wraps(verify)
    async def answer(*args: Any, **arguments: Any) -> JSONResponse:
        try:
            verdict = (await verify(*args, **arguments)).model_dump(mode="json")
            if verdict["mask_sample"] or math.isfinite(verdict["reward"]):
                return JSONResponse(verdict)
            reason = f"the reward is {verdict['reward']!r}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("A rollout has no reward: %s", reason, exc_info=not isinstance(error, TreewardError))
        body = next(value for value in arguments.values() if isinstance(value, BaseVerifyRequest))
        return JSONResponse(body.model_dump(mode="json") | failure(reason))

    return answer
