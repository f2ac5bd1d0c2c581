from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import time

import pytest

from treeward import __version__
from treeward.cli.main import VERBS, main


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "treeward", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"treeward {__version__}"


@pytest.mark.e2e
def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = "import sys; from treeward.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    seconds = []
    for words in (["--help"], ["--help"], ["score", "--help"]):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0
        modules = set(done.stdout.splitlines()[-1].split())
        assert not modules & {"torch", "transformers", "datasets", "pyarrow", "pydantic"}, words
    assert min(seconds) < 1


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert all(re.search(rf"^  {verb} +{summary}$", text, re.MULTILINE) for verb, summary in VERBS.items())
    assert shown(capsys, "--version").strip() == f"treeward {__version__}"


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_shows_examples_that_parse(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, verb, "--help")
    in_lines = text.partition("examples:")[2].replace("\\\n", " ")
    examples = re.findall(rf"treeward ({verb} .*)$", in_lines, re.MULTILINE)
    assert len(examples) >= 2
    module = importlib.import_module(f"treeward.cli.{verb}")
    for example in examples:
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        parser.parse_intermixed_args(shlex.split(example)[1:])


def test_a_wrong_verb_is_told_with_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "trian")
    assert "trian" in text and "train" in text and "score" in text


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config" in refused(capsys, "train")
    assert "MODEL" in refused(capsys, "score", "--data", "x.jsonl")


def test_options_may_stand_before_the_verb_and_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--debug", "train", "rm.seed=1", "--config", "no_such.yaml", "rm.max_num_steps=2"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text and "no_such.yaml" in text
