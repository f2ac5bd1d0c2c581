"""`post`: a request that is tried again where that may help, with growing pauses or those that the server asks for.

async with httpx.AsyncClient() as client:
    value = await post(Endpoint(client, "http://localhost:8000/v1/rewards"), {"conversations": [...]})
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from treeward.client.http import is_certificate
from treeward.errors import ConfigError, ModelError

__all__ = ["Endpoint", "RequestFailed", "base_url", "check_listens", "get", "post"]

_LONGEST_PAUSE = 60.0
_FIRST_SECONDS = 10.0
_WORTH_ANOTHER = frozenset({408, 409, 425, 429})
_WRONG_SETTING = frozenset({401, 403, 404, 405})


class RequestFailed(Exception):
    """The request of one rollout was not answered; others may be."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `max_retries`: after the first attempt; `pause`: seconds before the first of them."""

    client: httpx.AsyncClient
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    max_retries: int = 5
    pause: float = 0.5


def base_url(url: str) -> str:
    """The address without a slash at its end; `http://host:port` stands for its `/v1`. Raises `ConfigError`."""
    try:
        parsed = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ConfigError("this is no address", got=f"{url}: {error}", need="as http://localhost:8001/v1") from error
    return f"{parsed}/v1".replace("//v1", "/v1") if parsed.path in ("", "/") else str(parsed)


async def post(endpoint: Endpoint, body: Any) -> Any:
    """The JSON that answers it.

    Raises `RequestFailed` once the attempts are used up, and at once for a request that is refused for what it holds;
    `ModelError` for an address, a token or a certificate that is wrong for every request.
    """
    return await _ask(endpoint, "POST", body)


async def get(endpoint: Endpoint) -> Any:
    """The JSON that lies there. Raises as `post`."""
    return await _ask(endpoint, "GET", None)


async def check_listens(endpoint: Endpoint) -> None:
    """Raises `ModelError` where nothing answers at the address. Any answer will do, and so will one that is late."""
    try:
        await endpoint.client.get(endpoint.url, headers=endpoint.headers, timeout=_FIRST_SECONDS)
    except httpx.ConnectError as error:
        if is_certificate(error):
            raise _untrusted(endpoint, error) from error
        raise ModelError(
            "the server cannot be reached",
            where=endpoint.url,
            got=str(error) or type(error).__name__,
            need="a server that listens there",
        ) from error
    except httpx.RequestError:
        pass  # there is somebody: what is wrong with a request is told of that request


async def _ask(endpoint: Endpoint, method: str, body: Any) -> Any:
    for attempt in range(endpoint.max_retries + 1):
        asked_for = 0.0
        try:
            response = await endpoint.client.request(method, endpoint.url, json=body, headers=endpoint.headers)
        except httpx.RequestError as error:
            if is_certificate(error):
                raise _untrusted(endpoint, error) from error
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
        else:
            if response.is_success:
                return _parsed(response, endpoint.url)
            problem = f"{response.status_code}: {_message(response)}"
            if response.status_code in _WRONG_SETTING:
                raise ModelError(
                    "the server refuses every such request",
                    where=endpoint.url,
                    got=problem,
                    need="the right address, model name and token",
                )
            if response.status_code < 500 and response.status_code not in _WORTH_ANOTHER:
                raise RequestFailed(problem)
            asked_for = _retry_after(response)
        if attempt < endpoint.max_retries:
            pause = endpoint.pause * 2**attempt * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(pause, asked_for), _LONGEST_PAUSE))
    raise RequestFailed(f"{problem} ({endpoint.max_retries + 1} attempts)")


def _untrusted(endpoint: Endpoint, error: httpx.RequestError) -> ModelError:
    return ModelError(
        "the server's certificate is not trusted",
        where=endpoint.url,
        got=str(error),
        need="a certificate that this machine trusts, for this address",
        fix="name the certificates to trust: --tls-ca FILE, or SSL_CERT_FILE in the environment",
    )


def _parsed(response: httpx.Response, url: str) -> Any:
    try:
        return orjson.loads(response.content)  # strictly: no NaN, which no file of JSON can hold
    except orjson.JSONDecodeError as error:
        raise RequestFailed(f"{url} does not answer with JSON: {response.text[:100]!r}") from error


def _message(response: httpx.Response) -> str:
    """What the server says is wrong: in the form of OpenAI's errors, or the beginning of whatever it is."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date: our own pauses do
        return 0.0
