"""Requests to reward servers and their responses, as the servers' own clients write and read them.

    dialect = DIALECTS["vllm"]
    body = dialect.body("text", [RenderedConversation(messages, text, ...)])
    [score.values for score in dialect.read(response)]      # numbers for each conversation

Requests are those of verl, OpenRLHF and text-embeddings-inference's own client. They ask for raw
scores where a dialect has a parameter for it. A dialect is a class, and an entry in `DIALECTS`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from treeward.data.conversation import AnyConversation, template_kwargs_of, to_json

Form = Literal["text", "bare", "tokens", "messages"]
"""What is sent: the text of the chat template, that text without its BOS (or CLS and SEP), its
token ids, or the messages."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation in every form; `completion`: the text of its last message."""

    messages: AnyConversation
    text: str
    bare: str
    tokens: Sequence[int]
    completion: str = ""

    def sent(self, form: Form) -> Any:
        """The conversation as `form`, for JSON."""
        if form == "text":
            return self.text
        if form == "bare":
            return self.bare
        if form == "tokens":
            return list(self.tokens)
        return list(self.messages)


@dataclass(frozen=True, slots=True)
class ServerScore:
    """A server's numbers for one conversation, its count of tokens, the hash of the contract that
    it reports, and the spread of the score.
    """

    values: Sequence[float | None]
    num_tokens: int | None = None
    contract: str | None = None
    spread: float | None = None


class Dialect(abc.ABC):
    """What a server is sent, and how its response is read."""

    path: ClassVar[str]
    """Its route."""
    forms: ClassVar[tuple[Form, ...]]
    """The forms that it accepts, that of its own clients first."""
    single_forms: ClassVar[tuple[Form, ...]] = ()
    """The forms of which a request holds one conversation."""

    @abc.abstractmethod
    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        """A request, without the model's name."""

    @abc.abstractmethod
    def read(self, response: Any) -> list[ServerScore]:
        """The scores of a response, in the order of the request.

        Raises `LookupError`, `TypeError` or `ValueError` for another form.
        """


class TreewardDialect(Dialect):
    """`treeward serve`."""

    path = "/v1/rewards"
    forms = ("messages",)

    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        sent = [to_json(conversation.messages) for conversation in conversations]
        # Raw scores, and a reason for each that is missing.
        return {"conversations": sent, "on_error": "mask", "shaped": False}

    def read(self, response: Any) -> list[ServerScore]:
        contract = response["contract"]
        scores = []
        for row in _by_index(response["data"]):
            # 0 tokens are those of a conversation that failed.
            num_tokens = row["num_tokens"] or None
            score = ServerScore(
                [row["score"]], num_tokens=num_tokens, contract=contract, spread=row.get("spread")
            )
            scores.append(score)
        return scores


class VllmDialect(Dialect):
    """vLLM's classifiers."""

    path = "/classify"
    forms = ("text", "bare", "tokens", "messages")
    single_forms = ("messages",)

    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        sent = [conversation.sent(form) for conversation in conversations]
        if form != "messages":
            return {"input": sent, "use_activation": False}
        body = {"messages": sent[0], "use_activation": False}
        variables = template_kwargs_of(conversations[0].messages)
        if variables:
            body["chat_template_kwargs"] = dict(variables)
        return body

    def read(self, response: Any) -> list[ServerScore]:
        rows = _by_index(response["data"])
        num_tokens = None
        # vLLM counts the tokens of a whole request.
        if len(rows) == 1:
            usage = response.get("usage") or {}
            num_tokens = usage.get("prompt_tokens")
        return [ServerScore(row["probs"], num_tokens=num_tokens) for row in rows]


class SglangDialect(Dialect):
    """SGLang's native route."""

    path = "/classify"
    forms = ("text", "bare", "tokens")

    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        sent = [conversation.sent(form) for conversation in conversations]
        if form == "tokens":
            return {"input_ids": sent}
        return {"text": sent}

    def read(self, response: Any) -> list[ServerScore]:
        rows = response if isinstance(response, list) else [response]
        scores = []
        for row in rows:
            values = row["embedding"]
            num_tokens = row.get("meta_info", {}).get("prompt_tokens")
            scores.append(ServerScore(values, num_tokens=num_tokens))
        return scores


class OpenRlhfDialect(Dialect):
    """OpenRLHF's remote reward models."""

    path = "/get_reward"
    forms = ("text", "bare")

    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        # Both are lists of one length, as OpenRLHF's trainer sends them.
        queries = []
        prompts = []
        for conversation in conversations:
            query = conversation.sent(form)
            # The last place: the context may hold the same text.
            end = query.rfind(conversation.completion)
            # A template may rewrite the completion, which is not found then.
            prompts.append(query if end < 0 else query[:end])
            queries.append(query)
        return {"query": queries, "prompts": prompts, "labels": [""] * len(queries)}

    def read(self, response: Any) -> list[ServerScore]:
        scores = []
        for reward in response["rewards"]:
            # A server may give each reward as a list of one.
            values = reward if isinstance(reward, list) else [reward]
            scores.append(ServerScore(values))
        return scores


class TeiDialect(Dialect):
    """Text Embeddings Inference's sequence classifiers."""

    path = "/predict"
    forms = ("text", "bare")

    def body(self, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
        inputs = [[conversation.sent(form)] for conversation in conversations]
        # By default TEI applies a sigmoid, and it may cut what is too long.
        return {"inputs": inputs, "raw_scores": True, "truncate": False}

    def read(self, response: Any) -> list[ServerScore]:
        rows = response
        # One list for one text, a list of lists for several.
        if not response or not isinstance(response[0], list):
            rows = [response]
        scores = []
        for row in rows:
            # TEI sorts by score; the labels are LABEL_0, LABEL_1, ..., LABEL_10.
            ordered = sorted(row, key=lambda value: (len(value["label"]), value["label"]))
            scores.append(ServerScore([value["score"] for value in ordered]))
        return scores


def _by_index(rows: Any) -> list[Any]:
    return sorted(rows, key=lambda row: row["index"])


DIALECTS: Mapping[str, Dialect] = {
    "treeward": TreewardDialect(),
    "vllm": VllmDialect(),
    "sglang": SglangDialect(),
    "openrlhf": OpenRlhfDialect(),
    "tei": TeiDialect(),
}
"""By name. vLLM and SGLang have more routes; the scores of all of them are made alike."""
