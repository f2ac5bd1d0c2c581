"""`Refusal`: a request that is not answered with scores, with the HTTP status that says why.

    raise Refusal(429, "queue_full", "20000 conversations are waiting", retry_after=3)

Each dialect writes it in the form that its clients read; `code` is the same in all of them.
"""

from __future__ import annotations

from treeward.errors import TreewardError

__all__ = ["Refusal"]


class Refusal(Exception):
    """`status`: of HTTP. `code`: one word for programs. `message`: for people. `param`: the field that is wrong.

    `retry_after`: seconds after which the same request may succeed.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after = param, retry_after

    @classmethod
    def of(cls, error: TreewardError) -> Refusal:
        """A mistake in what the request holds, in the words of the error."""
        return cls(422, "invalid_request", " ".join(str(error).split()), param=error.field)
