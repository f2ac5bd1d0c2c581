"""The one HTTP client and the one retry policy; code that speaks OpenAI's API uses the `openai`
client instead.

    connection = Connection("http://localhost:8000", max_retries=5)
    until = time.monotonic() + 30
    scores = connection.request("/v1/rewards", body, until=until, read=scores_of)   # of its JSON
    run_async(ask_all())        # a coroutine from synchronous code

A request is repeated after a lost connection and after the statuses 408, 429, 502, 503 and 504:
with growing pauses, or after the seconds of the server's `Retry-After`, at most `max_retries`
times, and never beyond `until`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import tenacity
from anyio.from_thread import start_blocking_portal

from treeward.errors import ConfigError, TreewardError
from treeward.version import VERSION

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

# Not 500: the same request would meet the same fault again.
_TEMPORARY = frozenset({408, 429, 502, 503, 504})
# At random, so that the clients of a server that was down do not all come back at once.
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.2, min=0.1, max=10)
_FIXES = {
    401: "give the token that the server asks for (token, or --token-env)",
    404: "check the URL and the name of the model",
    413: "send less in one request (max_conversations)",
    429: "send less at a time, or allow more time (timeout_seconds)",
}


class ServerError(TreewardError):
    """A server did not respond, refused a request, or sent something unexpected.

    `status`: the HTTP status, None without a response. `code`: the server's word for the error
    (`queue_full`, ...). `is_temporary`: the same request may succeed later, after `retry_after`
    seconds.
    """

    def __init__(
        self,
        summary: str,
        *,
        status: int | None = None,
        code: str | None = None,
        is_temporary: bool = False,
        retry_after: float = 0.0,
        **details: Any,
    ) -> None:
        super().__init__(summary, **details)
        self.status = status
        self.code = code
        self.is_temporary = is_temporary
        self.retry_after = retry_after


class RewardServerError(ServerError):
    """A `ServerError` of a reward server: what `Connection` raises."""


class Connection:
    """Requests to the server at `url`, which may have a path (`https://host/rm`), from any number
    of threads.

    `token`: sent as a bearer token. Raises `ConfigError` for a URL or token that cannot be used.
    """

    def __init__(self, url: str, *, token: str | None = None, max_retries: int = 5) -> None:
        self._headers = {"User-Agent": f"treeward/{VERSION}", "Content-Type": "application/json"}
        if token is not None:
            # It is a secret, so the error does not show it.
            if not re.fullmatch(r"[\x21-\x7e]+", token):
                raise ConfigError(
                    "the token cannot be sent in a header", field="token", need="visible ASCII"
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self.url = checked_url(url)
        self.max_retries = max_retries
        self._connect()

    def _connect(self) -> None:
        # The system's certificates, or those of SSL_CERT_FILE.
        self._client = httpx.Client(headers=self._headers, verify=ssl.create_default_context())
        self._process_id = os.getpid()

    def request(
        self,
        path: str,
        content: bytes | None = None,
        *,
        until: float,
        read: Callable[[Any], _Value],
    ) -> _Value:
        """Post JSON, or get it without `content`, and `read` the JSON of the response. Raises
        `RewardServerError`.

        `until`: of `time.monotonic`; no attempt begins after it, and none waits longer for the
        server. `read`: raises `LookupError`, `TypeError`, `ValueError` or `AttributeError` for a
        response of another form.
        """
        has_tried_enough = tenacity.stop_after_attempt(1 + self.max_retries)
        is_late = tenacity.stop_before_delay(until - time.monotonic())
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: getattr(error, "is_temporary", False)),
            stop=has_tried_enough | is_late,
            wait=_pause,
            # Not in `wait`, which tenacity asks for after the last attempt too.
            before_sleep=_tell_attempt,
            reraise=True,
        )
        result: _Value = retrying(self._once, path, content, until, read)
        return result

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _once(
        self, path: str, content: bytes | None, until: float, read: Callable[[Any], _Value]
    ) -> _Value:
        url = self.url + path
        # A socket refuses a negative timeout with an error of its own.
        seconds_left = max(0.001, until - time.monotonic())
        # A forked process shares its parent's sockets: their responses could be swapped.
        if self._process_id != os.getpid():
            self._connect()
        method = "GET" if content is None else "POST"
        try:
            response = self._client.request(
                method,
                url,
                content=content,
                timeout=httpx.Timeout(seconds_left, connect=min(seconds_left, 10.0)),
            )
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
            # Not repeated: the time that `until` allows is over. That of a ConnectTimeout,
            # which has 10 seconds, need not be: it is repeated, as any error of a connection.
            raise RewardServerError(
                "the server has not responded in time",
                where=url,
                fix="allow more time (timeout_seconds), or send less at a time",
            ) from None
        except httpx.RequestError as error:
            raise RewardServerError(
                "the server cannot be reached",
                is_temporary=True,
                where=url,
                got=str(error) or type(error).__name__,
                need="a server that listens there; over https, a certificate that is trusted "
                "(SSL_CERT_FILE)",
            ) from error
        try:
            body = response.json()
        except (ValueError, RecursionError):
            # A proxy's page of HTML, for instance, or very many brackets.
            body = response.text[:150]
            if response.is_success:
                raise RewardServerError(
                    "the response is not JSON",
                    status=200,
                    where=url,
                    got=body,
                    need="the address of a server of this kind",
                ) from None
        if not response.is_success:
            raise _refusal(response, body)
        try:
            return read(body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RewardServerError(
                "the response cannot be read",
                status=200,
                where=url,
                got=json.dumps(body),
                need=f"{type(error).__name__}: {error}",
            ) from error


def run_async(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    """The result of a coroutine, in an event loop and thread of its own: also where a loop runs
    already (notebooks, Ray's async actors). Its exceptions are raised; an interrupt cancels it.
    """
    with start_blocking_portal() as portal:
        result: _Value = portal.call(lambda: coroutine)
    return result


def checked_url(url: str) -> str:
    """The address without a slash at its end. Raises `ConfigError` for anything else."""
    try:
        is_address = bool(re.fullmatch(r"https?://[^\s?#]+", url) and httpx.URL(url).host)
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise ConfigError(
            "the address of the server is not valid",
            field="url",
            got=url,
            need="http://host:port, or https://",
        )
    return url.rstrip("/")


def _pause(state: tenacity.RetryCallState) -> float:
    return max(_BACKOFF(state), _error_of(state).retry_after)


def _tell_attempt(state: tenacity.RetryCallState) -> None:
    error = _error_of(state)
    logger.info(
        "%s: %s; attempt %d comes after %.1f s.",
        error.where,
        error.summary,
        state.attempt_number + 1,
        state.upcoming_sleep,
    )


def _error_of(state: tenacity.RetryCallState) -> RewardServerError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, RewardServerError)
    return error


def _refusal(response: httpx.Response, message: Any) -> RewardServerError:
    """The server's error in its own words: as OpenAI, text-embeddings-inference or FastAPI write
    it, or a page."""
    status = response.status_code
    details: dict[str, Any] = {}
    # OpenAI's {"error": {"message": ..., "code": ...}} is one inside the other.
    while isinstance(message, dict):
        details |= message
        for key in ("error", "message", "detail"):
            if key in message:
                message = message[key]
                break
        else:
            message = json.dumps(message)
    if not isinstance(message, str):
        message = json.dumps(message)
    # In seconds; the date that HTTP also allows is not read.
    seconds = re.fullmatch(r"\d{1,9}(\.\d*)?", response.headers.get("retry-after", "").strip())
    return RewardServerError(
        f"the server refuses the request: HTTP {status} {response.reason_phrase}".rstrip(),
        status=status,
        code=details.get("code"),
        is_temporary=status in _TEMPORARY,
        retry_after=float(seconds[0]) if seconds else 0.0,
        where=str(response.url),
        got=message,
        fix=_FIXES.get(status),
    )
