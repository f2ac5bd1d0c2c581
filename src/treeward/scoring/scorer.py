"""`Scorer`: conversations in, scores out, in order; the one way from messages to a score.

    scorer = Scorer.load("results/rm/final")
    scorer.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]])
    scorer.score_completions(context, [completion, other])      # the prompt is computed once
    scorer.predict("2 + 2?", "4.")                              # a float

A conversation that is too long is never cut silently: its score is None, unless the truncation policy cuts its context,
and then `Score.truncated` is True.

Shapes: S conversations, H heads, L tokens.
"""

from __future__ import annotations

import abc
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeward.config.scoring import HeadWeights, ScoringConfig
from treeward.data.conversation import AnyConversation, Conversation, as_conversations, check_messages, with_messages
from treeward.data.rendering import Renderer, check_unicode
from treeward.data.responses_items import as_conversation
from treeward.errors import DataError, ModelError, TreewardError
from treeward.model import loading
from treeward.model.contract import CONTRACT_FILE, ScoringContract, keeps_padding, read_contract
from treeward.model.pretrained import DTYPES, choose_device, load_tokenizer
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS, RewardModel, check_finite
from treeward.scoring.diagnosis import Check, diagnose
from treeward.scoring.golden import combined_heads, weighted_heads
from treeward.scoring.score import OnError, Score
from treeward.scoring.steps import Steps
from treeward.tree.prefix import PrefixCache, RecentTokens
from treeward.tree.token_tree import TokenIds

logger = logging.getLogger(__name__)

_TURN_TOKENS = 16
"""Between a prompt and a completion, at most about so many."""

Text = str | Sequence[Any]
"""A prompt, or a response: a text, messages, or items of the Responses API."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The token ids of a conversation, int32 (L,), or why there are none.

    `num_tokens`: what it costs alone. `prompt_length`: the first tokens, which other conversations may have too.
    `members`: for an ensemble, the same for each member; the ids are then the first member's.
    """

    name: str
    ids: np.ndarray | None
    num_tokens: int = 0
    truncated: bool = False
    error: str | None = None
    prompt_length: int = 0
    members: tuple[Prepared, ...] = ()


class PreparedScorer(abc.ABC):
    """Scores in two halves: conversations become tokens, and tokens become scores."""

    members: Sequence[Scorer]
    """The scorer of each model."""
    renderer: Renderer
    """What renders conversations, for an ensemble the first member's."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that were computed so far."""
        return sum(member.model.num_computed_tokens for member in set(self.members))

    @property
    def num_row_tokens(self) -> int:
        """Tokens of the conversations that were scored so far: what plain rows would have computed."""
        return sum(member.model.num_row_tokens for member in set(self.members))

    @abc.abstractmethod
    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        """The first half of `score`, without the model: conversations become tokens. A server does it beforehand."""

    @abc.abstractmethod
    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        """As `prepare` with `on_error="mask"`, for conversations that a client has rendered or tokenized itself. A text
        that is too long is never cut, since nothing shows where its messages are, and a huge one is not tokenized."""

    @abc.abstractmethod
    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        """The second half of `score`: the tokens of `prepare` go through the model."""

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Score whole conversations. `where` names each in errors.

        A conversation that is too long has the score None. Raises `DataError` for one that is empty, has no assistant
        turn at its end, or that the chat template refuses, and `ModelError` for a score that is not finite; with
        `on_error="mask"` its score is None instead, and `Score.error` says why.
        """
        return self.score_prepared(self.prepare(conversations, where=where, on_error=on_error), on_error=on_error)

    def predict(self, prompt: Text, response: Text) -> float:
        """The score of one response, each a text, messages, or items of the Responses API.

        Raises as `score`, and `DataError` for a conversation that is too long.
        """
        messages = as_conversation(prompt, response, developer=self.members[0].renderer.developer_role)
        [score] = self.score([messages])
        if score.score is None:
            raise DataError("the response has no score", got=score.error)
        return score.score

    def score_completions(
        self,
        context: AnyConversation | str,
        completions: Sequence[AnyConversation | str],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Score several completions of one context; either is messages, or text of the user and of the assistant."""
        return self.score(as_conversations(context, completions), on_error=on_error)


class Scorer(PreparedScorer):
    """Scores conversations with one reward model.

    `batch_tokens`: most tokens computed in one forward pass, counted after sharing; `max_sequences`: most conversations
    in one; one of them is a number. `head_weights`: the weight of each head in the score, in order or by the name of
    its label, or "mean"; of steps, "product" or "min". `prefix_cache`: holds the prompts of earlier calls.
    """

    def __init__(
        self,
        model: RewardModel,
        renderer: Renderer,
        *,
        batch_tokens: int | None = DEFAULT_BATCH_TOKENS,
        max_sequences: int | None = None,
        head_weights: HeadWeights | None = None,
        contract: ScoringContract | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        assert batch_tokens is not None or max_sequences is not None, "nothing limits a forward pass"
        self.model = model.eval()
        self.renderer = renderer
        self.batch_tokens, self.max_sequences = batch_tokens, max_sequences
        self.contract = contract
        self._has_estimates = contract is not None and contract.has_estimates
        self._trained_length = None if contract is None else contract.rendering.trained_length
        self.prefix_cache = prefix_cache
        self._recent = RecentTokens()
        labels = [head.name for head in contract.heads] if contract else []
        labels = labels or list(model.score_parts or (model.hf.config.id2label or {}).values())
        self.head_names = tuple(map(str, labels if len(labels) == model.num_heads else range(model.num_heads)))
        self.steps: Steps | None = None
        if model.step_token is not None:
            self.steps = Steps(model.step_token, head_weights)
            head_weights = None
        try:
            is_sum = head_weights is None and bool(model.score_parts)
            self.head_weights = _head_weights((1.0,) * model.num_heads if is_sum else head_weights, self.head_names)
        except TreewardError as error:
            raise error.but(where=model.hf.name_or_path or None) from None

    @classmethod
    def load(
        cls,
        model: str | Path | ScoringConfig,
        *,
        device: torch.device | str | None = None,
        batch_tokens: int | None = DEFAULT_BATCH_TOKENS,
        max_sequences: int | None = None,
        prefix_cache_bytes: int = 0,
        **settings: Any,
    ) -> Scorer:
        """Load a reward model from a folder or the hub. `device`: None or `auto` is a GPU where there is one.

        `settings`: keys of `ScoringConfig`, as `dtype="bfloat16"`; or `model` is such a section. They override the
        model's scoring contract, which says how conversations are rendered and truncated; a model without one uses its
        tokenizer's chat template and drops conversations longer than its positions. `prefix_cache_bytes`: for the
        prompts of earlier calls; 0 keeps none.

        Raises `ModelError` for a checkpoint without a trained head, for several heads without `head_weights`, and for a
        model that breaks its contract, unless `check_contract` is False.
        """
        config = model if isinstance(model, ScoringConfig) else ScoringConfig(models=(str(model),), **settings)
        [name], tokenizer, contract = config.models, config.tokenizer, read_contract(config.models[0])
        trusts = config.trust_remote_code
        has_other_tokenizer = tokenizer.name is not None and tokenizer.name != name
        loaded = loading.load_classifier(
            name,
            tokenizer=load_tokenizer(str(tokenizer.name), trust_remote_code=trusts) if has_other_tokenizer else None,
            dtype=DTYPES[config.dtype],
            device=choose_device(device),
            several_heads=True,
            steps=True,
            trust_remote_code=trusts,
            keep_padding=keeps_padding(contract),
        )
        rendering = {} if contract is None else contract.rendering.settings
        rendering |= tokenizer.rendering | config.model_dump(include={"max_length", "truncation"}, exclude_none=True)
        limits = [limit for limit in (rendering.get("max_length"), loaded.model.max_positions) if limit is not None]
        renderer = Renderer(loaded.tokenizer, **rendering | {"max_length": min(limits, default=None)})
        head_weights = config.head_weights
        if contract is not None and head_weights is None and [head.weight for head in contract.heads] != [1.0]:
            head_weights = tuple(head.weight for head in contract.heads)
        elif contract is not None and head_weights is not None:  # the constants are of another score
            contract = contract.model_copy(update={"calibration": None})
        scorer = cls(
            loaded.model,
            renderer,
            batch_tokens=batch_tokens,
            max_sequences=max_sequences,
            head_weights=head_weights,
            contract=contract,
        )
        if contract is not None and config.check_contract:
            scorer._replay(contract, name, with_tokens=not (has_other_tokenizer or tokenizer.rendering))
        scorer.prefix_cache = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        return scorer

    @property
    def members(self) -> Sequence[Scorer]:  # type: ignore[override]
        return (self,)

    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        try:
            checked = [check_conversation(*item) for item in zip(conversations, names, strict=True)]
            if self.steps is not None:
                checked = [self.steps.marked(*item) for item in zip(checked, names, strict=True)]
            fitted = self.renderer.fit_many(checked, where=names)
        except DataError as error:
            if on_error == "raise":
                raise
            if len(conversations) == 1:
                return [Prepared(names[0], None, error=error.in_one_line)]
            # One of them is wrong: the others are found one by one.
            pairs = zip(conversations, names, strict=True)
            return [self.prepare([chat], where=[name], on_error=on_error)[0] for chat, name in pairs]
        return [
            self._too_long(name, num_tokens)
            if fit is None
            else self._prepared(name, fit.token_ids, conversation, truncated=fit.truncated)
            for (fit, num_tokens), name, conversation in zip(fitted, names, conversations, strict=True)
        ]

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        return [self._prepare_text(text, f"text {i}") for i, text in enumerate(texts)]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        readable = [(item.ids, item.prompt_length) for item in prepared if item.ids is not None]
        rows = iter(self._values([ids for ids, _ in readable], [length for _, length in readable]).tolist())
        scores = []
        for item in prepared:
            if item.ids is None:
                scores.append(Score(None, item.num_tokens, item.truncated, error=item.error))
                continue
            values_of_item = [next(rows) for _ in range(self.model.num_values(item.ids))]
            scores.append(self._score(values_of_item, item, on_error))
        return scores

    def _replay(self, contract: ScoringContract, model: str, *, with_tokens: bool) -> None:
        """Replay the golden conversations. Raises `ModelError` where they become other tokens or have other scores."""
        limit, check = contract.rendering.max_length, None
        for example in contract.golden if with_tokens else ():
            try:
                ids = self.renderer.encode(example.conversation)
            except DataError:  # the template refuses it
                ids = []
            if ids != example.token_ids and (limit is None or len(ids) <= limit):
                check = Check("tokens", "differs", f"the conversation {example.name!r} becomes other tokens")
                break
        if check is None:
            counts = self.model.num_computed_tokens, self.model.num_row_tokens
            values_SH = self._values([example.token_ids for example in contract.golden]).tolist()
            self.model.num_computed_tokens, self.model.num_row_tokens = counts
            scores = [combined_heads(values, contract.heads) for values in values_SH]
            check = diagnose(contract, scores, dtype="float32" if self.model.hf.dtype == torch.float32 else "bfloat16")
        if check.state == "differs":
            raise ModelError(
                f"the model does not keep its scoring contract: {check.part} ({check.summary})",
                where=model,
                got=check.got or "other tokens",
                need=f"{check.need or 'those'} of {CONTRACT_FILE}",
                fix=f"treeward verify {model} names what differs: restore it; or, if the change is wanted, write a new "
                f"contract: treeward verify {model} --write --force",
            )

    def _values(self, sequences: Sequence[TokenIds], prompt_lengths: Sequence[int] | None = None) -> Tensor:
        return self.model.score_tokens(
            sequences,
            max_tokens=self.batch_tokens,
            max_sequences=self.max_sequences,
            cache=self.prefix_cache,
            prompt_lengths=prompt_lengths,
        )

    def _score(self, rows: list[list[float]], item: Prepared, on_error: OnError) -> Score:
        """`rows`: the values of the heads; of a process reward model, one row for each step."""
        values = [value for row in rows for value in row]
        try:
            check_finite(values, item.name, item.num_tokens)
        except ModelError as error:
            if on_error == "raise":
                raise
            return Score(None, item.num_tokens, item.truncated, error=error.in_one_line)
        if self.steps is not None:
            score, probabilities = self.steps.score(values)
            return Score(score, item.num_tokens, item.truncated, steps=probabilities)
        weights = self.head_weights
        return Score(
            score=values[0] if weights is None else sum(w * x for w, x in zip(weights, values, strict=True)),
            num_tokens=item.num_tokens,
            truncated=item.truncated,
            heads=tuple(values),
            head_names=self.head_names,
            spread=float(np.std(values)) if self._has_estimates else None,
        )

    def _prepare_text(self, text: str | Sequence[int], name: str) -> Prepared:
        num_ids, limit = self.model.num_known_tokens, self.renderer.max_length
        ids: list[int] | None
        if isinstance(text, str):
            try:
                check_unicode(text, name)
                ids, num_tokens = self.renderer.encode_short([text], limit, where=[name])[0]
            except DataError as error:
                return Prepared(name, None, error=error.in_one_line)
        else:
            ids, num_tokens = list(text), len(text)
        if ids is None or (limit is not None and num_tokens > limit):
            return self._too_long(name, num_tokens)
        if not ids or min(ids) < 0 or max(ids) >= num_ids:
            return Prepared(name, None, len(ids), error=f"there must be tokens, with ids from 0 to {num_ids - 1}")
        return self._prepared(name, ids)

    def _prepared(
        self, name: str, token_ids: Sequence[int], conversation: AnyConversation = (), *, truncated: bool = False
    ) -> Prepared:
        """The tokens, and how many of them are worth keeping: those that an earlier conversation had too, or for a new
        one about as many as its prompt has. The cache compares tokens, so a guess costs time alone."""
        ids = np.asarray(token_ids, dtype=np.int32)
        if self._trained_length is not None and len(ids) > self._trained_length:
            logger.warning(
                "%s has %d tokens, and the model was trained with at most %d: trust the scores of longer conversations "
                "less. max_length (--max-length) refuses them.", name, len(ids), self._trained_length,
            )  # fmt: skip
            self._trained_length = None  # said once
        if self.steps is not None and not self.model.num_values(ids):
            return Prepared(name, None, len(ids), truncated, f"there is no step: no {self.steps.token}")
        if self.prefix_cache is None:
            return Prepared(name, ids, len(ids), truncated)
        lengths = [len(str(message.get("content") or "")) for message in conversation]
        guess = int(len(ids) * sum(lengths[:-1]) / max(1, sum(lengths))) + _TURN_TOKENS if conversation else 0
        length = self._recent.add(ids) or guess
        return Prepared(name, ids, len(ids), truncated, prompt_length=min(length, len(ids) - 1))

    def _too_long(self, name: str, num_tokens: int) -> Prepared:
        error = f"too long to score: {num_tokens} tokens, at most {self.renderer.max_length}"
        return Prepared(name, None, num_tokens, error=error)


def check_conversation(conversation: AnyConversation, name: str) -> Conversation:
    """The conversation, if it ends with a completion. Raises `DataError`; `name` names the conversation there."""
    messages = check_messages(conversation, "messages", name)
    role = messages[-1]["role"]
    if role != "assistant":
        raise DataError(
            "there is no completion to score",
            where=name,
            field="messages",
            got=f"a conversation that ends with a message of {role}",
            need="an assistant message at the end",
        )
    return with_messages(conversation, messages)


def _head_weights(weights: HeadWeights | None, names: Sequence[str]) -> tuple[float, ...] | None:
    if weights is None and len(names) == 1:
        return None
    if weights is None:
        example = shlex.quote(",".join(f"{name}=1" for name in names[:2]))
        raise ModelError(
            "the model has several heads, and nothing says how they make one score",
            got=f"{len(names)} heads: {', '.join(names)}",
            fix=f"--head-weights {example} of treeward score, eval, bon and serve; in Python and in a configuration "
            f"head_weights={dict.fromkeys(names[:2], 1.0)}; Score.heads has all values",
        )
    if weights == "mean":
        return (1.0 / len(names),) * len(names)
    if isinstance(weights, str):
        summary = "this is for the steps of a process reward model, and the model has heads"
        raise ModelError(summary, field="head_weights", got=weights, need="a number for each head, or mean")
    return tuple(float(head.weight) for head in weighted_heads(names, weights))


class ResponseScorer:
    """A reward model that scores a response at a time, as NeMo Gym's page has it."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def score(self, prompt: Text, response: Text) -> float:
        """As `Scorer.predict`."""
        return self.scorer.predict(prompt, response)

    predict = score


def load_reward_model(model: str | Path, **options: Any) -> ResponseScorer:
    """A reward model whose `score(prompt=..., response=...)` is a number. `options`: those of `Scorer.load`."""
    return ResponseScorer(Scorer.load(model, **options))
