"""`ServedGenerator`: completions that are sampled outside this process, by a server or by engines that the run starts.

Both send one request per prompt, each with its own seed, check completions before anything is learnt from them, and
compare the sampler's log-probabilities with the policy's after each change of weights. The main process sends requests,
and all processes get the completions.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field, NonNegativeInt

from treeward import processes
from treeward.config.grpo_policy import GenerationConfig
from treeward.data.prompt_sets import Prompt
from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import CompletionGroup, GenerationError, Generator, SampledCompletion

logger = logging.getLogger(__name__)

_PROBE_PROMPTS, _PROBE_PROMPT_TOKENS, _PROBE_TOKENS = 16, 2, 24
_PROBE_SAMPLING = {"top_k": None, "top_p": 1.0, "stop_token_ids": None, "stop_strings": None}
# Measured against vLLM 0.32 on a CPU, in nats. Both in float32: 1e-5. Both in bfloat16: 0.050 to 0.060 with
# SmolLM2-135M-Instruct in twelve comparisons, 0.037 to 0.080 with Gemma 3 270M in eight.
_FLOAT32_TOLERANCE, _BFLOAT16_TOLERANCE = 1e-3, 0.12
_FIX = (
    "check that the sampler has this model and has loaded all weights, computes in policy.precision (--dtype, or "
    "vllm_cfg.precision), and gives log-probabilities at the temperature (vLLM: --logprobs-mode processed_logprobs; "
    "SGLang: no SGLANG_RETURN_ORIGINAL_LOGPROB); other numerics need a larger policy.generation.probe_tolerance"
)


class CompletionRequest(NamedTuple):
    """`num_completions` completions of at most `most` tokens to one prompt. `description`: the request in errors.

    The seed of a completion is `seed` plus its index.
    """

    prompt_ids: list[int]
    num_completions: int
    most: int
    seed: int
    description: str


class Served(BaseModel):
    """A completion as the sampler gives it."""

    token_ids: list[Annotated[NonNegativeInt, Field(strict=True)]]
    # A server that computes in bfloat16 may give log-probabilities a little above 0.
    log_probs: list[Annotated[float, Field(strict=True, le=1e-2, allow_inf_nan=False)]] | None = None
    finish_reason: Literal["stop", "length"]


class ServedGenerator(Generator):
    """`version`: of the sampler's weights. `num_samplers`: samplers to compare with the policy. `sampler_dtype`: their
    dtype; None if it is unknown.
    """

    version: int | None = None
    num_samplers = 1
    sampler_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vocabulary = int(self.policy.hf.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        if not self.config.gives_log_probs:
            logger.warning(
                "With top_k or top_p %s gives log-probabilities after top_k and top_p, or at temperature 1, and does "
                "not say which: they are not used, so train/token_mult_prob_error is not known.", self.config.backend,
            )  # fmt: skip

    @abstractmethod
    def ask(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[Served]]:
        """The completions of each request, in order. The main process alone calls it. Raises `GenerationError`."""

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """See `Generator`. The completions of a prompt are one request. The sampler may ignore the seed."""
        budgets = self.budgets(prompts, prompt_ids)
        # The sampler adds the completion's index to the seed, which fits into signed 32 bits.
        states = [np.random.SeedSequence([seed % 2**64, p]).generate_state(1)[0] for p in range(len(prompts))]
        description = "{} completions of at most {} tokens to a prompt of {} ({})"
        requests = [
            CompletionRequest(list(ids), num_completions, most, int(state) >> 2,
                    description.format(num_completions, most, len(ids), prompt.where))
            for prompt, ids, most, state in zip(prompts, prompt_ids, budgets, states, strict=True)
        ]  # fmt: skip
        served = processes.on_main(lambda: self.ask(requests, self.config, log_probs=self.config.gives_log_probs))
        groups: list[CompletionGroup] = []
        for prompt, ids, completions in zip(prompts, prompt_ids, served, strict=True):
            read = [self._completion(completion, prompt.opening) for completion in completions]
            groups.append(CompletionGroup(prompt, tuple(ids), tuple(read)))
        return groups

    def checked(
        self, responses: Sequence[Mapping[str, Any]], request: CompletionRequest, *, log_probs: bool
    ) -> list[Served]:
        """The completions of a response, checked against the request. Raises `ValueError` where they do not fit."""
        completions = [Served.model_validate(response) for response in responses]
        if len(completions) != request.num_completions:
            raise ValueError(f"{len(completions)} completions instead of {request.num_completions}")
        for completion in completions:
            ids, log_prob_list = completion.token_ids, completion.log_probs or []
            if len(ids) > request.most or max(ids, default=0) >= self._vocabulary:
                raise ValueError(f"{len(ids)} token ids up to {max(ids)}; the policy has {self._vocabulary} tokens")
            if log_probs and len(log_prob_list) != len(ids):
                raise ValueError(f"{len(log_prob_list)} log-probabilities for {len(ids)} tokens")
        return completions

    def _completion(self, served: Served, opening: str) -> SampledCompletion:
        truncated = served.finish_reason == "length"
        return self.reader.completion(served.token_ids, served.log_probs, opening=opening, truncated=truncated)

    @cached_property
    def _ordinary_tokens(self) -> list[int]:
        special = self.tokenizer.added_tokens_decoder  # such as an image, which a prompt cannot have alone
        return sorted(i for i in self.tokenizer.get_vocab().values() if i < self._vocabulary and i not in special)

    @torch.no_grad()
    def compare(self, policy: PolicyModel, *, where: str) -> None:
        """Raise `GenerationError` where a sampler's weights differ from the policy's, all or in part.

        Sampler and policy give the log-probabilities of the same completions, to prompts that are new with each
        version. The mean difference of each sampler must be within `probe_tolerance`.
        """
        random, num_prompts = np.random.default_rng(self.version), _PROBE_PROMPTS * self.num_samplers
        begin = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        prompts = [
            begin + ids for ids in random.choice(self._ordinary_tokens, (num_prompts, _PROBE_PROMPT_TOKENS)).tolist()
        ]
        requests = [CompletionRequest(ids, 1, _PROBE_TOKENS, 0, "the comparison of the weights") for ids in prompts]
        sampling = self.config.model_copy(update=_PROBE_SAMPLING)
        served = processes.on_main(lambda: self.ask(requests, sampling, log_probs=True))
        sampled = [torch.tensor(completion.log_probs) for [completion] in served]
        groups = [[ids + completion.token_ids] for ids, [completion] in zip(prompts, served, strict=True)]
        training, differences = policy.training, []
        policy.eval()
        for temperature in {self.config.temperature} | (set() if self.config.gives_log_probs else {1.0}):
            values = policy.log_probs(groups, [[len(ids)] for ids in prompts], temperature=temperature)
            off_N = (values.values_SL[values.mask_SL].float().cpu() - torch.cat(sampled)).abs()
            off = off_N.split([len(log_probs) for log_probs in sampled])
            means = [torch.cat(off[n :: self.num_samplers]).mean() for n in range(self.num_samplers)]
            differences.append(float(torch.stack(means).max()))  # a tensor's maximum keeps NaN
        policy.train(training)
        difference, dtypes = min(differences), {policy.compute_dtype or policy.hf.dtype, self.sampler_dtype}
        is_exact = dtypes <= {torch.float32, None}
        tolerance = self.config.probe_tolerance or (_FLOAT32_TOLERANCE if is_exact else _BFLOAT16_TOLERANCE)
        if not difference <= tolerance:
            raise GenerationError(
                "the sampler's log-probabilities are not those of the policy",
                where=where,
                got=f"a mean difference of {difference:.3g} nats, after the weights of version {self.version}",
                need=f"at most {tolerance:g}",
                fix=_FIX,
            )
