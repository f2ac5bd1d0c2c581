"""`EndpointJudge`: verdicts by a language model behind an OpenAI-compatible endpoint.

    judge = EndpointJudge(config)
    judge.ask(questions)           # a `Verdict` for each, or the reason for none
    judge.cost                     # requests, tokens and seconds of all of them

With `use_logprobs` verdicts count by their expected value, if the endpoint sends log-probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.data.conversation import Message
from treeward.environments.interface import WHERE
from treeward.errors import ModelError
from treeward.http import ServerError, run_async
from treeward.openai_client import check_openai, key_from, openai_client, post
from treeward.scoring.score import Cost
from treeward.scoring.verdicts import Answer, NoVerdict, TokenChoice, Verdict, read_answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_NUM_ALTERNATIVES = 20  # the most that OpenAI's API gives


class EndpointJudge:
    """Asks an endpoint. Raises `ConfigError` if the package openai or the key is missing."""

    def __init__(self, config: JudgeEnvironmentConfig) -> None:
        assert config.base_url is not None
        self.config, self.url = config, config.base_url
        self.cost = Cost()
        check_openai()
        self._key = key_from(config.api_key_env, where=WHERE, field="api_key_env")

    def ask(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        """A verdict for each question, or the reason for none. Raises `ModelError` if the endpoint
        refuses the key or the model."""
        return run_async(self._ask_all(questions)) if questions else []

    async def _ask_all(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        config = self.config
        slots = asyncio.Semaphore(config.max_concurrency)
        async with (
            openai_client(  # a client belongs to an event loop, and `run_async` makes one for each step
                self.url,
                api_key=self._key,
                timeout_seconds=config.timeout_seconds,
                max_retries=config.max_retries,
            ) as client
        ):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._verdict(client, slots, question))
                        for question in questions
                    ]
            except ExceptionGroup as errors:  # of a request that would fail for every question
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
            if error.status in (401, 403, 404):
                raise ModelError(
                    "the judge's endpoint refuses the requests",
                    where=self.url,
                    field="model" if error.status == 404 else "api_key_env",
                    got=f"{error.summary}: {error.got}",
                    need="a valid key, and one of its models (and /v1 in base_url)",
                ) from error
            is_temporary = error.status not in (400, 413, 422)
            return NoVerdict(f"judge: {error.summary}: {error.got}", is_temporary=is_temporary)
        return read_answer(answer, self.config)

    async def _message(self, client: AsyncOpenAI, messages: Sequence[Message]) -> Answer:
        """The judge's message, empty if it is not text."""
        seconds = self.config.timeout_seconds * (self.config.max_retries + 1)
        content = await post(
            client,
            "/chat/completions",
            {**self._settings, "messages": messages},
            total_seconds=seconds,
        )
        try:
            choice = content["choices"][0]
            text = choice["message"]["content"]
            usage = content.get("usage") or {}
            tokens = [
                _token(entry) for entry in (choice.get("logprobs") or {}).get("content") or ()
            ]
        except (LookupError, TypeError, AttributeError) as error:
            summary = "the server sends no chat completion"
            raise ServerError(summary, status=200, where=self.url, got=content) from error
        self.cost += Cost(1, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
        is_cut = choice.get("finish_reason") == "length"
        return Answer(text, is_cut, tokens) if isinstance(text, str) else Answer("", is_cut)

    @property
    def _settings(self) -> dict[str, Any]:
        """The fields of every request."""
        optional = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        sent: dict[str, Any] = {key: value for key, value in optional.items() if value is not None}
        if self.config.use_logprobs:
            sent |= {"logprobs": True, "top_logprobs": _NUM_ALTERNATIVES}
        if self.config.chat_template_kwargs:
            sent["chat_template_kwargs"] = self.config.chat_template_kwargs
        return {"model": self.config.model, **sent, **self.config.extra_body}


def _token(content: Mapping[str, Any]) -> TokenChoice:
    others = {
        entry["token"]: float(entry["logprob"]) for entry in content.get("top_logprobs") or ()
    }
    return TokenChoice(content["token"], {content["token"]: float(content["logprob"]), **others})
