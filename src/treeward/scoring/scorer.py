"""`Scorer`: conversations in, scores out, in order; the one way from messages to a score.

    scorer = Scorer.load("results/rm/final")
    scorer.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]])
    scorer.score_completions(context, [completion, other])      # the prompt is computed once
    scorer.predict("2 + 2?", "4.")                              # a float

A conversation that is too long is never cut silently: its score is None, unless the truncation
policy cuts its context, and then `Score.truncated` is True.

Shapes: S conversations, H heads, L tokens, V values that are read (one of each conversation, or of
each step), X numbers of each: those of the heads, and where there is one the spread.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeward.config.scoring import HeadWeights, ScoringConfig
from treeward.data.conversation import (
    AnyConversation,
    Conversation,
    as_conversations,
    check_messages,
    check_unicode,
    with_messages,
)
from treeward.data.rendering import Renderer
from treeward.data.responses_items import as_conversation
from treeward.errors import DataError, ModelError, TreewardError
from treeward.model import loading
from treeward.model.contract import (
    CONTRACT_FILE,
    Dtype,
    ScoringContract,
    keeps_padding,
    read_contract,
)
from treeward.model.pretrained import DTYPES, choose_device, load_tokenizer
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS, RewardModel, check_finite
from treeward.model.spread import read_spread
from treeward.scoring.combining import head_names_of, head_weights_of, score_of
from treeward.scoring.diagnosis import Check, diagnose, diagnose_spreads
from treeward.scoring.score import OnError, Score
from treeward.scoring.steps import Steps
from treeward.tree.prefix import PrefixCache, RecentTokens
from treeward.tree.token_tree import TokenIds

logger = logging.getLogger(__name__)

_TURN_TOKENS = 16
"""Tokens that a template writes between a prompt and a completion: about so many at most."""

Text = str | Sequence[Any]
"""A prompt, or a response: a text, messages, or items of the Responses API."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The token ids of a conversation, int32 (L,), or why there are none.

    `num_tokens`: what it costs alone. `prompt_length`: the first tokens, which other conversations
    may have too. `members`: for an ensemble, the same for each member; the ids are then the first
    member's.
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
        """Tokens of the conversations scored so far: what plain rows would have computed."""
        return sum(member.model.num_row_tokens for member in set(self.members))

    @abc.abstractmethod
    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        """The first half of `score`, without the model: conversations become tokens.

        A server does it beforehand.
        """

    @abc.abstractmethod
    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        """As `prepare` with `on_error="mask"`, for conversations that a client has rendered itself.

        Each is a text, or token ids. A text that is too long is never cut, because nothing shows
        where its messages are, and a huge one is not tokenized.
        """

    @abc.abstractmethod
    def score_prepared(
        self,
        prepared: Sequence[Prepared],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """The second half of `score`: the tokens of `prepare` go through the model."""

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Score whole conversations. `where` names each in errors.

        A conversation that is too long has the score None. Raises `DataError` for one that is
        empty, has no assistant turn at its end, or that the chat template refuses, and `ModelError`
        for a score that is not finite; with `on_error="mask"` its score is None instead, and
        `Score.error` says why.
        """
        prepared = self.prepare(conversations, where=where, on_error=on_error)
        return self.score_prepared(prepared, on_error=on_error)

    def predict(self, prompt: Text, response: Text) -> float:
        """The score of one response, each a text, messages, or items of the Responses API.

        Raises as `score`, and `DataError` for a conversation that is too long.
        """
        developer = self.members[0].renderer.developer_role
        [score] = self.score([as_conversation(prompt, response, developer=developer)])
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
        """Score several completions of one context. Either is messages, or text: the user's, and
        the assistant's."""
        return self.score(as_conversations(context, completions), on_error=on_error)


class Scorer(PreparedScorer):
    """Scores conversations with one reward model.

    `batch_tokens`: most tokens computed in one forward pass, counted after sharing;
    `max_sequences`: most conversations in one; one of them is a number. `head_weights`: the weight
    of each head in the score, in order or by the name of its label, or "mean"; of steps, "product",
    "min" or "last". `prefix_cache`: holds the prompts of earlier calls.
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
        is_limited = batch_tokens is not None or max_sequences is not None
        assert is_limited, "nothing limits a forward pass"
        self.model = model.eval()
        self.renderer = renderer
        self.batch_tokens = batch_tokens
        self.max_sequences = max_sequences
        self.contract = contract
        self._has_estimates = False
        self._trained_length: int | None = None
        if contract is not None:
            self._has_estimates = contract.has_estimates
            self._trained_length = contract.rendering.trained_length
        self.prefix_cache = prefix_cache
        self._recent = RecentTokens()
        self.head_names = head_names_of(model, contract)
        self.steps: Steps | None = None
        if model.step_token is not None:
            how = head_weights
            if how is None and contract is not None and contract.steps is not None:
                how = contract.steps.score
            self.steps = Steps(model.step_token, how)
            head_weights = None
        if head_weights is None and model.score_parts:
            head_weights = (1.0,) * model.num_heads  # the score is the sum of its parts
        try:
            self.head_weights = head_weights_of(head_weights, self.head_names)
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
        with_spread: bool = True,
        **settings: Any,
    ) -> Scorer:
        """Load a reward model from a folder or the hub.

        `settings`: keys of `ScoringConfig`, as `dtype="bfloat16"`; or `model` is such a section.
        They override the model's scoring contract, which says how conversations are rendered and
        truncated; a model without one uses its tokenizer's chat template and drops conversations
        longer than its positions. `device`: None or `auto` is a GPU where there is one.
        `prefix_cache_bytes`: for the prompts of earlier calls; 0 keeps none. `with_spread`: False
        leaves the contract's spread out, and its file unread.

        Raises `ModelError` for a checkpoint without a trained head, for several heads without
        `head_weights`, and for a model that breaks its contract, unless `check_contract` is False.
        """
        if isinstance(model, ScoringConfig):
            config = model
        else:
            config = ScoringConfig(models=(str(model),), **settings)
        [name] = config.models
        contract = read_contract(name)
        if contract is not None and not with_spread:
            contract = contract.model_copy(update={"spread": None})
        section = config.tokenizer
        trusts = config.trust_remote_code
        tokenizer = None  # the model's own
        if section.name is not None and section.name != name:
            tokenizer = load_tokenizer(section.name, trust_remote_code=trusts)
        loaded = loading.load_classifier(
            name,
            tokenizer=tokenizer,
            dtype=DTYPES[config.dtype],
            device=choose_device(device),
            several_heads=True,
            steps=True,
            trust_remote_code=trusts,
            keep_padding=keeps_padding(contract),
        )
        rendering = _rendering(config, contract, loaded.model.max_positions)
        head_weights = config.head_weights
        if contract is not None and head_weights is not None:
            # Both were fitted to the score by the contract's weights.
            contract = contract.model_copy(update={"calibration": None, "spread": None})
        elif contract is not None:
            weights = tuple(head.weight for head in contract.heads)
            # The value of one head of weight 1 is the score: None says so.
            if weights != (1.0,):
                head_weights = weights
        scorer = cls(
            loaded.model,
            Renderer(loaded.tokenizer, **rendering),
            batch_tokens=batch_tokens,
            max_sequences=max_sequences,
            head_weights=head_weights,
            contract=contract,
        )
        if contract is not None and contract.spread is not None:
            reader = read_spread(name, contract, loaded.model)
            scorer.model.beside = reader.to(loaded.model.device)
        if contract is not None and config.check_contract:
            # Whoever asks for another rendering wants other tokens than the golden ones.
            is_rendered_alike = tokenizer is None and not section.rendering
            scorer._replay(contract, name, with_tokens=is_rendered_alike)
        # After the replay, whose conversations are not worth keeping.
        if prefix_cache_bytes:
            has_states = bool(scorer.model.recurrent_functions)
            scorer.prefix_cache = PrefixCache(prefix_cache_bytes, whole=has_states)
        return scorer

    @property
    def members(self) -> Sequence[Scorer]:  # type: ignore[override]
        return (self,)

    @property
    def has_spread(self) -> bool:
        """Whether each score has a spread."""
        return self._has_estimates or self.model.beside is not None

    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        try:
            chats = []
            for conversation, name in zip(conversations, names, strict=True):
                chats.append(check_conversation(conversation, name))
            if self.steps is not None:
                chats = list(map(self.steps.marked, chats, names))
                for chat, name in zip(chats, names, strict=True):
                    self.steps.check(self.renderer.render(chat, where=name), chat, name)
            fitted_chats = self.renderer.fit_many(chats, where=names)
        except DataError as error:
            if on_error == "raise":
                raise
            # A conversation that is wrong has an error, never a number.
            if len(conversations) == 1:
                return [Prepared(names[0], None, error=error.in_one_line)]
            # One of them is wrong: the others are found one by one.
            singles: list[Prepared] = []
            for conversation, name in zip(conversations, names, strict=True):
                singles += self.prepare([conversation], where=[name], on_error=on_error)
            return singles
        prepared = []
        for i, (fitted, num_tokens) in enumerate(fitted_chats):
            if fitted is None:
                prepared.append(self._too_long(names[i], num_tokens))
                continue
            item = self._prepared(
                names[i],
                fitted.token_ids,
                conversations[i],
                truncated=fitted.truncated,
            )
            prepared.append(item)
        return prepared

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        return [self._prepare_text(text, f"text {i}") for i, text in enumerate(texts)]

    def score_prepared(
        self,
        prepared: Sequence[Prepared],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        sequences = []
        prompt_lengths = []
        for item in prepared:
            if item.ids is not None:
                sequences.append(item.ids)
                prompt_lengths.append(item.prompt_length)
        rows = iter(self._values(sequences, prompt_lengths).tolist())
        # In the order of `prepared`, of which those without tokens have no rows.
        scores = []
        for item in prepared:
            if item.ids is None:
                scores.append(Score(None, item.num_tokens, item.truncated, error=item.error))
                continue
            num_rows = self.model.num_values(item.ids)  # one, or one for each step
            scores.append(self._score([next(rows) for _ in range(num_rows)], item, on_error))
        return scores

    def _replay(self, contract: ScoringContract, model: str, *, with_tokens: bool) -> None:
        """Replay the golden conversations.

        Raises `ModelError` where they become other tokens or have other scores.
        """
        check = None
        # Tokens first: other tokens have other scores, which would name the weights as the cause.
        if with_tokens:
            check = self._changed_tokens(contract)
        if check is None:
            # The counters are of what users have scored.
            num_computed_tokens = self.model.num_computed_tokens
            num_row_tokens = self.model.num_row_tokens
            token_ids = [example.token_ids for example in contract.golden]
            counts = [self.model.num_values(ids) for ids in token_ids]
            values_VX = self._values(token_ids)
            self.model.num_computed_tokens = num_computed_tokens
            self.model.num_row_tokens = num_row_tokens
            num_heads = self.model.num_heads
            scores = []
            for rows in values_VX[:, :num_heads].split(counts):
                values = rows.flatten().tolist()
                scores.append(score_of(values, contract.heads, contract.steps))
            # Any coarser dtype gets the tolerance that was measured in bfloat16.
            dtype: Dtype = "bfloat16"
            if self.model.hf.dtype == torch.float32:
                dtype = "float32"
            check = diagnose(contract, scores, dtype=dtype)
            if check.state == "equal" and contract.spread is not None:
                spreads = values_VX[:, num_heads].tolist()
                check = diagnose_spreads(contract, spreads, dtype=dtype)
        if check.state == "differs":
            command = f"treeward verify {model}"
            raise ModelError(
                f"the model does not keep its scoring contract: {check.part} ({check.summary})",
                where=model,
                got=check.got or "other tokens",
                need=f"{check.need or 'those'} of {CONTRACT_FILE}",
                fix=f"{command} names what differs: restore it; or, if the change is wanted, "
                f"write a new contract: {command} --write --force",
            )

    def _changed_tokens(self, contract: ScoringContract) -> Check | None:
        limit = contract.rendering.max_length
        for example in contract.golden:
            try:
                ids = self.renderer.encode(example.conversation)
            except DataError:  # the template refuses it
                ids = []
            # A conversation that was cut to the limit is whole here.
            is_uncut = limit is None or len(ids) <= limit
            if is_uncut and ids != example.token_ids:
                summary = f"the conversation {example.name!r} becomes other tokens"
                return Check("tokens", "differs", summary)
        return None

    def _values(
        self,
        sequences: Sequence[TokenIds],
        prompt_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        return self.model.read_tokens(
            sequences,
            max_tokens=self.batch_tokens,
            max_sequences=self.max_sequences,
            cache=self.prefix_cache,
            prompt_lengths=prompt_lengths,
        )

    def _score(self, rows: list[list[float]], item: Prepared, on_error: OnError) -> Score:
        """`rows`: the values of the heads, and the spread where the model reads one beside them; of
        a process reward model, one row for each step."""
        values = list(chain.from_iterable(rows))
        try:
            check_finite(values, item.name, item.num_tokens)
        except ModelError as error:
            if on_error == "raise":
                raise
            return Score(None, item.num_tokens, item.truncated, error=error.in_one_line)
        if self.steps is not None:
            score, probabilities = self.steps.score(values)
            return Score(score, item.num_tokens, item.truncated, steps=probabilities)
        spread = None
        if self.model.beside is not None:
            spread = values.pop()
        elif self._has_estimates:  # else heads are different things, and have no common spread
            spread = float(np.std(values))
        if self.head_weights is None:
            score = values[0]
        else:
            score = sum(w * x for w, x in zip(self.head_weights, values, strict=True))
        return Score(
            score=score,
            num_tokens=item.num_tokens,
            truncated=item.truncated,
            heads=tuple(values),
            head_names=self.head_names,
            spread=spread,
        )

    def _prepare_text(self, text: str | Sequence[int], name: str) -> Prepared:
        limit = self.renderer.max_length
        # Ids from outside are checked: a larger one would end the process on a GPU.
        num_ids = self.model.num_known_tokens
        ids: list[int] | None
        if isinstance(text, str):
            try:
                check_unicode(text, name)
                [(ids, num_tokens)] = self.renderer.encode_short([text], limit, where=[name])
            except DataError as error:
                return Prepared(name, None, error=error.in_one_line)
        else:
            ids = list(text)
            num_tokens = len(ids)
        if ids is None or (limit is not None and num_tokens > limit):
            return self._too_long(name, num_tokens)
        if not ids or min(ids) < 0 or max(ids) >= num_ids:
            error_text = f"there must be tokens, with ids from 0 to {num_ids - 1}"
            return Prepared(name, None, len(ids), error=error_text)
        return self._prepared(name, ids)

    def _prepared(
        self,
        name: str,
        token_ids: Sequence[int],
        conversation: AnyConversation = (),
        *,
        truncated: bool = False,
    ) -> Prepared:
        """The tokens, and how many of them are worth keeping for later conversations.

        These are the tokens that an earlier conversation had too, or for a new one about as many as
        its prompt has. The cache compares tokens, so a wrong guess costs time alone.
        """
        ids = np.asarray(token_ids, dtype=np.int32)
        if self._trained_length is not None and len(ids) > self._trained_length:
            logger.warning(
                "%s has %d tokens, and the model was trained with at most %d: trust the scores of "
                "longer conversations less. max_length (--max-length) refuses them.",
                name,
                len(ids),
                self._trained_length,
            )
            self._trained_length = None  # said once
        if self.steps is not None and not self.model.num_values(ids):
            error = f"there is no step: no {self.steps.token}"
            return Prepared(name, None, len(ids), truncated, error)
        if self.prefix_cache is None:
            return Prepared(name, ids, len(ids), truncated)
        prompt_length = self._recent.add(ids)
        if not prompt_length and conversation:
            # The prompt's share of the characters is about its share of the tokens.
            lengths = [len(str(message.get("content") or "")) for message in conversation]
            share = int(len(ids) * sum(lengths[:-1]) / max(1, sum(lengths)))
            if self.prefix_cache.whole:
                # Other completions go on from a place within the prompt; past its end none would.
                prompt_length = max(0, share - _TURN_TOKENS)
            else:
                prompt_length = share + _TURN_TOKENS
        # The last token is always computed, because its hidden state is read.
        prompt_length = min(prompt_length, len(ids) - 1)
        return Prepared(name, ids, len(ids), truncated, prompt_length=prompt_length)

    def _too_long(self, name: str, num_tokens: int) -> Prepared:
        error = f"too long to score: {num_tokens} tokens, at most {self.renderer.max_length}"
        return Prepared(name, None, num_tokens, error=error)


def _rendering(
    config: ScoringConfig, contract: ScoringContract | None, max_positions: int | None
) -> dict[str, Any]:
    """The settings of a model's renderer: the contract's, and over them those of the section."""
    settings: dict[str, Any] = {}
    if contract is not None:
        settings |= contract.rendering.settings
    settings |= config.tokenizer.rendering
    settings |= config.model_dump(include={"max_length", "truncation"}, exclude_none=True)
    # Never above the model's positions, whatever the contract or the user says.
    limits = [settings.get("max_length"), max_positions]
    known_limits = [limit for limit in limits if limit is not None]
    settings["max_length"] = min(known_limits, default=None)
    return settings


def check_conversation(conversation: AnyConversation, name: str) -> Conversation:
    """The conversation, if it ends with a completion.

    Raises `DataError`, which has the conversation's `name`.
    """
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


class ResponseScorer:
    """A reward model that scores a response at a time, as NeMo Gym's page has it."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def score(self, prompt: Text, response: Text) -> float:
        """As `Scorer.predict`."""
        return self.scorer.predict(prompt, response)

    predict = score


def load_reward_model(model: str | Path, **options: Any) -> ResponseScorer:
    """A reward model whose `score(prompt=..., response=...)` is a number. `options`: those of
    `Scorer.load`."""
    return ResponseScorer(Scorer.load(model, **options))
