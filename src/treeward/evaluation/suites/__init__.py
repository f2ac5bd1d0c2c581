"""The suites by name: `get_suite("rewardbench").load("downloads/rewardbench")`."""

from __future__ import annotations

from collections.abc import Mapping

from treeward.errors import ConfigError
from treeward.evaluation.suites.benchmarks import JudgeBench, LLMBar, RMBench
from treeward.evaluation.suites.interface import PreferenceSuite, Suite
from treeward.evaluation.suites.rewardbench import RewardBench, RewardBench2

__all__ = ["SUITES", "PreferenceSuite", "Suite", "get_suite"]

SUITES: Mapping[str, type[Suite]] = {
    suite.name: suite for suite in (RewardBench, RewardBench2, RMBench, JudgeBench, LLMBar)
}


def get_suite(name: str) -> Suite:
    """The suite of that name; raises `ConfigError` with the nearest one."""
    key = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if key not in SUITES:
        fix = "for data of your own give the file instead"
        raise ConfigError.unknown(
            "there is no such suite", key, SUITES, field="suite", got=name, fix=fix
        )
    return SUITES[key]()
