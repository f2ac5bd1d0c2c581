"""Text Embeddings Inference's dialect, `POST /predict` of its sequence classifiers.

    {"inputs": "rendered text"}              -> [{"score": 1.5, "label": "LABEL_0"}]
    {"inputs": [["one text"], ["another"]]}  -> [[{"score": 1.5, ...}], [{"score": 0.5, ...}]]

Scores are raw unless the request asks for sigmoids: `raw_scores: false`, the default of TEI itself,
or `parameters: {function_to_apply: "sigmoid"}`, which the hub's client sends. A softmax is an
error: of one label it is always 1. So are two strings in a list, TEI's form of a pair for
cross-encoders: a reward model reads whole conversations. Nothing is cut: `truncate` is ignored, and
a text that is too long is an error. The model is the first, or the URL's: /predict?model=careful.
Errors are in TEI's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from scipy.special import expit

from treeward.scoring.score import Reward
from treeward.serving.api_error import ERRORS, APIError
from treeward.serving.rendered_text import RenderedText
from treeward.serving.requests import (
    JSON,
    Body,
    Items,
    JSONRoute,
    ModelName,
    Server,
    described,
    example,
)

router = APIRouter(tags=["tei"], route_class=JSONRoute)


_OneText = Annotated[Items[str], Field(min_length=1, max_length=1)]
_WORDS = "a text, or [[text], [text], ...]; two texts in one list are a pair, which has no score"


class Parameters(Body):
    """Options of the hub's client."""

    function_to_apply: Literal["sigmoid", "none"] | None = None
    """The sigmoid of the score, or the score itself."""


class PredictBody(Body):
    """Rendered texts."""

    inputs: Annotated[
        str | _OneText | Annotated[Items[_OneText], Field(min_length=1)],
        described(_WORDS),
    ]
    """A text, alone or in a list; or a list of lists of one text each."""
    raw_scores: bool | None = None
    """False: the sigmoid of the score; otherwise the score itself."""
    parameters: Parameters | None = None
    """Its `function_to_apply` goes before `raw_scores`."""


@router.post(
    "/predict",
    summary="Text Embeddings Inference: scores as predictions",
    responses={status: {"model": dict[str, str | None]} for status in ERRORS},
    openapi_extra=example({"inputs": [["a"], ["b"]], "raw_scores": False, "truncate": True}),
)
async def predict(body: PredictBody, server: Server, model: ModelName = None) -> JSON:
    texts = await server.parsed(parse, body)
    return JSON(to_json(body, await server.rewards(server.model(model), texts)))


def parse(body: PredictBody) -> list[RenderedText]:
    """The texts of a body."""
    # A text, or a list of one, is one group.
    groups: list[Any] = [body.inputs]
    if _is_batch(body):
        groups = list(body.inputs)
    texts = []
    for group in groups:
        # A text, or a list of one.
        text = group if isinstance(group, str) else group[0]
        texts.append(RenderedText(text))
    return texts


def to_json(body: PredictBody, rewards: Sequence[Reward]) -> list[Any]:
    """The response: a list for each text of a batch, one list for one text."""
    is_sigmoid = body.raw_scores is False
    if body.parameters is not None and body.parameters.function_to_apply is not None:
        is_sigmoid = body.parameters.function_to_apply == "sigmoid"
    predictions = []
    for reward in rewards:
        assert reward.value is not None, "a request with a missing reward is refused"
        # The sigmoid that TEI itself applies.
        value = float(expit(reward.value)) if is_sigmoid else reward.value
        predictions.append([{"score": value, "label": "LABEL_0"}])
    if _is_batch(body):
        return list(predictions)
    return predictions[0]


# TEI's names; what it has no name for is a fault of the request.
_ERROR_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}


def error_body(error: APIError, facts: Mapping[str, Any]) -> dict[str, Any]:
    """An error as the clients of TEI read it."""
    return {
        "error": error.message,
        "error_type": _ERROR_TYPES.get(error.status, "Validation"),
        **facts,
    }


ERROR_BODIES = {"/predict": error_body}


def _is_batch(body: PredictBody) -> bool:
    return isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
