"""`VllmEngine` around the real `LLM` class, in vLLM's own environment; weights travel by files, as
NCCL needs GPUs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
from treeward.config.grpo_policy import GenerationConfig
from treeward.rl.served_generation import CompletionRequest
from treeward.rl.vllm_engine import VllmEngine, engine_options, sampling_parameters

def main():
    first, moved = map(Path, sys.argv[1:])
    config = GenerationConfig.model_validate({"backend": "vllm", "temperature": 0.7, "max_new_tokens": 8})
    options = engine_options(config, max_model_len=256, dtype="float32")
    # no GPU: no sleep, a graph is not captured, and the weights come from the folder
    options |= {"enable_sleep_mode": False, "enforce_eager": True, "load_format": "auto"}
    engine = VllmEngine()
    engine.start({path.name: path.read_bytes() for path in first.iterdir()}, "nccl", options)
    request = CompletionRequest([504, 6330, 314], 3, 8, 11, "the test")
    rows = []
    for folder in (None, moved):
        if folder is not None:
            engine.call("collective_rpc", "reload_weights", None, (), {"weights_path": str(folder)})
            engine.call("reset_prefix_cache", True)
        parameters = sampling_parameters(request, config, [2], log_probs=True)
        rows += engine.generate([request.prompt_ids], [parameters])
    print("ROWS", json.dumps(rows))

if __name__ == "__main__":
    main()
"""


def test_its_log_probabilities_are_the_policys(
    binaries: Path, untied: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from treeward.model.policy_model import PolicyModel

    policies = [
        PolicyModel(AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32).eval())
        for _ in range(2)
    ]
    with torch.no_grad():
        for weight in policies[1].hf.parameters():
            weight.mul_(1.02)
    policies[1].hf.save_pretrained(tmp_path / "moved")
    (tmp_path / "engine.py").write_text(SCRIPT, "utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(binaries / "python"), "engine.py", str(untied), str(tmp_path / "moved")]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    line = next(line for line in ran.stdout.splitlines() if line.startswith("ROWS "))
    for policy, completions in zip(policies, json.loads(line.removeprefix("ROWS ")), strict=True):
        assert len(completions) == 3
        for completion in completions:
            sequence = [504, 6330, 314, *completion["token_ids"]]
            with torch.no_grad():
                values = policy.log_probs([[sequence]], [[3]], temperature=0.7).values_SL[0]
            assert completion["log_probs"] == pytest.approx(values.tolist(), abs=1e-3)
