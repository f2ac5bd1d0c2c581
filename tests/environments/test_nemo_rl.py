"""NeMo RL makes and calls our environments as its own, and a sample without a reward does not spoil
its update.

NeMo RL is not installed with the tests. `create_env` and `rollout` below are written after its
`create_env`, and `calculate_rewards` with `run_multi_turn_rollout`: what they pass, what they
unpack, and where `total_reward` goes.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from treeward.environments import nemo_rl
from treeward.environments.nemo_rl import NemoRLEnvironment, fill_with_group_means
from treeward.errors import ConfigError, DataError, ModelError

RULES = {"type": "rules", "rule": "exact_match"}


def lengths(**own: Any) -> NemoRLEnvironment:
    return NemoRLEnvironment({"type": "environments.conftest.Lengths", "nemo_rl": own})


def log(completion: str, prompt: str = "Hi") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": prompt, "token_ids": torch.tensor([1, 2])},
        {
            "role": "assistant",
            "content": completion,
            "token_ids": torch.tensor([3]),
            "generation_logprobs": torch.zeros(1),
        },
    ]


@pytest.fixture
def nemo(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The three places of NeMo RL that know environments."""
    environments: Any = ModuleType("nemo_rl.environments.utils")
    environments.ENV_REGISTRY = {
        "reward_model": {"actor_class_fqn": "nemo_rl.x.Y", "default_processor": "p"}
    }
    actors: Any = ModuleType("nemo_rl.distributed.ray_actor_environment_registry")
    actors.ACTOR_ENVIRONMENT_REGISTRY = {}
    cluster: Any = ModuleType("nemo_rl.distributed.virtual_cluster")
    cluster.PY_EXECUTABLES = SimpleNamespace(SYSTEM=sys.executable)
    parents = [
        ModuleType(name) for name in ("nemo_rl", "nemo_rl.environments", "nemo_rl.distributed")
    ]
    for module in (*parents, environments, actors, cluster):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(
        environments=environments.ENV_REGISTRY, actors=actors.ACTOR_ENVIRONMENT_REGISTRY
    )


def create_env(nemo: SimpleNamespace, name: str, env_config: Mapping[str, Any]) -> Any:
    path = nemo.environments[name]["actor_class_fqn"]
    module, _, attribute = path.rpartition(".")
    actor_class = getattr(importlib.import_module(module), attribute)
    runtime_env = {"py_executable": nemo.actors[path], "env_vars": {"SET_BY_NEMO": "1"}}
    return actor_class.options(runtime_env=runtime_env).remote(env_config)


def rollout(ray: Any, batch: dict[str, Any], task_to_env: Mapping[str, Any]) -> dict[str, Any]:
    """One turn, after which every sample has ended; the batch with `total_reward` and the
    observations appended."""
    by_task: dict[str, list[int]] = {}
    for i, task in enumerate(batch["task_name"]):
        by_task.setdefault(task, []).append(i)
    total = torch.zeros(len(batch["task_name"]))
    for task, indices in by_task.items():
        messages = [
            [{k: m[k] for k in ("role", "content")} for m in batch["message_log"][i]]
            for i in indices
        ]
        infos = [batch["extra_env_info"][i] for i in indices]
        observations, metadata, stops, rewards, terminateds, answers = ray.get(
            task_to_env[task].step.remote(messages, infos)
        )
        assert len(metadata) == len(stops) == len(answers) == len(indices)
        assert terminateds.bool().all()
        total[indices] += torch.stack([rewards[i] for i in range(len(indices))])
        for observation, i in zip(observations, indices, strict=True):
            batch["message_log"][i].append(
                {"role": observation["role"], "content": observation["content"]}
            )
    return batch | {"total_reward": total}


@pytest.mark.slow
def test_nemo_rl_makes_it_and_calls_it(ray: Any, nemo: SimpleNamespace) -> None:
    nemo_rl.register()
    assert nemo.environments["reward_model"]["default_processor"] == "p"
    environment = create_env(nemo, "reward_model", RULES)
    try:
        batch = {
            "message_log": [log("4", "2 + 2?"), log("5", "2 + 2?"), log("6", "3 + 3?")],
            "task_name": ["math"] * 3,
            "extra_env_info": [{"ground_truth": "4"}, {"ground_truth": "4"}, {"ground_truth": "6"}],
        }
        done = rollout(ray, batch, {"math": environment})
        assert done["total_reward"].tolist() == [1.0, 0.0, 1.0]
        assert done["message_log"][0][-1] == {"role": "environment", "content": "\n"}
        _, metrics = ray.get(environment.global_post_process_and_metrics.remote(done))
        assert {key.split("/")[1]: value for key, value in metrics.items()} == {
            "num_samples": 3.0, "num_failed": 0.0, "mean_reward": pytest.approx(2 / 3),
            "min_reward": 0.0,
            "max_reward": 1.0, "std_reward": pytest.approx(math.sqrt(2) / 3),
        }  # fmt: skip
        with pytest.raises(ModelError, match="NeMo RL cannot leave one out(?s:.)*sample 1"):
            ray.get(environment.step.remote([log("4"), log("4")], [{"ground_truth": "4"}, {}]))
        assert ray.get(environment.shutdown.remote()) is True
    finally:
        ray.kill(environment)


def test_what_the_policys_template_wrote_around_a_message_is_taken_off(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """NeMo RL's `math_hf_data_processor` renders the user's message alone, with the generation
    prompt, into its content."""
    template = (
        "<s>Be brief.{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% if not quick %}<think>"
        "{% endif %}{% endif %}"
    )
    tiny_tokenizer.save_pretrained(tmp_path / "policy")
    section = {"name": str(tmp_path / "policy"), "chat_template": template}
    file = tmp_path / "own.py"
    file.write_text(
        "def prompt_of(prompt, response):\n"
        "    return {'reward': 1.0, 'is_plain': float(prompt == 'How [far]?')}\n",
        encoding="utf-8",
    )
    keys = {"type": "custom", "function": f"{file}:prompt_of"}
    own = {"policy_tokenizer": section | {"chat_template_kwargs": {"quick": True}}}
    environment = NemoRLEnvironment({**keys, "nemo_rl": own})
    rendered = "<s>Be brief.[user]How [far]?[assistant]"
    step = environment.step([log("Ten.", rendered)], [{}])
    assert step.metadata[0]["reward_details"]["components"] == {"is_plain": 1.0}
    with pytest.raises(DataError, match="not as the policy's chat template renders it"):
        environment.step([log("Ten.", "How [far]?")], [{}])


@pytest.mark.parametrize(("kind", "is_warned"), [("custom", True), ("rules", False)])
def test_without_the_policys_tokenizer_environments_that_read_prompts_warn(
    kind: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"custom": {"function": "trl.rewards:think_format_reward"}, "rules": RULES}
    NemoRLEnvironment({"type": kind, **sections[kind]})
    assert ("policy_tokenizer" in caplog.text) == is_warned


def test_a_failed_sample_has_the_mean_of_its_group_and_so_no_advantage() -> None:
    completions = [("x" * 3, "a"), ("fail", "b"), ("x" * 7, "a"), ("fail", "a"), ("xx", "b")]
    environment = lengths(failed_samples="group_mean")
    step = environment.step(
        [log(completion, prompt) for completion, prompt in completions], [{}] * 5
    )
    assert step.rewards.tolist() == [3.0, 2.0, 7.0, 5.0, 2.0]
    nan = math.nan
    rewards = torch.tensor([1.0, nan, 3.0, 10.0, nan, nan, nan, 7.0])
    filled = fill_with_group_means(rewards, ["a", "a", "a", "b", "b", "c", None, None])
    assert filled[:5].tolist() == [1.0, 2.0, 3.0, 10.0, 10.0] and filled[7] == 7.0
    assert filled[5:7].isnan().all()  # neither has a group with a reward
    assert rewards.isnan().sum() == 4  # what was given is as it was
    assert fill_with_group_means(torch.tensor([nan]), ["a"]).isnan().all()
    assert fill_with_group_means(torch.zeros(0), []).shape == (0,)


def test_sections_as_nemo_rl_has_them() -> None:
    with pytest.raises(
        ModelError, match=r"1 of 2 samples(?s:.)*sample 1: it says fail(?s:.)*group_mean"
    ):
        lengths().step([log("four"), log("fail")], [{}, {}])
    assert NemoRLEnvironment(RULES | {"enabled": True}).name == "rules_env"
    with pytest.raises(ConfigError, match="a key is missing") as caught:
        NemoRLEnvironment({"batch_size": 8})
    assert caught.value.field == "models"
