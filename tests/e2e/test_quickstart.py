"""`make quickstart`, as a newcomer runs it: in a process and a folder of its own; and again."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from messages import read_jsonl

from treeward import Scorer
from treeward.cli import serve

REPOSITORY = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


REPORT = Path("results") / "quickstart" / "report"


def test_it_learns_the_data_and_its_bias_and_may_be_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = str(REPOSITORY / "examples" / "quickstart.py")
    first = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    records = read_jsonl(tmp_path / "logs" / "quickstart" / "metrics.jsonl")
    last = [record for record in records if "eval/rm/accuracy" in record][-1]
    plain, controlled = (
        last[f"validation-{name}/accuracy"] for name in ("plain", "length_controlled")
    )
    assert plain >= 0.90
    assert controlled <= plain - 0.05, "the planted length bias is not seen"
    assert "Put the answer in square brackets" in first
    learnt, _, following = first.partition("\nNext, ")
    assert "What it has learnt: " in learnt and following.count("treeward score") == 1
    command = following.partition("\n")[2].strip()
    scored = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    right, wrong = json.loads(scored)["scores"]
    assert right > wrong, "what a newcomer sees first is ranked sensibly"
    page = (REPOSITORY / "src/treeward/serving/playground/conversation.js").read_text(
        encoding="utf-8"
    )
    row = json.loads(command.split("'")[1])
    assert all(json.dumps(text) in page for text in (row["prompt"], *row["responses"])), (
        "the playground has it too"
    )
    check_report(tmp_path / REPORT, {"validation": plain, "length_controlled": controlled}, first)
    request = json.loads(re.findall(r"-d '(.*?)'", str(serve.__doc__), re.DOTALL)[0])
    right, wrong = Scorer.load(tmp_path / "results/quickstart/final").score_completions(**request)
    assert right.score > wrong.score + 1, "the example of `treeward serve --help` ranks wrong"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(file).parent))
    assert runpy.run_path(file, run_name="again")["run"]() == 0
    # nothing is trained again, and the exported model scores as before
    assert capsys.readouterr().out == first
    assert (
        sum("400 of 400 examples were scored before" in message for message in caplog.messages) == 2
    )


def check_report(folder: Path, accuracies: dict[str, float], shown: str) -> None:
    """The report finds the bias that the generator has planted, says how large it is, and agrees
    with validation."""
    results = {
        one["suite"]: one for one in json.loads((folder / "results.json").read_text())["results"]
    }
    assert list(results) == ["validation", "length_controlled"]
    length = {}
    for name, result in results.items():
        length[name] = {metric["name"]: metric for metric in result["diagnostics"]["length"]}
    for name, one in results.items():
        assert one["headline"]["value"] == pytest.approx(accuracies[name], abs=1e-6)
        assert one["num_failed"] == 0 and "perturbations" in one["diagnostics"]
        # Measured: 0.12 (0.05 to 0.20) and 0.29 (0.22 to 0.36).
        assert length[name]["accuracy_gap"]["low"] > 0.0
    # The generator draws longer completions as the better ones in two of the three sets.
    assert length["validation"]["longer_is_right"]["low"] > 0.6
    assert length["length_controlled"]["longer_is_right"]["value"] == pytest.approx(0.5, abs=0.02)
    gap = length["length_controlled"]["accuracy_gap"]
    assert gap["low"] > 0.1 and 0.15 < gap["value"] < 0.5 and gap["high"] - gap["low"] < 0.25
    controlled = length["length_controlled"]["length_controlled_accuracy"]
    assert controlled["high"] < accuracies["validation"]
    longer, shorter = (
        length["length_controlled"][f"accuracy_{name}_right"]["value"]
        for name in ("longer", "shorter")
    )
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"It likes longer completions too much: correct in {longer:.1%}" in page
    assert shown.count("but it likes longer completions too much") == 2
    for text in (f"{longer:.1%}", f"{shorter:.1%}", f"{controlled['value']:.1%}"):
        assert text in page and text in shown
