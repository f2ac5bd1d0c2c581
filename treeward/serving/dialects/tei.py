"""Text Embeddings Inference's dialect, `POST /predict` of its sequence classifiers.

{"inputs": "rendered text"}                          -> [{"score": 1.5, "label": "LABEL_0"}]
{"inputs": [["one text"], ["another"]]}              -> [[{"score": 1.5, ...}], [{"score": 0.5, ...}]]

Scores are raw unless the request says `raw_scores: false` in so many words; then they are sigmoids, which in TEI itself
is the default. Two strings in a list are TEI's form of a pair, for cross-encoders: a reward model reads whole
conversations, so a pair is refused, not scored as something else. Nothing is cut: `truncate` changes nothing, and what
is too long is refused. The model is the first, or that of the URL: /predict?model=careful. Errors are in TEI's form,
but for those that concern no dialect: a missing token, a server that shuts down.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from treeward.serving.bodies import Body, Refused, describe, json_response, read
from treeward.serving.dialects.texts import MODEL_PARAMETER, WARNING_DOCS, answer_texts, model_of_url, sigmoid
from treeward.serving.refusals import Refusal
from treeward.serving.service import Service

__all__ = ["router"]

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer"]
_KINDS: dict[int, ErrorType] = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}


def _check_inputs(inputs: Any) -> str | list[Any]:
    if isinstance(inputs, str):
        return inputs
    if not isinstance(inputs, list) or not inputs or not all(isinstance(one, (str, list)) for one in inputs):
        raise PydanticCustomError("inputs", "Input should be a text, [text], or [[text], [text], ...]")
    is_batch = isinstance(inputs[0], list)
    for group in inputs if is_batch else [inputs]:
        if not isinstance(group, list) or not group or not all(isinstance(one, str) for one in group):
            raise PydanticCustomError("inputs", "Input should be a text, [text], or [[text], [text], ...]")
        if len(group) > 1:
            raise PydanticCustomError(
                "inputs",
                "Several texts in a list are a pair; a reward model reads one text, the whole conversation, and a "
                "batch of them is [[text], [text], ...]",
            )
    return inputs


_ONE_TEXT = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
_Inputs = Annotated[
    str | list[Any],
    PlainValidator(_check_inputs),
    WithJsonSchema({"anyOf": [{"type": "string"}, _ONE_TEXT, {"type": "array", "items": _ONE_TEXT, "minItems": 1}]}),
]


class PredictBody(Body):
    """Rendered texts."""

    inputs: _Inputs
    """A text, alone or in a list; or a list of lists of one text each."""
    raw_scores: bool | None = None
    """False: the sigmoid of the score; otherwise the score itself."""
    truncate: bool | None = None
    """Changes nothing: a text that is too long is refused."""


class Prediction(TypedDict):
    """The score of a text."""

    score: float
    label: str


class PredictError(TypedDict):
    """Why there are no scores: TEI's `error` and `error_type`, and what other dialects have."""

    error: str
    error_type: ErrorType
    code: str
    param: str | None
    request_id: str


def router(service: Service) -> APIRouter:
    """The route of this dialect."""
    routes = APIRouter(tags=["tei"])
    ok = {"200": {"description": "Scores in order.", "headers": WARNING_DOCS}}
    answer = list[Prediction] | list[list[Prediction]]
    described = describe(
        PredictBody, answer=answer, refusal=PredictError | Refused, responses=ok, parameters=[MODEL_PARAMETER]
    )

    @routes.post("/predict", summary="Text Embeddings Inference: scores as predictions", openapi_extra=described)
    async def predict(request: Request) -> Response:
        try:
            return await _predict(service, request)
        except Refusal as refusal:
            return await _refused(request, refusal)

    return routes


async def _predict(service: Service, request: Request) -> Response:
    model = model_of_url(service, request)
    body = await read(request, PredictBody)
    inputs = body.inputs
    is_batch = isinstance(inputs, list) and isinstance(inputs[0], list)
    groups = inputs if is_batch else [[inputs] if isinstance(inputs, str) else inputs]
    texts = [group[0] for group in groups]
    answers, headers = await answer_texts(service, request, model.name, texts)
    values = [answer.value for answer in answers if answer.value is not None]
    if body.raw_scores is False:
        values = [sigmoid(value) for value in values]
    rows: list[Any] = [[{"score": value, "label": "LABEL_0"}] for value in values]
    return json_response(rows if is_batch else rows[0], headers=headers)


async def _refused(request: Request, refusal: Refusal) -> Response:
    """The refusal as the application counts and heads it, in the form that TEI's clients read."""
    plain = await request.app.exception_handlers[Refusal](request, refusal)
    body: PredictError = {
        "error": refusal.message,
        "error_type": _KINDS.get(refusal.status, "Validation"),
        "code": refusal.code,
        "param": refusal.param,
        "request_id": request.scope["treeward"].id,
    }
    headers = {name: value for name, value in plain.headers.items() if name not in ("content-length", "content-type")}
    return json_response(body, plain.status_code, headers)
