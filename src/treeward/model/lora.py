"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): the model is frozen, small matrices
train.

    add_adapters(model, config.policy.dtensor_cfg.lora_cfg, seed=42)    # a policy or a reward model
    reference = AdapterReference(policy)        # the frozen model itself: no second copy of it
    save_adapters(model, folder)        # peft's format: PeftModel.from_pretrained(base, folder)
    merge_adapters(hf, folder)          # anybody's adapters, into the weights of any model

An adapted layer computes W x + b + (alpha / dim) B A x, eq. 3, with B zero at first, and A and B in
float32; W may have four bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314). A reward model's head
is trained whole.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treeward import processes
from treeward.config.policy import LoraConfig
from treeward.errors import CheckpointError, ConfigError, ModelError, pip_install
from treeward.model.policy_model import CompletionLogProbs, PolicyModel
from treeward.model.shards import put, whole
from treeward.model.wrapped import WrappedModel
from treeward.tree.mixers import read_by_kernels

logger = logging.getLogger(__name__)

_NAME = "default"  # peft's own name for the only adapter
_WHERE = "policy.dtensor_cfg.lora_cfg"
ADAPTER_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model: WrappedModel, config: LoraConfig, *, seed: int) -> None:
    """Freeze a model and put adapters beside its linear layers; the same `seed` draws the same
    ones. A reward model's modules above the backbone train whole. Raises `ConfigError` for names
    that match nothing, and for layers whose adapters could not be saved or merged; `ModelError` if
    peft is missing or refuses the model."""
    assert not has_adapters(model), "a model has one adapter"
    try:
        import peft
    except ModuleNotFoundError as error:
        fix = f"{pip_install('lora')}, or set policy.dtensor_cfg.lora_cfg.enabled=false"
        raise ModelError(
            "the package peft is not installed", where=_WHERE, got=str(error), fix=fix
        ) from error
    layers = _chosen_layers(model, config)
    alpha: Any = config.alpha
    if config.alpha.is_integer():
        alpha = int(config.alpha)  # peft declares a whole number; adapter_config.json has it
    task_type = "SEQ_CLS"
    if isinstance(model, PolicyModel):
        task_type = "CAUSAL_LM"
    settings = peft.LoraConfig(
        r=config.dim,
        lora_alpha=alpha,
        target_modules=list(layers),
        lora_dropout=0.0,
        # GPT-2's layers have (inputs, outputs), where `nn.Linear` has (outputs, inputs).
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type=task_type,
        base_model_name_or_path=model.hf.name_or_path or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):  # peft draws too, before we do
            peft.inject_adapter_in_model(settings, model.hf, _NAME)
    except ValueError as error:
        fix = "leave such layers out by exclude_modules, or name others by target_modules"
        raise ModelError(
            "peft cannot adapt this model", where=_WHERE, got=str(error), fix=fix
        ) from error
    # Not before: peft would wrap these modules, and keep a copy of each.
    _settings(model).modules_to_save = _trained_whole(model) or None
    for weight in _whole_weights(model).values():
        weight.requires_grad_(True)
    for layer in adapted_layers(model).values():
        for part in (layer.lora_A, layer.lora_B):
            part.to(torch.float32)  # peft gives them the dtype of the layer
    if model.unfilled:
        model.unfilled.append(partial(_draw, model, seed))
    else:
        _draw(model, seed)
    count = sum(weight.numel() for weight in _matrices(model).values())
    names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    logger.info(
        "%s parameters in adapters of rank %d beside %d layers: %s.",
        f"{count:,}",
        config.dim,
        len(layers),
        names,
    )


def has_adapters(model: WrappedModel) -> bool:
    """Whether `add_adapters` was called."""
    return _NAME in getattr(model.hf, "peft_config", {})


@contextlib.contextmanager
def without_adapters(model: WrappedModel) -> Iterator[None]:
    """A context in which the frozen model computes alone. Contexts must not be nested."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class AdapterReference:
    """The policy with its adapters off, as a `treeward.rl.update.Reference`."""

    def __init__(self, policy: PolicyModel) -> None:
        assert has_adapters(policy), "without adapters this would be the policy itself"
        self.policy = policy

    @torch.no_grad()
    def log_probs(self, *groups: Any, **settings: Any) -> CompletionLogProbs:
        """`PolicyModel.log_probs` of the frozen model, without gradients."""
        with without_adapters(self.policy):
            return self.policy.log_probs(*groups, **settings)


def adapter_state(model: WrappedModel) -> dict[str, Tensor]:
    """The trained tensors, float32: adapters and a reward model's head, by peft's names, as
    `base_model.model....q_proj.lora_A.weight`."""
    whole = {f"base_model.model.{name}": weight for name, weight in _whole_weights(model).items()}
    return {**_matrices(model), **whole}


def _matrices(model: WrappedModel) -> dict[str, Tensor]:
    matrices = {}
    for name, layer in adapted_layers(model).items():
        for part in ("lora_A", "lora_B"):
            matrices[f"base_model.model.{name}.{part}.weight"] = getattr(layer, part)[_NAME].weight
    return matrices


def save_adapters(model: WrappedModel, folder: Path) -> None:
    """Write the trained tensors as peft does; the caller makes it atomic. Every process of a run
    calls it."""
    # Gathered by all processes; the main one writes.
    state = {
        name: whole(weight.detach()).cpu().contiguous()
        for name, weight in adapter_state(model).items()
    }

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
        _settings(model).save_pretrained(folder)

    processes.on_main(write)


@torch.no_grad()
def load_adapters(model: WrappedModel, folder: Path) -> None:
    """Load saved adapters into a model with adapters of the same layers, rank and alpha, which are
    part of a run's identity. Raises `CheckpointError` for an unreadable file."""
    try:
        saved = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the adapters cannot be read", where=str(folder), got=str(error)
        ) from error
    missing = adapter_state(model).keys() - saved.keys()
    if missing:
        raise CheckpointError(
            "the adapters lack layers of the model", where=str(folder), got=f"no {min(missing)}"
        )

    def read() -> None:
        for name, weight in adapter_state(model).items():  # anew: they may have been sharded since
            put(weight, saved[name])

    if model.unfilled:
        model.unfilled.append(read)
    else:
        read()


def plain_weights(
    model: WrappedModel,
) -> Iterator[tuple[str, Tensor, Callable[[torch.dtype | None], Tensor]]]:
    """Each weight and buffer by its name in the plain model, and a function that makes it plain, in
    a dtype: merged and dequantized."""
    layers = adapted_layers(model)
    adapters = {id(weight) for weight in _matrices(model).values()}
    quantized = {name: module for name, module in model.hf.named_modules() if is_quantized(module)}
    for name, weight in model.hf.state_dict(keep_vars=True).items():
        if id(weight) in adapters:
            continue
        # `q_proj.weight.absmax` and the like: bitsandbytes' codes and scales of `q_proj.weight`.
        if name.rpartition(".weight.")[0] in quantized:
            continue
        # peft's layer wraps the plain one: `q_proj.base_layer.weight` was `q_proj.weight`.
        owner, _, part = name.rpartition(".base_layer.")
        layer = layers.get(owner)
        plain_name = name
        if layer is not None:
            plain_name = f"{owner}.{part}"
        # Adapters change the weight; a bias stays as it is.
        merged = None
        if part == "weight":
            merged = layer
        plain = partial(_plain, weight, merged, quantized.get(name.removesuffix(".weight")))
        yield plain_name, weight, plain


def _plain(weight: Tensor, layer: Any, four_bit_layer: Any, dtype: torch.dtype | None) -> Tensor:
    plain = weight.detach()
    if four_bit_layer is not None:  # (outputs, inputs), in the dtype of its loading
        from bitsandbytes.functional import dequantize_4bit

        plain = dequantize_4bit(four_bit_layer.weight.data, four_bit_layer.weight.quant_state)
    plain_dtype = plain.dtype
    if layer is not None:
        delta = layer.get_delta_weight(_NAME)
        if not isinstance(plain, DTensor):
            delta = whole(delta)  # four bits are whole on each process, and adapters are sharded
        plain = plain + delta
    if four_bit_layer is not None and issubclass(four_bit_layer.source_cls, Conv1D):
        plain = plain.T.contiguous()  # bitsandbytes has turned it
    if not plain.is_floating_point():  # a buffer of places, for instance
        return plain
    return plain.to(dtype or plain_dtype)


def is_quantized(module: nn.Module) -> bool:
    """Whether it is a four-bit linear layer of bitsandbytes."""
    return hasattr(dict(module.named_parameters(recurse=False)).get("weight"), "quant_state")


def merge_adapters(hf: PreTrainedModel, folder: Path) -> set[str]:
    """Merge a folder of PEFT's adapters into the weights of their base model, in the weights'
    number format; returns the names of weights that were trained whole (`modules_to_save`), as a
    reward model's head. Raises `ModelError` if peft is missing, and for adapters that cannot be
    merged or are of another model."""
    writes = isinstance(hf, GenerationMixin)
    fix = f"merge them yourself, and use that folder: {merging_line(folder, writes=writes)}"
    try:
        import peft
    except ModuleNotFoundError as error:
        fix = f"{pip_install('lora')}, or where peft is installed {fix}"
        raise ModelError(
            "adapters need the package peft", where=str(folder), got=str(error), fix=fix
        ) from error
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            saved = set(file.keys())
        config = peft.PeftConfig.from_pretrained(str(folder))
        if config.task_type == "SEQ_CLS" and writes:
            raise ModelError(
                "these are adapters of a classifier, as reward models are: it cannot write "
                "completions",
                where=str(folder),
            )
        plain_names = {name.removeprefix("base_model.model.") for name in saved}
        whole = plain_names & hf.state_dict().keys()
        above = {name.split(".")[0] for name in whole} - {hf.base_model_prefix}
        config.task_type = None  # its wrapper would want more of the model than a merge does
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *above}) or None
        with warnings.catch_warnings():
            # peft warns of tensors that do not fit, which are errors below.
            warnings.simplefilter("ignore")
            # By itself peft would read them onto a GPU where there is one.
            adapted = peft.PeftModel.from_pretrained(
                hf, str(folder), config=config, torch_device=str(hf.device)
            )
        # By default it asks the hub for the base's config.json, to compare the vocabularies.
        loaded = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        on_one_side = sorted(saved ^ loaded)
        if on_one_side:
            raise ValueError(
                f"{len(on_one_side)} tensors are in the file or in the model, but not in both, as "
                f"{on_one_side[0]}"
            )
        # Merged into one of two tied weights, an adapter would change the other one too.
        inputs = hf.get_input_embeddings()
        outputs = hf.get_output_embeddings()
        is_tied = writes and inputs.weight is outputs.weight
        lora_layer = peft.tuners.lora.LoraLayer
        if is_tied and (isinstance(inputs, lora_layer) or isinstance(outputs, lora_layer)):
            raise ValueError(
                "they change the embeddings or the outputs, which are one tensor in the base"
            )
        adapted.merge_and_unload()
    except ModelError:
        raise
    except (
        OSError,
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        # PyTorch's error of shapes says at its end which tensor it is.
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ModelError(
            "the adapters cannot be merged",
            where=str(folder),
            got=last_line.strip(),
            need="adapters of this base, in safetensors",
            fix=fix,
        ) from error
    hf.requires_grad_(True)  # peft freezes
    return whole


def merging_line(folder: Path, *, writes: bool = False) -> str:
    """The line of Python that writes adapters and their base as one model; `writes`: one that
    writes completions."""
    load = f'peft.AutoPeftModelForSequenceClassification.from_pretrained("{folder}", num_labels=1)'
    if writes:
        load = f'peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    return f"{load}.merge_and_unload().save_pretrained(MERGED)"


def _chosen_layers(model: WrappedModel, config: LoraConfig) -> dict[str, nn.Module]:
    """The linear layers that are adapted, by name."""
    from peft import LoraConfig as Settings
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trained_whole = set(_trained_whole(model))
    linear: dict[str, nn.Module] = {}
    for name, module in model.hf.named_modules():
        # Some routers inherit from `nn.Linear`, and compute something else.
        is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if is_plain or isinstance(module, Conv1D) or is_quantized(module):
            linear[name] = module

    def is_within_head(name: str) -> bool:
        return not trained_whole.isdisjoint(name.split("."))

    def matching(pattern: str) -> set[str]:
        if "*" in pattern:
            return {name for name in linear if fnmatchcase(name, pattern)}
        return {name for name in linear if f".{name}".endswith(f".{pattern}")}

    for field in ("target_modules", "exclude_modules"):
        for pattern in getattr(config, field):
            if not matching(pattern):
                last = {name.rpartition(".")[2] for name in linear if not is_within_head(name)}
                raise ConfigError(
                    "no linear layer has this name",
                    where=_WHERE,
                    field=field,
                    got=pattern,
                    need="one of " + ", ".join(sorted(last)),
                )
    # peft takes some layers for experts, which have their names in older checkpoints: it drops
    # these from the names that it is given.
    peft_settings = Settings(target_modules=list(linear))
    convert_peft_config_for_transformers(peft_settings, model=model.hf, conversions=None)
    embedding = model.hf.get_input_embeddings().weight
    of_kernels = read_by_kernels(model.hf)
    fit: set[str] = set()
    for name in peft_settings.target_modules or ():
        layer = linear.get(name)
        is_tied = layer is not None and layer.weight is embedding
        is_output = isinstance(model, PolicyModel) and layer is model.head
        if not (is_tied or is_output or is_within_head(name) or name in of_kernels):
            fit.add(name)
    wanted: set[str] = set()
    if config.target_modules:
        wanted.update(*map(matching, config.target_modules))
    else:
        wanted.update(fit & linear.keys())
    wanted.difference_update(*map(matching, config.exclude_modules))
    if not wanted:
        raise ConfigError(
            "no layer is adapted", where=_WHERE, field="exclude_modules", got=config.exclude_modules
        )
    unfit = sorted(wanted - fit)
    if unfit:
        summary = (
            "this layer takes no adapter: it is the embedding, the output layer, or an expert to "
            "peft"
        )
        if is_within_head(unfit[0]):
            summary = "a reward model's head has no adapter: it is trained whole"
        if unfit[0] in of_kernels:
            summary = "a fused kernel reads this layer's weight, and would not see an adapter"
        raise ConfigError(
            summary, where=_WHERE, field="target_modules", got=unfit[0], need="other layers"
        )
    return {name: layer for name, layer in linear.items() if name in wanted}


@torch.no_grad()
def _draw(model: WrappedModel, seed: int) -> None:
    """Draw the adapters on the CPU and in the order of the layers, so that the seed alone
    determines them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model).values():
        weight_A = layer.lora_A[_NAME].weight
        drawn = torch.empty(weight_A.shape)
        # As NeMo RL's `lora_A_init: xavier`; peft has drawn by Kaiming's rule.
        nn.init.xavier_normal_(drawn, generator=generator)
        put(weight_A, drawn)
        # B A is zero at first: training begins at the model itself.
        layer.lora_B[_NAME].weight.zero_()


def adapted_layers(model: WrappedModel) -> dict[str, Any]:
    """peft's layers by the names of the layers that they wrap."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {
        name: module for name, module in model.hf.named_modules() if isinstance(module, LoraLayer)
    }


def _settings(model: WrappedModel) -> Any:
    configs: Any = model.hf.peft_config
    return configs[_NAME]


def _trained_whole(model: WrappedModel) -> list[str]:
    """The modules of a reward model that have no adapters: the head, and an encoder's pooler, which
    may be new too."""
    if isinstance(model, PolicyModel):
        return []
    modules = [name for name, child in model.hf.named_children() if child is not model.backbone]
    if isinstance(getattr(model.backbone, "pooler", None), nn.Module):
        modules.append("pooler")
    return modules


def _whole_weights(model: WrappedModel) -> dict[str, Tensor]:
    modules = set(_settings(model).modules_to_save or ())
    weights: dict[str, Tensor] = {}
    for name, weight in model.hf.named_parameters():
        if not modules.isdisjoint(name.split(".")):
            weights[name] = weight
    return weights
