"""The one HTTP client and the one retry policy; code that speaks OpenAI's API uses the `openai` client instead.

    connection = Connection("http://localhost:8000", max_retries=5)
    reply = await connection.post("/v1/rewards", body, until=time.monotonic() + 30)
    reply.json
    run_async(ask_all())        # a coroutine from synchronous code

A request is repeated after a lost connection and after the statuses 408, 429, 502, 503 and 504: with growing pauses, or
after the seconds of the server's `Retry-After`, at most `max_retries` times, and never beyond `until`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
import tenacity
from anyio.from_thread import start_blocking_portal

from treeward.errors import ConfigError, TreewardError
from treeward.version import VERSION

__all__ = ["Connection", "Reply", "RewardServerError", "ServerError", "checked_url", "run_async", "tls_context"]

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_TEMPORARY = frozenset({408, 429, 502, 503, 504})
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.2, min=0.1, max=10)
_FIXES = {
    401: "give the token that the server asks for (token, or --token-env)",
    403: "give a token that may do this",
    404: "check the URL and the name of the model",
    413: "send less in one request (max_conversations)",
    429: "send less at a time, or allow more time (timeout_seconds)",
    504: "send less at a time, or allow more time (timeout_seconds)",
}


class ServerError(TreewardError):
    """A server did not answer, refused a request, or answered something unexpected.

    `status`: the HTTP status, None without an answer. `code`: the server's word for the error (`queue_full`, ...).
    `param`: the wrong field of the request. `request_id`: the request's name in the server's log. `is_temporary`: the
    same request may succeed later, after `retry_after` seconds.
    """

    def __init__(
        self,
        summary: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        is_temporary: bool = False,
        retry_after: float = 0.0,
        **details: Any,
    ) -> None:
        super().__init__(summary, **details)
        self.status, self.code, self.param, self.request_id = status, code, param, request_id
        self.is_temporary, self.retry_after = is_temporary, retry_after


class RewardServerError(ServerError):
    """A `ServerError` of a reward server: what `Connection` raises."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The JSON that a request was answered with, and its URL."""

    json: Any
    url: str
    request_id: str | None = None

    def error(self, summary: str, **details: Any) -> RewardServerError:
        """An error about the content of this reply."""
        return RewardServerError(summary, status=200, request_id=self.request_id, where=self.url, **details)


class Connection:
    """Requests to the server at `url`, which may have a path (`https://host/rm`).

    `token`: sent as a bearer token. `verify_tls`: True trusts the system's certificates; a path is a PEM file with the
    certificates to trust instead; False accepts any certificate. Raises `ConfigError` for a URL, token or file that
    cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_retries: int = 5,
        verify_tls: Any = True,
        max_connections: int = 8,
    ) -> None:
        if max_retries < 0:
            raise ConfigError("max_retries is not a count", field="max_retries", got=max_retries, need="0 or more")
        headers = {"User-Agent": f"treeward/{VERSION}", "Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self.url, self.max_retries = checked_url(url), max_retries
        self._options: dict[str, Any] = {
            "headers": headers,
            "verify": tls_context(verify_tls),
            "limits": httpx.Limits(max_connections=max_connections),
            "timeout": httpx.Timeout(None, connect=10.0),
        }
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def post(self, path: str, content: bytes, *, until: float) -> Reply:
        """Post JSON. `until` is a time of `time.monotonic`. Raises `RewardServerError`."""
        return await self._request("POST", path, content, until, self.max_retries)

    async def get(self, path: str, *, until: float, max_retries: int | None = None) -> Reply:
        """Get JSON. Raises `RewardServerError`."""
        return await self._request("GET", path, None, until, self.max_retries if max_retries is None else max_retries)

    async def close(self) -> None:
        """Close the connections; another request opens new ones."""
        if self._client is not None:
            loop, client = self._client
            self._client = None
            if loop is asyncio.get_running_loop():  # the connections of a loop that has ended went with it
                await client.aclose()

    async def _request(
        self, method: Literal["GET", "POST"], path: str, content: bytes | None, until: float, max_retries: int
    ) -> Reply:
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: getattr(error, "is_temporary", False)),
            stop=tenacity.stop_after_attempt(1 + max_retries) | tenacity.stop_before_delay(until - time.monotonic()),
            wait=_pause,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._once(method, path, content, until, attempt.retry_state.attempt_number)
        raise AssertionError("the last attempt raises")

    async def _once(self, method: str, path: str, content: bytes | None, until: float, attempt: int) -> Reply:
        url, left = self.url + path, max(0.0, until - time.monotonic())
        headers = {"X-Deadline-Seconds": f"{left:.3f}"}
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, httpx.AsyncClient(**self._options)
        try:
            # httpx limits each wait for a byte; this limits a server that sends one byte now and then.
            async with asyncio.timeout(left):
                response = await self._client[1].request(method, url, content=content, headers=headers)
        except TimeoutError:
            raise RewardServerError(
                "the server has not answered in time",
                where=url,
                got=f"no answer (attempt {attempt})",
                fix="allow more time (timeout_seconds), or send less at a time",
            ) from None
        except httpx.RequestError as error:
            raise RewardServerError(
                "the server cannot be reached",
                is_temporary=True,
                where=url,
                got=f"{str(error) or type(error).__name__} (attempt {attempt})",
                need="a server that listens there; over https, one whose certificate is trusted (verify_tls, --tls-ca)",
            ) from error
        if not response.is_success:
            raise _refusal(response, attempt)
        request_id = response.headers.get("x-request-id")
        try:
            return Reply(response.json(), url, request_id)
        except ValueError:
            raise RewardServerError(
                "the server's answer is not JSON",
                status=response.status_code,
                request_id=request_id,
                where=url,
                got=f"{response.headers.get('content-type', 'no content type')}: {_text(response)}",
                need="the address of a server of this kind",
            ) from None


def run_async(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    """The result of a coroutine, in an event loop and thread of its own: also where a loop runs already (notebooks,
    Ray's async actors). Its exceptions are raised; an interrupt cancels it.
    """
    with start_blocking_portal() as portal:
        result: _Value = portal.call(lambda: coroutine)
    return result


def checked_url(url: str) -> str:
    """The address without a slash at its end. Raises `ConfigError` for anything else."""
    try:
        parsed = httpx.URL(url.strip())
        is_address = parsed.scheme in ("http", "https") and parsed.host and 0 < (parsed.port or 80) < 2**16
    except httpx.InvalidURL:
        is_address = False
    if not is_address or "?" in url or "#" in url:
        raise ConfigError("this is no address of a server", field="url", got=url, need="http://host:port, or https://")
    return url.strip().rstrip("/")


def tls_context(verify_tls: Any) -> Any:
    """How certificates are verified: by the system's, by those of a PEM file, or (False) not; a context stays itself.

    Raises `ConfigError`.
    """
    if verify_tls is False or isinstance(verify_tls, ssl.SSLContext):
        return verify_tls
    try:
        return ssl.create_default_context(cafile=None if verify_tls is True else verify_tls)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            "the certificates cannot be read",
            field="verify_tls",
            got=f"{verify_tls}: {error}",
            need="True, False, or a PEM file with the certificates to trust",
        ) from error


def _pause(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, RewardServerError)
    pause = max(_BACKOFF(state), error.retry_after)
    logger.info("%s: %s; the next attempt comes after %.1f s.", error.where, error.summary, pause)
    return pause


def _checked_token(token: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        got = f"{len(token)} characters, of which not all are visible ASCII"  # the token itself is a secret
        raise ConfigError("the token cannot be sent in a header", field="token", got=got, need="no white space")
    return token


def _refusal(response: httpx.Response, attempt: int) -> RewardServerError:
    """The server's error in its own words: as OpenAI, text-embeddings-inference or FastAPI write it, or a page."""
    status = response.status_code
    details: dict[str, Any] = {}
    try:
        message = response.json()
    except ValueError:
        message = _text(response)
    while isinstance(message, dict):
        details |= message
        message = next((message[key] for key in ("error", "message", "detail") if key in message), json.dumps(message))
    if response.has_redirect_location:
        message = f"it has moved to {response.headers['location']}"
    message = message if isinstance(message, str) else json.dumps(message)
    code, param = (details[key] if isinstance(details.get(key), str) else None for key in ("code", "param"))
    seconds = re.fullmatch(r"\s*(\d{1,9}(\.\d*)?)\s*", response.headers.get("retry-after", ""))
    return RewardServerError(
        f"the server refuses the request: HTTP {status} {response.reason_phrase}".rstrip(),
        status=status,
        code=code,
        param=param,
        request_id=details.get("request_id", response.headers.get("x-request-id")),
        is_temporary=status in _TEMPORARY,
        retry_after=float(seconds[1]) if seconds else 0.0,
        where=str(response.url),
        got=(message or "an empty answer") + (f" (attempt {attempt})" if status in _TEMPORARY else ""),
        fix=_FIXES.get(status),
    )


def _text(response: httpx.Response) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", response.text, flags=re.DOTALL).split())[:150]
