"""The dialects that RL frameworks speak to a reward model: one module each.

Each has the bodies that it reads and writes, `parse` (body -> conversations), `to_json` (rewards -> response), and its
routes in `router`: parse, `await service.rewards(model, conversations, ...)`, to_json. So a conversation has the same
score through each of them. A dialect is added by its module and its name here.
"""

from __future__ import annotations

from fastapi import APIRouter

from treeward.serving.dialects import classify, nemo_gym, openrlhf, rewards, sglang, slime, tei, trace, vllm

__all__ = ["router"]

router = APIRouter()
for _dialect in (rewards, trace, classify, vllm, sglang, openrlhf, tei, slime, nemo_gym):
    router.include_router(_dialect.router)
