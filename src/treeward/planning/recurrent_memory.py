"""What recurrent layers keep of each token for the backward pass, by arithmetic that anyone can
check by hand.

    mixer = find_mixer(layer, on_cpu=True, on_trees=True)
    mixer.shape.kept_bytes(itemsize=2, has_adapters=False)

It counts PyTorch's own functions: those of this package where trees are computed on a CPU, and else
those of transformers (5.23). They compute in float32, so most terms are numbers of 4 bytes; b is
the itemsize of the run. Fused kernels for a GPU keep other tensors, which were not measured
(`FUSED_KERNELS`). c is the number of tokens of a chunk: 32 for the gated delta rule over trees on a
CPU, 64 for it elsewhere, at most 64 for Mamba 2 over trees, and the model's own for Mamba 2 over
rows. A last chunk that is not full takes as much as a full one.

**A convolution** over D channels keeps its input and the input of its activation: 8 D bytes over
trees on a CPU, 2 b D elsewhere.

**Gated delta rule**: j key heads of q numbers, h value heads of v numbers; the convolution has D = 2
j q + h v. Numbers in float32:

    over trees on a CPU (`tree/gated_delta.py`)
      8 j q       queries and keys before and after their normalisation, and the copies that the
                  two products of queries and keys with keys make
      2 j c       these two products
      4 h c       the decays, the system before and after beta, and the products within chunks
      2 h (q + v) the right side of the system and its solution
      2 h q       queries and keys of each value head, with their decays
      2 h v       the new values, and those of the chunks that have children
      2 h q v / c the state that each chunk starts from, before and after its decay
    elsewhere (`torch_chunk_gated_delta_rule`)
      12 h q      queries, keys and their products with beta and decays, and copies for products
      3 h v       values, the solution for them, and the new values
      5 h c       the decays, two products, the system, and the products within chunks
      h q v / c   the state that each chunk starts from
    both
      12 h        the gates, their activations and decays, and the lengths of queries and keys

and the norm with its gate, which stands before the last projection, keeps (12 + 3 b) h v bytes: its
input, gate and activated gate in float32; its normalised input, their product, and the input of the
projection.

**Mamba 2** (`mamba2_chunk_scan`): h heads of p numbers, w = h p, g groups, states of n numbers; the
convolution has D = w + 2 g n. Numbers in float32:

    5 w         values before and after the time step, copies for two products, what states give
    5 h n       keys and queries: copies for the four products that they are in, and decayed keys
    3 h c       the decays, the products of queries and keys, and both together
    2 w n / c   the states of the chunks, and those that the chunks start from
    12 h        time steps and decays

The norm with its gate keeps (16 + 2 b) w bytes: its input, gate, activated gate and their product in
float32; its normalised input, and the input of the last projection. In float32 the gate is no copy
but a part of the first projection's output, which stays whole: 4 (w + 2 g n + h) more. Without a
norm it is 4 w + 2 b w, and that projection's output. Decays between all pairs of chunks are left
out: of 8192 tokens they are 2 h.

**Mamba 1**: m channels, states of n numbers; the convolution has D = m.

    12 m n      decays, the states that tokens start from, and those that they end with, in float32
    16 m        time steps, values, their product, and the output, in float32
    6 b m       the input of the time steps' layer, the time steps before their activation, both
                halves of the first projection's output, the activated gate, and the last
                projection's input
    16 n        keys and queries

**Short convolution** (LFM2) over the d hidden channels: the input of the convolution, 4 d bytes over
trees on a CPU and b d elsewhere; 5 b d for the three parts of the first projection's output, the
output of the convolution, and the last projection's input.

A mixer's input, b d, counts with the layer's other inputs (`memory.py`).

**Without gradients**, as the prompts of a sampling are read (`sampling_memory.py`), transformers'
functions compute the rule, and the most at a time is

    gated delta rule    b (D + 2 h v + 2 j q) + 4 (5 h v + 5 h q + 3 h c + h q v / c + 12 h)
    Mamba 2             b (2 D + 2 w + 2 g n + h) + 4 (7 w + 3 h n + 3 h c + 3 w n / c + 7 h)
    Mamba 1             7 b m + 4 (4 m n + 6 m)
    short convolution   5 b d + 12 d

**With adapters** the mixer's other weights are frozen, and what only their gradients need is not
kept: the input of a norm's weight (b h v, b w), what the skip weight D of Mamba is multiplied with
(4 w, 4 m), and the input of Mamba's last projection (b w, b m), which has no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from treeward.tree.mixers import CPU_CHUNK, GPU_CHUNK

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """j, q, h, v and c of the formula. `by_tree`: by the arithmetic of `tree/gated_delta.py`."""

    key_heads: int
    key_size: int
    heads: int
    value_size: int
    chunk: int
    by_tree: bool

    def kept_bytes(self, itemsize: int, *, has_adapters: bool) -> int:
        """Of a token."""
        keys = self.key_heads * self.key_size
        keys_of_values = self.heads * self.key_size
        values = self.heads * self.value_size
        products = self.heads * self.chunk
        states = keys_of_values * self.value_size // self.chunk
        if self.by_tree:
            rule = 8 * keys + 2 * self.key_heads * self.chunk + 4 * products
            rule += 4 * keys_of_values + 4 * values + 2 * states
        else:
            rule = 12 * keys_of_values + 3 * values + 5 * products + states
        rule += 12 * self.heads
        convolution = _convolution_bytes(2 * keys + values, itemsize, self.by_tree)
        norm = (12 + 3 * itemsize) * values
        if has_adapters:
            norm -= itemsize * values
        return convolution + _FLOAT32 * rule + norm

    @property
    def num_of_state(self) -> int:
        """The numbers of a state."""
        return self.heads * self.key_size * self.value_size

    def bytes_without_gradients(self, itemsize: int) -> int:
        """The most at a time, of a token."""
        keys = self.key_heads * self.key_size
        values = self.heads * self.value_size
        inputs = itemsize * (4 * keys + 3 * values)
        rule = 5 * values + 5 * self.heads * self.key_size + 3 * self.heads * self.chunk
        rule += self.num_of_state // self.chunk + 12 * self.heads
        return inputs + _FLOAT32 * rule

    def transient_bytes(self, itemsize: int) -> int:
        """Of a token, for a short time in the backward pass: gradients of the norm with its
        gate."""
        return 4 * _FLOAT32 * self.heads * self.value_size


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """h, p, g, n and c of the formula."""

    heads: int
    head_size: int
    groups: int
    state_size: int
    chunk: int
    has_norm: bool
    by_tree: bool

    def kept_bytes(self, itemsize: int, *, has_adapters: bool) -> int:
        """Of a token."""
        width = self.heads * self.head_size
        keys_and_queries = 2 * self.groups * self.state_size
        scan = 5 * width + 5 * self.heads * self.state_size + 3 * self.heads * self.chunk
        scan += 2 * width * self.state_size // self.chunk + 12 * self.heads
        convolution = _convolution_bytes(width + keys_and_queries, itemsize, self.by_tree)
        kept = convolution + _FLOAT32 * scan + self._end_bytes(itemsize)
        if has_adapters:
            kept -= (_FLOAT32 + itemsize) * width
            if self.has_norm:
                kept -= itemsize * width
        return kept

    @property
    def num_of_state(self) -> int:
        """The numbers of a state."""
        return self.heads * self.head_size * self.state_size

    def bytes_without_gradients(self, itemsize: int) -> int:
        """The most at a time, of a token."""
        width = self.heads * self.head_size
        keys_and_queries = 2 * self.groups * self.state_size
        inputs = itemsize * (4 * width + 3 * keys_and_queries + self.heads)
        scan = 7 * width + 3 * self.heads * (self.state_size + self.chunk)
        scan += 3 * self.num_of_state // self.chunk + 7 * self.heads
        return inputs + _FLOAT32 * scan

    def _end_bytes(self, itemsize: int) -> int:
        """What stands behind the scan: the norm, the gate and the last projection."""
        width = self.heads * self.head_size
        beside_gate = width + 2 * self.groups * self.state_size + self.heads
        if not self.has_norm:
            return 4 * width + 2 * itemsize * width + itemsize * (width + beside_gate)
        end = (16 + 2 * itemsize) * width
        if itemsize == _FLOAT32:
            end += itemsize * beside_gate
        return end

    def transient_bytes(self, itemsize: int) -> int:
        """Of a token: gradients of the norm with its gate; or later, when what that has kept is
        free, of the decays and the products within chunks."""
        of_norm = 4 * _FLOAT32 * self.heads * self.head_size
        of_chunks = 2 * _FLOAT32 * self.heads * self.chunk - self._end_bytes(itemsize)
        return max(of_norm, of_chunks)


@dataclass(frozen=True, slots=True)
class Mamba1Shape:
    """m and n of the formula."""

    channels: int
    state_size: int
    by_tree: bool

    def kept_bytes(self, itemsize: int, *, has_adapters: bool) -> int:
        """Of a token."""
        states = 3 * _FLOAT32 * self.channels * self.state_size
        others = (16 + 6 * itemsize) * self.channels + 16 * self.state_size
        if has_adapters:
            others -= (_FLOAT32 + itemsize) * self.channels
        return states + others + _convolution_bytes(self.channels, itemsize, self.by_tree)

    @property
    def num_of_state(self) -> int:
        """The numbers of a state."""
        return self.channels * self.state_size

    def bytes_without_gradients(self, itemsize: int) -> int:
        """The most at a time, of a token."""
        states = _FLOAT32 * (4 * self.num_of_state + 6 * self.channels)
        return states + 7 * itemsize * self.channels

    def transient_bytes(self, itemsize: int) -> int:
        """Of a token, at the end of the forward pass: the states one by one, what is written to
        them, and four tensors of the channels."""
        return _FLOAT32 * (2 * self.channels * self.state_size + 4 * self.channels)


@dataclass(frozen=True, slots=True)
class ShortConvolutionShape:
    """d of the formula."""

    channels: int
    by_tree: bool

    def kept_bytes(self, itemsize: int, *, has_adapters: bool) -> int:
        """Of a token."""
        of_input = _FLOAT32 if self.by_tree else itemsize
        return (of_input + 5 * itemsize) * self.channels

    @property
    def num_of_state(self) -> int:
        """None but the inputs of the convolution."""
        return 0

    def bytes_without_gradients(self, itemsize: int) -> int:
        """The most at a time, of a token."""
        return (5 * itemsize + 3 * _FLOAT32) * self.channels

    def transient_bytes(self, itemsize: int) -> int:
        """Of a token, in the backward pass: the gradient of the first projection's output."""
        return 3 * itemsize * self.channels


MixerShape = GatedDeltaShape | Mamba2Shape | Mamba1Shape | ShortConvolutionShape

FUSED_KERNELS: Mapping[type, str] = {
    GatedDeltaShape: "flash-linear-attention",
    Mamba2Shape: "mamba-ssm",
    Mamba1Shape: "mamba-ssm",
    ShortConvolutionShape: "causal-conv1d",
}
"""The package whose kernels transformers calls instead, if it is installed on a GPU."""


@dataclass(frozen=True, slots=True)
class LayerMixer:
    """A recurrent module of a layer, and its shape."""

    module: nn.Module
    shape: MixerShape

    def state_bytes(self, itemsize: int, *, on_trees: bool) -> int:
        """What a conversation that is sampled keeps of its tokens (`sampling_memory.py`)."""
        # Falcon-H1 multiplies the inputs by a buffer, which is float32 in a model that was not
        # loaded.
        multipliers = getattr(self.module, "mup_vector", None)
        if isinstance(multipliers, Tensor):
            itemsize = max(itemsize, multipliers.itemsize)
        of_inputs = 0
        for module in self.module.modules():
            if isinstance(module, nn.Conv1d):
                # transformers' cache has room for the next input too.
                num_inputs = module.kernel_size[0]
                if on_trees:
                    num_inputs -= 1
                of_inputs += itemsize * num_inputs * module.in_channels
        return of_inputs + _FLOAT32 * self.shape.num_of_state


def find_mixer(layer: nn.Module, *, on_cpu: bool, on_trees: bool) -> LayerMixer | None:
    """The recurrent module of a layer; None without one whose formula is known."""
    by_tree = on_cpu and on_trees
    for module in layer.modules():
        shape = _shape_of(module, by_tree=by_tree, on_trees=on_trees)
        if shape is not None:
            return LayerMixer(module, shape)
    return None


def _shape_of(module: Any, *, by_tree: bool, on_trees: bool) -> MixerShape | None:
    # By attributes: every family has classes of its own, with the same names in them.
    if hasattr(module, "num_k_heads") and hasattr(module, "A_log"):
        return GatedDeltaShape(
            key_heads=module.num_k_heads,
            key_size=module.head_k_dim,
            heads=module.num_v_heads,
            value_size=module.head_v_dim,
            chunk=CPU_CHUNK if by_tree else GPU_CHUNK,
            by_tree=by_tree,
        )
    if hasattr(module, "ssm_state_size") and hasattr(module, "A_log"):
        # Mamba 1 has a decay for each channel and state, Mamba 2 one for each head.
        if module.A_log.dim() == 2:
            return Mamba1Shape(
                channels=module.intermediate_size,
                state_size=module.ssm_state_size,
                by_tree=by_tree,
            )
        if module.A_log.dim() == 1:
            chunk = module.chunk_size
            if on_trees:
                chunk = min(chunk, GPU_CHUNK)
            return Mamba2Shape(
                heads=module.num_heads,
                head_size=module.head_dim,
                groups=module.n_groups,
                state_size=module.ssm_state_size,
                chunk=chunk,
                has_norm=getattr(module, "norm", None) is not None,
                by_tree=by_tree,
            )
    is_short = "ShortConv" in type(module).__name__ and isinstance(
        getattr(module, "conv", None), nn.Conv1d
    )
    if is_short:
        return ShortConvolutionShape(channels=module.conv.in_channels, by_tree=by_tree)
    return None


def _convolution_bytes(channels: int, itemsize: int, by_tree: bool) -> int:
    """The input of the convolution and that of its activation; `shifted_sums` has both in
    float32."""
    size = _FLOAT32 if by_tree else itemsize
    return 2 * size * channels
