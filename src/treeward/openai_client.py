"""OpenAI-compatible servers, asked through the `openai` client, which repeats requests itself.

    async with openai_client("http://localhost:8000/v1", timeout_seconds=60) as client:
        reply = await post(client, "/chat/completions", {"model": "policy", "messages": messages})
        reply["choices"][0]["message"]["content"]

`post` sends and returns plain JSON, for servers extend OpenAI's schema. The package is imported on
use.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from treeward.errors import ConfigError, pip_install
from treeward.http import ServerError, checked_url

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def check_openai() -> None:
    """Raises `ConfigError` without the package openai."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        fix = f"{pip_install('judge')}, or openai alone"
        raise ConfigError("this needs the package openai", got=str(error), fix=fix) from error


def key_from(
    variable: str | None, *, where: str | None = None, field: str | None = None
) -> str | None:
    """The key in an environment variable; None for no variable. Raises `ConfigError` where it is
    not set, or no key."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            "the server's key is not in the environment",
            where=where,
            field=field,
            got=f"{variable} is empty or not set",
            fix=f"export {variable}=..., or leave the key out",
        )
    # A header takes nothing else. The key is a secret, so the error does not show it.
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(
            "the server's key cannot be sent in a header",
            where=where,
            field=field,
            need=f"visible ASCII in {variable}",
        )
    return key


def openai_client(
    base_url: str,
    *,
    api_key: str | None = None,
    timeout_seconds: float = 600.0,
    max_retries: int = 5,
) -> AsyncOpenAI:
    """A client of one event loop. `timeout_seconds`: for one attempt."""
    import openai

    return openai.AsyncOpenAI(
        base_url=checked_url(base_url),
        # The client refuses to start without a key, which local servers do not ask for.
        api_key=api_key or "none",
        timeout=openai.Timeout(timeout_seconds, connect=min(timeout_seconds, 10.0)),
        max_retries=max_retries,
        # By default httpx trusts certifi's authorities alone, not those of the system.
        http_client=openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context()),
    )


async def post(
    client: AsyncOpenAI, path: str, body: Mapping[str, Any], *, total_seconds: float | None = None
) -> Any:
    """The JSON of the response. `total_seconds`: for all attempts. Raises `ServerError`, with the
    reason in `got`."""
    import openai

    url = f"{str(client.base_url).rstrip('/')}{path}"
    try:
        async with asyncio.timeout(total_seconds):
            text: str = await client.post(path, cast_to=str, body=body)
    except openai.APIStatusError as error:
        details = error.body if isinstance(error.body, Mapping) else {}
        message = str(details.get("message") or details.get("detail") or error.response.text)
        reason = message.strip().partition("\n")[0][:300]
        raise ServerError(
            "the server refuses the request",
            status=error.status_code,
            where=url,
            got=f"{error.status_code}: {reason}",
        ) from error
    except (TimeoutError, openai.APITimeoutError) as error:
        raise ServerError(
            "the server has not responded in time", where=url, got="no response"
        ) from error
    except openai.APIConnectionError as error:
        # The client says "Connection error." alone; the first cause says which.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ServerError(
            "the server cannot be reached",
            where=url,
            got=str(cause) or type(cause).__name__,
            need="a server that listens there; over https, one whose certificate is trusted "
            "(SSL_CERT_FILE)",
        ) from error
    except ValueError as error:
        # httpx has sent nothing yet: half a surrogate pair or NaN in the body, a key beyond ASCII.
        raise ServerError("the request cannot be sent", where=url, got=str(error)) from error
    if not text.strip():
        return None
    try:
        # Python's parser takes NaN and Infinity, which would go on as numbers.
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # a RecursionError is of very many brackets
        raise ServerError(
            "the response is not JSON", status=200, where=url, got=f"{text[:150]!r}"
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
