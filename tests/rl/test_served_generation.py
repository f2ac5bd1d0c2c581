"""Samplers outside this process: whether each of them has all weights of the policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sampled import moved

from treeward.config.grpo_policy import GenerationConfig
from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import GenerationError
from treeward.rl.sampling import Row, sample, uniforms
from treeward.rl.served_generation import Request, Served, ServedGenerator


class Samplers(ServedGenerator):
    """One for each of `policies`, which take turns, as the engines that a run starts."""

    policies: Sequence[PolicyModel]

    def ask(self, requests: Sequence[Request], sampling: GenerationConfig, *, log_probs: bool) -> list[list[Served]]:
        rows = [Row(tuple(one.prompt_ids), one.most, uniforms(one.seed, 0, 0, one.most)) for one in requests]
        for number, policy in enumerate(self.policies):
            sample(policy, rows[number :: len(self.policies)], ended=self.reader.has_ended, temperature=1.0)
        return [[Served(token_ids=row.token_ids, log_probs=row.log_probs, finish_reason="length")] for row in rows]


@pytest.fixture
def samplers(policy: PolicyModel, tiny_tokenizer: Any) -> Samplers:
    made = Samplers(policy, tiny_tokenizer, GenerationConfig(backend="sglang", url="http://x"), end_ids=[0])
    made.version, made.num_samplers = 1, 2
    return made


def difference(samplers: Samplers, policy: PolicyModel, policies: Sequence[PolicyModel]) -> float:
    """In nats, from the error; 0 where there is none."""
    samplers.policies = policies
    try:
        samplers.compare(policy, where="here")
    except GenerationError as error:
        match = re.search(r"a mean difference of (\S+) nats, after the weights of version 1", str(error))
        assert match is not None
        return float(match[1])
    return 0.0


def test_one_of_several_samplers_with_stale_weights_is_enough(samplers: Samplers, policy: PolicyModel) -> None:
    stale = moved(policy, 0.003)
    assert difference(samplers, policy, [policy, policy]) == 0.0
    first, second = (difference(samplers, policy, pair) for pair in ([stale, policy], [policy, stale]))
    assert min(first, second) > 1e-3 and difference(samplers, policy, [stale, stale]) == max(first, second)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, "0.001"), (torch.bfloat16, "0.12")])
def test_the_tolerance_is_that_of_the_coarser_precision(
    samplers: Samplers, policy: PolicyModel, dtype: torch.dtype, tolerance: str
) -> None:
    samplers.policies, samplers.sampler_dtype = [moved(policy, 0.5)] * 2, dtype
    with pytest.raises(GenerationError, match=f"at most {tolerance}\n"):
        samplers.compare(policy, where="here")
    samplers.policies = [policy, policy]
    with pytest.raises(GenerationError, match="difference of nan nats"):
        samplers.compare(moved(policy, float("nan")), where="here")
