"""Head-only training: the backbone is frozen, and reads the data once.

    setup = with_features(set_up(config))  # for `policy.reward_model_cfg.freeze_backbone`
    setup.features[dataset.fingerprint](7) # the head's inputs for comparison 7, (C, K, D)

The hidden states lie in `data.cache_dir`, one file per data set, whose name is a hash of everything
that they depend on.

Shapes: C completions of a comparison, N of a data set, S of a micro-batch, K and D as in
`RewardModel.feature_shape`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from treeward import processes
from treeward.data.encoding import EncodedDataset
from treeward.digests import has_its_digest, write_digest
from treeward.errors import ConfigError
from treeward.model.heads import head_name
from treeward.model.reward_model import RewardModel, reads_each
from treeward.model.shards import whole
from treeward.model.stored import architecture_of
from treeward.progress import ShownProgress
from treeward.storage import atomic_file, folder_lock, remove_leftovers
from treeward.training.prefetch import BatchPreparer
from treeward.training.setup import RewardModelSetup

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 2
"""Raise it when a model computes other hidden states, or the layout of the file changes."""
_COMPARISONS_AT_ONCE = 256
"""Planned together, and written together."""


def with_features(setup: RewardModelSetup, show_progress: bool = False) -> RewardModelSetup:
    """The setup with the features of its data sets, if its backbone is frozen; every process calls
    it.

    Raises `ConfigError` if `data.cache_dir` cannot be written, and `ModelError` for an encoder
    whose head reads more than one hidden state.
    """
    if not setup.policy.reward_model_cfg.freeze_backbone:
        return setup
    # A set that is trained and validated on is read once, and whole: its validation may be a part.
    datasets: dict[str, EncodedDataset] = {}
    for dataset in [*setup.validation_sets.values(), *setup.training_sets.values()]:
        datasets[dataset.fingerprint] = dataset
    model = setup.model
    shape = model.feature_shape
    backbone = _backbone(model, setup.policy.matmul_precision)
    preparer = BatchPreparer(setup)
    features: dict[str, Callable[[int], Tensor]] = {}
    for fingerprint, dataset in datasets.items():
        tokens = processes.on_main(dataset.tokens_sha256)
        key = hashlib.sha256(f"{backbone} {tokens}".encode()).hexdigest()[:32]
        file = setup.cache_dir / "features" / key / "features.bin"
        _complete(file, preparer, dataset, show_progress)
        counts = dataset.shapes[:, 0]
        starts = counts.cumsum() - counts
        num_completions = int(counts.sum())
        # Mapped, because the features of a large set do not fit into memory.
        size = num_completions * math.prod(shape)
        mapped = torch.from_file(str(file), size=size, dtype=_dtype(model))
        features_NKD = mapped.view(num_completions, *shape)
        features[fingerprint] = partial(_features, features_NKD, starts, counts)
    return replace(setup, features=features)


def _backbone(model: RewardModel, matmul_precision: str) -> str:
    """Everything that the hidden states of tokens depend on, as JSON."""
    digest = hashlib.sha256()
    # The head is what is trained: another head reads the same hidden states.
    head = f"{head_name(model.hf)}."
    for name, weight in sorted(model.hf.state_dict().items()):
        if not name.startswith(head):
            digest.update(json.dumps([name, str(weight.dtype), weight.shape]).encode())
            digest.update(_bytes(whole(weight)))
    # A causal model names its own class there, and the classifier that a resumed run reads from its
    # checkpoint another: the same backbone would read the data again.
    config = architecture_of(model.hf.config.to_dict()) | {"architectures": None}
    computation = [model.layout, str(_dtype(model)), matmul_precision, reads_each(model.head)]
    parts = [_FORMAT_VERSION, digest.hexdigest(), config, computation]
    return json.dumps(parts, sort_keys=True, default=str)


def _features(features_NKD: Tensor, starts: Any, counts: Any, index: int) -> Tensor:
    return features_NKD[starts[index] : starts[index] + counts[index]]


def _complete(
    file: Path, preparer: BatchPreparer, dataset: EncodedDataset, show_progress: bool
) -> None:
    """Have the backbone read a data set, unless this or another run has done so before."""
    shape = preparer.model.feature_shape
    dtype = _dtype(preparer.model)
    written: list[IO[bytes]] = []  # of the main process

    def begin() -> bool:
        """Whether the file is to be written."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another run may be writing this file now: it is waited for, and then reused.
        held.enter_context(folder_lock(file.parent, wait=True))
        if has_its_digest(file):
            logger.info("%s: the backbone has read it before, reusing %s", dataset.name, file)
            return False
        if file.exists():
            logger.warning(
                "the features %s are damaged: they are not what their digest is of; made again",
                file,
            )
        remove_leftovers(file.parent)  # of a run that was killed
        needed = int(dataset.shapes[:, 0].sum()) * math.prod(shape) * dtype.itemsize
        free = shutil.disk_usage(file.parent).free
        if needed > free:  # said now, and not after hours
            raise OSError(
                errno.ENOSPC,
                f"the features of {dataset.name} need {needed:,} bytes, {free:,} are free",
            )
        written.append(writing.enter_context(atomic_file(file, "wb")))
        return True

    def write(states: Sequence[Tensor]) -> None:
        for state in states:
            written[0].write(_bytes(state))

    def finish() -> None:
        writing.close()  # gives the file its name
        if is_missing:
            # Last: a file without a digest is made again.
            write_digest(file)
        held.close()

    with (
        contextlib.ExitStack() as held,
        contextlib.ExitStack() as writing,
        processes.patience() as group,
    ):
        try:
            is_missing = processes.on_main(begin, group)
            progress = ShownProgress(unit="comparisons", enabled=show_progress and is_missing)
            held.enter_context(progress)
            size = 0
            if is_missing:
                size = len(dataset)
            for start in range(0, size, _COMPARISONS_AT_ONCE):
                end = min(start + _COMPARISONS_AT_ONCE, size)
                states = _states(preparer, dataset, range(start, end))
                assert states[0].shape[1:] == shape
                assert states[0].dtype == dtype
                processes.on_main(partial(write, states))
                progress.show(f"reading {dataset.name} with the backbone", end, size)
            processes.on_main(finish)
        except OSError as error:
            raise ConfigError(
                f"the features cannot be kept: {error.strerror or error}",
                where=str(file.parent),
                field="data.cache_dir",
                need="a folder with room that can be written",
            ) from error


@torch.no_grad()
def _states(preparer: BatchPreparer, dataset: EncodedDataset, places: range) -> list[Tensor]:
    """The head's inputs for each of these comparisons, (C, K, D) on the CPU."""
    model = preparer.model
    rank_states: dict[int, Tensor] = {}
    model.eval()
    for share in preparer.shares([(dataset, i) for i in places], validation=True):
        micro_batch = share.micro_batch.to(model.device, non_blocking=True)
        states_SKD = torch.cat([model.features(batch) for batch in micro_batch.batches])
        if micro_batch.order_S is not None:
            states_SKD = states_SKD[micro_batch.order_S]
        sizes = [len(comparison.ranks) for comparison in share.comparisons.values()]
        states = states_SKD.cpu().split(sizes)
        rank_states |= dict(zip(share.comparisons, states, strict=True))
    model.train()
    # In the order of the set, of which each process has computed a share.
    all_states: dict[int, Tensor] = {}
    for states_of_rank in processes.gather(rank_states, preparer.mesh.data_group):
        all_states |= states_of_rank
    return [all_states[i] for i in range(len(places))]


def _dtype(model: RewardModel) -> torch.dtype:
    return model.compute_dtype or model.hf.dtype


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
