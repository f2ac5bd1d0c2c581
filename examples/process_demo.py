"""A process reward model from nothing, on two cores, beside a model of outcomes.

python examples/process_demo.py

Both learn from the same solutions of arithmetic problems with planted mistakes: the one from the
labels of the steps, the other from whether the answer is right. On problems that neither has seen,
each chooses one of eight solutions; so does the majority of the answers. It may be run again: what
is finished is not done again, and a run that was stopped goes on.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

from arithmetic_steps import Problem, StepSolution, step_rows

from treeward.cli.main import main
from treeward.scoring.scorer import Scorer
from treeward.tables import Column, results_table

CONFIGS = Path(__file__).parent / "configs"
RESULTS = Path("results/process_demo")
DATA = RESULTS / "data"
STEPS_MODEL, OUTCOME_MODEL = RESULTS / "steps" / "final", RESULTS / "outcomes" / "final"
NUM_TRAINED, NUM_HELD_OUT, NUM_SOLUTIONS = 800, 200, 8
SHORTER: list[str] = []
"""Overrides of both runs, by which a test makes this a matter of seconds."""
COLUMNS = [Column("choice", title="the solution is chosen by"), Column("right", format="percent")]


def run() -> int:
    write_data()
    config = ["train", "--config", str(CONFIGS / "process_demo.yaml")]
    outcomes = [
        "policy.reward_model_cfg.reward_model_type=bradley_terry",
        f"data.train=[{{data_path: {DATA}/outcomes.jsonl}}]",
        f"data.validation=[{{data_path: {DATA}/held_out_outcomes.jsonl, name: held_out}}]",
        f"checkpointing.checkpoint_dir={OUTCOME_MODEL.parent}",
        "logger.log_dir=logs/process_demo_outcomes",
    ]
    code = main([*config, *SHORTER]) or main([*config, *outcomes, *SHORTER])
    if code == 0:
        sys.stdout.write(f"\n{results_table(list(best_of_n()), COLUMNS)}\n")
    return code


def solutions_of(seed: int, number: int) -> list[tuple[Problem, list[StepSolution]]]:
    draw = random.Random(seed)
    drawn = []
    for _ in range(number):
        problem = Problem.draw(draw)
        drawn.append((problem, [problem.solve(draw) for _ in range(NUM_SOLUTIONS)]))
    return drawn


def held_out() -> list[tuple[Problem, list[StepSolution]]]:
    """Problems that are not among those that are trained on."""
    trained = {problem for problem, _ in solutions_of(0, NUM_TRAINED)}
    return [drawn for drawn in solutions_of(1, NUM_HELD_OUT) if drawn[0] not in trained]


def write_data() -> None:
    """The solutions with labels of their steps, and as completions ranked by their answers."""
    DATA.mkdir(parents=True, exist_ok=True)
    parts = {"": solutions_of(0, NUM_TRAINED), "held_out_": held_out()}
    for name, drawn in parts.items():
        steps = []
        outcomes = []
        for problem, solutions in drawn:
            steps += step_rows(problem, solutions)
            completions = []
            for solution in solutions:
                is_wrong = solution.answer != problem.answer
                text = "\n\n".join(solution.texts)
                completions.append({"completion": text, "rank": int(is_wrong)})
            outcomes.append({"prompt": problem.text, "completions": completions})
        for kind, rows in (("steps", steps), ("outcomes", outcomes)):
            lines = [json.dumps(row) + "\n" for row in rows]
            (DATA / f"{name}{kind}.jsonl").write_text("".join(lines), encoding="utf-8")


def best_of_n() -> list[dict[str, object]]:
    """How often the chosen solution has the right answer."""
    right: dict[str, list[bool]] = {}
    models = {
        "the process reward model": Scorer.load(STEPS_MODEL),
        "the model of outcomes": Scorer.load(OUTCOME_MODEL),
    }
    for problem, solutions in held_out():
        texts = ["\n\n".join(solution.texts) for solution in solutions]
        answers = [solution.answer for solution in solutions]
        chosen = {"the first": answers[0]}
        chosen["the majority"] = Counter(answers).most_common(1)[0][0]
        for name, scorer in models.items():
            scores = [score.score or 0.0 for score in scorer.score_completions(problem.text, texts)]
            chosen[name] = answers[scores.index(max(scores))]
        for name, answer in chosen.items():
            right.setdefault(name, []).append(answer == problem.answer)
        right.setdefault("the truth", []).append(problem.answer in answers)
    return [{"choice": name, "right": fmean(values)} for name, values in right.items()]


if __name__ == "__main__":
    sys.exit(run())
