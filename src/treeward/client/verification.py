"""Replaying a scoring contract on a running server: does it give the scores that the model had in
training?

    result = verify_server("results/rm/final", "http://localhost:8000", dialect="vllm")
    result.equal             # False
    result.first_difference  # the part that explains the scores, with the remedy

Only the model's contract and tokenizer are read. The golden conversations are sent as clients of
the dialect send them, each alone and then all in one request, and the scores are compared with the
contract: a sigmoid, a second BOS, a missing end of turn, rounding, a scale and other tokens are
named where they explain every score.
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
from treeward.scoring.combining import combined_heads
from treeward.scoring.diagnosis import (
    PARTS,
    Check,
    DiagnosisRow,
    Part,
    Verification,
    compare_rows,
    diagnose,
    diagnose_spreads,
    verification,
)

_SECONDS = 60.0
"""The time for a request."""
_SHOWN = 12
"""Characters of a hash that are shown."""


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

    `dialect`: one of `DIALECTS`. `model`: what the server calls the model; None for its first.
    `form`: what is sent, one of the dialect's forms; None is what its clients send, for encoders
    without CLS and SEP. `dtype`: what the server computes in; scores in bfloat16 are compared to
    the contract's tolerance for bfloat16.

    Raises `RewardServerError` for a server that gives no scores, `ModelError` for a model without a
    contract or whose tokenizer does not give the contract's tokens, `ConfigError` for impossible
    arguments.
    """
    if dialect not in DIALECTS:
        raise ConfigError.unknown("there is no such dialect", dialect, DIALECTS, field="dialect")
    forms = DIALECTS[dialect].forms
    if form is not None and form not in forms:
        raise ConfigError(
            f"the dialect {dialect} has no form {form}",
            field="form",
            got=form,
            need=f"one of {', '.join(forms)}",
        )
    contract = read_contract(name)
    if contract is None or not contract.golden:
        raise ModelError(
            "the model has no golden conversations to replay",
            where=str(name),
            need=f"a model folder with its {CONTRACT_FILE}",
            fix=f"copy it from the export, or write one: treeward verify {name} --write",
        )
    tokenizer = load_tokenizer(str(Path(name).expanduser()), trust_remote_code=trust_remote_code)
    renderer = Renderer(
        tokenizer,
        chat_template=contract.rendering.chat_template,
        **contract.rendering.settings,
    )
    if form is None:
        form = forms[0]
        # Servers add the CLS and SEP of an encoder to its text.
        if renderer.kind == "encoder" and "bare" in forms:
            form = "bare"
    # The address may be that of the route.
    address = url.rstrip("/").removesuffix(DIALECTS[dialect].path)
    connection = Connection(address, token=token, max_retries=3)
    replay = _Replay(
        name=str(name),
        contract=contract,
        # The whole contract's hash: conversations that cannot be sent are left out of `contract`.
        contract_sha256=contract.scores_sha256,
        connection=connection,
        dialect=dialect,
        form=form,
        model=model,
        dtype=dtype,
    )
    replay.add_conversations(renderer)
    return replay.run()


@dataclass
class _Replay:
    """The replay of a contract on a server: what is sent, and what comes back for each conversation
    alone.

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
        """The golden conversations in every form. One that was truncated has no text, and is left
        out.
        """
        tokenizer = renderer.tokenizer
        golden = []
        for example in self.contract.golden:
            conversation = example.conversation
            fitted = renderer.fit(conversation)
            # Else a difference could be this machine's tokenizer, and not the server.
            if fitted is None or fitted.token_ids != example.token_ids:
                raise ModelError(
                    "the tokenizer does not give the contract's tokens, so nothing can be compared",
                    where=self.name,
                    got=f"other tokens for the conversation {example.name!r}",
                    fix=f"treeward verify {self.name} names what differs in the folder",
                )
            # Tokens were cut, not characters, so there is no text to send.
            if fitted.truncated:
                continue
            text = bare = renderer.render(conversation)
            if renderer.kind == "encoder":
                bare = bare.removeprefix(tokenizer.cls_token or "")
                bare = bare.removesuffix(tokenizer.sep_token or "")
            # A BOS that the template has written stays: no server adds it again.
            elif renderer.adds_bos:
                bare = text.removeprefix(tokenizer.bos_token or "")
            completion = last_text(conversation)
            golden.append(example)
            self.conversations.append(
                RenderedConversation(conversation, text, bare, fitted.token_ids, completion),
            )
        self.contract = self.contract.model_copy(update={"golden": golden})

    def run(self) -> Verification:
        """Ask for the golden scores, alone and together, and say what explains them.

        Raises `RewardServerError` for a server that refuses a conversation, is not there, or is
        busy.
        """
        try:
            # Each alone first: what differs then is not the batch.
            for conversation in self.conversations:
                self.answers += self._ask([conversation])
            scores = [self._score(answer) for answer in self.answers]
            verdict = self._verdict(scores)
            can_batch = self.form not in DIALECTS[self.dialect].single_forms
            # In one request they are padded, if the server pads.
            if verdict.state == "equal" and can_batch and len(scores) > 1:
                together = [self._score(answer) for answer in self._ask(self.conversations)]
                in_batch = diagnose(self.contract, together, dtype=self.dtype)
                if in_batch.state != "equal":
                    verdict = replace(
                        in_batch,
                        part="read position",
                        summary=(
                            "each conversation has its score alone, and another one beside others: "
                            "the server reads padding"
                        ),
                        fix=(
                            "pad with a token that ends no conversation, "
                            "and read each score by its conversation's length"
                        ),
                    )
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
        dialect = DIALECTS[self.dialect]
        body = dialect.body(self.form, conversations)
        if self.model is not None:
            body = {"model": self.model, **body}
        content = json.dumps(body).encode()

        def read(response: Any) -> list[ServerScore]:
            scores = dialect.read(response)
            if len(scores) != len(conversations):
                raise ValueError(f"{len(scores)} scores for {len(conversations)} conversations")
            for score in scores:
                if not score.values:
                    raise ValueError("a conversation has no values")
                for value in score.values:
                    if not isinstance(value, int | float | None):
                        raise ValueError(f"{value!r} is no score")
            return scores

        return self.connection.request(
            dialect.path,
            content,
            until=time.monotonic() + _SECONDS,
            read=read,
        )

    def _score(self, answer: ServerScore) -> float | None:
        """The score that the server's numbers make. Raises `RewardServerError` for another number
        of heads.
        """
        values = answer.values
        heads = self.contract.heads
        # The server has combined the heads, or the model has one.
        if len(values) == 1:
            return values[0]
        if len(values) != len(heads):
            raise RewardServerError(
                "the server has another model",
                status=200,
                where=self.connection.url,
                got=f"{len(values)} values for a conversation",
                need=f"one score, or {len(heads)} heads",
                fix="serve the model of the contract, as a classifier of whole conversations",
            )
        numbers = [value for value in values if value is not None]
        # One head without a value leaves none for the score.
        if len(numbers) < len(values):
            return None
        return combined_heads(numbers, heads)

    def _verdict(self, scores: Sequence[float | None]) -> Check:
        """The one difference that explains the scores."""
        verdict = diagnose(self.contract, scores, dtype=self.dtype)
        # What is explained otherwise needs no guess.
        is_unexplained = verdict.part in ("weights", "precision") and verdict.state != "equal"
        if not is_unexplained or None in scores:
            return verdict
        # A few tokens too many may change a score as little as rounding does, so the server's own
        # counts decide.
        part: Part = "tokens"
        problem = "the server tokenizes text in another way"
        if self.form == "messages":
            part = "template"
            problem = "the server renders conversations in another way"
        for answer, example in zip(self.answers, self.contract.golden, strict=True):
            got = answer.num_tokens
            need = len(example.token_ids)
            if got is not None and got != need:
                return Check(
                    part,
                    "differs",
                    f"{problem}: {got - need:+d} tokens for {example.name!r}",
                    got=f"tokens: {got}",
                    need=f"tokens: {need}",
                    fix="serve the chat template and the tokenizer of the folder, and cut nothing",
                )
        return verdict

    def _checks(self, verdict: Check) -> Iterator[Check]:
        """The checks of the parts that can be made from outside: whose contract it is, then
        `verdict`.
        """
        expected = self.contract_sha256
        reported = [answer.contract for answer in self.answers if answer.contract]
        served = reported[0] if reported else expected
        # The contracts of an ensemble, joined.
        hashes = "+".join(digest[:_SHOWN] for digest in served.split("+"))
        row = DiagnosisRow(
            "sha256",
            expected[:_SHOWN],
            hashes,
            "the server's model has another scoring contract",
            "name another of its models (--model), or verify against the folder that it serves",
        )
        # Only `treeward serve` reports a contract.
        finding = f"version {self.contract.version}, sha256 {expected[:_SHOWN]}"
        if reported:
            finding += ", as the server says"
        yield compare_rows("contract", [row], finding)
        yield Check("files", "not checked", "they are on the server's machine")
        yield verdict
        # The first difference is the cause, so what comes after it says nothing.
        if verdict.state == "differs":
            return
        # After the contract and the files, and before the spread.
        for part in PARTS[2:-1]:
            # The server did not use its own.
            is_unused = part == "template" and self.form != "messages"
            is_unused = is_unused or (part == "tokens" and self.form == "tokens")
            if is_unused:
                yield Check(part, "not checked", f"conversations were sent as {self.form}")
            else:
                yield Check(part, "equal", "the scores are equal")
        if self.contract.spread is None:
            yield Check("spread", "equal", "none")
        elif self.dialect != "treeward":
            yield Check("spread", "not checked", f"{self.dialect} does not send it")
        else:
            spreads = [answer.spread for answer in self.answers]
            yield diagnose_spreads(self.contract, spreads, dtype=self.dtype)
