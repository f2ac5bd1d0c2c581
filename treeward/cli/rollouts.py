"""`treeward rollouts`: completions of a language model behind an OpenAI-compatible address, with their rewards."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from treeward.cli.options import (
    Device,
    Dtype,
    Ensemble,
    Shaping,
    TrustRemoteCode,
    Unchecked,
    fixed_shaping,
    parse_yaml,
)
from treeward.cli.serve import check_ensembles, ensemble_members
from treeward.errors import ConfigError

__all__ = ["EXAMPLES", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \\
      --output rollouts.jsonl --reward-model results/rm/final --num-repeats 4
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \\
      --output rollouts.jsonl --rewards-url http://localhost:8000 --concurrency 64 --resume

Rows hold `responses_create_params` (as NeMo Gym's), `messages`, or a `prompt`. Each
rollout is written with its `response` and its `reward` as soon as it is there; beside
the output lie the failures and their reasons, the metrics of all rollouts, and the
rewards of each prompt."""


def run(
    model_url: Annotated[str, typer.Option(metavar="URL", help="The policy's address, as http://host:8001/v1.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="The name under which the policy is served.")],
    input_file: Annotated[str, typer.Option("--input", metavar="FILE", help="jsonl, json, csv, parquet or arrow.")],
    output: Annotated[str, typer.Option(metavar="FILE", help="Where rollouts go, as rollouts.jsonl.")],
    api: Annotated[Literal["chat", "responses"], typer.Option(help="Chat completions or responses.")] = "chat",
    model_token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with the policy's API key.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N rows only.")] = None,
    num_repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Rollouts of each row.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Rollouts at one time.")] = 16,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rollouts in the output.")] = False,
    max_retries: Annotated[int, typer.Option(min=0, metavar="N", help="Further attempts of a request.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Limit of a request.")] = 600.0,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="For rows without one.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="For rows without one.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of a completion, for rows without a limit.")
    ] = None,
    rewards_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running `treeward serve` that gives the rewards.")
    ] = None,
    reward_model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Or a folder or hub name, scored in this process; with --ensemble several."),
    ] = None,
    rewards_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model of --rewards-url; default: its first.")
    ] = None,
    rewards_token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with its bearer token.")
    ] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="A PEM file with the certificates to trust.")
    ] = None,
    shaping: Shaping = None,
    ensemble: Ensemble = None,
    unchecked: Unchecked = False,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    arguments = SimpleNamespace(**locals())

    from treeward.openai_client import check_openai, key_from
    from treeward.serving.rollouts.collect import check_free
    from treeward.serving.rollouts.rows import read_tasks

    _check(arguments)
    check_openai()
    keys = [key_from(model_token_env), key_from(rewards_token_env)]
    tasks = read_tasks(input_file, limit=limit)
    check_free(Path(output), resume=resume)
    service = None
    if reward_model:
        from treeward.serving.run import make_service

        service = make_service(_server(arguments))
    outcome = asyncio.run(_collect(arguments, tasks, service, keys))
    _report(outcome, output)
    return 1 if outcome.num_failed else 0


async def _collect(arguments: SimpleNamespace, tasks: Any, service: Any, keys: list[str | None]) -> Any:
    from treeward.http import Connection, checked_url
    from treeward.openai_client import openai_client
    from treeward.progress import ShownProgress
    from treeward.serving.rollouts.collect import Collected, collect
    from treeward.serving.rollouts.policy import Policy
    from treeward.serving.rollouts.rewards import local_rewards, remote_rewards

    common: dict[str, Any] = {"max_retries": arguments.max_retries, "verify_tls": arguments.tls_ca or True}
    base_url = checked_url(arguments.model_url)
    if base_url.count("/") == 2:  # http://host:port stands for its /v1
        base_url += "/v1"
    policy_client = openai_client(base_url, api_key=keys[0], timeout_seconds=arguments.timeout, **common)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(policy_client)
        rewards = None
        if service is not None:
            stack.callback(service.close)
            rewards = local_rewards(service)
        elif arguments.rewards_url is not None:
            url = checked_url(arguments.rewards_url).removesuffix("/v1")
            connection = Connection(url, token=keys[1], max_connections=arguments.concurrency, **common)
            stack.push_async_callback(connection.close)
            rewards = await remote_rewards(connection, model=arguments.rewards_model, timeout_seconds=arguments.timeout)
        policy = Policy(client, arguments.model, arguments.api, _sampling(arguments))
        total = len(tasks) * arguments.num_repeats
        shown = stack.enter_context(ShownProgress(unit="rollouts"))

        def advance(outcome: Collected) -> None:
            done = outcome.num_kept + outcome.num_done + outcome.num_failed
            shown.show("rollouts", done, total)

        return await collect(
            tasks,
            policy,
            rewards,
            Path(arguments.output),
            num_repeats=arguments.num_repeats,
            concurrency=arguments.concurrency,
            resume=arguments.resume,
            advance=advance,
        )


def _report(outcome: Any, output: str) -> None:
    reward = outcome.metrics.get("agent_metrics", {}).get("mean/reward")
    logger.info(
        "%d rollouts in %s%s%s.",
        outcome.num_kept + outcome.num_done,
        output,
        f", {outcome.num_kept} of them from before" if outcome.num_kept else "",
        "" if reward is None else f"; mean reward {reward:.4f}",
    )
    if outcome.num_failed:
        failures = Path(output).with_name(f"{Path(output).stem}_failures.jsonl")
        logger.warning(
            "%d rollouts failed: they are in %s, and --resume tries them again. The first: %s",
            outcome.num_failed,
            failures,
            outcome.first_failure,
        )


def _check(arguments: SimpleNamespace) -> None:
    if Path(arguments.output).suffix != ".jsonl":
        raise ConfigError(
            "the output is no .jsonl", where="--output", got=arguments.output, need="a name as rollouts.jsonl"
        )
    for url, option in ((arguments.model_url, "--model-url"), (arguments.rewards_url, "--rewards-url")):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError("this is no address", where=option, got=url, need="as http://localhost:8001/v1")
    if not arguments.reward_model:
        given = [name for name in ("shaping", "ensemble", "device") if getattr(arguments, name) is not None]
        given += [name for name in ("unchecked", "trust_remote_code") if getattr(arguments, name)]
        if given:
            raise ConfigError(
                "the option is for a reward model in this process",
                where=f"--{given[0].replace('_', '-')}",
                need="--reward-model, or the same for the server behind --rewards-url",
            )
    if arguments.rewards_url is None and (arguments.rewards_model or arguments.rewards_token_env):
        raise ConfigError(
            "the option is for a server", where="--rewards-model, --rewards-token-env", need="--rewards-url"
        )
    if arguments.reward_model and arguments.rewards_url is not None:
        raise ConfigError("rewards come from one place", where="--reward-model, --rewards-url", need="one of them")
    if arguments.reward_model and len(arguments.reward_model) > 1 and arguments.ensemble is None:
        raise ConfigError(
            "several reward models are named, and nothing says how their scores become one",
            where="--reward-model",
            got=" ".join(arguments.reward_model),
            need="one model, or --ensemble",
        )


def _server(arguments: SimpleNamespace) -> Any:
    fixed_shaping(arguments.shaping)  # rollouts that are made again must have the same rewards
    section: dict[str, Any] = {
        "shaping": None if arguments.shaping is None else parse_yaml(arguments.shaping, "--shaping"),
        "device": arguments.device,
        "dtype": arguments.dtype,
        "trust_remote_code": arguments.trust_remote_code,
        "check_contract": not arguments.unchecked,
    }
    if arguments.ensemble is None:
        section["model"] = arguments.reward_model[0]
    else:
        ensemble = parse_yaml(arguments.ensemble, "--ensemble")
        section["ensemble"] = {"method": ensemble} if isinstance(ensemble, str) else ensemble
        section |= ensemble_members(arguments.reward_model, section["ensemble"], "--reward-model")
    from treeward.config.load import load_section
    from treeward.config.server import ServerConfig

    server = load_section(ServerConfig, {"models": [section]}, where="--reward-model")
    check_ensembles(server)
    return server


def _sampling(arguments: SimpleNamespace) -> dict[str, Any]:
    given = {
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "max_output_tokens": arguments.max_tokens,
    }
    return {key: value for key, value in given.items() if value is not None}
