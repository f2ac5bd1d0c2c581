"""`LocalGenerator`: completions sampled by the processes of the run; `Generator`: the interface of
every generator.

    config = GenerationConfig(max_new_tokens=256)
    generator = LocalGenerator(policy, tokenizer, config, end_ids_of(policy, tokenizer, config))
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=step)

A `CompletionGroup` is one prompt with its completions; all groups of a batch have the same number.
The token ids are the sampled ones, with the token that ended the completion; they are never decoded
and tokenized again, which can give others. The same seed gives the same completions, whatever was
sampled before, however many at once, and on however many processes.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.grpo_policy import GenerationConfig
from treeward.data.conversation import Conversation, Message
from treeward.data.prompt_sets import Prompt
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.policy_model import PolicyModel
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import on_whole
from treeward.rl.sampling import SampledRow, sample, uniforms

logger = logging.getLogger(__name__)

# Words that no template writes by itself, to find what it writes around them.
_PROBE_COMPLETION = "Romam."
_PROBE_NEXT = "Quando?"
_PROBE: list[Message] = [
    {"role": "user", "content": "Quo vadis?"},
    {"role": "assistant", "content": _PROBE_COMPLETION},
    {"role": "user", "content": _PROBE_NEXT},
]
_SLACK_TOKENS = 4
"""The last token of a stop string may begin within a character, and hold more than its end."""


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """`token_ids`: with the end token; `truncated`: it has none. `text`: of the whole turn, the
    `opening` of its prompt and what was sampled, without the end token.

    `log_probs`: the generator's, per token; None if it gives none.
    """

    token_ids: tuple[int, ...]
    text: str
    truncated: bool
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    """One prompt with G completions, which share its tokens."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[SampledCompletion, ...]

    def sequence(self, g: int) -> tuple[int, ...]:
        """Token ids of the prompt and completion g."""
        return (*self.prompt_ids, *self.completions[g].token_ids)

    @property
    def conversations(self) -> list[Conversation]:
        """The messages of each completion, for environments, which render them for their own
        model."""
        conversations = []
        for completion in self.completions:
            answer: Message = {"role": "assistant", "content": completion.text}
            messages = [*self.prompt.messages, answer]
            conversation = Conversation(messages, chat_template_kwargs=self.prompt.template_kwargs)
            conversations.append(conversation)
        return conversations

    @property
    def num_row_tokens(self) -> int:
        """Tokens as plain rows."""
        num_completion_tokens = sum(len(completion.token_ids) for completion in self.completions)
        return len(self.prompt_ids) * len(self.completions) + num_completion_tokens


def completion_lengths(groups: Sequence[CompletionGroup]) -> Tensor:
    """Tokens of each completion, int64 (P, G)."""
    lengths = []
    for group in groups:
        lengths.append([len(completion.token_ids) for completion in group.completions])
    return torch.tensor(lengths, dtype=torch.int64).reshape(batch_shape(groups))


def truncated_completions(groups: Sequence[CompletionGroup]) -> Tensor:
    """Which completions the length limit cut, bool (P, G), as their generator says."""
    truncated = []
    for group in groups:
        truncated.append([completion.truncated for completion in group.completions])
    return torch.tensor(truncated, dtype=torch.bool).reshape(batch_shape(groups))


def batch_shape(groups: Sequence[CompletionGroup]) -> tuple[int, int]:
    """(P, G)."""
    if not groups:
        return 0, 0
    return len(groups), len(groups[0].completions)


class GenerationError(ModelError):
    """A generator failed; names the request and the response."""


@dataclass(eq=False, repr=False)
class Generator(ABC):
    """Samples completions: the policy in this process, a server or engines with its weights.

    The run calls `load_weights` after every change of the weights and then `generate`, never two at
    once. Every process of a run has a generator, makes these calls, and gets all completions.

    `config`: the section `policy.generation`. `end_ids`: tokens that end a completion
    (`end_ids_of`). `max_total_tokens`: the limit of prompt and completion together.
    `chat_template`, `trust_remote_code`: the policy's, for samplers outside this process. `mesh`:
    the processes that share the sampling.
    """

    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    config: GenerationConfig
    end_ids: Sequence[int]
    max_total_tokens: int | None = None
    chat_template: str = ""
    trust_remote_code: bool = False
    mesh: Mesh = Mesh()

    def __post_init__(self) -> None:
        self.reader = CompletionReader(self.tokenizer, self.end_ids, self.config)

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Sequence[int]],
        *,
        num_completions: int,
        seed: int,
    ) -> list[CompletionGroup]:
        """`num_completions` completions to each prompt, sampled from the weights of the last
        version; in order.

        `prompt_ids`: the tokens of each prompt, as the policy's template renders it. Raises
        `ModelError` for a prompt that leaves no room, `GenerationError` if sampling fails.
        """

    def load_weights(self, policy: PolicyModel, version: int) -> None:  # noqa: B027
        """Sample from these weights from now on. `version` grows with every change. Leaves the
        policy unchanged."""

    def close(self) -> None:  # noqa: B027
        """Free all resources. Safe to repeat."""

    def budgets(self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]]) -> list[int]:
        """Most tokens of a completion to each prompt. Raises `ModelError` for a prompt that leaves
        no room."""
        limits = (self.policy.max_positions, self.max_total_tokens)
        limit = min(filter(None, limits), default=sys.maxsize)
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            if not 0 < len(ids) < limit:
                summary = "a prompt leaves no room for a completion"
                if not ids:
                    summary = "a prompt has no tokens"
                raise ModelError(
                    summary,
                    where=prompt.where,
                    got=f"{len(ids)} tokens",
                    need=f"1 to {limit - 1} tokens: prompt and completion have {limit} together",
                    fix="leave out or shorten long prompts: data.max_input_seq_length",
                )
        longest = self.config.max_new_tokens or limit
        return [min(limit - len(ids), longest) for ids in prompt_ids]


class LocalGenerator(Generator):
    """Samples from `policy` itself, in the dtype of its weights. Raises `ConfigError` for a layout
    that cannot.

    Prompts of like length are sampled together, `batch_size` completions at a time, and each prompt
    is computed once. Neither changes the tokens: `treeward.rl.sampling` says why. The processes of
    `mesh` share the prompts out, and each holds the whole policy in memory while it samples.
    """

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Sequence[int]],
        *,
        num_completions: int,
        seed: int,
    ) -> list[CompletionGroup]:
        """See `Generator`. The p-th prompt's g-th completion depends on the seed, p and g, and on
        no other prompt."""
        budgets = self.budgets(prompts, prompt_ids)
        # Prompts of like length are sampled together, which wastes least padding.
        prompts_by_length = sorted(range(len(prompts)), key=lambda p: len(prompt_ids[p]))
        # Every process gets prompts of each length, so that all have about as much to do.
        own_prompts = prompts_by_length[self.mesh.data_rank :: self.mesh.data_size]
        rows_by_prompt: dict[int, list[SampledRow]] = {}
        for p in own_prompts:
            ids = tuple(prompt_ids[p])
            rows_by_prompt[p] = []
            for g in range(num_completions):
                numbers = uniforms(seed, p, g, budgets[p])
                rows_by_prompt[p].append(SampledRow(ids, budgets[p], numbers))
        rows = list(itertools.chain.from_iterable(rows_by_prompt.values()))
        size = self.config.batch_size

        def sample_rows() -> None:
            for start in range(0, len(rows), size):
                sample(
                    self.policy,
                    rows[start : start + size],
                    ended=self.reader.has_ended,
                    temperature=self.config.temperature,
                    top_k=self.config.top_k,
                    top_p=self.config.top_p,
                )

        training = self.policy.training
        self.policy.eval()
        try:
            # `together`: where one process fails, the others do not wait for it in `gather`.
            processes.together(partial(on_whole, self.policy, sample_rows))
        finally:
            # The attention that is set last stays, and the decoder has set its own.
            with self.policy.plain_attention():
                self.policy.train(training)
        sampled: dict[int, list[SampledCompletion]] = {}
        for p, prompt_rows in rows_by_prompt.items():
            opening = prompts[p].opening
            sampled[p] = []
            for row in prompt_rows:
                completion = self.reader.completion(row.token_ids, row.log_probs, opening=opening)
                sampled[p].append(completion)
        completions: dict[int, list[SampledCompletion]] = {}
        for share in processes.gather(sampled, self.mesh.data_group):
            completions |= share
        groups = []
        for p, prompt in enumerate(prompts):
            groups.append(CompletionGroup(prompt, tuple(prompt_ids[p]), tuple(completions[p])))
        return groups


class CompletionReader:
    """From sampled tokens to a `SampledCompletion`: where it ends, and its text.

    `end_ids`: tokens that end a completion, beside those of `config`. A stop string ends it too:
    the tokens stay as sampled, and the text stops before the string. One that is a special token,
    as `<|im_end|>`, is such a token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        config: GenerationConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = config.stop_strings or ()
        # Texts are decoded without special tokens, so that none of these would be found there.
        special_ids = []
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and token.content in self.stop_strings:
                special_ids.append(token_id)
        self.end_ids = frozenset([*end_ids, *(config.stop_token_ids or ()), *special_ids])
        longest = max((len(text.encode()) for text in self.stop_strings), default=0)
        # A token is a byte at least, so that so many hold a stop string that has just ended.
        self._tail = longest + _SLACK_TOKENS

    def has_ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens ends the completion."""
        if tokens and tokens[-1] in self.end_ids:
            return True
        if not self.stop_strings:
            return False
        # Decoding the whole completion after each of its tokens would take quadratic time.
        tail = self._text(tokens[-self._tail :])
        return self._stop(tail) is not None

    def completion(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        *,
        opening: str = "",
        truncated: bool | None = None,
    ) -> SampledCompletion:
        """The completion with these tokens. `opening`: of its prompt. `truncated`: None decides by
        its end token or stop string.
        """
        has_end_token = bool(tokens) and tokens[-1] in self.end_ids
        # An end token that is no special token would be decoded to text.
        before_end = tokens
        if has_end_token:
            before_end = tokens[:-1]
        text = self._text(before_end)
        stop = self._stop(text)
        if stop is not None:
            text = text[:stop]
        if truncated is None:
            truncated = not has_end_token and stop is None
        known_log_probs = None
        if log_probs is not None:
            known_log_probs = tuple(log_probs)
        return SampledCompletion(
            tuple(tokens),
            opening + text,
            truncated=truncated,
            log_probs=known_log_probs,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _stop(self, text: str) -> int | None:
        """Where the first stop string begins."""
        places = [text.find(stop) for stop in self.stop_strings]
        return min((place for place in places if place >= 0), default=None)


def end_ids_of(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig,
    *,
    template_ids: Sequence[int] = (),
) -> list[int]:
    """The tokens that end a completion beside those of `config`: the model's, the tokenizer's and
    the template's.

    Raises `ConfigError` if there are none, and `config` has neither tokens nor strings that end
    one.
    """
    settings = getattr(policy.hf, "generation_config", None)
    model_ids = getattr(settings, "eos_token_id", None)
    # Transformers has one token there, or a list.
    if isinstance(model_ids, int):
        end_ids = [model_ids]
    else:
        end_ids = list(model_ids or ())
    if tokenizer.eos_token_id is not None:
        end_ids.append(tokenizer.eos_token_id)
    added = [i for i in template_ids if i not in end_ids]
    if added:
        names = tokenizer.convert_ids_to_tokens(added)
        logger.info("Completions also end with %s, as in the chat template.", names)
    if not (end_ids or added or config.stop_token_ids or config.stop_strings):
        raise ConfigError(
            "nothing says where a completion ends",
            field="policy.generation.stop_token_ids",
            got="none, and no end token in generation settings, tokenizer or chat template",
            need="at least one token id",
        )
    return end_ids + added


def template_end_ids(renderer: Renderer) -> list[int]:
    """The special token that the chat template writes after a completion, which a base model's end
    tokens may lack.

    Empty if the template writes nothing there, refuses the example, or writes no special token
    (which is logged).
    """
    try:
        last = renderer.render(_PROBE[:2]).rpartition(_PROBE_COMPLETION)[2]
        followed = renderer.render(_PROBE).rpartition(_PROBE_COMPLETION)[2]
    except DataError:
        return []
    if not last.strip():
        return []
    tokenizer = renderer.tokenizer
    # Added tokens may be special without being among those that have a role.
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    between = followed.partition(_PROBE_NEXT)[0]
    rows = []
    for text in (last, between):
        ids = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
        rows.append([int(i) for i in ids])
    # An end that only the last completion has may end the text (Phi); one that only earlier
    # completions have begins the next turn. gpt-oss ends its last completion otherwise.
    # `commonprefix` takes any sequences: here they are token ids.
    ends = [i for i in os.path.commonprefix(rows) if i in special]
    if not ends:
        ends = [i for i in rows[0] if i in special]
    if not ends:
        logger.warning(
            "The chat template ends a completion with %r, which has no special token: a policy "
            "that writes it goes on. policy.generation.stop_strings can name it.",
            last.strip(),
        )
    return ends[-1:]  # those before it may close a part of the completion, as Cohere's do
