"""`APIError`: a request without scores, with its HTTP status.

    raise APIError(429, "queue_full", "20000 conversations are waiting", retry_after=3)

The application writes it as JSON in the form that OpenAI's clients read, or in that of a dialect
that has its own. `code` is the same in every dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ERRORS = (401, 403, 404, 409, 413, 421, 422, 429, 500, 503, 504)
"""The statuses of errors."""


class APIError(Exception):
    """`status`: of HTTP. `code`: one word for programs. `message`: for people. `param`: the field
    that is wrong. `retry_after`: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


def shutting_down(message: str = "the server is shutting down") -> APIError:
    """The answer to what a server that ends does not do any more; another one may."""
    return APIError(503, "shutting_down", message, retry_after=5)


ErrorBody = Callable[[APIError, Mapping[str, Any]], dict[str, Any]]
"""From an error and facts for programs (its `code`, its `param`, the `request_id`) to the body of
the response."""


def openai_error(error: APIError, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The body that OpenAI's clients read."""
    # 429 says that the server is full, which is not the request's fault.
    is_clients_fault = error.status < 500 and error.status != 429
    kind = "invalid_request_error" if is_clients_fault else "server_error"
    return {"error": {"message": error.message, "type": kind, **facts}}
