"""What tests of policies share: prompts, a small policy, whether completions are sampled from it,
its gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from families import ROW_FAMILIES, causal_model
from torch import Tensor
from transformers import PreTrainedModel

from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion

PROMPTS = [
    Prompt(({"role": "user", "content": text},), where=f"row {n}")
    for n, text in enumerate(("a", "bb", "c d"))
]
IDS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
ENDS = list(range(3, 120))  # so many that completions end soon


def policy_of(family: str) -> PolicyModel:
    # Gemma scales its embeddings: behind a tied head it would repeat the last token, whatever
    # attention does.
    hf = causal_model(family, **({"tie_word_embeddings": False} if family == "gemma2" else {}))
    return PolicyModel(hf, layout="rows" if family in ROW_FAMILIES else "tree")


def moved(policy: PolicyModel, by: float) -> PolicyModel:
    """With other weights."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in other.hf.parameters():
            parameter.add_(
                by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return other


def completions_of(groups: Sequence[CompletionGroup]) -> list[SampledCompletion]:
    return [completion for group in groups for completion in group.completions]


def sequences_of(group: CompletionGroup) -> list[list[int]]:
    """Token ids of prompt and completion, for each."""
    return [list(group.sequence(g)) for g in range(len(group.completions))]


def prompt_lengths(groups: Sequence[CompletionGroup]) -> list[list[int]]:
    """Prompt length of each sequence of each group."""
    return [[len(group.prompt_ids)] * len(group.completions) for group in groups]


def assert_sampled_from(
    policy: PolicyModel,
    groups: Sequence[CompletionGroup],
    *,
    temperature: float = 1.0,
    atol: float = 1e-4,
) -> None:
    """Their prompts are `PROMPTS`, their log-probabilities the policy's, and they end where one of
    `ENDS` comes."""
    assert [group.prompt for group in groups] == PROMPTS
    assert [group.prompt_ids for group in groups] == [tuple(ids) for ids in IDS]
    found = policy.log_probs(
        list(map(sequences_of, groups)), prompt_lengths(groups), temperature=temperature
    )
    completions = completions_of(groups)
    for s, completion in enumerate(completions):
        own = found.values_SL[s][found.mask_SL[s]].detach()
        assert torch.allclose(own, torch.tensor(completion.log_probs), atol=atol)
        assert completion.truncated == (completion.token_ids[-1] not in ENDS)
    assert len({one.token_ids for one in completions}) > 4


class Recorded(torch.optim.SGD):
    """SGD that remembers the gradients of every step."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf.parameters(), lr=0.05)
        self.gradients: list[Tensor] = []

    def step(self, *args: Any) -> Any:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))
        return super().step(*args)
