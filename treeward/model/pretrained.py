"""Loading of any model: names on disk and on the hub, tokenizers, configurations, and their errors.

    tokenizer = load_tokenizer("Qwen/Qwen2.5-0.5B-Instruct")
    config = read_config("results/rm/final", trust_remote_code=False)
    config = bare_config({"model_type": "qwen3", "hidden_size": 128, ...}, tokenizer)

Every failure is a `ModelError` or `ConfigError` that says whether the name, the network, the files or the fields are
wrong.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from treeward.errors import ConfigError, ModelError

__all__ = [
    "DTYPES",
    "bare_config",
    "check_local",
    "check_weights",
    "load_tokenizer",
    "load_weights",
    "no_model_of_fields",
    "quiet_transformers",
    "read_config",
]

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The number formats that a configuration can name."""

# The hub's client raises those of its own HTTP library, which differs by version; so by name.
_NETWORK_ERRORS = frozenset({"ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "ProxyError"})


def quiet_transformers() -> None:
    """No advice and no progress bars from transformers: they are about calls that treeward makes, not its user."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what came of them is reported


def load_weights(
    model_class: Any, name: str, *, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """A model of transformers' `model_class`, and the names of those weights that its checkpoint lacks, sorted.

    Raises `ModelError` for a checkpoint that is missing, damaged or of another shape.
    """
    try:
        hf, info = model_class.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _loading_error(name, error) from error
    return hf, sorted(info["missing_keys"])


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name, padding on the right. Raises `ModelError` where there is none."""
    check_local(name)
    _log_hub(name, "tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, padding_side="right"
        )
    except (OSError, ValueError) as error:
        raise _hub_error(name, "tokenizer", error) or ModelError(
            "no tokenizer can be loaded",
            where=name,
            got=_first_line(error),
            need="a folder or hub name with tokenizer files",
            fix="name one: policy.tokenizer.name=...",
        ) from error
    for key in ("is_local", "local_files_only"):  # where it was loaded from; a saved tokenizer would hold it
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def check_local(name: str) -> None:
    """Raise `ModelError` for a folder that does not exist, instead of looking for it on the hub."""
    path = Path(name).expanduser()
    is_local = (
        name.startswith(("/", ".", "~")) or name.count("/") > 1 or (path.parent != Path() and path.parent.is_dir())
    )
    if path.exists() or not is_local:
        return
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    raise ModelError(
        "there is no such folder",
        where=name,
        need="a folder that holds a model, or a hub name",
        fix=f"did you mean {path.parent / near[0]}?" if near else None,
    )


def read_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a folder or hub name. Raises `ModelError`."""
    check_local(name)
    _log_hub(name, "model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise _loading_error(name, error) from error
    return config


def _log_hub(name: str, what: str) -> None:
    if not Path(name).expanduser().exists():
        logger.info("Looking for the %s %s on the hub, or among earlier downloads.", what, name)


def _hub_error(name: str, what: str, error: BaseException) -> ModelError | None:
    """The error for a hub that does not answer, if that is the cause of `error`."""
    if Path(name).expanduser().exists():
        return None
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    network = (OfflineModeIsEnabled, ConnectionError, TimeoutError)
    causes = [one for one in chain if isinstance(one, network) or type(one).__name__ in _NETWORK_ERRORS]
    causes = causes or [one for one in chain if isinstance(one, LocalEntryNotFoundError)]
    if not causes:
        return None
    return ModelError(
        f"the hub does not answer, and the {what} was not downloaded before",
        where=name,
        got=f"{type(causes[-1]).__name__}: {_first_line(causes[-1])}",
        need="a folder of this machine, or a hub name and a network",
        fix="check the network (and HF_HUB_OFFLINE, HTTPS_PROXY), or give the folder of a copy",
    )


def _loading_error(name: str, error: Exception) -> ModelError:
    """The user's error for an error of `from_pretrained`."""
    text = str(error)
    if (no_hub := _hub_error(name, "model", error)) is not None:
        return no_hub
    if "size mismatch" in text or "ignore_mismatched_sizes" in text:
        return ModelError(
            "the weights do not have the shapes that config.json asks for",
            where=name,
            got=text.strip(),
            need="the config.json that was saved with the weights; in training, a causal LM or a model with one label",
        )
    for inside, what in (("model", "a checkpoint"), ("final", "a run's")):
        if (Path(name) / inside / "config.json").is_file():
            return ModelError(f"this folder is {what}; the model is inside it", where=name, fix=f"use {name}/{inside}")
    return ModelError(
        "the model cannot be loaded",
        where=name,
        got=_first_line(error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error),
        need="a folder or hub name with config.json and safetensors weights",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@torch.no_grad()
def check_weights(hf: PreTrainedModel, name: str) -> None:
    """Raise `ModelError` for weights that are not finite: some attention kernels swallow NaN and give numbers."""
    broken = [key for key, weight in hf.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise ModelError(
            "the weights hold NaN or infinity",
            where=name,
            got=f"{len(broken)} tensors, the first of them {broken[0]}",
            need="finite numbers",
            fix="restore the weights; of a run that has diverged, take an earlier checkpoint",
        )


def bare_config(
    model_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> PreTrainedConfig:
    """The configuration of a model with random weights: `model_type`, its fields, and `settings` of the caller.

    The vocabulary size and special tokens are the tokenizer's. Raises `ConfigError` for an unknown model type or field.
    """
    ours = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **settings,
    }
    _check_fields(model_config, ours)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**{**model_config, **ours})
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise no_model_of_fields(error) from error
    return config


def no_model_of_fields(error: Exception) -> ConfigError:
    """The error for fields that make no model."""
    return ConfigError(
        "no model can be built from this configuration",
        where="policy.model_config",
        got=str(error.__cause__ or error),
        need="model_type (llama, qwen3, ...) and that type's own fields",
    )


def _check_fields(model_config: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """transformers silently keeps unknown fields: a misspelt size would be the default one."""
    where = "policy.model_config"
    model_type = model_config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
        raise ConfigError(
            "there is no such model type" if model_type else "the model type is missing",
            where=where,
            field="model_type",
            got=model_type,
            need="a model type of transformers (llama, qwen3, ...)",
            fix=f"did you mean {near[0]}?" if near else None,
        )
    known = AutoConfig.for_model(str(model_type))
    for name in model_config.keys() - {"model_type"}:
        if name in ours:
            raise ConfigError("this field follows from the tokenizer", where=where, field=name, fix="remove it")
        if not hasattr(known, name):
            near = difflib.get_close_matches(name, list(known.to_dict()), n=1)
            raise ConfigError(
                f"{model_type} has no such field",
                where=where,
                field=name,
                got=model_config[name],
                fix=f"did you mean {near[0]}?" if near else "remove it",
            )
