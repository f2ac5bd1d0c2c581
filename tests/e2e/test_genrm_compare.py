"""The real NeMo Gym's `genrm_compare`: its arithmetic and parser beside ours, and its clients
against our server."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import gym_servers
from fake_judge import FakeJudge, places
from fake_policy import FakePolicy
from loopback import serving_on_loopback
from messages import read_jsonl

from treeward.config.load import load_section
from treeward.config.served_judge import ServedJudgeConfig
from treeward.config.server import ServerConfig
from treeward.scoring.group_rewards import (
    PairVerdict,
    group_metrics,
    mean_scores,
    pairs_of,
    with_bonuses,
)
from treeward.scoring.pair_scores import PairScores, read_pair_scores
from treeward.serving.dialects.genrm_compare import completion_of
from treeward.serving.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

CLIENT = Path(__file__).parent / "genrm_client.py"
ANSWERS = ["four", "five", "4, I think"]
QUALITY = {"four": 5, "five": 1, "4, I think": 4}
WORDS = [
    "plain words",
    "**bold**",
    "# Head\n",
    "- item\n",
    "1. one\n",
    "\U0001f600",
    "`x`",
    "__b__",
]
TEXTS = [
    '{"score_1": 4, "score_2": 3, "ranking": 2}',
    # Of several verdicts Gym takes the first block, and treeward the last verdict.
    'Hm. ```json\n{"score_1": 1, "score_2": 5, "ranking": 6}\n``` So it is.',
    '{"score_1": 1, "score_2": 1, "ranking": 1} or {"score_1": 4, "score_2": 2, "ranking": 2}',
    '{"rubric_evaluations": [], "overall": {"score_1": 3, "score_2": 2, "ranking": 3}}',
    '{"why": "a } in {quotes}", "score_1": "4", "score_2": 2.5, "ranking": 2}',
    '{x} {y {z} {"score_1": 4, "score_2": 2, "ranking": 2}',
    "score_1: 4",
    "[[A]]",
    "",
]


def response(draw: random.Random) -> dict[str, Any]:
    output = []
    if draw.random() < 0.8:
        summary = [{"type": "summary_text", "text": "r" * draw.randrange(40)}]
        output.append({"type": "reasoning", "summary": summary})
    text = " ".join(draw.choices(WORDS, k=draw.randrange(12)))
    output.append({"type": "message", "content": [{"type": "output_text", "text": text}]})
    return {"output": output}


def group(draw: random.Random) -> dict[str, Any]:
    size = draw.randrange(2, 9)
    strategy = draw.choice(["circular", "all_pairs"])
    scores = []
    for _ in pairs_of(size, strategy):
        scores.append([draw.randrange(1, 6), draw.randrange(1, 6), draw.randrange(1, 7)])
    keys = {
        "reasoning_bonus": draw.choice([0.0, 0.5]),
        "answer_bonus": draw.choice([0.0, 0.5]),
        "top_percentile": draw.choice([0.0, 0.2, 0.5, 1.0]),
        "group_reasoning_length_penalty_coeff": draw.choice([0.0, 0.3]),
        "group_answer_length_penalty_coeff": draw.choice([0.0, 0.35]),
        "group_style_penalty_coeff": draw.choice([0.0, 0.05]),
    }
    responses = [response(draw) for _ in range(size)]
    return {"strategy": strategy, "scores": scores, "responses": responses, "keys": keys}


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    def answer(request: dict[str, Any]) -> str:
        first, second = [QUALITY[text] for text in places(request)]
        verdict = {"score_1": first, "score_2": second, "ranking": 2 if first > second else 5}
        return f"```json\n{json.dumps(verdict)}\n```"

    judge = FakeJudge(answer)
    with judge.server:
        yield judge


def test_gyms_arithmetic_is_ours_and_its_clients_get_our_rewards(
    gym: Path, judge: FakeJudge
) -> None:
    draw = random.Random(0)
    groups = [group(draw) for _ in range(300)]
    section = {"model": "judge", "base_url": judge.url, "api_key_env": None}
    section["num_rollouts_per_prompt"] = len(ANSWERS)
    service = Service.load(load_section(ServerConfig, {"judge": section}, where="server"))
    with serving_on_loopback(service) as url:
        address = httpx.URL(url)
        given = {"groups": groups, "texts": TEXTS, "answers": ANSWERS}
        given |= {"host": address.host, "port": address.port}
        environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        done = subprocess.run(
            [str(gym / "bin" / "python"), str(CLIENT)],
            input=json.dumps(given),
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    service.close()
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = json.loads(done.stdout.splitlines()[-1])

    for case, expected in zip(groups, theirs["groups"], strict=True):
        pairs = pairs_of(len(case["responses"]), case["strategy"])
        verdicts = []
        for (first, second), scores in zip(pairs, case["scores"], strict=True):
            verdicts.append(PairVerdict(first, second, 0, PairScores(*scores)))
        means = [mean for mean in mean_scores(verdicts, len(case["responses"])) if mean is not None]
        completions = [completion_of(one) for one in case["responses"]]
        rewards = with_bonuses(means, completions, ServedJudgeConfig(model="m", **case["keys"]))
        assert rewards == pytest.approx(expected["rewards"], abs=1e-6)
        assert group_metrics(verdicts) == pytest.approx(expected["metrics"], abs=1e-6)

    for text, scores in zip(TEXTS, theirs["texts"], strict=True):
        assert read_pair_scores(text) == (None if scores is None else PairScores(*scores)), text

    asked = theirs["asked"]
    # Each is compared twice, and no two are equal.
    assert asked["compared"] == [5, 1, 4]
    assert asked["metrics"]["tiebreak_usage_rate"] == 0
    rows = sorted(asked["rows"], key=lambda row: row["_ng_rollout_index"])
    assert [row["reward"] for row in rows] == [5, 1, 4]
    assert asked["again"] == rows[0]
    # Three for each of the two groups, and none for the request that was sent again.
    assert len(judge.requests) == 6


def test_the_real_collector_gets_the_rewards_of_the_cohort(
    gym: Path, workplace: Path, judge: FakeJudge
) -> None:
    policy = FakePolicy()
    (workplace / "env.yaml").write_text(
        f"policy_base_url: {policy.url}\npolicy_api_key: none\npolicy_model_name: policy\n",
        encoding="utf-8",
    )

    def answer(request: dict[str, Any]) -> str:
        # "Answer 2 to ...": the number says how good it is.
        first, second = [int(text.split()[1]) for text in places(request)]
        verdict = {"score_1": first, "score_2": second, "ranking": 2 if first > second else 5}
        return json.dumps(verdict)

    judge.answer = answer
    server = "++genrm_compare_resources_server.resources_servers.genrm_compare"
    arguments = [
        *("--config", "resources_servers/genrm_compare/configs/genrm_compare.yaml"),
        *(f"{server}.model=judge", f"{server}.base_url={judge.url}"),
        f"{server}.num_rollouts_per_prompt=3",
    ]
    with gym_servers(gym, workplace, arguments) as run:
        command = ["eval", "run", "--no-serve", "--agent", "genrm_simple_agent"]
        command += ["--input", "resources_servers/genrm_compare/data/example.jsonl"]
        command += ["--output", "data/rollouts.jsonl", "--num-repeats", "3", "--concurrency", "9"]
        run(command)

    rollouts = read_jsonl(workplace / "data" / "rollouts.jsonl")
    assert len(rollouts) == 9
    for row in rollouts:
        text = row["response"]["output"][-1]["content"][0]["text"]
        assert row["reward"] == int(text.split()[1])
    # A circle of three for each of the three prompts.
    assert len(judge.requests) == 9
