"""The dialects that RL frameworks speak to a reward model: one module each, with its bodies, its answers, its routes.

Each module has `router(service) -> APIRouter`. All of them ask `Service.answer`, so a conversation has the same score
through each of them.
"""

from __future__ import annotations

from fastapi import APIRouter

from treeward.serving.dialects import classify, nemo_gym, openrlhf, rewards, sglang, slime, tei, trace, vllm
from treeward.serving.service import Service

__all__ = ["routers"]


def routers(service: Service) -> list[APIRouter]:
    """The routes of all dialects."""
    spoken = (rewards, trace, classify, vllm, sglang, openrlhf, tei, slime, nemo_gym)
    return [dialect.router(service) for dialect in spoken]
