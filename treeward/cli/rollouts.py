r"""`treeward rollouts`: completions of a language model behind an OpenAI-compatible address, with their rewards.

examples:
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \
      --output rollouts.jsonl --reward-model results/rm/final --num-repeats 4
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \
      --output rollouts.jsonl --rewards-url http://localhost:8000 --concurrency 64 --resume

Rows hold `responses_create_params` (as NeMo Gym's), `messages`, or a `prompt`. Beside
the output lie the failures, the metrics of all rollouts, and the rewards of each prompt.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treeward.cli.options import Ensemble, ModelOptions, Shaping, one_model, with_model_options
from treeward.errors import ConfigError
from treeward.progress import ShownProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treeward.client.rewards import AsyncRewardClient
    from treeward.config.server import ServedModelConfig
    from treeward.serving.rollouts.collect import Collected
    from treeward.serving.rollouts.policy import Policy, Task
    from treeward.serving.service import Service

logger = logging.getLogger(__name__)

_A_DAY = 24 * 3600.0
"""The limit of scoring in this process: completions that were paid for wait for a slow reward model."""


@with_model_options
def run(
    model_url: Annotated[str, typer.Option(help="The policy's address, as http://host:8001/v1.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="The name under which the policy is served.")],
    input_file: Annotated[str, typer.Option("--input", metavar="FILE", help="jsonl, json, csv, parquet or arrow.")],
    output: Annotated[str, typer.Option(metavar="FILE", help="Where rollouts go, as rollouts.jsonl.")],
    api: Annotated[Literal["chat", "responses"], typer.Option(help="Chat completions or responses.")] = "chat",
    model_token_env: Annotated[str | None, typer.Option(help="The variable with the policy's API key.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N rows only.")] = None,
    num_repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each row.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at one time.")] = 16,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rollouts in the output.")] = False,
    max_retries: Annotated[int, typer.Option(min=0, help="Further attempts of a request.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.001, help="Limit of a request, in seconds.")] = 600.0,
    temperature: Annotated[float | None, typer.Option(help="For rows without one.")] = None,
    top_p: Annotated[float | None, typer.Option(help="For rows without one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a completion, for rows without a limit.")] = None,
    rewards_url: Annotated[str | None, typer.Option(help="A running `treeward serve` that gives rewards.")] = None,
    reward_model: Annotated[list[str] | None, typer.Option(help="Or a reward model in this process.")] = None,
    rewards_model: Annotated[str | None, typer.Option(help="Which model of --rewards-url; default: its first.")] = None,
    rewards_token_env: Annotated[str | None, typer.Option(help="The variable with its bearer token.")] = None,
    shaping: Shaping = None,
    ensemble: Ensemble = None,
    *,
    options: ModelOptions,
) -> int:
    if Path(output).suffix != ".jsonl":
        raise ConfigError("the output is no .jsonl", where="--output", got=output, need="a name as rollouts.jsonl")
    if reward_model and rewards_url is not None:
        raise ConfigError("rewards come from one place", where="--reward-model, --rewards-url", need="one of them")
    for_model, for_server = shaping or ensemble or options != ModelOptions(), rewards_model or rewards_token_env
    if (for_model and not reward_model) or (for_server and rewards_url is None):
        summary = "an option is for a reward model in this process, or for a server of one, and there is none"
        raise ConfigError(summary, need="--reward-model or --rewards-url")

    from treeward.client.rewards import AsyncRewardClient
    from treeward.http import checked_url
    from treeward.openai_client import check_openai, key_from, openai_client

    check_openai()

    from treeward.serving.rollouts.collect import check_free
    from treeward.serving.rollouts.policy import Policy, read_tasks

    base_url = checked_url(model_url)
    if base_url.count("/") == 2:  # http://host:port stands for its /v1
        base_url += "/v1"
    tasks = read_tasks(input_file, limit=limit)
    check_free(Path(output), resume=resume)
    common: dict[str, Any] = {"timeout_seconds": timeout, "max_retries": max_retries}
    sampling = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_tokens}
    settings = {key: value for key, value in sampling.items() if value is not None}
    policy = Policy(openai_client(base_url, api_key=key_from(model_token_env), **common), model, api, settings)
    token, client, service = key_from(rewards_token_env), None, None
    if reward_model:
        section = one_model(reward_model, ensemble, shaping, options)  # made again, a reward must be the same
        service, client = _hosted(section, options.batch_tokens, concurrency)
    elif rewards_url is not None:
        url = checked_url(rewards_url).removesuffix("/v1")
        client = AsyncRewardClient(url, token=token, model=rewards_model, max_concurrency=concurrency, **common)
    try:
        how = {"resume": resume, "concurrency": concurrency}
        found = asyncio.run(_collected(tasks, policy, client, output, num_repeats, **how))
    finally:
        if service is not None:
            service.close()
    reward = found.metrics.get("agent_metrics", {}).get("mean/reward")
    mean = "" if reward is None else f"; mean reward {reward:.4f}"
    num_rollouts = found.num_kept + found.num_done
    logger.info("%d rollouts in %s, %d of them from before%s.", num_rollouts, output, found.num_kept, mean)
    if found.num_failed:
        failures = output.removesuffix(".jsonl") + "_failures.jsonl"
        logger.warning("%d rollouts failed: they are in %s, and --resume tries them again. The first: %s",
                       found.num_failed, failures, found.first_failure)  # fmt: skip
    return 1 if found.num_failed else 0


async def _collected(
    tasks: Sequence[Task], policy: Policy, client: AsyncRewardClient | None, output: str, num_repeats: int, **how: Any
) -> Collected:
    """Collect under a line of progress; the clients of the policy and of the rewards are closed at the end."""
    from treeward.serving.rollouts.collect import Rewards, collect

    async with AsyncExitStack() as stack:
        rewards = None if client is None else await Rewards.of(await stack.enter_async_context(client))
        await stack.enter_async_context(policy.client)
        shown, total = stack.enter_context(ShownProgress(unit="rollouts")), len(tasks) * num_repeats

        def advance(now: Collected) -> None:
            shown.show("rollouts", now.num_kept + now.num_done + now.num_failed, total)

        return await collect(tasks, policy, rewards, Path(output), num_repeats=num_repeats, advance=advance, **how)


def _hosted(
    section: ServedModelConfig, batch_tokens: int | None, concurrency: int
) -> tuple[Service, AsyncRewardClient]:
    """The reward model in this process behind the batcher of a server, and a client of it; it listens nowhere."""
    from httpx import ASGITransport

    from treeward.client.rewards import AsyncRewardClient
    from treeward.config.server import ServerConfig
    from treeward.serving.app import create_app
    from treeward.serving.run import make_service

    given: dict[str, Any] = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    service = make_service(ServerConfig(models=(section,), deadline_seconds=_A_DAY, access_log=False, **given))
    transport = ASGITransport(create_app(service))
    return service, AsyncRewardClient(
        "http://localhost", transport=transport, timeout_seconds=_A_DAY, max_concurrency=concurrency
    )
