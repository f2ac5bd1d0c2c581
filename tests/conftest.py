"""What tests share: where the real data lies, a tiny tokenizer, a tiny run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# a test that reached for the hub would hang where there is none
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported. Some tests compare bits, which the order of sums of several threads
# changes; and tiny models gain nothing from more of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing is timed: a busy machine must not fail a property.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# as in the background of a script; treeward then ignores it too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

WORDS = (
    "sun",
    "moon",
    "rain",
    "wind",
    "snow",
    "leaf",
    "root",
    "seed",
    "tree",
    "bark",
    "moss",
    "fern",
    "bird",
    "nest",
)
REPOSITORY = Path(__file__).parent.parent
STAND_INS = REPOSITORY / "tests" / "stand_ins"
# helpers that tests share lie beside this file: families.py
sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl
def pytest_runtest_call() -> None:
    """pytest listens to all loggers that do not propagate; where someone listens, torch records
    each compilation."""
    logging.getLogger("torch.__trace").handlers.clear()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real comparisons, which are never part of the repository; the test is skipped where they are
    not."""
    folder = Path(os.environ.get("TREEWARD_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the shared data folder is not here (TREEWARD_SHARED_DATA names it)")
    return folder


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """One Ray session with two CPUs for all tests of a process."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        with pytest.MonkeyPatch.context() as at_start:
            # For Ray's workers alone: a program that a later test starts must not find the stand-in
            # for vLLM.
            at_start.setenv("PYTHONPATH", f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}")
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 * 2**20,
            )
        yield ray
        ray.shutdown()


@pytest.fixture
def vllm_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in for the package, in this process."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def vllm(ray: Any, vllm_package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, also in Ray's workers and in processes that a test starts."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE of 600 tokens trained on the bundled data, with the default chat
    template."""
    from treeward.config.data import DatasetConfig
    from treeward.data.datasets import open_dataset
    from treeward.data.tokenizers import texts_of, train_tokenizer

    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="validation"))
    return train_tokenizer(texts_of([stream]), vocab_size=600)


@pytest.fixture(scope="session")
def signed_model(
    tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`signed_model(seed=3, max_length=96)`: the folder of a small exported reward model with its
    scoring contract.

    Each is made once in a session (a second or two) and shared: read it, score with it, serve it,
    and copy it with `shutil.copytree` before a change. It is a llama with random weights and
    `tiny_tokenizer`.
    """
    from functools import cache

    from signed import write_signed_model

    @cache
    def make(seed: int, max_length: int) -> Path:
        folder = tmp_path_factory.mktemp(f"reward-model-{seed}-{max_length}")
        return write_signed_model(folder, tiny_tokenizer, seed=seed, max_length=max_length)

    return lambda seed=3, max_length=96: make(seed, max_length)


@pytest.fixture(scope="session")
def model_folder(signed_model: Callable[..., Path]) -> Path:
    """The folder of an exported reward model that reads 96 tokens, shared: copy it before a
    change."""
    return signed_model()


@pytest.fixture(scope="session")
def spread_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model whose scores have a spread by a Laplace approximation, shared:
    copy it before a change."""
    from families import tiny_model
    from signed import add_spread, signed

    folder = tmp_path_factory.mktemp("spread") / "model"
    signed(folder, tiny_tokenizer, tiny_model("llama"), max_length=256)
    add_spread(folder)
    return folder


@pytest.fixture(scope="session")
def policy_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small causal language model (a llama of 256 positions), shared: copy it
    before a change."""
    from families import causal_model

    folder = tmp_path_factory.mktemp("policy")
    vocabulary = len(tiny_tokenizer)
    end = tiny_tokenizer.eos_token_id
    causal_model(
        "llama", vocab_size=vocabulary, eos_token_id=end, max_position_embeddings=256
    ).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def own_policy_folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of it for one test, to write into."""
    return Path(shutil.copytree(policy_folder, tmp_path / "judge"))


@pytest.fixture(scope="session")
def real_chats() -> list[Any]:
    """Preferences of short real conversations: some of the bundled data and, where they are, some
    of HH harmless."""
    from itertools import islice

    from treeward.config.data import DatasetConfig
    from treeward.data.datasets import open_dataset

    configs = [DatasetConfig(dataset_name="Bundled", split="validation")]
    hh = (
        Path(os.environ.get("TREEWARD_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
        / "hh_harmless"
    )
    if hh.is_dir():
        configs.append(
            DatasetConfig(dataset_name="HHTranscripts", data_path=str(hh / "validation.jsonl.gz"))
        )
    chats = []
    for config in configs:
        preferences = (preference for preference, _ in open_dataset(config))
        short = (p for p in preferences if sum(len(str(m["content"])) for m in p.context) < 400)
        chats += list(islice(short, 5))
    return chats


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Callable[..., Any]]:
    """Gives, for a folder, a function that makes the configuration of a run of seconds in it, with
    overrides.

    All of them share the folder of encoded data.
    """
    from treeward.config.load import load_config

    cache = tmp_path_factory.mktemp("cache")

    def of(folder: Path) -> Callable[..., Any]:
        def make(*overrides: str) -> Any:
            file = folder / "run.yaml"
            file.write_text(TINY_RUN.format(folder=folder, cache=cache), encoding="utf-8")
            return load_config(file, overrides)

        return make

    return of


@pytest.fixture
def tiny_run(tiny_runs: Callable[[Path], Callable[..., Any]], tmp_path: Path) -> Callable[..., Any]:
    """A function that makes the configuration of a run of seconds in `tmp_path`; overrides as on
    the command line."""
    return tiny_runs(tmp_path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; of a module, not of the session: while it lives, its event loop runs in
    this thread."""
    from chromium import chromium

    with chromium() as running:
        yield running


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Iterable[Any]], Path]:
    """Write rows as JSON lines; a row that is text is written as it is."""

    def write(name: str, rows: Iterable[Any]) -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[[str, Iterable[Any]], str]:
    """Write rows of `PromptDataset`; a text is a prompt."""

    from messages import write_jsonl

    def write(name: str, rows: Iterable[Any]) -> str:
        return write_jsonl(
            tmp_path / name, *({"prompt": row} if isinstance(row, str) else row for row in rows)
        )

    return write


@pytest.fixture
def tiny_grpo(
    tmp_path: Path, write_prompts: Callable[[str, Iterable[Any]], str]
) -> Callable[..., Any]:
    """A function that makes the configuration of a run of seconds in `tmp_path`; overrides as on
    the command line."""
    from treeward.config.load import load_grpo_config

    write_prompts(
        "train.jsonl", [f"Say {first} and {second}." for first in WORDS for second in WORDS[:3]]
    )
    write_prompts("held_out.jsonl", [f"Sing of {word}." for word in WORDS])

    def make(*overrides: str) -> Any:
        file = tmp_path / "run.yaml"
        file.write_text(TINY_GRPO.format(folder=tmp_path), encoding="utf-8")
        return load_grpo_config(file, overrides)

    return make


TINY_RUN = """
rm: {{max_num_steps: 6, val_period: 2, val_batches: 2, val_global_batch_size: 8, seed: 7}}
policy:
  model_config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 512}}
  tokenizer: {{vocab_size: 600}}
  train_global_batch_size: 8
  train_micro_batch_tokens: 512
  max_total_sequence_length: 512
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-3}}}}
data:
  train: {{dataset_name: Bundled, split: validation}}
  validation:
    - {{dataset_name: Bundled, split: length_controlled, name: held_out}}
  cache_dir: {cache}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, save_period: 2, keep_top_k: 2,
                metric_name: "val:validation-held_out_accuracy"}}
logger: {{log_dir: {folder}/logs}}
"""
TINY_GRPO = """
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 9, max_num_steps: 6, val_period: 2,
       max_val_samples: 6, seed: 7}}
loss_fn: {{reference_policy_kl_penalty: 0.01}}
policy:
  model_config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}}
  tokenizer: {{vocab_size: 300}}
  train_micro_batch_tokens: 256
  max_total_sequence_length: 96
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-2}}}}
  scheduler: {{name: constant, warmup_steps: 0}}
  generation: {{max_new_tokens: 8}}
data:
  train: {{dataset_name: PromptDataset, data_path: {folder}/train.jsonl}}
  validation: {{dataset_name: PromptDataset, data_path: {folder}/held_out.jsonl}}
env: {{planted: {{type: custom, function: planted.vowels}}}}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, save_period: 2, keep_top_k: 2, metric_name: "val:reward"}}
logger: {{log_dir: {folder}/logs}}
"""
