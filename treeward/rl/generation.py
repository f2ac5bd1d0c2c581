"""`LocalGenerator`: completions sampled from the policy itself, in this process; and what every generator is.

    generator = LocalGenerator(policy, tokenizer, GenerationSettings(max_new_tokens=256, temperature=1.0))
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=step)

A completion's tokens are those that were sampled, with the token that ended it; `truncated` says that none did. The
same seed gives the same completions, whatever was sampled before and however many at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from treeward.data.preference import Message
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.continuous import is_exact, is_fast, sample_continuously
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.sampling import Row, Sampled, sample, uniforms

__all__ = [
    "CompletionReader",
    "GenerationError",
    "GenerationSettings",
    "Generator",
    "LocalGenerator",
    "end_ids_of",
    "rooms",
    "template_end_ids",
]

logger = logging.getLogger(__name__)

_PROBE_COMPLETION = "Romam."
_PROBE_NEXT = "Quando?"
_PROBE: list[Message] = [
    {"role": "user", "content": "Quo vadis?"},
    {"role": "assistant", "content": _PROBE_COMPLETION},
    {"role": "user", "content": _PROBE_NEXT},
]
_SLACK_TOKENS = 4
"""A stop string's last token may begin in the middle of a character, and hold more than the end of it."""


class GenerationError(ModelError):
    """Completions could not be had: what was asked of whom, and what came instead."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How completions are sampled.

    `max_new_tokens`: a completion has at most these, or what room its prompt leaves in the model's positions and in
    `max_total_tokens`. `temperature`: 0 takes the most
    probable token. `top_k`, `top_p`: None for all tokens. `stop_token_ids`, `stop_strings`: they end a completion,
    beside the model's own end; it keeps the tokens that were sampled, and its text is what comes before. `log_probs`:
    keep the generator's own, at the temperature, before `top_k` and `top_p`. `batch_size`: completions at once.

    `continuous_batching`: sample by transformers' paged batches, in which a completion starts when another has ended.
    "auto": where there is CUDA with flash attention, which needs weights of half precision, no stop string, and
    log-probabilities are those before `top_k` and `top_p`. A seed then determines the completions to the same prompts
    in the same order only, and they are sampled in the dtype of the weights, whatever the policy's `compute_dtype`.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    log_probs: bool = True
    batch_size: int = 64
    continuous_batching: bool | Literal["auto"] = False
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "more than 0, at most 1, or None"),
            "stop_strings": (all(self.stop_strings), "texts that are not empty"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "continuous_batching": (
                self.continuous_batching is not True or self._can_be_continuous,
                "no stop_strings, top_k or top_p beside it: it knows none of them as they are meant here",
            ),
        }
        for name, (right, need) in checks.items():
            if not right:
                raise ConfigError("a setting of generation is wrong", field=name, got=getattr(self, name), need=need)

    @property
    def _can_be_continuous(self) -> bool:
        return not self.stop_strings and self.top_k is None and self.top_p in (None, 1.0)

    def is_continuous(self, policy: PolicyModel) -> bool:
        """Whether this policy's completions come from continuous batching. Raises `ConfigError` where it is not
        exact.
        """
        if self.continuous_batching == "auto":
            return self._can_be_continuous and is_fast(policy) and is_exact(policy)
        if self.continuous_batching and not is_exact(policy):
            raise ConfigError(
                "continuous batching does not compute this model's attention",
                field="continuous_batching",
                got=type(policy.hf).__name__,
                need="a model without soft-capped scores, that runs with transformers' sdpa attention",
                fix="set continuous_batching to false",
            )
        return self.continuous_batching


class Generator(Protocol):
    """Whatever samples completions: the policy in this process, or a server with its weights.

    A loop calls it in phases, one after the other and never two at once:

        generator.load_weights(policy, 0)
        for version in itertools.count(1):
            groups = generator.generate(...)         # phase 1: the generator's
            ...                                      # phase 2: rewards, then the update: the trainer's
            generator.load_weights(policy, version)  # between the two, after every change of the weights

    What a generator needs lies wholly within these calls, and the loop knows nothing of it. So one on devices of its
    own copies the weights there in `load_weights`; one that shares the trainer's devices gets its memory back at the
    beginning of `generate` (wakes a server, moves a cache in) and gives it up at the end of it; one that overlaps the
    two samples from the version that it was given last, and `load_weights` is where it waits.
    """

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """`num_completions` completions to each prompt, sampled from the weights of the last version; in order.

        `prompt_ids`: the tokens of each prompt, as the policy's template renders it. Raises `ModelError` for a prompt
        that leaves no room, `GenerationError` where completions cannot be had.
        """
        ...

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Sample from these weights from now on. `version`: grows with every change. The policy is only read."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts of what went amiss since it was made, by name; they only grow, and the names are always the same."""
        ...

    def close(self) -> None:
        """Free what is held. It can be called twice."""
        ...


class LocalGenerator:
    """Samples from `policy` itself, in its `compute_dtype`. `end_ids`: tokens that end a completion; None: those of
    the model's generation settings and the tokenizer's end of text.

    Prompts of like length are sampled together, `batch_size` completions at a time, and each is computed once for all
    its completions. Neither changes what is sampled: `treeward.rl.sampling` says why.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings | None = None,
        *,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        self.policy, self.settings = policy, settings or GenerationSettings()
        self.reader = CompletionReader(tokenizer, end_ids_of(policy, tokenizer, end_ids), self.settings)

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """See `Generator`. The p-th prompt's g-th completion depends on the seed, p and g, and on no other prompt."""
        most = rooms(prompts, prompt_ids, self.settings, self.policy)
        rows = [
            Row(tuple(ids), most[p], uniforms(seed, p, g, most[p]))
            for p, ids in enumerate(prompt_ids)
            for g in range(num_completions)
        ]
        training = self.policy.training
        self.policy.eval()
        try:
            sampled = self._sampled(rows, seed)
        finally:
            self.policy.train(training)
        keep = self.settings.log_probs
        completions = [self.reader.completion(one.token_ids, one.log_probs if keep else None) for one in sampled]
        return [
            CompletionGroup(prompt, tuple(ids), tuple(completions[p * num_completions : (p + 1) * num_completions]))
            for p, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
        ]

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Nothing to do: it samples from the policy itself."""

    def metrics(self) -> dict[str, float]:
        """Nothing: its tokens are those that were sampled."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _sampled(self, rows: Sequence[Row], seed: int) -> list[Sampled]:
        settings = self.settings
        if rows and settings.is_continuous(self.policy):
            return sample_continuously(
                self.policy, rows, end_ids=self.reader.end_ids, seed=seed, temperature=settings.temperature
            )
        order = sorted(range(len(rows)), key=lambda r: len(rows[r].prompt_ids))
        found: dict[int, Sampled] = {}
        for start in range(0, len(rows), settings.batch_size):
            chosen = order[start : start + settings.batch_size]
            sampled = sample(
                self.policy,
                [rows[r] for r in chosen],
                ended=self.reader.has_ended,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
            )
            found |= dict(zip(chosen, sampled, strict=True))
        return [found[r] for r in range(len(rows))]


class CompletionReader:
    """From sampled tokens to a `SampledCompletion`: where it ends, and its text. `end_ids`: the model's, beside the
    settings'.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], settings: GenerationSettings
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset([*end_ids, *settings.stop_token_ids])
        self.stop_strings = settings.stop_strings
        # A token is a byte at least.
        self._tail = max((len(text.encode()) for text in self.stop_strings), default=0) + _SLACK_TOKENS

    def has_ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens ends the completion."""
        if not tokens or tokens[-1] in self.end_ids:
            return bool(tokens)
        return bool(self.stop_strings) and self._stop(self._text(tokens[-self._tail :])) is not None

    def completion(
        self, tokens: Sequence[int], log_probs: Sequence[float] | None, *, truncated: bool | None = None
    ) -> SampledCompletion:
        """The completion with these tokens. `truncated`: None: no end and no stop string came."""
        ended = bool(tokens) and tokens[-1] in self.end_ids
        text = self._text(tokens[:-1] if ended else tokens)
        stop = self._stop(text)
        return SampledCompletion(
            tuple(tokens),
            text if stop is None else text[:stop],
            truncated=(not ended and stop is None) if truncated is None else truncated,
            log_probs=None if log_probs is None else tuple(log_probs),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _stop(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((at for stop in self.stop_strings if (at := text.find(stop)) >= 0), default=None)


def rooms(
    prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], settings: GenerationSettings, policy: PolicyModel
) -> list[int]:
    """How many tokens a completion to each prompt may have. Raises `ModelError` for a prompt that leaves no room."""
    limits = [one for one in (policy.max_positions, settings.max_total_tokens) if one is not None]
    limit, max_new_tokens = min(limits, default=None), settings.max_new_tokens
    found = []
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        found.append(max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)))
        if found[-1] <= 0 or not ids:
            raise ModelError(
                "a prompt leaves no room for a completion" if ids else "a prompt has no tokens",
                where=prompt.where,
                got=f"{len(ids)} tokens",
                need="at least 1 token"
                if limit is None
                else f"1 to {limit - 1} tokens: prompt and completion have {limit} together",
                fix="leave out or shorten long prompts: data.max_input_seq_length" if ids else None,
            )
    return found


def end_ids_of(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    given: Sequence[int] | None = None,
    *,
    of_template: Sequence[int] = (),
) -> list[int]:
    """The tokens that end a completion: those `given`, or else the model's, the tokenizer's and the template's.

    Raises `ConfigError` where nothing says which they are.
    """
    found: list[int] = []
    settings = getattr(policy.hf, "generation_config", None)
    for ids in (given,) if given is not None else (getattr(settings, "eos_token_id", None), tokenizer.eos_token_id):
        found += [ids] if isinstance(ids, int) else ids or []
    if added := [i for i in of_template if given is None and i not in found]:
        logger.info("Completions also end with %s, as in the chat template.", tokenizer.convert_ids_to_tokens(added))
        found += added
    if not found:
        raise ConfigError(
            "nothing says where a completion ends",
            field="end_ids",
            got="no end-of-sequence token in the model's generation settings or the tokenizer",
            need="at least one token id",
        )
    return found


def template_end_ids(renderer: Renderer) -> list[int]:
    """The special token that the chat template ends a completion with, which a base model's own ends may lack.

    Empty where it writes nothing after one, or refuses the question that it is tried with. Where what it writes has no
    special token, the log warns.
    """
    try:
        last, followed = (
            renderer.render(messages).rpartition(_PROBE_COMPLETION)[2] for messages in (_PROBE[:2], _PROBE)
        )
    except DataError:
        return []
    if not last.strip():
        return []
    tokenizer = renderer.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    rows = [
        [int(i) for i in tokenizer(text.strip(), add_special_tokens=False)["input_ids"]]
        for text in (last, followed.partition(_PROBE_NEXT)[0])
    ]
    # What the last completion alone has may end the text (Phi), and what a followed one alone has begins the next turn.
    # gpt-oss ends its last completion otherwise.
    shared, whole = ([i for i in ids if i in special] for ids in (os.path.commonprefix(rows), rows[0]))
    ends = shared or whole
    if not ends:
        logger.warning(
            "The chat template ends a completion with %r, which has no special token: a policy that writes it goes on. "
            "policy.generation.stop_strings can name it.",
            last.strip(),
        )
    return ends[-1:]  # those before it may close a part of the completion, as Cohere's do
