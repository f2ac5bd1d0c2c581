"""`set_up`: from a configuration to everything a run needs, checked, in one frozen `RewardModelSetup`.

The cheap checks (names, files, rows) come before the slow work (weights), so that mistakes are reported early.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.data import DatasetConfig
from treeward.config.policy import TrainedModelConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import RowDataset, open_dataset
from treeward.data.encoding import Comparison, EncodedDataset, encode_dataset, missing_grade
from treeward.data.preference import Completion, Preference
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.perturbations import sample_examples
from treeward.evaluation.suites import PreferenceSuite
from treeward.losses import Heads, heads_of
from treeward.model.checks import check_before_training, check_positions
from treeward.model.contract import CONTRACT_FILE
from treeward.model.liger import use_liger_kernel
from treeward.model.loading import build_reward_model, load_reward_model
from treeward.model.lora import add_adapters, has_adapters, load_adapters, save_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES, base_of_adapters, load_tokenizer, quiet_transformers
from treeward.model.reward_model import RewardModel
from treeward.parallel.mesh import Mesh, make_mesh
from treeward.parallel.sharding import shard
from treeward.parallel.tensor import cut
from treeward.training.checkpoints import Checkpoint
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.order import EpochOrder, planned_steps
from treeward.training.state import check_identity

logger = logging.getLogger(__name__)

_MEASURED_COMPARISONS = 16
_CHECKED_COMPARISONS = 64
_DIGESTS_AT_ONCE = 1_000_000
_ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True, slots=True)
class RewardModelSetup:
    """A run that is ready for its first step.

    By validation set, `validation_sizes`: how many comparisons a validation looks at, the first; `num_trained_on`: how
    many of them are in the training data too; `perturbed`: those whose completions are rewritten to measure
    `robust_accuracy`. `num_ranked`: how many checkpoints will have the metric that chooses the exported model when the
    run is done; the best of several has been lucky as well as good. `mesh`: how the model and the data are shared out
    over the processes of the run, each of which has such a setup. `heads`: what they learn. `features`: by the file of
    a data set, what gives those of a comparison (`training.features`); empty where the backbone computes in each step.
    """

    config: RewardModelRunConfig
    mesh: Mesh
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    order: EpochOrder
    training_sets: dict[str, EncodedDataset]
    validation_sets: dict[str, EncodedDataset]
    validation_sizes: Mapping[str, int]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    total_steps: int
    identity: dict[str, Any]
    perturbed: Mapping[str, Sequence[Preference]]
    num_trained_on: Mapping[str, int]
    num_ranked: int
    heads: Heads
    features: Mapping[Path, Callable[[int], Tensor]] = field(default_factory=dict)

    def caveat(self, name: str, means: Mapping[str, float]) -> str | None:
        """Why the numbers `means` of a validation set may differ from those of new data."""
        key, parts, size = self.config.ranking_metric, [], self.validation_sizes[name]
        if key is not None and key.validation in (None, name) and key.metric in means and self.num_ranked > 1:
            parts.append(
                f"The checkpoint was chosen on these comparisons, the best of {self.num_ranked} by {key.metric}: on "
                "new data expect lower numbers."
            )
        if count := self.num_trained_on[name]:
            parts.append(f"{count:,} of its {size:,} comparisons are in the training data too, word for word.")
        if dropped := self.validation_sets[name].counts.much_dropped:
            parts.append(dropped)
        return " ".join(parts) or None


def set_up(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RewardModelSetup:
    """Build everything a run needs; model and tokenizer are those of the checkpoint, where there is one.

    Raises a `TreewardError` for anything that the user can mend.
    """
    mesh = make_mesh(config.policy.dtensor_cfg)
    streams: list[RowDataset] = []  # of the main process, which alone reads rows
    held_out: list[RowDataset] = []
    processes.on_main(lambda: streams.extend(map(open_dataset, config.training_sets)))
    processes.on_main(lambda: held_out.extend(map(open_dataset, config.validation_sets)))
    tokenizer = find_tokenizer(config.policy, texts_of(streams), checkpoint)
    renderer = Renderer(
        tokenizer,
        chat_template=config.policy.tokenizer.chat_template,
        chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs,
        max_length=config.max_sequence_length,
        truncation="drop" if config.data.truncation == "drop_comparison" else config.data.truncation,
    )
    encode = partial(
        encode_dataset,
        renderer=renderer,
        ties=config.known_ties,
        keep_rest=config.data.truncation != "drop_comparison",
        attributes=config.policy.reward_model_cfg.labels,
        cache_dir=Path(config.data.cache_dir or ".treeward_cache"),
        progress=show_progress,
    )

    def encode_all() -> tuple[dict[str, EncodedDataset], dict[str, EncodedDataset]]:
        names = _training_names(config.data.train)
        training_sets = {name: encode(stream) for name, stream in zip(names, streams, strict=True)}
        for i, label in enumerate(config.policy.reward_model_cfg.labels):
            if not any(np.isfinite(one.grades[:, i]).any() for one in training_sets.values()):
                raise missing_grade(streams[0], label)
        return training_sets, {str(stream.config.name): encode(stream) for stream in held_out}

    with processes.patience() as group:  # the others open the files that the main process has made
        training_sets, validation_sets = processes.on_main(encode_all, group)
        datasets = [*training_sets.values(), *validation_sets.values()]
        highest_token = processes.on_main(lambda: max(one.highest_token for one in datasets), group)
    unused = sum(one.num_strengths for one in training_sets.values())
    if unused and config.rm.loss.strength is None and not config.policy.reward_model_cfg.labels:
        logger.info("%d comparisons say by how much a completion is better: rm.loss.strength would use it.", unused)
    size = config.rm.val_global_batch_size or config.policy.train_global_batch_size
    limit = None if config.rm.val_batches is None else config.rm.val_batches * size
    validation_sizes = {name: min(limit or len(one), len(one)) for name, one in validation_sets.items()}
    num_trained_on = _num_trained_on(training_sets.values(), validation_sets, validation_sizes)

    def perturb() -> dict[str, list[Preference]]:
        return {
            str(one.name): examples_to_perturb(validation_sets[str(one.name)][:size], one, number, renderer)
            for one in config.validation_sets
            if (number := config.num_perturbations(str(one.name))) and (size := validation_sizes[str(one.name)])
        }

    perturbed = processes.on_main(perturb)
    sizes, weights = list(map(len, training_sets.values())), [dataset.weight for dataset in config.data.train]
    order = EpochOrder(sizes, weights=weights, seed=config.rm.seed, shuffle=config.data.shuffle)
    identity = processes.on_main(partial(_identity, config, renderer, training_sets, validation_sets))
    if checkpoint is not None:
        check_identity(checkpoint.path, identity)
    model = _load_model(config, tokenizer, checkpoint, mesh)
    check = partial(_check_model, config, model, tokenizer, datasets, highest_token)
    adaptation = partial(adapt, model, config.policy, seed=config.rm.seed, checkpoint=checkpoint)
    make_ready(model, config.policy, mesh, role="reward model", adaptation=adaptation, check=check)
    first = next(iter(training_sets.values()))[:_MEASURED_COMPARISONS]
    model.choose_attention([one.token_ids for one in first])
    model.tree_attention = processes.broadcast(model.tree_attention)
    in_data = order.steps_per_epoch(config.policy.train_global_batch_size) * config.rm.max_num_epochs
    total_steps = planned_steps(config.rm, in_data, "rm")
    optimizer = build_optimizer(model, config.policy.optimizer, cpu_offload=steps_on_host(config.policy, mesh))
    scheduler = build_scheduler(optimizer, config.policy.scheduler, total_steps=total_steps)
    return RewardModelSetup(
        *(config, mesh, model, tokenizer, renderer, order, training_sets, validation_sets, validation_sizes),
        *(optimizer, scheduler, total_steps, identity, perturbed, num_trained_on),
        num_ranked=_num_ranked(config, total_steps),
        heads=heads_of(config, np.concatenate([one.grades for one in training_sets.values()]), model.num_heads),
    )


def _num_trained_on(
    training_sets: Iterable[EncodedDataset], validation_sets: Mapping[str, EncodedDataset], sizes: Mapping[str, int]
) -> dict[str, int]:
    """How many of the first comparisons of each validation set are trained on, with a warning where there are some."""
    found = {name: num_shared(validation_sets[name], training_sets, limit=size) for name, size in sizes.items()}
    for name, number in found.items():
        if number:
            logger.warning(
                "%d of %d comparisons of the validation set %s are in the training data too, word for word: its "
                "numbers say how well they are remembered, and little of new data.", number, sizes[name], name,
            )  # fmt: skip
    return found


def _num_ranked(config: RewardModelRunConfig, total_steps: int) -> int:
    """How many checkpoints will be saved and validated, with a warning where a metric can hardly rank them."""
    saved, validated = config.checkpointing.save_period, config.rm.val_period
    steps = {total_steps, *(range(saved, total_steps + 1, saved) if saved else ())}
    num = sum(
        bool((validated and step % validated == 0) or (config.rm.val_at_end and step == total_steps)) for step in steps
    )
    if config.ranking_metric is not None and num < len(steps):
        logger.warning(
            "%d of the %d checkpoints of this run will have a %s, and the others rank last: checkpointing.save_period "
            "is %s and rm.val_period %s.", num, len(steps), config.checkpointing.metric_name, saved, validated,
        )  # fmt: skip
    return num


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one of the
    training data, in any order. Completions of other prompts, which training may add, do not count."""
    own, counts = np.unique(dataset.digests(0, limit), return_counts=True)
    is_shared = np.zeros(len(own), dtype=bool)
    for training in training_sets:
        for start in range(0, len(training), _DIGESTS_AT_ONCE):  # so that memory does not grow with the training data
            digests = training.digests(start, start + _DIGESTS_AT_ONCE)
            places = np.searchsorted(own, digests).clip(max=len(own) - 1)
            is_shared[places[own[places] == digests]] = True
    return int(counts[is_shared].sum())


def examples_to_perturb(
    comparisons: Sequence[Comparison], config: DatasetConfig, num_examples: int, renderer: Renderer
) -> list[Preference]:
    """At most `num_examples` of the comparisons, which a validation measures, with their texts.

    They are those that `treeward eval --perturbations` draws. Raises `DataError` if no comparison has a better and a
    worse completion that are text.
    """
    examples = as_measured(PreferenceSuite(str(config.name), config).load(), comparisons, renderer)
    sampled = sample_examples(examples, num_examples)
    if not sampled:
        got = f"{len(examples)} comparisons, none with a better and a worse completion that are text"
        fix = "set rm.val_perturbations=null, and another checkpointing.metric_name"
        where = str(config.name)
        raise DataError("robust_accuracy cannot be measured: nothing can be rewritten", where=where, got=got, fix=fix)
    return sampled


def as_measured(
    examples: Iterable[Preference], comparisons: Iterable[Comparison], renderer: Renderer
) -> list[Preference]:
    """The examples of the comparisons, which are in the same order, with the completions that a validation measures.

    Those that are too long, or have the tokens of an earlier one, are left out. Raises `DataError` for data that has
    changed since the comparisons were read.
    """
    remaining, measured = iter(examples), []
    for comparison in comparisons:
        place = place_of(comparison.where)
        example = next((one for one in remaining if place_of(one.where) == place), None)
        if example is None or len(example.completions) < len(comparison.ranks):
            need = "the data as it was when the run was set up"
            summary = "the validation set is not what the run has read"
            raise DataError(summary, where=comparison.where, got="other rows", need=need)
        if len(example.completions) > len(comparison.ranks):
            example = _without_left_out(example, comparison, renderer)
        measured.append(example)
    return measured


def _without_left_out(example: Preference, comparison: Comparison, renderer: Renderer) -> Preference:
    firsts: dict[tuple[int, ...], Completion] = {}
    for completion, conversation in zip(example.completions, example.conversations, strict=True):
        if fitted := renderer.fit(conversation, where=example.where):
            firsts.setdefault(tuple(fitted.token_ids), completion)
    completions = zip(firsts.values(), comparison.ranks, strict=True)
    return replace(example, completions=tuple(replace(completion, rank=rank) for completion, rank in completions))


def place_of(where: str | None) -> str:
    """A row's file and number without the folder: data that has moved is read from the cache, with its old path."""
    return (where or "").rpartition("/")[2]


def find_tokenizer(
    policy: TrainedModelConfig, texts: Iterable[str], checkpoint: Checkpoint | None
) -> PreTrainedTokenizerBase:
    """The one that is named, or the model's own; for a bare architecture one that is trained on `texts`, once."""
    if policy.trained_vocab_size is None:
        name = policy.tokenizer.name or policy.model_name
        assert name is not None  # the schema sees to it
        return load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint.path / "model"))
    return processes.on_main(partial(train_tokenizer, texts, vocab_size=policy.trained_vocab_size))


def make_ready(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    mesh: Mesh,
    *,
    role: str,
    adaptation: Callable[[], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make a model that was loaded what the run needs: its precision, adapters, shards, weights, kernels; and check it.

    `role`: what the log calls it. `adaptation`: puts the adapters beside it, if any; None for a frozen model.
    """
    if mesh.devices is None:
        prepare_for_training(model, policy, role=role)
    elif adaptation is None or not policy.trains_backbone:
        model.cast(DTYPES[policy.precision])  # what is trained is held in float32
    if adaptation is not None:
        adaptation()
    if mesh.devices is not None:
        prepare_for_training(model, policy, role=role, mesh=mesh)
        model.fill("cpu" if policy.dtensor_cfg.cpu_offload else processes.device())
    check()


def prepare_for_training(
    model: RewardModel | PolicyModel, policy: TrainedModelConfig, *, role: str, mesh: Mesh | None = None
) -> None:
    """Set the precision of the weights, cut and shard them over `mesh`, set the kernels and what is recomputed.

    `role`: what the log calls the model.
    """
    dtype = DTYPES[policy.precision]
    if mesh is None:
        model.cast(dtype)
    else:
        cut(model, mesh, sequence_parallel=policy.dtensor_cfg.sequence_parallel)
        shard(model, mesh, dtype=dtype, cpu_offload=policy.dtensor_cfg.cpu_offload)
    if policy.use_liger_kernel:
        use_liger_kernel(model)
    if recomputed := policy.dtensor_cfg.activation_checkpointing:
        model.recompute_activations(selective=recomputed == "selective")
    compiles = model.layout == "tree" and model.device.type == "cuda"
    if policy.torch_compile and not compiles:
        got, need = f"{model.layout} on {model.device}", "a model that runs on trees, on a GPU"
        raise ConfigError(
            "layers are not compiled here", where="policy.torch_compile", got=got, need=need, fix="leave it out"
        )
    if compiles and policy.torch_compile is not False:
        model.compile_layers()
    count = model.hf.num_parameters()  # which knows of four bits
    name = type(model.hf).__name__
    where = processes.device() if mesh is None else f"{processes.device()}, {mesh}"
    logger.info("The %s: %s, %s parameters, as %s, on %s.", role, name, f"{count:,}", model.layout, where)


def how_to_load(policy: TrainedModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Arguments of `load_reward_model` and `load_policy`: the model whole on each process; on several without weights,
    until it is sharded, where nothing needs them."""
    holds_masters = mesh.devices is not None and policy.trains_backbone
    return {
        "dtype": DTYPES["float32" if holds_masters else policy.precision],
        "trust_remote_code": policy.trust_remote_code,
        "load_in_4bit": policy.load_in_4bit,
        "on_meta": mesh.devices is not None and not policy.load_in_4bit,
    }


def where_to_load(policy: TrainedModelConfig, mesh: Mesh) -> torch.device:
    """The GPU, where there is one; the CPU for what is sharded later."""
    is_whole_here = mesh.devices is None or policy.load_in_4bit
    return torch.device("cuda" if is_whole_here and torch.cuda.is_available() else "cpu")


def steps_on_host(policy: TrainedModelConfig, mesh: Mesh) -> bool:
    """Whether the optimiser has copies in the host's memory; of several processes the shards themselves are there."""
    return policy.dtensor_cfg.cpu_offload and mesh.devices is None


@quiet_transformers()
def adapt(
    model: RewardModel | PolicyModel, policy: TrainedModelConfig, *, seed: int, checkpoint: Checkpoint | None
) -> None:
    """Put the adapters beside the model that are configured, as the checkpoint has them, if there is one; or freeze
    all weights but the head's."""
    if (lora := policy.dtensor_cfg.lora_cfg).enabled:
        add_adapters(model, lora, seed=seed)
        if checkpoint is not None:
            load_adapters(model, checkpoint.path / _ADAPTER_FOLDER)
    elif not policy.trains_backbone:
        for weight in model.weights():
            weight.requires_grad_(False)


def save_adapted(model: RewardModel | PolicyModel, folder: Path) -> None:
    """Write the adapters of a model into the folder of a checkpoint, beside `model`, in which they are merged."""
    if has_adapters(model):
        save_adapters(model, folder / _ADAPTER_FOLDER)


def identity_of_adapters(policy: TrainedModelConfig) -> dict[str, Any]:
    """What a resumed run must have in common in this; without QLoRA as before there was any."""
    lora = {"dtensor_cfg.lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json")}
    return lora | ({"load_in_4bit": True} if policy.load_in_4bit else {})


def _load_model(
    config: RewardModelRunConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint | None, mesh: Mesh
) -> RewardModel:
    policy = config.policy
    common: dict[str, Any] = {"attention": policy.attention, "device": where_to_load(policy, mesh)}
    common |= {"head_std": config.rm.head_init_std, "labels": policy.reward_model_cfg.head_names}
    has_lora = policy.dtensor_cfg.lora_cfg.enabled
    saved = None if checkpoint is None or has_lora else checkpoint.path / "model"  # adapters are merged there
    if saved is None and policy.architecture is not None:
        fields = {key: value for key, value in policy.architecture.items() if key != "vocab_size"}
        model = build_reward_model(fields, tokenizer, seed=config.rm.seed, **common).model
    else:
        common |= {"head_seed": config.rm.seed} | how_to_load(policy, mesh)
        name = saved or str(policy.model_name)  # the schema sees to it that there is one
        model = load_reward_model(name, tokenizer=tokenizer, **common).model
    return model


def _check_model(
    config: RewardModelRunConfig,
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Sequence[EncodedDataset],
    highest_token: int,
) -> None:
    """Whether model, tokenizer and data fit together, on the first comparisons of each set."""
    first = [comparison for dataset in datasets for comparison in dataset[:_CHECKED_COMPARISONS]]
    sample = [ids for comparison in first for ids in comparison.token_ids]
    check_positions(model, config.max_sequence_length)
    num_heads = len(config.policy.reward_model_cfg.head_names) or None
    check_before_training(model, sample, tokenizer, num_heads=num_heads, highest_token=highest_token)


def _identity(
    config: RewardModelRunConfig,
    renderer: Renderer,
    training_sets: Mapping[str, EncodedDataset],
    validation_sets: Mapping[str, EncodedDataset],
) -> dict[str, Any]:
    """What a resumed run must have in common with the run that it continues."""
    policy = config.policy
    adapters = identity_of_adapters(policy) if policy.dtensor_cfg.lora_cfg.enabled else {}
    weights = [dataset.weight for dataset in config.data.train]
    data = [(dataset.fingerprint, weight) for dataset, weight in zip(training_sets.values(), weights, strict=True)]
    # By other validation data the checkpoints of the two sessions could not be compared.
    validation = {name: dataset.fingerprint for name, dataset in validation_sets.items()}
    return {
        # The weights that adapters are of are read from there again.
        "the model": (with_weights(policy.model_name) if adapters else policy.model_name) or policy.architecture,
        "the tokenizer or template": short_hash(renderer.fingerprint),
        "the training data": short_hash(json.dumps(data)),
        "the validation data": short_hash(json.dumps(validation, sort_keys=True)),
        "rm": {"seed": config.rm.seed, "loss": config.rm.loss.model_dump(mode="json", exclude_defaults=True)},
        "the reward model": policy.reward_model_cfg.model_dump(mode="json", exclude_defaults=True),
        "data": {"shuffle": config.data.shuffle}
        | ({"ties": config.data.ties} if config.data.ties != config.known_ties else {}),
        # The state of optimiser and schedule is that of the saved run: a new rate would be ignored without a word.
        "policy": policy.model_dump(
            mode="json", include={"train_global_batch_size", "optimizer", "scheduler", "precision", "max_grad_norm"}
        )
        | adapters,
    }


def short_hash(text: str) -> str:
    """Sixteen hexadecimal digits that differ where the texts do."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_weights(name: str | None) -> str | None:
    """The hash of a model's weights, wherever its folder lies, and of adapters' base; the name of a model without a
    folder of safetensors.
    """
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


def _training_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """A short name for each training set, as metrics and the model card show it: no paths of this machine."""
    names: list[str] = []
    for number, dataset in enumerate(datasets, start=1):
        plain = Path(dataset.data_path).name if dataset.data_path else dataset.dataset_name.rpartition(".")[2]
        name = dataset.name or plain
        while name in names:
            name = f"{name}-{number}"
        names.append(name)
    return names
