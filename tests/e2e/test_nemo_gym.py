"""The real NeMo Gym starts the folders of `resources_servers/`, and its agent and its collector
call them.

The policy is a small server on loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture
def workplace(gym: Path, tmp_path: Path) -> Path:
    """A folder as a user of NeMo Gym has it: the resources server, `env.yaml`, and environments
    that are there."""
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip(
            "these tests do not run in a virtual environment, which gym needs for the server"
        )
    shutil.copytree(REPOSITORY / "resources_servers", tmp_path / "resources_servers")
    for kind, name, venv in (
        ("responses_api_agents", "simple_agent", gym),
        ("responses_api_models", "openai_model", gym),
        ("environment_servers", "legacy_agent", gym),
        ("resources_servers", "reward_model", Path(sys.prefix)),
        ("resources_servers", "math_with_judge", Path(sys.prefix)),
    ):
        folder = tmp_path / "venvs" / kind / name
        folder.mkdir(parents=True)
        (folder / ".venv").symlink_to(venv)
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", *ROWS)
    return tmp_path


def test_the_real_collector_gets_the_rewards_of_the_scorer(
    gym: Path, workplace: Path, served_model: Path
) -> None:
    policy = FakePolicy()
    (workplace / "env.yaml").write_text(
        f"policy_base_url: {policy.url}\npolicy_api_key: none\npolicy_model_name: policy\n",
        encoding="utf-8",
    )
    environment = {
        **{
            key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))
        },
        **{
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        "PATH": f"{gym / 'bin'}:{os.environ['PATH']}",
    }
    configs = []
    for name in ("reward_model", "math_with_judge"):
        configs += ["--config", f"resources_servers/{name}/configs/{name}.yaml"]
    policy.replies[PROBLEM] = r"That is \boxed{\frac{1}{2}}."
    log = workplace / "gym.log"
    with log.open("wb") as stream:
        command = [
            str(gym / "bin" / "gym"),
            "env",
            "start",
            *configs,
            "+skip_venv_if_present=true",
            f"+uv_venv_dir={workplace / 'venvs'}",
            f"++reward_model_server.resources_servers.reward_model.model_path={served_model}",
        ]
        servers = subprocess.Popen(
            command,
            cwd=workplace,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for("servers ready", servers, log, seconds=240)
        examples = "resources_servers/math_with_judge/data/example.jsonl"
        for agent, rows, output, more in (
            ("reward_model", "data/train.jsonl", "data/rollouts.jsonl", ["--num-repeats", "2"]),
            ("math_with_judge", examples, "data/math.jsonl", []),
        ):
            collect = [str(gym / "bin" / "gym"), "eval", "run", "--no-serve"]
            collect += ["--agent", f"{agent}_simple_agent"]
            collect += ["--input", rows, "--output", output, "--concurrency", "4", *more]
            done = subprocess.run(
                collect, cwd=workplace, env=environment, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, (
                f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{log.read_text()[-4000:]}"
            )
    finally:
        os.killpg(servers.pid, signal.SIGINT)
        try:
            servers.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(servers.pid, signal.SIGKILL)
            servers.wait(20)

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


def _wait_for(text: str, process: subprocess.Popen[bytes], log: Path, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text(encoding="utf-8", errors="replace"):
        assert process.poll() is None, f"gym env start ended:\n{log.read_text()[-6000:]}"
        assert time.monotonic() < end, f"gym env start is not ready:\n{log.read_text()[-6000:]}"
        time.sleep(0.5)
