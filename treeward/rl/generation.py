"""`LocalGenerator`: answers sampled from the policy itself, in this process, by Hugging Face's `generate`.

    generator = LocalGenerator(policy, tokenizer, GenerationSettings(max_new_tokens=256, temperature=1.0))
    groups = generator.generate(prompts, prompt_ids, num_answers=8, seed=step)

An answer's tokens are those that were sampled, with the end of the turn if it came; `truncated` says that it did not.
The same seed gives the same answers, whatever was sampled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from treeward.errors import ConfigError, ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.experience import Answer, AnswerGroup, Prompt

__all__ = ["GenerationSettings", "Generator", "LocalGenerator"]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How answers are sampled. `top_k`, `top_p`: None for all tokens. `log_probs`: keep the generator's own, at the
    temperature, before `top_k` and `top_p`; it costs the logits of all steps in memory. `batch_size`: answers at once.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    log_probs: bool = True
    batch_size: int = 64


class Generator(Protocol):
    """Whatever samples answers: the policy in this process, or a server with its weights."""

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_answers: int, seed: int
    ) -> list[AnswerGroup]: ...


class LocalGenerator:
    """Samples from `policy`. `end_ids`: tokens that end an answer; None: those of the model's generation settings and
    the tokenizer's end of text.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings | None = None,
        *,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.settings = settings or GenerationSettings()
        self.end_ids = frozenset(_end_ids(policy, tokenizer) if end_ids is None else end_ids)
        if not self.end_ids:
            raise ConfigError(
                "nothing says where an answer ends",
                field="end_ids",
                got="no end-of-sequence token in the model's generation settings or the tokenizer",
                need="at least one token id",
            )

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_answers: int, seed: int
    ) -> list[AnswerGroup]:
        """`num_answers` answers to each prompt, in order. Raises `ModelError` for a prompt that leaves no room."""
        self._check_room(prompts, prompt_ids)
        at_once = max(1, self.settings.batch_size // num_answers)
        groups: list[AnswerGroup] = []
        training = self.policy.training
        self.policy.eval()
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.policy.plain_attention():
            torch.manual_seed(seed)
            for start in range(0, len(prompts), at_once):
                chosen = slice(start, start + at_once)
                groups += self._some(prompts[chosen], prompt_ids[chosen], num_answers)
        self.policy.train(training)
        return groups

    def _some(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], num_answers: int
    ) -> list[AnswerGroup]:
        settings = self.settings
        longest = max(map(len, prompt_ids))
        pad = min(self.end_ids)
        rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompt_ids]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids]
        sampled: Any = self.policy.hf.generate(  # type: ignore[operator]
            input_ids=torch.tensor(rows, device=self.policy.device),
            attention_mask=torch.tensor(mask, device=self.policy.device),
            generation_config=GenerationConfig(
                do_sample=True,
                num_return_sequences=num_answers,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k or 0,
                top_p=1.0 if settings.top_p is None else settings.top_p,
                eos_token_id=sorted(self.end_ids),
                pad_token_id=pad,
                return_dict_in_generate=True,
                output_logits=settings.log_probs,
            ),
        )
        new_SL: Tensor = sampled.sequences[:, longest:]
        said_SL = _log_probs(sampled.logits, new_SL, settings.temperature) if settings.log_probs else None
        answers = [
            self._answer(tokens, None if said_SL is None else said_SL[s]) for s, tokens in enumerate(new_SL.tolist())
        ]
        return [
            AnswerGroup(prompt, tuple(ids), tuple(answers[p * num_answers : (p + 1) * num_answers]))
            for p, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
        ]

    def _answer(self, tokens: list[int], said_L: Tensor | None) -> Answer:
        end = next((t for t, token in enumerate(tokens) if token in self.end_ids), None)
        kept = tokens if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(kept if end is None else kept[:-1], skip_special_tokens=True)
        log_probs = None if said_L is None else tuple(said_L[: len(kept)].tolist())
        return Answer(tuple(kept), str(text), truncated=end is None, log_probs=log_probs)

    def _check_room(self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]]) -> None:
        limit = getattr(self.policy.hf.config.get_text_config(), "max_position_embeddings", None)
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            if limit is not None and len(ids) + self.settings.max_new_tokens > limit:
                raise ModelError(
                    "a prompt leaves no room for an answer",
                    where=prompt.where,
                    got=f"{len(ids)} tokens, and {self.settings.max_new_tokens} for the answer",
                    need=f"at most {limit} together, the policy's positions",
                )


def _log_probs(logits: Sequence[Tensor], tokens_SL: Tensor, temperature: float) -> Tensor:
    """Of each sampled token, at the temperature; float32 (S, L), a step at a time to spare memory."""
    columns = []
    for step, logits_SV in enumerate(logits):
        scaled_SV = logits_SV.float() / temperature
        picked_S = scaled_SV.gather(-1, tokens_SL[:, step, None])[:, 0]
        columns.append(picked_S - scaled_SV.logsumexp(dim=-1))
    return torch.stack(columns, dim=1).cpu()


def _end_ids(policy: PolicyModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    found: list[int] = []
    for given in (getattr(policy.hf.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found += given if isinstance(given, list) else [] if given is None else [given]
    return found
