"""`treeward rollouts`: completions of a language model behind an OpenAI-compatible address, with their rewards."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from treeward.cli.model_arguments import (
    add_loading_arguments,
    add_reward_arguments,
    fixed_shaping,
    parse_yaml,
    positive,
)
from treeward.cli.serve import check_ensembles, ensemble_members
from treeward.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \\
      --output rollouts.jsonl --reward-model results/rm/final --num-repeats 4
  treeward rollouts --model-url http://localhost:8001/v1 --model my-model --input rows.jsonl \\
      --output rollouts.jsonl --rewards-url http://localhost:8000 --concurrency 64 --resume

Rows hold `responses_create_params` (as NeMo Gym's), `messages`, or a `prompt`. Each rollout is written with its
`response` and its `reward` as soon as it is there; beside the output lie the failures and why, the metrics of all
rollouts, and the rewards of each prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-url", required=True, metavar="URL", help="the policy's address, as http://host:8001/v1"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="the name under which the policy is served")
    parser.add_argument(
        "--api",
        choices=("chat", "responses"),
        default="chat",
        help="the API of the policy: chat completions or responses",
    )
    parser.add_argument("--model-token-env", metavar="NAME", help="the environment variable with the policy's API key")
    parser.add_argument("--input", required=True, metavar="FILE", help="jsonl, json, csv, parquet or arrow")
    parser.add_argument("--output", required=True, metavar="FILE", help="where rollouts go, as rollouts.jsonl")
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N rows only")
    parser.add_argument("--num-repeats", type=positive, default=1, metavar="N", help="rollouts of each row; default 1")
    parser.add_argument(
        "--concurrency", type=positive, default=16, metavar="N", help="rollouts at one time; default 16"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the rollouts that are in the output")
    parser.add_argument("--max-retries", type=_count, default=5, metavar="N", help="further attempts; default 5")
    parser.add_argument("--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="of a request; default 600")
    parser.add_argument("--temperature", type=float, metavar="T", help="of rows that do not say")
    parser.add_argument("--top-p", type=float, metavar="P", help="of rows that do not say")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="of a completion, for rows that do not say")
    rewards = parser.add_mutually_exclusive_group()
    rewards.add_argument("--rewards-url", metavar="URL", help="a running `treeward serve`; without rewards otherwise")
    rewards.add_argument(
        "--reward-model", nargs="+", metavar="MODEL", help="folder or hub name, scored in this process"
    )
    parser.add_argument("--rewards-model", metavar="NAME", help="which model of --rewards-url; default: its first")
    parser.add_argument("--rewards-token-env", metavar="NAME", help="the environment variable with its bearer token")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="a PEM file with the certificates to trust, for both addresses"
    )
    add_reward_arguments(parser)
    parser.add_argument(
        "--unchecked", action="store_true", help="take even a reward model that does not keep its scoring contract"
    )
    add_loading_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from treeward.openai_client import check_openai, key_from
    from treeward.serving.rollouts.collect import check_free
    from treeward.serving.rollouts.rows import read_tasks

    _check(arguments)
    check_openai()
    keys = [key_from(arguments.model_token_env), key_from(arguments.rewards_token_env)]
    tasks = read_tasks(arguments.input, limit=arguments.limit)
    check_free(Path(arguments.output), resume=arguments.resume)
    service = None
    if arguments.reward_model is not None:
        from treeward.serving.run import make_service

        service = make_service(_server(arguments))
    outcome = asyncio.run(_collect(arguments, tasks, service, keys))
    _report(outcome, arguments.output)
    return 1 if outcome.num_failed else 0


async def _collect(arguments: argparse.Namespace, tasks: Any, service: Any, keys: list[str | None]) -> Any:
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


def _check(arguments: argparse.Namespace) -> None:
    if Path(arguments.output).suffix != ".jsonl":
        raise ConfigError(
            "the output is no .jsonl", where="--output", got=arguments.output, need="a name as rollouts.jsonl"
        )
    for url, option in ((arguments.model_url, "--model-url"), (arguments.rewards_url, "--rewards-url")):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError("this is no address", where=option, got=url, need="as http://localhost:8001/v1")
    if arguments.reward_model is None:
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
    if arguments.reward_model is not None and len(arguments.reward_model) > 1 and arguments.ensemble is None:
        raise ConfigError(
            "several reward models are named, and nothing says how their scores become one",
            where="--reward-model",
            got=" ".join(arguments.reward_model),
            need="one model, or --ensemble",
        )


def _server(arguments: argparse.Namespace) -> Any:
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


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "max_output_tokens": arguments.max_tokens,
    }
    return {key: value for key, value in given.items() if value is not None}


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, need a number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(json.loads(text))
    except (ValueError, TypeError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, need a number of seconds")
    return seconds
