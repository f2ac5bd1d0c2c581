"""Replaying a scoring contract on a running server: does it give the scores that the model had in training?

    result = verify_server("results/rm/final", "http://localhost:8000", dialect="vllm")
    result.equal, result.first_difference       # False, and the part that explains the scores, with the remedy

Only the model's contract and tokenizer are read. The golden conversations are sent as clients of the dialect send
them, each alone and then all in one request, and the scores are compared with the contract: a sigmoid, a second BOS, a
missing end of turn, rounding, a scale and other tokens are named where they explain every score.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treeward.client.dialects import DIALECTS, Form, RenderedConversation, ServerScore
from treeward.data.preference import last_text
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.http import Connection, RewardServerError, run_async
from treeward.model.contract import CONTRACT_FILE, Dtype, GoldenExample, ScoringContract, read_contract
from treeward.model.pretrained import load_tokenizer
from treeward.scoring.diagnosis import PARTS, Check, Part, diagnose
from treeward.scoring.golden import combined_heads
from treeward.scoring.verification import Verification

_REFUSED = frozenset({400, 413, 422, 500})
"""A conversation that a server refuses alone has no score; other refusals are of the whole replay."""
_SECONDS = 60.0
"""The time for a request."""
_PADDING_IS_READ = "alone every conversation has its score, and beside others it has not: padding is read"
_MEND_PADDING = "pad with a token that ends no conversation, and read each score by its conversation's length"


@dataclass(frozen=True, slots=True)
class ServerVerification(Verification):
    """The result. `form`: what was sent. `served_model`: the server's name for the model, if any."""

    against: str = ""
    dialect: str = ""
    form: Form = "text"
    served_model: str | None = None


def verify_server(
    name: str | Path,
    url: str,
    *,
    dialect: str = "treeward",
    model: str | None = None,
    form: Form | None = None,
    dtype: Dtype = "float32",
    token: str | None = None,
    trust_remote_code: bool = False,
) -> ServerVerification:
    """Replay the contract of the model `name` (a folder, or a hub name) on the server at `url`.

    `dialect`: one of `DIALECTS`. `model`: what the server calls the model; None takes its first. `form`: what is sent,
    one of the dialect's forms; None is what its clients send, for encoders without CLS and SEP. `dtype`: what the
    server computes in; scores in bfloat16 are compared to the contract's tolerance for bfloat16.

    Raises `RewardServerError` for a server that gives no scores, `ModelError` for a model without a contract or whose
    tokenizer does not give the contract's tokens, `ConfigError` for impossible arguments.
    """
    if dialect not in DIALECTS:
        raise ConfigError(
            "there is no such dialect", field="dialect", got=dialect, need=f"one of {', '.join(DIALECTS)}"
        )
    path, forms = DIALECTS[dialect].path, DIALECTS[dialect].forms
    if form is not None and form not in forms:
        need = f"one of {', '.join(forms)}"
        raise ConfigError(f"the dialect {dialect} is not sent {form}", field="form", got=form, need=need)
    contract, renderer = _contract_and_renderer(name, trust_remote_code)
    examples, conversations = _rendered(str(name), contract, renderer)
    own = forms[0] if renderer.kind == "decoder" or "bare" not in forms else "bare"
    connection = Connection(url.rstrip("/").removesuffix(path), token=token, max_retries=3)
    server = _Server(connection, dialect, form or own, model, contract, dtype)
    return run_async(server.replay(str(name), examples, conversations))


def _contract_and_renderer(name: str | Path, trust_remote_code: bool) -> tuple[ScoringContract, Renderer]:
    contract = read_contract(name)
    if contract is None or not contract.golden:
        raise ModelError(
            "there are no golden conversations to replay",
            where=str(name),
            need=f"a model folder with its {CONTRACT_FILE}",
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
    examples, conversations, tokenizer = [], [], renderer.tokenizer
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
            text = bare = renderer.render(example.messages)
            if renderer.kind == "encoder":
                bare = text.removeprefix(tokenizer.cls_token or "").removesuffix(tokenizer.sep_token or "")
            elif renderer.adds_bos:
                bare = text.removeprefix(tokenizer.bos_token or "")
            completion = last_text(example.messages)
            examples.append(example)
            conversations.append(RenderedConversation(example.messages, text, bare, found.token_ids, completion))
    return examples, conversations


@dataclass
class _Server:
    """A server of a model with this contract, and the form of the requests to it."""

    connection: Connection
    dialect: str
    form: Form
    model: str | None
    contract: ScoringContract
    dtype: Dtype

    async def replay(
        self, name: str, examples: Sequence[GoldenExample], conversations: Sequence[RenderedConversation]
    ) -> ServerVerification:
        """Ask for the golden scores, alone and together, and say what explains them."""
        try:
            if self.model is None and DIALECTS[self.dialect].lists_models:
                self.model = await self._first_model()
            found = await self._scores_alone(conversations)
            scores = [None if isinstance(one, str) else self._score(one) for one in found]
            verdict = self._verdict(scores, found, examples)
            can_batch = not (self.form == "messages" and self.dialect == "vllm")
            if verdict.state == "equal" and can_batch and len(scores) > 1:
                together = [self._score(one) for one in await self._scores(conversations)]
                in_batch = diagnose(self.contract, together, dtype=self.dtype, golden=examples)
                if in_batch.state != "equal":
                    verdict = replace(in_batch, part="read position", summary=_PADDING_IS_READ, fix=_MEND_PADDING)
        finally:
            await self.connection.close()
        off = [abs(score - one.score) for score, one in zip(scores, examples, strict=True) if score is not None]
        return ServerVerification(
            name,
            (self._contract_check(found), *(self._check(part, verdict) for part in PARTS[1:])),
            num_scores=len(examples),
            largest_difference=max(off) if len(off) == len(examples) else None,
            tolerance=self.contract.tolerance.of(self.dtype),
            against=self.connection.url,
            dialect=self.dialect,
            form=self.form,
            served_model=self.model,
        )

    async def _first_model(self) -> str | None:
        """What the server calls its first model; None for a server without /v1/models."""
        until = time.monotonic() + _SECONDS
        try:
            reply = await self.connection.request("/v1/models", until=until, max_retries=0)
            return str(reply.json["data"][0]["id"])
        except (RewardServerError, LookupError, TypeError):  # one of all requests shows again
            return None

    async def _scores(self, conversations: Sequence[RenderedConversation]) -> list[ServerScore]:
        """The server's numbers for the conversations of one request. Raises `RewardServerError`."""
        dialect, named = DIALECTS[self.dialect], {} if self.model is None else {"model": self.model}
        content = json.dumps({**named, **dialect.body(self.form, conversations)}).encode()
        reply = await self.connection.request(dialect.path, content, until=time.monotonic() + _SECONDS)
        try:
            scores = dialect.read(reply.json)
            if len(scores) != len(conversations):
                raise ValueError(f"{len(scores)} scores for {len(conversations)} conversations")
            for value in [value for one in scores for value in one.values or ("no values",)]:
                if not isinstance(value, int | float | None):
                    raise ValueError(f"{value!r} is no score")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            need, got = f"scores: {type(error).__name__}: {error}", json.dumps(reply.json)
            raise reply.error(f"the response is not in the dialect {self.dialect}", got=got, need=need) from error
        return scores

    async def _scores_alone(self, conversations: Sequence[RenderedConversation]) -> list[ServerScore | str]:
        """The numbers for each conversation in a request of its own, or why the server refuses it.

        Raises `RewardServerError` where all of them are refused, and for other errors.
        """
        found: list[ServerScore | str] = []
        for one in conversations:
            try:
                found += await self._scores([one])
            except RewardServerError as error:
                found.append(str(error.got))
                are_all = len(found) == len(conversations) and all(isinstance(one, str) for one in found)
                if error.status not in _REFUSED or are_all:
                    raise
        return found

    def _score(self, found: ServerScore) -> float | None:
        """The score that the server's numbers make. Raises `RewardServerError` for another number of heads."""
        values, heads = found.values, self.contract.heads
        if len(values) == 1:
            return values[0]
        if len(values) != len(heads):
            got, need = f"{len(values)} values for a conversation", f"one score, or {len(heads)} heads"
            fix = "serve the model as a classifier of whole conversations, and check which model it is"
            where = self.connection.url
            raise RewardServerError("this is another model's", status=200, where=where, got=got, need=need, fix=fix)
        by_label = dict(zip(found.labels, values, strict=bool(found.labels)))
        if by_label.keys() == {head.name for head in heads}:
            values = [by_label[head.name] for head in heads]
        numbers = [value for value in values if value is not None]
        return combined_heads(numbers, heads) if len(numbers) == len(values) else None

    def _verdict(
        self, scores: Sequence[float | None], found: Sequence[ServerScore | str], examples: Sequence[GoldenExample]
    ) -> Check:
        """The one difference that explains the scores."""
        refused = [
            f"{why} (for {one.name!r})" for why, one in zip(found, examples, strict=True) if isinstance(why, str)
        ]
        if refused:
            summary = f"the server refuses {len(refused)} of {len(scores)} conversations"
            fix = "let the server read as many tokens as the model does, and all of the characters"
            return Check("tokens", "differs", summary, refused[0], "a score for each", fix)
        verdict = diagnose(self.contract, scores, dtype=self.dtype, golden=examples)
        if verdict.part not in ("weights", "precision") or verdict.state == "equal" or None in scores:
            return verdict
        # A few tokens too many may change a score as little as rounding does, so the server's own counts decide.
        counts = [one.num_tokens for one in found if isinstance(one, ServerScore)]
        off = [0 if n is None else n - len(one.token_ids) for n, one in zip(counts, examples, strict=True)]
        i = next((i for i, one in enumerate(off) if one), None)
        if i is None:
            return verdict
        every = f", {abs(off[0])} {'more' if off[0] > 0 else 'fewer'} each" if len(set(off)) == 1 else ""
        is_template = self.form == "messages"
        made = "rendered in another way" if is_template else "made into other tokens"
        return Check(
            "template" if is_template else "tokens",
            "differs",
            f"conversations are {made} by the server{every}",
            f"{counts[i]} tokens for the conversation {examples[i].name!r}",
            f"{len(examples[i].token_ids)} tokens",
            "serve the model with the chat template and tokenizer of its folder, and cut nothing",
        )

    def _contract_check(self, found: Sequence[ServerScore | str]) -> Check:
        own = self.contract.scores_sha256
        served = next((one.contract for one in found if isinstance(one, ServerScore) and one.contract), None)
        if served is None or served == own:
            also = ", and so says the server" if served else ""
            return Check("contract", "equal", f"version {self.contract.version}, sha256 {own[:12]}{also}")
        members = [f"sha256 {one[:12]}" for one in served.split("+")]
        what = f"is an ensemble of {len(members)} models" if len(members) > 1 else "has another scoring contract"
        fix = "name another of the server's models (--model), or verify against the folder that is served"
        summary, need = f"the server's model {what}", f"sha256 {own[:12]} alone"
        return Check("contract", "differs", summary, ", ".join(members), need, fix)

    def _check(self, part: Part, verdict: Check) -> Check:
        if part == verdict.part:
            return verdict
        if part == "files":
            return Check(part, "not checked", "they are on the server's machine")
        if verdict.state == "differs":
            return Check(part, "not checked", f"it cannot be, because of the {verdict.part}")
        if (part == "template" and self.form != "messages") or (part == "tokens" and self.form == "tokens"):
            return Check(part, "not checked", f"conversations were sent as {self.form}")
        return Check(part, "equal", "as the scores are")
