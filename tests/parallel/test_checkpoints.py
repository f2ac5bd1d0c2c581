"""Checkpoints of several processes: any number goes on from what any other has saved; one that
fails fails for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from treeward import processes
from treeward.config.checkpointing import CheckpointingConfig
from treeward.config.policy import LoraConfig, NamedScheduleConfig, OptimizerConfig, ShardingConfig
from treeward.data.rendering import Renderer
from treeward.errors import CheckpointError, ConfigError
from treeward.model import export as of_export
from treeward.model import shards
from treeward.model.export import export_model
from treeward.model.loading import load_classifier
from treeward.model.lora import add_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import load_tokenizer
from treeward.model.reward_model import RewardModel
from treeward.parallel.mesh import make_mesh
from treeward.parallel.sharding import shard
from treeward.scoring.golden import sign_exported
from treeward.scoring.verification import verify
from treeward.training.checkpoints import open_store
from treeward.training.masters import MasterWeights
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.state import RunState, check_files, load_state, save_state

SAVED, LAST = 3, 5
KINDS = ("adamw", "rounded")


class Session:
    """A small model and its optimiser, sharded over the processes unless it is `alone`. Gradients
    follow from the step.

    Rounded weights are bfloat16 with float32 masters in one process, and float32 in several.
    """

    def __init__(self, kind: str, *, alone: bool) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Embedding(512, 32), nn.Linear(32, 6), nn.Linear(6, 1))
        if kind == "rounded":
            self.model.to(torch.bfloat16)
        if not alone:
            self.model.float()
            fully_shard(self.model, mesh=init_device_mesh("cpu", (processes.size(),)))
        self.optimizer = build_optimizer(self.model, OptimizerConfig(kwargs={"lr": 0.01}))
        schedule = NamedScheduleConfig(name="cosine", warmup_steps=2)
        self.scheduler = build_scheduler(self.optimizer, schedule, total_steps=9)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in self.model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                is_sharded = isinstance(parameter, DTensor)
                parameter.grad = (
                    distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
                    if is_sharded
                    else drawn
                )
            self.optimizer.step()
            self.scheduler.step()

    def weights(self) -> list[torch.Tensor]:
        """Whole, in float32."""
        held = (
            self.optimizer.masters
            if isinstance(self.optimizer, MasterWeights)
            else self.model.parameters()
        )
        return [shards.whole(weight.detach()).clone() for weight in held]

    def save(self, folder: Path) -> None:
        save_state(
            folder,
            RunState(SAVED, {"what": "x"}),
            self.optimizer,
            self.scheduler,
            with_weights=True,
        )


def reference(kind: str, last: int) -> list[torch.Tensor]:
    session = Session(kind, alone=True)
    session.train(range(last))
    return session.weights()


def resumed(folder: Path, kind: str, *, alone: bool) -> bool:
    """Whether a session that goes on from there ends with the bits of one that was not stopped, in
    one process."""
    session = Session(kind, alone=alone)
    assert load_state(folder, session.optimizer, session.scheduler).step == SAVED
    session.train(range(SAVED, LAST))
    want = reference(kind, LAST)
    return all(torch.equal(one, other) for one, other in zip(session.weights(), want, strict=True))


def saved(folder: Path, kind: str, *, alone: bool) -> None:
    session = Session(kind, alone=alone)
    session.train(range(SAVED))
    processes.on_main(lambda: folder.mkdir(parents=True))
    session.save(folder)


def go_on(folder: str, writers: list[int]) -> dict[str, Any]:
    """In each process of a run of several: what it found in the states that other numbers of
    processes have saved."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        saved(Path(folder) / f"{kind}_{processes.size()}", kind, alone=False)
        for writer in [*writers, processes.size()]:
            found[f"{kind} by {writer}"] = resumed(
                Path(folder) / f"{kind}_{writer}", kind, alone=False
            )
    with pytest.raises(ConfigError, match="quantised states are for one process"):
        build_optimizer(
            Session("adamw", alone=False).model, OptimizerConfig(name="torchao.optim.AdamW8bit")
        )
    found["store"] = in_a_store(Path(folder) / f"store_{processes.size()}")
    found["exported"] = export(
        Path(folder) / f"exported_{processes.size()}", Path(folder) / "tokenizer"
    )
    return found


def in_a_store(folder: Path) -> list[Any]:
    """Which saves are found; that a disk that is full for one process fails for all, and so does a
    damaged file."""
    session = Session("adamw", alone=False)
    found = []
    with open_store(CheckpointingConfig(checkpoint_dir=str(folder))) as store:
        assert store is not None
        for step in (1, 2):
            session.train(range(step - 1, step))
            found.append(processes.gather(store.save(step, session.save).step))
        write = shards.save
        if processes.rank() == 1:
            shards.save = full_disk
        with pytest.raises(
            CheckpointError, match=r"(?s)step_3: cannot be saved.*rank 1: .*No space left"
        ):
            store.save(3, session.save)
        shards.save = write
        latest = store.latest()
        found += [latest and latest.step, sorted(path.name for path in folder.iterdir())]
    check_files(folder / "step_1")
    damaged = folder / "step_1" / "optimizer.pt"
    processes.on_main(lambda: damaged.write_bytes(damaged.read_bytes()[:-1] + b"x"))
    with pytest.raises(CheckpointError, match="optimizer.pt: the checkpoint is damaged"):
        check_files(folder / "step_1")
    check_files(folder / "step_2")
    return found


def full_disk(tensors: Any, storage_writer: Any, **options: Any) -> None:
    """The disk of one process is full: its files cannot be written."""

    def write_data(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    storage_writer.write_data = write_data
    torch.distributed.checkpoint.save(tensors, storage_writer=storage_writer, **options)


EXPORTED: dict[str, Callable[[], Any]] = {
    "llama": partial(tiny_model, "llama"),
    "mixtral": partial(tiny_model, "mixtral"),  # whose experts are other tensors on the disk
    "tied": partial(causal_model, "qwen3", tie_word_embeddings=True),
}


DTYPE = {"llama": torch.bfloat16, "mixtral": torch.float32, "tied": torch.bfloat16}


def adapted(folder: Path) -> RewardModel:
    """Adapters beside weights of four bits, which are whole on each process."""
    model = load_classifier(folder, dtype=torch.bfloat16, load_in_4bit=True).model
    add_adapters(model, LoraConfig(enabled=True, dim=4), seed=1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def export(folder: Path, tokenizer_folder: Path) -> bool:
    of_export.FILE_BYTES = 40_000
    tokenizer = load_tokenizer(str(tokenizer_folder))
    mesh = make_mesh(ShardingConfig())
    makes = EXPORTED | {"adapted": partial(adapted, folder / "llama")}
    for name, make in makes.items():
        made = make()
        if name == "adapted":
            model = made
        elif name == "tied":
            model = PolicyModel(made)
        else:
            model = RewardModel(made)
        shard(model, mesh, dtype=DTYPE.get(name, torch.bfloat16))
        renderer = Renderer(tokenizer)
        export_model(model, tokenizer, folder / name, chat_template=renderer.chat_template)
        if isinstance(model, RewardModel):
            sign_exported(folder / name, model=model, renderer=renderer, mesh=mesh)
    return True


def assert_exported(folder: Path) -> None:
    """Plain transformers loads the folders, which hold the bits of the models in several files."""
    for name, make in EXPORTED.items():
        want = make()
        auto = AutoModelForCausalLM if name == "tied" else AutoModelForSequenceClassification
        got, info = auto.from_pretrained(folder / name, dtype=DTYPE[name], output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        for key, weight in want.to(DTYPE[name]).state_dict().items():
            assert torch.equal(got.state_dict()[key], weight), f"{name}: {key}"
        assert len(list((folder / name).glob("model-*.safetensors"))) > 1
    for name in ("llama", "mixtral", "adapted"):
        assert verify(folder / name, device="cpu").equal


@pytest.mark.slow
def test_any_number_of_processes_goes_on_from_what_any_other_has_saved(
    run_processes: Callable[..., list[Any]], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    for kind in KINDS:
        saved(tmp_path / f"{kind}_1", kind, alone=True)
    for number, writers in {2: [1], 4: [1, 2]}.items():
        for found in run_processes("test_checkpoints:go_on", number, str(tmp_path), writers):
            files = ["step_1", "step_2"]
            assert found.pop("store") == [[1] * number, [2] * number, 2, files]
            assert all(found.values()), found
        assert_exported(tmp_path / f"exported_{number}")
        assert all(resumed(tmp_path / f"{kind}_{number}", kind, alone=True) for kind in KINDS)
