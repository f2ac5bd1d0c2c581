"""What tests/e2e/test_trainer_clients.py runs with the packages of verl and OpenRLHF.

    trainer_clients.py TRAINER JOB OUTPUT

`JOB` is a JSON file with `url`, `model` and `conversations`, of which the last message is the
completion. It writes another: for each of the trainer's ways to ask, the rewards in the order of
the conversations.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

SOURCE = "reward.custom_reward_function"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "verl_over_http.py"
VERL_MANAGERS = ("naive", "batch", "prime")


def verl_rewards(job: dict[str, Any]) -> dict[str, Any]:
    """verl's `RewardLoopWorker`, with its own reward model at our server, and with our
    functions."""
    address = job["url"].removeprefix("http://")
    rewards: dict[str, Any] = {}
    for engine in ("vllm", "sglang"):
        own_model = [
            "reward.reward_model.enable=true",
            f"reward.reward_model.rollout.name={engine}",
        ]
        own_model += [f"reward.reward_model.model_path={job['model']}"]
        rewards[engine] = worker_rewards(job, own_model, router=address)
    for function in ("compute_score", "compute_score_async"):
        ours = [f"{SOURCE}.path=pkg://treeward.environments.verl", f"{SOURCE}.name={function}"]
        ours += [f"+{SOURCE}.reward_kwargs.model={job['url']}", "reward.reward_manager.name=naive"]
        rewards[function] = worker_rewards(job, ours)
    example = [f"{SOURCE}.path={EXAMPLE}", f"{SOURCE}.name=compute_score"]
    example += [f"+{SOURCE}.reward_kwargs.url={job['url']}", "reward.reward_manager.name=naive"]
    rewards["over_http"] = worker_rewards(job, example)
    managers = [name for name in VERL_MANAGERS if is_manager(name)]
    return {**rewards, "known_managers": managers, "too_long": refusal_over_http(job["url"])}


def refusal_over_http(url: str) -> str:
    """What the example says of a completion that the model cannot read."""
    function = runpy.run_path(str(EXAMPLE))["compute_score"]
    prompt = [{"role": "user", "content": "Hi"}]
    try:
        asyncio.run(function("test", "word " * 9000, "", {"prompt": prompt}, url=url))
    except RuntimeError as error:
        return str(error)
    return "it was scored"


def worker_rewards(
    job: dict[str, Any], overrides: list[str], *, router: str | None = None
) -> list[float]:
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    worker = RewardLoopWorker(verl_config(job["model"], overrides), router)
    data = verl_batch(worker.input_tokenizer, job["conversations"])
    outputs = worker.loop.run_until_complete(worker.compute_score_batch(data))
    return [output["reward_score"] for output in outputs]


def verl_config(model: str, overrides: list[str]) -> Any:
    """verl's own configuration with overrides, as its command line has it."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(
            "ppo_trainer", overrides=[f"actor_rollout_ref.model.path={model}", *overrides]
        )


def verl_batch(tokenizer: Any, conversations: list[Any]) -> Any:
    """The rollouts as verl's agent loop gives them: completions that end with EOS, padded on the
    right."""
    from verl import DataProto

    completions = []
    for conversation in conversations:
        ids = tokenizer.encode(conversation[-1]["content"], add_special_tokens=False)
        completions.append(torch.tensor([*ids, tokenizer.eos_token_id]))
    masks = [torch.ones_like(ids) for ids in completions]
    tensors = {
        "responses": torch.nn.utils.rnn.pad_sequence(completions, True, tokenizer.pad_token_id),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, True, 0),
    }
    prompts = [conversation[:-1] for conversation in conversations]
    columns = {
        "raw_prompt": prompts,
        "data_source": ["test"] * len(prompts),
        "reward_model": [{"ground_truth": "4"} for _ in prompts],
        "extra_info": [{"prompt": prompt} for prompt in prompts],
    }
    return DataProto.from_dict(tensors, {name: objects(values) for name, values in columns.items()})


def objects(values: list[Any]) -> Any:
    """An array of objects: numpy would make a table of lists of equal length."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def is_manager(name: str) -> bool:
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    try:
        get_reward_manager_cls(name)
    except ValueError:
        return False
    return True


def openrlhf_rewards(job: dict[str, Any]) -> dict[str, Any]:
    """OpenRLHF's executor with `--reward.remote_url`; its engine has the completions ready."""
    agent = openrlhf_module("agent")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    executor = agent.SingleTurnAgentExecutor([f"{job['url']}/get_reward"])

    async def run() -> list[Any]:
        return [await executor.execute(*rollout(tokenizer, c)) for c in job["conversations"]]

    outputs = asyncio.run(run())
    rewards = [output["reward"][0] for output in outputs]
    scores = [output["scores"][0] for output in outputs]
    return {"reward": rewards, "scores": scores}


def openrlhf_module(name: str) -> Any:
    """A module of `openrlhf.utils` without the folder's `__init__`, which imports DeepSpeed; the
    module is as it is."""
    import openrlhf

    package = types.ModuleType("openrlhf.utils")
    package.__path__ = [str(Path(openrlhf.__file__).parent / "utils")]
    sys.modules["openrlhf.utils"] = package
    return importlib.import_module(f"openrlhf.utils.{name}")


def rollout(tokenizer: Any, conversation: list[Any]) -> tuple[Any, ...]:
    """The arguments of `execute` for one prompt, in their order."""
    prompt = tokenizer.apply_chat_template(
        conversation[:-1], tokenize=False, add_generation_prompt=True
    )
    completion = tokenizer.encode(conversation[-1]["content"], add_special_tokens=False)
    engine = ReadyEngine([*completion, tokenizer.eos_token_id])
    sampling = types.SimpleNamespace(max_tokens=64, logprobs=None)
    return prompt, "4", sampling, 4096, tokenizer, engine


class ReadyEngine:
    """The policy's engine, which has sampled already."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    async def generate(self, prompt: list[int], sampling: Any, *, multi_modal_data: Any) -> Any:
        output = types.SimpleNamespace(
            token_ids=self.token_ids, finish_reason="stop", logprobs=None
        )
        return types.SimpleNamespace(outputs=[output])


if __name__ == "__main__":
    _, trainer, job_file, output_file = sys.argv
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    rewards = verl_rewards(job) if trainer == "verl" else openrlhf_rewards(job)
    Path(output_file).write_text(json.dumps(rewards), encoding="utf-8")
