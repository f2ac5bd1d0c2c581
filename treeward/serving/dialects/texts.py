"""What the dialects of rendered text have in common: reading it, asking for its score, and noticing a wrong end.

    answers, headers = await answer_texts(service, request, model, texts)

Their clients render, and some tokenize, conversations themselves. A text's BOS (or CLS and SEP) is not doubled, and one
that is missing is added, whatever else the client asks for; token ids are taken as they are. What does not begin or end
as the model's own conversations do is scored all the same, for the text is the client's: but its score is read at
another token than in training, so the answer has the header `X-Treeward-Warning`, a counter goes up, and the log has a
line about it, once a minute.
"""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.serving.models import Asked, RenderedText, ServedModel
from treeward.serving.refusals import Refusal
from treeward.serving.service import Answer, Service

__all__ = [
    "MODEL_PARAMETER",
    "WARNING_DOCS",
    "WARNING_HEADER",
    "Ending",
    "Strings",
    "Texts",
    "TokenIds",
    "answer_texts",
    "as_list",
    "ask",
    "base64_floats",
    "model_of_url",
    "model_or_path",
    "renderer_of",
    "sigmoid",
]

logger = logging.getLogger(__name__)

WARNING_HEADER = "X-Treeward-Warning"
WARNING_DOCS = {
    WARNING_HEADER: {
        "description": "Texts that do not begin or end as the model's conversations do; they are scored as they are.",
        "schema": {"type": "string"},
    }
}
"""For the description of an answer: the header."""

MODEL_PARAMETER = {
    "name": "model",
    "in": "query",
    "required": False,
    "description": "Which of the served models; the first where none is named.",
    "schema": {"type": "string"},
}
"""For the description of a route whose bodies name no model."""

_SHOWN = 16
_QUIET_SECONDS = 60.0
_ANSWERS = "Romam.", "Quo vadis"
_QUESTIONS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Quo vadis?"}],
    [{"role": "system", "content": "Loquere."}, {"role": "user", "content": "Quo vadis?"}],
)


def _strings(value: Any) -> str | list[str]:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return value
    raise PydanticCustomError("texts", "Input should be a text or a list of texts")


def _texts(value: Any) -> str | list[Any]:
    if isinstance(value, str) or (isinstance(value, list) and (_is_ids(value) or all(map(_is_text, value)))):
        if len(value):
            return value
        raise PydanticCustomError("texts", "Input should hold a text to score")
    raise PydanticCustomError("texts", "Input should be a text, a list of token ids, or a list of either")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(one) is int for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_ids(value)


def _token_ids(value: Any) -> list[Any]:
    if _is_ids(value) or (isinstance(value, list) and all(map(_is_ids, value))):
        return list(value)
    raise PydanticCustomError("texts", "Input should be a list of token ids, or a list of such lists")


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}

Strings = Annotated[
    str | list[str],
    PlainValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A text, or a list of texts."""

TokenIds = Annotated[
    list[Any],
    PlainValidator(_token_ids),
    WithJsonSchema({"anyOf": [_IDS_SCHEMA, {"type": "array", "items": _IDS_SCHEMA}]}),
]
"""The token ids of a text, or of several."""

Texts = Annotated[
    str | list[Any],
    PlainValidator(_texts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _IDS_SCHEMA,
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}, "minItems": 1},
            ]
        }
    ),
]
"""A text, the token ids of one, or a list of either."""


def as_list(texts: str | list[Any]) -> list[Any]:
    """Each text, or token ids, of what a client sent."""
    return [texts] if isinstance(texts, str) or _is_ids(texts) else texts


def model_or_path(service: Service, model: str | None) -> str | None:
    """The name of a served model; clients that were given a folder or a hub name call the model by that."""
    models = service.engine.models
    if model is not None and model not in models:
        return next((one.name for one in models.values() if list(one.members) == [model]), model)
    return model


def renderer_of(model: ServedModel) -> Renderer | None:
    """What renders the model's conversations; None for one that reads messages in a way of its own."""
    return model.scorers[0].renderer if model.scorers else None


def model_of_url(service: Service, request: Request) -> ServedModel:
    """The model that the URL asks for, as /get_reward?model=careful, where the dialect's bodies name none.

    Raises `Refusal` 404 for one that is not served: before the body, so that nothing is read in vain.
    """
    return service.engine.model(model_or_path(service, request.query_params.get("model")))


async def ask(service: Service, request: Request, model: str | None, asked: Sequence[Asked]) -> list[Answer]:
    """Answers that all have a value. Raises `Refusal` as `Service.answer` and `Service.refuse_failures` do."""
    answers = await service.answer(model_or_path(service, model), asked, deadline=request.scope["treeward"].deadline)
    service.refuse_failures(answers)
    return answers


async def answer_texts(
    service: Service,
    request: Request,
    model: str | None,
    texts: Sequence[Any],
    *,
    replies: Sequence[str | None] | None = None,
    reply_field: str | None = None,
) -> tuple[list[Answer], dict[str, str]]:
    """As `ask`, for rendered texts and token ids; with the headers of the response.

    `replies`: the texts of the answers, by which shaping measures length; None where they are not known. `reply_field`:
    the key of the dialect's bodies that would make them known; None where it has none.
    """
    _check_replies(service, model, replies or [None] * len(texts), reply_field)
    asked = [RenderedText(text, reply) for text, reply in zip(texts, replies or [None] * len(texts), strict=True)]
    answers = await ask(service, request, model, asked)
    return answers, _warnings(service, model, texts)


def _check_replies(service: Service, model: str | None, replies: Sequence[str | None], reply_field: str | None) -> None:
    served = service.engine.model(model_or_path(service, model))
    if served.shaper is None or not served.shaper.reads_replies or None not in replies:
        return
    place = replies.index(None)
    if reply_field is None:
        what = (
            "and this dialect has no field for it: send messages, or the prompt beside the text (/get_reward, /slime)"
        )
    elif reply_field == "messages":
        what = "which a rendered text does not show: send messages, or the prompt beside the text (/get_reward, /slime)"
    else:
        what = f"send messages, or the prompt with which the text begins, in {reply_field}"
    message = f"conversation {place}: the rewards of {served.name} depend on the reply, {what}"
    raise Refusal(422, "cannot_be_scored", message, param=reply_field)


def sigmoid(value: float) -> float:
    """The probability whose log odds are the value."""
    return 0.5 * (1.0 + math.tanh(0.5 * value))


def base64_floats(values: Sequence[float], *, byte_order: str = "<") -> str:
    """float32 values as OpenAI's clients decode them."""
    return base64.b64encode(np.asarray(values, dtype=f"{byte_order}f4").tobytes()).decode()


@dataclass(frozen=True, slots=True)
class Ending:
    """How the conversations of a model end and begin: what its template writes after the last answer.

    `text`, `ids`: the end, without the SEP of an encoder in the text, as the server adds that itself. `first_id`: the
    BOS or CLS, and `first` its text; None where there is none. `sep`: an encoder's. `padding`: what is no part of a
    conversation.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    first_id: int | None = None
    first: str = ""
    sep: str = ""
    padding: str | None = None

    @classmethod
    def of(cls, model: ServedModel) -> Ending:
        """The ending of a served model; empty where it has no template, or one that refuses a plain conversation."""
        found = _endings.get(model)
        if found is None:
            renderer = renderer_of(model)
            found = _endings[model] = cls() if renderer is None else cls._of_renderer(renderer)
        return found

    @classmethod
    def _of_renderer(cls, renderer: Renderer) -> Ending:
        tokenizer = renderer.tokenizer
        for question in _QUESTIONS:
            chats = [[*question, {"role": "assistant", "content": answer}] for answer in _ANSWERS]
            sep = renderer.tokenizer.sep_token if renderer.kind == "encoder" else None
            try:
                texts = [renderer.render(chat).removesuffix(sep or "") for chat in chats]
                rows = renderer.encode_many(chats)
            except DataError:
                continue
            text, ids = _common_end(*texts), tuple(_common_end(*rows))
            first = {tokenizer.bos_token_id: tokenizer.bos_token, tokenizer.cls_token_id: tokenizer.cls_token}
            written = first.get(rows[0][0])
            padding = tokenizer.pad_token
            if not padding or padding in text or padding == tokenizer.eos_token:
                padding = None
            return cls(text, ids, rows[0][0] if written else None, written or "", sep or "", padding)
        return cls()

    def is_cut(self, text: Any) -> bool:
        """Whether a text, or token ids, end in another way."""
        if isinstance(text, str):
            return not text.removesuffix(self.sep).endswith(self.text)
        return bool(self.ids) and tuple(text[-len(self.ids) :]) != self.ids

    def is_begun_otherwise(self, text: Any) -> bool:
        """Whether token ids have no BOS (or CLS), or more than one; a text is given exactly one."""
        return (
            not isinstance(text, str)
            and self.first_id is not None
            and (text[0] != self.first_id or list(text[1:2]) == [self.first_id])
        )

    def completed(self, generated: str) -> str:
        """A generated text without padding, and with the white space that the template writes after the end of turn.

        A policy stops at its end of turn, so it never writes what follows: where no more than white space is missing,
        it is added. A text that was cut before its end of turn stays as it is.
        """
        if self.padding is not None:
            start, end, step = 0, len(generated), len(self.padding)
            while generated.startswith(self.padding, start):
                start += step
            while end - step >= start and generated.endswith(self.padding, start, end):
                end -= step
            generated = generated[start:end]
        mark = self.text.rstrip()
        if mark and not generated.endswith(self.text) and generated.rstrip().endswith(mark):
            return generated.rstrip().removesuffix(mark) + self.text
        return generated

    def reply(self, text: str, prompt: str) -> str | None:
        """What follows the prompt in a text, without the end of turn; None where the text does not begin with it."""
        for begin in (prompt, prompt.removeprefix(self.first)):
            for whole in (text, text.removeprefix(self.first)):
                if whole.startswith(begin):
                    return self.without(whole.removeprefix(begin))
        return None

    def without(self, reply: str) -> str:
        """A reply without the end of turn."""
        mark = self.text.strip()
        return reply.rstrip().removesuffix(mark) if mark and reply.rstrip().endswith(mark) else reply


_endings: WeakKeyDictionary[ServedModel, Ending] = WeakKeyDictionary()


@dataclass(slots=True)
class _Odd:
    """What was not told yet of the odd texts of a model, by kind, and when the log was last told."""

    untold: dict[str, int] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, kind: str, number: int, what: str) -> None:
        self.untold[kind] = self.untold.get(kind, 0) + number
        now = time.monotonic()
        if kind in self.told and now - self.told[kind] < _QUIET_SECONDS:
            return
        number = self.untold.pop(kind)
        self.told[kind] = now
        logger.warning(
            "%s: %d text%s since the last such line do%s not %s, as this model's conversations do: they are scored "
            "all the same, but not as in training. The counter treeward_odd_texts_total has them all.",
            name, number, "" if number == 1 else "s", "es" if number == 1 else "", what,
        )  # fmt: skip


_odd: WeakKeyDictionary[ServedModel, _Odd] = WeakKeyDictionary()


def _warnings(service: Service, model: str | None, texts: Sequence[Any]) -> dict[str, str]:
    served = service.engine.model(model_or_path(service, model))
    ending = Ending.of(served)
    cut = [i for i, text in enumerate(texts) if ending.is_cut(text)]
    begun = [i for i, text in enumerate(texts) if ending.is_begun_otherwise(text)]
    said = []
    odd = _odd.setdefault(served, _Odd())
    if cut:
        service.metrics.odd_texts.labels(served.name, "end").inc(len(cut))
        end = ascii(ending.text) if ending.text else f"the tokens {list(ending.ids)}"
        odd.note(served.name, "end", len(cut), f"end with {end}")
        said.append(f"{_which(cut, texts)} not end with {end}, as this model's conversations do")
    if begun:
        service.metrics.odd_texts.labels(served.name, "begin").inc(len(begun))
        odd.note(served.name, "begin", len(begun), f"begin with exactly one token {ending.first_id}")
        said.append(f"{_which(begun, texts)} not begin with exactly one token {ending.first_id}, as they do")
    return {WARNING_HEADER: "; ".join(said)} if said else {}


def _which(indices: Sequence[int], texts: Sequence[Any]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
    return f"{len(indices)} of {len(texts)} texts ({shown}) do{'es' if len(indices) == 1 else ''}"


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> Any:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]
