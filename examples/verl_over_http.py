"""A reward function for verl that asks `treeward serve`. treeward need not be in verl's Python.

docs/verl.md has the command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import aiohttp

NO_LIMIT = aiohttp.ClientTimeout(total=None)  # the server ends a request at `deadline_seconds`


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    url: str,
    token_env: str | None = None,
    **unused: Any,
) -> dict[str, float]:
    """The reward of one completion, as verl asks for it, and the model's score as `raw`.

    `extra_info["prompt"]`: the messages before the completion. `url` and `token_env` are of
    `reward_kwargs`: the server, and the environment variable with its token. Raises `RuntimeError`
    with the server's reason if there is no reward, and `ValueError` without the prompt.
    """
    if "prompt" not in extra_info:
        raise ValueError("verl passes no prompt on: write it into each row's extra_info, as prompt")
    headers = {"authorization": f"Bearer {os.environ[token_env]}"} if token_env else {}
    conversation = [*extra_info["prompt"], {"role": "assistant", "content": solution_str}]
    body = {"conversations": [conversation]}
    async with (
        aiohttp.ClientSession(timeout=NO_LIMIT, headers=headers) as session,
        session.post(f"{url.rstrip('/')}/v1/rewards", json=body) as response,
    ):
        if not response.ok:
            raise RuntimeError(f"{url} answers {response.status}: {await response.text()}")
        result = (await response.json())["data"][0]
    return {"score": float(result["reward"]), "raw": float(result["score"])}
