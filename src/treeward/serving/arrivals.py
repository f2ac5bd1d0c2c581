"""`Arrivals`: reads the bodies of requests, counts their bytes as they come and their items before
JSON is parsed.

    body = await arrivals.read(receive, deadline)

One client that sends too much, too slowly or too many items gets an error, and the other clients do
not notice.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.types import Message, Receive

from treeward.config.server import ServerConfig
from treeward.serving.api_error import APIError

BODIES_AT_ONCE = 16
"""Bodies of the largest size that may arrive at the same time; of smaller ones as many more. With
the default of `max_body_bytes` they take half a gigabyte."""


@dataclass(eq=False)
class _Arrival:
    """A body of which a part has come. `timeout` ends its request; `is_dropped` says that there was
    no room for it.
    """

    timeout: asyncio.Timeout
    body: bytearray = field(default_factory=bytearray)
    is_dropped: bool = False


class Arrivals:
    """The bodies that are arriving at this server."""

    def __init__(self, config: ServerConfig) -> None:
        self._most_bytes = config.max_body_bytes
        self._most_items = config.max_body_items
        self._arriving: set[_Arrival] = set()
        self._num_bytes = 0

    async def read(self, receive: Receive, deadline: float) -> bytes:
        """A whole body. `deadline`: of `time.monotonic`.

        Raises `APIError`: 413 for too many bytes or items, 429 if the bodies that arrive together
        are too large, 499 for a client that leaves, 504 for a body that is not here by the
        deadline.
        """
        timeout = asyncio.timeout(deadline - time.monotonic())
        arrival = _Arrival(timeout)
        self._arriving.add(arrival)
        is_whole = False
        try:
            async with timeout:
                while not is_whole:
                    message = await receive()
                    is_whole = self._take(arrival, message)
        except TimeoutError as error:
            if arrival.is_dropped:
                problem = "other bodies are arriving, and a body of this size has no room"
                raise APIError(429, "server_full", problem, retry_after=1) from error
            problem = "the body did not arrive by the deadline"
            raise APIError(504, "deadline_exceeded", problem, retry_after=1) from error
        finally:
            self._forget(arrival)
        # A small body can hold millions of values, of each of which the parser makes an object.
        # An item has a byte at least, so short bodies need not be counted.
        if len(arrival.body) > self._most_items:
            number = num_items(arrival.body, self._most_items)
            if number > self._most_items:
                most = self._most_items
                problem = f"the body has at least {number} JSON values; the most is {most}"
                raise APIError(413, "too_many_items", problem)
        return bytes(arrival.body)

    def _take(self, arrival: _Arrival, message: Message) -> bool:
        """Add a part of a body, and return whether it was the last."""
        if message["type"] == "http.disconnect":
            # 499 is nginx's status; nobody receives it, but the log and the counters have it.
            raise APIError(499, "client_disconnected", "the client went away")
        part = message.get("body", b"")
        arrival.body += part
        # A dropped body is forgotten already, and may get a part before its timeout ends it.
        if arrival in self._arriving:
            self._num_bytes += len(part)
        if len(arrival.body) > self._most_bytes:
            raise too_large(self._most_bytes)
        # A timeout that has fired cannot be moved, and its request is about to go by itself.
        staying = [other for other in self._arriving if not other.timeout.expired()]
        if staying and self._num_bytes > BODIES_AT_ONCE * self._most_bytes:
            # The largest goes, so that a client with large bodies never stops others.
            largest = max(staying, key=lambda other: len(other.body))
            largest.is_dropped = True
            # At once: its request ends in a later round of the event loop, and a part that comes
            # before would choose it again.
            self._forget(largest)
            # Its request may be another one, which waits in `receive`: its timeout wakes it.
            largest.timeout.reschedule(asyncio.get_running_loop().time())
        return not message.get("more_body", False)

    def _forget(self, arrival: _Arrival) -> None:
        """Count the bytes of a body no longer."""
        if arrival in self._arriving:
            self._arriving.remove(arrival)
            self._num_bytes -= len(arrival.body)


def too_large(most_bytes: int) -> APIError:
    """A body with more bytes than these."""
    return APIError(413, "body_too_large", f"the body is too large: at most {most_bytes} bytes")


def num_items(body: bytes | bytearray, most: int) -> int:
    """The values in a JSON text, nested ones too, without parsing it. Beyond `most` it is a lower
    bound; an empty list counts as two.

    Reading a million values takes orjson and pydantic up to a second, in which the server does
    nothing else. Counting bytes takes milliseconds.
    """
    separators = _num_separators(body)
    if separators < most:  # even if those within strings count
        return separators + 1
    # In JSON a backslash stands only in strings. Once escaped backslashes and quotes are gone,
    # every quote begins or ends a string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = plain.count(b'"') // 2
    if num_strings // 2 > most:  # a key is a string too, and is no value
        return num_strings // 2
    # Every second piece lies within a string.
    outside = b"".join(plain.split(b'"')[::2])
    return _num_separators(outside) + 1


def _num_separators(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
