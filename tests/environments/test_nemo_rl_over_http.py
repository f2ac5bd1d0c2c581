"""The example for NeMo RL without treeward in its Python: a server's rewards, of what the user
wrote.

NeMo RL is not installed with the tests. Its modules are stand-ins here that have what the example
imports. docs/nemo_rl.md says what of NeMo RL itself was run.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from treeward.environments.interface import EnvironmentReturn
from treeward.scoring.scorer import Scorer

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "nemo_rl_over_http.py"
TEMPLATE = (
    "<s>Be brief.{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWERS = ["The Nile.", "A river is water.", "No."]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> ModuleType:
    """The example's module; the policy's tokenizer is the one of the section's `template`."""

    def get_tokenizer(section: dict[str, Any]) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)  # other tests share it
        tokenizer.chat_template = section["template"]
        return tokenizer

    contents: dict[str, dict[str, Any]] = {
        "nemo_rl.algorithms.utils": {"get_tokenizer": get_tokenizer},
        "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": {}},
        "nemo_rl.distributed.virtual_cluster": {"PY_EXECUTABLES": SimpleNamespace(SYSTEM="python")},
        "nemo_rl.environments.interfaces": {
            "EnvironmentInterface": object,
            "EnvironmentReturn": EnvironmentReturn,
        },
        "nemo_rl.environments.utils": {"register_env": None},
    }
    for name, members in contents.items():
        for parent in ("nemo_rl", name.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def section(served: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("REWARD_TOKEN", "a-token")
    return {
        "url": served,
        "token_env": "REWARD_TOKEN",
        "policy_tokenizer": {"name": "policy", "template": TEMPLATE},
    }


def log(prompt: str, answer: str) -> list[dict[str, Any]]:
    """As the loop passes it: roles and contents."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_rewards_are_the_scores_of_what_the_user_wrote(
    example: ModuleType, section: dict[str, Any], signed_folder: Path
) -> None:
    question = "Name a [river]."
    conversations = [log(question, answer) for answer in ANSWERS]
    want = [score.score for score in Scorer.load(signed_folder, device="cpu").score(conversations)]
    environment = example.TreewardRewards(section)
    rendered = f"<s>Be brief.[user]{question}[assistant]"
    logs = [log(rendered, answer) for answer in ANSWERS]
    step = environment.step(logs, [{"ground_truth": "a"}, {}, {}])
    assert step.rewards.tolist() == pytest.approx(want, abs=1e-5)
    assert step.rewards.dtype == torch.float32
    assert step.terminateds.tolist() == [True, True, True]
    assert step.metadata == [{"ground_truth": "a"}, {}, {}]
    assert step.answers == ANSWERS
    assert logs[0] == log(rendered, ANSWERS[0])  # the loop's own log is as it was

    # A system message before it is plain text, of `math_data_processor`.
    system = {"role": "system", "content": "Speak."}
    with_system = environment.conversation([system, *logs[0]])
    assert with_system == [system, *conversations[0]]

    # With null in place of the policy's tokenizer, what comes is sent; without the key it ends.
    plain = example.TreewardRewards({**section, "policy_tokenizer": None})
    assert plain.step(conversations, [{}] * 3).rewards.tolist() == pytest.approx(want, abs=1e-5)
    with pytest.raises(KeyError, match="policy_tokenizer"):
        example.TreewardRewards({"url": section["url"]})


def test_a_completion_without_a_reward_ends_the_step_with_the_reason(
    example: ModuleType, section: dict[str, Any]
) -> None:
    environment = example.TreewardRewards({**section, "policy_tokenizer": None})
    with pytest.raises(RuntimeError, match=r"422.*conversation 1: too long to score"):
        environment.step([log("A river?", "No."), log("A river?", "word " * 400)], [{}, {}])


def test_a_prompt_of_another_template_is_an_error(
    example: ModuleType, section: dict[str, Any]
) -> None:
    environment = example.TreewardRewards(section)
    with pytest.raises(
        ValueError, match=r"renders it: got 'A river\?'.*write policy_tokenizer: null"
    ):
        environment.step([log("A river?", "No.")], [{}])
