"""`RewardModel`: a backbone and a float32 head that read each conversation's score at its last real token.

    model = load_reward_model("path/or/hub-name").model
    batch = model.make_batch([[prompt_ids + completion_ids, prompt_ids + other_completion_ids]])
    scores_S = model(batch)     # float32, one per sequence

It wraps a Hugging Face `...ForSequenceClassification`. The score is read at the *last real token* by length; Hugging
Face reads at the last token that is not the padding token (transformers issue #35352), as classifiers from elsewhere
are read here too (`padding_token`).

Shapes: B rows, S sequences, L tokens of the longest, N hidden states, R reads per sequence, D hidden size, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeward.errors import ModelError
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.batch import Batch, Movable, RowBatch, TreeBatch, order_of_parts, plan_sequences, split_group
from treeward.tree.prefix import MIN_PREFIX_TOKENS, Prefix, PrefixCache
from treeward.tree.token_tree import TokenIds

DEFAULT_BATCH_TOKENS = 4096
"""Most tokens that scoring computes in one forward pass."""

HEAD_NAMES = ("score", "classifier", "classification_head", "vqa_classifier", "sequence_summary")
"""Names that sequence classifiers of transformers give their head."""


@dataclass(frozen=True, slots=True)
class FeatureBatch(Movable):
    """The head's inputs for S sequences, instead of their tokens: `features_SRD` of `RewardModel.features`."""

    features_SRD: Tensor
    num_computed_tokens: ClassVar[int] = 0


class RewardModel(WrappedModel):
    """Scores of conversations, from a Hugging Face sequence classifier with one label per head, usually one. `hf`: the
    wrapped model. `layout`: see `Layout`. The head is always float32."""

    def __init__(self, hf: PreTrainedModel, *, layout: Layout = "tree") -> None:
        super().__init__(hf, layout=layout)
        self.num_computed_tokens = self.num_row_tokens = 0
        """Tokens that `score_tokens` has computed so far, and tokens of the plain rows."""
        self.num_known_tokens = self.num_embeddings
        """Tokens whose embeddings come from the checkpoint; a row added for padding is never scored."""
        self.padding_token: int | None = None
        """For a decoder that is read as in plain transformers: the token to cut off the end of sequences."""
        if layout == "encoder":
            _compute_in_float32(self.head)

    @property
    def head(self) -> nn.Module:
        """The module that turns hidden states into the score."""
        name = head_name(self.hf)
        return self.hf.get_submodule(name)

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Names of the values whose sum is the score, for some published models (`published.py`); else empty."""
        parts: tuple[str, ...] = getattr(self.hf, "score_parts", ())
        return parts

    @property
    def num_heads(self) -> int:
        """The number of values of a conversation: the labels of the classifier, or the parts of its score."""
        if self.score_parts:
            return len(self.score_parts)
        num_labels = self.hf.config.num_labels
        assert num_labels is not None
        return num_labels

    def weights(self) -> list[nn.Parameter]:
        head_parameters = set(self.head.parameters())
        return [parameter for parameter in super().weights() if parameter not in head_parameters]

    @property
    def gate_pattern(self) -> tuple[int, ...] | None:
        """Tokens at whose last occurrence the head reads too; None for a head that reads at the last token alone."""
        pattern: tuple[int, ...] | None = getattr(self.head, "gate_pattern", None)
        return pattern

    @property
    def step_token(self) -> str | None:
        """The token at which a process reward model reads each step; None for any other model."""
        token: str | None = getattr(self.hf, "step_token", None)
        return token

    @property
    def read_position(self) -> Literal["last token", "before padding", "pooled"]:
        """The position at which the score is read: `ReadContract.position`."""
        if self.layout == "encoder":
            return "pooled"
        return "last token" if self.padding_token is None else "before padding"

    def until_padding(self, ids: TokenIds) -> TokenIds:
        """A sequence up to the token at which its score is read."""
        end = len(ids)
        while end > 1 and ids[end - 1] == self.padding_token:
            end -= 1
        return ids[:end]

    def pack(self, groups: Sequence[Sequence[TokenIds]]) -> Batch:
        groups = [[self.until_padding(ids) for ids in group] for group in groups]
        packed = super().pack(groups)
        if self.gate_pattern is None:
            return packed
        return packed.also_reading([_find_last(ids, self.gate_pattern) for group in groups for ids in group])

    def pack_parts(
        self, groups: Sequence[Sequence[TokenIds]], *, max_tokens: int | None
    ) -> tuple[list[Batch], Tensor | None]:
        """Batches of one forward pass each, on the host, and `order_of_parts` of their sequences: one batch, or several
        if a single group is larger than `max_tokens`."""
        if len(groups) != 1 or max_tokens is None:
            return [self.pack(groups)], None
        parts = split_group(groups[0], max_tokens=max_tokens, share=self.layout == "tree")
        order_S = order_of_parts([part.members for part in parts])
        return [self.pack([[groups[0][i] for i in part.members]]) for part in parts], order_S

    def forward(self, batch: Batch) -> Tensor:
        """Scores of a model with one head, float32 (S,), one per sequence in the order of the batch's groups."""
        if self.score_parts:
            return self._heads(batch).sum(dim=1)
        assert self.num_heads == 1, f"{self.num_heads} heads make no score: `heads` has their values"
        return self._heads(batch)[:, 0].clone()  # no view: FSDP puts a hook on it

    def heads(self, batch: Batch | FeatureBatch) -> Tensor:
        """The value of each of the H heads, float32 (S, H), one row per sequence in the order of the batch's groups."""
        return self._heads(batch)

    def features(self, batch: Batch | FeatureBatch) -> Tensor:
        """The head's inputs for each sequence, (S, *feature_shape): R hidden states, the second one for a gate."""
        hidden_ND, places = self._read(batch)
        return torch.stack([hidden_ND.index_select(0, at_S) for at_S in places], dim=1)

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(R, D) of `features`."""
        size = self.hf.config.get_text_config().hidden_size
        head = self.head
        return 1 if self.gate_pattern is None else 2, head.in_features if isinstance(head, nn.Linear) else size

    def _heads(self, batch: Batch | FeatureBatch) -> Tensor:
        if self.layout == "encoder" and isinstance(batch, RowBatch):
            return self._encoder_logits(batch)
        hidden_ND, places = self._read(batch)
        values_NH = self.head_values(hidden_ND)
        values_SH = values_NH.index_select(0, places[0])
        if self.gate_pattern is None:
            return values_SH
        assert len(places) == 2, "the batch was not made by `pack`"
        return values_SH[:, : self.num_heads] * values_NH.index_select(0, places[1])[:, self.num_heads :]

    def _read(self, batch: Batch | FeatureBatch) -> tuple[Tensor, list[Tensor]]:
        """Hidden states (N, D), and the indices of the R states that the head reads of each sequence, (S,) each."""
        if isinstance(batch, TreeBatch):
            places = [batch.read_of_S] if batch.also_S is None else [batch.read_of_S, batch.also_S]
            return self.tree_hidden(batch, batch.reads_N), places
        if isinstance(batch, FeatureBatch):
            size, reads, _ = batch.features_SRD.shape
            hidden_ND = batch.features_SRD.transpose(0, 1).flatten(0, 1)
        elif self.layout == "encoder":
            hidden_ND, size, reads = self._encoder_hidden(batch), len(batch.lengths_S), 1
        else:
            at = [batch.lengths_S - 1] if batch.also_S is None else [batch.lengths_S - 1, batch.also_S]
            hidden_SLD, size, reads = self.row_hidden(batch), len(batch.lengths_S), len(at)
            rows = torch.arange(size, device=self.device)
            hidden_ND = torch.cat([hidden_SLD[rows, positions] for positions in at])
        return hidden_ND, list(torch.arange(reads * size, device=self.device).view(reads, size))

    def _encoder_logits(self, batch: RowBatch) -> Tensor:
        logits: Tensor = self.hf(input_ids=batch.tokens_SL, attention_mask=batch.mask_SL).logits
        return logits.float()

    def _encoder_hidden(self, batch: RowBatch) -> Tensor:
        """The inputs of an encoder's head, (S, D): the pooled state, or the first token's. Raises `ModelError` for a
        head that reads more."""
        inputs: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            values_SH = self._encoder_logits(batch)
        finally:
            hook.remove()
        hidden_SD = inputs[0] if inputs[0].dim() == 2 else inputs[0][:, 0]
        if not torch.allclose(self.head_values(hidden_SD), values_SH, rtol=1e-3, atol=1e-4):
            summary, got = "this encoder's head reads more than one hidden state", type(self.head).__name__
            raise ModelError(summary, got=got, fix="set policy.reward_model_cfg.freeze_backbone=false")
        return hidden_SD

    def score_tokens(
        self,
        sequences: Sequence[TokenIds],
        *,
        max_tokens: int | None = DEFAULT_BATCH_TOKENS,
        max_sequences: int | None = None,
        cache: PrefixCache | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Values of token sequences, each a whole conversation: float32 (S, H) on the CPU, in order.

        `max_tokens`: of a forward pass, counted after sharing; `max_sequences`: of a forward pass; not both None.
        `cache`: holds beginnings of earlier calls, and keeps the first `prompt_lengths[i]` tokens of sequence i. Raises
        `ModelError` for a sequence that is empty, longer than `max_positions`, or has unknown tokens.
        """
        self._check_sequences(sequences)
        sequences = [self.until_padding(ids) for ids in sequences]
        # what FSDP gathers here is used in training as well, which tensors of the inference mode cannot be
        is_sharded = self.compute_device is not None
        with torch.no_grad() if is_sharded else torch.inference_mode():
            values_SH = torch.full((len(sequences), self.num_heads), torch.nan)
            share = self.layout == "tree"
            if not share or cache is None or cache.max_bytes == 0 or self.gate_pattern is not None:
                cache = None
            num_known = None if cache is None else [cache.match(sequence) for sequence in sequences]
            for groups in plan_sequences(
                sequences, max_tokens=max_tokens, max_sequences=max_sequences, share=share, num_cached=num_known
            ):
                if cache is None:
                    batch = self.make_batch([[sequences[i] for i in group] for group in groups])
                    values = self.heads(batch)
                else:
                    groups = [part for group in groups for part in _alike(cache, sequences, group)]
                    batch, values = self._heads_with(cache, sequences, groups, prompt_lengths or [0] * len(sequences))
                self.num_computed_tokens += batch.num_computed_tokens
                self.num_row_tokens += sum(len(sequences[i]) for group in groups for i in group)
                values_SH[[i for group in groups for i in group]] = values.cpu()
            # Masked attention multiplies hidden values by zero, and zero times NaN is NaN: one broken conversation may
            # break others.
            for i in (~values_SH.isfinite().all(dim=1)).nonzero().flatten().tolist():
                values_SH[i] = self.heads(self.make_batch([[sequences[i]]])).cpu()[0]
            return values_SH

    def _heads_with(
        self,
        cache: PrefixCache,
        sequences: Sequence[TokenIds],
        groups: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
    ) -> tuple[TreeBatch, Tensor]:
        """The values of groups of sequences, computed only beyond the cached beginnings; and the batch."""
        prefixes: list[Prefix | None] = []
        keep: list[tuple[int, int, int]] = []
        prompts: list[TokenIds] = []
        for g, group in enumerate(groups):
            num_known = cache.match(sequences[group[0]])
            prefixes.append(cache.get(sequences[group[0]], num_known) if num_known else None)
            cache.num_reused_tokens += num_known * len(group)
            prompt_places = {tuple(map(int, sequences[i][: prompt_lengths[i]])): k for k, i in enumerate(group)}
            for prompt, k in prompt_places.items():
                if len(prompt) > max(num_known, MIN_PREFIX_TOKENS - 1):
                    keep.append((g, k, len(prompt) - num_known))
                    prompts.append(prompt)
        starts = [0 if prefix is None else len(prefix) for prefix in prefixes]
        remainders = [[sequences[i][start:] for i in group] for start, group in zip(starts, groups, strict=True)]
        batch = TreeBatch.from_groups(remainders, prefixes=prefixes, keep=keep).to(self.device)
        values = self.heads(batch)
        assert batch.layout.exchange is not None
        for tokens, kept in zip(prompts, batch.layout.exchange.kept(), strict=True):
            cache.put(tokens, kept)
        return batch, values

    def _check_sequences(self, sequences: Sequence[TokenIds]) -> None:
        limit, num_tokens_known = self.max_positions, self.num_known_tokens
        for i, sequence in enumerate(sequences):
            if not len(sequence) or (limit is not None and len(sequence) > limit):
                got = f"{len(sequence)} tokens"
                need = "1 token or more" if limit is None else f"1 to {limit} tokens, the model's positions"
            elif min(sequence) < 0 or max(sequence) >= num_tokens_known:
                got = f"token {min(sequence) if min(sequence) < 0 else max(sequence)}"
                need = f"0 to {num_tokens_known - 1}, the tokens of the model's vocabulary"
            else:
                continue
            raise ModelError("the model cannot read this sequence", where=f"sequence {i}", got=got, need=need)

    def score(self, data: Mapping[str, Tensor], *, max_tokens: int | None = DEFAULT_BATCH_TOKENS) -> dict[str, Tensor]:
        """`{"scores": float32 (B,)}` for `{"input_ids": (B, L), "input_lengths": (B,)}`, rows padded on the right, as
        NeMo RL's `Policy.score`; several heads give (B, H). Raises `ModelError` for an invalid length, and for a score
        that is not finite."""
        ids_BL, lengths_B = data["input_ids"], data["input_lengths"].tolist()
        if wrong := [length for length in lengths_B if not 0 < length <= ids_BL.shape[1]]:
            raise ModelError("a row cannot have this length", got=wrong[0], need=f"1 to {ids_BL.shape[1]}")
        rows = [row[:length] for row, length in zip(ids_BL.tolist(), lengths_B, strict=True)]
        values_BH = self.score_tokens(rows, max_tokens=max_tokens)
        for i, values in enumerate(values_BH.tolist()):
            check_finite(values, f"row {i}", len(rows[i]))
        if self.score_parts:
            return {"scores": values_BH.sum(dim=1)}
        return {"scores": values_BH[:, 0] if self.num_heads == 1 else values_BH}

    def head_values(self, hidden_SD: Tensor) -> Tensor:
        """The values (S, H) of last hidden states (S, D)."""
        head, hidden_SD = self.head, hidden_SD.float()
        if self.layout == "encoder":
            values: Tensor = head(hidden_SD if isinstance(head, nn.Linear) else hidden_SD[:, None])
            return values
        if not isinstance(head, nn.Linear):
            with torch.autocast(hidden_SD.device.type, enabled=False):
                values = head.forward(hidden_SD)  # not its hooks: FSDP has gathered it already
            return values
        # Not a matrix product: it may round two rows differently, and identical completions must tie exactly.
        values_SH = torch.stack([(hidden_SD * weight_D).sum(dim=-1) for weight_D in head.weight.float()], dim=1)
        return values_SH if head.bias is None else values_SH + head.bias.float()


def _find_last(ids: TokenIds, pattern: tuple[int, ...]) -> int:
    """The start of the last occurrence of these tokens. Raises `ModelError` for none."""
    array = np.asarray(ids)
    if len(array) >= len(pattern):
        places = (np.lib.stride_tricks.sliding_window_view(array, len(pattern)) == pattern).all(axis=1).nonzero()[0]
        if len(places):
            return int(places[-1])
    summary, got = "this model reads where the prompt ends, and the conversation does not show where", list(pattern)
    raise ModelError(summary, got=f"{len(array)} tokens without {got}", fix="use the model's own chat template")


def _alike(cache: PrefixCache, sequences: Sequence[TokenIds], group: Sequence[int]) -> list[list[int]]:
    """The sequences of a group by their cached beginning, so that each part continues one prefix."""
    parts: dict[bytes, list[int]] = {}
    for i in group:
        prefix = np.asarray(sequences[i][: cache.match(sequences[i])], dtype=np.int64)
        parts.setdefault(prefix.tobytes(), []).append(i)
    return list(parts.values())


def check_finite(values: Sequence[float], name: str, num_tokens: int) -> None:
    """Raise `ModelError` if one of a conversation's values is not finite."""
    if not all(map(math.isfinite, values)):
        raise ModelError(
            "the model gives a score that is not finite",
            got=f"{list(values)} for {name} of {num_tokens} tokens",
            fix="score in float32 (--dtype float32); if it persists, the weights are broken",
        )


def head_name(hf: PreTrainedModel) -> str:
    """The name of the classification head: `score` in decoders, `classifier` in most encoders. Raises `ModelError` if
    there is none."""
    for name in HEAD_NAMES:
        if isinstance(getattr(hf, name, None), nn.Module):
            return name
    raise ModelError(f"{type(hf).__name__} has no head that treeward knows", need="a `score` or `classifier` module")


def is_of_head(name: str) -> bool:
    """Whether a weight of this name belongs to the classification head."""
    return name.split(".")[0] in HEAD_NAMES


def stored_heads(hf: PreTrainedModel) -> tuple[str, ...]:
    """The names of the head's modules on disk, which some published models change."""
    names: tuple[str, ...] = getattr(hf, "stored_head", None) or (head_name(hf),)
    return names


def _compute_in_float32(head: nn.Module) -> None:
    original = head.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(hidden.float(), *args, **kwargs)

    head.forward = forward
