"""The dialects that RL frameworks speak to a reward model: one module each.

Each has the bodies that it reads, `parse` (body -> conversations), `to_json` (rewards -> response),
and its routes in `router`: parse, `await server.rewards(model, conversations, ...)`, to_json. A
route has an `example`, a body as its clients send it. A dialect whose clients read errors in a form
of their own has `ERROR_BODIES`, by route. A dialect is added by its name here.
"""

from __future__ import annotations

from fastapi import APIRouter

from treeward.serving.api_error import ErrorBody
from treeward.serving.dialects import (
    genrm_compare,
    nemo_gym,
    openrlhf,
    rewards,
    slime,
    tei,
    vllm_sglang,
)

router = APIRouter()
error_bodies: dict[str, ErrorBody] = {}
for _dialect in (rewards, vllm_sglang, openrlhf, tei, slime, nemo_gym, genrm_compare):
    router.include_router(_dialect.router)
    error_bodies |= getattr(_dialect, "ERROR_BODIES", {})
