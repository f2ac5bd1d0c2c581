"""Logs of RL runs as the loop writes them, from seeded random numbers: `write_run(folder, HACKED)`, `sample_runs(tmp)`.

Three runs: a clean one, one that exploits its reward model (gold is Gao et al.'s law over sqrt(KL)), and one that is
cured of it. The watch is the real one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report_sample import HOSTILE

from treeward.rl.report import RLRun
from treeward.rl.watch import ALARMS_FILE, OverOptimisationWatch, write_alarms

NUM_STEPS = 200
EVERY = 10
NUM_PROMPTS = 48


@dataclass(frozen=True)
class Scenario:
    """How a run goes: its last d = sqrt(KL), gold = d (alpha - beta ln d), the factor by which completions grow."""

    name: str
    distance: float
    alpha: float
    beta: float
    growth: float
    seed: int
    has_gold: bool = True


CLEAN = Scenario("clean", 2.2, 0.55, 0.10, 1.1, 1)
HACKED = Scenario("no KL", 7.5, 0.95, 0.55, 3.2, 2)
CURED = Scenario("length calibrated", 4.0, 0.62, 0.17, 1.2, 3)


def write_run(folder: Path, scenario: Scenario) -> Path:
    """The log folder of such a run."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(scenario.seed)
    hardness = rng.normal(0, 1.0, NUM_PROMPTS)
    watch = OverOptimisationWatch()
    lines, samples = [], []
    for step in range(NUM_STEPS + 1):
        d = scenario.distance * (step / NUM_STEPS) ** 0.7
        gold = float(d * (scenario.alpha - scenario.beta * np.log(d))) if d else 0.0
        proxy = 0.62 * d
        length = 60 * (1 + (scenario.growth - 1) * (step / NUM_STEPS))
        row = _training(step, d, proxy, gold, length, scenario, rng) if step else {}
        if step % EVERY == 0:
            golds = gold + hardness + rng.normal(0, 0.6, NUM_PROMPTS)
            proxies = proxy + hardness + rng.normal(0, 0.6, NUM_PROMPTS)
            known = {"proxy_by_prompt": proxies} | ({"gold_by_prompt": golds} if scenario.has_gold else {})
            watch.observe(
                step, **known, kl=d * d, length=length, length_correlation=0.6 if scenario.growth > 2 else 0.1
            )
            row |= _validation(d, float(proxies.mean()), float(golds.mean()), length, scenario) | watch.metrics()
            samples += _samples(step, scenario, proxy, gold, length)
        lines.append({"step": step, "time": 1.7e9 + step, **row})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    write_alarms(folder / ALARMS_FILE, watch.alarms)
    return folder


def sample_runs(folder: Path) -> list[RLRun]:
    return [RLRun.read(one.name, write_run(folder / str(n), one)) for n, one in enumerate((CLEAN, HACKED, CURED))]


def _training(
    step: int, d: float, proxy: float, gold: float, length: float, scenario: Scenario, rng: np.random.Generator
) -> dict[str, Any]:
    noise = rng.normal(0, 0.15, 8)
    raw = proxy + noise[0]
    row = {
        "train/reward": raw,
        "train/reward_std": 0.9 + noise[1] / 4,
        "train/kl": d * d * (1 + noise[2] / 3),
        "train/entropy": max(0.05, 2.0 - 0.2 * d + noise[3] / 5),
        "train/mean_gen_tokens_per_sample": length + 8 * noise[4],
        "train/truncation_rate": float(np.clip((length - 60) / 300 + noise[5] / 10, 0, 1)),
        "train/groups_without_signal": float(np.clip(d / 30 + abs(noise[6]) / 5, 0, 1)),
        "train/num_failed": int(step % 40 == 0),
        "train/loss": noise[7] / 10,
        "train/grad_norm": 1.0 + abs(noise[1]),
        "train/lr": 1e-4,
        "train/clip_fraction": 0.02,
        "train/token_mult_prob_error": 1.001,
    }
    if scenario.has_gold:
        row["train/gold_reward"] = "NaN" if step % 50 == 0 else gold + noise[4]
    return row


def _validation(d: float, proxy: float, gold: float, length: float, scenario: Scenario) -> dict[str, Any]:
    row = {
        "validation/reward": proxy,
        "validation/kl": d * d,
        "validation/mean_gen_tokens_per_sample": length,
        "validation/truncation_rate": (length - 60) / 300,
        "validation/entropy": max(0.05, 2.0 - 0.2 * d),
    }
    return row | ({"validation/gold_reward": gold} if scenario.has_gold else {})


def _samples(step: int, scenario: Scenario, proxy: float, gold: float, length: float) -> list[dict[str, Any]]:
    asked = ["Name three primary colours.", "Why is the sky blue? Answer in two sentences.", *HOSTILE]
    numbers = {
        "reward": proxy,
        "gold_reward": gold if scenario.has_gold else None,
        "kl": 0.1 * step,
        "num_tokens": int(length),
        "truncated": length > 150,
    }
    words = "Certainly! This is a great question, and I am happy to help. " * max(1, int(length / 25))
    found = []
    for text in asked:
        completion = numbers | {"text": text if text in HOSTILE else f"Step {step}: {words}"}
        prompt = [{"role": "user", "content": text}]
        found.append({"step": step, "prompt": prompt, "completions": [completion, completion]})
    return found
