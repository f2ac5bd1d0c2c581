"""The folder is whole: its configuration is one that the server takes, and its rows can be
compared."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from treeward.errors import ConfigError
from treeward.serving.dialects.genrm_compare import rollout_of

FOLDER = Path(__file__).parent.parent
APP = runpy.run_path(str(FOLDER / "app.py"))
GYMS = {
    "genrm_model_server": {"type": "responses_api_models", "name": "genrm_model"},
    "cohort_collection_timeout_s": 1800,
    "cohort_evaluation_timeout_s": 1800,
    "cohort_result_ttl_s": 21600,
    "max_terminal_cohorts": 4096,
    "num_judges_per_comparison": 1,
    "use_principle": False,
    "aggregator_method": "simple_tiebreaker",
    "reasoning_bonus": 0.0,
    "answer_bonus": 0.0,
    "top_percentile": 0.2,
    "group_reasoning_length_penalty_coeff": 0.0,
    "group_answer_length_penalty_coeff": 0.0,
    "group_style_penalty_coeff": 0.0,
    "default_score": 3.0,
    "default_ranking": 3.5,
    "debug_logging": False,
    "genrm_parse_retries": 3,
    "genrm_parse_retry_sleep_s": 0.2,
}
"""The keys of NeMo Gym 0.7.0's own configuration."""


@pytest.fixture
def section() -> dict[str, Any]:
    text = (FOLDER / "configs" / "genrm_compare.yaml").read_text(encoding="utf-8")
    servers = yaml.safe_load(text)["genrm_compare_resources_server"]["resources_servers"]
    section: dict[str, Any] = servers["genrm_compare"]
    return section


def test_the_configuration_is_the_servers(section: dict[str, Any]) -> None:
    assert (FOLDER / section["entrypoint"]).is_file()
    given = {"model": "genrm", "base_url": "http://localhost:8001/v1", "port": 8123}
    config = APP["checked"](section | GYMS | given, "Gym")
    assert config.port == 8123 and config.models == ()
    judge = config.judge
    assert (judge.model, judge.num_rollouts_per_prompt, judge.default_score) == ("genrm", 16, 3.0)
    assert (judge.temperature, judge.max_tokens, judge.timeout_seconds) == (0.6, 16384, 1800)
    assert judge.extra_body == {"top_p": 0.95}


def test_a_judge_without_a_model_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="base_url to the address of vLLM"):
        APP["checked"](section | GYMS | {"model": None}, "Gym")


def test_the_examples_can_be_compared() -> None:
    text = (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8")
    for line in text.splitlines():
        row = json.loads(line) | {"response": {"output": []}, "_ng_rollout_index": 0}
        assert rollout_of(row).prompt.history[-1]["role"] == "user"
