"""NeMo Gym's dialect, by which its agents call a resources server: `POST /verify` and what belongs to it.

{"responses_create_params": {"input": "2 + 2?"}, "response": {"output": [{"type": "message", ...}]}, "any": "thing"}
-> the same body, byte for byte, with "reward": 1.5, "reward_num_tokens": 21, "reward_truncated": false at its end

A conversation without a reward is answered with 200 and NeMo Gym's form of a failure: reward 0.0, `mask_sample` true,
`failure_reason`. The row then stays out of the metrics and is tried again on resume; any other status would end the
whole collection. What is no request of `/verify` at all gets 422.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter
from pydantic import Field, Strict
from starlette.requests import Request
from starlette.responses import Response

from treeward.config.server import ServerConfig
from treeward.data.responses_items import conversation_of
from treeward.errors import DataError
from treeward.scoring.score import Conversation
from treeward.serving.bodies import (
    Body,
    apart,
    checked,
    describe,
    json_response,
    limits_of,
    parse,
    read_as,
    read_bytes,
)
from treeward.serving.models import MESSAGE_CHARACTERS, ServedModel, too_long
from treeward.serving.refusals import Refusal, in_words
from treeward.serving.rollouts.profiles import aggregate_metrics
from treeward.serving.service import Answer, Service

__all__ = ["router", "spliced", "verdict"]

logger = logging.getLogger(__name__)

_ROLLOUT = "/ng-rollout/{rollout_id}"
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROLLOUT_PARAMETER = {
    "name": "rollout_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{_ROLLOUT_ID.pattern}$"},
}
_VERDICT_KEYS = frozenset(
    {
        *("reward", "reward_score", "reward_components", "reward_num_tokens", "reward_truncated", "reward_passed"),
        *("mask_sample", "failure_kind", "failure_reason", "_ng_failure_class"),
    }
)
"""What a body may hold of an earlier verdict, when it is verified again."""
_MOST_ROWS, _MOST_NAMES, _MOST_VALUES = 100_000, 2_000, 2**20
"""What statistics are made of in one request."""


_Body = TypeVar("_Body", bound=Body)


class CreateParams(Body):
    """What the policy was asked; its further keys are echoed."""

    input: str | list[dict[str, Any]]
    """A text of the user, or items of the Responses API."""


class PolicyResponse(Body):
    """What the policy answered; its further keys are echoed."""

    output: list[dict[str, Any]]
    """Items of the Responses API."""


class VerifyBody(Body):
    """A rollout; its further keys are echoed."""

    responses_create_params: CreateParams
    """The request of the policy."""
    response: PolicyResponse
    """Its answer."""
    reward_threshold: Annotated[float, Strict()] | None = None
    """`reward_passed` says whether the reward is at least this."""


class VerifyAnswer(Body):
    """The rollout as it was sent, with its reward."""

    reward: float
    """The reward; 0.0 where `mask_sample` is true, and then it is no reward."""
    reward_score: float | None = None
    """The model's own score, where the reward is made of it by shaping."""
    reward_components: dict[str, float] | None = None
    """The score, the members' and the heads' values where there are several; each at the top level too."""
    reward_num_tokens: int | None = None
    """Tokens of the conversation."""
    reward_truncated: bool | None = None
    """Whether some of the oldest messages were cut."""
    reward_passed: bool | None = None
    """Whether the reward reaches the row's `reward_threshold`."""
    mask_sample: bool | None = None
    """True where there is no reward."""
    failure_kind: str | None = None
    """`verifier_error` where there is no reward."""
    failure_reason: str | None = None
    """Why."""


class SeedSessionBody(Body):
    """A row, or the start of an episode."""

    resources_session_id: str | None = Field(default=None, min_length=1)
    """The session that the caller has named."""


class SeedSessionAnswer(Body):
    """The session that was named; nothing for a row."""

    resources_session_id: str | None = None


class CloseSessionAnswer(Body):
    """The session that was named."""

    resources_session_id: str


class CloseSessionBody(Body):
    """The end of an episode."""

    resources_session_id: str
    """The session, which need not be known."""


class AggregateBody(Body):
    """Rollouts with their rewards."""

    verify_responses: list[dict[str, Any]]
    """What `/verify` has answered."""


class AggregateAnswer(Body):
    """Statistics, as `mean/reward`."""

    group_level_metrics: list[dict[str, Any]]
    agent_metrics: dict[str, Any]
    key_metrics: dict[str, Any]


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["NeMo Gym"])
    statistics = service.pool("statistics")

    async def verify(request: Request) -> Response:
        _check_rollout_id(request)
        content = await read_bytes(request)
        model = service.engine.model(None)
        rollout = await apart(request, len(content), lambda: _rollout(content, model, service.config))
        answer = await _answer(service, model, rollout, request.scope["treeward"].deadline)
        added = _failure(answer) if isinstance(answer, str) else verdict(answer, rollout.threshold)
        whole = await apart(request, len(content), lambda: spliced(content, rollout.given, added))
        return Response(whole, media_type="application/json")

    async def seed_session(request: Request) -> Response:
        _check_rollout_id(request)
        body = await _read(request, SeedSessionBody)
        session = body.resources_session_id
        if session is None:
            return json_response({})
        # Nothing is kept of a session, so the cookie only has to be there, and fit for a header.
        cookie = f"treeward_session={hashlib.sha256(session.encode()).hexdigest()[:32]}; Path=/; HttpOnly; SameSite=lax"
        return json_response({"resources_session_id": session}, headers={"Set-Cookie": cookie})

    @routes.post(
        "/close_session", summary="End a session", openapi_extra=describe(CloseSessionBody, answer=CloseSessionAnswer)
    )
    async def close_session(request: Request) -> Response:
        body = await _read(request, CloseSessionBody)
        return json_response({"resources_session_id": body.resources_session_id})

    @routes.post(
        "/aggregate_metrics",
        summary="Statistics of verified rollouts",
        openapi_extra=describe(AggregateBody, answer=AggregateAnswer),
    )
    async def aggregate(request: Request) -> Response:
        content = await read_bytes(request)
        deadline: float = request.scope["treeward"].deadline
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                return await loop.run_in_executor(statistics, _aggregated, content, service.config)
        except TimeoutError as error:
            raise Refusal(504, "deadline_exceeded", "the statistics were not made in time") from error

    @routes.get("/reverify_mode", summary="Rollouts may be verified again at any time")
    async def reverify_mode(request: Request) -> Response:
        return json_response("stateless")

    for prefix, more in (("", {}), (_ROLLOUT, {"parameters": [_ROLLOUT_PARAMETER]})):
        extra = describe(VerifyBody, answer=VerifyAnswer, **more)
        routes.post(f"{prefix}/verify", summary="The reward of a rollout", openapi_extra=extra)(verify)
        extra = describe(SeedSessionBody, answer=SeedSessionAnswer, **more)
        routes.post(f"{prefix}/seed_session", summary="Begin a session", openapi_extra=extra)(seed_session)
    return routes


def verdict(answer: Answer, threshold: float | None = None) -> dict[str, Any]:
    """The keys that an answer adds to a rollout."""
    if answer.value is None:
        return _failure(answer.error or "there is no reward")
    score = answer.score
    parts: dict[str, float] = {}
    if score.score is not None and score.score != answer.value:
        parts["reward_score"] = score.score
    parts |= {f"reward_member_{i}": value for i, value in enumerate(score.members)}
    if len(score.heads) > 1:
        parts |= {f"reward_head_{i}": value for i, value in enumerate(score.heads)}
    added: dict[str, Any] = {"reward": answer.value}
    if parts:
        added |= {"reward_components": parts, **parts}
    added |= {"reward_num_tokens": score.num_tokens, "reward_truncated": score.truncated}
    return added if threshold is None else added | {"reward_passed": answer.value >= threshold}


def spliced(content: bytes, given: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """The JSON object `content`, parsed as `given`, with the keys of `added` at its end.

    What is echoed is the bytes themselves: it is neither dumped nor rounded. An earlier verdict in it is cut out.
    """
    stale = (_VERDICT_KEYS | added.keys()) & given.keys()
    if stale:
        content = _without(content, stale)
    head = content.rstrip(b" \t\r\n")[:-1]
    comma = b"" if given.keys() <= stale else b","
    return head + comma + orjson.dumps(added)[1:]


def _failure(reason: str) -> dict[str, Any]:
    return {
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": "verifier_error",
        "failure_kind": "verifier_error",
        "failure_reason": reason,
    }


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A body of `/verify`. `conversation`: or why it is none."""

    given: Mapping[str, Any]
    conversation: Conversation | str
    threshold: float | None = None


def _rollout(content: bytes, model: ServedModel, limits: ServerConfig) -> _Rollout:
    given = _parsed(content)
    most = max(limits.max_conversation_characters // MESSAGE_CHARACTERS, 1)
    if any(len(items) > most for items in _items(given)):  # before anything is done with each of them
        return _Rollout(given, too_long(limits.max_conversation_characters).error or "")
    body = checked(given, VerifyBody, limits)
    try:
        conversation: Conversation | str = conversation_of(
            given["responses_create_params"], given["response"]["output"], developer=model.developer_role
        )
    except DataError as error:
        conversation = in_words(error)
    return _Rollout(given, conversation, body.reward_threshold)


def _items(given: Any) -> list[list[Any]]:
    """The lists of items of a body that need not be as documented."""
    if not isinstance(given, dict):
        return []
    parts = [(given.get("responses_create_params"), "input"), (given.get("response"), "output")]
    lists = [part.get(key) for part, key in parts if isinstance(part, dict)]
    return [items for items in lists if isinstance(items, list)]


def _aggregated(content: bytes, limits: ServerConfig) -> Response:
    """Statistics of a body. Raises `Refusal` 413 for more rows, names or numbers than they are made of in a minute."""
    given = _parsed(content)
    rows = given.get("verify_responses") if isinstance(given, dict) else None
    if isinstance(rows, list) and len(rows) > _MOST_ROWS:
        raise _too_many("rollouts", _MOST_ROWS)
    rows = checked(given, AggregateBody, limits).verify_responses
    names: set[str] = set()
    num_values = 0
    for row in rows:
        response = row.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        for part in (row, usage if isinstance(usage, dict) else {}):
            measured = [name for name, value in part.items() if isinstance(value, int | float)]
            names.update(measured)
            num_values += len(measured)
        if len(names) > _MOST_NAMES:
            raise _too_many("names of numbers", _MOST_NAMES)
        if num_values > _MOST_VALUES:
            raise _too_many("numbers", _MOST_VALUES)
    return json_response(aggregate_metrics(rows))


def _too_many(what: str, most: int) -> Refusal:
    return Refusal(413, "too_many_rows", f"too many {what} in one request; at most {most}", param="verify_responses")


async def _read(request: Request, body: type[_Body]) -> _Body:
    limits = limits_of(request)
    return await read_as(request, lambda content: checked(_parsed(content), body, limits))


async def _answer(service: Service, model: ServedModel, rollout: _Rollout, deadline: float) -> Answer | str:
    """The answer, or why there is none."""
    if isinstance(rollout.conversation, str):
        return rollout.conversation
    references = _references(model, rollout.given)
    try:
        answers = await service.answer(None, [rollout.conversation], deadline=deadline, reference_answers=references)
        return answers[0]
    except DataError as error:
        return in_words(error)
    except Refusal as refusal:
        service.metrics.refused.labels(refusal.code).inc()
        return refusal.message


def _references(model: ServedModel, given: Mapping[str, Any]) -> list[Any] | None:
    return None if model.reference_key is None else [given.get(model.reference_key)]


def _check_rollout_id(request: Request) -> None:
    rollout_id = request.path_params.get("rollout_id")
    if rollout_id is not None and not _ROLLOUT_ID.fullmatch(rollout_id):
        raise Refusal(404, "not_found", f"{rollout_id!r} is not the id of a rollout")


def _parsed(content: bytes) -> Any:
    try:
        return parse(content)
    except Refusal as refusal:  # NeMo Gym's own servers say 422 to a body that is no JSON
        raise Refusal(422, refusal.code, refusal.message) from refusal


def _without(content: bytes, keys: Iterable[str]) -> bytes:
    """The JSON object without the members of these names, each as often as it is there."""
    cut = frozenset(keys)
    kept = []
    at = _after_space(content, content.index(b"{") + 1)
    while content[at] != ord("}"):
        start, end = at, _value_end(content, at)
        key = orjson.loads(content[start:end])
        end = _value_end(content, _after_space(content, _after_space(content, end) + 1))
        if key not in cut:
            kept.append(content[start:end])
        at = _after_space(content, end)
        if content[at] == ord(","):
            at = _after_space(content, at + 1)
    return b"{" + b",".join(kept) + b"}"


_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_WORD = re.compile(rb"[^ \t\r\n,\]}]*")
_TO_BRACKET = re.compile(
    rb'[^"\[\]{}]*+(?:(?:' + _STRING.pattern + rb'|\[[^"\[\]{}]*+\]|\{[^"\[\]{}]*+\})[^"\[\]{}]*+){0,1000}+([\[\]{}])?',
    re.DOTALL,
)
"""Over what opens nothing: strings, and lists without any. Not without end, for others have their turn between two."""


def _value_end(content: bytes, at: int) -> int:
    """Where the value of valid JSON that begins at `at` ends. Nothing is made of it: it may be the whole body."""
    if content[at] not in b"[{":
        match = (_STRING if content[at] == ord('"') else _WORD).match(content, at)
        assert match is not None
        return match.end()
    depth, at = 1, at + 1
    while depth:
        match = _TO_BRACKET.match(content, at)
        assert match is not None and match.end() > at, "the JSON was valid"
        at = match.end()
        if match[1] is not None:
            depth += 1 if match[1] in b"[{" else -1
    return at


def _after_space(content: bytes, at: int) -> int:
    match = _SPACE.match(content, at)
    assert match is not None
    return match.end()
