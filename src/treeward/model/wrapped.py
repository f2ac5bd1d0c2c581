"""`WrappedModel`: a Hugging Face model and its calls; the base of `RewardModel` and `PolicyModel`.

    with model.attention(attention.TREE):
        hidden = model.backbone(...)
    with model.plain_attention():
        model.hf(...)                   # as transformers would run it

The weights are the wrapped model's, so an export loads anywhere.

Shapes: S sequences, L tokens of the longest, T tokens of a row of trees, N of them read, D hidden
size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from treeward.errors import ConfigError, ModelError
from treeward.tree import attention, current_row, mixers
from treeward.tree.batch import Batch, RowBatch, TreeBatch
from treeward.tree.token_tree import TokenIds

Layout = Literal["tree", "rows", "encoder"]
"""How a model is run: decoders on trees; decoders that cannot share a prefix as padded rows;
encoders as padded rows through their own pooling and head."""


class WrappedModel(nn.Module):
    """`hf`: the wrapped model, which computes in the dtype of its weights."""

    def __init__(self, hf: PreTrainedModel, *, layout: Layout) -> None:
        super().__init__()
        attention.register()
        self.recurrent_functions = mixers.follow_trees(hf)
        """The names of the functions of transformers by which recurrent layers follow trees."""
        self.hf = hf
        self.layout: Layout = layout
        self.tree_attention: str | None = None
        """The implementation of `treeward.tree.attention` for trees; None: the device's default."""
        self.compute_device: torch.device | None = None
        self.compute_dtype: torch.dtype | None = None
        """Of a sharded model, whose weights may have another dtype; None: the weights' dtype."""
        self.unfilled: list[Callable[[], object]] = []
        """For a model on the meta device: functions that fill its weights, once they have
        memory."""
        self._is_compiled = False
        # A reward is deterministic (Ziegler et al. 2019, p. 3), and sampling has the probabilities
        # of training.
        for owner, name in find_noise(hf):
            setattr(owner, name, 0.0)

    def fill(self, device: torch.device | str) -> None:
        """Give a model on the meta device, which may have been sharded since, memory and values
        (`filling.py`)."""
        if self.unfilled:
            self.to_empty(device=device)
        for fill in self.unfilled:
            fill()
        self.unfilled.clear()

    @property
    def backbone(self) -> nn.Module:
        base: nn.Module = self.hf.base_model
        if base is self.hf:
            base = self.hf.model  # Llama 4's text model is not where its prefix says
        return base

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.compute_device or next(self.hf.parameters()).device

    @property
    def num_embeddings(self) -> int:
        """The number of token ids of the model."""
        embeddings = self.hf.get_input_embeddings()
        assert isinstance(embeddings.weight, Tensor)
        # DeepSpeed's third stage leaves an empty weight, with the shape of the whole beside it
        return int(getattr(embeddings.weight, "ds_shape", embeddings.weight.shape)[0])

    @property
    def max_positions(self) -> int | None:
        """The maximum length of a sequence in tokens; None without a limit. Rotary encodings that
        change with the longest conversation of a batch (`dynamic`, `longrope`) are limited to the
        length where they begin to."""
        config = self.hf.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        limit = limit or getattr(config, "n_positions", None)
        limits = [limit]
        rope = getattr(config, "rope_parameters", None) or {}
        # The parameters themselves, or those of each type of layer.
        all_parameters = [rope]
        all_parameters += [value for value in rope.values() if isinstance(value, dict)]
        for parameters in all_parameters:
            if parameters.get("rope_type") in ("dynamic", "longrope"):
                limits.append(parameters.get("original_max_position_embeddings") or limit)
        for module in self.backbone.modules():
            table = getattr(module, "position_embeddings", None)
            # RoBERTa counts on from padding.
            if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                limits.append(table.num_embeddings - table.padding_idx - 1)
        return min((int(length) for length in limits if length), default=None)

    def weights(self) -> list[nn.Parameter]:
        """The floating-point parameters that may have any format, without a score head."""
        return [parameter for parameter in self.hf.parameters() if parameter.is_floating_point()]

    def cast(self, dtype: torch.dtype) -> None:
        """Hold the weights in `dtype`, and compute in it. Buffers stay: rotary frequencies lose too
        much."""
        # By `data`, so that a parameter stays the same object to adapters and optimisers.
        for parameter in self.weights():
            parameter.data = parameter.data.to(dtype)

    @contextlib.contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """A context in which the weights have `dtype`; afterwards each is the same parameter with
        the same bits."""
        before: list[tuple[nn.Parameter, torch.dtype, Tensor | None]] = []
        for parameter in self.weights():
            # A wider format holds every bit of a narrower one, so narrower weights need no copy.
            copy = None
            if parameter.dtype.itemsize >= dtype.itemsize:
                copy = parameter.data
            before.append((parameter, parameter.dtype, copy))
        self.cast(dtype)
        try:
            yield
        finally:
            for parameter, previous_dtype, copy in before:
                if copy is None:
                    parameter.data = parameter.data.to(previous_dtype)
                else:
                    parameter.data = copy

    def make_batch(self, groups: Sequence[Sequence[TokenIds]]) -> Batch:
        """Pack groups of token sequences (each a whole conversation) the way this model runs them,
        on its device."""
        return self.on_device(self.pack(groups))

    def on_device(self, packed: Batch) -> Batch:
        """A copy of a host's batch on the model's device, without waiting."""
        if self.device.type == "cuda":
            packed = packed.pin()  # a copy from pageable memory waits
        return packed.to(self.device, non_blocking=True)

    def pack(
        self,
        groups: Sequence[Sequence[TokenIds]],
        *,
        read_at: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        """`make_batch` on the host; any thread may call it. `read_at`: see
        `TreeBatch.from_groups`."""
        if self.layout == "tree":
            return TreeBatch.from_groups(groups, read_at=read_at)
        pad = getattr(self.hf.config.get_text_config(), "pad_token_id", None)
        if pad is None:
            pad = 0  # any token: the mask hides it
        return RowBatch.from_groups(groups, pad_token_id=pad, read_at=read_at)

    @contextlib.contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """A context with one of transformers' attention implementations. The setting is sticky: set
        it every time."""
        if self.hf.config._attn_implementation != implementation:
            if type(self.hf)._can_set_attn_implementation():
                self.hf.set_attn_implementation(implementation)
            # A model of recurrent layers alone has no attention to set.
            elif implementation.startswith("treeward") and not self.recurrent_functions:
                raise ModelError(
                    f"{type(self.hf).__name__} does not use transformers' attention interface",
                    fix="policy.attention=rows",
                )
        # Layers are compiled for trees alone: other calls would compile them for each new shape.
        with contextlib.ExitStack() as stance:
            if self._is_compiled and implementation != attention.FLEX:
                stance.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def plain_attention(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `hf` runs as in plain transformers, whose SDPA would ignore soft-caps
        and sinks."""
        config = self.hf.config.get_text_config()
        has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
        if has_softcap or not getattr(self.hf, "_supports_sdpa", True):
            return self.attention("eager")
        return self.attention("sdpa")

    def plain_logits(self, **inputs: Any) -> Tensor:
        """The logits of plain transformers."""
        with self.plain_attention():
            logits: Tensor = self.hf(**inputs).logits
        return logits

    @cached_property
    def head_sizes(self) -> set[int]:
        """Of the attention layers that tell theirs; those of Gemma 4 differ."""
        # From the modules: Gemma 4's configuration raises where it is asked for one size.
        sizes = (getattr(module, "head_dim", None) for module in self.backbone.modules())
        return {size for size in sizes if isinstance(size, int)}

    @property
    def implementation_on_trees(self) -> str:
        """The implementation of `treeward.tree.attention` that trees run by."""
        return self.tree_attention or attention.default_for(self.device, self.head_sizes)

    @property
    def can_compile(self) -> bool:
        """Whether `compile_layers` would change anything: layers are compiled for FlexAttention."""
        return self.layout == "tree" and self.implementation_on_trees == attention.FLEX

    def compile_layers(self, **options: Any) -> None:
        """Compile the decoder layers (`torch.compile`, with its `options`) for trees; all of a kind
        share their graphs. An attention layer is one graph. A recurrent layer is several, between
        the functions by which it follows trees; with `recompute_activations` it trains without."""
        self._is_compiled = True
        # The compiler sees all kinds of layers as one function: each has a graph for training and
        # one for evaluation.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        for layer in self.layers:
            layer.compile(**options)

    def recompute_activations(self) -> None:
        """Keep one activation per layer and compute the others again in the backward pass. Raises
        `ConfigError`."""
        # transformers has renamed it; the oldest versions that we allow have only the old name.
        enable = getattr(self.hf, "activation_checkpointing_enable", None)
        enable = enable or self.hf.gradient_checkpointing_enable
        options: dict[str, Any] = {"use_reentrant": False}
        if self.recurrent_functions:
            # The recomputation needs the row of trees too: recurrent layers look for it when they
            # run.
            options["context_fn"] = current_row.checkpointing
        try:
            enable(options)
        except ValueError as error:
            raise ConfigError(
                "this model cannot compute its activations again",
                where="policy.dtensor_cfg",
                field="activation_checkpointing",
                got=str(error),
            ) from error

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the backbone that transformers marks, as it does in nearly all models."""
        modules = self.backbone.modules()
        return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]

    def tree_hidden(self, batch: TreeBatch, at_N: Tensor) -> Tensor:
        """The last hidden states at these places of the row (int64), (N, D)."""
        implementation = self.implementation_on_trees
        if implementation == attention.FLEX:
            batch = batch.padded()  # rows of few lengths, for compiled layers
        with self.attention(implementation), current_row.over(batch.layout):
            hidden: Tensor = self.backbone(
                input_ids=batch.tokens_T[None],
                position_ids=batch.layout.positions_T[None],
                # All ones rather than None: with None transformers takes restarting positions for
                # packed sequences.
                attention_mask=torch.ones_like(batch.tokens_T)[None],
                use_cache=False,
            ).last_hidden_state
        return hidden[0].index_select(0, at_N)

    def row_hidden(self, batch: RowBatch) -> Tensor:
        """The last hidden state of every token of the padded rows, (S, L, D)."""
        with self.plain_attention():
            hidden: Tensor = self.backbone(
                input_ids=batch.tokens_SL, attention_mask=batch.mask_SL, use_cache=False
            ).last_hidden_state
        return hidden


_NOISE = re.compile("drop|jitter")
"""Names of the rates, of modules and configurations, that make a forward in training mode
random."""


def find_noise(hf: PreTrainedModel) -> Iterator[tuple[Any, str]]:
    """The module or configuration, and the name, of every rate above zero that makes a forward in
    training random."""
    for owner in (*hf.modules(), hf.config, hf.config.get_text_config()):
        for name, value in list(vars(owner).items()):
            is_rate = _NOISE.search(name) or (isinstance(owner, nn.Dropout) and name == "p")
            if is_rate and isinstance(value, float) and value > 0:
                yield owner, name
