"""The common parts of loading models: names on disk and on the hub, tokenizers, configurations,
weights, and errors.

    tokenizer = load_tokenizer("Qwen/Qwen2.5-0.5B-Instruct")
    config = read_config("results/rm/final", trust_remote_code=False)

A folder of PEFT's adapters (`adapter_config.json`) is a model too: its base with the adapters
merged into the weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_files

from treeward.errors import ConfigError, ModelError, nearest_path
from treeward.model.heads import HEAD_NAMES, head_name, is_of_head
from treeward.model.lora import ADAPTER_CONFIG, is_quantized, merge_adapters, merging_line
from treeward.model.published import find, set_template

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The number formats that a configuration can name."""

_HEAD_FILES = ["value_head.safetensors", "value_head.bin"]
_DAMAGED = (LookupError, TypeError, AttributeError, StrictDataclassError)
"""What transformers raises for JSON of another form than it expects, as a list for a mapping."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' advice and progress bars, which concern treeward's calls, not its
    user's."""
    # Also the hub's retries, whose outcome is reported anyway, and bitsandbytes' remarks on missing
    # kernels.
    others = {}
    for name in ("huggingface_hub", "bitsandbytes"):
        log = logging.getLogger(name)
        others[log] = log.level
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for log in others:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        for log, level in others.items():
            log.setLevel(level)
        if had_bars:
            transformers_logging.enable_progress_bar()


@quiet_transformers()
def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name, padding on the right. Raises `ModelError` if there is
    none."""
    name = os.path.expanduser(name)
    # Adapters may have a tokenizer of their own, with a template or a token that they learnt.
    base = base_of_adapters(name)
    if base is not None and not (Path(name).expanduser() / "tokenizer_config.json").is_file():
        return load_tokenizer(base, trust_remote_code=trust_remote_code)
    _look_for(name, "tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, padding_side="right"
        )
    except (OSError, ValueError, *_DAMAGED) as error:
        raise _loading_error(
            name, "tokenizer", error, fix="name one: policy.tokenizer.name=..."
        ) from error
    with contextlib.suppress(OSError, *_DAMAGED):  # a folder may hold a tokenizer alone
        set_template(tokenizer, PreTrainedConfig.get_config_dict(name)[0], name)
    # How it was loaded, which a saved tokenizer would hold for ever.
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


@quiet_transformers()
def read_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a folder or hub name; for adapters, their base's. Raises
    `ModelError`."""
    name = os.path.expanduser(name)  # transformers takes `~/model` for a name of the hub
    base = base_of_adapters(name)
    if base is not None:
        try:
            return read_config(base, trust_remote_code)
        except ModelError as error:
            raise error.but(where=f"{base}, the base model of the adapters in {name}") from error
    _look_for(name, "model")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
        adapter = find(fields, name)
        config: PreTrainedConfig
        if adapter is not None and adapter.config is not None:
            config = adapter.config(fields)
            config.name_or_path = name
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, *_DAMAGED) as error:
        raise _loading_error(name, "model", error) from error
    return config


def base_of_adapters(name: str) -> str | None:
    """The model that a folder of PEFT's adapters belongs to; None for any other name. Raises
    `ModelError`."""
    file = Path(name).expanduser() / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
        check_local(base)
        if Path(base).expanduser().resolve() == file.parent.resolve():
            raise ValueError(f"{base}: the folder itself")
    except (ModelError, ValueError, *_DAMAGED) as error:
        raise ModelError(
            "the base model of these adapters is not there",
            where=str(file),
            got=str(error).splitlines()[0],
            need="base_model_name_or_path, the folder or hub name of the adapters' model",
        ) from error
    return str(base)


def load_weights(
    model_class: Any,
    name: str,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    load_in_4bit: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """A model of transformers' `model_class`, and the names of head weights that the checkpoint
    lacks.

    `load_in_4bit`: linear layers but the heads as nf4 (QLoRA, Dettmers et al. 2023), which compute
    in `dtype`. Raises `ModelError` for a checkpoint that is missing, damaged or of another shape,
    that lacks other weights or has unused ones, and for weights that are not finite: some attention
    kernels turn NaN into numbers.
    """
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if load_in_4bit:
        if base_of_adapters(name) is not None:
            line = merging_line(Path(name), writes=model_class is AutoModelForCausalLM)
            summary = "adapters cannot be merged into a base that is loaded in 4 bits"
            raise ModelError(summary, where=name, fix=f"merge them first: {line}")
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # Heads, which are trained whole or read in float32, and poolers, which may be new.
            llm_int8_skip_modules=[
                *HEAD_NAMES,
                ".*pooler",
                "pre_classifier",
                "lm_head",
                "embed_out",
            ],
        )
    hf, lacking = _read_weights(model_class, name, config=config, **settings)
    if load_in_4bit:
        # Saving would take a model on the CPU for one that was offloaded there.
        vars(hf).pop("hf_device_map", None)
        for module in filter(is_quantized, hf.modules()):
            # bitsandbytes would pack the weights of a model that only computes, and never train
            # them again.
            vars(module)["support_avx512bf16_for_cpu"] = False
    broken = []
    for key, weight in hf.named_parameters():
        if weight.numel():
            # A twentieth of the time of `isfinite().all()`; NaN is in both ends.
            low, high = weight.detach().aminmax()
            if not (low.isfinite() and high.isfinite()):
                broken.append(key)
    if broken:
        fix = None
        if dtype == torch.float16:
            fix = "load it in bfloat16 or float32: float16 ends at 65504"
        got = f"{len(broken)} tensors, the first of them {broken[0]}"
        raise ModelError("the weights hold NaN or infinity", where=name, got=got, fix=fix)
    new_head = sorted(key for key in lacking if is_of_head(key))
    missing = []
    for key in sorted(lacking):
        # A pretrained encoder may lack the pooling too, which is above the backbone like the head.
        is_of_backbone = key.startswith(f"{hf.base_model_prefix}.") and ".pooler." not in key
        if is_of_backbone or not new_head:
            missing.append(key)
    if missing:
        raise ModelError("weights are missing from the checkpoint", where=name, got=missing[:8])
    return hf, new_head


@quiet_transformers()
def _read_weights(
    model_class: Any, name: str, *, config: PreTrainedConfig, **settings: Any
) -> tuple[PreTrainedModel, set[str]]:
    """A model, and the names of the weights that are random: neither its checkpoint nor its
    adapters have them."""
    name = os.path.expanduser(name)
    base = base_of_adapters(name)
    if base is not None:
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                "the base of these adapters is quantised, which a merge would round them to",
                where=name,
                got=base,
                fix="name the same base in full precision as base_model_name_or_path of "
                f"{ADAPTER_CONFIG}",
            )
        hf, lacking = _read_weights(model_class, base, config=config, **settings)
        if any(is_of_head(key) for key in lacking):
            hf.get_submodule(head_name(hf)).float()  # or the adapters' own would be cast
        lacking -= merge_adapters(hf, Path(name).expanduser())
        check_used(hf, (), name)
        hf.name_or_path = name  # the base of adapters that are trained from here
        return hf, lacking
    try:
        hf, info = model_class.from_pretrained(
            name,
            config=config,
            # Every class has it, and each call sets its own (`WrappedModel.attention`).
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by their names
            **settings,
        )
    # Of any type: of a quantiser, of damaged files, of a config.json whose sizes make no sense.
    except Exception as error:
        raise _loading_error(name, "model", error) from error
    check_used(hf, info["unexpected_keys"], name)
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(
            "the weights do not have the shapes that config.json asks for",
            where=name,
            got=f"{key} of {tuple(stored)} where {tuple(wanted)} is asked for",
            need="the config.json that was saved with the weights; in training, a causal LM or a "
            "model with one label",
        )
    return hf, set(info["missing_keys"])


def check_used(hf: PreTrainedModel, unused: Iterable[str], name: str) -> None:
    """Raise `ModelError` for `unused` tensors of the checkpoint `name`, which may be the head of a
    reward model; those of a language model of this configuration, or of the checkpoint's class in
    transformers, may be. A head file of LLaMA-Factory counts as a tensor."""
    config = hf.config
    unknown = set(unused)
    if hasattr(hf, "num_labels"):  # a language model needs no head
        may_lack: Any = {
            "_raise_exceptions_for_missing_entries": False,
            "_raise_exceptions_for_connection_errors": False,
        }
        files = cached_files(name, _HEAD_FILES, **may_lack) or ()
        unknown.update(Path(file).name for file in files)
    if not unknown:
        return
    # What plain transformers takes the checkpoint for, and the language model of the family, whose
    # output layer a classifier may leave unused.
    classes = []
    for text in config.architectures or ():
        model_class: Any = getattr(transformers, text, None)
        if getattr(model_class, "config_class", None) is type(config):
            classes.append(model_class)
    if type(config) in AutoModelForCausalLM._model_mapping:
        classes.append(AutoModelForCausalLM._model_mapping[type(config)])
    models = [hf]
    with torch.device("meta"):
        models += [_unfilled(model_class, config) for model_class in classes]
    # Buffers that older versions of transformers saved.
    patterns = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    for model in models:
        patterns += model._keys_to_ignore_on_load_unexpected or ()
        for key, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            unknown.discard(key)
    unused_tensors = sorted(key for key in unknown if not re.search("|".join(patterns), key))
    if not unused_tensors:
        return
    fix = "fix config.json, or save the model without them"
    got = ", ".join(unused_tensors[:4])
    like_a_head = re.compile("head|score|reward|value|regress|classif")
    heads = list(filter(like_a_head.search, unused_tensors))
    if heads:
        got = ", ".join(heads[:4]) + ", which look like a head"
        fix = (
            "docs/reward_models.md lists the known heads; to train a new one, save the model "
            "without this"
        )
    raise ModelError(
        "the checkpoint has tensors that this model does not use",
        where=name,
        got=got,
        need=f"those of {type(hf).__name__}",
        fix=fix,
    )


def _unfilled(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the class without weights. The language model of one that also sees (Qwen3.5)
    takes the part of the configuration that is about text."""
    text_config = config.get_text_config()
    own_config = config
    if model_class.config_class is type(text_config):
        own_config = text_config
    made: PreTrainedModel = model_class._from_config(own_config)
    return made


def check_local(name: str) -> None:
    """Raise `ModelError` for a folder that does not exist, instead of looking for it on the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return
    # `owner/name` is a name of the hub, unless there is a folder `owner` here.
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    lies_in_a_folder = path.parent != Path() and path.parent.is_dir()
    if is_path or lies_in_a_folder:
        near = nearest_path(path)
        fix = None
        if near is not None:
            fix = f"did you mean {near}?"
        raise ModelError("there is no such folder", where=name, fix=fix)


def check_fields(config: PreTrainedConfig, fields: Iterable[str], where: str) -> None:
    """Raise `ConfigError` for a field that a model's configuration does not have; transformers
    keeps unknown ones silently."""
    for name in fields:
        if not hasattr(config, name):
            summary = f"{config.model_type} has no such field"
            raise ConfigError.unknown(
                summary, name, config.to_dict(), where=where, field=name, need=None
            )


def _look_for(name: str, what: str) -> None:
    check_local(name)
    if not Path(name).expanduser().exists():
        logger.info("Looking for the %s %s on the hub, or among earlier downloads.", what, name)


def _loading_error(name: str, what: str, error: Exception, fix: str | None = None) -> ModelError:
    """The user's error for an error of `from_pretrained`, which names the file that is damaged, if
    one is."""
    # transformers' own errors do not name a file that was cut off.
    for file in sorted(Path(name).expanduser().glob("*.json")):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError) as damage:
            return ModelError(
                f"the {what} cannot be loaded: this file is damaged",
                where=str(file),
                got=str(damage).splitlines()[0],
                need="JSON",
                fix="copy the file again from where the model came from",
            )
    reason: BaseException = error
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        reason = error.__cause__  # which names the field and its value
    lines = str(reason).strip().splitlines()
    summary = f"the {what} cannot be loaded"
    # The folder of a run, or of a checkpoint.
    parts = ("model", "final")
    inside = next((part for part in parts if (Path(name) / part / "config.json").is_file()), None)
    if inside is not None:
        summary = "the model is inside this folder"
        fix = f"use {name}/{inside}"
    elif not Path(name).expanduser().exists():
        fix = (
            "check the name and the network (and HF_HUB_OFFLINE, HTTPS_PROXY), or give the folder "
            "of a copy"
        )
    got = type(error).__name__
    if lines:
        got = lines[0]
    return ModelError(
        summary,
        where=name,
        got=got,
        need=f"a folder or hub name with the files of a {what}, in safetensors",
        fix=fix,
    )


def bare_model(
    make: Callable[..., PreTrainedModel],
    model_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    **settings: Any,
) -> PreTrainedModel:
    """A model with random float32 weights, by `make` from a bare configuration; the seed alone
    determines them. The vocabulary size and special tokens are the tokenizer's; `settings` are
    further fields. Raises `ConfigError`."""
    fields = dict(model_config)
    settings["vocab_size"] = len(tokenizer)
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        settings[field] = getattr(tokenizer, field)
    for name in fields.keys() & settings.keys():
        raise ConfigError(
            "this field follows from the tokenizer",
            where="policy.model_config",
            field=name,
            fix="remove it",
        )
    config = bare_config(fields, **settings)
    with _config_errors("policy.model_config"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            # sizes that do not fit each other fail only here
            model.base_model(torch.zeros(1, 1, dtype=torch.long))
    return model


def bare_config(fields: Mapping[str, Any], **settings: Any) -> PreTrainedConfig:
    """The configuration of `bare_model`; `settings` are further fields. Raises `ConfigError`."""
    model_type = str(fields.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        place: Any = {
            "where": "policy.model_config",
            "field": "model_type",
            "need": "a model type of transformers",
        }
        raise ConfigError.unknown(
            "there is no such model type", model_type, CONFIG_MAPPING.keys(), **place
        )
    check_fields(AutoConfig.for_model(model_type), fields, "policy.model_config")
    with _config_errors("policy.model_config"):
        config: PreTrainedConfig = AutoConfig.for_model(**fields, **settings)
    return config


def override_fields(config: PreTrainedConfig, fields: Mapping[str, Any], where: str) -> None:
    """Set fields of a configuration. Raises `ConfigError` for an unknown field or an invalid
    value."""
    check_fields(config, fields, where)
    with _config_errors(where):
        for field, value in fields.items():
            setattr(config, field, value)


@contextlib.contextmanager
def _config_errors(where: str) -> Iterator[None]:
    """Raise `ConfigError` for any error of transformers about the user's fields, as a
    ZeroDivisionError."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            "no model can be built from these fields",
            where=where,
            got=f"{type(error).__name__}: {error.__cause__ or error}",
            need="sizes that fit: heads divide the hidden size, heads of keys the heads, and none "
            "is below 1",
        ) from error


def choose_device(device: torch.device | str | None) -> torch.device:
    """The device of a name; None and `auto` mean a GPU if there is one, else the CPU."""
    if device is None or device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            device = "cuda"
    return torch.device(device)


def has_room(device: torch.device, num_bytes: float) -> bool:
    """Whether a GPU has so much free memory; True for a CPU."""
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()  # memory that torch holds for later is not free to the device
    return torch.cuda.mem_get_info(device)[0] > num_bytes


def check_device(device: str | None, *, where: str, field: str | None = None) -> None:
    """Raise `ConfigError` for a missing device."""
    try:
        torch.empty(0, device=choose_device(device))
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigError(
            "the device cannot be used",
            where=where,
            field=field,
            got=f"{device}: {str(error).splitlines()[0]}",
            need="cpu, or a GPU that torch sees, as cuda or cuda:1",
            fix="`auto` takes a GPU where there is one, else the CPU",
        ) from error
