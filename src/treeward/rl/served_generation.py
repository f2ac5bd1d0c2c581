"""`ServedGenerator`: completions that are sampled outside this process, by a server or by engines
that the run starts.

Both send one request per prompt, each with its own seed, check completions before anything is
learnt from them, and compare the sampler's log-probabilities with the policy's after each change of
weights. The main process sends requests, and all processes get the completions.
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

# The probe: 16 prompts of two random tokens to each sampler, completed by at most 24. One is too few:
# within 0.1 nats over one completion a run went on whose vLLM had kept the old output head.
_PROBE_PROMPTS = 16
_PROBE_PROMPT_TOKENS = 2
_PROBE_TOKENS = 24
_PROBE_SAMPLING = {"top_k": None, "top_p": 1.0, "stop_token_ids": None, "stop_strings": None}
# Measured against vLLM 0.32 on a CPU, in nats. Both in float32: 1e-5. Both in bfloat16: 0.050 to
# 0.060 with SmolLM2-135M-Instruct in twelve comparisons, 0.037 to 0.080 with Gemma 3 270M in eight.
_FLOAT32_TOLERANCE = 1e-3
_BFLOAT16_TOLERANCE = 0.12
_FIX = (
    "check that the sampler has this model and has loaded all weights, computes in "
    "policy.precision (--dtype, or vllm_cfg.precision), and gives log-probabilities at the "
    "temperature (vLLM: --logprobs-mode processed_logprobs; SGLang: no "
    "SGLANG_RETURN_ORIGINAL_LOGPROB); other numerics need a larger "
    "policy.generation.probe_tolerance"
)


class CompletionRequest(NamedTuple):
    """`num_completions` completions of at most `most` tokens to one prompt. `description`: the
    request in errors.

    The seed of a completion is `seed` plus its index.
    """

    prompt_ids: list[int]
    num_completions: int
    most: int
    seed: int
    description: str


# A server that computes in bfloat16 may give log-probabilities a little above 0.
_LogProb = Annotated[float, Field(strict=True, le=1e-2, allow_inf_nan=False)]


class Served(BaseModel):
    """A completion as the sampler gives it."""

    token_ids: list[Annotated[NonNegativeInt, Field(strict=True)]]
    log_probs: list[_LogProb] | None = None
    finish_reason: Literal["stop", "length"]


class ServedGenerator(Generator):
    """`version`: of the sampler's weights. `num_samplers`: samplers to compare with the policy.
    `sampler_dtype`: their dtype; None if it is unknown.
    """

    version: int | None = None
    num_samplers = 1
    sampler_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        embeddings = self.policy.hf.get_input_embeddings()
        self._vocabulary = int(embeddings.num_embeddings)  # type: ignore[arg-type]
        if not self.config.gives_log_probs:
            logger.warning(
                "With top_k or top_p %s gives log-probabilities after top_k and top_p, or at "
                "temperature 1, and does not say which: they are not used, so "
                "train/token_mult_prob_error is not known.",
                self.config.backend,
            )

    @abstractmethod
    def ask(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[Served]]:
        """The completions of each request, in order. The main process alone calls it. Raises
        `GenerationError`."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Sequence[int]],
        *,
        num_completions: int,
        seed: int,
    ) -> list[CompletionGroup]:
        """See `Generator`. The completions of a prompt are one request. The sampler may ignore the
        seed."""
        budgets = self.budgets(prompts, prompt_ids)
        requests: list[CompletionRequest] = []
        for p, prompt in enumerate(prompts):
            num_tokens = len(prompt_ids[p])
            most = budgets[p]
            [state] = np.random.SeedSequence([seed % 2**64, p]).generate_state(1)
            request = CompletionRequest(
                list(prompt_ids[p]),
                num_completions,
                most,
                # The sampler adds the completion's index, and the sum fits into signed 32 bits.
                seed=int(state) >> 2,
                description=(
                    f"{num_completions} completions of at most {most} tokens to a prompt of "
                    f"{num_tokens} ({prompt.where})"
                ),
            )
            requests.append(request)
        has_log_probs = self.config.gives_log_probs
        served = processes.on_main(lambda: self.ask(requests, self.config, log_probs=has_log_probs))
        groups: list[CompletionGroup] = []
        for prompt, ids, responses in zip(prompts, prompt_ids, served, strict=True):
            completions: list[SampledCompletion] = []
            for response in responses:
                # The sampler may have stopped without an end token. At its limit SGLang does not
                # look at the last token, which may be one.
                truncated = None
                if response.finish_reason == "stop":
                    truncated = False
                completion = self.reader.completion(
                    response.token_ids,
                    response.log_probs,
                    opening=prompt.opening,
                    truncated=truncated,
                )
                completions.append(completion)
            groups.append(CompletionGroup(prompt, tuple(ids), tuple(completions)))
        return groups

    def checked(
        self, responses: Sequence[Mapping[str, Any]], request: CompletionRequest, *, log_probs: bool
    ) -> list[Served]:
        """The completions of a response, checked against the request. Raises `ValueError` where
        they do not fit."""
        completions = [Served.model_validate(response) for response in responses]
        if len(completions) != request.num_completions:
            raise ValueError(f"{len(completions)} completions instead of {request.num_completions}")
        for completion in completions:
            ids = completion.token_ids
            num_tokens = len(ids)
            highest = max(ids, default=0)
            vocabulary = self._vocabulary
            if num_tokens > request.most or highest >= vocabulary:
                raise ValueError(
                    f"{num_tokens} token ids up to {highest}; the policy has {vocabulary} tokens",
                )
            num_log_probs = len(completion.log_probs or [])
            if log_probs and num_log_probs != num_tokens:
                raise ValueError(f"{num_log_probs} log-probabilities for {num_tokens} tokens")
        return completions

    @cached_property
    def _ordinary_tokens(self) -> list[int]:
        # An added token can stand for an image, which a prompt cannot have alone.
        added = self.tokenizer.added_tokens_decoder
        ids = self.tokenizer.get_vocab().values()
        return sorted(i for i in ids if i < self._vocabulary and i not in added)

    @torch.no_grad()
    def compare(self, policy: PolicyModel, *, where: str) -> None:
        """Raise `GenerationError` where a sampler's weights differ from the policy's, all or in
        part.

        Sampler and policy give the log-probabilities of the same completions, to prompts that are
        new with each version. The mean difference of each sampler must be within `probe_tolerance`.
        """
        random = np.random.default_rng(self.version)
        shape = (_PROBE_PROMPTS * self.num_samplers, _PROBE_PROMPT_TOKENS)
        bos = self.tokenizer.bos_token_id
        prompts: list[list[int]] = []
        for ids in random.choice(self._ordinary_tokens, shape).tolist():
            if bos is not None:
                ids.insert(0, bos)
            prompts.append(ids)
        requests: list[CompletionRequest] = []
        for ids in prompts:
            request = CompletionRequest(
                ids,
                num_completions=1,
                most=_PROBE_TOKENS,
                seed=0,
                description="the comparison of the weights",
            )
            requests.append(request)
        sampling = self.config.model_copy(update=_PROBE_SAMPLING)
        served = processes.on_main(lambda: self.ask(requests, sampling, log_probs=True))
        sampled: list[torch.Tensor] = []
        groups: list[list[list[int]]] = []
        for ids, [completion] in zip(prompts, served, strict=True):
            sampled.append(torch.tensor(completion.log_probs))
            groups.append([ids + completion.token_ids])
        prompt_lengths = [[len(ids)] for ids in prompts]
        completion_lengths = [len(log_probs) for log_probs in sampled]
        temperatures = {self.config.temperature}
        if not self.config.gives_log_probs:
            # The sampler does not say at which of the two it measures: the closer one counts.
            temperatures.add(1.0)
        training = policy.training
        policy.eval()
        differences: list[float] = []
        for temperature in temperatures:
            values = policy.log_probs(groups, prompt_lengths, temperature=temperature)
            values_N = values.values_SL[values.mask_SL].float().cpu()
            off = (values_N - torch.cat(sampled)).abs().split(completion_lengths)
            # Requests are dealt out to the samplers in turn.
            means = []
            for n in range(self.num_samplers):
                means.append(torch.cat(off[n :: self.num_samplers]).mean())
            differences.append(float(torch.stack(means).max()))  # a tensor's maximum keeps NaN
        policy.train(training)
        difference = min(differences)
        dtypes = {policy.compute_dtype or policy.hf.dtype, self.sampler_dtype}
        is_exact = dtypes <= {torch.float32, None}
        tolerance = self.config.probe_tolerance
        if not tolerance:
            tolerance = _FLOAT32_TOLERANCE if is_exact else _BFLOAT16_TOLERANCE
        if not difference <= tolerance:  # so that NaN fails too
            nats = f"{difference:.3g} nats"
            raise GenerationError(
                "the sampler's log-probabilities are not those of the policy",
                where=where,
                got=f"a mean difference of {nats}, after the weights of version {self.version}",
                need=f"at most {tolerance:g}",
                fix=_FIX,
            )
