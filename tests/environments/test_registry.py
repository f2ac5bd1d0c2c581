"""From names and sections to environments, and from slips to the name that was meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import chat
from omegaconf import OmegaConf
from treeward.compat.nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

from treeward.environments.registry import make_environment, make_environments
from treeward.errors import ConfigError

CHATS = [chat("Hi", "Hello")]


def test_the_env_section_of_a_file() -> None:
    section = OmegaConf.create(
        {
            "env": {
                "rules": {"enabled": True, "rule": "regex", "pattern": "${env.other.pattern}"},
                "other": {"type": "rules", "rule": "regex", "pattern": "^Hello$"},
                "judge": {"enabled": False, "model": "not even a valid section"},
            }
        }
    )
    environments = make_environments(section.env)
    assert list(environments) == ["rules", "other"]
    assert [environment.name for environment in environments.values()] == ["rules_env", "other_env"]
    for environment in environments.values():
        assert environment.step(CHATS, [None]).rewards.tolist() == [1]
    batch = {"rewards": environments["other"].step(CHATS, [None]).rewards}
    assert (
        environments["other"].global_post_process_and_metrics(batch)[1]["other_env/mean_reward"]
        == 1
    )


OWN_ENVIRONMENT = """
from treeward.environments.interface import ConfiguredEnvironment, Reward
from treeward.config.reward_environments import RuleEnvironmentConfig

class Own(ConfiguredEnvironment[RuleEnvironmentConfig]):
    section = RuleEnvironmentConfig
    def rewards(self, conversations, env_infos):
        return [Reward({value})] * len(conversations)
"""


def test_each_of_two_files_of_one_name_is_its_own_code(tmp_path: Path) -> None:
    """The first one's was the second's: it could change, and `eval` used its kept rewards again."""
    codes = []
    environments = []
    for folder, value in (("first", 1.0), ("second", 2.0)):
        file = tmp_path / folder / "own.py"
        file.parent.mkdir()
        file.write_text(OWN_ENVIRONMENT.format(value=value), encoding="utf-8")
        section = {"type": f"{file}:Own", "rule": "regex", "pattern": "1"}
        environments.append(make_environment(folder, section))
        codes.append(environments[-1].user_code)
    assert [environment.user_code for environment in environments] == codes
    assert codes[0] != codes[1]


class Two(EnvironmentInterface):
    """Several rewards, in NeMo RL's form."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = section

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        lengths = [float(len(log[-1]["content"])) for log in message_log_batch]
        right = [
            float(info["gold"] == log[-1]["content"])
            for log, info in zip(message_log_batch, metadata, strict=True)
        ]
        count = len(lengths)
        rewards = {
            "reward/correct": torch.tensor(right),
            "reward/length": -self.section["cost"] * torch.tensor(lengths),
        }
        ends = torch.full((count,), not self.section.get("goes_on", False))
        return EnvironmentReturn(
            [{}] * count, metadata, [None] * count, rewards, ends, [None] * count
        )  # type: ignore[arg-type]

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


@pytest.mark.parametrize("in_ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_class_of_nemo_rl_with_several_rewards(
    in_ray: bool, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    if in_ray:
        ray = request.getfixturevalue("ray")
        monkeypatch.setitem(globals(), "Two", ray.remote(Two))
    environment = make_environment("mine", {"type": f"{__name__}.Two", "cost": 0.1})
    assert environment.user_code  # its rewards are not kept for another source
    logs = [chat("Hi", "Hello"), chat("Hi", "No")]
    infos = [{"gold": "Hello"}, {"gold": "Yes"}]
    result = environment.step(logs, infos)
    assert result.rewards.tolist() == pytest.approx([1 - 0.5, -0.2])
    parts = [data["reward_details"]["components"] for data in result.metadata]
    assert parts == [
        pytest.approx({"correct": 1, "length": -0.5}),
        pytest.approx({"correct": 0, "length": -0.2}),
    ]
    environment.shutdown()


def test_a_step_that_goes_on_is_refused() -> None:
    environment = make_environment(
        "mine", {"type": f"{__name__}.Two", "cost": 0.1, "goes_on": True}
    )
    with pytest.raises(ConfigError, match="goes on after its first completion"):
        environment.step([chat("Hi", "Hello")], [{"gold": "Hello"}])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "builtins.str"}, "this is not an environment"),
        ({"type": "custom", "function": "FILE:CONSTANT"}, "not a function or class"),
    ],
)
def test_what_is_no_environment_or_function_is_refused_by_name(
    section: dict[str, str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("CONSTANT = 3\n")
    values = {key: value.replace("FILE", str(file)) for key, value in section.items()}
    with pytest.raises(ConfigError, match=words) as raised:
        make_environment("mine", values)
    assert list(values.values())[-1] in str(raised.value)
