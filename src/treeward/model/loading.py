"""From a name to a `RewardModel` or a `PolicyModel`: a model on the hub or on disk, or a bare
configuration.

    load_classifier("meta-llama/Llama-3.2-1B-Instruct", head_seed=42)   # a new head on a causal LM
    load_classifier("results/rm/final")                 # a trained reward model
    load_policy("Qwen/Qwen2.5-0.5B-Instruct")           # to be optimised, or compared with

A new head is drawn from N(0, 1 / (d + 1)) for hidden size d (Stiennon et al. 2020, arXiv
2009.01325, p. 11). Only safetensors are read, and remote code runs only with `trust_remote_code`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from treeward.data.step_marks import mark_id
from treeward.errors import ModelError
from treeward.model.checks import choose_layout, tree_or_rows
from treeward.model.filling import fill, without_weights
from treeward.model.heads import HEAD_NAMES, StepLogits, head_name
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import (
    bare_model,
    load_tokenizer,
    load_weights,
    override_fields,
    read_config,
)
from treeward.model.published import Adapter, find, refuse, set_template
from treeward.model.reward_model import RewardModel
from treeward.model.wrapped import WrappedModel

logger = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=WrappedModel)

PAD_TOKEN = "<|treeward_pad|>"

STEP_TOKEN_KEY = "step_token"
"""The key of config.json with the mark at which a token classifier reads each step."""

_HAS_STEPS = "a process reward model has a value for each step of a conversation"
_WITHOUT_MARK = (
    "this process reward model is not known: nothing says at which token it reads a step"
)
_READ_BEFORE_PADDING = (
    "Plain transformers reads this classifier before its padding token, %r. Here it is read at the "
    "last token of conversations, and so will be its export."
)


class Loaded(NamedTuple, Generic[_Model]):
    """A model with its tokenizer."""

    model: _Model
    tokenizer: PreTrainedTokenizerBase


def load_classifier(
    name: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
    head_seed: int | None = None,
    several_heads: bool = False,
    steps: bool = False,
    step_token: str | None = None,
    labels: Sequence[str] = (),
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    on_meta: bool = False,
    keep_padding: bool = False,
) -> Loaded[RewardModel]:
    """Load a checkpoint from a folder or the hub. Raises `ModelError` where it cannot be used.

    `dtype`: of the backbone's weights; the head's are always float32. `attention`: "rows", or
    "tree", which falls back to rows with a warning. `head_seed`: draws a new head for a checkpoint
    without a one-label head; None requires a trained head, as published models always do.
    `several_heads`: allow any number of labels; `steps`: allow a process reward model;
    `step_token`: make one, which reads each step at this token; `labels`: names of the heads.
    `load_in_4bit`: the backbone's linear layers as nf4, for adapters.
    `on_meta`: a float32 model without weights, to cast and shard before its `fill` reads them.
    `keep_padding`: read a decoder's score as plain transformers does, at the last token that is not
    the padding token of config.json.
    """
    config = read_config(str(name), trust_remote_code)
    refuse(config.to_dict(), config.name_or_path)
    published = find(config.to_dict(), config.name_or_path)
    tokenizer = tokenizer or load_tokenizer(str(name), trust_remote_code=trust_remote_code)
    makes_steps = step_token is not None
    step_token = _chosen_step_token(config, published, str(name), step_token, allowed=steps)
    if step_token is not None:
        config.step_token_id = mark_id(tokenizer, step_token)
    is_classifier = any("SequenceClassification" in text for text in config.architectures or ())
    if published is None:
        _set_labels(config, labels, step_token, keep=several_heads and is_classifier)
    settings: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "load_in_4bit": load_in_4bit,
    }
    if published is None and step_token is not None:
        model_class = step_classifier_class(config, step_token)
    else:
        model_class = classifier_class(config, trust_remote_code)
    if published is not None:
        logger.info("Read as a published reward model: %s.", published.source)
        model_class = published.reader(config, model_class)
        head_seed = None  # a published model's own head, or none
        set_template(tokenizer, config.to_dict(), str(name))
    if on_meta:
        device = "meta"
        hf = without_weights(model_class, config)
    else:
        hf = _with_weights(
            str(name), config, model_class, published, tokenizer, head_seed, **settings
        )
    if published is not None:
        published.settle(hf)
    # Both as the checkpoint has them: `_ready` may add a padding token and its row.
    num_known_tokens = RewardModel(hf).num_embeddings
    pad = config.get_text_config().pad_token_id
    keep_padding = keep_padding and published is None
    model = _ready(hf, tokenizer, attention, device, keep_padding=keep_padding)
    model.num_known_tokens = num_known_tokens
    if on_meta:
        load_whole = partial(
            load_classifier,
            name,
            tokenizer=tokenizer,
            attention="rows",  # it only gives its weights away: no layout is tried on it
            head_seed=head_seed,
            several_heads=several_heads,
            steps=steps,
            step_token=step_token if makes_steps else None,
            labels=labels,
            **settings,
        )
        model.unfilled.append(partial(fill, model, lambda: load_whole().model.hf))
    elif is_classifier and pad not in (None, tokenizer.pad_token_id) and not keep_padding:
        logger.warning(_READ_BEFORE_PADDING, tokenizer.decode([pad]))
    return Loaded(model, tokenizer)


def _with_weights(
    name: str,
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    published: Adapter | None,
    tokenizer: PreTrainedTokenizerBase,
    head_seed: int | None,
    **settings: Any,
) -> PreTrainedModel:
    """The classifier with the weights of a checkpoint; a head that it lacks is drawn from the seed,
    if there is one."""
    is_token = published is not None and published.tokens is not None
    # Other missing weights (the pooler of an encoder) are drawn from the seed, like the head.
    with _head_kept_in_float32(model_class), torch.random.fork_rng(devices=[]):
        torch.manual_seed(head_seed or 0)
        loaded_class: Any = model_class
        if is_token:  # the rows of its output layer become the head
            loaded_class = AutoModelForCausalLM
        hf, new_head = load_weights(loaded_class, name, config=config, **settings)
    if published is not None and is_token:
        hf = published.of_tokens(model_class, config, hf, tokenizer)
    for child_name, child in hf.named_children():
        if child_name != head_name(hf) and any(kept in child_name for kept in HEAD_NAMES):
            # transformers matches parts of names: pre_classifier as well
            child.to(settings["dtype"])
    if new_head and head_seed is None:
        if published is None:
            lost = new_head
            fix = f"train one: treeward train --config FILE policy.model_name={name}"
        else:
            lost = [published.stored_name(config, weight) for weight in new_head]
            fix = None
        architecture = ", ".join(config.architectures or ["an unknown architecture"])
        raise ModelError(
            "this checkpoint has no reward head: its scores would be random",
            where=name,
            got=f"{architecture}, without {', '.join(lost[:3])}",
            fix=fix,
        )
    if new_head:
        initialise_head(hf, seed=head_seed or 0)
    return hf


def build_reward_model(
    model_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
    labels: Sequence[str] = (),
    step_token: str | None = None,
) -> Loaded[RewardModel]:
    """A model with random weights from a bare configuration (`model_type` and its fields). The
    vocabulary size and special tokens are the tokenizer's; `labels` name the heads; `step_token`
    makes a process reward model. Raises `ConfigError` for an unknown model type or field."""

    def make(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        if step_token is None:
            model_class = classifier_class(config, False)
        else:
            config.step_token_id = mark_id(tokenizer, step_token)
            model_class = step_classifier_class(config, step_token)
        hf: PreTrainedModel = model_class._from_config(config, **options)
        return hf

    hf = bare_model(make, model_config, tokenizer, seed=seed, **_named(labels or ("LABEL_0",)))
    initialise_head(hf, seed=seed)
    return Loaded(_ready(hf, tokenizer, attention, device), tokenizer)


def _named(labels: Sequence[str]) -> dict[str, Any]:
    """The fields of a configuration that name its labels."""
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }


def _ready(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    attention: Literal["tree", "rows"],
    device: torch.device | str,
    keep_padding: bool = False,
) -> RewardModel:
    if not keep_padding:
        ensure_pad_token(hf, tokenizer)
    hf.to(device)  # type: ignore[arg-type]
    model = RewardModel(hf, layout=choose_layout(hf, attention))
    if keep_padding and model.layout != "encoder":
        model.padding_token = hf.config.get_text_config().pad_token_id
    return model


def load_policy(
    name: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
    config_overrides: Mapping[str, Any] | None = None,
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    on_meta: bool = False,
) -> Loaded[PolicyModel]:
    """Load a causal language model from a folder or the hub. Raises `ModelError` for a missing or
    unusable checkpoint.

    `config_overrides`: changed fields of its configuration. `load_in_4bit`: linear layers but the
    head as nf4. The others: see `load_classifier`.
    """
    config = read_config(str(name), trust_remote_code)
    if any("SequenceClassification" in text for text in config.architectures or ()):
        raise ModelError(
            "this is a classifier, as reward models are; policy.model_name must be a model that "
            "writes completions",
            where=str(name),
            got=", ".join(config.architectures or ()),
        )
    override_fields(config, config_overrides or {}, "policy.hf_config_overrides")
    tokenizer = tokenizer or load_tokenizer(str(name), trust_remote_code=trust_remote_code)
    settings: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if not on_meta:
        hf, _ = load_weights(AutoModelForCausalLM, str(name), load_in_4bit=load_in_4bit, **settings)
        return _policy(hf, tokenizer, str(name), attention, device)
    hf = without_weights(AutoModelForCausalLM, config, trust_remote_code=trust_remote_code)
    # `from_pretrained` reads it with the weights; an export would else lose the stop tokens.
    with contextlib.suppress(OSError):
        hf.generation_config = GenerationConfig.from_pretrained(os.path.expanduser(name))
    loaded = _policy(hf, tokenizer, str(name), attention, "meta")
    load_whole = partial(load_weights, AutoModelForCausalLM, str(name), **settings)
    loaded.model.unfilled.append(partial(fill, loaded.model, lambda: load_whole()[0]))
    return loaded


def build_policy(
    model_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
) -> Loaded[PolicyModel]:
    """A policy with random weights from a bare configuration, as `build_reward_model`."""
    hf = bare_model(AutoModelForCausalLM.from_config, model_config, tokenizer, seed=seed)
    return _policy(hf, tokenizer, "policy.model_config", attention, device)


def _policy(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    attention: Literal["tree", "rows"],
    device: torch.device | str,
) -> Loaded[PolicyModel]:
    hf.eval()
    hf.to(device)  # type: ignore[arg-type]
    embeddings = hf.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        # A policy is never padded. Its padding token may be its end of turn, whose row would get
        # no gradient.
        embeddings.padding_idx = None
    model = PolicyModel(hf, layout=tree_or_rows(hf, attention))
    if len(tokenizer) > model.num_embeddings:
        raise ModelError(
            "the tokenizer has more tokens than the policy has embeddings",
            where=name,
            got=f"{len(tokenizer)} tokens, {model.num_embeddings} embeddings",
        )
    return Loaded(model, tokenizer)


def initialise_head(hf: PreTrainedModel, *, seed: int) -> None:
    """Draw the head's weights from N(0, 1 / (hidden size + 1)); biases are zero."""
    generator = torch.Generator().manual_seed(seed)
    for module in hf.get_submodule(head_name(hf)).modules():
        if not isinstance(module, nn.Linear):
            continue
        # On the CPU whatever the device: a GPU's generator draws other numbers from the seed.
        weight = torch.randn(module.weight.shape, generator=generator)
        weight *= (module.in_features + 1) ** -0.5
        with torch.no_grad():
            if module.weight.dtype != torch.float32:
                module.float()
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()


def ensure_pad_token(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give model and tokenizer a padding token that no conversation ends with: plain transformers
    reads the score at the last token that is not padding."""
    eos = getattr(hf.config.get_text_config(), "eos_token_id", None)
    if not isinstance(eos, list):  # Llama 3 has three
        eos = [eos]
    ends = {tokenizer.eos_token_id, *eos}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        vocabulary = tokenizer.get_vocab()
        # A spare token of the family saves the vocabulary from growing.
        pad_token = PAD_TOKEN
        for token in ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]"):
            if token in vocabulary and vocabulary[token] not in ends:
                pad_token = token
                break
        tokenizer.add_special_tokens({"pad_token": pad_token})
    num_rows = RewardModel(hf).num_embeddings
    if len(tokenizer) > num_rows:
        # transformers draws the new row; the run's random numbers go on as if it had not.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # A mean resizing would draw the row from the covariance of all others, to be zeroed
            # below.
            hf.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            grown: Any = hf.get_input_embeddings()
            grown.weight[num_rows:] = 0  # it is never scored, but exports should not differ in it
        logger.info(
            "The vocabulary grows from %s to %s: the padding token ends conversations, or there is "
            "none, so the model gets %s, which no conversation ends with.",
            f"{num_rows:,}",
            f"{len(tokenizer):,}",
            tokenizer.pad_token,
        )
    for config in (hf.config, hf.config.get_text_config()):
        config.pad_token_id = tokenizer.pad_token_id
    embeddings = hf.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        # PyTorch gives this row no gradient: the former padding token, often the end of turn where
        # the score is read, would otherwise stay frozen until the run is resumed.
        embeddings.padding_idx = tokenizer.pad_token_id


def classifier_class(config: PreTrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The family's sequence classifier. About half of the causal LMs have none; treeward makes
    theirs."""
    # Where transformers has a class for this very configuration, the authors' code is not needed.
    if trust_remote_code and hasattr(config, "auto_map"):
        mapping: Any = AutoModelForSequenceClassification._model_mapping
        if type(config) not in mapping or config.is_encoder_decoder:
            return AutoModelForSequenceClassification  # type: ignore[return-value]
    return _family_class(config, AutoModelForSequenceClassification)


def step_classifier_class(config: PreTrainedConfig, step_token: str) -> type[PreTrainedModel]:
    """The family's token classifier with a head that reads each step at `step_token`. Its files are
    those of the plain class, by whose name it is saved: plain transformers and TRL read them."""
    plain: Any = _family_class(config, AutoModelForTokenClassification)

    def make(hf: Any, config: PreTrainedConfig) -> None:
        plain.__init__(hf, config)
        if not isinstance(getattr(hf, "score", None), nn.Linear):
            raise ModelError(
                "a process reward model is a decoder: each step is read after those before it",
                got=plain.__name__,
                need="a causal language model",
            )
        hf.score = StepLogits(config, bias=hf.score.bias is not None)
        setattr(config, STEP_TOKEN_KEY, step_token)

    body = {
        "__init__": make,
        "__module__": plain.__module__,
        "step_token": step_token,
        # Nothing of transformers' makes one score of the steps.
        "made_by_treeward": True,
    }
    made: type[PreTrainedModel] = type(plain.__name__, (plain,), body)
    return made


def _set_labels(
    config: PreTrainedConfig, labels: Sequence[str], step_token: str | None, *, keep: bool
) -> None:
    """Give a configuration the labels of its heads: those that are named, two for the steps of a
    process reward model, or one. `keep`: a classifier's own."""
    if labels:
        vars(config).update(_named(labels))
    elif step_token is not None:
        config.num_labels = 2
    elif not keep:
        config.num_labels = 1  # a causal LM names no labels, and would get two


def _chosen_step_token(
    config: PreTrainedConfig,
    published: Adapter | None,
    name: str,
    requested: str | None,
    *,
    allowed: bool,
) -> str | None:
    """The mark at which a checkpoint reads steps, or at which one will that becomes a process
    reward model (`requested`); None where it has one value of a conversation.

    Raises `ModelError` for a process reward model where none is `allowed`, and for a classifier of
    tokens whose config.json names no mark.
    """
    if published is not None:
        if requested is not None:
            raise ModelError(
                "a published reward model has a head of its own, and learns no other labels",
                where=name,
                need="a causal language model, or a process reward model that was trained here",
            )
        token = published.step_token
    elif requested is not None:
        return requested
    elif any("TokenClassification" in text for text in config.architectures or ()):
        token = getattr(config, STEP_TOKEN_KEY, None)
        if not isinstance(token, str) or config.num_labels != 2:
            raise ModelError(
                _WITHOUT_MARK,
                where=f"{name}/config.json",
                field=STEP_TOKEN_KEY,
                got=token or f"no {STEP_TOKEN_KEY}, and {config.num_labels} labels",
                need="a token that stands after each step, and two labels",
                fix=f'for a model of TRL add "{STEP_TOKEN_KEY}", its step_separator, as '
                "docs/reward_models.md says",
            )
    else:
        token = None
    if token is not None and not allowed:
        need = "one value of a conversation"
        fix = None
        if published is None:
            fix = "set policy.reward_model_cfg.reward_model_type=process to train it further"
        raise ModelError(_HAS_STEPS, where=name, need=need, fix=fix)
    return token


_AUTO_CLASSES: dict[Any, tuple[str, Any]] = {
    AutoModelForSequenceClassification: (
        "ForSequenceClassification",
        GenericForSequenceClassification,
    ),
    AutoModelForTokenClassification: ("ForTokenClassification", GenericForTokenClassification),
}
"""Of each kind of classifier the end of its classes' names, and the parent that has the head."""


def _family_class(config: PreTrainedConfig, auto_class: Any) -> type[PreTrainedModel]:
    """The family's class of a kind of classifiers, made where transformers has none."""
    mapping: Any = auto_class._model_mapping
    suffix, generic = _AUTO_CLASSES[auto_class]
    if type(config) in mapping and not config.is_encoder_decoder:
        return mapping[type(config)]  # type: ignore[no-any-return]
    if type(config) not in AutoModel._model_mapping or config.is_encoder_decoder:
        raise ModelError(
            f"transformers has no {suffix.removeprefix('For')} for {type(config).__name__}, and "
            "treeward can make none"
        )
    base_class: Any = AutoModel._model_mapping[type(config)]
    # As transformers makes its own: the head from one parent, the family from the other.
    name = type(config).__name__.removesuffix("Config") + suffix
    family: Any = base_class.__mro__[1]
    body = {
        "__module__": base_class.__module__,
        "config_class": type(config),
        "made_by_treeward": True,
        # Where the causal model has its weights: Mamba's are in `backbone`, and most in `model`, as
        # Llama 4's, whose family names no place.
        "base_model_prefix": family.base_model_prefix or "model",
    }
    made: Any = type(name, (generic, family), body)
    auto_class.register(type(config), made)
    logger.warning(
        "transformers has no such classifier for %s: treeward made %s. Its export loads with "
        "treeward; plain transformers needs the same class.",
        config.model_type,
        name,
    )
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _head_kept_in_float32(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """transformers casts every weight to the requested dtype, except those named by this class
    attribute."""
    before = getattr(model_class, "_keep_in_fp32_modules_strict", None)
    model_class._keep_in_fp32_modules_strict = {*(before or ()), *HEAD_NAMES}
    try:
        yield
    finally:
        model_class._keep_in_fp32_modules_strict = before
