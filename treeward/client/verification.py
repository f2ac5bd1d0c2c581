"""Replaying a scoring contract on a running server: does it give the scores that the model had in training?

    result = verify_server("results/rm/final", "http://localhost:8000", dialect="vllm")
    result.equal, result.first_difference       # False, and the part that explains the scores, with the remedy

Only the model's contract and tokenizer are read. The golden conversations are sent as clients of the dialect send
them, each alone and then all in one request, and the scores are compared with the contract: a sigmoid, a second BOS, a
missing end of turn, rounding, a scale and other tokens are named where they explain every score.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.client.dialects import DIALECTS, Dialect, Form, RenderedConversation, ServerScore
from treeward.data.preference import last_text
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.http import Connection, RewardServerError
from treeward.model.contract import CONTRACT_FILE, Dtype, GoldenExample, ScoringContract, read_contract
from treeward.model.pretrained import load_tokenizer, quiet_transformers
from treeward.scoring.diagnosis import PARTS, Check, Part, diagnose
from treeward.scoring.golden import combined_heads

__all__ = ["ServerVerification", "verify_server"]

_REFUSED = frozenset({400, 413, 422, 500})
"""A conversation that a server refuses alone has no score; other refusals are of the whole replay."""


@dataclass(frozen=True, slots=True)
class ServerVerification:
    """The result. `checks`: one per part, in order. `served_model`: the server's name for the model, if any.

    `form`: what was sent. `largest_difference`: of golden scores, None where one is missing.
    """

    model: str
    against: str
    dialect: str
    form: Form
    served_model: str | None
    checks: tuple[Check, ...]
    num_scores: int
    largest_difference: float | None
    tolerance: float

    @property
    def first_difference(self) -> Check | None:
        """The part that differs first."""
        return next((check for check in self.checks if check.state == "differs"), None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.first_difference is None


def verify_server(
    name: str | Path,
    url: str,
    *,
    dialect: str = "treeward",
    model: str | None = None,
    form: Form | None = None,
    dtype: Dtype = "float32",
    token: str | None = None,
    extra: Mapping[str, Any] | None = None,
    timeout_seconds: float = 60.0,
    verify_tls: bool | str = True,
    trust_remote_code: bool = False,
) -> ServerVerification:
    """Replay the contract of the model `name` (a folder, or a hub name) on the server at `url`.

    `dialect`: one of `DIALECTS`. `model`: what the server calls the model; None takes its first. `form`: what is sent,
    one of the dialect's forms; None is what its clients send, for encoders without CLS and SEP. `dtype`: what the
    server computes in; scores in bfloat16 are compared to the contract's tolerance for bfloat16. `extra`: keys to add
    to each request. `timeout_seconds`: of one request. `verify_tls`: as in `Connection`.

    Raises `RewardServerError` for a server that gives no scores, `ModelError` for a model without a contract or whose
    tokenizer does not give the contract's tokens, `ConfigError` for impossible arguments.
    """
    if dialect not in DIALECTS:
        raise ConfigError(
            "there is no such dialect", field="dialect", got=dialect, need=f"one of {', '.join(DIALECTS)}"
        )
    spoken = DIALECTS[dialect]
    if form is not None and form not in spoken.forms:
        need = f"one of {', '.join(spoken.forms)}"
        raise ConfigError(f"the dialect {dialect} is not sent {form}", field="form", got=form, need=need)
    quiet_transformers()
    contract, renderer = _contract_and_renderer(name, trust_remote_code)
    examples, conversations = _rendered(str(name), contract, renderer)
    own = spoken.forms[0] if renderer.kind == "decoder" or "bare" not in spoken.forms else "bare"
    connection = Connection(
        url.rstrip("/").removesuffix(spoken.path), token=token, max_retries=3, verify_tls=verify_tls
    )
    server = _Server(connection, dialect, form or own, model, extra or {}, timeout_seconds)
    return asyncio.run(_Replay(contract, examples, conversations, dtype, server).run(str(name)))


def _contract_and_renderer(name: str | Path, trust_remote_code: bool) -> tuple[ScoringContract, Renderer]:
    contract = read_contract(name)
    if contract is None or not contract.golden:
        raise ModelError(
            "there are no golden conversations to replay",
            where=str(name),
            got=f"no {CONTRACT_FILE}" if contract is None else f"a {CONTRACT_FILE} without any",
            need="a model folder with its scoring contract",
            fix=f"copy it from the export, or write one: treeward verify {name} --write",
        )
    own = contract.rendering
    renderer = Renderer(
        load_tokenizer(str(Path(name).expanduser()), trust_remote_code=trust_remote_code),
        chat_template=own.chat_template,
        chat_template_kwargs=own.chat_template_kwargs,
        max_length=own.max_length,
        truncation=own.truncation,
    )
    return contract, renderer


def _rendered(
    name: str, contract: ScoringContract, renderer: Renderer
) -> tuple[list[GoldenExample], list[RenderedConversation]]:
    """The golden conversations in every form. One that was truncated has no text, and is left out."""
    examples, conversations = [], []
    fitted = renderer.fit_many([example.messages for example in contract.golden])
    for example, (found, _) in zip(contract.golden, fitted, strict=True):
        if found is None or found.token_ids != example.token_ids:
            raise ModelError(
                "the tokenizer does not give the contract's tokens, so nothing it renders can be compared",
                where=name,
                got=f"other tokens for the conversation {example.name!r}",
                fix=f"treeward verify {name} names what differs in the folder",
            )
        if not found.truncated:
            text = renderer.render(example.messages)
            bare, completion = _without_frame(text, renderer), last_text(example.messages)
            examples.append(example)
            conversations.append(RenderedConversation(example.messages, text, bare, found.token_ids, completion))
    return examples, conversations


def _without_frame(text: str, renderer: Renderer) -> str:
    tokenizer = renderer.tokenizer
    if renderer.kind == "encoder":
        return text.removeprefix(tokenizer.cls_token or "").removesuffix(tokenizer.sep_token or "")
    return text.removeprefix(tokenizer.bos_token or "") if renderer.adds_bos else text


@dataclass
class _Server:
    """A server, and the form of its requests."""

    connection: Connection
    dialect_name: str
    form: Form
    model: str | None
    extra: Mapping[str, Any]
    timeout_seconds: float

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.dialect_name]

    async def first_model(self) -> str | None:
        """What the server calls its first model; None for a server without /v1/models."""
        try:
            reply = await self.connection.get("/v1/models", until=self._until())
        except RewardServerError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        listed = reply.json.get("data") if isinstance(reply.json, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        return name if isinstance(name, str) else None

    async def scores(self, conversations: Sequence[RenderedConversation]) -> list[ServerScore]:
        """The server's numbers for the conversations of one request. Raises `RewardServerError`."""
        body = self.dialect.body(self.model, self.form, conversations) | dict(self.extra)
        content = json.dumps(body, ensure_ascii=False).encode()
        reply = await self.connection.post(self.dialect.path, content, until=self._until())
        try:
            scores = self.dialect.read(reply.json)
            values = [value for one in scores for value in one.values if value is not None]
            if not all(isinstance(value, int | float) for value in values) or not all(one.values for one in scores):
                raise ValueError("a score is no number")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise reply.error(
                f"the reply is not in the dialect {self.dialect_name}",
                got=json.dumps(reply.json),
                need=f"scores: {type(error).__name__}: {error}",
            ) from error
        if len(scores) != len(conversations):
            need = f"{len(conversations)}, one for each"
            raise reply.error("the reply has another number of scores", got=f"{len(scores)} scores", need=need)
        return scores

    async def scores_alone(self, conversations: Sequence[RenderedConversation]) -> list[ServerScore | str]:
        """The numbers for each conversation in a request of its own, or why the server refuses it; never all refused.

        Raises `RewardServerError` where all of them are refused, and for other errors.
        """
        found: list[ServerScore | str] = []
        first: RewardServerError | None = None
        for one in conversations:
            try:
                found += await self.scores([one])
            except RewardServerError as error:
                if error.status not in _REFUSED:
                    raise
                first = first or error
                found.append(str(error.got))
        if first is not None and all(isinstance(one, str) for one in found):
            raise first
        return found

    def _until(self) -> float:
        return time.monotonic() + self.timeout_seconds


@dataclass
class _Replay:
    """The replay of a contract's golden conversations on a server."""

    contract: ScoringContract
    examples: list[GoldenExample]
    conversations: list[RenderedConversation]
    dtype: Dtype
    server: _Server

    async def run(self, name: str) -> ServerVerification:
        server = self.server
        try:
            if server.model is None and server.dialect.lists_models:
                server.model = await server.first_model()
            found = await server.scores_alone(self.conversations)
            scores = [None if isinstance(one, str) else self._score(one) for one in found]
            verdict = self._verdict(scores, found)
            can_batch = not (server.form == "messages" and server.dialect_name == "vllm")
            if verdict.state == "equal" and can_batch and len(scores) > 1:
                verdict = await self._in_one_request(verdict)
        finally:
            await server.connection.close()
        contract = self._contract_check(found, is_equal=verdict.state == "equal")
        off = [
            math.inf if score is None else abs(score - one.score)
            for score, one in zip(scores, self.examples, strict=True)
        ]
        return ServerVerification(
            name, server.connection.url, server.dialect_name, server.form, server.model,
            (contract, *(self._check(part, verdict) for part in PARTS[1:])), len(self.examples),
            max(off) if all(map(math.isfinite, off)) else None, self.contract.tolerance.of(self.dtype),
        )  # fmt: skip

    def _score(self, found: ServerScore) -> float | None:
        """The score that the server's numbers make. Raises `RewardServerError` for another number of heads."""
        values, heads = found.values, self.contract.heads
        if len(values) == 1:
            return values[0]
        if len(values) != len(heads):
            raise RewardServerError(
                "the server gives another number of values for a conversation",
                status=200,
                where=self.server.connection.url,
                got=f"{len(values)} values",
                need=f"one score, or {len(heads)} heads",
                fix="serve the model as a classifier of whole conversations, and check which model it is",
            )
        by_label = dict(zip(found.labels, values, strict=True)) if found.labels else {}
        if by_label.keys() == {head.name for head in heads}:
            values = tuple(by_label[head.name] for head in heads)
        numbers = [value for value in values if value is not None]
        return combined_heads(numbers, heads) if len(numbers) == len(values) else None

    def _verdict(self, scores: Sequence[float | None], found: Sequence[ServerScore | str]) -> Check:
        """The one difference that explains the scores."""
        verdict = diagnose(self.contract, scores, dtype=self.dtype, golden=self.examples)
        refused = [(one, example) for one, example in zip(found, self.examples, strict=True) if isinstance(one, str)]
        if refused:
            return Check(
                "tokens", "differs", f"the server refuses {len(refused)} of {len(scores)} conversations",
                f"{refused[0][0]} (for the conversation {refused[0][1].name!r})", "a score for each",
                "let the server read as many tokens as the model does, and all of the characters",
            )  # fmt: skip
        if verdict.part not in ("weights", "precision") or verdict.state == "equal" or None in scores:
            return verdict
        return self._other_tokens(found) or verdict

    def _other_tokens(self, found: Sequence[ServerScore | str]) -> Check | None:
        """Other tokens, as the server counts them; a few too many may change a score as little as rounding does."""
        counts = [
            (one.num_tokens - len(example.token_ids), one.num_tokens, example)
            for one, example in zip(found, self.examples, strict=True)
            if isinstance(one, ServerScore) and one.num_tokens is not None
        ]
        wrong = [(count, example) for off, count, example in counts if off]
        if not wrong:
            return None
        part: Part = "template" if self.server.form == "messages" else "tokens"
        made, fix = {
            "template": (
                "rendered in another way",
                "serve the model with its own chat template, or send rendered text",
            ),
            "tokens": ("made into other tokens", "serve the model with the tokenizer of its folder, and cut nothing"),
        }[part]
        off = {one for one, _, _ in counts}
        every = f", {abs(max(off))} {'more' if max(off) > 0 else 'fewer'} each" if len(off) == 1 else ""
        count, example = wrong[0]
        return Check(
            part, "differs", f"conversations are {made} by the server{every}",
            f"{count} tokens for the conversation {example.name!r}", f"{len(example.token_ids)} tokens", fix,
        )  # fmt: skip

    async def _in_one_request(self, verdict: Check) -> Check:
        """The same conversations once more, together: padding goes wrong in batches."""
        together = [self._score(one) for one in await self.server.scores(self.conversations)]
        in_batch = diagnose(self.contract, together, dtype=self.dtype, golden=self.examples)
        if in_batch.state == "equal":
            return verdict
        return replace(
            in_batch,
            part="read position",
            summary="alone every conversation has its score, and beside others it has not: padding is read",
            fix="pad with a token that ends no conversation, and read each score by its conversation's length",
        )

    def _contract_check(self, found: Sequence[ServerScore | str], *, is_equal: bool) -> Check:
        own = self.contract.scores_sha256
        served = next((one.contract for one in found if isinstance(one, ServerScore) and one.contract), None)
        if served is None or served == own:
            also = ", and so says the server" if served else ""
            return Check("contract", "equal", f"version {self.contract.version}, sha256 {own[:12]}{also}")
        members = served.split("+")
        if len(members) > 1:
            return Check(
                "contract", "differs", f"the server's model is an ensemble of {len(members)} models",
                f"the contracts {', '.join(f'sha256 {one[:12]}' for one in members)}", f"sha256 {own[:12]} alone",
                "name another of the server's models (--model), or verify against a server of this model alone",
            )  # fmt: skip
        same = "; the golden scores are still equal" if is_equal else ""
        return Check(
            "contract", "differs", f"the server's model has another scoring contract{same}",
            f"sha256 {served[:12]}", f"sha256 {own[:12]}",
            "serve this model, or verify against the folder that is served",
        )  # fmt: skip

    def _check(self, part: Part, verdict: Check) -> Check:
        if part == verdict.part:
            return verdict
        if part == "files":
            return Check(part, "not checked", "they are on the server's machine")
        if verdict.state == "differs":
            return Check(part, "not checked", f"it cannot be, because of the {verdict.part}")
        if part == "template" and self.server.form != "messages":
            return Check(part, "not checked", "conversations were rendered here")
        if part == "tokens" and self.server.form == "tokens":
            return Check(part, "not checked", "token ids were sent")
        return Check(part, "equal", "as the scores are")
