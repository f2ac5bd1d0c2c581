"""Replaying a scoring contract on a running server: does it give the scores that the model had in training?

    result = verify_server("results/rm/final", "http://localhost:8000", dialect="vllm")
    result.equal, result.first_difference       # False, and the part that explains the scores, with the remedy

Of the model only its contract and its tokenizer are read. The golden conversations are sent as clients of the dialect
send them, each alone and then all in one request, and what comes back is compared with the contract: a sigmoid, a BOS
too many, an end that is cut, rounding, a scale and other tokens are named where they explain every score.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from treeward.client.dialects import DIALECTS, Asked, Dialect, Form, Given
from treeward.data.preference import last_text
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.http import Connection, Reply, RewardServerError
from treeward.model.contract import CONTRACT_FILE, GoldenExample, ScoringContract, read_contract
from treeward.model.pretrained import load_tokenizer, quiet_transformers
from treeward.scoring.diagnosis import PARTS, Check, Part, close, diagnose
from treeward.scoring.golden import combined_heads

__all__ = ["ServerVerification", "verify_server"]

_REFUSED = frozenset({400, 413, 422, 500})
"""A conversation that a server refuses alone has no score; other refusals are of the whole replay."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ServerVerification:
    """What was found. `checks`: one per part, in order. `served_model`: the name that was asked for, if any.

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

    `dialect`: one of `DIALECTS`. `model`: what the server calls the model; None asks it, where it can be asked. `form`:
    what is sent, of the dialect's forms; None is what its clients send, for encoders without CLS and SEP. `dtype`: what
    the server computes in, as far as it is known: of scores in bfloat16 only what bfloat16 can tell apart is compared.
    `extra`: keys to add to each request. `timeout_seconds`: of one request. `verify_tls`: as in `Connection`.

    Raises `RewardServerError` for a server that gives no scores, `ModelError` for a model without a contract or whose
    tokenizer does not give the contract's tokens, `ConfigError` for arguments that cannot be.
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
    examples, asked = _conversations(str(name), contract, renderer)
    own = spoken.forms[0] if renderer.kind == "decoder" or "bare" not in spoken.forms else "bare"
    connection = Connection(
        url.rstrip("/").removesuffix(spoken.path), token=token, max_retries=3, verify_tls=verify_tls
    )
    replay = _Replay(
        str(name), dialect, spoken, form or own, contract, examples, asked, dtype, connection, model, dict(extra or {}),
        timeout_seconds,
    )  # fmt: skip
    return asyncio.run(replay.run())


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


def _conversations(name: str, contract: ScoringContract, renderer: Renderer) -> tuple[list[GoldenExample], list[Asked]]:
    """The golden conversations in every form. One that was truncated has no text, and is left out."""
    examples, asked = [], []
    for example in contract.golden:
        text = renderer.render(example.messages)
        tokens = renderer.encode_texts([text])[0]
        if tokens == example.token_ids:
            examples.append(example)
            bare = _without_frame(text, renderer)
            asked.append(Asked(example.messages, text, bare, tokens, last_text(example.messages)))
            continue
        fitted = renderer.fit(example.messages, encoded=tokens)
        if fitted is None or fitted.token_ids != example.token_ids:
            raise ModelError(
                "the tokenizer does not give the contract's tokens, so nothing it renders can be compared",
                where=name,
                got=f"other tokens for the conversation {example.name!r}",
                fix=f"treeward verify {name} names what differs in the folder",
            )
    return examples, asked


def _without_frame(text: str, renderer: Renderer) -> str:
    tokenizer = renderer.tokenizer
    if renderer.kind == "encoder":
        return text.removeprefix(tokenizer.cls_token or "").removesuffix(tokenizer.sep_token or "")
    return text.removeprefix(tokenizer.bos_token or "") if renderer.adds_bos else text


@dataclass
class _Replay:
    """One verification on its way."""

    name: str
    dialect_name: str
    dialect: Dialect
    form: Form
    contract: ScoringContract
    examples: list[GoldenExample]
    asked: list[Asked]
    dtype: Dtype
    connection: Connection
    model: str | None
    extra: dict[str, Any]
    timeout_seconds: float
    refusals: dict[int, str] = field(default_factory=dict)

    async def run(self) -> ServerVerification:
        try:
            if self.model is None and self.dialect.lists_models:
                self.model = await self._first_model()
            alone = await self._each_alone()
            scores = [None if one is None else self._score(one) for one in alone]
            verdict = await self._verdict(scores, alone)
            if verdict.state == "equal":
                verdict = await self._in_one_request(verdict)
            return self._result(verdict, scores, alone)
        finally:
            await self.connection.close()

    @property
    def tolerance(self) -> float:
        tolerance = self.contract.tolerance
        return tolerance.float32 if self.dtype == "float32" else tolerance.bfloat16

    async def _first_model(self) -> str | None:
        """What the server calls its model. A server without /v1/models is asked without a name."""
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

    def _until(self) -> float:
        return time.monotonic() + self.timeout_seconds

    async def _ask(self, asked: Sequence[Asked], form: Form) -> list[Given]:
        body = self.dialect.body(self.model, form, asked) | self.extra
        content = json.dumps(body, ensure_ascii=False).encode()
        reply = await self.connection.post(self.dialect.path, content, until=self._until())
        return self._read(reply, len(asked))

    def _read(self, reply: Reply, number: int) -> list[Given]:
        try:
            given = self.dialect.read(reply.json)
            values = [value for one in given for value in one.values if value is not None]
            if not all(isinstance(value, int | float) for value in values) or not all(one.values for one in given):
                raise ValueError("what stands where scores should be is no number")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise reply.error(
                f"the answer is not in the dialect {self.dialect_name}",
                got=json.dumps(reply.json),
                need=f"scores: {type(error).__name__}: {error}",
            ) from error
        if len(given) != number:
            raise reply.error(
                "the answer has another number of scores", got=f"{len(given)} scores", need=f"{number}, one for each"
            )
        return given

    async def _each_alone(self, form: Form | None = None) -> list[Given | None]:
        """What the server gives for each; None where it refuses it. Raises where it refuses all of them."""
        found: list[Given | None] = []
        first: RewardServerError | None = None
        for i, one in enumerate(self.asked):
            try:
                found += await self._ask([one], form or self.form)
            except RewardServerError as error:
                if error.status not in _REFUSED:
                    raise
                first = first or error
                self.refusals.setdefault(i, str(error.got))
                found.append(None)
        if first is not None and not any(found):
            raise first
        return found

    def _score(self, given: Given) -> float | None:
        """The score that the server's numbers make. Raises `RewardServerError` for those of another model."""
        values, heads = given.values, self.contract.heads
        if len(values) == 1:
            return values[0]
        if len(values) != len(heads):
            raise RewardServerError(
                "the server gives another number of values for a conversation",
                status=200,
                where=self.connection.url,
                got=f"{len(values)} values",
                need=f"one score, or {len(heads)} heads",
                fix="serve the model as a classifier of whole conversations, and check which model it is",
            )
        by_label = dict(zip(given.labels, values, strict=True)) if given.labels else {}
        if by_label.keys() == {head.name for head in heads}:
            values = tuple(by_label[head.name] for head in heads)
        numbers = [value for value in values if value is not None]
        return combined_heads(numbers, heads) if len(numbers) == len(values) else None

    async def _verdict(self, scores: Sequence[float | None], alone: Sequence[Given | None]) -> Check:
        verdict = diagnose(self.contract, scores, dtype=self.dtype, golden=self.examples)
        if verdict.state == "equal":
            return verdict
        if self.refusals:
            place, why = next(iter(self.refusals.items()))
            return Check(
                "tokens", "differs", f"the server refuses {len(self.refusals)} of {len(scores)} conversations",
                f"{why} (for the conversation {self.examples[place].name!r})", "a score for each",
                "let it read as many tokens as the model does, and all of the characters",
            )  # fmt: skip
        if verdict.part not in ("weights", "precision") or any(score is None for score in scores):
            return verdict
        if self.dtype == "float32" and verdict.part == "weights":
            coarse = diagnose(self.contract, scores, dtype="bfloat16", golden=self.examples)
            if coarse.part != "weights":
                more = f"{coarse.summary}, and they are computed in a coarser number format"
                return replace(coarse, summary=more, got=verdict.got, need=verdict.need)
        other_tokens = self._by_counts(alone)
        if other_tokens is not None or verdict.part == "precision":
            return other_tokens or verdict
        return await self._by_token_ids(verdict, alone)

    @property
    def _rendering(self) -> tuple[Part, str, str]:
        """Where other tokens come from, in words, and what mends it."""
        if self.form == "messages":
            fix = "serve the model with its own chat template, or send rendered text"
            return "template", "rendered in another way", fix
        fix = "serve the model with the tokenizer of its folder, and cut nothing"
        return "tokens", "made into other tokens", fix

    def _by_counts(self, alone: Sequence[Given | None]) -> Check | None:
        """Other tokens, as the server counts them; a few too many may change a score as little as rounding does."""
        pairs = zip(self.examples, alone, strict=True)
        counts = [(one, given.num_tokens) for one, given in pairs if given is not None and given.num_tokens is not None]
        wrong = [(one, count) for one, count in counts if count != len(one.token_ids)]
        if not wrong:
            return None
        part, made, fix = self._rendering
        off = {count - len(one.token_ids) for one, count in counts}
        every = f", {abs(max(off))} {'more' if max(off) > 0 else 'fewer'} each" if len(off) == 1 else ""
        example, count = wrong[0]
        return Check(
            part, "differs", f"conversations are {made} by the server{every}",
            f"{count} tokens for the conversation {example.name!r}", f"{len(example.token_ids)} tokens", fix,
        )  # fmt: skip

    async def _by_token_ids(self, verdict: Check, alone: Sequence[Given | None]) -> Check:
        """Scores that nothing explains: are they of other tokens, or of another model?"""
        part, made, fix = self._rendering
        if self.form != "tokens" and "tokens" in self.dialect.forms:
            scores = await self._of_token_ids()
            by_ids = diagnose(self.contract, scores, dtype=self.dtype, golden=self.examples)
            if by_ids.state == "equal" or by_ids.part == "precision":
                summary = f"conversations are {made} by the server: for token ids it gives the right scores"
                return replace(verdict, part=part, summary=summary, fix=fix)
            verdict = replace(verdict, summary=f"{verdict.summary}; nor are those of token ids right")
        elif all(given is not None and given.num_tokens is not None for given in alone):
            verdict = replace(verdict, summary=f"{verdict.summary}; the tokens are as many as they should be")
        what = "check which model and which file of weights the server has loaded, and with what settings"
        return replace(verdict, fix=f"{what}: on its machine, treeward verify FOLDER")

    async def _of_token_ids(self) -> list[float | None]:
        try:
            return [None if one is None else self._score(one) for one in await self._each_alone("tokens")]
        except RewardServerError:  # it takes no token ids: they say nothing
            return [None] * len(self.asked)

    async def _in_one_request(self, verdict: Check) -> Check:
        """Batches are where padding goes wrong: the same conversations once more, together."""
        if self.form in self.dialect.one_by_one or len(self.asked) < 2:
            return verdict
        together = [self._score(one) for one in await self._ask(self.asked, self.form)]
        in_batch = diagnose(self.contract, together, dtype=self.dtype, golden=self.examples)
        if in_batch.state == "equal":
            return verdict
        return replace(
            in_batch,
            part="read position",
            summary="alone every conversation has its score, and beside others it has not: padding is read",
            fix="pad with a token that ends no conversation, and read each score by its conversation's length",
        )

    def _result(
        self, verdict: Check, scores: Sequence[float | None], alone: Sequence[Given | None]
    ) -> ServerVerification:
        checks = self._checks(verdict, alone)
        known = [abs(score - one.score) for score, one in zip(scores, self.examples, strict=True) if score is not None]
        largest = max(known) if len(known) == len(scores) and close(known, [0.0] * len(known), 1e300) else None
        return ServerVerification(
            self.name, self.connection.url, self.dialect_name, self.form, self.model, tuple(checks), len(self.examples),
            largest, self.tolerance,
        )  # fmt: skip

    def _checks(self, verdict: Check, alone: Sequence[Given | None]) -> list[Check]:
        contract = self._contract_check(alone, is_equal=verdict.state == "equal")
        checks = [contract]
        for part in PARTS[1:]:
            if part == verdict.part:
                checks.append(verdict)
            elif part == "files":
                checks.append(Check(part, "not checked", "they are on the server's machine"))
            elif verdict.state == "differs":
                checks.append(Check(part, "not checked", f"it cannot be, because of the {verdict.part}"))
            else:
                checks.append(self._equal(part))
        return checks

    def _contract_check(self, alone: Sequence[Given | None], *, is_equal: bool) -> Check:
        own = self.contract.scores_sha256
        served = next((one.contract for one in alone if one is not None and one.contract is not None), None)
        members = [] if served is None else served.split("+")
        if len(members) > 1:
            return Check(
                "contract", "differs", f"the server's model is an ensemble of {len(members)} models",
                f"the contracts {', '.join(f'sha256 {one[:12]}' for one in members)}", f"sha256 {own[:12]} alone",
                "name another of the server's models (--model), or verify against a server of this model alone",
            )  # fmt: skip
        if served is not None and served != own:
            same = "; the golden scores are equal all the same" if is_equal else ""
            return Check(
                "contract", "differs", f"the server's model has another scoring contract{same}",
                f"sha256 {served[:12]}", f"sha256 {own[:12]}",
                "serve this model, or verify against the folder that is served",
            )  # fmt: skip
        also = ", and so says the server" if served is not None else ""
        return Check("contract", "equal", f"version {self.contract.version}, sha256 {own[:12]}{also}")

    def _equal(self, part: Part) -> Check:
        if part == "template" and self.form != "messages":
            return Check(part, "not checked", "conversations were rendered here")
        if part == "tokens" and self.form == "tokens":
            return Check(part, "not checked", "token ids were sent")
        return Check(part, "equal", "as the scores are")
