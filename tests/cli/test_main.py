"""The entry point: help without heavy imports, mistakes as messages, Ctrl-C, and the log."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from verbs import Command

from treeward import __version__
from treeward.cli import main as entry
from treeward.cli.main import VERBS
from treeward.progress import configure_logging


def test_the_help_of_no_verb_imports_anything_heavy() -> None:
    code = """import sys
from treeward.cli.main import main
[main([verb, "--help"]) for verb in sys.argv[1:]]
print(*sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code, *VERBS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {"torch", "transformers", "datasets", "pyarrow", "scipy", "fastapi", "numpy"} & loaded


def test_help_names_every_verb(treeward: Command) -> None:
    assert treeward("--version") == (0, f"treeward {__version__}\n", "")
    ended = treeward("--help")
    words = " ".join(ended.out.split())
    assert ended.code == 0 and all(f" {verb} {summary}" in words for verb, summary in VERBS.items()), "whole"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_shows_examples_that_parse(verb: str, treeward: Command) -> None:
    in_lines = treeward(verb, "--help").out.partition("examples:")[2].replace("\\\n", " ")
    examples = re.findall(rf"treeward ({verb} .*)$", in_lines, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        command = entry._load(verb)
        command.make_context(verb, shlex.split(example)[1:])  # raises for words that do not parse
        assert all(getattr(parameter, "help", None) for parameter in command.params)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["score", "MODEL", "--data", "run/rows.jsnl"], "run/rows.jsonl"),
        (["train", "--config", "run/qickstart.yaml"], "run/quickstart.yaml"),
        (["eval", "runs/final/modl", "--suite", "llmbar"], "run/final/model"),
        (["eval", "run/final/model", "--suite", "llmbar=run/rows.json"], "run/rows.jsonl"),
        (["verify", "run/final/mdel"], "run/final/model"),
    ],
)
def test_a_path_that_is_not_there_names_the_nearest(
    words: list[str], near: str, treeward: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "final" / "model").mkdir(parents=True)
    for name in ("rows.jsonl", "quickstart.yaml"):
        (tmp_path / "run" / name).write_text("")
    (tmp_path / "run" / "rows.jsnl").symlink_to("nothing")  # is listed, though it does not exist
    ended = treeward(*words)
    assert ended.code == 2 and f"did you mean {near}?" in ended.err


def test_the_log_has_one_handler_and_names_levels(restored_logging: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging()  # replaces, does not double
    for name in ("treeward.training", "other"):
        logging.getLogger(name).info("of %s", name)
        logging.getLogger(name).warning("of %s", name)
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == ["of treeward.training", "WARNING of treeward.training", "WARNING of other"]
