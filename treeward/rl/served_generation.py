"""`ServedGenerator`: completions that are sampled outside this process, by a server or by engines that the run starts.

What both have in common: requests of one prompt each with a seed of its own, completions that are checked before they
are learnt from, and the comparison of the sampler's log-probabilities with the policy's after each change of weights.
Of several processes the main one asks, and all get what came.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field, NonNegativeInt

from treeward.config.grpo_policy import GenerationConfig
from treeward.data.prompt_sets import Prompt
from treeward.model.policy_model import PolicyModel
from treeward.parallel import processes
from treeward.rl.experience import CompletionGroup, SampledCompletion
from treeward.rl.generation import GenerationError, Generator

logger = logging.getLogger(__name__)

_PROBE_TEXT, _PROBE_TOKENS = "The quick brown fox", 16
_PROBE_SAMPLING = {"top_k": None, "top_p": 1.0, "stop_token_ids": None, "stop_strings": None}


class Request(NamedTuple):
    """`num_completions` completions of at most `most` tokens to one prompt. `asked`: what it asks for, in errors.

    The seed of a completion is `seed` plus its index.
    """

    prompt_ids: list[int]
    num_completions: int
    most: int
    seed: int
    asked: str


class Served(BaseModel):
    """A completion as the sampler gives it. `token_ids`: None where it gives only `text`."""

    token_ids: list[Annotated[NonNegativeInt, Field(strict=True)]] | None = None
    # A server that computes in bfloat16 may give log-probabilities a little above 0.
    log_probs: list[Annotated[float, Field(strict=True, le=1e-2, allow_inf_nan=False)]] | None = None
    finish_reason: Literal["stop", "length"]
    text: str | None = None


class ServedGenerator(Generator):
    """`version`: of the weights that the sampler was given last."""

    version: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vocabulary = int(self.policy.hf.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        if not self.config.gives_log_probs and self.config.backend != "openai":
            logger.warning(
                "With top_k or top_p %s gives log-probabilities after top_k and top_p, or at temperature 1, and does "
                "not say which: they are not used, so train/token_mult_prob_error is not known.", self.config.backend,
            )  # fmt: skip

    @abstractmethod
    def ask(self, requests: Sequence[Request], sampling: GenerationConfig, *, log_probs: bool) -> list[list[Served]]:
        """The completions of each request, in order. Raises `GenerationError` where they cannot be had.

        The main process alone calls it.
        """

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """See `Generator`. The completions of a prompt are one request. It is up to the sampler to heed the seed."""
        budgets = self.budgets(prompts, prompt_ids)
        # The sampler adds the completion's index to the seed, which fits into signed 32 bits.
        states = [np.random.SeedSequence([seed % 2**64, p]).generate_state(1)[0] for p in range(len(prompts))]
        asked = "{} completions of at most {} tokens to a prompt of {} ({})"
        requests = [
            Request(list(ids), num_completions, most, int(state) >> 2,
                    asked.format(num_completions, most, len(ids), prompt.where))
            for prompt, ids, most, state in zip(prompts, prompt_ids, budgets, states, strict=True)
        ]  # fmt: skip
        served = processes.on_main(lambda: self.ask(requests, self.config, log_probs=self.config.gives_log_probs))
        return [
            CompletionGroup(prompt, tuple(ids), tuple(self._completion(one) for one in completions))
            for prompt, ids, completions in zip(prompts, prompt_ids, served, strict=True)
        ]

    def checked(self, given: Sequence[Mapping[str, Any]], request: Request, *, log_probs: bool) -> list[Served]:
        """Completions as they came, in the order of the request. Raises `ValueError` for what was not asked for."""
        found = [Served.model_validate(one) for one in given]
        if len(found) != request.num_completions:
            raise ValueError(f"{len(found)} completions instead of {request.num_completions}")
        for one in found:
            ids, said = one.token_ids or [], one.log_probs or []
            if len(ids) > request.most or max(ids, default=0) >= self._vocabulary:
                raise ValueError(f"{len(ids)} token ids up to {max(ids)}; the policy has {self._vocabulary} tokens")
            if log_probs and one.token_ids is not None and len(said) != len(ids):
                raise ValueError(f"{len(said)} log-probabilities for {len(ids)} tokens")
        return found

    def _completion(self, served: Served) -> SampledCompletion:
        truncated = served.finish_reason == "length"
        if served.token_ids is not None:
            return self.reader.completion(served.token_ids, served.log_probs, truncated=truncated)
        tokens = list(self.tokenizer(served.text, add_special_tokens=False).input_ids)
        end = self.tokenizer.eos_token_id
        if not truncated and not self.config.stop_strings and end in self.reader.end_ids:
            tokens.append(end)
        return self.reader.completion(tokens, None, truncated=truncated)

    @torch.no_grad()
    def compare(self, policy: PolicyModel, tolerance: float, *, where: str, fix: str) -> GenerationError | None:
        """The sampler's log-probabilities of a completion, sampled from all tokens, beside the policy's own.

        Returns the error where their mean difference is above `tolerance`, in nats: the weights are others.
        """
        ids = list(self.tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids) or [min(self.reader.end_ids)]
        request = Request(ids, 1, _PROBE_TOKENS, 0, "the comparison of the weights")
        sampling = self.config.model_copy(update=_PROBE_SAMPLING)
        [[completion]] = processes.on_main(lambda: self.ask([request], sampling, log_probs=True))
        training, tokens = policy.training, completion.token_ids or []
        policy.eval()
        own = {
            temperature: policy.log_probs([[ids + tokens]], [[len(ids)]], temperature=temperature).values_SL[0]
            for temperature in {self.config.temperature} | (set() if self.config.gives_log_probs else {1.0})
        }
        policy.train(training)
        said = torch.tensor(completion.log_probs)
        apart = min(float((one.float().cpu() - said).abs().mean()) if tokens else 0.0 for one in own.values())
        if apart <= tolerance:
            return None
        return GenerationError(
            "the server's log-probabilities are not those of the policy",
            where=where,
            got=f"a mean difference of {apart:.3g} nats, after the weights of version {self.version}",
            need=f"at most {tolerance:g}",
            fix=fix,
        )
