"""`LocalJudge`: verdicts by a causal language model in this process.

    section = {"model": "Qwen/Qwen3-0.6B", "use_logprobs": True, "mode": "pairwise"}
    LocalJudge(JudgeModelConfig(**section)).ask(questions)

With `use_logprobs` the model writes nothing: the value is the expectation over the probabilities of
each label as the whole message, computed on one tree for several questions. Otherwise it writes its
message.

Shapes: S messages, L tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treeward.config.reward_environments import JudgeModelConfig
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
    expected_verdict,
    labels,
    read_answer,
    verdict_line,
)
from treeward.tree.token_tree import TokenIds, common_prefix_length

_MESSAGES_AT_ONCE = 8  # a bound of the memory: each keeps keys and values of its whole length
_ROOM_FOR_A_LABEL = 16
"""Tokens for a message that is a label alone, as `Rating: [[7]]`, at least."""


class LocalJudge:
    """Loads the model. Raises `ModelError` if it cannot be loaded or is not causal."""

    def __init__(self, config: JudgeModelConfig) -> None:
        self.config = config
        self.cost = Cost()
        loaded = load_policy(
            config.model,
            dtype=getattr(torch, config.dtype),
            device=choose_device(config.device),
        )
        self.policy = loaded.model
        self.tokenizer = loaded.tokenizer
        self.renderer = Renderer(
            self.tokenizer,
            chat_template_kwargs=config.chat_template_kwargs,
            max_length=self.policy.max_positions,
        )
        self._special_texts = _special_texts(self.tokenizer)
        self._max_tokens = config.max_tokens or 1024
        self._room = self._max_tokens
        if config.use_logprobs:
            self._lines = [verdict_line(label, config) for label in labels(config)]
            longest = max(map(len, self.renderer.encode_texts(self._lines)))
            self._room = max(_ROOM_FOR_A_LABEL, longest)

    @torch.no_grad()
    def ask(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        """A verdict for each question, or the reason for none."""
        prompts = list(map(self._prompt, questions))
        readable = [prompt for prompt in prompts if isinstance(prompt, str)]
        self.cost += Cost(num_requests=len(readable))
        answers: list[Verdict | NoVerdict] = []
        if self.config.use_logprobs:
            answers = self._expected(readable)
        else:
            for start in range(0, len(readable), _MESSAGES_AT_ONCE):
                for message in self._messages(readable[start : start + _MESSAGES_AT_ONCE]):
                    answers.append(read_answer(message, self.config))
        # In the order of the questions, of which those that cannot be read have no answer.
        answered = iter(answers)
        verdicts = []
        for prompt in prompts:
            if isinstance(prompt, str):
                verdicts.append(next(answered))
            else:
                verdicts.append(NoVerdict(prompt.summary))
        return verdicts

    # A prompt that cannot be read costs its own verdict, and not those of the others.
    def _prompt(self, messages: Sequence[Message]) -> str | DataError:
        """The rendered prompt, or the reason why the model cannot read it."""
        harmless = [self._without_special_tokens(message) for message in messages]
        try:
            text = self.renderer.render(
                harmless,
                where="the judge's prompt",
                generation_prompt=True,
            )
        except DataError as error:
            return error
        [token_ids] = self.renderer.encode_texts([text])
        length = len(token_ids) + self._room
        limit = self.renderer.max_length
        if limit is not None and length > limit:
            return DataError(
                f"the judge's prompt and message have {length} tokens, and {limit} are read",
            )
        return text

    def _without_special_tokens(self, message: Message) -> Message:
        """The message with an invisible character (U+2060) in each text that the tokenizer would
        take for a special token."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        # A completion that spells the end of a turn could answer in the judge's place.
        for text in self._special_texts:
            content = content.replace(text, f"{text[0]}\u2060{text[1:]}")
        return {**message, "content": content}

    def _expected(self, prompts: Sequence[str]) -> list[Verdict | NoVerdict]:
        """Verdicts from the probability of each label as the judge's message."""
        verdicts: list[Verdict | NoVerdict] = []
        together: list[Sequence[TokenIds]] = []
        num_tokens = 0
        for prompt in prompts:
            rows = self.renderer.encode_texts([prompt + line for line in self._lines])
            cost = self._num_computed(rows, after=together[-1][-1] if together else None)
            if together and num_tokens + cost > DEFAULT_BATCH_TOKENS:
                verdicts += self._expected_of(together)
                together = []
                num_tokens = 0
                cost = self._num_computed(rows, after=None)
            together.append(rows)
            num_tokens += cost
        if together:
            verdicts += self._expected_of(together)
        return verdicts

    def _num_computed(self, rows: Sequence[TokenIds], after: TokenIds | None) -> int:
        """The tokens that the rows of a question add to a batch whose last row is `after`; on a
        tree what a row begins with as the one before it is there already."""
        if self.policy.layout == "rows":
            return sum(map(len, rows))
        total = 0
        for row in rows:
            shared = (
                0 if after is None else common_prefix_length(np.asarray(after), np.asarray(row))
            )
            total += len(row) - shared
            after = row
        return total

    def _expected_of(self, groups: Sequence[Sequence[TokenIds]]) -> list[Verdict | NoVerdict]:
        """The same for the rows of each question, in one forward pass."""
        all_rows: list[TokenIds] = []
        prompt_lengths: list[int] = []
        for rows in groups:
            all_rows += rows
            # What all rows of a question begin with is its prompt, and the rest is the label.
            first = np.asarray(rows[0])
            # All labels end alike, so none begins another: each has a token of its own.
            num_shared = min(common_prefix_length(first, np.asarray(row)) for row in rows[1:])
            prompt_lengths += [num_shared] * len(rows)
        # One tree: all questions share the judge's instructions, and the two orders of a pair its
        # conversation too.
        result = self.policy.log_probs([all_rows], [prompt_lengths])
        self.cost += Cost(num_prompt_tokens=result.num_computed_tokens)
        log_probs_S = result.values_SL.double().sum(dim=-1).cpu()
        verdicts: list[Verdict | NoVerdict] = []
        for log_probs in log_probs_S.view(-1, len(groups[0])):
            if not bool(log_probs.isfinite().all()):
                verdicts.append(NoVerdict("the judge's log-probabilities are not finite"))
                continue
            weights = log_probs.softmax(dim=-1).tolist()
            # Rounding can make the total more than 1.
            mass = math.exp(min(0.0, float(log_probs.logsumexp(-1))))
            verdicts.append(expected_verdict(self.config, weights, mass))
        return verdicts

    def _messages(self, prompts: Sequence[str]) -> list[Answer]:
        """The model's messages."""
        rows = self.renderer.encode_texts(prompts)
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = 0  # the mask hides it
        tokens = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            # At the left: every message begins at the same place.
            tokens[i, longest - len(row) :] = torch.tensor(row)
            mask[i, longest - len(row) :] = 1
        temperature = self.config.temperature
        if temperature is None:
            temperature = 1.0
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:  # 0 is the likeliest token each time
            sampling = {"do_sample": True, "temperature": temperature}
        hf: Any = self.policy.hf
        sequences = hf.generate(
            tokens.to(self.policy.device),
            attention_mask=mask.to(self.policy.device),
            max_new_tokens=self._max_tokens,
            pad_token_id=pad,
            **sampling,
        )
        ends = {self.tokenizer.eos_token_id}
        model_ends = hf.generation_config.eos_token_id  # one, several or none
        if isinstance(model_ends, int):
            ends.add(model_ends)
        else:
            ends.update(model_ends or ())
        answers = []
        for row in sequences[:, longest:].tolist():
            end = 0
            while end < len(row) and row[end] not in ends:
                end += 1
            text = str(self.tokenizer.decode(row[:end], skip_special_tokens=True))
            is_cut = end == len(row)
            answers.append(Answer(text, is_cut=is_cut))
            num_written = end
            if not is_cut:
                num_written += 1  # the end token
            self.cost += Cost(num_completion_tokens=num_written)
        self.cost += Cost(num_prompt_tokens=sum(map(len, rows)))
        return answers


def _special_texts(tokenizer: Any) -> list[str]:
    """How special tokens are written, the longest first, as one may hold another."""
    texts = set()
    for token in tokenizer.added_tokens_decoder.values():
        # A single character is of ordinary texts too, and cannot be cut.
        if token.special and len(token.content) > 1:
            texts.add(token.content)
    return sorted(texts, key=len, reverse=True)
