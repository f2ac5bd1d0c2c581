"""`PolicyUpdater`: from groups of answers with their advantages to new weights, each prompt computed once a group.

    updater = PolicyUpdater(policy, optimizer, reference=reference, settings=PolicyLossSettings(kl_coefficient=0.01))
    metrics = updater.update(groups, advantages, used)

Old and reference log-probabilities are computed by the trainer itself, in the numerics of the update, whatever the
generator says. A batch may be updated from several times, in parts of some prompts each; every part's sums are divided
by the part's own denominators, however it is cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.experience import AnswerGroup, prompt_lengths
from treeward.rl.policy_loss import PolicyLossSettings, policy_loss, token_weights
from treeward.tree.batch import plan_micro_batches

__all__ = ["PolicyUpdater", "UpdateMetrics"]


@dataclass(slots=True)
class UpdateMetrics:
    """Sums over all updates of a batch; `means` divides them.

    `tokens`: predicted ones that were learnt from, counted once for each update. `mismatch_sum`: exp |trainer's less
    generator's log-probability| of the `mismatch_tokens` whose generator said one, before the first update.
    """

    loss_sum: float = 0.0
    policy_sum: float = 0.0
    kl_sum: float = 0.0
    old_kl_sum: float = 0.0
    clipped: float = 0.0
    entropy_sum: float = 0.0
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
        tokens, updates = max(self.tokens, 1), max(self.updates, 1)
        found = {
            "loss": self.loss_sum / updates,
            "policy_loss": self.policy_sum / tokens,
            "kl": self.kl_sum / tokens,
            "old_kl": self.old_kl_sum / tokens,
            "clip_fraction": self.clipped / tokens,
            "entropy": self.entropy_sum / tokens,
            "grad_norm": self.grad_norm_sum / updates,
        }
        if self.mismatch_tokens:
            found["token_mult_prob_error"] = self.mismatch_sum / self.mismatch_tokens
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """What is fixed of a group while it is learnt from: log-probabilities (G, L), advantages (G,), mask (G, L)."""

    group: AnswerGroup
    old_GL: Tensor | None
    reference_GL: Tensor | None
    advantages_G: Tensor
    used_G: Tensor


class PolicyUpdater:
    """Updates `policy` by `optimizer`.

    `reference`: what KL is measured from; None for none. `micro_batch_tokens`: computed tokens of one forward and
    backward pass; a group is never split. `max_grad_norm`: None for no clipping. `temperature`: of the sampling.
    `prompts_per_update`: how many groups one step of the optimiser learns from; None for all. `updates_per_batch`: how
    often the whole batch is gone through. `on_step`: called after each optimiser step, for schedules.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: torch.optim.Optimizer,
        *,
        reference: PolicyModel | None = None,
        settings: PolicyLossSettings | None = None,
        micro_batch_tokens: int = 4096,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        prompts_per_update: int | None = None,
        updates_per_batch: int = 1,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self.optimizer, self.reference = policy, optimizer, reference
        self.settings = settings or PolicyLossSettings()
        self.micro_batch_tokens, self.max_grad_norm = micro_batch_tokens, max_grad_norm
        self.temperature = temperature
        self.prompts_per_update, self.updates_per_batch = prompts_per_update, updates_per_batch
        self.on_step = on_step

    def update(self, groups: Sequence[AnswerGroup], advantages_PG: Tensor, used_PG: Tensor) -> UpdateMetrics:
        """Learn from groups in the order given. `used_PG`: which answers are learnt from, bool (P, G).

        Raises `ModelError` for a loss or gradient that is not finite; the weights are then those before that step.
        """
        size = self.prompts_per_update or max(len(groups), 1)
        parts = [range(start, min(start + size, len(groups))) for start in range(0, len(groups), size)]
        # Updated from once, in one part, the policy is its own old policy, and need not be asked twice.
        ask_old = len(parts) * self.updates_per_batch > 1
        metrics, known = self._known(groups, advantages_PG, used_PG, ask_old)
        for _ in range(self.updates_per_batch):
            for part in parts:
                metrics += self._step([known[i] for i in part])
        return metrics

    @torch.no_grad()
    def _known(
        self, groups: Sequence[AnswerGroup], advantages_PG: Tensor, used_PG: Tensor, ask_old: bool
    ) -> tuple[UpdateMetrics, list[_Known]]:
        metrics = UpdateMetrics()
        old: list[Tensor | None] = [None] * len(groups)
        reference: list[Tensor | None] = [None] * len(groups)
        for members in self._plan(groups):
            chosen = [groups[i] for i in members]
            for model, known in ((self.policy if ask_old else None, old), (self.reference, reference)):
                if model is not None:
                    for i, values in zip(members, self._log_probs(model, chosen, metrics), strict=True):
                        known[i] = values
                        if known is old:
                            _add_mismatch(metrics, groups[i], values)
        device = self.policy.device
        return metrics, [
            _Known(group, old[i], reference[i], advantages_PG[i].to(device), used_PG[i].to(device))
            for i, group in enumerate(groups)
        ]

    def _log_probs(self, model: PolicyModel, groups: Sequence[AnswerGroup], metrics: UpdateMetrics) -> list[Tensor]:
        found = model.log_probs([g.sequences for g in groups], prompt_lengths(groups), temperature=self.temperature)
        metrics.computed_tokens += found.num_computed_tokens
        metrics.row_tokens += sum(group.num_row_tokens for group in groups)
        return list(found.values_SL.split([len(group.answers) for group in groups]))

    def _step(self, known: Sequence[_Known]) -> UpdateMetrics:
        """One step of the optimiser, from some groups."""
        metrics = UpdateMetrics(updates=1)
        denominator = sum(float(token_weights(_mask(one), self.settings.reduction)[1]) for one in known)
        if denominator == 0:
            return UpdateMetrics()  # nothing to learn from
        total = 0.0
        for members in self._plan([one.group for one in known]):
            chosen = [known[i] for i in members]
            loss, more = self._loss(chosen)
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
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.on_step()
        return metrics

    def _loss(self, known: Sequence[_Known]) -> tuple[Tensor, UpdateMetrics]:
        groups = [one.group for one in known]
        found = self.policy.log_probs(
            [group.sequences for group in groups], prompt_lengths(groups), temperature=self.temperature, entropies=True
        )
        mask = found.mask_SL & torch.cat([one.used_G for one in known])[:, None].bool()
        old = _side_by_side([one.old_GL for one in known], found.values_SL)
        loss = policy_loss(
            found.values_SL,
            found.values_SL.detach() if old is None else old,
            _side_by_side([one.reference_GL for one in known], found.values_SL),
            torch.cat([one.advantages_G for one in known]),
            mask,
            self.settings,
        )
        metrics = UpdateMetrics(
            policy_sum=loss.policy_sum,
            kl_sum=loss.kl_sum,
            old_kl_sum=loss.old_kl_sum,
            clipped=loss.clipped,
            tokens=loss.num_tokens,
            computed_tokens=found.num_computed_tokens,
            row_tokens=sum(group.num_row_tokens for group in groups),
        )
        assert found.entropies_SL is not None
        metrics.entropy_sum = float((found.entropies_SL * mask).sum())
        if old is None:  # the first and only time that the trainer sees what was sampled
            sizes = [len(group.answers) for group in groups]
            for group, values in zip(groups, found.values_SL.detach().split(sizes), strict=True):
                _add_mismatch(metrics, group, values)
        return loss.total, metrics

    def _plan(self, groups: Sequence[AnswerGroup]) -> Iterator[list[int]]:
        sizes = [group.num_tree_tokens if self.policy.layout == "tree" else group.num_row_tokens for group in groups]
        yield from plan_micro_batches(sizes, max_tokens=self.micro_batch_tokens)


def _mask(known: _Known) -> Tensor:
    """Which tokens are learnt from, bool (G, L)."""
    lengths = torch.tensor([len(answer.token_ids) for answer in known.group.answers], device=known.used_G.device)
    places = torch.arange(max(int(lengths.max()), 1), device=lengths.device)
    return (places < lengths[:, None]) & known.used_G[:, None].bool()


def _side_by_side(parts: Sequence[Tensor | None], like_SL: Tensor) -> Tensor | None:
    """Values of several groups as one (S, L); None where there are none."""
    if any(part is None for part in parts):
        return None
    width = like_SL.shape[1]
    fitted = [
        torch.nn.functional.pad(part, (0, max(width - part.shape[1], 0)))[:, :width]
        for part in parts
        if part is not None
    ]
    return torch.cat(fitted)


def _add_mismatch(metrics: UpdateMetrics, group: AnswerGroup, values_GL: Tensor) -> None:
    """How far the generator's own log-probabilities are off, as NeMo RL's `token_mult_prob_error`."""
    for answer, values_L in zip(group.answers, values_GL, strict=True):
        if answer.log_probs is not None:
            said = torch.tensor(answer.log_probs, device=values_L.device, dtype=values_L.dtype)
            metrics.mismatch_sum += float((values_L[: len(said)] - said).abs().exp().sum())
            metrics.mismatch_tokens += len(said)
