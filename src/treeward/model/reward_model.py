"""`RewardModel`: a backbone and a float32 head that read each conversation's score at its last real
token.

    model = load_reward_model("path/or/hub-name").model
    batch = model.make_batch([[prompt_ids + completion_ids, prompt_ids + other_completion_ids]])
    scores_S = model(batch)     # float32, one per sequence

It wraps a Hugging Face `...ForSequenceClassification`. The score is read at the *last real token*
by length; Hugging Face reads at the last token that is not the padding token (transformers issue
#35352), as classifiers from elsewhere are read here too (`padding_token`).

Shapes: B rows, S sequences, L tokens of the longest, N places that are read, R reads of all
sequences, V rows of values, D hidden size, H heads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeward.errors import ModelError
from treeward.model.heads import HiddenReader, head_name, inputs_of_heads, note_inputs
from treeward.model.side_by_side import can_divide, divided, side_by_side
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.batch import Batch, Movable, RowBatch, TreeBatch
from treeward.tree.plan import distinct_sequences, order_of_parts, plan_sequences, split_group
from treeward.tree.prefix import (
    MIN_PREFIX_TOKENS,
    Prefix,
    PrefixCache,
    by_known_beginning,
    known_beginnings,
)
from treeward.tree.token_tree import TokenIds, common_prefix_length

DEFAULT_BATCH_TOKENS = 4096
"""Most tokens that scoring computes in one forward pass."""

ReadPosition = Literal["last token", "before padding", "pooled", "step marks"]


@dataclass(frozen=True, slots=True)
class FeatureBatch(Movable):
    """The head's inputs for S sequences, instead of their tokens: `features_SKD` of
    `RewardModel.features`."""

    features_SKD: Tensor
    num_computed_tokens: ClassVar[int] = 0


class _Computed(NamedTuple):
    """What a forward pass gave for groups of sequences: `values` of all their reads, on the CPU,
    and the beginnings to keep, by their tokens."""

    groups: Sequence[Sequence[int]]
    batch: Batch
    values: Tensor
    num_reused_tokens: int = 0
    kept: Sequence[tuple[TokenIds, Prefix]] = ()


class RewardModel(WrappedModel):
    """Scores of conversations, from a Hugging Face sequence classifier with one label per head,
    usually one. `hf`: the wrapped model. `layout`: see `Layout`. The head is always float32."""

    def __init__(self, hf: PreTrainedModel, *, layout: Layout = "tree") -> None:
        super().__init__(hf, layout=layout)
        self._head_name = head_name(hf)
        self.num_computed_tokens = 0
        """Tokens that `read_tokens` has computed so far."""
        self.num_row_tokens = 0
        """Tokens of the same sequences as plain rows."""
        self.num_known_tokens = self.num_embeddings
        """Tokens whose embeddings come from the checkpoint; a row added for padding is never
        scored."""
        self.beside: HiddenReader | None = None
        """What `heads` reads from the last hidden states beside the values of the head."""
        self.padding_token: int | None = None
        """For a decoder that is read as in plain transformers: the token to cut off the end of
        sequences."""
        if layout == "encoder":
            # The encoder's own forward calls its head, with hidden states in the backbone's dtype.
            head = self.head
            forward = head.forward
            note_inputs(head)

            def forward_in_float32(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                return forward(hidden.float(), *args, **kwargs)

            head.forward = forward_in_float32

    @property
    def head(self) -> nn.Module:
        """The module that turns hidden states into the score."""
        return self.hf.get_submodule(self._head_name)

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Names of the values whose sum is the score, for some published models (`published.py`);
        else empty."""
        parts: tuple[str, ...] = getattr(self.hf, "score_parts", ())
        return parts

    @property
    def num_heads(self) -> int:
        """The number of values of a conversation: the labels of the classifier, or the parts of its
        score."""
        if self.score_parts:
            return len(self.score_parts)
        if self.step_token is not None:
            return 1  # two labels, whose difference is the value of a step
        num_labels = self.hf.config.num_labels
        assert num_labels is not None
        return num_labels

    def weights(self) -> list[nn.Parameter]:
        head_parameters = set(self.head.parameters())
        return [parameter for parameter in super().weights() if parameter not in head_parameters]

    @property
    def step_token(self) -> str | None:
        """The token at which a process reward model reads each step; None for any other model."""
        token: str | None = getattr(self.hf, "step_token", None)
        return token

    @property
    def read_position(self) -> ReadPosition:
        """The position at which the score is read: `ReadContract.position`."""
        if self.layout == "encoder":
            return "pooled"
        if self.step_token is not None:
            return "step marks"
        if self.padding_token is None:
            return "last token"
        return "before padding"

    def until_padding(self, ids: TokenIds) -> TokenIds:
        """A sequence up to the token at which its score is read."""
        end = len(ids)
        # A row of padding alone is read at its first token, as by transformers' argmax.
        while end > 1 and ids[end - 1] == self.padding_token:
            end -= 1
        return ids[:end]

    def pack(
        self,
        groups: Sequence[Sequence[TokenIds]],
        *,
        read_at: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        if read_at is not None:
            return super().pack(groups, read_at=read_at)
        cut_groups = []
        read_at = []
        for group in groups:
            cut, reads = self.until_last_reads(group)
            cut_groups.append(cut)
            read_at += reads
        return super().pack(cut_groups, read_at=read_at)

    def until_last_reads(
        self, sequences: Sequence[TokenIds]
    ) -> tuple[list[TokenIds], list[Sequence[int]]]:
        """Each sequence up to the last token that the head reads, and the positions that it reads.
        Raises `ModelError` for a sequence without a token that the head needs."""
        cut: list[TokenIds] = []
        read_at: list[Sequence[int]] = []
        for ids in sequences:
            ids = self.until_padding(ids)
            positions = reads_of(self.head, ids)
            # In a causal model no read depends on what follows it: that is not computed.
            if positions:
                ids = ids[: positions[-1] + 1]
            cut.append(ids)
            read_at.append(positions)
        return cut, read_at

    def pack_one_token(self) -> Batch:
        """The smallest batch, for a process that computes only because others wait for it."""
        num_reads = reads_each(self.head) or 1
        return self.pack([[[0]]], read_at=[[0] * num_reads])

    def pack_parts(
        self, groups: Sequence[Sequence[TokenIds]], *, max_tokens: int | None
    ) -> tuple[list[Batch], Tensor | None]:
        """Batches of one forward pass each, on the host, and `order_of_parts` of their sequences:
        one batch, or several if a single group is larger than `max_tokens`. The order is of their
        values: of a process reward model, of the steps of all sequences."""
        if len(groups) != 1 or max_tokens is None:
            return [self.pack(groups)], None
        [group] = groups
        parts = split_group(group, max_tokens=max_tokens, share=self.layout == "tree")
        # The places of each sequence's values among those of the group.
        value_places: list[list[int]] = []
        num_values = 0
        for ids in group:
            end = num_values + self.num_values(ids)
            value_places.append(list(range(num_values, end)))
            num_values = end
        batches = []
        places_of_parts: list[list[int]] = []
        for part in parts:
            sequences = [group[i] for i in part.members]
            batches.append(self.pack([sequences]))
            places: list[int] = []
            for i in part.members:
                places += value_places[i]
            places_of_parts.append(places)
        return batches, order_of_parts(places_of_parts)

    def forward(self, batch: Batch) -> Tensor:
        """Scores of a model with one head, float32 (S,), one per sequence in the order of the
        batch's groups."""
        if self.score_parts:
            return self._heads(batch).sum(dim=1)
        assert self.num_heads == 1, (
            f"{self.num_heads} heads make no score: `heads` has their values"
        )
        return self._heads(batch)[:, 0].clone()  # no view: FSDP puts a hook on it

    def heads(self, batch: Batch | FeatureBatch) -> Tensor:
        """The value of each of the H heads, float32 (V, H), in the order of the batch's groups, and
        then what `beside` reads. One row for each sequence, or of a process reward model one for
        each step."""
        return self._heads(batch)

    def features(self, batch: Batch | FeatureBatch) -> Tensor:
        """The head's inputs for each sequence, (S, *feature_shape): the hidden states that it
        reads."""
        hidden_ND, index_R = self._read(batch)
        num_reads, _ = self.feature_shape
        features_SKD: Tensor = hidden_ND.index_select(0, index_R).unflatten(0, (-1, num_reads))
        return features_SKD

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(K, D) of `features`: the reads of each sequence, and the size of what is read."""
        head = self.head
        num_reads = reads_each(head)
        assert num_reads is not None, (
            "a process reward model reads sequences at any number of steps"
        )
        if isinstance(head, nn.Linear):
            return num_reads, head.in_features
        return num_reads, self.hf.config.get_text_config().hidden_size

    def _heads(self, batch: Batch | FeatureBatch) -> Tensor:
        # Apart from `heads`, around which FSDP puts the hooks that it puts around `forward`.
        if self.layout == "encoder" and isinstance(batch, RowBatch):
            if self.beside is None:
                return self._encoder_logits(batch)
            hidden_SD, values_SH = self._encoder_read(batch)
            return torch.cat([values_SH, self.beside(hidden_SD)], dim=1)
        hidden_ND, index_R = self._read(batch)
        # Before the index: a place at which several sequences end is computed once.
        values_NH = self.head_values(hidden_ND)
        if self.beside is not None:
            values_NH = torch.cat([values_NH, self.beside(hidden_ND)], dim=1)
        return values_of_reads(self.head, values_NH.index_select(0, index_R))

    def _read(self, batch: Batch | FeatureBatch) -> tuple[Tensor, Tensor]:
        """The hidden states at the places that are read, (N, D), and the index into them of every
        read, (R,)."""
        if isinstance(batch, TreeBatch):
            return self.tree_hidden(batch, batch.reads.places_N), batch.reads.index_R
        if isinstance(batch, RowBatch) and self.layout != "encoder":
            all_hidden = self.row_hidden(batch).flatten(0, 1)
            return all_hidden.index_select(0, batch.reads.places_N), batch.reads.index_R
        if isinstance(batch, FeatureBatch):
            hidden_RD = batch.features_SKD.flatten(0, 1)
        else:
            hidden_RD, _ = self._encoder_read(batch)
        return hidden_RD, torch.arange(len(hidden_RD), device=hidden_RD.device)

    def _encoder_logits(self, batch: RowBatch) -> Tensor:
        logits: Tensor = self.hf(input_ids=batch.tokens_SL, attention_mask=batch.mask_SL).logits
        return logits.float()

    def _encoder_read(self, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """The inputs of an encoder's head, (S, D): the pooled state, or the first token's; and its
        values, (S, H). Raises `ModelError` for a head that reads more."""
        with inputs_of_heads() as inputs:
            values_SH = self._encoder_logits(batch)
        hidden_SD = inputs[0]
        if hidden_SD.dim() == 3:  # all tokens, of which a head reads the first
            hidden_SD = hidden_SD[:, 0]
        # Tried on this very batch: families differ in what they hand to their head. A conversation
        # that is not a number to the backbone says nothing about the head.
        again_SH = self.head_values(hidden_SD)
        if not torch.allclose(again_SH, values_SH, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ModelError(
                "this encoder's head reads more than one hidden state",
                got=type(self.head).__name__,
                fix="set policy.reward_model_cfg.freeze_backbone=false",
            )
        return hidden_SD, values_SH

    @contextlib.contextmanager
    def reading(self, beside: HiddenReader | None) -> Iterator[None]:
        """A context in which `read_tokens` reads this beside the values of the head."""
        before = self.beside
        self.beside = beside
        try:
            yield
        finally:
            self.beside = before

    @property
    def num_columns(self) -> int:
        """The values of a row of `read_tokens`."""
        if self.beside is None:
            return self.num_heads
        return self.num_heads + self.beside.num_values

    def score_tokens(self, sequences: Sequence[TokenIds], **limits: Any) -> Tensor:
        """The values of the heads, float32 (V, H): `read_tokens` without what is `beside` them."""
        return self.read_tokens(sequences, **limits)[:, : self.num_heads]

    def read_tokens(
        self,
        sequences: Sequence[TokenIds],
        *,
        max_tokens: int | None = DEFAULT_BATCH_TOKENS,
        max_sequences: int | None = None,
        cache: PrefixCache | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """What is read of token sequences, each a whole conversation: the values of the heads, and
        then of `beside`, float32 (V, num_columns) on the CPU, in order. One row for each sequence,
        or of a process reward model one for each of its steps (`num_values`).

        `max_tokens`: of a forward pass, counted after sharing; `max_sequences`: of a forward pass;
        not both None. `cache`: holds beginnings of earlier calls, and keeps the first
        `prompt_lengths[i]` tokens of sequence i. Raises `ModelError` for a sequence that is empty,
        longer than `max_positions`, or has unknown tokens.
        """
        self._check_sequences(sequences)
        if self.layout != "tree":
            # Equal rows of a batch may round differently, and identical completions must tie
            # exactly; on a tree they are one.
            distinct, places = distinct_sequences(sequences)
            if len(distinct) < len(sequences):
                values_VX = self.read_tokens(
                    distinct, max_tokens=max_tokens, max_sequences=max_sequences
                )
                self.num_row_tokens += sum(map(len, sequences)) - sum(map(len, distinct))
                of_each = values_VX.split([self.num_values(ids) for ids in distinct])
                return torch.cat([of_each[place] for place in places])
        sequences, read_at = self.until_last_reads(sequences)
        # What FSDP gathers here is used in training as well, which tensors of the inference mode
        # cannot be.
        is_sharded = self.compute_device is not None
        with torch.no_grad() if is_sharded else torch.inference_mode():
            values: list[Tensor] = [torch.empty(0, self.num_columns)] * len(sequences)
            share = self.layout == "tree"
            if not share or (cache is not None and cache.max_bytes == 0):
                cache = None
            num_known: list[int] | None = None
            cached: list[Prefix | None] = []
            if cache is not None:
                num_known, cached = known_beginnings(cache, sequences, read_at)
            for groups in plan_sequences(
                sequences,
                max_tokens=max_tokens,
                max_sequences=max_sequences,
                share=share,
                num_cached=num_known,
            ):
                if cache is not None and num_known is not None:
                    groups = by_known_beginning(sequences, num_known, groups)

                def compute(part: Sequence[Sequence[int]]) -> _Computed:
                    # Again: these modes are of a thread, and a part may have one of its own.
                    with torch.no_grad() if is_sharded else torch.inference_mode():
                        if cache is None:
                            batch = self.make_batch([[sequences[i] for i in g] for g in part])
                            return _Computed(part, batch, self.heads(batch).cpu())
                        return self._compute_with(
                            cached,
                            sequences,
                            read_at,
                            part,
                            prompt_lengths or [0] * len(sequences),
                        )

                for computed in side_by_side(compute, self._parts(sequences, num_known, groups)):
                    members = list(itertools.chain.from_iterable(computed.groups))
                    self.num_computed_tokens += computed.batch.num_computed_tokens
                    self.num_row_tokens += sum(len(sequences[i]) for i in members)
                    if cache is not None:
                        cache.num_reused_tokens += computed.num_reused_tokens
                        for tokens, kept in computed.kept:
                            cache.put(tokens, kept)
                    counts = [self.num_values(sequences[i]) for i in members]
                    member_values = computed.values.split(counts)
                    for i, values_of_sequence in zip(members, member_values, strict=True):
                        values[i] = values_of_sequence
            # Masked attention multiplies hidden values by zero, and zero times NaN is NaN: one
            # broken conversation may break others of its batch. Alone it breaks none.
            for i, values_of_sequence in enumerate(values):
                if not values_of_sequence.isfinite().all():
                    values[i] = self.heads(self.make_batch([[sequences[i]]])).cpu()
            # The first is for no sequences at all.
            return torch.cat([torch.empty(0, self.num_columns), *values])

    def num_values(self, ids: TokenIds) -> int:
        """How many rows of `read_tokens` a sequence has: one, or of a process reward model one for
        each step."""
        if reads_each(self.head) is not None:
            return 1
        return len(reads_of(self.head, ids))

    def _compute_with(
        self,
        cached: Sequence[Prefix | None],
        sequences: Sequence[TokenIds],
        read_at: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
    ) -> _Computed:
        """The values of groups of sequences, computed only beyond the cached beginnings. `cached`:
        the beginning of each sequence, the same for all of a group."""
        prefixes: list[Prefix | None] = []
        keep: list[tuple[int, int, int]] = []
        prompts: list[TokenIds] = []
        remainders: list[list[TokenIds]] = []
        remaining_reads: list[list[int]] = []
        num_reused_tokens = 0
        for g, group in enumerate(groups):
            prefix = cached[group[0]]
            start = 0
            if prefix is not None:
                start = len(prefix)
            prefixes.append(prefix)
            num_reused_tokens += start * len(group)
            remainders.append([sequences[i][start:] for i in group])
            prompt_places: dict[tuple[int, ...], int] = {}  # each prompt of the group once
            for k, i in enumerate(group):
                remaining_reads.append([position - start for position in read_at[i]])
                prompt_places[tuple(map(int, sequences[i][: prompt_lengths[i]]))] = k
            for prompt, k in prompt_places.items():
                is_long_enough = len(prompt) >= MIN_PREFIX_TOKENS
                if is_long_enough and len(prompt) > start:  # else the cache has it
                    keep.append((g, k, len(prompt) - start))
                    prompts.append(prompt)
        batch = TreeBatch.from_groups(
            remainders, prefixes=prefixes, keep=keep, read_at=remaining_reads
        )
        batch = batch.to(self.device)
        values = self.heads(batch).cpu()
        assert batch.layout.exchange is not None
        kept = list(zip(prompts, batch.layout.exchange.kept(), strict=True))
        return _Computed(groups, batch, values, num_reused_tokens, kept)

    def _parts(
        self,
        sequences: Sequence[TokenIds],
        num_known: Sequence[int] | None,
        groups: Sequence[Sequence[int]],
    ) -> list[Sequence[Sequence[int]]]:
        """The groups of a batch in parts that are computed at the same time."""
        if not can_divide(self):
            return [groups]
        sizes = []
        for group in groups:
            size = 0
            before: TokenIds | None = None
            for i in group:
                shared = 0 if num_known is None else num_known[i]
                if before is not None and self.layout == "tree":
                    shared = common_prefix_length(np.asarray(before), np.asarray(sequences[i]))
                before = sequences[i]
                size += len(before) - shared
            sizes.append(size)
        return [[groups[g] for g in part] for part in divided(sizes)]

    def _check_sequences(self, sequences: Sequence[TokenIds]) -> None:
        limit = self.max_positions
        need_tokens = f"0 to {self.num_known_tokens - 1}, the tokens of the model's vocabulary"
        need_length = "1 token or more"
        if limit is not None:
            need_length = f"1 to {limit} tokens, the model's positions"
        for i, sequence in enumerate(sequences):
            if not len(sequence) or (limit is not None and len(sequence) > limit):
                got = f"{len(sequence)} tokens"
                need = need_length
            elif min(sequence) < 0:
                got = f"token {min(sequence)}"
                need = need_tokens
            elif max(sequence) >= self.num_known_tokens:
                got = f"token {max(sequence)}"
                need = need_tokens
            else:
                continue
            raise ModelError(
                "the model cannot read this sequence", where=f"sequence {i}", got=got, need=need
            )

    def score(
        self, data: Mapping[str, Tensor], *, max_tokens: int | None = DEFAULT_BATCH_TOKENS
    ) -> dict[str, Tensor]:
        """`{"scores": float32 (B,)}` for `{"input_ids": (B, L), "input_lengths": (B,)}`, rows
        padded on the right, as NeMo RL's `Policy.score`; several heads give (B, H). Raises
        `ModelError` for an invalid length, and for a score that is not finite."""
        ids_BL = data["input_ids"]
        width = ids_BL.shape[1]
        rows = []
        for row, length in zip(ids_BL.tolist(), data["input_lengths"].tolist(), strict=True):
            if not 0 < length <= width:
                raise ModelError("a row cannot have this length", got=length, need=f"1 to {width}")
            rows.append(row[:length])
        values_BH = self.score_tokens(rows, max_tokens=max_tokens)
        for i, values in enumerate(values_BH.tolist()):
            check_finite(values, f"row {i}", len(rows[i]))
        if self.score_parts:
            return {"scores": values_BH.sum(dim=1)}
        if self.num_heads == 1:
            return {"scores": values_BH[:, 0]}
        return {"scores": values_BH}

    def head_values(self, hidden_SD: Tensor) -> Tensor:
        """The values (S, H) of last hidden states (S, D)."""
        head = self.head
        hidden_SD = hidden_SD.float()
        if self.layout == "encoder":
            if not isinstance(head, nn.Linear):
                hidden_SD = hidden_SD[:, None]  # such a head reads the first token of each row
            values: Tensor = head(hidden_SD)
            return values
        if not isinstance(head, nn.Linear):
            with torch.autocast(hidden_SD.device.type, enabled=False):
                values = head.forward(hidden_SD)  # not its hooks: FSDP has gathered it already
            return values
        # Not a matrix product: it may round two rows differently, and identical completions must
        # tie exactly.
        columns = [(hidden_SD * weight_D).sum(dim=-1) for weight_D in head.weight.float()]
        values_SH = torch.stack(columns, dim=1)
        if head.bias is not None:
            values_SH = values_SH + head.bias.float()
        return values_SH


def reads_of(head: nn.Module, ids: TokenIds) -> Sequence[int]:
    """The positions at which a head reads a sequence, ascending. Raises `ModelError` if it finds
    none."""
    if hasattr(head, "reads"):
        reader: Any = head
        positions: Sequence[int] = reader.reads(ids)
        return positions
    return (len(ids) - 1,)


def reads_each(head: nn.Module) -> int | None:
    """How many reads a head makes of each sequence; None if that depends on the sequence."""
    number: int | None = getattr(head, "reads_each", 1)
    return number


def values_of_reads(head: nn.Module, values_RH: Tensor) -> Tensor:
    """What a head makes of the values at its reads, one sequence after another: the values of each
    sequence (S, H), or of each read if the head keeps them apart."""
    if hasattr(head, "combine"):
        gate: Any = head
        combined: Tensor = gate.combine(values_RH)
        return combined
    return values_RH


def check_finite(values: Sequence[float], name: str, num_tokens: int) -> None:
    """Raise `ModelError` if one of a conversation's values is not finite."""
    if not all(map(math.isfinite, values)):
        raise ModelError(
            "the model gives a score that is not finite",
            got=f"{list(values)} for {name} of {num_tokens} tokens",
            fix="score in float32 (--dtype float32); if it persists, the weights are broken",
        )
