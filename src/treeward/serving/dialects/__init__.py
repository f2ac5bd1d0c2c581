"""The dialects that RL frameworks speak to a reward model: one module each.

Each has the bodies that it reads, `parse` (body -> conversations), `to_json` (rewards -> response), and its routes in
`router`: parse, `await server.rewards(model, conversations, ...)`, to_json. A dialect is added by its name here.
"""

from __future__ import annotations

from fastapi import APIRouter

from treeward.serving.dialects import nemo_gym, openrlhf, rewards, slime, tei, vllm_sglang

router = APIRouter()
for _dialect in (rewards, vllm_sglang, openrlhf, tei, slime, nemo_gym):
    router.include_router(_dialect.router)
