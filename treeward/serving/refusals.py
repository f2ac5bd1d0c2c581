"""`Refusal`: a request that is not answered with scores, with the HTTP status that says why.

    raise Refusal(429, "queue_full", "20000 conversations are waiting", retry_after=3)

Each dialect writes it in the form that its clients read; `code` is the same in all of them.
"""

from __future__ import annotations

from treeward.errors import TreewardError, shown

__all__ = ["Refusal", "in_words"]


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
        return cls(422, "invalid_request", in_words(error), param=error.field)


def in_words(error: TreewardError) -> str:
    """The error in one line: its lines are those of a terminal, and what they have to show may be empty."""
    where = [error.where] if error.where else []
    if error.field and error.field != error.where:
        where.append(error.field)
    details = [f"{word} {shown(part)}" for word, part in (("got", error.got), ("need", error.need)) if part is not None]
    fix = [str(error.fix)] if error.fix else []
    return " ".join("; ".join([": ".join([*where, error.summary]), *details, *fix]).split())
