"""Preparation of a model for training, in either kind of run: tokenizer, precision, adapters, shards, kernels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.policy import TrainedModelConfig
from treeward.data.tokenizers import train_tokenizer
from treeward.digests import SEAL_FILE
from treeward.errors import ConfigError
from treeward.model.contract import CONTRACT_FILE
from treeward.model.liger import use_liger_kernel
from treeward.model.loading import Loaded
from treeward.model.lora import add_adapters, has_adapters, load_adapters, save_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES, base_of_adapters, load_tokenizer, quiet_transformers
from treeward.model.reward_model import RewardModel
from treeward.parallel.mesh import Mesh
from treeward.parallel.sharding import shard
from treeward.parallel.tensor import cut
from treeward.training.checkpoints import Checkpoint
from treeward.training.state import check_files

logger = logging.getLogger(__name__)

_ADAPTER_FOLDER = "adapter"
_Model = TypeVar("_Model", RewardModel, PolicyModel)


def find_tokenizer(
    policy: TrainedModelConfig, texts: Iterable[str], checkpoint: Checkpoint | None
) -> PreTrainedTokenizerBase:
    """The named tokenizer, or the model's; for a bare architecture a new one, trained on `texts`."""
    if policy.trained_vocab_size is None:
        name = policy.tokenizer.name or policy.model_name
        assert name is not None  # the schema requires it
        return load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint.path / "model"))
    return processes.on_main(partial(train_tokenizer, texts, vocab_size=policy.trained_vocab_size))


def load_model(
    policy: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    mesh: Mesh,
    *,
    build: Callable[..., Loaded[_Model]],
    load: Callable[..., Loaded[_Model]],
) -> _Model:
    """The model of a checkpoint, or the one that the configuration names (`load`) or describes (`build`). On several
    processes it is without weights until it is sharded, if nothing needs them before. Raises `CheckpointError` if it is
    in a checkpoint of another run that is damaged."""
    is_sharded = mesh.devices is not None
    is_whole_here = not is_sharded or policy.load_in_4bit
    common: dict[str, Any] = {
        "attention": policy.attention,
        "device": torch.device("cuda" if is_whole_here and torch.cuda.is_available() else "cpu"),
    }
    has_adapters = policy.dtensor_cfg.lora_cfg.enabled
    # adapters are merged there
    saved = None if checkpoint is None or has_adapters else checkpoint.path / "model"
    if saved is None and policy.architecture is not None:
        fields = {key: value for key, value in policy.architecture.items() if key != "vocab_size"}
        return build(fields, tokenizer, **common).model
    if saved is None:
        _check_origin(Path(str(policy.model_name)).expanduser())  # the schema requires one
    return load(
        saved or str(policy.model_name),
        tokenizer=tokenizer,
        dtype=DTYPES["float32" if is_sharded and policy.trains_backbone else policy.precision],
        trust_remote_code=policy.trust_remote_code,
        load_in_4bit=policy.load_in_4bit,
        on_meta=not is_whole_here,
        **common,
    ).model


def _check_origin(folder: Path) -> None:
    """Check the files of a model folder that lies in a checkpoint of another run."""
    if (folder.parent / SEAL_FILE).is_file():
        check_files(folder.parent, within=f"{folder.name}/")


def make_ready(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    mesh: Mesh,
    *,
    role: str,
    adaptation: Callable[[], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Give a loaded model its precision, adapters, shards, kernels and weights, and check it. `role`: its name in the
    log. `adaptation`: adds the adapters, if any; None for a frozen model."""
    dtype, section, is_sharded = (
        DTYPES[policy.precision],
        policy.dtensor_cfg,
        mesh.devices is not None,
    )
    # whose shards are float32
    if not (is_sharded and adaptation is not None and policy.trains_backbone):
        model.cast(dtype)
    if adaptation is not None:
        adaptation()
    if is_sharded:
        cut(model, mesh)
        shard(model, mesh, dtype=dtype, cpu_offload=section.cpu_offload)
    if policy.use_liger_kernel:
        use_liger_kernel(model)
    if section.activation_checkpointing:
        model.recompute_activations()
    can_compile = model.layout == "tree" and model.device.type == "cuda"
    if policy.torch_compile and not can_compile:
        got, need = f"{model.layout} on {model.device}", "a model that runs on trees, on a GPU"
        raise ConfigError(
            "layers are not compiled here",
            where="policy.torch_compile",
            got=got,
            need=need,
            fix="leave it out",
        )
    if can_compile and policy.torch_compile is not False:
        model.compile_layers()
    count = model.hf.num_parameters()  # which knows of four bits
    where = f"{processes.device()}, {mesh}" if is_sharded else processes.device()
    logger.info("The %s: %s, %s parameters, as %s, on %s.", role, type(model.hf).__name__, f"{count:,}", model.layout,
                where)  # fmt: skip
    if is_sharded:
        model.fill("cpu" if section.cpu_offload else processes.device())
    check()


def steps_on_host(policy: TrainedModelConfig, mesh: Mesh) -> bool:
    """Whether the optimiser has copies in the host's memory; with several processes the shards themselves are there."""
    return policy.dtensor_cfg.cpu_offload and mesh.devices is None


@quiet_transformers()
def adapt(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    *,
    seed: int,
    checkpoint: Checkpoint | None,
) -> None:
    """Add the configured adapters, with the checkpoint's weights, if any; or freeze all weights but the head's."""
    if (lora := policy.dtensor_cfg.lora_cfg).enabled:
        add_adapters(model, lora, seed=seed)
        if checkpoint is not None:
            load_adapters(model, checkpoint.path / _ADAPTER_FOLDER)
    elif not policy.trains_backbone:
        for weight in model.weights():
            weight.requires_grad_(False)


def save_adapted(model: RewardModel | PolicyModel, folder: Path) -> None:
    """Write the adapters of a model into a checkpoint, beside `model`, in which they are merged."""
    if has_adapters(model):
        save_adapters(model, folder / _ADAPTER_FOLDER)


def identity_of_adapters(policy: TrainedModelConfig) -> dict[str, Any]:
    """The adapters' part of a run's identity; without QLoRA as before that existed."""
    lora = {"dtensor_cfg.lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json")}
    return lora | ({"load_in_4bit": True} if policy.load_in_4bit else {})


def short_hash(text: str) -> str:
    """Sixteen hexadecimal digits of the text's BLAKE2b hash."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_weights(name: str | None) -> str | None:
    """The hash of a model's weights and of its adapters' base; the name of a model without a folder of safetensors."""
    folder = Path(name or "").expanduser()
    weights = sorted(folder.glob("*.safetensors")) if name else []
    if not weights:
        return name
    base = base_of_adapters(str(folder))
    digest = hashlib.blake2b(b"" if base is None else str(with_weights(base)).encode())
    for path in (*weights, folder / "config.json", folder / CONTRACT_FILE):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return f"weights {short_hash(digest.hexdigest())}"
