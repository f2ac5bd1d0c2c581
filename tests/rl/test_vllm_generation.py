"""Engines of vLLM in Ray actors: the package is a stand-in that samples from a small model with the
weights it got."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import ENDS, IDS, PROMPTS, assert_sampled_from, moved

from treeward.config.grpo_policy import GenerationConfig
from treeward.config.policy import LoraConfig
from treeward.errors import ConfigError
from treeward.model.lora import add_adapters
from treeward.model.policy_model import PolicyModel
from treeward.rl import vllm_generation
from treeward.rl.generation import CompletionGroup, GenerationError
from treeward.rl.served_generation import CompletionRequest
from treeward.rl.vllm_generation import VllmGenerator

Make = Callable[..., VllmGenerator]


@pytest.fixture
def make(policy: PolicyModel, tiny_tokenizer: Any, vllm: None) -> Iterator[Make]:
    """Starts engines of a policy with keys of `policy.generation`."""
    made: list[VllmGenerator] = []

    def start(policy: PolicyModel = policy, **keys: Any) -> VllmGenerator:
        keys["vllm_cfg"] = {"precision": "float32", **keys.pop("vllm_cfg", {})}
        section = GenerationConfig.model_validate({"backend": "vllm", "max_new_tokens": 6, **keys})
        assert section.starts_engines
        made.append(
            VllmGenerator(policy, tiny_tokenizer, section, max_total_tokens=64, end_ids=ENDS)
        )
        return made[-1]

    yield start
    for generator in made:
        generator.close()


def sampled(generator: VllmGenerator, seed: int = 1) -> list[CompletionGroup]:
    return generator.generate(PROMPTS, IDS, num_completions=4, seed=seed)


@pytest.mark.slow
def test_a_colocated_engine_samples_from_the_weights_that_it_was_handed(
    make: Make, policy: PolicyModel
) -> None:
    """Also those of adapters, merged; and no longer than it can."""
    adapted = copy.deepcopy(policy)
    add_adapters(adapted, LoraConfig(enabled=True, dim=4), seed=1)
    with torch.no_grad():
        for name, parameter in adapted.hf.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    generator = make(
        temperature=0.7, probe_tolerance=1e-3, max_new_tokens=24, vllm_cfg={"max_model_len": 28}
    )
    for version, weights in enumerate([policy, moved(policy, 0.1), adapted]):
        generator.load_weights(weights, version)
        groups = sampled(generator)
        assert_sampled_from(weights, groups, temperature=0.7)
        assert sampled(generator) == groups and sampled(generator, seed=2) != groups
    some = generator.generate(PROMPTS[1:], IDS[1:], num_completions=3, seed=1)
    assert [len(group.completions) for group in some] == [3, 3]


@pytest.mark.slow
def test_engines_of_their_own(make: Make, policy: PolicyModel, ray: Any) -> None:
    keys: dict[str, Any] = {
        "colocated": {"enabled": False, "resources": {"gpus_per_node": 4}},
        "top_p": 0.95,
    }
    keys["vllm_cfg"] = {"tensor_parallel_size": 2, "precision": None}  # bfloat16
    generator = make(**keys, timeout_seconds=60)
    for version, weights in enumerate([policy, moved(policy, 0.1)]):
        generator.load_weights(weights, version)
        assert_sampled_from(weights, sampled(generator), atol=0.3)
    ray.kill(generator.engines[1])
    with pytest.raises(
        GenerationError, match=r"an engine of vLLM has failed(?s:.*)from the last checkpoint"
    ):
        sampled(generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"colocated": {"enabled": False, "resources": {"gpus_per_node": 8}}},
            "the Ray cluster is too small for vLLM",
        ),
        ({"vllm_cfg": {"tensor_parallel_size": 2}}, "a divisor of 1, the processes that train"),
    ],
)
def test_engines_without_room_are_refused(make: Make, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"vllm_cfg": {"gpu_memory_utilization": 0.96}},
            r"start: Free memory on device is less(?s:.*)gpu_memory_utilization",
        ),
        (
            {"vllm_kwargs": {"max_model_len": 99999}},
            r"start: Value error, User-specified max_model_len \(99999\)",
        ),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    make: Make, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        make(**keys)


@pytest.mark.slow
def test_weights_that_arrived_in_part_stop_the_run(make: Make, policy: PolicyModel) -> None:
    message = r"not those of the policy(?s:.*)version 1(?s:.*)at most 0.001"
    generator = make(vllm_kwargs={"keeps_head": True})
    generator.load_weights(policy, 0)
    with pytest.raises(GenerationError, match=message):
        generator.load_weights(moved(policy, 0.002), 1)


@pytest.mark.slow
def test_other_weights_than_the_policys_stop_the_run(
    make: Make, policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make()
    exported = vllm_generation.exported_weights
    other = moved(policy, 0.5)
    monkeypatch.setattr(
        vllm_generation, "exported_weights", lambda policy, dtype: exported(other, dtype)
    )
    with pytest.raises(GenerationError, match="not those of the policy"):
        generator.load_weights(policy, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loses_one", "0 completions instead of 1"),
        ("holds_blocks", r"reset_prefix_cache: .*refuses"),
    ],
)
def test_an_engine_that_does_not_do_its_work_stops_the_run(
    make: Make, policy: PolicyModel, fault: str, message: str
) -> None:
    generator = make(vllm_kwargs={fault: True})
    with pytest.raises(GenerationError, match=message):
        generator.load_weights(policy, 0)


@pytest.mark.slow
def test_an_engine_that_hangs_stops_the_run(
    make: Make, policy: PolicyModel, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    generator = make(vllm_kwargs={"hang_while": str(hang)})
    generator.load_weights(policy, 0)
    hang.touch()
    generator.config = generator.config.model_copy(update={"timeout_seconds": 1.0})
    request = CompletionRequest(IDS[0], 1, 4, 0, "a test")
    with pytest.raises(GenerationError, match=r"failed(?s:.*)timed out(?s:.*)timeout_seconds"):
        generator.ask([request], generator.config, log_probs=True)
