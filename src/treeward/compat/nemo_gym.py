"""Names that a resources server of NeMo Gym imports, as NeMo Gym's page has them.

    from treeward.compat.nemo_gym import *

    class Brevity(SimpleResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            length = len(extract_response(body.response))
            return BaseVerifyResponse(**body.model_dump(), reward=1 / length)

    Brevity.run_webserver()             # in app.py, which NeMo Gym starts

`self.config` has every key of the server's section, and the defaults of NeMo Gym's page for its
options. A class with `score(prompt, response)` or `predict`, which take texts, needs no `verify`.
Unlike in NeMo Gym, a `verify` that raises, or gives no finite number, fails its rollout and not the
whole collection.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

import anyio
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from treeward.data.responses_items import conversation_of
from treeward.errors import ConfigError, DataError, TreewardError
from treeward.model.pretrained import choose_device
from treeward.progress import configure_logging
from treeward.scoring.score import completion_text, prompt_text
from treeward.scoring.scorer import load_reward_model
from treeward.serving.dialects.nemo_gym import ROLLOUT_PREFIX, failure, sessions, without_verdict
from treeward.serving.requests import JSONRoute

__all__ = [
    "BaseResourcesServerConfig",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "SimpleResourcesServer",
    "extract_response",
    "load_reward_model",
]

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = anyio.CapacityLimiter(1)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())


class BaseResourcesServerConfig(_Open):
    """The server's section of the configuration; every further key of it is an attribute too."""

    name: str = "resources_server"
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = Field(default_factory=lambda: choose_device(None).type)
    batch_size: int = 8
    max_length: int = 2048
    normalize_rewards: bool = False
    reward_mean: float = 0.0
    reward_std: float = 1.0


class _CreateParams(_Open):
    input: str | list[Any]


class _PolicyResponse(_Open):
    output: list[Any]


class BaseVerifyRequest(_Open):
    """A rollout with the keys of its row, without those of an earlier verdict. `input`: a text or
    items of the Responses API; `output`: items.
    """

    responses_create_params: _CreateParams
    response: _PolicyResponse

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, raw: Any) -> Any:
        # A response has a verdict of its own.
        if "reward" in cls.model_fields or not isinstance(raw, Mapping):
            return raw
        return without_verdict(raw)


class BaseVerifyResponse(BaseVerifyRequest):
    """A rollout with its reward."""

    reward: float
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class SimpleResourcesServer(_Open):
    """A resources server: a subclass has `verify`, or `score` or `predict`, and loads its model in
    `model_post_init`.

    `setup_webserver` gives the application; `run_webserver` is what an `app.py` calls.
    """

    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """The reward of a rollout by `score` or `predict`, which are called one at a time beside
        the event loop: models are not made for several threads."""
        score = getattr(self, "score", None) or getattr(self, "predict", None)
        if score is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs verify(body), or score(prompt, response)"
            )
        prompt = prompt_text(conversation_of(body.responses_create_params.model_dump(), []))
        response = extract_response(body.response)
        reward = await anyio.to_thread.run_sync(score, prompt, response, limiter=_ONE_AT_A_TIME)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)

    def setup_webserver(self) -> FastAPI:
        """The application: /verify and the other routes of a resources server. Raises `ConfigError`
        unless `verify` is a coroutine.
        """
        if not inspect.iscoroutinefunction(inspect.unwrap(self.verify)):
            got = f"def verify of {type(self).__name__}"
            raise ConfigError("verify must be a coroutine", got=got, need="async def verify")
        verify = self.verify

        @functools.wraps(verify)  # FastAPI reads its parameters
        async def masking(*args: Any, **arguments: Any) -> JSONResponse:
            """`verify` as a route that masks failures instead of giving them a number."""
            try:
                verdict = (await verify(*args, **arguments)).model_dump(mode="json")
                if verdict["mask_sample"] or math.isfinite(verdict["reward"]):
                    return JSONResponse(verdict)
                reason = f"the reward is {verdict['reward']!r}"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                # A user's own code has failed: its traceback helps.
                is_fault = not isinstance(error, TreewardError)
                logger.warning("A rollout has no reward: %a", reason, exc_info=is_fault)
            bodies = (body for body in arguments.values() if isinstance(body, BaseVerifyRequest))
            return JSONResponse(next(bodies).model_dump(mode="json") | failure(reason))

        app = FastAPI(title=self.config.name)
        app.router.route_class = JSONRoute  # before routes are added, which take it
        for prefix in ("", ROLLOUT_PREFIX):
            app.post(f"{prefix}/verify", response_model=None)(masking)
        app.include_router(sessions)
        return app

    @classmethod
    def run_webserver(cls) -> None:
        """Make the server of the section that NeMo Gym passes, then serve until a signal. Exits
        with 2 for a mistake in the configuration.
        """
        configure_logging()
        try:
            where, section = handed_over()
            settings: Any = {"name": where.split(".")[0], **section}
            server = cls(config=settings)  # nothing listens before the model is loaded
            app = server.setup_webserver()
        # pydantic makes a ValidationError of what `model_post_init` raises.
        except (TreewardError, ValidationError) as error:
            sys.stderr.write(f"{cls.__name__}: {error}\n")
            sys.exit(2)
        config = server.config
        uvicorn.run(app, host=config.host, port=config.port, log_level="warning")


OWN_KEYS = (
    "entrypoint",
    "domain",
    "verified",
    "verified_url",
    "description",
    "value",
    "datasets",
    "expose_tools_over_mcp",
    "license",
    "skills",
    "num_workers",
)
"""Keys of a server's section that NeMo Gym itself reads."""


def handed_over() -> tuple[str, dict[str, Any]]:
    """What NeMo Gym gives a server in the environment: the name of its section in the merged whole,
    and the section.

    References within the whole are resolved. Raises `ConfigError`.
    """
    name = os.environ.get("NEMO_GYM_CONFIG_PATH", "")
    try:
        servers = OmegaConf.select(merged_config(), f"{name}.resources_servers")
        [(implementation, section)] = servers.items()
        values = cast(dict[str, Any], OmegaConf.to_container(section, resolve=True))
    except (OmegaConfBaseException, YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(
            "NeMo Gym has given no configuration of this server",
            where="NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH",
            got=f"{type(error).__name__}: {error}",
            need=f"YAML with one server in {name or 'NAME'}.resources_servers",
            fix="use gym env start, or treeward serve MODEL without NeMo Gym",
        ) from error
    return f"{name}.resources_servers.{implementation}", values


def merged_config() -> DictConfig:
    """The configuration of all servers, as NeMo Gym gives it to each."""
    return cast(DictConfig, OmegaConf.create(os.environ.get("NEMO_GYM_CONFIG_DICT", "")))


def extract_response(response: Any) -> str:
    """The text of the last message of a response (`output`: items of the Responses API).

    Raises `DataError` where it does not end with a text of the assistant.
    """
    output = response["output"] if isinstance(response, Mapping) else response.output
    messages = conversation_of({"input": []}, output)
    text = completion_text(messages)
    if text is None or (not text and "tool_calls" in messages[-1]):
        raise DataError("there is no response to score", field="response.output", got=output)
    return text
