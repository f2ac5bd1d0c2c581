"""The real NeMo Gym starts the folders of `resources_servers/`, and its agent and its collector
call them.

The policy is a small server on loopback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import gym_servers
from fake_policy import FakePolicy
from messages import assistant, read_jsonl, user, write_jsonl
from signed import write_signed_model

from treeward.scoring.scorer import Scorer

REPOSITORY = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROBLEM = r"What is 1/4 + 1/4? Put the answer inside \boxed{}."

BRIEFLY = [{"role": "developer", "content": "Be brief."}, user("How do I boil an egg?")]
ROWS: list[dict[str, Any]] = [
    {"responses_create_params": {"input": asked}}
    for asked in ([user("Name a river in Peru.")], BRIEFLY, [user("long " * 400)])
]
ROWS[1] |= {"reward_threshold": -1000.0, "note": {"kept": [1, 2.5, None]}}


def test_the_real_collector_gets_the_rewards_of_the_scorer(
    gym: Path, workplace: Path, served_model: Path
) -> None:
    policy = FakePolicy()
    (workplace / "env.yaml").write_text(
        f"policy_base_url: {policy.url}\npolicy_api_key: none\npolicy_model_name: policy\n",
        encoding="utf-8",
    )
    write_jsonl(workplace / "data" / "train.jsonl", *ROWS)
    configs = []
    for name in ("reward_model", "math_with_judge"):
        configs += ["--config", f"resources_servers/{name}/configs/{name}.yaml"]
    policy.replies[PROBLEM] = r"That is \boxed{\frac{1}{2}}."
    given = f"++reward_model_server.resources_servers.reward_model.model_path={served_model}"
    with gym_servers(gym, workplace, [*configs, given]) as run:
        examples = "resources_servers/math_with_judge/data/example.jsonl"
        for agent, rows, output, more in (
            ("reward_model", "data/train.jsonl", "data/rollouts.jsonl", ["--num-repeats", "2"]),
            ("math_with_judge", examples, "data/math.jsonl", []),
        ):
            collect = ["eval", "run", "--no-serve", "--agent", f"{agent}_simple_agent"]
            collect += ["--input", rows, "--output", output, "--concurrency", "4", *more]
            run(collect)

    rollouts = read_jsonl(workplace / "data" / "rollouts.jsonl")
    indices = sorted((row["_ng_task_index"], row["_ng_rollout_index"]) for row in rollouts)
    assert indices == [(0, 0), (0, 1), (1, 0), (1, 1)]
    scorer = Scorer.load(served_model, device="cpu")
    for row in rollouts:
        score = scorer.score([_conversation(row)])[0]
        assert row["reward"] == pytest.approx(score.score, abs=1e-5)
        assert row["reward_num_tokens"] == score.num_tokens
    assert len({row["reward"] for row in rollouts}) == 4
    passed = [row for row in rollouts if row["_ng_task_index"] == 1]
    assert all(
        row["reward_passed"] is True and row["note"] == {"kept": [1, 2.5, None]} for row in passed
    )

    failures = read_jsonl(workplace / "data" / "rollouts_failures.jsonl")
    assert [row["_ng_task_index"] for row in failures] == [2, 2]
    assert all("too long to score" in json.dumps(row) for row in failures)

    metrics = json.loads(
        (workplace / "data" / "rollouts_aggregate_metrics.json").read_text(encoding="utf-8")
    )
    mean = sum(row["reward"] for row in rollouts) / 4
    assert metrics[0]["key_metrics"]["mean/reward"] == pytest.approx(mean, abs=1e-5)

    # The policy is the judge too. It repeats the question, so its last verdict is [[A!=B]].
    right, *wrong = sorted(
        read_jsonl(workplace / "data" / "math.jsonl"), key=lambda row: row["_ng_task_index"]
    )
    assert (right["reward"], right["library_reward"], right["judge_reward"]) == (1.0, 1.0, None)
    assert [(row["reward"], row["judge_reward"]) for row in wrong] == [(0.0, 0.0)] * 4


@pytest.fixture(scope="module")
def served_model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_signed_model(
        tmp_path_factory.mktemp("gym") / "model", tiny_tokenizer, seed=5, max_length=200
    )


def _conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Read by hand, and not as the server does: what was asked, with `system` for `developer`, and
    the answer."""
    asked = [
        {
            "role": {"developer": "system"}.get(item["role"], item["role"]),
            "content": item["content"],
        }
        for item in row["responses_create_params"]["input"]
    ]
    [message] = [item for item in row["response"]["output"] if item["type"] == "message"]
    return [*asked, assistant(message["content"][0]["text"])]
