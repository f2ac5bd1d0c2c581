"""`Connection`: requests to one server, each repeated where that may help, and never beyond its time.

    connection = Connection("http://localhost:8000", token=None, max_retries=5)
    reply = await connection.post("/v1/rewards", body, until=time.monotonic() + 30)
    reply.json

A server that is busy (429), restarting (502, 503), or cannot be reached is asked again, after the pause that it asks
for or one that doubles; a request that is wrong is not. Every attempt tells the server what is left of the time, in the
header X-Deadline-Seconds. `Background` runs such requests for code that is not asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import importlib
import json
import logging
import math
import random
import re
import ssl
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from treeward.errors import ConfigError, TreewardError
from treeward.version import VERSION

if TYPE_CHECKING:
    import httpx

__all__ = ["Background", "Connection", "Reply", "RewardServerError", "is_certificate"]

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_TRIED_AGAIN = frozenset({408, 429, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_CONNECT_SECONDS = 10.0
_FIXES = {
    401: "give the token that the server asks for (token, or --token-env)",
    403: "give a token that may do this",
    404: "check the URL and the name of the model",
    413: "send fewer conversations in one request (max_conversations)",
    429: "send less at a time, or allow more time (timeout_seconds)",
    504: "send less at a time, or allow more time (timeout_seconds)",
}


class RewardServerError(TreewardError):
    """A server that does not answer, or answers with something else than scores.

    `status`: of HTTP, None where no answer came. `code`: one word for programs, as treeward's server says it
    (`queue_full`, `model_not_found`, ...). `param`: the field of the request that is wrong. `request_id`: under which
    the server's log has it.
    """

    def __init__(
        self,
        summary: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(summary, **details)
        self.status, self.code, self.param, self.request_id = status, code, param, request_id


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer: the content of its JSON, and where it came from."""

    json: Any
    url: str
    request_id: str | None = None

    def error(self, summary: str, **details: Any) -> RewardServerError:
        """This answer is not what was asked for."""
        return RewardServerError(summary, status=200, request_id=self.request_id, where=self.url, **details)


class Connection:
    """Requests to the server at `url`, which may have a path (`https://host/rm`).

    `token`: sent as a bearer token. `max_retries`: how often a request is repeated. `verify_tls`: True trusts the
    system's certificates, or those of the file that the environment variable SSL_CERT_FILE names; a path is a PEM file
    with the certificates that are trusted instead; False accepts any certificate. Raises `ConfigError` for a URL, a
    token or a file that cannot be used, and without the package httpx.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_retries: int = 5,
        verify_tls: bool | str = True,
        max_connections: int = 8,
    ) -> None:
        self._httpx = _import_httpx()
        self.url = _checked_url(url, self._httpx)
        if max_retries < 0:
            raise ConfigError("max_retries is not a count", field="max_retries", got=max_retries, need="0 or more")
        self.max_retries, self.max_connections = max_retries, max_connections
        self._headers = {"User-Agent": f"treeward/{VERSION}", "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._tls = _tls_context(verify_tls)
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def post(self, path: str, body: bytes, *, until: float) -> Reply:
        """Post JSON. `until`: of `time.monotonic`. Raises `RewardServerError`."""
        return await self._repeated("POST", path, body, until)

    async def get(self, path: str, *, until: float, max_retries: int | None = None) -> Reply:
        """Get JSON. Raises `RewardServerError`."""
        return await self._repeated("GET", path, None, until, max_retries)

    async def close(self) -> None:
        """Close the connections; another request opens new ones."""
        if self._client is not None:
            loop, client = self._client
            self._client = None
            if loop is asyncio.get_running_loop():  # those of a loop that has ended went with it
                await client.aclose()

    async def _repeated(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: bytes | None,
        until: float,
        max_retries: int | None = None,
    ) -> Reply:
        url = self.url + path
        most = 1 + (self.max_retries if max_retries is None else max_retries)
        attempts, problem = 0, None
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise _out_of_time(url, attempts, problem)
            attempts += 1
            wait = 0.0
            try:
                response = await self._once(method, url, body, left)
            except TimeoutError:
                raise _out_of_time(url, attempts, problem) from None
            except self._httpx.RequestError as error:
                problem = _unreachable(url, error)
                if is_certificate(error):
                    raise problem from error
            else:
                if response.is_success:
                    return _reply(response)
                problem = _refused(response)
                if response.status_code not in _TRIED_AGAIN:
                    raise problem
                wait = _retry_after(response.headers)
            pause = max(wait, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0))
            if attempts >= most or pause >= until - time.monotonic():
                raise _given_up(problem, attempts, wait)
            logger.info("%s; attempt %d of %d in %.1f s.", problem.summary, attempts + 1, most, pause)
            await asyncio.sleep(pause)

    async def _once(self, method: str, url: str, body: bytes | None, left: float) -> httpx.Response:
        """httpx limits each wait for a byte; a server that sends one now and then is limited by the whole."""
        async with asyncio.timeout(left):
            return await self._open().request(
                method,
                url,
                content=body,
                headers={"X-Deadline-Seconds": f"{left:.3f}"},
                timeout=self._httpx.Timeout(left + 1.0, connect=min(left + 1.0, _CONNECT_SECONDS)),
            )

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            limits = self._httpx.Limits(max_connections=self.max_connections)
            client = self._httpx.AsyncClient(headers=self._headers, verify=self._tls, limits=limits)
            self._client = loop, client
        return self._client[1]


class Background:
    """An event loop in a thread of its own, for code that waits; it ends with `close`, or with the object."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="treeward-client", daemon=True).start()
        self._end = weakref.finalize(self, _stop, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        """What the coroutine returns or raises. An interrupt while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread."""
        self._end()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(loop.stop)


def _import_httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ImportError as error:
        raise ConfigError(
            "asking a server needs a package that is not installed",
            got="no module httpx",
            fix="pip install 'treeward[serve]', or httpx alone",
        ) from error


def _checked_url(url: str, package: Any) -> str:
    try:
        parsed = package.URL(url.strip())
        is_one = parsed.scheme in ("http", "https") and parsed.host and 0 < (parsed.port or 80) < 2**16
        is_one = is_one and not parsed.query and not parsed.fragment
    except package.InvalidURL:
        is_one = False
    if not is_one:
        raise ConfigError("this is no address of a server", field="url", got=url, need="http://host:port, or https://")
    return url.strip().rstrip("/")


def _checked_token(token: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConfigError(
            "the token cannot be sent in a header",
            field="token",
            got=f"{len(token)} characters, of which not all are visible ASCII",
            need="letters, digits and marks, without white space",
        )
    return token


def _tls_context(verify: bool | str) -> ssl.SSLContext:
    if verify is False:
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        return unverified
    try:
        return ssl.create_default_context(cafile=None if verify is True else str(verify))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "the certificates cannot be read",
            field="verify_tls",
            got=f"{verify}: {error}",
            need="True, False, or a PEM file with the certificates to trust",
        ) from error


def _reply(response: httpx.Response) -> Reply:
    url, request_id = str(response.url), response.headers.get("x-request-id")
    try:
        return Reply(json.loads(response.content), url, request_id)
    except ValueError:
        raise RewardServerError(
            "the server answers with something else than JSON",
            status=response.status_code,
            request_id=request_id,
            where=url,
            got=f"{response.headers.get('content-type', 'no content type')}: {_beginning(response)}",
            need="the address of a reward server, which speaks this dialect",
        ) from None


def _refused(response: httpx.Response) -> RewardServerError:
    """The error in the words of whoever wrote it: treeward and OpenAI, TEI, FastAPI, or a proxy with a page."""
    url, status = str(response.url), response.status_code
    details: Mapping[str, Any] = {}
    message = ""
    try:
        content = json.loads(response.content)
    except ValueError:
        message = _beginning(response)
    else:
        inner = content.get("error", content) if isinstance(content, dict) else content
        details = {**content, **inner} if isinstance(inner, dict) else content if isinstance(content, dict) else {}
        told = inner if isinstance(inner, str) else details.get("message", details.get("detail", content))
        message = told if isinstance(told, str) else json.dumps(told)
    location = response.headers.get("location")
    if response.is_redirect and location is not None:
        message = f"it has moved to {location}"
    request_id = details.get("request_id", response.headers.get("x-request-id"))
    return RewardServerError(
        f"the server refuses the request: HTTP {status} {response.reason_phrase}".rstrip(),
        status=status,
        code=_text_or_none(details.get("code")),
        param=_text_or_none(details.get("param")),
        request_id=_text_or_none(request_id),
        where=url,
        got=message or "an empty answer",
        fix=_FIXES.get(status),
    )


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _beginning(response: httpx.Response) -> str:
    words = " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", response.text, flags=re.DOTALL).split())
    return words if len(words) <= 150 else f"{words[:150]}..."


def _unreachable(url: str, error: Exception) -> RewardServerError:
    what = str(error) or type(error).__name__
    if is_certificate(error):
        return RewardServerError(
            "the server's certificate is not trusted",
            where=url,
            got=what,
            need="a certificate that this machine trusts, for this address",
            fix="name the certificates to trust: verify_tls=FILE, --tls-ca FILE, or SSL_CERT_FILE in the environment",
        )
    if _is_caused_by(error, ssl.SSLError):
        return RewardServerError(
            "the server does not speak TLS", where=url, got=what, need="an https:// address, or http:// for this one"
        )
    if _is_caused_by(error, OSError) and type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        need = "a server that listens there"
        return RewardServerError("the server cannot be reached", where=url, got=what, need=need)
    return RewardServerError("the server cannot be reached", where=url, got=what)


def is_certificate(error: BaseException) -> bool:
    """Whether a request has failed because the server's certificate is not trusted; asking again does not help."""
    return _is_caused_by(error, ssl.SSLCertVerificationError)


def _is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_time(url: str, attempts: int, before: RewardServerError | None) -> RewardServerError:
    if before is not None:
        return _given_up(before, attempts, 0.0)
    return RewardServerError(
        "the server has not answered in time",
        where=url,
        got="no answer" if attempts else "no time left to ask it",
        fix="allow more time (timeout_seconds), or send less at a time",
    )


def _given_up(problem: RewardServerError, attempts: int, wait: float) -> RewardServerError:
    """The last problem, with what was tried."""
    times = "once" if attempts == 1 else f"{attempts} times"
    more = f", and it asks to wait {wait:g} s" if wait else ""
    return RewardServerError(
        problem.summary,
        status=problem.status,
        code=problem.code,
        param=problem.param,
        request_id=problem.request_id,
        where=problem.where,
        got=f"{problem.got} (asked {times}{more})",
        need=problem.need,
        fix=problem.fix,
    )


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 where the server does not say, or says it in no form that is known."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
