"""The three walks of docs/architecture.md, traced live: every file of the package in which a
function runs.

    python docs/walks.py            # prints the files of each walk

Models are small and random, and what a walk needs is made before it is traced: models, files,
threads.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.testclient import TestClient

import treeward
from treeward.config.load import load_config, load_grpo_config, load_section
from treeward.config.server import ServerConfig
from treeward.data.datasets import open_dataset
from treeward.data.encoding import Rules, encode_rows
from treeward.losses import RewardSums
from treeward.rl import setup as rl_setup
from treeward.rl.grpo import GRPORun
from treeward.serving.app import create_app
from treeward.serving.service import Service
from treeward.training import setup as training_setup
from treeward.training.prefetch import BatchPreparer
from treeward.training.train import RewardModelRun, train

_PACKAGE = Path(treeward.__file__).parent
_MODEL = """model_config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 512}"""
_TRAIN = """
rm: {{max_num_steps: 2, val_period: 0}}
policy: {{{model}, tokenizer: {{vocab_size: 600}}, train_global_batch_size: 4, max_total_sequence_length: 512}}
data: {{train: {{dataset_name: PreferenceDataset, data_path: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
checkpointing: {{checkpoint_dir: {folder}/rm}}
"""
_GRPO = """
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 2, val_period: 0}}
policy: {{{model}, tokenizer: {{vocab_size: 600}}, train_global_batch_size: 8, max_total_sequence_length: 64,
         generation: {{max_new_tokens: 8}}}}
data: {{train: {{dataset_name: PromptDataset, data_path: {folder}/prompts.jsonl}}}}
env: {{even: {{type: rules, rule: regex, pattern: "[02468]"}}}}
checkpointing: {{enabled: false, checkpoint_dir: {folder}/grpo}}
"""
_ROW = """{{"context": [{{"role": "user", "content": "What is {0} + {0}?"}}], "completions": [
{{"rank": 0, "completion": [{{"role": "assistant", "content": "It is {1}."}}]}},
{{"rank": 1, "completion": [{{"role": "assistant", "content": "I do not know."}}]}}]}}"""


class Walk:
    """Records, while `is_on`, the files of the package in which a function is called, in any
    thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: dict[str, None] = {}
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Record what runs in this context."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def taken(self) -> list[str]:
        """The files since the last call, in the order in which they were entered."""
        files, self.files = list(self.files), {}
        return files

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if _PACKAGE in path.parents:
                self.files[str(path.relative_to(_PACKAGE))] = None


def walks() -> dict[str, list[str]]:
    """The files of each walk."""
    walk = Walk()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            rows = [_ROW.format(n, 2 * n).replace("\n", "") for n in range(8)]
            (folder / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows), "utf-8")
            prompts = [f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(8)]
            (folder / "prompts.jsonl").write_text("".join(prompts), "utf-8")
            return {
                "A row becomes a gradient": _row(walk, folder),
                "A request becomes a score": _request(walk, folder),
                "A prompt becomes an update": _prompt(walk, folder),
            }
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _row(walk: Walk, folder: Path) -> list[str]:
    file = folder / "rm.yaml"
    file.write_text(_TRAIN.format(model=_MODEL, folder=folder), "utf-8")
    config = load_config(file)
    # the model of the other walks
    assert train(config, show_progress=False).model_folder is not None
    setup = training_setup.set_up(config)
    run, preparer, [encoded] = (
        RewardModelRun(setup),
        BatchPreparer(setup),
        setup.training_sets.values(),
    )
    dataset = open_dataset(config.data.train[0])
    with walk.traced():
        row = next(iter(dataset))
        assert list(encode_rows([row], setup.renderer, Rules("drop")))
        micro_batch = preparer.micro_batch([encoded[0]])
        run.backward(micro_batch, micro_batch.labels.num_units, RewardSums())
    run.close()
    return walk.taken()


def _request(walk: Walk, folder: Path) -> list[str]:

    model = {"model": str(folder / "rm" / "final"), "device": "cpu"}
    service = Service.load(load_section(ServerConfig, {"models": [model]}, where="server"))
    chat = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ]
    with TestClient(create_app(service), base_url="http://localhost") as client:
        assert client.get(
            "/health"
        ).is_success  # the stack of the application is built at the first request
        with walk.traced():
            assert client.post("/classify", json={"messages": chat}).is_success
    service.close()
    return walk.taken()


def _prompt(walk: Walk, folder: Path) -> list[str]:
    file = folder / "grpo.yaml"
    file.write_text(_GRPO.format(model=_MODEL, folder=folder), "utf-8")
    run = GRPORun(rl_setup.set_up_grpo(load_grpo_config(file)))
    with walk.traced():
        run.step(1)
    run.close()
    return walk.taken()


if __name__ == "__main__":
    for title, files in walks().items():
        sys.stdout.write(f"{title}: {len(files)} files\n")
        sys.stdout.writelines(f"    {path}\n" for path in files)
