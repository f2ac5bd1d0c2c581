"""Text Embeddings Inference's dialect, `POST /predict` of its sequence classifiers.

{"inputs": "rendered text"}                          -> [{"score": 1.5, "label": "LABEL_0"}]
{"inputs": [["one text"], ["another"]]}              -> [[{"score": 1.5, ...}], [{"score": 0.5, ...}]]

Scores are raw unless the request asks for sigmoids: `raw_scores: false`, the default of TEI itself, or `parameters:
{function_to_apply: "sigmoid"}`, which the hub's client sends. A softmax is an error: of one label it is always 1. So
are two strings in a list, TEI's form of a pair for cross-encoders: a reward model reads whole conversations. Nothing is
cut: `truncate` is ignored, and a text that is too long is an error. The model is the first, or the URL's:
/predict?model=careful. Errors are in TEI's form.
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
from treeward.serving.requests import JSON, Body, Items, JSONRoute, ModelName, Server, described

router = APIRouter(tags=["tei"], route_class=JSONRoute)


_OneText = Annotated[Items[str], Field(min_length=1, max_length=1)]
_WORDS = "a text, or [[text], [text], ...]: several texts in one list are a pair, and a reward model reads one"


class Parameters(Body):
    """Options of the hub's client."""

    function_to_apply: Literal["sigmoid", "none"] | None = None
    """The sigmoid of the score, or the score itself."""


class PredictBody(Body):
    """Rendered texts."""

    inputs: Annotated[str | _OneText | Annotated[Items[_OneText], Field(min_length=1)], described(_WORDS)]
    """A text, alone or in a list; or a list of lists of one text each."""
    raw_scores: bool | None = None
    """False: the sigmoid of the score; otherwise the score itself."""
    parameters: Parameters | None = None
    """Its `function_to_apply` goes before `raw_scores`."""


@router.post(
    "/predict",
    summary="Text Embeddings Inference: scores as predictions",
    responses={status: {"model": dict[str, str | None]} for status in ERRORS},
)
async def predict(body: PredictBody, server: Server, model: ModelName = None) -> JSON:
    texts = await server.parsed(parse, body)
    return JSON(to_json(body, await server.rewards(server.model(model), texts)))


def parse(body: PredictBody) -> list[RenderedText]:
    """The texts of a body."""
    groups: list[Any] = list(body.inputs) if _is_batch(body) else [body.inputs]
    return [RenderedText(group if isinstance(group, str) else group[0]) for group in groups]


def to_json(body: PredictBody, rewards: Sequence[Reward]) -> list[Any]:
    """The response: a list for each text of a batch, one list for one text."""
    function = None if body.parameters is None else body.parameters.function_to_apply
    is_sigmoid = body.raw_scores is False if function is None else function == "sigmoid"
    values = [reward.value for reward in rewards if reward.value is not None]
    rows = [[{"score": float(expit(value)) if is_sigmoid else value, "label": "LABEL_0"}] for value in values]
    return list(rows) if _is_batch(body) else rows[0]


_ERROR_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}


def error_body(error: APIError, facts: Mapping[str, Any]) -> dict[str, Any]:
    """An error as the clients of TEI read it."""
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.status, "Validation"), **facts}


ERROR_BODIES = {"/predict": error_body}


def _is_batch(body: PredictBody) -> bool:
    return isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
