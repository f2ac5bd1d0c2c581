"""What `import treeward` offers: a promise to users, so a change of this list is a decision."""

from __future__ import annotations

import subprocess
import sys

import pytest

import treeward

NAMES = """
    AsyncRewardClient CheckpointError Completion ConfigError DataError EnsembleScorer Environment GRPOOutcome
    ModelError PolicyModel Preference Renderer RewardClient RewardModel RewardModelEnvironment RewardServerError
    RowBatch Score Scorer Shaper TokenTree TrainingOutcome TreeBatch TreewardError bradley_terry gold_quality grpo
    load_config load_grpo_config load_policy load_reward_model make_environment open_dataset open_prompts
    ranked_pairs register_dataset register_environment register_prompt_dataset train verify
""".split()


def test_the_public_names_are_these() -> None:
    assert sorted(treeward.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(treeward))


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_imported_and_is_documented(name: str) -> None:
    found = getattr(treeward, name)
    assert found.__name__ == name
    assert found.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Scorers"):
        treeward.Scorers  # noqa: B018


def test_importing_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "numpy", "pydantic")
    code = f"import sys, treeward; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_client_of_a_server_needs_neither_torch_nor_the_server() -> None:
    heavy = ("torch", "transformers", "numpy", "fastapi", "uvicorn")
    code = "import sys; from treeward import AsyncRewardClient, RewardClient, RewardServerError; "
    code += f"RewardClient('http://localhost:1'); print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
