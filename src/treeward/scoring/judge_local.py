"""`LocalJudge`: verdicts by a causal language model in this process.

    judge = LocalJudge(JudgeEnvironmentConfig(model="Qwen/Qwen3-0.6B", use_logprobs=True, mode="pairwise"))
    judge.ask(questions)

With `use_logprobs` the model writes nothing: the value is the expectation over the probabilities of each label as the
whole message, computed on one tree for several questions. Otherwise it writes its message.

Shapes: S messages, L tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.data.conversation import Message
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.model.loading import load_policy
from treeward.model.pretrained import choose_device
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS
from treeward.scoring.score import Cost
from treeward.scoring.verdicts import (
    Answer,
    NoVerdict,
    Verdict,
    labels,
    read_answer,
    verdict_line,
)
from treeward.tree.token_tree import TokenIds, common_prefix_length

_MESSAGES_AT_ONCE = 8
_ROOM_FOR_A_LABEL = 16


class LocalJudge:
    """Loads the model. Raises `ModelError` if it cannot be loaded or is not causal."""

    def __init__(self, config: JudgeEnvironmentConfig) -> None:
        self.config = config
        self.cost = Cost()
        dtype, device = getattr(torch, config.dtype), choose_device(config.device)
        loaded = load_policy(config.model, dtype=dtype, device=device)
        self.policy, self.tokenizer = loaded.model, loaded.tokenizer
        limit, variables = self.policy.max_positions, config.chat_template_kwargs
        self.renderer = Renderer(self.tokenizer, chat_template_kwargs=variables, max_length=limit)
        self._max_tokens = config.max_tokens or 1024

    @torch.no_grad()
    def ask(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        """A verdict for each question, or the reason for none."""
        prompts = list(map(self._prompt, questions))
        readable = [prompt for prompt in prompts if isinstance(prompt, str)]
        self.cost += Cost(num_requests=len(readable))
        verdicts = iter(self._expected(readable) if self.config.use_logprobs else self._written(readable))
        return [next(verdicts) if isinstance(prompt, str) else NoVerdict(prompt.summary) for prompt in prompts]

    def _prompt(self, messages: Sequence[Message]) -> str | DataError:
        """The rendered prompt, or the reason why the model cannot read it."""
        try:
            text = self.renderer.render(messages, where="the judge's prompt", generation_prompt=True)
        except DataError as error:
            return error
        room = _ROOM_FOR_A_LABEL if self.config.use_logprobs else self._max_tokens
        length, limit = len(self.renderer.encode_texts([text])[0]) + room, self.renderer.max_length
        if limit is not None and length > limit:
            return DataError(f"the judge's prompt and message have {length} tokens, and {limit} are read")
        return text

    def _expected(self, prompts: Sequence[str]) -> list[Verdict | NoVerdict]:
        """Verdicts from the probability of each label as the judge's message."""
        lines = [verdict_line(label, self.config) for label in labels(self.config)]
        verdicts: list[Verdict | NoVerdict] = []
        together: list[Sequence[TokenIds]] = []
        num_tokens = 0
        for prompt in prompts:
            rows = self.renderer.encode_texts([prompt + line for line in lines])
            again = 0 if self.policy.layout == "rows" else _shared_length(rows)
            cost = sum(len(row) - again for row in rows) + again
            if together and num_tokens + cost > DEFAULT_BATCH_TOKENS:
                verdicts += self._expected_of(together)
                together, num_tokens = [], 0
            together.append(rows)
            num_tokens += cost
        return verdicts + (self._expected_of(together) if together else [])

    def _expected_of(self, groups: Sequence[Sequence[TokenIds]]) -> list[Verdict | NoVerdict]:
        """The same for the rows of each question, in one forward pass."""
        values = labels(self.config)
        shared = [length for group in groups for length in [_shared_length(group)] * len(values)]
        # One tree: all questions share the judge's instructions, and the two orders of a pair its conversation too.
        result = self.policy.log_probs([[row for group in groups for row in group]], [shared])
        self.cost += Cost(num_prompt_tokens=result.num_computed_tokens)
        verdicts: list[Verdict | NoVerdict] = []
        for log_probs in result.values_SL.double().sum(dim=-1).cpu().view(-1, len(values)):
            if not bool(log_probs.isfinite().all()):
                verdicts.append(NoVerdict("the judge's log-probabilities are not finite"))
                continue
            weights = log_probs.softmax(dim=-1).tolist()
            mean = math.fsum(weight * value for weight, value in zip(weights, values.values(), strict=True))
            mass = math.exp(min(0.0, float(log_probs.logsumexp(-1))))
            verdicts.append(Verdict(mean, list(values)[int(np.argmax(weights))], mass=mass))
        return verdicts

    def _written(self, prompts: Sequence[str]) -> list[Verdict | NoVerdict]:
        """The verdicts in the model's messages."""
        batches = [prompts[start : start + _MESSAGES_AT_ONCE] for start in range(0, len(prompts), _MESSAGES_AT_ONCE)]
        return [read_answer(answer, self.config) for batch in batches for answer in self._messages(batch)]

    def _messages(self, prompts: Sequence[str]) -> list[Answer]:
        """The model's messages."""
        rows = self.renderer.encode_texts(prompts)
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=self.policy.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.policy.device)
        temperature = 1.0 if self.config.temperature is None else self.config.temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        hf: Any = self.policy.hf
        written = hf.generate(
            tokens, attention_mask=mask, max_new_tokens=self._max_tokens, pad_token_id=pad, **sampling
        )[:, longest:]
        ends = hf.generation_config.eos_token_id
        end_ids = {self.tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}
        answers = []
        for row in written.tolist():
            at = next((i for i, token in enumerate(row) if token in end_ids), None)
            text = str(self.tokenizer.decode(row[:at], skip_special_tokens=True))
            answers.append(Answer(text, is_cut=at is None))
            self.cost += Cost(num_completion_tokens=len(row) if at is None else at + 1)
        self.cost += Cost(num_prompt_tokens=int(mask.sum()))
        return answers


def _shared_length(rows: Sequence[TokenIds]) -> int:
    """Tokens that all rows begin with."""
    first = np.asarray(rows[0])
    return min(common_prefix_length(first, np.asarray(row)) for row in rows[1:])
