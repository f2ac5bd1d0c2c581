"""Preparation of a model for training, in either kind of run: tokenizer, precision, adapters,
shards, kernels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.policy import TrainedModelConfig
from treeward.config.reward_environments import JUDGE_FILE
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
    policy: TrainedModelConfig,
    texts: Iterable[str],
    checkpoint: Checkpoint | None,
    *,
    more_special: Sequence[str] = (),
) -> PreTrainedTokenizerBase:
    """The named tokenizer, or the model's; for a bare architecture a new one, trained on `texts`,
    with the tokens `more_special`."""
    if policy.trained_vocab_size is None:
        name = policy.tokenizer.name or policy.model_name
        assert name is not None  # the schema requires it
        return load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if checkpoint is not None:
        # The one that the run has trained: texts that have changed since would give another.
        return load_tokenizer(str(checkpoint.path / "model"))
    train = partial(
        train_tokenizer, texts, vocab_size=policy.trained_vocab_size, more_special=more_special
    )
    return processes.on_main(train)


def load_model(
    policy: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    mesh: Mesh,
    *,
    build: Callable[..., Loaded[_Model]],
    load: Callable[..., Loaded[_Model]],
) -> _Model:
    """The model of a checkpoint, or the one that the configuration names (`load`) or describes
    (`build`). On several processes it is without weights until it is sharded, if nothing needs them
    before. Raises `CheckpointError` if it is in a checkpoint of another run that is damaged."""
    is_sharded = mesh.devices is not None
    is_whole_here = not is_sharded or policy.load_in_4bit  # four-bit weights are never sharded
    device = torch.device("cpu")
    if is_whole_here and torch.cuda.is_available():
        device = torch.device("cuda")
    resumes = checkpoint is not None
    if policy.dtensor_cfg.lora_cfg.enabled:
        # In the checkpoint's model adapters are merged: the run begins at their base again.
        resumes = False
    if policy.architecture is not None and not resumes:
        fields = dict(policy.architecture)
        fields.pop("vocab_size", None)  # the tokenizer's
        return build(fields, tokenizer, attention=policy.attention, device=device).model
    if checkpoint is not None and resumes:
        folder = checkpoint.path / "model"
    else:
        folder = Path(str(policy.model_name)).expanduser()  # the schema requires a name
        if (folder.parent / SEAL_FILE).is_file():
            # It lies in a checkpoint of another run, which may be damaged.
            check_files(folder.parent, within=f"{folder.name}/")
    precision = policy.precision
    if is_sharded and policy.trains_backbone:
        # The shards are the float32 weights that are trained.
        precision = "float32"
    source: Path | str = str(policy.model_name)
    if resumes:
        source = folder
    return load(
        source,
        tokenizer=tokenizer,
        dtype=DTYPES[precision],
        trust_remote_code=policy.trust_remote_code,
        load_in_4bit=policy.load_in_4bit,
        on_meta=not is_whole_here,
        attention=policy.attention,
        device=device,
    ).model


def make_ready(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    mesh: Mesh,
    *,
    role: str,
    adaptation: Callable[[], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Give a loaded model its precision, adapters, shards, kernels and weights, and check it.
    `role`: its name in the log. `adaptation`: adds the adapters, if any; None for a frozen
    model."""
    dtype = DTYPES[policy.precision]
    section = policy.dtensor_cfg
    is_sharded = mesh.devices is not None
    is_trained = adaptation is not None and policy.trains_backbone
    # Shards that are trained are float32, and are cast when they are gathered.
    if not is_sharded or not is_trained:
        model.cast(dtype)
    # Before the shards: FSDP has to see the adapters, and which weights are frozen.
    if adaptation is not None:
        adaptation()
    if is_sharded:
        # Layers are cut by heads first; FSDP then shards each part.
        cut(model, mesh)
        shard(model, mesh, dtype=dtype, cpu_offload=section.cpu_offload)
    if policy.use_liger_kernel:
        use_liger_kernel(model)
    if section.activation_checkpointing:
        model.recompute_activations()
    if policy.torch_compile and not model.can_compile:
        raise ConfigError(
            "layers are not compiled here",
            where="policy.torch_compile",
            got=f"{type(model.hf).__name__}, as {model.layout} on {model.device}",
            need="a model that runs on trees, on a GPU, with heads of 16 numbers or more",
            fix="leave it out",
        )
    if model.can_compile and policy.torch_compile is not False:
        model.compile_layers()
    where = str(processes.device())
    if is_sharded:
        where += f", {mesh}"
    logger.info(
        "The %s: %s, %s parameters, as %s, on %s.",
        role,
        type(model.hf).__name__,
        f"{model.hf.num_parameters():,}",  # transformers counts weights of four bits right
        model.layout,
        where,
    )
    if is_sharded:
        # Last, because the main process sends each its shards.
        place: torch.device | str = processes.device()
        if section.cpu_offload:
            place = "cpu"
        model.fill(place)
    check()


def steps_on_host(policy: TrainedModelConfig, mesh: Mesh) -> bool:
    """Whether the optimiser has copies in the host's memory; with several processes the shards
    themselves are there."""
    return policy.dtensor_cfg.cpu_offload and mesh.devices is None


@quiet_transformers()
def adapt(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    *,
    seed: int,
    checkpoint: Checkpoint | None,
) -> None:
    """Add the configured adapters, with the checkpoint's weights, if any; or freeze all weights but
    the head's."""
    lora = policy.dtensor_cfg.lora_cfg
    if lora.enabled:
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
    identity: dict[str, Any] = {
        "dtensor_cfg.lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json")
    }
    if policy.load_in_4bit:
        identity["load_in_4bit"] = True
    return identity


def short_hash(text: str) -> str:
    """Sixteen hexadecimal digits of the text's BLAKE2b hash."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_weights(name: str | None) -> str | None:
    """The hash of a model's weights and of its adapters' base; the name of a model without a folder
    of safetensors."""
    if not name:
        return name
    folder = Path(name).expanduser()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return name
    # The settings and the contracts too: the same weights with another template, another rotary
    # base, or another prompt of a judge, are another model.
    digest = hashlib.blake2b()
    base = base_of_adapters(str(folder))
    if base is not None:
        digest.update(str(with_weights(base)).encode())
    settings = [folder / name for name in ("config.json", CONTRACT_FILE, JUDGE_FILE)]
    for path in (*weights, *settings):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return f"weights {short_hash(digest.hexdigest())}"
