"""`PolicyUpdater`: from groups of completions with their advantages to new weights, each prompt
computed once a group.

    updater = PolicyUpdater(policy, optimizer, reference=reference, loss=PolicyLossConfig())
    evaluated = updater.evaluate(groups)          # learns nothing; rewards may read its kl_PG
    metrics = updater.update(evaluated, advantages_PG, used_PG)
    kl_PG, entropy_PG = updater.measure(groups)   # in validation

The trainer computes old and reference log-probabilities itself, in the numerics of the update. A
batch may give several updates, from some prompts each. The sums of an update are divided once, so
micro-batches may be cut anywhere between completions. Prompts of one `FAMILY` share a tree; a tree
larger than `micro_batch_tokens` is cut, and the prompt is computed once in each part. All processes
have the same groups, share the micro-batches out, and get the same results.

Shapes: P prompts, G completions to each, L tokens of the longest completion, S completions of a
micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeward import processes
from treeward.config.grpo import PolicyLossConfig
from treeward.data.prompt_sets import FAMILY
from treeward.errors import ModelError
from treeward.model.lora import AdapterReference
from treeward.model.policy_model import CompletionLogProbs, PolicyModel
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import sum_over_copies
from treeward.rl.generation import (
    CompletionGroup,
    SampledCompletion,
    batch_shape,
    completion_lengths,
)
from treeward.rl.policy_loss import ESTIMATORS, UpdateMetrics, kl_estimate, policy_loss
from treeward.training.optimisation import SkippedSteps
from treeward.tree.batch import on_device
from treeward.tree.plan import plan_parts

Reference = PolicyModel | AdapterReference
"""The reference policy of the KL: a frozen model, or a LoRA policy with its adapters off."""

MicroBatch = list[list[tuple[int, int]]]
"""By tree, the completions that share it, each as (prompt, place in its group)."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Groups with the log-probabilities before the first update, float32 (P, G, L), 0 beyond the
    end of a completion.

    `old_PGL` is None where the updated policy is the old policy, `reference_PGL` where there is no
    reference. `kl_PG`: KL(policy || reference) summed over a completion's tokens, on the CPU, for
    the reward; None unless requested. `error_PG`: the mean over a completion's tokens of exp
    |trainer's less generator's log-probability|, NaN without tokens, on the CPU; None unless
    requested.
    """

    groups: tuple[CompletionGroup, ...]
    old_PGL: Tensor | None = None
    reference_PGL: Tensor | None = None
    kl_PG: Tensor | None = None
    error_PG: Tensor | None = None
    metrics: UpdateMetrics = field(default_factory=UpdateMetrics)


class PolicyUpdater:
    """Updates `policy` by `optimizer`.

    `micro_batch_tokens`: computed tokens of one forward and backward pass; only a single completion
    may exceed it. `max_grad_norm`: None for no clipping. `temperature`: of the sampling.
    `prompts_per_update`: groups per step of the optimiser; None for all. `updates_per_batch`:
    passes over the batch. `on_step`: called once per update, for schedules, even if there was
    nothing to learn from. `mesh`: how the processes share the work; None for one process.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: torch.optim.Optimizer,
        *,
        reference: Reference | None = None,
        loss: PolicyLossConfig | None = None,
        micro_batch_tokens: int = 4096,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        prompts_per_update: int | None = None,
        updates_per_batch: int = 1,
        on_step: Callable[[], None] = lambda: None,
        mesh: Mesh | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.reference = reference
        self.loss = loss or PolicyLossConfig()
        self.micro_batch_tokens = micro_batch_tokens
        self.max_grad_norm = max_grad_norm
        self.temperature = temperature
        self.prompts_per_update = prompts_per_update
        self.updates_per_batch = updates_per_batch
        self.on_step = on_step
        self.mesh = mesh or Mesh()
        self.skipped = SkippedSteps()
        self._reads_generator = self.loss.needs_generator_log_probs

    @torch.no_grad()
    def evaluate(
        self,
        groups: Sequence[CompletionGroup],
        *,
        for_reward: bool = False,
        with_errors: bool = False,
    ) -> Evaluated:
        """The log-probabilities of the old policy and of the reference that an update needs.

        `for_reward`: also `kl_PG`; `with_errors`: also `error_PG`; each for one more pass through
        the policy where a step has one update. Raises `ModelError` where it needs log-probabilities
        that the generator does not give.
        """
        groups = tuple(groups)
        completions: list[SampledCompletion] = []
        for group in groups:
            completions += group.completions
        if self._reads_generator or with_errors:
            _check_generated(completions)
        self.policy.eval()
        metrics = UpdateMetrics()
        old_PGL = None
        reference_PGL = None
        kl_PG = None
        error_PG = None
        # With a single update the policy is its own old policy.
        several_updates = len(self._parts(len(groups))) * self.updates_per_batch > 1
        measures_kl = for_reward and self.reference is not None
        if several_updates or with_errors or measures_kl:
            old_PGL, _ = self._all(self.policy, groups, metrics)
            errors_SL = _add_mismatch(metrics, completions, old_PGL.flatten(0, 1))
            if with_errors:
                error_sum_PG = errors_SL.sum(dim=1).view(old_PGL.shape[:2]).cpu()
                error_PG = error_sum_PG / completion_lengths(groups)
        if self.reference is not None:
            reference_PGL, _ = self._all(self.reference, groups, metrics)
            if for_reward:
                assert old_PGL is not None
                # The estimate that the loss has, where the KL is a part of it.
                estimator = ESTIMATORS[self.loss.reference_policy_kl_type]
                kl_PG = kl_estimate(old_PGL, reference_PGL, estimator).sum(dim=2).cpu()
        return Evaluated(groups, old_PGL, reference_PGL, kl_PG, error_PG, metrics)

    def update(
        self,
        evaluated: Evaluated,
        advantages_PG: Tensor,
        used_PG: Tensor,
        *,
        entropies: bool = True,
    ) -> UpdateMetrics:
        """Learn from groups in their order. `used_PG`: which completions to learn from, bool (P,
        G).

        `entropies`: measure them too, which costs about a pass over the logits. The result includes
        the sums of `evaluated`. A step with a loss or gradient that is not finite is skipped and
        adds only its tokens; several in a row raise `ModelError` and leave the weights as before
        them.
        """
        metrics = evaluated.metrics.read()
        used_PG = used_PG.cpu()
        advantages_PG = advantages_PG.to(self.policy.device, torch.float32)
        parts = self._parts(len(evaluated.groups))
        # Transformers recomputes activations only for a model in training mode; there is no
        # dropout.
        self.policy.train()
        for _ in range(self.updates_per_batch):
            for part in parts:
                places: list[tuple[int, int]] = []
                for p in part:
                    completions = evaluated.groups[p].completions
                    for g in used_PG[p].nonzero().flatten().tolist():
                        if completions[g].token_ids:
                            places.append((p, g))
                if places:
                    metrics = metrics + self._step(evaluated, places, advantages_PG, entropies)
                self.on_step()
        return metrics

    def learn(
        self,
        groups: Sequence[CompletionGroup],
        advantages_PG: Tensor,
        used_PG: Tensor,
    ) -> UpdateMetrics:
        """`evaluate` and `update` at once, where the advantages do not depend on the KL."""
        return self.update(self.evaluate(groups), advantages_PG, used_PG)

    @torch.no_grad()
    def measure(self, groups: Sequence[CompletionGroup]) -> tuple[Tensor | None, Tensor]:
        """KL to the reference (k3, summed over a completion's tokens; None without a reference) and
        the mean entropy of the tokens' distributions (NaN for no tokens): float32 (P, G), on the
        CPU.
        """
        self.policy.eval()
        values_PGL, entropies_PGL = self._all(self.policy, groups, UpdateMetrics(), entropies=True)
        kl_PG = None
        if self.reference is not None:
            reference_PGL, _ = self._all(self.reference, groups, UpdateMetrics())
            kl_PG = kl_estimate(values_PGL, reference_PGL, "k3").sum(dim=2).cpu()
        return kl_PG, entropies_PGL.sum(dim=2).cpu() / completion_lengths(groups)

    def _parts(self, num_groups: int) -> list[range]:
        """The prompts of each update."""
        size = self.prompts_per_update or max(num_groups, 1)
        starts = range(0, num_groups, size)
        return [range(start, min(start + size, num_groups)) for start in starts]

    def micro_batches(
        self,
        groups: Sequence[CompletionGroup],
        places: Sequence[tuple[int, int]],
    ) -> list[MicroBatch]:
        """The micro-batches of this process, of completions as (prompt, place). A group that is too
        large is cut into several trees. Every process gets as many, of like size; some may be
        empty.
        """
        by_family: dict[Any, list[tuple[int, int]]] = {}
        for p, g in places:
            info = groups[p].prompt.info
            # A prompt without a family is a family of its own; a user's family may be a number too.
            family = ("family", info[FAMILY]) if FAMILY in info else ("prompt", p)
            by_family.setdefault(family, []).append((p, g))
        families = list(by_family.values())
        sequences = []
        for members in families:
            sequences.append([groups[p].sequence(g) for p, g in members])
        plan = plan_parts(
            sequences,
            max_tokens=self.micro_batch_tokens,
            share=self.policy.layout == "tree",
            num_ranks=self.mesh.data_size,
        )
        batches: list[MicroBatch] = []
        for parts in plan[self.mesh.data_rank :: self.mesh.data_size]:
            batch: MicroBatch = []
            for part in parts:
                members = families[part.group]
                batch.append([members[m] for m in part.members])
            batches.append(batch)
        return batches

    def _ask(
        self,
        model: Reference,
        groups: Sequence[CompletionGroup],
        batch: MicroBatch,
        sums: UpdateMetrics,
        entropy: bool,
    ) -> tuple[CompletionLogProbs, Tensor, Tensor]:
        """The log-probabilities of a micro-batch, and its prompts and places, int64 (S,) each;
        counts its tokens.

        An empty one computes a dummy, because the other processes wait for this one in each
        exchange.
        """
        sequences: list[list[tuple[int, ...]]] = []
        prompt_lengths: list[list[int]] = []
        places: list[tuple[int, int]] = []
        for part in batch:
            sequences.append([groups[p].sequence(g) for p, g in part])
            prompt_lengths.append([len(groups[p].prompt_ids) for p, _ in part])
            places += part
        if not batch:
            sequences = [[(0, 0)]]
            prompt_lengths = [[1]]
        log_probs = model.log_probs(
            sequences,
            prompt_lengths,
            temperature=self.temperature,
            entropies=entropy,
        )
        if batch:
            sums.computed_tokens += log_probs.num_computed_tokens
            sums.row_tokens += sum(len(sequence) for sequence in itertools.chain(*sequences))
        else:
            # The rows of the dummy leave, but a loss of nothing keeps its gradients: FSDP exchanges
            # them in the backward pass too.
            entropies_SL = log_probs.entropies_SL
            if entropies_SL is not None:
                entropies_SL = entropies_SL[:0]
            log_probs = CompletionLogProbs(
                log_probs.values_SL[:0],
                log_probs.mask_SL[:0],
                entropies_SL,
                num_computed_tokens=0,
            )
        places_S2 = np.array(places, dtype=np.int64).reshape(-1, 2)
        p_S, g_S = on_device(places_S2, self.policy.device).unbind(dim=1)
        return log_probs, p_S, g_S

    def _all(
        self,
        model: Reference,
        groups: Sequence[CompletionGroup],
        metrics: UpdateMetrics,
        *,
        entropies: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (zeros unless requested) of all completions, float32 (P,
        G, L), on every process. Adds all tokens to `metrics`.
        """
        num_prompts, size = batch_shape(groups)
        longest = 0
        if groups:
            longest = int(completion_lengths(groups).max())
        # One tensor of log-probabilities and entropies, so that the processes exchange both at
        # once.
        values_2PGL = torch.zeros(2, num_prompts, size, longest, device=self.policy.device)
        counts = UpdateMetrics()
        places = list(itertools.product(range(num_prompts), range(size)))
        for batch in self.micro_batches(groups, places):
            log_probs, p_S, g_S = self._ask(model, groups, batch, counts, entropies)
            if not batch:
                continue
            length = log_probs.values_SL.shape[1]
            values_2PGL[0, p_S, g_S, :length] = log_probs.values_SL
            if log_probs.entropies_SL is not None:
                values_2PGL[1, p_S, g_S, :length] = log_probs.entropies_SL
        total = counts.over(self.mesh.data_group)
        metrics.computed_tokens += total.computed_tokens
        metrics.row_tokens += total.row_tokens
        # Each completion was computed by one process, and is 0 on the others.
        values_PGL, entropies_PGL = processes.summed(values_2PGL, self.mesh.data_group)
        return values_PGL, entropies_PGL

    def _step(
        self,
        evaluated: Evaluated,
        places: Sequence[tuple[int, int]],
        advantages_PG: Tensor,
        entropies: bool,
    ) -> UpdateMetrics:
        """One step of the optimiser. Every completion has at least one token."""
        groups = evaluated.groups
        denominator = len(places)
        if self.loss.token_level_loss:
            denominator = sum(len(groups[p].completions[g].token_ids) for p, g in places)
        metrics = UpdateMetrics()
        batches = self.micro_batches(groups, places)
        for number, batch in enumerate(batches, start=1):
            # Copies of the policy add up their gradients once, after the last micro-batch.
            is_last = number == len(batches)
            sum_over_copies(self.policy, is_last)
            loss, sums = self.micro_batch_loss(evaluated, batch, advantages_PG, entropies)
            # By the denominator of the whole update, which every process knows: all have the same
            # groups. A micro-batch's own mean would weigh short ones more.
            (loss / denominator).backward()
            metrics += sums
            metrics.loss_sum += loss.detach().double() / denominator
        metrics = metrics.over(self.mesh.data_group)
        metrics.updates = 1
        # The loss of all processes, so that all skip the same steps.
        metrics.grad_norm_sum = self.skipped.clip(
            self.policy,
            self.max_grad_norm,
            float(metrics.loss_sum),
            what="the policy's loss",
            fix="lower policy.optimizer.kwargs.lr, or look at the rewards of this step",
        )
        is_taken = math.isfinite(metrics.grad_norm_sum)
        if is_taken:
            self.optimizer.step()
        # None frees the memory, and keeps Adam from a step on parameters without a gradient.
        self.optimizer.zero_grad(set_to_none=True)
        if is_taken:
            return metrics
        # The sums may hold a NaN, which would hide the other updates of the batch in the log.
        return UpdateMetrics(
            computed_tokens=metrics.computed_tokens,
            row_tokens=metrics.row_tokens,
        )

    def micro_batch_loss(
        self, evaluated: Evaluated, batch: MicroBatch, advantages_PG: Tensor, entropies: bool
    ) -> tuple[Tensor, UpdateMetrics]:
        """The summed loss of a micro-batch, and its metrics. `entropies`: measure them too. Never
        makes the host wait for the device."""
        groups = evaluated.groups
        counted = UpdateMetrics()
        log_probs, p_S, g_S = self._ask(self.policy, groups, batch, counted, entropies)
        values_SL = log_probs.values_SL.detach()
        length = values_SL.shape[1]
        old_SL = values_SL
        if evaluated.old_PGL is not None:
            old_SL = evaluated.old_PGL[p_S, g_S, :length]
        reference_SL = None
        if evaluated.reference_PGL is not None:
            reference_SL = evaluated.reference_PGL[p_S, g_S, :length]
        completions: list[SampledCompletion] = []
        for part in batch:
            completions += [groups[p].completions[g] for p, g in part]
        generated_SL = None
        if self._reads_generator:
            generated_SL, _ = _generated(completions, values_SL)
        loss, metrics = policy_loss(
            log_probs.values_SL,
            old_SL,
            reference_SL,
            advantages_PG[p_S, g_S],
            log_probs.mask_SL,
            self.loss,
            generated_SL=generated_SL,
        )
        if log_probs.entropies_SL is not None:
            metrics.entropy_sum = log_probs.entropies_SL.sum(dtype=torch.float64)
            metrics.entropy_tokens = metrics.tokens
        if evaluated.old_PGL is None:
            # This is the trainer's only pass over the completions: `evaluate` has counted nothing.
            _add_mismatch(metrics, completions, values_SL)
        return loss, metrics + counted


def _generated(completions: Sequence[SampledCompletion], like_SL: Tensor) -> tuple[Tensor, int]:
    """The generator's log-probabilities, float32 (S, L), NaN where it gave none; and how many it
    gave."""
    # NaN and not 0, which is a log-probability: that of a certain token.
    values = np.full(like_SL.shape, np.nan, dtype=np.float32)
    num_given = 0
    for s, completion in enumerate(completions):
        if completion.log_probs is not None:
            values[s, : len(completion.log_probs)] = completion.log_probs
            num_given += len(completion.log_probs)
    return on_device(values, like_SL.device), num_given


def _check_generated(completions: Sequence[SampledCompletion]) -> None:
    """Raise `ModelError` for a completion without the generator's log-probabilities."""
    # A completion without tokens needs none.
    sampled = [completion for completion in completions if completion.token_ids]
    if all(completion.log_probs is not None for completion in sampled):
        return
    readers = (
        "loss_fn.use_importance_sampling_correction",
        "loss_fn.use_on_policy_kl_approximation",
        "grpo.seq_logprob_error_threshold",
    )
    raise ModelError(
        "the generator gave no log-probabilities of its own",
        need=f"one for each token, which these keys read: {', '.join(readers)}",
        fix="a generator that returns them, or none of these keys",
    )


def _add_mismatch(
    metrics: UpdateMetrics,
    completions: Sequence[SampledCompletion],
    values_SL: Tensor,
) -> Tensor:
    """Add the error of the generator's log-probabilities, as NeMo RL's `token_mult_prob_error`;
    returns it for each token, float32 (S, L), 0 where the generator gave none."""
    generated_SL, num_generated = _generated(completions, values_SL)
    errors = torch.where(generated_SL.isnan(), 0.0, (values_SL - generated_SL).abs().exp())
    metrics.mismatch_sum += errors.sum(dtype=torch.float64)
    metrics.mismatch_tokens += num_generated
    return errors
