"""Run by the Python of NeMo Gym's environment: its `genrm_compare` on our cases, and its clients
against our server. Reads one JSON object from stdin and writes one to stdout.

{"groups": [...], "texts": [...], "host": "127.0.0.1", "port": 8000, "answers": ["a", "b"]}
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import nemo_gym.server_utils as http
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from omegaconf import OmegaConf
from resources_servers.genrm_compare.comparison_strategies import GenRMStrategy, GenRMStrategyConfig

from resources_servers.genrm_compare import app, utils

HISTORY = [{"role": "user", "content": "2 + 2?"}]
SERVER = "genrm_compare"


def rewards(group: dict[str, Any]) -> dict[str, Any]:
    pairs = utils.generate_comparison_pairs(group["strategy"], len(group["responses"]))
    values, metrics, _, _ = utils.aggregate_scores(
        comparison_results=[tuple(scores) for scores in group["scores"]],
        comparison_metadata=[(i, j, 0) for i, j in pairs],
        response_objs=group["responses"],
        aggregator_method="simple_tiebreaker",
        default_score=3.0,
        **group["keys"],
    )
    return {"rewards": values, "metrics": metrics}


def parsed(text: str) -> list[float] | None:
    try:
        return list(utils.parse_genrm_output(text, 3.0, 3.5, raise_on_fail=True))
    except utils.GenRMOutputParseError:
        return None


def member(number: int, text: str) -> app.GenRMCompareVerifyRequest:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
    return app.GenRMCompareVerifyRequest(
        responses_create_params=NeMoGymResponseCreateParamsNonStreaming(input=HISTORY),
        response=NeMoGymResponse(
            id=f"answer-{number}",
            created_at=0.0,
            model="policy",
            tools=[],
            parallel_tool_calls=True,
            tool_choice="auto",
            output=[{"id": f"message-{number}", **message}],
            object="response",
        ),
        group_id="group",
        group_attempt=0,
        rollout_index=number,
    )


async def asked(host: str, port: int, answers: list[str]) -> dict[str, Any]:
    """Our server, asked by Gym's batch client and by the requests of its agents."""
    session = http.set_global_aiohttp_client(http.GlobalAIOHTTPAsyncClientConfig())
    address = {SERVER: {"resources_servers": {SERVER: {"host": host, "port": port}}}}
    client = http.ServerClient.model_construct(global_config_dict=OmegaConf.create(address))
    members = [member(number, text) for number, text in enumerate(answers)]
    strategy = GenRMStrategy(GenRMStrategyConfig(genrm_compare_server_name=SERVER))
    responses = [one.response.model_dump(mode="json") for one in members]
    compared, metrics = await strategy.compare(HISTORY, responses, client)

    async def verified(body: app.GenRMCompareVerifyRequest) -> dict[str, Any]:
        # As `SimpleAgent.run` sends it.
        payload = body.model_dump(mode="json")
        response = await client.post(server_name=SERVER, url_path="/verify", json=payload)
        await http.raise_for_status(response)
        content = await http.get_response_json(response)
        return app.GenRMCompareVerifyResponse.model_validate(content).model_dump(
            mode="json", by_alias=True
        )

    # The last ones first; and once more, as after a lost connection.
    rows = await asyncio.gather(*(verified(body) for body in reversed(members)))
    again = await verified(members[0])
    await session.close()
    return {"compared": compared, "metrics": metrics, "rows": rows, "again": again}


async def main() -> None:
    given = json.load(sys.stdin)
    answer = {
        "groups": [rewards(group) for group in given["groups"]],
        "texts": [parsed(text) for text in given["texts"]],
        "asked": await asked(given["host"], given["port"], given["answers"]),
    }
    # What Gym writes to stdout comes before it.
    print(json.dumps(answer))  # noqa: T201


asyncio.run(main())
