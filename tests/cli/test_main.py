"""The entry point: help without heavy imports, mistakes as messages, Ctrl-C, and the log."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from verbs import Command

from treeward import __version__
from treeward.cli.main import VERBS, verb_command


def test_the_help_of_no_verb_imports_anything_heavy() -> None:
    code = """import sys
from treeward.cli.main import main
[main([verb, "--help"]) for verb in sys.argv[1:]]
print(*sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code, *VERBS],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "transformers", "datasets", "pyarrow", "scipy", "fastapi", "numpy"}
    assert not heavy & loaded


def test_the_first_help_imports_neither_rich_nor_a_verb() -> None:
    code = "import sys; from treeward.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"rich", "pydantic", "treeward.cli.train"} & set(loaded)


def test_help_names_every_verb(treeward: Command) -> None:
    assert treeward("--version") == (0, f"treeward {__version__}\n", "")
    ended = treeward("--help")
    words = " ".join(ended.out.split())
    assert ended.code == 0, "whole"
    assert all(f" {verb} {summary}" in words for verb, summary in VERBS.items()), "whole"


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "/nowhere/model", "--data", "none.jsonl"),
        ("bon", "--proxy", "n", "--data", "none.jsonl"),
        ("check-data", "none.jsonl"),
        ("score", "/nowhere/model", "--data", "none.jsonl"),
    ],
)
@pytest.mark.parametrize("below", ["", "/results"])
def test_an_output_that_cannot_be_is_refused_first(
    words: tuple[str, ...],
    below: str,
    treeward: Command,
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    where = f"{file}{below}"
    if words[0] == "score" and not below:
        where = str(tmp_path)  # a file may be replaced, a folder may not
    ended = treeward(*words, "--output", where)
    assert ended.code == 2
    assert str(tmp_path) in ended.err
    assert "nowhere" not in ended.err
    assert "none.jsonl" not in ended.err
    assert file.read_text() == "mine"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_shows_examples_that_parse(verb: str, treeward: Command) -> None:
    in_lines = treeward(verb, "--help").out.partition("examples:")[2].replace("\\\n", " ")
    examples = re.findall(rf"treeward ({verb} .*)$", in_lines, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        command = verb_command(verb)
        # Raises for words that do not parse.
        command.make_context(verb, shlex.split(example)[1:])
        assert all(getattr(parameter, "help", None) for parameter in command.params)


def test_a_reader_that_has_enough_is_no_error(
    treeward: Command,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in `treeward score ... | head`: the pipe closes before the rows are written."""
    # more than a pipe's buffer holds
    row = {
        "prompt": "2 + 2?",
        "responses": ["4", "5"],
        "note": "x" * 70_000,
    }
    data = tmp_path / "in.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 3)
    reader, writer = os.pipe()
    os.close(reader)
    with open(
        writer,
        "w",
        encoding="utf-8",
    ) as pipe:  # closing it flushes it, as the end of Python does
        monkeypatch.setattr(sys, "stdout", pipe)
        ended = treeward("score", model_folder, "--data", data)
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    assert "BrokenPipe" not in ended.err


def test_of_several_processes_one_shows_its_log(
    treeward: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(rank: int) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return treeward("check-data", tmp_path / "none.jsonl").err

    assert "none.jsonl" in said(0)
    assert said(1) == ""
