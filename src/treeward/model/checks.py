"""A model against plain transformers: can it share prefixes, and does it give the values of plain
rows?

    layout = choose_layout(hf, "tree")      # tried on the model itself: no list of families
    check_before_training(model, conversations_as_token_ids, tokenizer)

Shapes: S sequences, H heads, D hidden size, N tokens.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.errors import ConfigError, ModelError
from treeward.model.heads import head_name
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import has_room
from treeward.model.reward_model import RewardModel
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.attention import probing
from treeward.tree.batch import TreeBatch
from treeward.tree.token_tree import TokenIds

logger = logging.getLogger(__name__)

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""The types of layers that mix tokens by attention alone, as transformers names them."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest accepted difference of hidden states, relative to their largest value. Rounding stays a
factor of ten below, and a token that sees one token too many lies far above."""
_LONGEST_PATH = 2**17
"""In tokens, of a model that names no limit."""


def choose_layout(hf: PreTrainedModel, requested: Literal["tree", "rows"]) -> Layout:
    """How to run a sequence classifier when `policy.attention` is `requested`; rows, with a
    warning, if it cannot share a prefix. Raises `ModelError` if not even rows give the scores of
    plain transformers."""
    if head_name(hf) != "score":
        return "encoder"
    # A class that treeward made has nothing of transformers' own to be compared with.
    if hf.device.type != "meta" and not getattr(hf, "made_by_treeward", False):
        _check_scores(RewardModel(hf, layout="rows"), _probe_sequences(hf))
    return tree_or_rows(hf, requested)


def tree_or_rows(hf: PreTrainedModel, requested: Literal["tree", "rows"]) -> Layout:
    """`choose_layout` for any decoder."""
    if requested == "rows":
        return "rows"
    reason = why_not_tree(hf)
    if reason is None:
        return "tree"
    logger.warning(
        "%s cannot share prefixes (%s): it runs as padded rows.", type(hf).__name__, reason
    )
    return "rows"


def other_layers(hf: PreTrainedModel) -> list[str]:
    """The types of layers that are not attention, by transformers' names, as `linear_attention`."""
    layer_types = getattr(hf.config.get_text_config(), "layer_types", None) or ()
    return sorted(set(layer_types) - _ATTENTION_LAYERS)


@torch.no_grad()
def why_not_tree(hf: PreTrainedModel) -> str | None:
    """None if trees are exact for this model, else the reason why not. Without weights the
    configuration decides, and `check_before_training` compares later."""
    config = hf.config.get_text_config()
    model = WrappedModel(hf, layout="tree")
    other = other_layers(hf)
    if other and not model.recurrent_functions:
        return f"it has layers of type {', '.join(other)}"
    # Llama 4 scales queries from 8192 tokens on: a probe would not show it.
    if getattr(config, "attn_temperature_tuning", False):
        return "its attention temperature depends on the place in the row"
    if hf.device.type == "meta":
        return None
    with probing(model.max_positions or _LONGEST_PATH):
        reason = _why_not_equal(model, _probe_sequences(hf))
    with model.plain_attention():  # the attention that is set last stays
        return reason


def _plain_states(model: WrappedModel, sequences: Sequence[TokenIds]) -> Tensor:
    """The last hidden state of each sequence by plain transformers, float32 (S, D)."""
    states = []
    with model.plain_attention():
        for ids in sequences:
            row = torch.tensor([ids], device=model.device)
            hidden = model.backbone(input_ids=row, use_cache=False).last_hidden_state
            states.append(hidden[:, -1])
    return torch.cat(states).float()


def _why_not_equal(model: WrappedModel, sequences: Sequence[list[int]]) -> str | None:
    """Why the last hidden states of a tree of the sequences differ from those of plain rows; None
    if they do not."""
    plain_SD = _plain_states(model, sequences)
    try:
        batch = TreeBatch.from_groups([sequences]).to(model.device)
        hidden_ND = model.tree_hidden(batch, batch.reads.places_N)
        tree_SD = hidden_ND.index_select(0, batch.reads.index_R).float()
    except Exception as error:  # models that are not made for it fail in any way
        return (str(error) or type(error).__name__).splitlines()[0]
    largest = plain_SD.abs().max().clamp_min(1e-6)
    difference = float((tree_SD - plain_SD).abs().max() / largest)
    # NaN is no less than anything, so that a model that gives it is refused.
    if difference <= _TOLERANCE.get(model.hf.dtype, 5e-2):
        return None
    # In bfloat16 the rows of a recurrent layer may be further off than trees are.
    more_bytes = sum(weight.numel() * (4 - weight.element_size()) for weight in model.weights())
    if more_bytes and has_room(model.device, 1.2 * more_bytes):
        with model.computing_in(torch.float32):
            exact_SD = _plain_states(model, sequences)
        off = float((tree_SD - exact_SD).abs().max())
        if off <= 2 * float((plain_SD - exact_SD).abs().max()):
            return None
    return f"a tree's hidden states differ by {difference:.1e} from plain rows"


def check_before_training(
    model: RewardModel,
    sequences: Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_heads: int | None = None,
    highest_token: int | None = None,
) -> None:
    """Raise `ModelError` where training would go wrong: a head without `num_heads` labels (None:
    one, or parts of one score), not float32, frozen or not saved; tokens of `sequences` (real
    conversations) or `highest_token` outside the vocabulary; sequences that end with padding;
    scores of the two shortest that are not plain transformers'."""
    name = head_name(model.hf)
    layers = [module for module in model.head.modules() if isinstance(module, nn.Linear)]
    outputs = layers[-1].out_features
    problem = None
    # A published head may have several values, whose sum is the score.
    counts_labels = num_heads is not None or not model.score_parts
    if counts_labels and outputs != (num_heads or 1):
        problem = f"it has {outputs} labels, not {num_heads or 'one'}"
    elif any(layer.weight.dtype != torch.float32 for layer in layers):
        problem = "it is not float32"
    elif not all(layer.weight.requires_grad for layer in layers):
        problem = "it is frozen"
    elif not any(key.startswith(f"{name}.") for key in model.hf.state_dict()):
        problem = "it would not be saved"
    if problem is not None:
        raise ModelError("the score head cannot be trained", where=name, got=problem)
    _check_tokens(model.num_embeddings, sequences, highest_token)
    if model.layout == "encoder":
        logger.info("The score is read by %s's own pooling.", type(model.hf).__name__)
        return
    last = Counter(int(sequence[-1]) for sequence in sequences)
    pad = model.hf.config.get_text_config().pad_token_id
    # Plain transformers takes such an end for padding, and reads before it.
    if pad in last:
        raise ModelError(
            "conversations end with the padding token, so plain transformers would read another "
            "score",
            where="policy.tokenizer",
            got=f"{tokenizer.convert_ids_to_tokens(pad)!r} ends {last[pad]} of {len(sequences)}",
        )
    if model.step_token is not None:
        logger.info("Each step is read at the mark after it, %r.", model.step_token)
    else:
        _tell_ends(last, tokenizer, len(sequences))
    # The shortest are enough, because a wrong read or head shows in any conversation.
    if not getattr(model.hf, "made_by_treeward", False):
        _check_scores(model, sorted(sequences, key=len)[:2])
    # Real conversations may end so long after they part that a wrong state has decayed.
    if model.layout == "tree" and model.recurrent_functions:
        _check_scores(model, _probe_sequences(model.hf))


def _tell_ends(last: Counter[int], tokenizer: PreTrainedTokenizerBase, num_sequences: int) -> None:
    """Log the token at which scores are read, and warn if there are several."""
    token, count = last.most_common(1)[0]
    logger.info(
        "The score is read at the last token: %r in %d of %d conversations.",
        tokenizer.decode([token]),
        count,
        num_sequences,
    )
    if count < num_sequences:
        logger.warning(
            "Conversations end with %d different tokens: the chat template writes no end of turn, "
            "so the model cannot see whether a completion is finished.",
            len(last),
        )


@torch.no_grad()
def check_policy(
    policy: PolicyModel, prompts: Sequence[TokenIds], *, exact: PolicyModel | None = None
) -> None:
    """Raise `ModelError` if the policy's log-probabilities differ from plain transformers', or for
    unknown tokens.

    `prompts`: real ones, as tokens; the four shortest are checked, with completions of their own
    tokens. Computed together they must equal those of single rows, on average within 1e-3 in
    float32; other dtypes may differ from float32 by that plus twice the error of single rows.
    `exact`: the policy in float32; None widens its weights meanwhile, or allows 0.05 if the GPU has
    no room for them.
    """
    _check_tokens(policy.num_embeddings, prompts)
    groups = []
    together = []
    for prompt in sorted(prompts, key=len)[:4]:
        ids = [int(token) for token in prompt]
        tail = ids[-8:]
        # Completions that part at once, that part in the middle, and that end early.
        completions = (tail, tail[: len(tail) // 2] + tail[::-1], tail[:1])
        rows = [ids + completion for completion in completions]
        groups.append((len(ids), rows))
        log_probs = policy.log_probs([rows], [[len(ids)] * len(rows)])
        together.append(log_probs.values_SL[log_probs.mask_SL])
    together_N = torch.cat(together)
    plain_N = _plain_log_probs(policy, groups)
    # Not exact against exact: what single rows are off by in this dtype is allowed twice.
    exact_N = plain_N
    rounding = 0.0
    dtype = policy.compute_dtype or policy.hf.dtype
    if dtype != torch.float32:
        more_bytes = 0
        for weight in policy.weights():
            more_bytes += weight.numel() * (4 - weight.element_size())
        if exact is not None:
            exact_N = _plain_log_probs(exact, groups)
        elif has_room(policy.device, 1.2 * more_bytes):
            with policy.computing_in(torch.float32):
                exact_N = _plain_log_probs(policy, groups)
        else:
            rounding = 0.025  # twice that is the 0.05 that is allowed
    rounding = max(rounding, float((plain_N - exact_N).abs().mean()))
    off = float((together_N - exact_N).abs().mean())
    allowed = 1e-3 + 2 * rounding
    summary = f"{off:.1e} off a token, the mean of {len(exact_N)}"
    logger.info(
        "The policy's log-probabilities in %s: %s; %.1e is allowed.",
        str(dtype).removeprefix("torch."),
        summary,
        allowed,
    )
    if not off <= allowed:  # of NaN too
        raise _not_plain(policy, "log-probability", summary, f"at most {allowed:.1e}")


def _plain_log_probs(policy: PolicyModel, groups: Sequence[tuple[int, list[list[int]]]]) -> Tensor:
    """Log-probabilities of all tokens after the prompts, (N,), from the model's logits, one row at
    a time."""
    log_probs = []
    for start, rows in groups:
        for row in rows:
            ids = torch.tensor([row], device=policy.device)
            # The logits at a token are of the token after it.
            logits_TV = policy.plain_logits(input_ids=ids, use_cache=False)[0, start - 1 : -1]
            log_probs_TV = logits_TV.float().log_softmax(-1)
            log_probs.append(log_probs_TV.gather(-1, ids[0, start:, None])[:, 0])
    return torch.cat(log_probs)


def check_positions(model: WrappedModel, length: int) -> None:
    """Raise `ConfigError` where conversations of `length` tokens are longer than the model's
    positions."""
    limit = model.max_positions
    if limit is not None and length > limit:
        raise ConfigError(
            "conversations may be longer than the model's positions",
            where="policy.max_total_sequence_length",
            got=length,
            need=f"at most {limit}",
        )


def _check_tokens(
    rows: int, sequences: Sequence[TokenIds], highest_token: int | None = None
) -> None:
    highest = max(highest_token or 0, *(int(max(sequence)) for sequence in sequences))
    if highest >= rows:
        raise ModelError(
            "the tokenizer has tokens that the model does not know",
            where="policy.tokenizer.name",
            got=f"token {highest}",
            need=f"tokens below {rows}, the rows of the embedding",
        )


@torch.no_grad()
def _check_scores(model: RewardModel, sequences: Sequence[TokenIds]) -> None:
    # One batch against single rows, so that padding and packing are compared too.
    ours_SH = model.heads(model.make_batch([sequences])).cpu()
    plain_SH = _plain_values(model, sequences)
    # Not relative to each score, which may be close to zero.
    dtype = model.compute_dtype or model.hf.dtype
    largest = max(1.0, float(plain_SH.nan_to_num().abs().max()))
    tolerance = largest * max(1e-3, _TOLERANCE.get(dtype, 5e-2))
    for ours_H, plain_H in zip(ours_SH, plain_SH, strict=True):
        # NaN on both sides is the model's own fault, which later checks name.
        if not torch.allclose(ours_H, plain_H, rtol=0, atol=tolerance, equal_nan=True):
            raise _not_plain(model, "score", ours_H.tolist(), plain_H.tolist())


def _plain_values(model: RewardModel, sequences: Sequence[TokenIds]) -> Tensor:
    """The values of plain transformers, (S, H): one row at a time, the score read at its last
    token."""
    configs = [model.hf.config]
    text_config = model.hf.config.get_text_config()
    if text_config is not model.hf.config:
        configs.append(text_config)
    padding = [config.pad_token_id for config in configs]

    def cast(head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        # transformers gives a float32 head the hidden states of a bfloat16 backbone, and PyTorch
        # refuses.
        return (arguments[0].to(next(head.parameters()).dtype),)

    hook = model.head.register_forward_pre_hook(cast)
    values = []
    try:
        # Without a padding token transformers reads a single row at its very last token.
        for config in configs:
            config.pad_token_id = None
        for ids in sequences:
            row = torch.tensor([[int(token) for token in ids]], device=model.device)
            values.append(model.plain_logits(input_ids=row, use_cache=False).float().cpu())
    finally:
        hook.remove()
        for config, pad in zip(configs, padding, strict=True):
            config.pad_token_id = pad
    return torch.cat(values)


def _not_plain(model: WrappedModel, what: str, got: object, need: object) -> ModelError:
    return ModelError(
        f"a conversation does not get the {what} that plain transformers gives it",
        where=type(model.hf).__name__,
        got=got,
        need=f"{need}: a model with a linear head on the last hidden state",
        fix="policy.attention=rows if that helps, and please report the model",
    )


_PROBED_CHUNK = 64
"""Tokens that the kernels of recurrent layers compute at once, at most."""


def _probe_sequences(hf: PreTrainedModel) -> list[list[int]]:
    """Conversations that show a wrong tree, without the padding token.

    Two of 12 and 10 tokens that share 6. Of a model with recurrent layers six: a tree of three
    levels that is longer than two chunks of a kernel, and one so short that it is padded beside it.
    All but one end one to five tokens after they part from the others, before a state that they
    should not have inherited has decayed.
    """
    model = WrappedModel(hf, layout="rows")
    vocabulary = model.num_embeddings
    generator = random.Random(0)  # not torch's, whose numbers are all the same on fake tensors
    pad = getattr(hf.config.get_text_config(), "pad_token_id", None)
    drawn = [generator.randrange(vocabulary) for _ in range(64)]
    known = [token for token in dict.fromkeys(drawn) if token != pad]
    if len(known) < 2:
        raise ModelError(
            "the vocabulary is too small", got=vocabulary, need="two tokens besides padding"
        )

    def draw(number: int) -> list[int]:
        return [generator.choice(known) for _ in range(number)]

    # Where conversations part their tokens must differ.
    one, other = known[:2]
    prompt_length = 2 * _PROBED_CHUNK + 7
    middle_length = _PROBED_CHUNK + 6
    limit = model.max_positions
    has_room = limit is None or limit >= prompt_length + middle_length + 5
    if not model.recurrent_functions or not has_room:
        shared = draw(6)
        return [[*shared, one, *draw(5)], [*shared, other, *draw(3)]]
    prompt = [one, *draw(prompt_length - 1)]
    middle = [*prompt, one, *draw(middle_length - 1)]
    short = [other, *draw(20)]
    deep = [[*prompt, other], middle, [*middle, one, *draw(1)], [*middle, other, *draw(4)]]
    return [*deep, [*short, one], [*short, other]]
