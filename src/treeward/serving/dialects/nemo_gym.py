"""NeMo Gym's dialect for resources servers: `POST /verify` and its companions.

    {"responses_create_params": {"input": "2 + 2?"},
     "response": {"output": [{"type": "message", ...}]},
     "any": "thing"}
    -> the same body, with "reward": 1.5, "reward_num_tokens": 21, "reward_truncated": false

Further keys: with shaping `reward_score` (the model's score); `reward_components` (that score, and
the values of members and heads, each at the top level too); for a row with a `reward_threshold`
`reward_passed`.

A conversation without a reward gets a 200 and NeMo Gym's form of a failure: reward 0.0,
`mask_sample` true, `failure_reason`. The row stays out of the metrics and is tried again on resume;
any other status would end the collection. A body that is not a rollout gets 422.

On a server with a judge `/verify` waits for the other rollouts of the prompt, and the judge
compares them (`genrm_compare`).
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from fastapi import Body as FromBody
from pydantic import Field
from starlette.requests import Request

from treeward.data.conversation import AnyConversation, to_json
from treeward.data.responses_items import conversation_of
from treeward.errors import DataError
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.batcher import check_queue
from treeward.serving.dialects.genrm_compare import (
    GROUP_ATTEMPT,
    GROUP_ID,
    ROLLOUT_INDEX,
    TASK_INDEX,
    lone_reward,
    rollout_of,
)
from treeward.serving.models import ServedModel
from treeward.serving.requests import JSON, Body, Items, JSONRoute, Server, example
from treeward.serving.served_judge import ServedJudge

_VERDICT_KEYS = frozenset(
    [
        "reward",
        "reward_score",
        "reward_components",
        "reward_num_tokens",
        "reward_truncated",
        "reward_passed",
        "mask_sample",
        "failure_kind",
        "failure_reason",
        "_ng_failure_class",
    ],
)
"""The keys of every verdict."""

Row = Mapping[str, Any]

router = APIRouter(tags=["NeMo Gym"], route_class=JSONRoute)
sessions = APIRouter(route_class=JSONRoute)
"""The routes beside /verify, which are the same for every resources server."""
ROLLOUT_PREFIX = "/ng-rollout/{rollout_id}"
"""The prefix of paths for one rollout, if NeMo Gym observes it."""


class CreateParams(Body):
    """The request of the policy; its further keys are echoed."""

    input: str | Items[dict[str, Any]]
    """A text of the user, or items of the Responses API."""


class PolicyResponse(Body):
    """The response of the policy; its further keys are echoed."""

    output: Items[dict[str, Any]]
    """Items of the Responses API."""


class VerifyBody(Body):
    """A rollout; its further keys are echoed."""

    responses_create_params: CreateParams
    """The request of the policy."""
    response: PolicyResponse
    """Its response."""
    reward_threshold: float | None = None
    """`reward_passed` says whether the reward is at least this."""


_ROLLOUT: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    },
    "response": {
        "output": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [{"id": "q", "function": {"name": "g"}}],
            },
        ],
    },
    "reward": 1.0,
    "reward_threshold": 0.5,
}


@router.post(
    "/verify",
    summary="The reward of a rollout",
    response_model=dict[str, Any],
    openapi_extra=example(_ROLLOUT),
)
@router.post(ROLLOUT_PREFIX + "/verify", include_in_schema=False)
async def verify(body: VerifyBody, request: Request, server: Server) -> JSON:
    # As it was sent: the validated body lacks the keys that are echoed.
    rollout = await request.json()
    judge = server.service.judge
    if judge is not None:
        return await _verify_in_cohort(rollout, judge, server)
    model = server.model(None)
    try:
        conversation = await server.parsed(parse, rollout, model)
        # Masked: any other status than 200 would end NeMo Gym's collection.
        [reward] = await server.rewards(model, [conversation], on_error="mask")
        running = server.service.running
        if running is not None:
            # A conversation keeps its first value, so the key is all of it.
            key = hashlib.sha256(json.dumps(to_json(conversation)).encode()).hexdigest()
            reward = running.normalized(reward, key)
        added = verdict(reward, body.reward_threshold)
    except DataError as error:
        added = failure(error.in_one_line)
    except APIError as error:
        # No error response counts it, because the status is 200.
        server.service.metrics.errors.labels(error.code).inc()
        added = failure(error.message)
    try:
        return JSON(without_verdict(rollout) | added)
    # orjson reads what is nested a thousand deep, and writes no more than 254.
    except orjson.JSONEncodeError as error:
        message = f"the body cannot be written again: {error}"
        raise APIError(422, "invalid_request", message) from error


_COHORT_KEYS = (
    "responses_create_params",
    "response",
    GROUP_ID,
    GROUP_ATTEMPT,
    ROLLOUT_INDEX,
)
"""What the response to a rollout of a cohort repeats, as that of Gym's `genrm_compare`."""


async def _verify_in_cohort(rollout: Row, judge: ServedJudge, server: Server) -> JSON:
    """The reward of a rollout among those of its prompt, once all are here."""
    echoed = {key: rollout[key] for key in _COHORT_KEYS if key in rollout}
    if judge.config.num_rollouts_per_prompt == 1:
        return JSON(echoed | {"reward": lone_reward(judge)})
    member = await server.parsed(rollout_of, rollout)
    # Those that wait hold their bodies, for as long as the others of their cohorts take.
    check_queue(judge.cohorts.num_waiting, 1, server.service.config.max_queued)
    try:
        reward = await server.while_connected(judge.cohorts.reward(member))
    except APIError as error:
        # A rollout that contradicts its cohort is a mistake of the client's.
        if judge.config.on_error == "refuse" or error.status == 409:
            raise
        server.service.metrics.errors.labels(error.code).inc()
        return JSON(echoed | failure(error.message, kind="judge_failed"))
    return JSON(echoed | {"reward": reward})


@sessions.post(
    "/seed_session",
    summary="Begin a session",
    response_model=dict[str, str],
    openapi_extra=example({"resources_session_id": "a"}),
)
@sessions.post(ROLLOUT_PREFIX + "/seed_session", include_in_schema=False)
async def seed_session(
    resources_session_id: Annotated[str | None, Field(min_length=1), FromBody(embed=True)] = None,
) -> JSON:
    """A row, or the start of an episode, which names its session."""
    if resources_session_id is None:
        return JSON({})
    # The server keeps no sessions, so the cookie only has to exist and fit into a header.
    response = JSON({"resources_session_id": resources_session_id})
    value = hashlib.sha256(resources_session_id.encode()).hexdigest()
    response.set_cookie("treeward_session", value, httponly=True)
    return response


@sessions.post(
    "/close_session",
    summary="End a session",
    response_model=dict[str, str],
    openapi_extra=example({"resources_session_id": "a"}),
)
async def close_session(resources_session_id: Annotated[str, FromBody(embed=True)]) -> JSON:
    return JSON({"resources_session_id": resources_session_id})


_ROW: dict[str, Any] = {"_ng_task_index": 0, "reward": 1.0, "response": {"usage": {"t": 1}}}


# Not a coroutine, because it may take seconds: FastAPI calls it in a thread.
@sessions.post(
    "/aggregate_metrics",
    summary="Statistics of verified rollouts",
    response_model=dict[str, Any],
    openapi_extra=example({"verify_responses": [_ROW]}),
)
def aggregate(
    verify_responses: Annotated[Items[dict[str, Any]], FromBody(embed=True)],
) -> JSON:
    return JSON(aggregate_metrics(verify_responses))


@sessions.get("/reverify_mode", summary="Rollouts may be verified again at any time")
async def reverify_mode() -> JSON:
    return JSON("stateless")


router.include_router(sessions)


def parse(values: Mapping[str, Any], model: ServedModel) -> AnyConversation:
    """The conversation of a rollout. Raises `DataError` for one that cannot be scored."""
    params = values["responses_create_params"]
    output = values["response"]["output"]
    return conversation_of(params, output, developer=model.renderer.developer_role)


def verdict(reward: Reward, threshold: float | None = None) -> dict[str, Any]:
    """The keys that a reward adds to a rollout."""
    if reward.value is None:
        return failure(reward.error or "there is no reward")
    score = reward.score
    parts: dict[str, float] = {}
    # Without shaping the score is the reward.
    if score.score is not None and score.score != reward.value:
        parts["reward_score"] = score.score
    for name, value in [*reward.components.items(), *score.parts.items()]:
        parts[f"reward_{name}"] = value
    keys: dict[str, Any] = {"reward": reward.value}
    if parts:
        # NeMo Gym's metrics read numbers at the top level alone.
        keys |= {"reward_components": parts, **parts}
    keys["reward_num_tokens"] = score.num_tokens
    keys["reward_truncated"] = score.truncated
    if threshold is not None:
        keys["reward_passed"] = reward.value >= threshold
    return keys


def without_verdict(rollout: Row) -> dict[str, Any]:
    """A rollout that is verified again, without the keys of its earlier verdict."""
    earlier = rollout.get("reward_components")
    # Each part stands at the top level too, under a name of that model's members and heads: metrics
    # would take it for a number of the model that verifies now.
    parts = earlier.keys() if isinstance(earlier, Mapping) else ()
    kept = {}
    for key, value in rollout.items():
        is_part = key in parts and key.startswith("reward_")
        if key not in _VERDICT_KEYS and not is_part:
            kept[key] = value
    return kept


def failure(reason: str, kind: str = "verifier_error") -> dict[str, Any]:
    """The keys of a rollout without a reward."""
    return {
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": kind,
        "failure_kind": kind,
        "failure_reason": reason,
    }


def aggregate_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """`agent_metrics` of all rows, `key_metrics` (their means), and `group_level_metrics` of each
    prompt in order.
    """
    measured = [row for row in rows if not row.get("mask_sample")]
    measured.sort(key=lambda row: (_index(row, TASK_INDEX), _index(row, ROLLOUT_INDEX)))
    groups: dict[int, list[Row]] = {}
    for row in measured:
        # In the order of tasks, as NeMo Gym gives them.
        groups.setdefault(_index(row, TASK_INDEX), []).append(row)
    metrics = _describe(measured)
    means = {name: value for name, value in metrics.items() if name.startswith("mean/")}
    coverage: dict[str, Any] = {}
    # A mean over fewer rollouts than were collected must not look like a whole one.
    if len(measured) < len(rows):
        coverage["coverage/measured_rollouts"] = len(measured)
        coverage["coverage/masked_rollouts"] = len(rows) - len(measured)
    group_metrics = []
    for task, group in groups.items():
        group_metrics.append({TASK_INDEX: task, **_describe(group)})
    return {
        "group_level_metrics": group_metrics,
        "agent_metrics": metrics | coverage,
        "key_metrics": means | coverage,
    }


def _index(row: Row, key: str) -> int:
    """The row's index, 0 if it has none, as in NeMo Gym."""
    index = row.get(key)
    return index if isinstance(index, int) else 0


def _describe(rows: Iterable[Row]) -> dict[str, float]:
    """`mean/x`, `max/x`, `min/x`, `median/x` and `std/x` of every number x; the deviation of a
    sample, 0 of one.
    """
    columns: dict[str, list[float]] = {}
    for row in rows:
        values = dict(row)
        response = row.get("response")
        if isinstance(response, Mapping) and isinstance(response.get("usage"), Mapping):
            values |= response["usage"]
        for name, value in values.items():
            # Names with an underscore are NeMo Gym's own, as its indices.
            is_metric = name != "mask_sample" and not name.startswith("_")
            # Sums of squares of larger numbers are not finite.
            if is_metric and isinstance(value, int | float) and abs(value) < 1e150:
                columns.setdefault(name, []).append(float(value))
    result: dict[str, float] = {}
    for name, numbers in columns.items():
        result[f"mean/{name}"] = statistics.fmean(numbers)
        result[f"max/{name}"] = max(numbers)
        result[f"min/{name}"] = min(numbers)
        result[f"median/{name}"] = float(statistics.median(numbers))
        result[f"std/{name}"] = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return result
