"""SmolLM2 behind a real vLLM, as the sampler of GRPO and as a judge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from messages import chat, read_jsonl, write_jsonl

from treeward.config.load import load_grpo_config
from treeward.environments.judge import JudgeEnvironment
from treeward.errors import ModelError
from treeward.rl.generation import GenerationError
from treeward.rl.grpo import grpo

pytestmark = pytest.mark.vllm

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
RUN = """
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 2, val_period: 0, val_at_end: false}}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  train_global_batch_size: 8
  max_total_sequence_length: 128
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-4}}}}
  generation: {{backend: vllm, url: {url}, model: model, weight_folder: {folder}/weights, max_new_tokens: 16,
                max_retries: 1, timeout_seconds: 120}}
data: {{train: {{dataset_name: PromptDataset, data_path: {folder}/prompts.jsonl}}}}
env: {{brief: {{type: rules, rule: regex, pattern: "[Aa]"}}}}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, metric_name: null, save_period: 10}}
logger: {{log_dir: {folder}/logs}}
"""


def config(folder: Path, model: Path, url: str, *overrides: str) -> Any:
    write_jsonl(folder / "prompts.jsonl", *({"prompt": f"Name a river. {n}"} for n in range(8)))
    file = folder / "grpo.yaml"
    file.write_text(RUN.format(model=model, url=url, folder=folder), "utf-8")
    return load_grpo_config(file, overrides)


def test_a_run_learns_from_its_completions_until_the_server_dies(
    vllm_serve: Callable[..., Any], untied: Path, tmp_path: Path
) -> None:
    with vllm_serve(untied, *OPTIONS) as (url, process):
        outcome = grpo(config(tmp_path, untied, url), show_progress=False)
        assert outcome.step == 2
        lines = read_jsonl(tmp_path / "logs" / "metrics.jsonl")
        errors = [
            line["train/token_mult_prob_error"]
            for line in lines
            if "train/token_mult_prob_error" in line
        ]
        # the second from the weights that the first step made
        assert errors == pytest.approx([1.0, 1.0], abs=1e-3)
        again = tmp_path / "again"
        again.mkdir()
        run = config(again, untied, url, "grpo.max_num_steps=100", "checkpointing.save_period=1")

        def kill_after_the_first_step() -> None:
            while not list(again.glob("checkpoints/step_*")):
                time.sleep(0.1)
            process.kill()

        threading.Thread(target=kill_after_the_first_step, daemon=True).start()
        with pytest.raises(
            GenerationError, match="(?s)generator has failed|no response|cannot be reached"
        ):
            grpo(run, show_progress=False)
        # the same command goes on from it
        assert process.wait() != 0 and list(again.glob("checkpoints/step_*/model"))


def test_the_stale_head_of_a_tied_model_ends_the_run(
    vllm_serve: Callable[..., Any], smollm2: Path, tmp_path: Path
) -> None:
    """On a CPU vLLM packs the output head when it starts, and keeps it when it loads weights."""
    with vllm_serve(smollm2, *OPTIONS) as (url, _):
        run = config(tmp_path, smollm2, url)
        with pytest.raises(GenerationError, match="log-probabilities are not those of the policy"):
            grpo(run, show_progress=False)


@pytest.fixture(scope="module")
def judging(vllm_serve: Callable[..., Any], smollm2: Path) -> Iterator[str]:
    with vllm_serve(smollm2, "--dtype", "float32", "--max-model-len", "1024") as (url, _):
        yield url


LOGS = [chat("What is 2 + 2?", text) for text in ("4", "It is five.", "Four.", "I do not know.")]
STRUCTURED = {"structured_outputs": {"regex": r"Rating: \[\[[1-9]\]\]"}}


def judge(url: str, **keys: Any) -> JudgeEnvironment:
    return JudgeEnvironment(
        {"base_url": f"{url}/v1", "model": "model", "api_key_env": None, **keys}
    )


def test_a_judge_by_structured_output(judging: str) -> None:
    environment = judge(judging, extra_body=STRUCTURED, use_logprobs=True)
    rewards = environment.reward(LOGS, [{}] * 4)
    assert all(reward.value is not None for reward in rewards), rewards
    assert all(reward.components["judge/label_mass"] > 0.5 for reward in rewards)
    assert environment.cost.num_requests == 4 and environment.cost.num_prompt_tokens > 400
    assert all(str(reward.score.judgement).startswith("Rating: [[") for reward in rewards)
    pairs = judge(
        judging,
        mode="pairwise",
        extra_body={"structured_outputs": {"choice": ["[[A]]", "[[B]]", "[[C]]"]}},
    )
    assert all(reward.value is not None for reward in pairs.reward(LOGS, [{}] * 4))


def test_a_judge_that_is_too_small_is_told_at_once(judging: str) -> None:
    environment = judge(judging, max_tokens=24)
    with pytest.raises(ModelError, match="its first 4 questions(?s:.*)structured_outputs"):
        environment.reward(LOGS * 4, [{}] * 16)
    assert environment.cost.num_requests == 4


def test_a_conversation_that_is_too_long_costs_its_sample(judging: str) -> None:
    logs = [LOGS[0], chat("What is 2 + 2?", "word " * 2000)]
    first, second = judge(judging, extra_body=STRUCTURED).reward(logs, [{}] * 2)
    assert first.value is not None
    assert second.value is None and "maximum context length" in str(second.error)
