"""`treeward eval` from a file to the report, and what it says of wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, completion, places

from treeward.cli.main import main
from treeward.scoring.scorer import Scorer

Write = Callable[..., Path]

ROWS = [
    {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "I do not know, and I shall not find out."}
    for n in range(30)
]


def test_from_a_file_to_the_report(
    model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_rows("held_out.jsonl", ROWS), tmp_path / "eval"
    words = ["eval", str(model_folder), "--data", str(data), "--output", str(output), "--perturbations", "5"]
    assert main([*words, "--training-data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "held_out" in printed and "length-controlled" in printed and "report.html" in printed
    assert re.search(r"on held_out: accuracy .*% \(.* to .*\); (no better|better|worse) than chance", printed)
    (folder,) = output.glob("*/held_out")
    rows = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
    scorer = Scorer.load(model_folder, device="cpu")
    want = scorer.score([[*rows[7]["context"], *completion] for completion in rows[7]["completions"]])
    assert rows[7]["scores"] == pytest.approx([score.score for score in want], abs=1e-5)
    results = json.loads((output / "results.json").read_text())
    (result,) = results["results"]
    right = sum(row["scores"][0] > row["scores"][1] for row in rows)
    assert result["headline"]["value"] == pytest.approx(right / 30) and result["headline"]["count"] == 30
    assert result["headline"]["low"] < right / 30 < result["headline"]["high"] or right in (0, 30)
    assert set(result["diagnostics"]) == {"length", "style", "perturbations", "statistics", "overlap"}
    flagged = {metric["name"]: metric for metric in result["diagnostics"]["overlap"]}
    assert any(metric["value"] == 1.0 for metric in flagged.values())  # all of it was trained on
    assert "<script" in (output / "report.html").read_text() and (output / "report.json").is_file()
    capsys.readouterr()
    before = (folder / "examples.jsonl").read_bytes()
    assert main(words) == 0 and (folder / "examples.jsonl").read_bytes() == before


def test_a_conversation_without_a_score_counts_as_wrong_and_is_told(
    model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"prompt": "word " * 300, "chosen": "Yes.", "rejected": "No."}]
    output = tmp_path / "eval"
    assert main(["eval", str(model_folder), "--data", str(write_rows("d.jsonl", rows)), "--output", str(output)]) == 1
    (result,) = json.loads((output / "results.json").read_text())["results"]
    assert result["num_failed"] == 1 and result["headline"]["count"] == 31
    assert "30 of 31 scored" in result["verdict"]
    words = ["eval", str(model_folder), "--data", str(tmp_path / "d.jsonl"), "--unscored", "allow"]
    assert main(words) == 0
    assert "30 of 31 scored" in capsys.readouterr().out
    write_rows("d.jsonl", rows[-1:])
    assert main(words) == 1  # nothing was scored, which is no accuracy of 0 %
    assert "no result, 0 of 1 scored" in capsys.readouterr().out


def test_the_checkpoints_of_a_run_in_the_order_of_their_steps(
    model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = tmp_path / "run", tmp_path / "eval"
    for name in ("step_10/model", "step_9/model", "final"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(model_folder)
    (run / "report").mkdir()
    data = write_rows("held_out.jsonl", ROWS[:12])
    words = ["eval", str(model_folder), "--checkpoints", str(run), "--data", str(data)]
    assert main([*words, "--output", str(output)]) == 0
    results = json.loads((output / "results.json").read_text())
    name = results["results"][3]["model"]  # the model that is none of the checkpoints
    assert [one["model"] for one in results["results"]] == ["step_9", "step_10", "final", name]
    (run / "step_9" / "model").unlink()
    assert main(words) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--shaping", "{reference: par}"], "reference completions, and there are none"),
        (["MODEL", "--ensemble", "mean"], "one model is no ensemble"),
        (["MODEL", "--checkpoints", "nowhere"], "the folder has no checkpoints"),
        (["MODEL", "--checkpoints", "RUN", "--ensemble", "mean"], "checkpoints are compared with each other"),
        ([], "there is no model to evaluate"),
        (["MODEL", "/nowhere/model"], "there is no such folder"),
        (["MODEL", "--suite", "rewardbnch"], "did you mean rewardbench"),
        (["MODEL", "MODEL", "--ensemble", "mean"], "a model is named twice"),
        (["{model: x}"], "this is no model"),
        (["{type: judge, model: x, mode: best}"], "mode"),
        (["{type: judge, model: x}", "--perturbations", "3"], "taken as they are"),
    ],
)
def test_what_cannot_be_is_told_before_a_suite_is_read(
    words: list[str],
    message: str,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "run" / "step_1").mkdir(parents=True)
    (tmp_path / "run" / "step_1" / "model").symlink_to(model_folder)
    places = {"MODEL": model_folder, "RUN": tmp_path / "run"}
    given = [str(places.get(word, word)) for word in words]
    data = write_rows("held_out.jsonl", ROWS[:3])
    with caplog.at_level("INFO", logger="treeward"):
        assert main(["eval", *given, "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert "Reading" not in caplog.text and "Loading" not in caplog.text


def test_a_judge_is_evaluated_like_a_model_with_its_cost_and_position_bias(
    model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: dict[str, Any]) -> Any:
        first, _ = places(request)
        says = "[[A]]" if first.startswith("It is") or "11 + 1" in request["messages"][1]["content"] else "[[B]]"
        return 200, completion(says) | {"usage": {"prompt_tokens": 50, "completion_tokens": 4}}

    data, output = write_rows("held_out.jsonl", ROWS), tmp_path / "eval"
    endpoint = FakeJudge(answer)
    section = {"type": "judge", "base_url": endpoint.url, "model": "org/m", "api_key_env": None, "mode": "pairwise"}
    words = ["eval", json.dumps(section), str(model_folder), "--data", str(data), "--output", str(output)]
    assert main([*words, "--tie-policy", "half"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "judge-pairwise-m on held_out: 60 requests, 3,000 tokens read and 240 written" in printed
    assert "the first place is worth +0.033, and 3.3% of pairs change their winner with the order" in printed
    found = {one["model"]: one for one in json.loads((output / "results.json").read_text())["results"]}
    own = found.pop("judge-pairwise-m")
    assert own["headline"]["value"] == pytest.approx(29.5 / 30)  # of "11 + 1" it prefers a place: a tie
    usage = own["details"]["usage"]
    assert usage["num_requests"] == 60 and usage["seconds"] > 0 and usage["position_bias"] == pytest.approx(1 / 30)
    assert ["usage" in one["details"] for one in found.values()] == [False]
    assert "As a judge it took 60 requests" in (output / "report.html").read_text("utf-8")
    rows = (output / "judge-pairwise-m" / "held_out" / "examples.jsonl").read_text("utf-8").splitlines()
    assert json.loads(rows[0])["judgements"] == ["[[A]]\n\n[[B]]"] * 2
    assert main(words) == 0 and len(endpoint.requests) == 60  # its rows are kept
    capsys.readouterr()
    assert main(["eval", *(json.dumps(section | {"name": name}) for name in ("a", "b")), "--data", str(data)]) == 0
    assert "a on held_out: 60 requests" in (printed := capsys.readouterr().out) and "b on held_out: 60" in printed
    endpoint.server.__exit__()
