"""Checks before the first step, for mistakes that would otherwise train a model that cannot score.

    check_before_training(model, comparisons, tokenizer)
    check_policy(policy, prompts_as_token_ids)
    check_positions(model, 4096)

Each of these has happened in some toolkit with every test passing: a head with two labels, a head that was never saved,
a score that was read at padding.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.errors import ConfigError, ModelError
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import load_tokenizer
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.wrapped import WrappedModel
from treeward.tree.token_tree import TokenIds

__all__ = ["check_before_training", "check_policy", "check_positions", "check_tokenizer_survives"]

_PROBE_TEXTS = (
    "Don't they're  12,345.67 words?\n\n\tdef f(x): return x  ",
    "e\u0301tude Übermaß 谢谢 علم \u212b ﬁne 👩‍🔬 …",
)

logger = logging.getLogger(__name__)


def check_before_training(
    model: RewardModel,
    sequences: Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    *,
    highest_token: int | None = None,
) -> None:
    """Raise `ModelError` where training would go wrong.

    Checked are: the head has one label, is float32, is trained and will be saved; no token of `sequences` (real
    conversations), nor `highest_token`, is beyond the model's vocabulary; none of them ends with padding; and the
    scores of the two shortest are those that plain transformers gives for each of them alone.
    """
    _check_head(model)
    _check_tokens(model.num_embeddings, sequences, highest_token)
    _check_read_position(model, sequences, tokenizer)
    if model.layout != "encoder" and not getattr(model.hf, "made_by_treeward", False):
        _check_scores(model, sorted(sequences, key=len)[:2])


@torch.no_grad()
def check_policy(policy: PolicyModel, prompts: Sequence[TokenIds]) -> None:
    """Raise `ModelError` where a policy would be trained with other log-probabilities than plain transformers gives.

    `prompts`: real ones, as tokens; the two shortest are checked, each with completions made of its own tokens that
    share a beginning. Their log-probabilities, computed together as in training, must be those of the model's own
    logits for each row alone: within 1e-3 on average over the tokens in float32, 0.05 in shorter dtypes. No token may
    lie beyond the vocabulary.
    """
    _check_tokens(policy.num_embeddings, prompts)
    compute_dtype, policy.compute_dtype = policy.compute_dtype, None
    tolerance = 1e-3 if policy.hf.dtype == torch.float32 else 0.05
    try:
        for prompt in sorted(prompts, key=len)[:2]:
            start = [int(token) for token in prompt]
            tail = start[-8:]
            sequences = [[*start, *end] for end in (tail, tail[: len(tail) // 2] + tail[::-1], tail[:1])]
            ours = policy.log_probs([sequences], [[len(start)] * len(sequences)])
            for sequence, found_L in zip(sequences, ours.values_SL, strict=True):
                own, theirs = found_L[: len(sequence) - len(start)], _row_log_probs(policy, sequence, len(start))
                if not float((own - theirs).abs().mean()) <= tolerance:
                    raise ModelError(
                        "a completion does not get the log-probability that plain transformers gives it",
                        where=type(policy.hf).__name__,
                        got=f"{float(own.sum()):.6f} for {len(own)} tokens after a prompt of {len(start)}",
                        need=f"{float(theirs.sum()):.6f}",
                        fix="policy.attention=rows if that helps, and please report the model",
                    )
    finally:
        policy.compute_dtype = compute_dtype


def _row_log_probs(policy: PolicyModel, sequence: Sequence[int], start: int) -> Tensor:
    ids = torch.tensor([list(sequence)], device=policy.device)
    with policy.plain_attention():
        logits_TV = policy.hf(input_ids=ids, use_cache=False).logits[0].float()
    values: Tensor = logits_TV[start - 1 : -1].log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
    return values


def check_positions(model: WrappedModel, length: int) -> None:
    """Raise `ConfigError` where conversations of `length` tokens are longer than the model's positions."""
    limit = model.max_positions
    if limit is not None and length > limit:
        raise ConfigError(
            "conversations may be longer than the model's positions",
            where="policy.max_total_sequence_length",
            got=length,
            need=f"at most {limit}",
            fix=f"policy.max_total_sequence_length={limit}",
        )


def check_tokenizer_survives(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` for a tokenizer that gives other tokens once it is saved beside this model.

    For some model types transformers ignores the class of a saved tokenizer and loads the type's own class, with its
    own normalisation and splitting.
    """
    with tempfile.TemporaryDirectory() as folder:
        hf.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = load_tokenizer(folder)
    if all(tokenizer(text)["input_ids"] == again(text)["input_ids"] for text in _PROBE_TEXTS):
        return
    raise ConfigError(
        "this tokenizer cannot be kept with this type of model",
        where="policy.tokenizer",
        got=f"model_type {hf.config.model_type}, whose tokenizers transformers loads as {type(again).__name__}: the "
        "exported model would be given other tokens than in training",
        need="a tokenizer of that class, or another model type",
        fix="give policy.tokenizer.name, a tokenizer of this family, or train another type (qwen3, llama)",
    )


def _check_head(model: RewardModel) -> None:
    name = head_name(model.hf)
    layers = [module for module in model.head.modules() if isinstance(module, nn.Linear)]
    saved = model.hf.state_dict()
    for problem, where in [
        (f"it has {layers[-1].out_features} labels, not one", layers[-1].out_features != 1),
        ("it is not float32", any(layer.weight.dtype != torch.float32 for layer in layers)),
        ("it is frozen", not all(layer.weight.requires_grad for layer in layers)),
        ("it would not be saved", not any(key.startswith(f"{name}.") for key in saved)),
    ]:
        if where:
            raise ModelError("the score head cannot be trained", where=name, got=problem)


def _check_tokens(rows: int, sequences: Sequence[TokenIds], highest_token: int | None = None) -> None:
    highest = max(highest_token or 0, *(int(max(sequence)) for sequence in sequences))
    if highest >= rows:
        raise ModelError(
            "the tokenizer has tokens that the model does not know",
            where="policy.tokenizer.name",
            got=f"token {highest}",
            need=f"tokens below {rows}, the rows of the embedding",
            fix="use the model's own tokenizer",
        )


def _check_read_position(model: RewardModel, sequences: Sequence[TokenIds], tokenizer: PreTrainedTokenizerBase) -> None:
    if model.layout == "encoder":
        logger.info("The score is read by %s's own pooling.", type(model.hf).__name__)
        return
    last = Counter(int(sequence[-1]) for sequence in sequences)
    pad = model.hf.config.get_text_config().pad_token_id
    if pad in last:
        raise ModelError(
            "conversations end with the padding token, so plain transformers would read another score",
            where="policy.tokenizer",
            got=f"{tokenizer.convert_ids_to_tokens(pad)!r} ends {last[pad]} of {len(sequences)} conversations",
            need="a padding token that no conversation ends with",
        )
    token, count = last.most_common(1)[0]
    text = tokenizer.decode([token])
    logger.info("The score is read at the last token: %r in %d of %d conversations.", text, count, len(sequences))
    if count < len(sequences):
        logger.warning(
            "Conversations end with %d different tokens: the chat template writes no end of turn, so the model cannot "
            "see whether a completion is finished.",
            len(last),
        )


@torch.no_grad()
def _check_scores(model: RewardModel, sequences: Sequence[TokenIds]) -> None:
    """Both scores are computed in the weights' own precision, so they differ only in the read position."""
    compute_dtype, model.compute_dtype = model.compute_dtype, None
    ours = model(model.make_batch([sequences]))
    for sequence, score in zip(sequences, ours.tolist(), strict=True):
        ids = torch.tensor([[int(token) for token in sequence]], device=model.device)
        with model.plain_attention():
            theirs = float(model.hf(input_ids=ids, use_cache=False).logits[0, 0])
        if abs(score - theirs) > 1e-3 * max(1.0, abs(theirs)):
            raise ModelError(
                "a real conversation does not get the score that plain transformers gives it",
                where=type(model.hf).__name__,
                got=f"{score:.6f} for a conversation of {len(sequence)} tokens",
                need=f"{theirs:.6f}: the score read at its last token",
                fix="policy.attention=rows, and please report the model",
            )
    model.compute_dtype = compute_dtype
