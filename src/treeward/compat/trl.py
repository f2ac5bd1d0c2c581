"""TRL's trainers on prefix trees: change the import, and keep the script.

    from treeward.compat.trl import GRPOTrainer, RewardTrainer      # instead of `from trl import`

They are subclasses of TRL's, with its arguments, datasets, losses, metrics, callbacks and
checkpoints. Only the model's forward differs: it takes the padding off and packs the rows into
trees, so that what rows have in common at their beginning is computed once, and gives what the
model's own forward gives. As it is the instance's forward that is replaced, accelerate, DDP, FSDP,
DeepSpeed and PEFT wrap and call it as they would the other.

What trees cannot do runs through TRL's own forward, and one warning says why: models that cannot
share prefixes, vision models, dropout and NEFTune, `torch_compile`, context parallelism, several
devices in a process, router losses, prompt learning.

Shapes: B rows of L tokens, N tokens that are predicted, D hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
import trl
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from treeward.model.checks import why_not_tree
from treeward.model.wrapped import WrappedModel, find_noise
from treeward.tree import current_row
from treeward.tree.batch import TreeBatch
from treeward.tree.plan import plan_sequences

logger = logging.getLogger(__name__)

_HARMLESS = frozenset({"return_dict", "margin"})
"""Arguments of a call that do not change what a forward computes."""


class TreeForward:
    """The forward of a Hugging Face model, on trees where the call is one of TRL's loss.

    `num_computed_tokens`, `num_row_tokens`: tokens that went through the model so far, and tokens
    of the same rows.
    """

    arguments: frozenset[str] = frozenset()
    """What a call of the loss has beside `input_ids` and `attention_mask`."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.num_computed_tokens = 0
        self.num_row_tokens = 0
        self.is_exact: bool | None = None
        """Whether trees are exact for this model: tried at the first call, where sharded weights
        are whole."""
        self._plain = hf.forward
        self._attention: str | None = None
        with _same_config(hf):
            self._model = WrappedModel(hf, layout="tree")

        @functools.wraps(type(hf).forward)  # `generate` reads its signature
        def forward(called: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if called is hf:
                return self(*args, **kwargs)
            # A copy has its own weights.
            return getattr(self._plain, "__func__", type(hf).forward)(called, *args, **kwargs)

        hf.forward = MethodType(forward, hf)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The call before this one may have kept trees on for a backward pass.
        self.restore()
        output = None
        if not args and self._is_of_loss(kwargs):
            self._attention = self.hf.config._attn_implementation
            try:
                output = self._on_trees(**kwargs)
            finally:
                if output is None or not torch.is_grad_enabled():
                    self.restore()
        return self._plain(*args, **kwargs) if output is None else output

    def restore(self) -> None:
        """Give the model the attention back that it had: transformers keeps what was set last.

        Not before the backward pass, which may compute layers again.
        """
        if self._attention is not None:
            self.hf.set_attn_implementation(self._attention)
            self._attention = None

    def _is_of_loss(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call is one of TRL's loss: other calls run as they are, without a word."""
        passed = set()
        for name, value in kwargs.items():
            # TRL's RewardTrainer passes `use_cache=False`.
            if value is not None and value is not False and name not in _HARMLESS:
                passed.add(name)
        # Such calls are those of generation, or of the user.
        if self.arguments - passed or "use_cache" in passed:
            return False
        surplus = passed - self.arguments - {"input_ids", "attention_mask"}
        if surplus:
            _say(f"the model is called with {', '.join(sorted(surplus))}")
            return False
        return {"input_ids", "attention_mask"} <= passed

    def _on_trees(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any
    ) -> Any:
        if self.is_exact is None:
            # TRL's autocast would round the comparison.
            with _same_config(self.hf), torch.autocast(self._model.device.type, enabled=False):
                reason = why_not_tree(self.hf) or self._why_not_padded()
            self.is_exact = reason is None
            if reason is not None:
                _say(f"{type(self.hf).__name__} cannot share prefixes: {reason}")
        if not self.is_exact:
            return None
        if self._model.recurrent_functions and not self._recomputes_on_trees():
            _say(
                "recurrent layers need gradient_checkpointing_kwargs={'use_reentrant': False} and "
                "no context_fn"
            )
            return None
        return self._compute(input_ids, attention_mask, labels)

    def _recomputes_on_trees(self) -> bool:
        """Let layers that are computed again in the backward pass find their row of trees; False
        where PyTorch does not allow it.

        At every call: TRL sets the function of transformers again after each generation.
        """
        layer: Any
        for layer in self.hf.modules():
            function = getattr(layer, "_gradient_checkpointing_func", None)
            if function is None or not getattr(layer, "gradient_checkpointing", False):
                continue
            options = function.keywords
            if options.get("context_fn") is current_row.checkpointing:
                continue  # set by an earlier call
            if options.get("use_reentrant", True) or "context_fn" in options:
                return False
            layer._gradient_checkpointing_func = functools.partial(
                function, context_fn=current_row.checkpointing
            )
        return True

    def _why_not_padded(self) -> str | None:
        """Why the model's own forward gives rows of this padding other values than without it, or
        None."""
        return None

    def _compute(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        """What the model's own forward gives; None where that must compute it."""
        raise NotImplementedError

    def _pack(self, ids_BL: np.ndarray, kept_BL: np.ndarray) -> tuple[TreeBatch, np.ndarray]:
        """The rows without what is not kept, as trees; and where in them each row ends, (B,)."""
        rows = [ids[kept] for ids, kept in zip(ids_BL, kept_BL, strict=True)]
        (groups,) = plan_sequences(rows, max_sequences=len(rows))
        tree_groups = []
        order: list[int] = []  # the rows, as the trees have them
        for group in groups:
            tree_groups.append([rows[i] for i in group])
            order.extend(group)
        batch = TreeBatch.from_groups(tree_groups)
        self.num_computed_tokens += batch.num_computed_tokens
        self.num_row_tokens += batch.num_row_tokens
        # In the order of the rows again: the planner puts those together that begin alike.
        ends_B = np.empty(len(rows), dtype=np.int64)
        ends_B[order] = batch.ends_S.numpy()
        return batch, ends_B

    def _hidden(self, batch: TreeBatch, places_N: np.ndarray, device: torch.device) -> Tensor:
        """The last hidden states at these places of the trees, (N, D)."""
        # Each place once, though several rows may end at it.
        at, index_N = np.unique(places_N, return_inverse=True)
        hidden = self._model.tree_hidden(batch.to(device), torch.from_numpy(at).to(device))
        return hidden.index_select(0, torch.from_numpy(index_N).to(device))


class ScoresForward(TreeForward):
    """The forward of a sequence classifier: logits, read where transformers reads them."""

    def _compute(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        ids_BL, mask_BL = _on_host(input_ids, attention_mask)
        kept_BL = mask_BL != 0
        pad = self.hf.config.pad_token_id
        places_L = np.arange(ids_BL.shape[1])
        # As transformers reads: the last token that is not padding, whatever the mask says.
        last_B = (places_L * (ids_BL != pad)).argmax(axis=1)
        # A score that is read at a token the mask hides has no place in a tree.
        if pad is None or not kept_BL[np.arange(len(ids_BL)), last_B].all():
            return None
        batch, reads_B = self._pack(ids_BL, kept_BL & (places_L <= last_B[:, None]))
        head = self.hf.get_submodule("score")
        logits = head(self._hidden(batch, reads_B, input_ids.device))
        return SequenceClassifierOutputWithPast(logits=logits)


class LogProbsForward(TreeForward):
    """The forward of a causal language model with TRL's fused head: log-probabilities and entropies
    of the labels.

    The head is TRL's own, with its temperature, gradients and sharded weights: it is given the
    hidden states of a single row, one for each token of the trees that is predicted.
    """

    arguments = frozenset({"labels", "fused_lm_head"})

    @torch.no_grad()
    def _why_not_padded(self) -> str | None:
        # TRL pads prompts on the left. Four tokens of padding and four of text, and the text alone.
        backbone = self._model.backbone
        ids_BL = torch.arange(8, device=self._model.device).remainder(4).expand(2, 8)
        mask_BL = (torch.arange(8, device=ids_BL.device) > 3).long().expand(2, 8)
        with self._model.plain_attention():
            padded = backbone(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)
            alone = backbone(input_ids=ids_BL[:, 4:], use_cache=False)
        padded_D = padded[0][0, -1].float()
        alone_D = alone[0][0, -1].float()
        # Rounding to bfloat16 changes 2 % of SmolLM2's, four positions more all of GPT-2's.
        if (padded_D - alone_D).norm() < 0.05 * alone_D.norm():
            return None
        return "its positions count the padding on the left"

    def _compute(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        assert labels is not None
        device = input_ids.device
        ids_BL, mask_BL, labels_BL = _on_host(input_ids, attention_mask, labels)
        kept_BL = mask_BL != 0
        predicted_BL = labels_BL != -100
        # How many tokens of its row are before each: its position without the padding.
        position_BL = np.cumsum(kept_BL, axis=1) - kept_BL
        can_predict_BL = kept_BL & (position_BL > 0)
        # The first token of a row, and one that the mask hides, is predicted from padding: only
        # TRL's own forward gives that number, and a loss of 0 where no token is predicted.
        if not predicted_BL.any() or (predicted_BL & ~can_predict_BL).any():
            return None
        batch, ends_B = self._pack(ids_BL, kept_BL)
        paths = batch.layout.places(ends_B.tolist())
        own_places = []
        previous_places = []
        for path, position_L, predicted_L in zip(paths, position_BL, predicted_BL, strict=True):
            positions = position_L[predicted_L]
            own_places.append(path[positions])
            previous_places.append(path[positions - 1])
        # A token of a tree has one predecessor, so that its own place names the pair.
        at_N, first_N, index = np.unique(
            np.concatenate(own_places), return_index=True, return_inverse=True
        )
        before_N = np.concatenate(previous_places)[first_N]
        targets_N = batch.tokens_T[torch.from_numpy(at_N)].to(device)
        # The head is called by TRL's own forward, in which the backbone gives what was computed.
        hidden = self._hidden(batch, before_N, device)[None]
        backbone = self._model.backbone
        # Put back below: accelerate's hooks replace a forward on the instance too.
        replaced = vars(backbone).get("forward")
        backbone.forward = lambda *args, **kwargs: BaseModelOutput(last_hidden_state=hidden)
        try:
            output = self._plain(
                input_ids=targets_N[None], shift_labels=targets_N[None], fused_lm_head=True
            )
        finally:
            del backbone.forward
            if replaced is not None:
                backbone.forward = replaced
        mask = labels[:, 1:] != -100
        index_on = torch.from_numpy(index).to(device)

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            in_order = values[0].index_select(0, index_on)
            return values.new_zeros(mask.shape).masked_scatter(mask, in_order)

        return FusedCausalLMOutput(
            log_probs=spread(output.log_probs), entropy=spread(output.entropy), label_mask=mask
        )


def _on_host(*tensors: Tensor) -> np.ndarray:
    """In one copy: the host plans."""
    return torch.stack([tensor.long() for tensor in tensors]).cpu().numpy()


@contextlib.contextmanager
def _same_config(hf: PreTrainedModel) -> Iterator[None]:
    """A `WrappedModel` sets rates of dropout to zero, of the configuration too, which is saved with
    the model."""
    before = [(owner, name, getattr(owner, name)) for owner, name in find_noise(hf)]
    try:
        yield
    finally:
        for owner, name, rate in before:
            setattr(owner, name, rate)


@functools.cache  # once for each reason
def _say(reason: str) -> None:
    logger.warning("TRL's own forward runs instead of trees: %s.", reason)


def _why_not(trainer: Any, hf: Any) -> str | None:
    """Why trees cannot be tried at all, or None."""
    parallel = trainer.accelerator.parallelism_config
    config = hf.config.get_text_config()
    devices = set(getattr(hf, "hf_device_map", {}).values())
    if trainer.accelerator.state.dynamo_plugin.backend != "NO":
        return "torch_compile is on"
    if trainer.args.n_gpu > 1:
        return "one process has several GPUs (use `accelerate launch`)"
    if trainer.args.neftune_noise_alpha is not None:
        return "NEFTune noise depends on the padding"
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return "the sequence is split over devices"
    if len(devices) > 1:
        return "the layers are on several devices"
    if config is not hf.config:
        return "it is not a text model"
    if getattr(config, "output_router_logits", False):
        return "a router loss is asked for"
    if any(isinstance(owner, nn.Module) for owner, _ in find_noise(hf)):
        return "dropout is on (disable_dropout=True, lora_dropout=0)"
    return None


class _OnTrees:
    """`trees`: the forwards that were replaced, with their counts of tokens; none where trees are
    not possible."""

    trees: tuple[TreeForward, ...] = ()

    def _replace(self, kind: type[TreeForward], model: Any) -> None:
        model = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        hf = model.get_base_model() if hasattr(model, "get_base_model") else model
        reason = _why_not(self, hf)
        is_plain = isinstance(hf, GenericForSequenceClassification)
        if reason is None and kind is ScoresForward and not is_plain:
            reason = f"{type(hf).__name__} has a head of its own"
        if reason is not None:
            _say(reason)
        else:
            self.trees = (*self.trees, kind(hf))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            for tree in self.trees:
                tree.restore()


class RewardTrainer(_OnTrees, trl.RewardTrainer):  # type: ignore[misc,name-defined]
    """`trl.RewardTrainer` on trees: the prompt of a comparison is computed once, and so is what
    prompts share.

    The score is read where transformers reads it, at the last token that is not padding.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replace(ScoresForward, self.model)


class GRPOTrainer(_OnTrees, trl.GRPOTrainer):  # type: ignore[misc,name-defined]
    """`trl.GRPOTrainer` on trees: each prompt is computed once for its completions in a batch.

    So it is for the policy, its earlier self and the reference. Generation, rewards and loss are
    TRL's. TRL shuffles completions over the micro-batches of an optimiser's step; where the loss is
    a sum over completions, those of a prompt are put together again within the step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replace(LogProbsForward, self.model)
        if self.ref_model is not None:
            self._replace(LogProbsForward, self.ref_model)

    _buffered_inputs: Any

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # The same where TRL validates, or takes the next of the micro-batches that it has.
        if self._buffered_inputs is before or not self.trees:
            return inputs
        # These compare a completion with the others of its micro-batch, which must stay.
        is_mixed = self.loss_type == "bnpo" or self.top_entropy_quantile < 1.0
        is_mixed = is_mixed or self._entropy_bonus_enabled or self.aux_loss_enabled
        # The micro-batches of one step of the optimiser, whose gradients are one sum.
        steps = self.args.steps_per_generation
        accumulated = self.args.gradient_accumulation_steps
        window = min(steps, accumulated)
        # Where neither number divides the other, steps of the optimiser begin within a window.
        if is_mixed or max(steps, accumulated) % window:
            return inputs
        batches: list[dict[str, Any]] = []
        for start in range(0, steps, window):
            batches.extend(_by_prompt(self._buffered_inputs[start : start + window]))
        self._buffered_inputs = batches
        return batches[self._step % steps]


def _by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same completions in as many batches of the same size, those of a prompt next to each
    other."""
    prompts = torch.cat([batch["prompt_ids"] for batch in batches]).tolist()
    order = torch.tensor(sorted(range(len(prompts)), key=prompts.__getitem__))
    sorted_batches = [dict(batch) for batch in batches]
    for name, value in batches[0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            rows = torch.cat([batch[name] for batch in batches])[order.to(value.device)]
            for batch, part in zip(sorted_batches, rows.chunk(len(batches)), strict=True):
                batch[name] = part
    return sorted_batches
