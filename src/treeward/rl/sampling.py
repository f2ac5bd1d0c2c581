"""`sample`: rows sampled token by token; a prompt is computed once for all its rows, and rows that
have ended leave.

    rows = [SampledRow(prompt_ids, most=64, uniforms=uniforms(seed, p, g, 64)) for g in range(8)]
    sample(policy, rows, temperature=1.0, ended=lambda tokens: tokens[-1] == end)
    rows[0].token_ids, rows[0].log_probs

One number, drawn beforehand, chooses each token of a row: where it falls among the cumulated
probabilities. So a row depends on its prompt and its numbers alone, not on the other rows, except
for the rounding of the logits: a number that is within rounding of a border may take the token on
the other side.

Shapes: P distinct prompts, S rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, TopKLogitsWarper, TopPLogitsWarper

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.tree.batch import TreeBatch
from treeward.tree.decoding import Decoding
from treeward.tree.plan import plan_micro_batches
from treeward.tree.prefix import Prefix

logger = logging.getLogger(__name__)


class DecodeSettings(NamedTuple):
    """How rows are sampled on a kind of device.

    `tokens_at_once`: tokens per row that the host reads together; tokens after an end are dropped.
    `kept_at_most`: ended rows leave when at most this share of rows goes on; that copies the
    others' keys and values. `static`: shapes stay the same from token to token, for CUDA graphs.
    """

    tokens_at_once: int
    kept_at_most: float
    static: bool


DECODE_SETTINGS = {
    "cpu": DecodeSettings(tokens_at_once=1, kept_at_most=7 / 8, static=False),
    "cuda": DecodeSettings(tokens_at_once=16, kept_at_most=1 / 2, static=True),
}

PROMPT_TOKENS = 8192
"""Tokens of prompts in one forward pass."""


@dataclass(slots=True)
class SampledRow:
    """One completion: `most`: tokens it may have, at least 1; `uniforms`: `most` numbers in [0, 1).

    `sample` fills `token_ids`, with the token that ended it, and their `log_probs`, at the
    temperature, before top-k and top-p.
    """

    prompt_ids: tuple[int, ...]
    most: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


def uniforms(seed: int, prompt: int, completion: int, count: int) -> np.ndarray:
    """The numbers that choose the tokens of a completion, float64 (count,); a longer count begins
    with the same."""
    # numpy takes no negative seed.
    return np.random.default_rng([seed % 2**64, prompt, completion]).random(count)


@torch.no_grad()
def sample(
    policy: PolicyModel,
    rows: Sequence[SampledRow],
    *,
    ended: Callable[[list[int]], bool],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> None:
    """Sample each row until `ended(token_ids)` is true or it has `most` tokens.

    Raises `ModelError` where the policy's logits are not finite. The caller puts the policy in
    evaluation mode.

    As in `PolicyModel.log_probs` the model computes in the dtype of its weights, and the softmax is
    float32. On a GPU the host reads several tokens at once, so that it waits for none; those after
    an end are dropped.
    """
    most = max(row.most for row in rows)
    settings = DECODE_SETTINGS.get(policy.device.type, DECODE_SETTINGS["cpu"])
    numbers = np.zeros((len(rows), most))
    for s, sampled_row in enumerate(rows):
        numbers[s, : sampled_row.most] = sampled_row.uniforms[: sampled_row.most]
    numbers_ST = torch.from_numpy(numbers).to(policy.device)
    decoder: _TreeDecoder | _RowDecoder
    if policy.layout == "tree":
        decoder = _TreeDecoder(policy, rows, settings)
    else:
        decoder = _RowDecoder(policy, rows, settings)
    # None: a row that has ended. It is computed until enough have.
    going: list[SampledRow | None] = list(rows)
    tokens_S: Tensor | None = None
    step = 0
    while any(row is not None for row in going):
        most_of_live = min(row.most for row in going if row is not None)
        sampled = []
        for _ in range(min(settings.tokens_at_once, most_of_live - step)):
            if tokens_S is None:
                logits_SV = decoder.start()
            else:
                logits_SV = decoder(tokens_S)
            tokens_S, log_probs_S = _choose(
                logits_SV,
                numbers_ST[:, step],
                temperature,
                top_k,
                top_p,
            )
            # float64 holds any token id exactly, so both can be read in one copy.
            sampled.append(torch.stack([tokens_S.double(), log_probs_S.double()]))
            step += 1
        assert tokens_S is not None
        # The one time that the host waits for the device.
        tokens, log_probs = torch.stack(sampled, dim=-1).tolist()
        for s, row in enumerate(going):
            if row is not None and _extend(row, tokens[s], log_probs[s], ended):
                going[s] = None
        kept = [s for s, row in enumerate(going) if row is not None]
        most_kept = decoder.kept_at_most * len(going)
        if 0 < len(kept) < len(going) and len(kept) <= most_kept:
            decoder.choose(kept)
            tokens_S = tokens_S[kept]
            numbers_ST = numbers_ST[kept]
            going = [going[s] for s in kept]


def _places_of_prompts(rows: Sequence[SampledRow]) -> dict[tuple[int, ...], int]:
    """The distinct prompts, in the order of the rows, each with its number."""
    places: dict[tuple[int, ...], int] = {}
    for row in rows:
        places.setdefault(row.prompt_ids, len(places))
    return places


def _extend(
    row: SampledRow,
    tokens: Sequence[float],
    log_probs: Sequence[float],
    ended: Callable[[list[int]], bool],
) -> bool:
    """Append the next tokens to a row, up to its end; returns whether it has ended."""
    for token, log_prob in zip(tokens, log_probs, strict=True):
        # Checked here, and not on the device, where it would make the host wait.
        if not math.isfinite(log_prob):
            raise ModelError(
                "the policy's logits are not finite",
                got=f"a token with the log-probability {log_prob}",
                fix="go back to an earlier checkpoint, and lower the learning rate",
            )
        row.token_ids.append(int(token))
        row.log_probs.append(log_prob)
        if len(row.token_ids) == row.most or ended(row.token_ids):
            return True
    return False


class _TreeDecoder:
    """Computes each prompt once for all its rows, and samples them with tree attention."""

    def __init__(
        self,
        policy: PolicyModel,
        rows: Sequence[SampledRow],
        settings: DecodeSettings,
    ) -> None:
        self.policy = policy
        self.kept_at_most = settings.kept_at_most
        self._static = settings.static
        self._captures = policy.device.type == "cuda"
        self._max_positions = policy.max_positions
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places = _places_of_prompts(rows)
        self._rows = rows

    def start(self) -> Tensor:
        """The logits after each row's prompt, float32 (S, V)."""
        prompts = list(self._places)
        prefixes: dict[int, Prefix] = {}
        last_hidden: dict[int, Tensor] = {}  # of each prompt's last token
        for chosen in plan_micro_batches([len(ids) for ids in prompts], max_tokens=PROMPT_TOKENS):
            groups = [[prompts[p]] for p in chosen]
            keep = [(n, 0, len(prompts[p])) for n, p in enumerate(chosen)]
            batch = TreeBatch.from_groups(groups, keep=keep).to(self.policy.device)
            hidden_ND = self.policy.tree_hidden(batch, batch.reads.places_N)
            hidden_RD = hidden_ND.index_select(0, batch.reads.index_R)
            assert batch.layout.exchange is not None
            prefixes.update(zip(chosen, batch.layout.exchange.kept(), strict=True))
            last_hidden.update(zip(chosen, hidden_RD, strict=True))
        prompt_of_S = [self._places[row.prompt_ids] for row in self._rows]
        most = max(row.most for row in self._rows)
        self.decoding = Decoding(
            [prefixes[p] for p in range(len(prompts))],
            prompt_of_S,
            most_tokens=most,
            static=self._static,
        )
        hidden_PD = torch.stack([last_hidden[p] for p in range(len(prompts))])
        return self.policy.logits(hidden_PD).float()[prompt_of_S]

    def __call__(self, tokens_S: Tensor) -> Tensor:
        """The logits after one token more."""
        if self._captures and self._graph is None:
            self._capture(tokens_S)
        if self._graph is None:
            logits_SV = self._forward(tokens_S)
        else:
            self._tokens_S.copy_(tokens_S)
            self._graph.replay()
            logits_SV = self._logits_SV
        # The graph writes to the tensors that it has seen: it ends with them.
        if self.decoding.advance():
            self._graph = None
        return logits_SV

    def choose(self, rows: list[int]) -> None:
        """Go on with these of its rows."""
        self.decoding.choose(rows)
        self._graph = None

    def _capture(self, tokens_S: Tensor) -> None:
        """Record the kernels of a token once, for as long as the tensors stay where they are."""
        self._tokens_S = tokens_S.clone()
        before = [states_S.clone() for states_S in self.decoding.states]
        self._forward(self._tokens_S)  # allocates, outside the graph, what a first call allocates
        # Keys are written to the same place again; recurrent layers would take the token twice.
        for states_S, states_before_S in zip(self.decoding.states, before, strict=True):
            states_S.copy_(states_before_S)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may copy and allocate meanwhile, to score for one.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits_SV = self._forward(self._tokens_S)
            self._graph = graph
        except RuntimeError as error:  # experts that are chosen on the host, for one
            reason = str(error).splitlines()[0]
            logger.warning("Sampling without CUDA graphs, which this model refuses: %s", reason)
            self._captures = False

    def _forward(self, tokens_S: Tensor) -> Tensor:
        policy = self.policy
        decoding = self.decoding
        positions_S = decoding.positions_S
        if self._max_positions is not None:
            # Rows that have ended go on being computed, beyond the last position that the model
            # has.
            positions_S = positions_S.clamp_max(self._max_positions - 1)
        # The new tokens of all rows are one row to the layers, of which each attends to its own.
        with decoding.running() as implementation, policy.attention(implementation):
            hidden_SD = policy.backbone(
                input_ids=tokens_S[None],
                position_ids=positions_S[None],
                attention_mask=torch.ones_like(tokens_S)[None],
                use_cache=False,
            ).last_hidden_state[0]
        return policy.logits(hidden_SD).float()


class _RowDecoder:
    """For models that cannot share a prefix: transformers' own cache, and a mask of the padding on
    the left."""

    kept_at_most = 1.0

    def __init__(self, policy: PolicyModel, rows: Sequence[SampledRow], _: DecodeSettings) -> None:
        self.policy = policy
        self._parameters = inspect.signature(policy.hf.forward).parameters
        self.cache = DynamicCache(config=policy.hf.config)
        # The first is the name in transformers 5.24; the others are of earlier versions. They are
        # looked up, because a forward pass swallows a name that it does not know.
        names = ("cache", "past_key_values", "cache_params")
        cache_names = [name for name in names if name in self._parameters]
        if not cache_names:
            raise ModelError(
                "the policy cannot be sampled: its forward pass takes no cache",
                got=type(policy.hf).__name__,
                need=f"one of {', '.join(names)}",
            )
        self._cache_name = cache_names[0]
        places = _places_of_prompts(rows)
        self._of_row = [places[row.prompt_ids] for row in rows]
        prompts = [torch.tensor(prompt, device=policy.device) for prompt in places]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        # The padding is masked, so that any token will do.
        self._tokens_PL = pad_sequence(prompts, batch_first=True, padding_side="left")
        self._mask_SL = pad_sequence(masks, batch_first=True, padding_side="left")

    def start(self) -> Tensor:
        """The logits after each row's prompt, float32 (S, V)."""
        logits_PV = self._forward(self._tokens_PL)
        self.choose(self._of_row)
        return logits_PV[self._of_row]

    def __call__(self, tokens_S: Tensor) -> Tensor:
        """The logits after one token more."""
        self._mask_SL = torch.cat([self._mask_SL, torch.ones_like(tokens_S)[:, None]], dim=1)
        return self._forward(tokens_S[:, None])

    def choose(self, rows: list[int]) -> None:
        """Go on with these of its rows; one may be named several times."""
        self._mask_SL = self._mask_SL[rows]
        index = torch.tensor(rows, device=self.policy.device)
        self.cache.reorder_cache(index)  # type: ignore[arg-type]

    def _forward(self, tokens_SL: Tensor) -> Tensor:
        mask_SL = self._mask_SL
        arguments: dict[str, Any] = {
            "input_ids": tokens_SL,
            "attention_mask": mask_SL,
            "use_cache": True,
            self._cache_name: self.cache,
        }
        is_prompt = tokens_SL.shape == mask_SL.shape
        if not is_prompt and all(self.cache.is_linear):
            # State-space models: the mask is for the padding of the prompt alone.
            arguments["attention_mask"] = None
        if "position_ids" in self._parameters:
            num_new = tokens_SL.shape[1]
            positions_SL = (mask_SL.cumsum(dim=1) - 1).clamp_min(0)
            arguments["position_ids"] = positions_SL[:, -num_new:]
        if "logits_to_keep" in self._parameters:
            # else the logits of all tokens of the prompts are made
            arguments["logits_to_keep"] = 1
        with self.policy.plain_attention():
            logits: Tensor = self.policy.hf(**arguments).logits
        return logits[:, -1].float()


def _choose(
    logits_SV: Tensor, numbers_S: Tensor, temperature: float, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor]:
    """The tokens, int64 (S,), and their log-probabilities before top-k and top-p."""
    device = logits_SV.device
    if logits_SV.is_cuda and torch.are_deterministic_algorithms_enabled():
        # CUDA has no deterministic cumulative sum.
        tokens_S, log_probs_S = _choose(
            logits_SV.cpu(),
            numbers_S.cpu(),
            temperature,
            top_k,
            top_p,
        )
        return tokens_S.to(device), log_probs_S.to(device)
    if temperature != 1.0:
        logits_SV = logits_SV / temperature
    log_probs_SV = logits_SV.log_softmax(dim=-1)
    kept_SV = log_probs_SV
    if top_k is not None:
        kept_SV = TopKLogitsWarper(top_k)(None, kept_SV)
    if top_p != 1.0:
        kept_SV = TopPLogitsWarper(top_p)(None, kept_SV)
    # In float64: beside the sum of a large vocabulary a rare token's probability is below float32's
    # rounding.
    sums_SV = kept_SV.exp().cumsum(dim=-1, dtype=torch.float64)
    # What top-k and top-p leave sums to less than 1.
    targets_S1 = numbers_S[:, None] * sums_SV[:, -1:]
    index_S1 = torch.searchsorted(sums_SV, targets_S1, right=True)
    # The target can be rounded up to the whole sum, which has no token to its right.
    tokens_S = index_S1[:, 0].clamp_max(logits_SV.shape[-1] - 1)
    return tokens_S, log_probs_SV.gather(-1, tokens_S[:, None])[:, 0]
