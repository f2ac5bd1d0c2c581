"""Names that a resources server of NeMo Gym imports: NeMo Gym's own classes where it is installed, else ours.

    from treeward.compat.nemo_gym import *

    class Brevity(SimpleResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            return BaseVerifyResponse(**body.model_dump(), reward=1 / len(extract_response(body.response)))

    Brevity.run_webserver()             # in app.py, which NeMo Gym starts

`self.config` has every key of the server's section, and the defaults of NeMo Gym's page for its options. A class with
`score(prompt, response)` or `predict`, which take texts, needs no `verify`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import torch
from pydantic import ConfigDict, Field

from treeward.data.responses_items import conversation_of
from treeward.environments.interface import completion_text, prompt_text
from treeward.errors import DataError
from treeward.scoring.scorer import load_reward_model

if not TYPE_CHECKING and importlib.util.find_spec("nemo_gym"):
    from nemo_gym import base_resources_server as _gym
else:
    from treeward.serving import resources_server as _gym

BaseVerifyRequest = _gym.BaseVerifyRequest
BaseVerifyResponse = _gym.BaseVerifyResponse

__all__ = [
    "BaseResourcesServerConfig",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "SimpleResourcesServer",
    "extract_response",
    "load_reward_model",
]

_ONE_AT_A_TIME = anyio.CapacityLimiter(1)


class BaseResourcesServerConfig(_gym.BaseResourcesServerConfig):
    """The server's section of the configuration; every further key of it is an attribute too."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    device: str = Field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    batch_size: int = 8
    max_length: int = 2048
    normalize_rewards: bool = False
    reward_mean: float = 0.0
    reward_std: float = 1.0


class SimpleResourcesServer(_gym.SimpleResourcesServer):
    """A resources server: a subclass has `verify`, or `score` or `predict`, and loads its model in `model_post_init`.

    `setup_webserver` gives the application; `run_webserver` is what an `app.py` calls.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())

    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """The reward of a rollout by `score` or `predict`, which are called one at a time beside the event loop."""
        score = getattr(self, "score", None) or getattr(self, "predict", None)
        if score is None:
            raise NotImplementedError(f"{type(self).__name__} needs verify(body), or score(prompt, response)")
        prompt = prompt_text(conversation_of(body.responses_create_params.model_dump(), []))
        response = extract_response(body.response)
        reward = await anyio.to_thread.run_sync(score, prompt, response, limiter=_ONE_AT_A_TIME)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


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
