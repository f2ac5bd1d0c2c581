"""NeMo RL's GRPO with the rewards of `treeward serve`. treeward need not be in NeMo RL's Python.

Copy this file into the folder of NeMo RL's repository, and run it there in place of
`examples/run_grpo.py`. Its options are the same. docs/nemo_rl.md has the commands.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import requests
import torch
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env

PROBE = "Quo vadis?"  # words that no chat template writes by itself


class TreewardRewards(EnvironmentInterface):  # type: ignore[misc]
    """Rewards from a server, for the section `env.treeward`:

    - `url`: the server's address.
    - `policy_tokenizer`: the policy's tokenizer, as `${policy.tokenizer}`. NeMo RL's processors
      write a user's message as the policy's chat template renders it, and this takes it off again.
      null: messages are sent as they come. The key is asked for, because a rendered message would
      get a reward too, and another one.
    - `token_env`: the environment variable with the server's token, if it asks for one.

    A completion without a reward is an error: NeMo RL would put its NaN into the baseline of its
    group.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.url = f"{config['url'].rstrip('/')}/v1/rewards"
        self.headers = {}
        if config.get("token_env"):
            self.headers = {"authorization": f"Bearer {os.environ[config['token_env']]}"}
        self.before = self.after = ""
        if config["policy_tokenizer"] is not None:
            rendered = get_tokenizer(config["policy_tokenizer"]).apply_chat_template(
                [{"role": "user", "content": PROBE}], tokenize=False, add_generation_prompt=True
            )
            self.before, _, self.after = rendered.partition(PROBE)

    def step(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]], env_infos: Sequence[Any]
    ) -> EnvironmentReturn:
        body = {"conversations": [self.conversation(log) for log in message_logs]}
        # One request for the step: the server computes each prompt once for its completions. It
        # ends a request at its own `deadline_seconds`.
        response = requests.post(self.url, json=body, headers=self.headers, timeout=None)
        if not response.ok:
            raise RuntimeError(f"{self.url} answers {response.status_code}: {response.text}")
        rewards = [float(result["reward"]) for result in response.json()["data"]]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "\n"} for _ in rewards],
            metadata=list(env_infos),
            next_stop_strings=[None for _ in rewards],
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=[log[-1]["content"] for log in message_logs],
        )

    def conversation(self, log: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """The messages of a log, with the user's as it was before the policy's template."""
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in log]
        question = next(message for message in messages if message["role"] == "user")
        text = question["content"]
        if not (text.startswith(self.before) and text.endswith(self.after)):
            raise ValueError(
                f"a prompt is not as the policy's chat template renders it: got {text!r}, need "
                f"{self.before!r}...{self.after!r}; write policy_tokenizer: null if the processor "
                "leaves messages as they are"
            )
        question["content"] = text[len(self.before) : len(text) - len(self.after)]
        return messages

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}

    def shutdown(self) -> bool:
        return True


TreewardEnvironment = ray.remote(TreewardRewards)  # an actor, as NeMo RL's environments are

if __name__ == "__main__":
    name = "nemo_rl_over_http.TreewardEnvironment"
    register_env("treeward", name)
    ACTOR_ENVIRONMENT_REGISTRY[name] = PY_EXECUTABLES.SYSTEM
    runpy.run_path("examples/run_grpo.py", run_name="__main__")
