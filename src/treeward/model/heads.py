"""Heads of reward models: what turns hidden states into values, where it reads a sequence, and what
it makes of that.

    head(hidden_ND)             # values for each place, (N, H)
    head.reads(token_ids)       # the positions at which the head reads this sequence
    head.combine(values_RH)     # what it makes of the values at all reads, (S, H)
    head.reads_each             # its reads of each sequence; None if that depends on the sequence

A plain head has none of these methods: it reads the last token, and its values there are the
sequence's. ArmoRM's gate reads the end of the prompt too and weighs the values at the last token; a
process reward model reads every step. Heads of published models follow their authors' code, which
`published.py` names.

Shapes: N places, R reads, S sequences, D hidden size, H values, Q quantiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from treeward.errors import ModelError
from treeward.tree.token_tree import TokenIds

Fields = Mapping[str, Any]
"""The content of config.json."""

HEAD_NAMES = ("score", "classifier", "classification_head", "vqa_classifier", "sequence_summary")
"""Names that sequence classifiers of transformers give their head."""

HELPSTEER2 = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
ARMORM = (
    *(f"helpsteer-{name}" for name in HELPSTEER2),
    "ultrafeedback-overall_score",
    "ultrafeedback-instruction_following",
    "ultrafeedback-truthfulness",
    "ultrafeedback-honesty",
    "ultrafeedback-helpfulness",
    "beavertails-is_safe",
    "prometheus-score",
    "argilla-overall_quality",
    "argilla-judge_lm",
    "code-complexity",
    "code-style",
    "code-explanation",
    "code-instruction-following",
    "code-readability",
)

LDL_WIDTH = 4096
NUM_RATINGS = 10
"""Constants of LDL's code, which its config.json does not have."""
_ANSWER_BEGINS = {
    "llama": (128009, 128006, 78191, 128007, 271),
    "gemma2": (107, 108, 106, 2516, 108),
}
"""The end of the prompt and the header of the completion, in the tokens of Llama 3 and of Gemma
2."""


def head_name(hf: PreTrainedModel) -> str:
    """The name of the classification head: `score` in decoders, `classifier` in most encoders.
    Raises `ModelError` if there is none."""
    for name in HEAD_NAMES:
        if isinstance(getattr(hf, name, None), nn.Module):
            return name
    raise ModelError(
        f"{type(hf).__name__} has no head that treeward knows",
        need="a `score` or `classifier` module",
    )


def is_of_head(name: str) -> bool:
    """Whether a weight of this name belongs to the classification head."""
    return name.split(".")[0] in HEAD_NAMES


def stored_heads(hf: PreTrainedModel) -> tuple[str, ...]:
    """The names of the head's modules on disk, which some published models change."""
    names: tuple[str, ...] = getattr(hf, "stored_head", None) or (head_name(hf),)
    return names


class HiddenReader(nn.Module):
    """Reads `num_values` numbers from each last hidden state beside the head, float32 (N,
    num_values)."""

    num_values: int


class Features(HiddenReader):
    """The head's input itself."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_values = num_features

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND.float()


_INPUTS: ContextVar[list[Tensor] | None] = ContextVar("inputs of heads", default=None)
"""Of each context its own: parts of one batch may go through a head at the same time."""


def note_inputs(head: nn.Module) -> None:
    """Have a head that an encoder's own forward calls note what it reads, for `inputs_of_heads`."""

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs = _INPUTS.get()
        if inputs is not None:
            inputs.append(arguments[0])

    # Once, and not around each pass: a hook sees the passes of all threads.
    head.register_forward_pre_hook(note)


@contextlib.contextmanager
def inputs_of_heads() -> Iterator[list[Tensor]]:
    """A context with the list of what heads read in it."""
    inputs: list[Tensor] = []
    token = _INPUTS.set(inputs)
    try:
        yield inputs
    finally:
        _INPUTS.reset(token)


def mlp(sizes: Sequence[int], *between: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers of these sizes, with these modules between two of them."""
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        modules.append(nn.Linear(inputs, outputs))
        modules.extend(make() for make in between)
    # Nothing follows the last layer. The places count: checkpoints name layers by them.
    return nn.Sequential(*modules[: -len(between)])


def grm_head(config: PreTrainedConfig) -> nn.Module:
    """GRM: a linear layer, or an MLP with ReLU."""
    if getattr(config, "vhead_layer_type", "mlp") == "linear":
        return nn.Linear(config.hidden_size, 1)
    width = getattr(config, "vhead_num_neurons", 1024)
    num_layers = getattr(config, "vhead_num_layers", 1)
    return mlp([config.hidden_size, *[width] * num_layers, 1], nn.ReLU)


def two_layer_head(config: PreTrainedConfig) -> nn.Module:
    """INF-ORM and Qwen2.5-Math-RM: an MLP with ReLU, as wide as the hidden states."""
    return mlp([config.hidden_size, config.hidden_size, 1], nn.ReLU)


class Standardised(nn.Module):
    """OpenRLHF's linear head with the mean and the deviation of its rewards, (value - mean) /
    std."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.value = nn.Linear(config.hidden_size, 1, bias=False)
        self.mean = float(config.mean)
        self.std = float(config.std)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        values: Tensor = (self.value(hidden_ND) - self.mean) / self.std
        return values


class RewardOrCost(nn.Module):
    """Beaver: a linear head. With `do_normalize` a reward is (value - mean) / std, and a cost value
    / std. A cost is negated: higher is better."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.value = nn.Linear(config.hidden_size, 1, bias=getattr(config, "bias", False))
        # Statistics of the authors' training, by the names in their checkpoints.
        self.normalizer: Any = nn.Module()
        self.normalizer.register_buffer("mean", torch.zeros(1))
        self.normalizer.register_buffer("var", torch.ones(1))
        self.normalizer.register_buffer("count", torch.zeros(1).long())
        self.is_cost = getattr(config, "score_type", "reward") == "cost"
        self.normalises = getattr(config, "do_normalize", False)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        values: Tensor = self.value(hidden_ND)
        if self.normalises:
            if not self.is_cost:
                values = values - self.normalizer.mean
            values = values / (self.normalizer.var.sqrt() + 1e-8)
        if self.is_cost:
            return -values
        return values


class WeightedRatings(nn.Module):
    """LDL: the expectation of each objective's distribution over ratings from 0 to 1, times its
    weight by a network, both from the last token."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        sizes = [config.hidden_size, LDL_WIDTH, LDL_WIDTH]
        num_logits = config.num_objectives  # to the authors one for each rating of an objective
        ratings = mlp([*sizes, num_logits], nn.LeakyReLU)
        # Identity has the place of the authors' dropout, so that later layers have their numbers.
        weights = mlp([*sizes, num_logits // NUM_RATINGS], nn.LeakyReLU, nn.Identity)
        self.regression_layer = nn.ModuleDict({"network": ratings})
        self.gating_layer = nn.ModuleDict({"network": weights})
        self.temperature = config.gating_temperature
        self.softmax = config.softmax

    def forward(self, hidden_ND: Tensor) -> Tensor:
        logits_NHR = self.regression_layer["network"](hidden_ND).unflatten(-1, (-1, NUM_RATINGS))
        weights_NH: Tensor = self.gating_layer["network"](hidden_ND)
        if self.softmax:
            weights_NH = F.softmax(weights_NH / self.temperature, dim=-1)
        ratings = torch.linspace(0, 1, NUM_RATINGS, device=hidden_ND.device)
        return F.softmax(logits_NHR, dim=-1) @ ratings * weights_NH


class WeightedAttributes(nn.Module):
    """URM: the mean of each attribute times its weight by a network, both from the last token.
    Attributes are pairs of mean and spread; the score ignores the spread."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attributes = nn.Linear(size, 2 * len(HELPSTEER2), bias=False)
        self.weights = nn.ModuleDict({"fc": mlp([size, size, size, len(HELPSTEER2)], nn.SELU)})

    def forward(self, hidden_ND: Tensor) -> Tensor:
        means_NH = self.attributes(hidden_ND)[:, ::2]  # the others are spreads
        values_NH: Tensor = means_NH * self.weights["fc"](hidden_ND)
        return values_NH


class Gate(nn.Module):
    """The weight of each objective from the end of the prompt: `logit_scale` times a softmax."""

    def __init__(self, config: PreTrainedConfig, num_objectives: int, *, normed: bool) -> None:
        super().__init__()
        # The defaults are those of the authors' class, which config.json leaves out.
        self.temperature = float(getattr(config, "gating_temperature", 10))
        self.normed = normed
        self.logit_scale = nn.Parameter(torch.ones(1))
        width = getattr(config, "gating_hidden_dim", 1024)
        inputs = config.hidden_size
        layers = nn.ModuleList()
        for _ in range(getattr(config, "gating_n_hidden", 3)):
            layers.append(nn.Linear(inputs, width, bias=not normed))
            if normed:
                layers.extend([nn.ReLU(), nn.BatchNorm1d(width)])
            inputs = width
        layers.append(nn.Linear(inputs, num_objectives))
        self.layers = layers

    def forward(self, hidden_ND: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            hidden_ND = layer(hidden_ND)
            if not self.normed:
                hidden_ND = F.relu(hidden_ND)
        logits_NH = self.layers[-1](hidden_ND) / self.temperature
        return F.softmax(logits_NH, dim=-1) * self.logit_scale

    def train(self, mode: bool = True) -> Gate:
        """Keeps the authors' statistics, so that no score depends on other conversations of the
        batch."""
        return super().train(False)


class GatedObjectives(nn.Module):
    """ArmoRM and QRM: objectives at the last token (QRM's: means of quantiles), transformed, and
    their weights where the last `gate_pattern` begins, the end of the prompt."""

    reads_each = 2

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.num_quantiles = getattr(config, "num_quantiles", None)
        num_objectives = len(objectives(config.to_dict()))
        pattern = getattr(config, "gate_pattern", None) or _ANSWER_BEGINS.get(config.model_type)
        if pattern is None:
            raise ModelError(
                "nothing says where the prompt ends, which is where this model's gate reads",
                where="config.json",
                field="gate_pattern",
                need="the token ids between a prompt and its completion, as the chat template "
                "writes them",
            )
        self.gate_pattern: tuple[int, ...] = tuple(pattern)
        num_values = num_objectives * (self.num_quantiles or 1)
        self.regression_layer = nn.Linear(config.hidden_size, num_values, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(num_objectives), requires_grad=False)
        self.gating = Gate(config, num_objectives, normed=self.num_quantiles is not None)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """The objectives and the weights at each place, (N, 2 H)."""
        values: Tensor = self.regression_layer(hidden_ND)
        if self.num_quantiles is not None:
            values = values.unflatten(-1, (-1, self.num_quantiles)).mean(dim=-1)
        return torch.cat([values @ self.reward_transform_matrix, self.gating(hidden_ND)], dim=-1)

    def reads(self, ids: TokenIds) -> Sequence[int]:
        """The start of the last `gate_pattern`, and the last token."""
        tokens = np.asarray(ids)
        pattern = self.gate_pattern
        if len(tokens) >= len(pattern):
            windows = np.lib.stride_tricks.sliding_window_view(tokens, len(pattern))
            starts = np.flatnonzero((windows == pattern).all(axis=1))
            # The last one: earlier turns of the assistant begin in the same way.
            if len(starts):
                return int(starts[-1]), len(tokens) - 1
        raise ModelError(
            "this model reads where the prompt ends, and the conversation does not show where",
            got=f"{len(tokens)} tokens without {list(pattern)}",
            fix="use the model's own chat template",
        )

    def combine(self, values_RX: Tensor) -> Tensor:
        """The objectives at the last token, times the weights at the end of the prompt, (S, H)."""
        values_S2X: Tensor = values_RX.unflatten(0, (-1, 2))
        at_prompt_end_SX, at_last_token_SX = values_S2X.unbind(dim=1)
        num_objectives = values_RX.shape[1] // 2
        return at_last_token_SX[:, :num_objectives] * at_prompt_end_SX[:, num_objectives:]


def objectives(fields: Fields) -> tuple[str, ...]:
    """The names of the objectives of ArmoRM or QRM."""
    count = fields.get("num_objectives") or len(ARMORM)
    if fields.get("num_quantiles") is None and count == len(ARMORM):
        return ARMORM
    return tuple(f"objective {i}" for i in range(count))


class StepOdds(nn.Sequential):
    """Qwen2.5-Math-PRM: the log-odds that a step is right, of two layers with a value against it
    and one for it. It reads every step, at `step_token_id`."""

    reads_each = None

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(*mlp([config.hidden_size, config.hidden_size, 2], nn.ReLU))
        self.step_token_id: int = config.step_token_id  # the loader's key: the tokenizer knows it

    def forward(self, hidden_ND: Tensor) -> Tensor:
        values_N2: Tensor = super().forward(hidden_ND)  # type: ignore[no-untyped-call]
        return values_N2[:, 1:] - values_N2[:, :1]

    def reads(self, ids: TokenIds) -> Sequence[int]:
        """The position of each mark after a step, perhaps none."""
        return _marks(ids, self.step_token_id)


class StepLogits(nn.Linear):
    """The head of transformers' token classifiers, as TRL trains it: a logit for a step that is
    wrong (LABEL_0) and one for a step that is right (LABEL_1). It reads every step, at
    `step_token_id`; the value of a step is the log-odds that it is right."""

    reads_each = None

    def __init__(self, config: PreTrainedConfig, *, bias: bool) -> None:
        super().__init__(config.get_text_config().hidden_size, 2, bias=bias)
        self.step_token_id: int = config.step_token_id  # the loader's key: the tokenizer knows it

    def reads(self, ids: TokenIds) -> Sequence[int]:
        """The position of each mark after a step, perhaps none."""
        return _marks(ids, self.step_token_id)

    def combine(self, values_R2: Tensor) -> Tensor:
        """The log-odds at each read, (R, 1)."""
        return values_R2[:, 1:] - values_R2[:, :1]


def _marks(ids: TokenIds, step_token_id: int) -> list[int]:
    positions: list[int] = np.flatnonzero(np.asarray(ids) == step_token_id).tolist()
    return positions
