"""The suites by name: `get_suite("rewardbench").load("downloads/rewardbench")`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from treeward.config.data import DatasetConfig
from treeward.errors import ConfigError, DataError
from treeward.evaluation.suites.benchmarks import JudgeBench, LLMBar, RMBench
from treeward.evaluation.suites.interface import PreferenceSuite, Suite
from treeward.evaluation.suites.ppe import PPECorrectness, PPEPreference
from treeward.evaluation.suites.process_bench import ProcessBench
from treeward.evaluation.suites.rewardbench import RewardBench, RewardBench2
from treeward.evaluation.suites.rmb import RMB, IFRewardBench
from treeward.evaluation.suites.steps import StepsSuite, has_steps

logger = logging.getLogger(__name__)

__all__ = [
    "PUBLISHED",
    "SUITES",
    "PreferenceSuite",
    "StepsSuite",
    "Suite",
    "get_suite",
    "published_suites",
    "suite_of_data",
]

PUBLISHED = (
    RewardBench,
    RewardBench2,
    PPEPreference,
    PPECorrectness,
    RMB,
    RMBench,
    JudgeBench,
)
"""The suites that model cards report, in the order of Skywork-Reward-V2 (arXiv 2507.01352)."""

SUITES: Mapping[str, type[Suite]] = {
    suite.name: suite for suite in (*PUBLISHED, LLMBar, IFRewardBench, ProcessBench)
}


def published_suites(source: str | None) -> list[tuple[Suite, str | None]]:
    """Those of `PUBLISHED` that are there, each with its source.

    `source`: a folder with a copy of each, which has the suite's name or that of its repository;
    None for the hub, where RMB is not. Those that are missing are named in the log. Raises
    `DataError` for a folder without any.
    """
    copies: dict[str, str] = {}
    if source is not None and Path(source).is_dir():
        for path in Path(source).iterdir():
            # Without suffixes: a copy may be a file, as rewardbench.jsonl.gz.
            stem = path.name.split(".")[0]
            copies[_key(stem)] = str(path)
    suites: list[tuple[Suite, str | None]] = []
    missing = []
    for suite_type in PUBLISHED:
        suite = suite_type()
        copy: str | None = None
        for place in (suite.name, suite.hub_path, suite.git_url):
            # A clone or a download has the last part of its address as its name.
            if copy is None and place is not None:
                copy = copies.get(_key(place.split("/")[-1]))
        if copy is not None or (source is None and suite.hub_path is not None):
            suites.append((suite, copy))
        else:
            missing.append(suite.name)
    if not suites:
        raise DataError(
            "there is no copy of a published suite here",
            where=source,
            need=f"folders or files with the names {', '.join(missing)}",
        )
    if missing:
        logger.warning("Left out, because there is no copy: %s.", ", ".join(missing))
    return suites


def _key(name: str) -> str:
    """A name as people write it, RM-Bench or rm_bench, as the key of `SUITES`."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def suite_of_data(name: str, config: DatasetConfig) -> Suite:
    """A suite of the user's own data: of comparisons, or of labels of steps. `name` is that of its
    results."""
    if has_steps(config):
        return StepsSuite(name, config)
    return PreferenceSuite(name, config)


def get_suite(name: str) -> Suite:
    """The suite of that name; raises `ConfigError` with the nearest one."""
    key = _key(name)
    if key not in SUITES:
        fix = "for data of your own give the file instead"
        raise ConfigError.unknown(
            "there is no such suite", key, SUITES, field="suite", got=name, fix=fix
        )
    return SUITES[key]()
