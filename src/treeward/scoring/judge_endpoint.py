"""`EndpointJudge`: verdicts by a language model behind an OpenAI-compatible endpoint.

    judge = EndpointJudge(config)
    judge.ask(questions)           # a `Verdict` for each, or the reason for none
    judge.cost                     # requests, tokens and seconds of all of them

With `use_logprobs` verdicts count by their expected value, if the endpoint sends log-probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treeward.config.reward_environments import JudgeModelConfig
from treeward.data.conversation import Message
from treeward.errors import ModelError
from treeward.http import ServerError, run_async
from treeward.openai_client import check_openai, key_from, openai_client, post
from treeward.scoring.score import Cost
from treeward.scoring.verdicts import (
    Answer,
    NoVerdict,
    TokenChoice,
    Verdict,
    read_answer,
    response_format,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_NUM_ALTERNATIVES = 20  # the most that OpenAI's API gives


class EndpointJudge:
    """Asks an endpoint. Raises `ConfigError` if the package openai or the key is missing."""

    def __init__(self, config: JudgeModelConfig) -> None:
        assert config.base_url is not None
        self.config = config
        self.url = config.base_url
        self.cost = Cost()
        check_openai()
        self._key = key_from(config.api_key_env, where="judge", field="api_key_env")

    def ask(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        """A verdict for each question, or the reason for none. Raises `ModelError` if the endpoint
        refuses the key or the model."""
        return run_async(self.ask_async(questions)) if questions else []

    async def ask_async(
        self,
        questions: Sequence[Sequence[Message]],
        slots: asyncio.Semaphore | None = None,
    ) -> list[Verdict | NoVerdict]:
        """As `ask`. `slots`: what bounds the requests of several callers of one event loop
        together; by default `max_concurrency` bounds those of this call."""
        config = self.config
        if slots is None:
            slots = asyncio.Semaphore(config.max_concurrency)
        # Each time a new one: a client belongs to an event loop, and `run_async` makes one for
        # each step.
        client = openai_client(
            self.url,
            api_key=self._key,
            timeout_seconds=config.timeout_seconds,
            max_retries=config.max_retries,
        )
        tasks = []
        async with client:
            try:
                async with asyncio.TaskGroup() as group:
                    for question in questions:
                        verdict = self._verdict(client, slots, question)
                        tasks.append(group.create_task(verdict))
            # Only what would fail for every question is raised: the others are cancelled.
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _verdict(
        self, client: AsyncOpenAI, slots: asyncio.Semaphore, question: Sequence[Message]
    ) -> Verdict | NoVerdict:
        """The verdict, or the reason for none, which is the server's where it refuses this request
        alone."""
        try:
            async with slots:
                answer = await self._message(client, question)
        except ServerError as error:
            if error.status in (401, 403, 404):  # the key, or the model
                raise ModelError(
                    "the judge's endpoint refuses the requests",
                    where=self.url,
                    field="model" if error.status == 404 else "api_key_env",
                    got=f"{error.summary}: {error.got}",
                    need="a valid key, and one of its models (and /v1 in base_url)",
                ) from error
            # These statuses are of the request itself, which would be refused again.
            is_temporary = error.status not in (400, 413, 422)
            return NoVerdict(f"judge: {error.summary}: {error.got}", is_temporary=is_temporary)
        return read_answer(answer, self.config)

    async def _message(self, client: AsyncOpenAI, messages: Sequence[Message]) -> Answer:
        """The judge's message, empty if it is not text."""
        config = self.config
        request: dict[str, Any] = {"model": config.model}
        # null leaves a field out: some servers refuse one that they do not know.
        if config.temperature is not None:
            request["temperature"] = config.temperature
        if config.max_tokens is not None:
            request["max_tokens"] = config.max_tokens
        if config.use_logprobs:
            request |= {"logprobs": True, "top_logprobs": _NUM_ALTERNATIVES}
        if config.chat_template_kwargs:
            request["chat_template_kwargs"] = config.chat_template_kwargs
        if config.structured_output:
            request["response_format"] = response_format(config)
        # The question comes last: the user's fields may replace any other.
        request |= {**config.extra_body, "messages": messages}
        seconds = config.timeout_seconds * (config.max_retries + 1)
        content = await post(client, "/chat/completions", request, total_seconds=seconds)
        try:
            choice = content["choices"][0]
            text = choice["message"]["content"]
            usage = content.get("usage") or {}
            logprobs = choice.get("logprobs") or {}
            tokens = []
            for token in logprobs.get("content") or ():
                # The token that was sampled may not be among the likeliest.
                log_probs = {token["token"]: _log_prob(token["logprob"])}
                for entry in token.get("top_logprobs") or ():
                    log_probs[entry["token"]] = _log_prob(entry["logprob"])
                tokens.append(TokenChoice(token["token"], log_probs))
            num_read = int(usage.get("prompt_tokens") or 0)
            num_written = int(usage.get("completion_tokens") or 0)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            summary = "the server sends no chat completion"
            raise ServerError(summary, status=200, where=self.url, got=content) from error
        self.cost += Cost(1, num_read, num_written)
        is_cut = choice.get("finish_reason") == "length"
        if not isinstance(text, str):
            return Answer("", is_cut)
        return Answer(text, is_cut, tokens)


def _log_prob(value: Any) -> float:
    """A log-probability. Raises `ValueError` for NaN, which would become a reward, and for a number
    far above 0; rounding can make it a little more than 0."""
    log_prob = float(value)
    if not log_prob < 1.0:
        raise ValueError(f"{log_prob} is no log-probability")
    return log_prob
