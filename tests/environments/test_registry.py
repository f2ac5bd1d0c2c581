"""From names and sections to environments, and from slips to the name that was meant."""

from __future__ import annotations

from messages import chat
from omegaconf import OmegaConf

from treeward.environments.registry import make_environments

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
    assert environments["other"].global_post_process_and_metrics(batch)[1]["other_env/mean_reward"] == 1
