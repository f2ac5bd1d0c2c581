"""Rewards reach verl as it asks for them: by path, from threads, in a loop, in batches; a failure
is never a number.

verl is not installed with the tests. `as_verl_loads` and the calls below do what its `load_module`
and its naive reward manager (a sample in a thread of an executor), reward loop (a coroutine for
each sample) and batch reward manager do.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

import treeward.environments.verl as verl
from treeward.environments import source
from treeward.environments.interface import Environment, Reward
from treeward.errors import ConfigError, DataError
from treeward.scoring.scorer import Scorer

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETIONS = ["Paris.", "Paris, of course.", "I do not know.", "Lyon?"]


@pytest.fixture(scope="module")
def kwargs(folder: str) -> dict[str, Any]:
    section = {"type": "reward_model", "model_name": folder, "max_model_len": 60}
    return {"environment": section}


@pytest.fixture(scope="module")
def want(folder: str) -> list[Any]:
    scores = Scorer.load(folder, device="cpu").score_completions(PROMPT, COMPLETIONS)
    return [pytest.approx(score.score, abs=1e-5) for score in scores]


def as_verl_loads(path: Path, name: str, reward_kwargs: Mapping[str, Any]) -> Any:
    """A module that nothing can import by its name, and its function with the configured arguments
    bound."""
    spec = importlib.util.spec_from_file_location(f"custom_module_{hash(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert spec.name not in sys.modules
    return partial(getattr(module, name), **reward_kwargs)


def sample(completion: str, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "facts",
        "solution_str": completion,
        "ground_truth": "Paris",
        "extra_info": extra,
    }


def test_it_is_loaded_by_path_and_called_in_threads(
    kwargs: dict[str, Any], want: list[Any]
) -> None:
    settings = OmegaConf.create({"root": kwargs}).root
    score = as_verl_loads(Path(verl.__file__), "compute_score", dict(settings))
    with ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(score, **sample(completion, prompt=PROMPT, num_turns=None))
            for completion in COMPLETIONS
        ]
        results = [call.result() for call in calls]
    assert [result["score"] for result in results] == want
    assert results == [{"score": result["score"], "raw": result["score"]} for result in results]
    # A second load of the file, as for validation, shares the model.
    before = dict(source._SOURCES)
    again = as_verl_loads(Path(verl.__file__), "compute_score", dict(settings))
    assert again(**sample(COMPLETIONS[0], prompt=PROMPT))["score"] == want[0]
    assert dict(source._SOURCES) == before  # the very same objects


def test_the_reward_loop_awaits_it(kwargs: dict[str, Any], want: list[Any]) -> None:
    score = as_verl_loads(Path(verl.__file__), "compute_score_async", kwargs)
    assert asyncio.iscoroutinefunction(score.func)

    async def worker() -> list[Any]:
        return await asyncio.gather(
            *(score(**sample(completion, prompt=PROMPT)) for completion in COMPLETIONS)
        )

    assert [result["score"] for result in asyncio.run(worker())] == want


def test_the_batch_manager_gets_a_list(kwargs: dict[str, Any], want: list[Any]) -> None:
    results = verl.compute_scores(
        data_sources=np.array(["facts"] * 4, dtype=object),
        solution_strs=COMPLETIONS,
        ground_truths=[None] * 4,
        extra_infos=np.array(
            [{"prompt": np.array(PROMPT, dtype=object)} for _ in COMPLETIONS], dtype=object
        ),
        **kwargs,
    )
    assert [result["score"] for result in results] == want
    assert verl.compute_scores([], [], [], **kwargs) == []


def test_without_a_prompt_it_says_how_to_give_one(kwargs: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match=r"with \['index', 'split'\](?s:.)*row\[\"extra_info\"\]\[\"prompt\"\] ="
    ):
        verl.compute_score(**sample("Paris.", index=1, split="train"), **kwargs)
    with pytest.raises(DataError, match=r"does not pass it on"):
        verl.compute_score("facts", "Paris.", "Paris", None, **kwargs)
    with pytest.raises(DataError, match="not a list of messages"):
        verl.compute_score(**sample("Paris.", prompt=["text"]), **kwargs)


def test_a_reward_that_cannot_be_had_raises_or_is_nan(
    kwargs: dict[str, Any], want: list[Any]
) -> None:
    long = "A word. " * 60
    with pytest.raises(DataError, match=r"data_source facts: a completion has no reward: .*60"):
        verl.compute_score(**sample(long, prompt=PROMPT), **kwargs)
    results = verl.compute_scores(
        ["facts"] * 2,
        [long, COMPLETIONS[0]],
        ["", ""],
        [{"prompt": PROMPT}] * 2,
        on_failure="nan",
        **kwargs,
    )
    assert math.isnan(results[0]["score"]) and results[1]["score"] == want[0]
    assert results[0].keys() == results[1].keys()


def test_a_rule_needs_no_prompt_and_a_missing_source_is_told_first() -> None:
    rule = {"type": "rules", "rule": "exact_match"}
    assert verl.compute_score("sums", "4", "4", None, environment=rule)["score"] == 1.0
    assert verl.compute_score("sums", "5", "4", {"index": 3}, environment=rule)["score"] == 0.0
    tags = "<think>So.</think>\n<answer>4</answer>"
    form = {"type": "math_multi_reward"}
    assert verl.compute_score("sums", tags, "4", None, environment=form)["score"] == 3.0
    assert (
        verl.compute_score("sums", "0.5", "1/2", None, environment={"type": "math", "workers": 1})[
            "score"
        ]
        == 1.0
    )
    with pytest.raises(ConfigError, match="reward_kwargs"):
        verl.compute_score("sums", "4", "4", None)


def test_no_exception_of_a_step_leaves_its_callers_waiting() -> None:
    class Ending(Environment):
        def rewards(self, conversations: Any, env_infos: Any) -> list[Reward]:
            raise SystemExit("no key")

    asked = source.RewardSource(Ending())
    log = [*PROMPT, {"role": "assistant", "content": "Paris."}]
    for _ in range(2):  # the thread goes on
        with pytest.raises(SystemExit, match="no key"):
            asked.submit(log, {}).result(timeout=60)
