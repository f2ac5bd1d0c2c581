"""`LocalJudge`: verdicts by a causal language model in this process.

    judge = LocalJudge(JudgeEnvironmentConfig(model="Qwen/Qwen3-0.6B", mode="pairwise"))
    judge.ask(questions)

The model writes nothing: the value is the expectation over the probabilities of each label as the whole message,
computed on one tree for several questions. To let a model explain its verdict first, serve it and name the endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.data.rendering import Renderer
from treeward.environments.verdicts import NoVerdict, Question, Verdict, labels, verdict_line
from treeward.errors import DataError
from treeward.model.loading import load_policy
from treeward.model.pretrained import choose_device
from treeward.scoring.score import Cost
from treeward.tree.token_tree import common_prefix_length

_QUESTIONS_AT_ONCE = 8
_ROOM_FOR_A_LABEL = 16


class LocalJudge:
    """Loads the model. Raises `ModelError` if it cannot be loaded or is not causal."""

    def __init__(self, config: JudgeEnvironmentConfig) -> None:
        self.config = config
        self.cost = Cost()
        dtype, device = getattr(torch, config.dtype), choose_device(config.device)
        loaded = load_policy(config.model, dtype=dtype, device=device)
        self.policy, self.renderer = loaded.model, Renderer(loaded.tokenizer)

    @torch.no_grad()
    def ask(self, questions: Sequence[Question]) -> list[Verdict | NoVerdict]:
        """A verdict for each question, or the reason for none."""
        prompts = [self._prompt(question) for question in questions]
        readable = [prompt for prompt in prompts if isinstance(prompt, str)]
        verdicts: list[Verdict | NoVerdict] = []
        for start in range(0, len(readable), _QUESTIONS_AT_ONCE):
            verdicts += self._expected(readable[start : start + _QUESTIONS_AT_ONCE])
        self.cost += Cost(num_requests=len(readable))
        in_order = iter(verdicts)
        return [prompt if isinstance(prompt, NoVerdict) else next(in_order) for prompt in prompts]

    def _prompt(self, question: Question) -> str | NoVerdict:
        """The rendered prompt, or the reason why the model cannot read it."""
        try:
            text = self.renderer.render(question.messages, where="the judge's prompt", generation_prompt=True)
        except DataError as error:
            return NoVerdict(error.summary)
        length, limit = len(self.renderer.encode_texts([text])[0]) + _ROOM_FOR_A_LABEL, self.policy.max_positions
        if limit is not None and length > limit:
            return NoVerdict(f"the judge's prompt and message have {length} tokens, the model reads {limit}")
        return text

    def _expected(self, prompts: Sequence[str]) -> list[Verdict | NoVerdict]:
        """Verdicts from the probability of each label as the judge's message."""
        values = labels(self.config)
        messages = [verdict_line(label, self.config) for label in values]
        groups = [self.renderer.encode_texts([prompt + message for message in messages]) for prompt in prompts]
        shared = [length for group in groups for length in [_shared(group)] * len(values)]
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


def _shared(rows: Sequence[Sequence[int]]) -> int:
    first = np.asarray(rows[0])
    return min(common_prefix_length(first, np.asarray(row)) for row in rows[1:])
