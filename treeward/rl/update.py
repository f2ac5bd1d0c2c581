"""`PolicyUpdater`: from groups of completions with their advantages to new weights, each prompt computed once a group.

    updater = PolicyUpdater(policy, optimizer, reference=reference, settings=PolicyLossSettings(kl_coefficient=0.01))
    evaluated = updater.evaluate(groups)                # nothing is learnt yet; rewards may depend on evaluated.kl_PG
    metrics = updater.update(evaluated, advantages_PG, used_PG)
    measured = updater.measure(groups)                  # of validation: KL to the reference and entropy, no more

Old and reference log-probabilities are computed by the trainer itself, in the numerics of the update, whatever the
generator says. A batch may be updated from several times, in parts of some prompts each; every part's sums are divided
by the part's own denominators, however it is cut into micro-batches. Completions that are not used are in no update;
what is computed before the first one is computed of all.

Shapes: P prompts, G completions to each (the most of any), L tokens of a group's longest completion, S completions side
by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from treeward.errors import ConfigError, ModelError
from treeward.model.policy_model import CompletionLogProbs, PolicyModel
from treeward.rl.experience import CompletionGroup, prompt_lengths
from treeward.rl.policy_loss import KLEstimator, PolicyLossSettings, kl_estimate, policy_loss
from treeward.tree.batch import plan_micro_batches
from treeward.tree.token_tree import TokenIds

__all__ = ["Evaluated", "Measured", "PolicyUpdater", "Reference", "UpdateMetrics"]


class Reference(Protocol):
    """What KL is measured from: a frozen `PolicyModel`, or a LoRA policy with its adapters off."""

    def log_probs(
        self,
        groups: Sequence[Sequence[TokenIds]],
        prompt_lengths: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
    ) -> CompletionLogProbs: ...


@dataclass(slots=True)
class UpdateMetrics:
    """Sums over all updates of a batch; `means` divides them.

    `tokens`: predicted ones that were learnt from, counted once for each update. `mismatch_sum`: exp |trainer's less
    generator's log-probability| of the `mismatch_tokens` whose generator said one, before the first update: of all
    completions where the batch is updated from several times, else of those that are used. `correction_sum`: of the
    weights against that mismatch, over tokens; `not_finite`: tokens whose weight was not and counts as 0.
    """

    loss_sum: float = 0.0
    policy_sum: float = 0.0
    kl_sum: float = 0.0
    old_kl_sum: float = 0.0
    clipped: float = 0.0
    entropy_sum: float = 0.0
    correction_sum: float = 0.0
    not_finite: int = 0
    tokens: int = 0
    updates: int = 0
    grad_norm_sum: float = 0.0
    mismatch_sum: float = 0.0
    mismatch_tokens: int = 0
    computed_tokens: int = 0
    row_tokens: int = 0

    def __add__(self, other: UpdateMetrics) -> UpdateMetrics:
        return UpdateMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def means(self) -> dict[str, float]:
        """By the names that are logged; what there is nothing of is left out."""
        found: dict[str, float] = {}
        if self.tokens:
            found = {
                "loss": self.loss_sum / self.updates,
                "policy_loss": self.policy_sum / self.tokens,
                "kl": self.kl_sum / self.tokens,
                "old_kl": self.old_kl_sum / self.tokens,
                "clip_fraction": self.clipped / self.tokens,
                "entropy": self.entropy_sum / self.tokens,
                "sampling_importance_ratio": self.correction_sum / self.tokens,
                "grad_norm": self.grad_norm_sum / self.updates,
            }
        if self.mismatch_tokens:
            found["token_mult_prob_error"] = self.mismatch_sum / self.mismatch_tokens
        return found


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Groups with what was computed of them before the first update.

    `old`, `reference`: log-probabilities of each group's completions, float32 (G, L) each; None where they are not
    needed. `kl_PG`: float32 (P, G) on the CPU, the estimate of KL(policy || reference) summed over a completion's
    tokens, for the reward; NaN where a group has no such completion; None unless it was asked for and there is a
    reference.
    """

    groups: tuple[CompletionGroup, ...]
    old: tuple[Tensor, ...] | None = None
    reference: tuple[Tensor, ...] | None = None
    kl_PG: Tensor | None = None
    metrics: UpdateMetrics = field(default_factory=UpdateMetrics)

    @property
    def mean_kl(self) -> float | None:
        """Of a completion, not of a token."""
        return None if self.kl_PG is None else float(self.kl_PG.nanmean())


@dataclass(frozen=True, slots=True)
class Measured:
    """Of each completion, float32 (P, G) on the CPU: KL to the reference, summed over tokens (None without one), and
    the mean entropy of the distributions that its tokens were drawn from; `num_tokens_PG`: int64. NaN where a group has
    no such completion, and for the entropy of a completion without tokens.
    """

    kl_PG: Tensor | None
    entropy_PG: Tensor
    num_tokens_PG: Tensor

    @property
    def mean_kl(self) -> float | None:
        """Of a completion: the mean of the sums, as over-optimisation is drawn over its root."""
        return None if self.kl_PG is None else float(self.kl_PG.nanmean())

    @property
    def mean_kl_per_token(self) -> float | None:
        """Comparable with `kl` of the updates."""
        if self.kl_PG is None:
            return None
        return float(self.kl_PG.nansum()) / max(int(self.num_tokens_PG.sum()), 1)

    @property
    def mean_entropy(self) -> float:
        """Of a token."""
        total = float((self.entropy_PG.nan_to_num() * self.num_tokens_PG).sum())
        return total / max(int(self.num_tokens_PG.sum()), 1)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is fixed of a group while it is learnt from, of its used completions alone: (G, L), (G, L), (G,)."""

    group: CompletionGroup
    old_GL: Tensor | None
    reference_GL: Tensor | None
    advantages_G: Tensor

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.group.completions)


class PolicyUpdater:
    """Updates `policy` by `optimizer`.

    `reference`: what KL is measured from; None for none. `reward_kl_estimator`: of `Evaluated.kl_PG`.
    `micro_batch_tokens`: computed tokens of one forward and backward pass; a group is never split. `max_grad_norm`:
    None for no clipping. `temperature`: of the sampling. `prompts_per_update`: how many groups one step of the
    optimiser learns from; None for all. `updates_per_batch`: how often the whole batch is gone through.
    `parts_per_batch`: updates that a full batch has each time; None: as many as the batch that is there.

    `on_step`: called after each of these updates, for schedules, also after those that nothing is used of or that the
    batch has too few groups for: where a schedule stands follows from the number of batches. `steps_begun`: steps of
    the optimiser so far; while it has not grown the weights are as they were.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: torch.optim.Optimizer,
        *,
        reference: Reference | None = None,
        settings: PolicyLossSettings | None = None,
        reward_kl_estimator: KLEstimator = "k1",
        micro_batch_tokens: int = 4096,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        prompts_per_update: int | None = None,
        updates_per_batch: int = 1,
        parts_per_batch: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self.optimizer, self.reference = policy, optimizer, reference
        self.settings = settings or PolicyLossSettings()
        self.reward_kl_estimator: KLEstimator = reward_kl_estimator
        self.micro_batch_tokens, self.max_grad_norm = micro_batch_tokens, max_grad_norm
        self.temperature = temperature
        self.prompts_per_update, self.updates_per_batch = prompts_per_update, updates_per_batch
        self.parts_per_batch = parts_per_batch
        self.on_step = on_step
        self.steps_begun = 0

    @torch.no_grad()
    def evaluate(self, groups: Sequence[CompletionGroup], *, for_reward: bool = False) -> Evaluated:
        """What an update must know of the policy as it sampled. `for_reward`: `kl_PG` as well, at the cost of asking
        the policy once more where one update would not need it.

        Raises `ConfigError` where several updates contradict `force_on_policy_ratio`, `ModelError` where the loss needs
        log-probabilities of the generator that are not there.
        """
        groups = tuple(groups)
        self.policy.eval()
        # Updated from once, in one part, the policy is its own old policy, and need not be asked twice.
        several = len(self._parts(len(groups))) * self.updates_per_batch > 1
        if several and self.settings.force_on_policy_ratio:
            raise ConfigError(
                "a ratio of 1 is right for the first update only",
                where="loss_fn.force_on_policy_ratio",
                got="several updates of the policy for each batch of completions",
                need="one",
                fix="policy.train_global_batch_size=null grpo.updates_per_batch=1, or force_on_policy_ratio=false",
            )
        if self.settings.needs_generated:
            for group in groups:
                _require_generated(group)
        metrics = UpdateMetrics()
        old = reference = kl_PG = None
        # One model after the other: a frozen reference may lie elsewhere while it is not asked.
        if several or (for_reward and self.reference is not None):
            found = self._ask(self.policy, groups, metrics)
            old = tuple(values for values, _ in found)
            for group, values in zip(groups, old, strict=True):
                _add_mismatch(metrics, [group], values)
        if self.reference is not None:
            reference = tuple(values for values, _ in self._ask(self.reference, groups, metrics))
            if for_reward:
                assert old is not None
                kl_PG = _kl_sums(old, reference, self.reward_kl_estimator)
        return Evaluated(groups, old, reference, kl_PG, metrics)

    def update(self, evaluated: Evaluated, advantages_PG: Tensor, used_PG: Tensor) -> UpdateMetrics:
        """Learn from groups in the order given. `used_PG`: which completions are learnt from, bool (P, G).

        The result has the sums of `evaluated` too. Raises `ModelError` for a loss or gradient that is not finite; the
        weights are then those before that step.
        """
        known = [self._used(evaluated, p, advantages_PG[p], used_PG[p].tolist()) for p in range(len(evaluated.groups))]
        metrics = evaluated.metrics
        parts = self._parts(len(known))
        # Transformers computes activations again only of a model that is in training mode; there is no dropout.
        self.policy.train()
        for _ in range(self.updates_per_batch):
            for part in parts:
                metrics = metrics + self._step([known[p] for p in part if known[p].num_tokens])
                self.on_step()
            for _ in range((self.parts_per_batch or 0) - len(parts)):
                self.on_step()
        return metrics

    def learn(self, groups: Sequence[CompletionGroup], advantages_PG: Tensor, used_PG: Tensor) -> UpdateMetrics:
        """`evaluate` and `update` at once, for advantages that are known beforehand."""
        return self.update(self.evaluate(groups), advantages_PG, used_PG)

    @torch.no_grad()
    def measure(self, groups: Sequence[CompletionGroup], *, estimator: KLEstimator = "k3") -> Measured:
        """Of each completion the KL to the reference and the entropy, at the temperature of the sampling; no update."""
        groups = tuple(groups)
        self.policy.eval()
        found = self._ask(self.policy, groups, UpdateMetrics(), entropies=True)
        kl_PG = None
        if self.reference is not None:
            reference = [values for values, _ in self._ask(self.reference, groups, UpdateMetrics())]
            kl_PG = _kl_sums([values for values, _ in found], reference, estimator)
        lengths = [torch.tensor([len(a.token_ids) for a in group.completions]) for group in groups]
        # A completion without tokens has no entropy: 0 / 0.
        means = [entropies.sum(dim=1) / n.to(entropies) for (_, entropies), n in zip(found, lengths, strict=True)]
        return Measured(kl_PG, _stacked(means), _stacked(lengths, missing=0))

    def _parts(self, num_groups: int) -> list[range]:
        size = self.prompts_per_update or max(num_groups, 1)
        return [range(start, min(start + size, num_groups)) for start in range(0, num_groups, size)]

    def _plan(self, groups: Sequence[CompletionGroup]) -> Iterator[list[int]]:
        """Groups for each micro-batch; those without completions are in none."""
        some = [i for i, group in enumerate(groups) if group.completions]
        tree = self.policy.layout == "tree"
        sizes = [groups[i].num_tree_tokens if tree else groups[i].num_row_tokens for i in some]
        for members in plan_micro_batches(sizes, max_tokens=self.micro_batch_tokens):
            yield [some[i] for i in members]

    def _ask(
        self, model: Reference, groups: Sequence[CompletionGroup], metrics: UpdateMetrics, *, entropies: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each group its log-probabilities and (empty unless asked for) entropies, float32 (G, L), 0 beyond ends."""
        nothing = torch.zeros(0, 0, device=self.policy.device)
        known = [(nothing, nothing)] * len(groups)
        for members in self._plan(groups):
            chosen = [groups[i] for i in members]
            found = model.log_probs(
                [group.sequences for group in chosen],
                prompt_lengths(chosen),
                temperature=self.temperature,
                entropies=entropies,
            )
            metrics.computed_tokens += found.num_computed_tokens
            metrics.row_tokens += sum(group.num_row_tokens for group in chosen)
            sizes = [len(group.completions) for group in chosen]
            values = found.values_SL.split(sizes)
            others = [nothing] * len(sizes) if found.entropies_SL is None else found.entropies_SL.split(sizes)
            for i, one, other in zip(members, values, others, strict=True):
                width = max(len(completion.token_ids) for completion in groups[i].completions)
                known[i] = (one[:, :width], other[:, :width])
        return known

    def _used(self, evaluated: Evaluated, p: int, advantages_G: Tensor, used_G: Sequence[bool]) -> _Known:
        """A group with the completions that are learnt from; those without a token are not."""
        group = evaluated.groups[p]
        kept = [g for g, completion in enumerate(group.completions) if used_G[g] and completion.token_ids]
        return _Known(
            replace(group, completions=tuple(group.completions[g] for g in kept)),
            None if evaluated.old is None else evaluated.old[p][kept],
            None if evaluated.reference is None else evaluated.reference[p][kept],
            advantages_G[kept].to(self.policy.device),
        )

    def _step(self, known: Sequence[_Known]) -> UpdateMetrics:
        """One step of the optimiser, from some groups."""
        if not known:
            return UpdateMetrics()  # nothing to learn from
        metrics = UpdateMetrics(updates=1)
        by_token = self.settings.reduction == "token"
        denominator = sum(one.num_tokens if by_token else len(one.group.completions) for one in known)
        total = 0.0
        for members in self._plan([one.group for one in known]):
            loss, more = self._loss([known[i] for i in members])
            (loss / denominator).backward()
            total += float(loss.detach()) / denominator
            metrics += more
        metrics.loss_sum = total
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not (math.isfinite(norm) and math.isfinite(total)):
            self.optimizer.zero_grad(set_to_none=True)
            raise ModelError(
                "the policy's loss is not finite",
                got=f"loss {total}, gradient norm {norm}",
                need="finite numbers; the weights were not changed by this step",
                fix="lower policy.optimizer.kwargs.lr, or look at the rewards of this step",
            )
        metrics.grad_norm_sum = norm
        self.steps_begun += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _loss(self, known: Sequence[_Known]) -> tuple[Tensor, UpdateMetrics]:
        groups = [one.group for one in known]
        found = self.policy.log_probs(
            [group.sequences for group in groups], prompt_lengths(groups), temperature=self.temperature, entropies=True
        )
        values = found.values_SL.detach()
        old = _side_by_side([one.old_GL for one in known], values.shape[1])
        loss = policy_loss(
            found.values_SL,
            values if old is None else old,
            _side_by_side([one.reference_GL for one in known], values.shape[1]),
            torch.cat([one.advantages_G for one in known]),
            found.mask_SL,
            self.settings,
            generated_SL=_generated(groups, values)[0] if self.settings.needs_generated else None,
        )
        assert found.entropies_SL is not None
        metrics = UpdateMetrics(
            policy_sum=loss.policy_sum,
            kl_sum=loss.kl_sum,
            old_kl_sum=loss.old_kl_sum,
            clipped=loss.clipped,
            entropy_sum=float((found.entropies_SL * found.mask_SL).sum()),
            correction_sum=loss.correction_sum,
            not_finite=loss.not_finite,
            tokens=loss.num_tokens,
            computed_tokens=found.num_computed_tokens,
            row_tokens=sum(group.num_row_tokens for group in groups),
        )
        if old is None:  # the first and only time that the trainer sees what was sampled
            _add_mismatch(metrics, groups, values)
        return loss.total, metrics


def _kl_sums(policy: Sequence[Tensor], reference: Sequence[Tensor], estimator: KLEstimator) -> Tensor:
    """(P, G). Beyond a completion's end both are 0, which every estimator makes 0."""
    return _stacked([kl_estimate(x, y, estimator).sum(dim=1) for x, y in zip(policy, reference, strict=True)])


def _stacked(rows: Sequence[Tensor], missing: float = math.nan) -> Tensor:
    """Of (G,) each, as (P, G), where rewards are."""
    if not rows:
        return torch.full((0, 0), missing)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=missing).cpu()


def _side_by_side(parts: Sequence[Tensor | None], width: int) -> Tensor | None:
    """Values of several groups as one (S, width); None where there are none."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    # A group's own width counts completions that are not used: only zeros are cut off.
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in there])


def _require_generated(group: CompletionGroup) -> None:
    if any(completion.token_ids and completion.log_probs is None for completion in group.completions):
        raise ModelError(
            "the generator gave no log-probabilities of its own",
            where=group.prompt.where,
            need="one for each token: loss_fn.use_importance_sampling_correction and use_on_policy_kl_approximation "
            "weight by them",
            fix="a generator that returns them, or switch these two off",
        )


def _generated(groups: Sequence[CompletionGroup], like_SL: Tensor) -> tuple[Tensor, Tensor]:
    """The generator's log-probabilities, and which there are, (S, L)."""
    values = torch.zeros(like_SL.shape)
    known = torch.zeros(like_SL.shape, dtype=torch.bool)
    completions = [(group, completion) for group in groups for completion in group.completions]
    for s, (group, completion) in enumerate(completions):
        if completion.log_probs is None:
            continue
        length = len(completion.log_probs)
        if length != len(completion.token_ids):
            raise ModelError(
                "the generator's log-probabilities are not those of its tokens",
                where=group.prompt.where,
                got=f"{length} for a completion of {len(completion.token_ids)} tokens",
            )
        values[s, :length] = torch.tensor(completion.log_probs)
        known[s, :length] = True
    return values.to(like_SL), known.to(like_SL.device)


def _add_mismatch(metrics: UpdateMetrics, groups: Sequence[CompletionGroup], values_SL: Tensor) -> None:
    """How far the generator's own log-probabilities are off, as NeMo RL's `token_mult_prob_error`."""
    said, known = _generated(groups, values_SL)
    metrics.mismatch_sum += float((values_SL - said).abs().exp()[known].sum())
    metrics.mismatch_tokens += int(known.sum())
