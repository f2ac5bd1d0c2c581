"""Bodies of our own dialect, in which a key that is not known is a mistake.

    body = await read_known(request, RewardsBody)      # {"prompt": ...} raises Refusal 422: did you mean context?

The other dialects ignore such keys, for their clients send what other servers read. Of ours a key that is ignored would
be a conversation that is scored without a part of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TypeVar

from pydantic import ConfigDict
from starlette.requests import Request

from treeward.serving.bodies import Body, checked, limits_of, parse, read_as
from treeward.serving.refusals import Refusal

__all__ = ["OwnBody", "read_known"]

_OTHER_WORDS = {
    "prompt": ("context",),
    "prompts": ("context",),
    "messages": ("conversations", "context"),
    "response": ("completions", "completion"),
    "responses": ("completions", "completion"),
    "answers": ("completions", "completion"),
}
"""What other servers call them."""
_SHOWN = 60


class OwnBody(Body):
    """What a client of our own dialect sends: these keys and no others."""

    model_config = ConfigDict(extra="forbid")


_Own = TypeVar("_Own", bound=OwnBody)


async def read_known(request: Request, body: type[_Own]) -> _Own:
    """As `read`. Raises `Refusal` 422 as well for a key that the body does not have, naming the nearest."""
    limits = limits_of(request)

    def known(content: bytes) -> _Own:
        value = parse(content)
        if isinstance(value, dict):
            unknown = next((key for key in value if key not in body.model_fields), None)
            if unknown is not None:
                raise _unknown(unknown, body.model_fields)
        return checked(value, body, limits)

    return await read_as(request, known)


def _unknown(key: str, known: Collection[str]) -> Refusal:
    others = [name for name in _OTHER_WORDS.get(key.lower(), ()) if name in known]
    near = others or difflib.get_close_matches(key.lower(), known, n=1)
    shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    meant = f"did you mean {near[0]}? " if near else ""
    return Refusal(
        422,
        "invalid_request",
        f"{shown}: there is no such key; {meant}It would be one of {', '.join(known)}",
        param=shown,
    )
