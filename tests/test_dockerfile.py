"""The Dockerfile and the commands around it name only what exists. Nothing is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


def test_what_it_copies_and_installs_is_there() -> None:
    kept = {
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text().split()
        if line[0] == "!"
    }
    copied = {
        name for line in re.findall(r"^COPY (.*)", TEXT, re.MULTILINE) for name in line.split()[:-1]
    }
    assert copied == kept and {"constraints.txt", "src"} <= copied
    assert all((REPOSITORY / name).exists() for name in copied)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r'^ARG EXTRAS="(.*)"', TEXT, re.MULTILINE)[0].split(",")
    named = {extra for one in re.findall(r"as \"([\w,]+)\"", TEXT) for extra in one.split(",")}
    assert {*extras, *named} <= set(project["optional-dependencies"])
    assert {project["readme"], *project["license-files"]} <= copied  # the build reads them
    python = re.findall(r"^FROM python:([\d.]+)", TEXT, re.MULTILINE)[0]
    assert project["requires-python"] == f">={python}"
    assert re.findall(r"^ENTRYPOINT \[\"(\w+)\"\]", TEXT, re.MULTILINE)[0] in project["scripts"]
