"""The dialect of NeMo Gym's `genrm_compare`: completions of one prompt, rewarded by a judge that
compares pairs of them.

    POST /compare
    {"conversation_history": [{"role": "user", "content": "2 + 2?"}],
     "response_objs": [{"output": [{"type": "message", ...}]}, ...], "principle": "Be brief."}
    -> {"rewards": [3.0, 4.0],
        "comparison_results": [{"response_i": 0, "response_j": 1, "judge_idx": 0,
                                "score_1": 3, "score_2": 4, "ranking": 5}, ...],
        "metrics": {"mean_individual_score": 3.5, ...}}

`POST /verify` takes one rollout, and waits for the others of its prompt (`rollout_of` here; the
route is NeMo Gym's, in `nemo_gym.py`). Where Gym answers with a neutral reward because the judge
failed, the answer here is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from treeward.data.responses_items import messages_of_input, tools_of
from treeward.errors import DataError
from treeward.scoring.group_rewards import GroupCompletion, PairVerdict, num_pairs
from treeward.serving.api_error import APIError
from treeward.serving.cohorts import ComparedPrompt, Rollout
from treeward.serving.requests import JSON, Body, Items, JSONRoute, Server, example
from treeward.serving.served_judge import ServedJudge

router = APIRouter(tags=["NeMo Gym"], route_class=JSONRoute)

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
GROUP_ID = "_ng_group_id"
GROUP_ATTEMPT = "_ng_group_attempt"


class CompareBody(Body):
    """Completions of one prompt."""

    conversation_history: Items[dict[str, Any]]
    """The messages before the completions, with content as text or as parts."""
    response_objs: Items[dict[str, Any]]
    """Responses of OpenAI's Responses API."""
    principle: str | None = None
    """What the judge shall look for, if the server has `use_principle`."""


def _response(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    return {"output": [{"type": "message", "role": "assistant", "content": [part]}]}


_GROUP: dict[str, Any] = {
    "conversation_history": [{"role": "user", "content": "a"}],
    "response_objs": [_response("b"), _response("c")],
    "principle": "d",
}


@router.post(
    "/compare",
    summary="Rewards of completions that a judge compares",
    response_model=dict[str, Any],
    openapi_extra=example(_GROUP),
)
async def compare(body: CompareBody, server: Server) -> JSON:
    judge = server.service.judge
    if judge is None:
        message = "this server has no judge: start it with a `judge` section, or ask /v1/rewards"
        raise APIError(404, "no_judge", message)
    prompt, completions = await server.parsed(parse, body)
    num_comparisons = num_pairs(len(completions), judge.config.comparison_strategy)
    num_comparisons *= judge.config.num_judges_per_comparison
    most = server.service.config.max_queued
    if num_comparisons > most:
        # All pairs of a few thousand completions are millions of questions.
        message = f"{num_comparisons} comparisons in one request; at most {most} (max_queued)"
        raise APIError(413, "too_many_comparisons", message)
    if len(completions) < 2:
        rewards = [lone_reward(judge) for _ in completions]
        return JSON({"rewards": rewards, "comparison_results": None, "metrics": None})
    compared = await server.while_connected(judge.compare(prompt, completions))
    return JSON(
        {
            "rewards": compared.rewards,
            "comparison_results": [_result(verdict) for verdict in compared.verdicts],
            "metrics": compared.metrics,
        },
    )


def parse(body: CompareBody) -> tuple[ComparedPrompt, list[GroupCompletion]]:
    """The prompt and the completions of a body. Raises `APIError` 422."""
    params = {"input": body.conversation_history}
    prompt = _prompt(params, body.principle, field="conversation_history")
    completions = []
    for number, response in enumerate(body.response_objs):
        # A body of another API, as a chat completion, would be an empty completion to the judge.
        if not isinstance(response.get("output"), list):
            place = f"response_objs[{number}].output"
            raise _wrong(place, "the list of items of a response of the Responses API")
        completions.append(completion_of(response))
    return prompt, completions


def rollout_of(values: Mapping[str, Any]) -> Rollout:
    """The rollout of a body of `/verify`. Raises `APIError` 422."""
    params = values["responses_create_params"]
    principle = values.get("principle")
    if not isinstance(principle, str | None):
        raise _wrong("principle", "a text")
    number = values.get(ROLLOUT_INDEX)
    if not _is_integer(number) and number is not None:
        raise _wrong(ROLLOUT_INDEX, "a whole number")
    attempt = values.get(GROUP_ATTEMPT) or 0
    if not _is_integer(attempt):
        raise _wrong(GROUP_ATTEMPT, "a whole number")
    group_id = values.get(GROUP_ID)
    # Without a name rollouts belong together by their task, and by all that the judge is shown of
    # what they answer.
    compared = {"principle": principle}
    for field in ("input", "instructions", "tools"):
        # An empty list of tools is none.
        compared[field] = params.get(field) or None
    prompt_digest = _digest(compared)
    if group_id is not None:
        key = f"group_id::{group_id}"
    elif values.get(TASK_INDEX) is not None:
        key = f"task_idx::{values[TASK_INDEX]}::{prompt_digest}"
    elif values.get("prompt_id") is not None:
        key = f"prompt_id::{values['prompt_id']}::{prompt_digest}"
    else:
        key = prompt_digest
    if group_id is not None and number is None:
        raise _wrong(ROLLOUT_INDEX, f"the rollout's number, which {GROUP_ID} needs")
    return Rollout(
        key=f"{key}::group_attempt::{attempt}",
        prompt_digest=prompt_digest,
        digest=_digest(values["response"]),
        prompt=_prompt(params, principle, field="input"),
        completion=completion_of(values["response"]),
        number=number,
        group_id=None if group_id is None else str(group_id),
        attempt=attempt,
    )


def lone_reward(judge: ServedJudge) -> float:
    """The reward of a completion without others to compare it with. Raises `APIError` 422."""
    if judge.config.default_score is None:
        message = (
            "one completion cannot be compared: send two or more (for /verify set "
            "num_rollouts_per_prompt), or set default_score, which stands for its reward"
        )
        raise APIError(422, "nothing_to_compare", message)
    return judge.config.default_score


def completion_of(response: Mapping[str, Any]) -> GroupCompletion:
    """The text of the messages of a response, and that of its reasoning summaries. Calls and other
    items are not shown to the judge."""
    answers = []
    reasoning = []
    for item in response["output"]:
        kind = item.get("type") or "message" if isinstance(item, Mapping) else None
        if kind == "reasoning":
            reasoning += _texts(item.get("summary"), None)
        elif kind == "message":
            content = item.get("content")
            answers += [content] if isinstance(content, str) else _texts(content, "output_text")
    return GroupCompletion("".join(answers), "".join(reasoning))


def _texts(parts: Any, kind: str | None) -> list[str]:
    """The texts of the parts of a kind; None: of any."""
    texts: list[str] = []
    for part in parts if isinstance(parts, Sequence) else ():
        if isinstance(part, Mapping) and kind in (None, part.get("type")):
            text = part.get("text")
            if isinstance(text, str):
                texts.append(text)
    return texts


def _prompt(params: Mapping[str, Any], principle: str | None, *, field: str) -> ComparedPrompt:
    """`field`: the client's name of the input."""
    try:
        history = messages_of_input(params, field=field)
        tools = tools_of(params)
    except DataError as error:
        param = (error.field or field).split("[")[0]
        raise APIError(422, "invalid_request", error.in_one_line, param=param) from error
    return ComparedPrompt(tuple(history), principle, tuple(tools))


def _result(verdict: PairVerdict) -> dict[str, Any]:
    result: dict[str, Any] = {
        "response_i": verdict.first,
        "response_j": verdict.second,
        "judge_idx": verdict.judge,
        "score_1": None,
        "score_2": None,
        "ranking": None,
    }
    if verdict.scores is None:
        return result | {"error": verdict.error}
    result["score_1"] = verdict.scores.score_1
    result["score_2"] = verdict.scores.score_2
    result["ranking"] = verdict.scores.ranking
    return result


def _digest(value: Any) -> str:
    # The body was read by orjson, which takes no lone surrogates.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_integer(value: Any) -> bool:
    # Python takes true for 1.
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(field: str, need: str) -> APIError:
    return APIError(422, "invalid_request", f"{field}: need {need}", param=field)
