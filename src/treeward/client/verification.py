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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treeward.client.dialects import DIALECTS, Form, RenderedConversation, ServerScore
from treeward.data.conversation import last_text
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.http import Connection, RewardServerError
from treeward.model.contract import CONTRACT_FILE, Dtype, ScoringContract, read_contract
from treeward.model.pretrained import load_tokenizer
from treeward.scoring.diagnosis import (
    PARTS,
    Check,
    DiagnosisRow,
    Part,
    Verification,
    compare_rows,
    diagnose,
    verification,
)
from treeward.scoring.golden import combined_heads

_SECONDS = 60.0
"""The time for a request."""


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
) -> Verification:
    """Replay the contract of the model `name` (a folder, or a hub name) on the server at `url`.

    `dialect`: one of `DIALECTS`. `model`: what the server calls the model; None for its first. `form`: what is sent,
    one of the dialect's forms; None is what its clients send, for encoders without CLS and SEP. `dtype`: what the
    server computes in; scores in bfloat16 are compared to the contract's tolerance for bfloat16.

    Raises `RewardServerError` for a server that gives no scores, `ModelError` for a model without a contract or whose
    tokenizer does not give the contract's tokens, `ConfigError` for impossible arguments.
    """
    if dialect not in DIALECTS:
        raise ConfigError.unknown("there is no such dialect", dialect, DIALECTS, field="dialect")
    forms = DIALECTS[dialect].forms
    if form is not None and form not in forms:
        need = f"one of {', '.join(forms)}"
        raise ConfigError(f"the dialect {dialect} is not sent {form}", field="form", got=form, need=need)
    contract = read_contract(name)
    if contract is None or not contract.golden:
        raise ModelError(
            "there are no golden conversations to replay",
            where=str(name),
            need=f"a model folder with its {CONTRACT_FILE}",
            fix=f"copy it from the export, or write one: treeward verify {name} --write",
        )
    tokenizer = load_tokenizer(str(Path(name).expanduser()), trust_remote_code=trust_remote_code)
    renderer = Renderer(tokenizer, chat_template=contract.rendering.chat_template, **contract.rendering.settings)
    if form is None:
        form = "bare" if renderer.kind == "encoder" and "bare" in forms else forms[0]
    connection = Connection(url.rstrip("/").removesuffix(DIALECTS[dialect].path), token=token, max_retries=3)
    replay = _Replay(str(name), contract, contract.scores_sha256, connection, dialect, form, model, dtype)
    replay.add_conversations(renderer)
    return replay.run()


@dataclass
class _Replay:
    """The replay of a contract on a server: what is sent, and what comes back for each conversation alone.

    `model`: the server's name for it.
    """

    name: str
    contract: ScoringContract
    contract_sha256: str
    connection: Connection
    dialect: str
    form: Form
    model: str | None
    dtype: Dtype
    conversations: list[RenderedConversation] = field(default_factory=list)
    answers: list[ServerScore] = field(default_factory=list)

    def add_conversations(self, renderer: Renderer) -> None:
        """The golden conversations in every form. One that was truncated has no text, and is left out."""
        tokenizer, golden = renderer.tokenizer, []
        for example in self.contract.golden:
            conversation = example.conversation
            fitted = renderer.fit(conversation)
            if fitted is None or fitted.token_ids != example.token_ids:
                raise ModelError(
                    "the tokenizer does not give the contract's tokens, so nothing it renders can be compared",
                    where=self.name,
                    got=f"other tokens for the conversation {example.name!r}",
                    fix=f"treeward verify {self.name} names what differs in the folder",
                )
            if fitted.truncated:
                continue
            text = bare = renderer.render(conversation)
            if renderer.kind == "encoder":
                bare = text.removeprefix(tokenizer.cls_token or "").removesuffix(tokenizer.sep_token or "")
            elif renderer.adds_bos:
                bare = text.removeprefix(tokenizer.bos_token or "")
            completion = last_text(conversation)
            golden.append(example)
            self.conversations.append(RenderedConversation(conversation, text, bare, fitted.token_ids, completion))
        self.contract = self.contract.model_copy(update={"golden": golden})

    def run(self) -> Verification:
        """Ask for the golden scores, alone and together, and say what explains them.

        Raises `RewardServerError` for a server that refuses a conversation, is not there, or is busy.
        """
        try:
            self.answers = [answer for conversation in self.conversations for answer in self._ask([conversation])]
            scores = list(map(self._score, self.answers))
            verdict = self._verdict(scores)
            can_batch = not (self.form == "messages" and self.dialect == "vllm")
            if verdict.state == "equal" and can_batch and len(scores) > 1:
                together = [self._score(answer) for answer in self._ask(self.conversations)]
                in_batch = diagnose(self.contract, together, dtype=self.dtype)
                if in_batch.state != "equal":
                    summary = "alone every conversation has its score, and beside others it has not: padding is read"
                    fix = "pad with a token that ends no conversation, and read each score by its conversation's length"
                    verdict = replace(in_batch, part="read position", summary=summary, fix=fix)
        finally:
            self.connection.close()
        model = "" if self.model is None else f", model {self.model}"
        return verification(
            self.name,
            self.contract,
            list(self._checks(verdict)),
            scores,
            dtype=self.dtype,
            against=f"{self.connection.url} (as {self.dialect}, {self.form} sent{model})",
        )

    def _ask(self, conversations: Sequence[RenderedConversation]) -> list[ServerScore]:
        """The server's numbers for the conversations of one request. Raises `RewardServerError`."""
        dialect, model = DIALECTS[self.dialect], {} if self.model is None else {"model": self.model}
        content = json.dumps({**model, **dialect.body(self.form, conversations)}).encode()

        def read(response: Any) -> list[ServerScore]:
            scores = dialect.read(response)
            if len(scores) != len(conversations):
                raise ValueError(f"{len(scores)} scores for {len(conversations)} conversations")
            for value in [value for score in scores for value in score.values or ("no values",)]:
                if not isinstance(value, int | float | None):
                    raise ValueError(f"{value!r} is no score")
            return scores

        return self.connection.request(dialect.path, content, until=time.monotonic() + _SECONDS, read=read)

    def _score(self, answer: ServerScore) -> float | None:
        """The score that the server's numbers make. Raises `RewardServerError` for another number of heads."""
        values, heads = answer.values, self.contract.heads
        if len(values) == 1:
            return values[0]
        if len(values) != len(heads):
            raise RewardServerError(
                "this is another model's",
                status=200,
                where=self.connection.url,
                got=f"{len(values)} values for a conversation",
                need=f"one score, or {len(heads)} heads",
                fix="serve the model as a classifier of whole conversations, and check which model it is",
            )
        numbers = [value for value in values if value is not None]
        return combined_heads(numbers, heads) if len(numbers) == len(values) else None

    def _verdict(self, scores: Sequence[float | None]) -> Check:
        """The one difference that explains the scores."""
        verdict = diagnose(self.contract, scores, dtype=self.dtype)
        if verdict.part not in ("weights", "precision") or verdict.state == "equal" or None in scores:
            return verdict
        # A few tokens too many may change a score as little as rounding does, so the server's own counts decide.
        part: Part = "template" if self.form == "messages" else "tokens"
        made = "rendered in another way" if self.form == "messages" else "made into other tokens"
        for answer, example in zip(self.answers, self.contract.golden, strict=True):
            got, need = answer.num_tokens, len(example.token_ids)
            if got is not None and got != need:
                summary = f"conversations are {made} by the server, {got - need:+d} tokens for {example.name!r}"
                fix = "serve the model with the chat template and tokenizer of its folder, and cut nothing"
                return Check(part, "differs", summary, f"tokens: {got}", f"tokens: {need}", fix)
        return verdict

    def _checks(self, verdict: Check) -> Iterator[Check]:
        """The checks of the parts that can be made from outside: whose contract it is, then `verdict`."""
        expected = self.contract_sha256
        served = next((answer.contract for answer in self.answers if answer.contract), None)
        hashes = "+".join(digest[:12] for digest in (served or expected).split("+"))
        fix = "name another of the server's models (--model), or verify against the folder that is served"
        row = DiagnosisRow("sha256", expected[:12], hashes, "the server's model has another scoring contract", fix)
        also = ", and so says the server" if served else ""
        yield compare_rows("contract", [row], f"version {self.contract.version}, sha256 {expected[:12]}{also}")
        yield Check("files", "not checked", "they are on the server's machine")
        yield verdict
        if verdict.state == "differs":
            return
        for part in PARTS[2:]:
            if (part == "template" and self.form != "messages") or (part == "tokens" and self.form == "tokens"):
                yield Check(part, "not checked", f"conversations were sent as {self.form}")
            else:
                yield Check(part, "equal", "as the scores are")
