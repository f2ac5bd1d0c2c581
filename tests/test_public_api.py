"""What `import treeward` offers: `treeward.__all__`, a promise to users."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY

import treeward
from treeward.errors import pip_install


@pytest.mark.parametrize("name", treeward.__all__)
def test_each_name_can_be_imported_and_is_documented(name: str) -> None:
    found = getattr(treeward, name)
    assert found.__name__ == name
    assert found.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Scorers"):
        treeward.Scorers  # noqa: B018


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """A folder `treeward` beside a script is a namespace package that wins over an editable
    install's import hook. The install must therefore be a path (`src/`), and the clone itself must
    not look like the package."""
    (tmp_path / "treeward").symlink_to(REPOSITORY, target_is_directory=True)
    # a name that imports nothing heavy
    code = "from treeward import RewardClient\nprint(RewardClient.__module__)\n"
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    for command in (["script.py"], ["-c", code]):
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert ended.stdout.strip() == "treeward.client.rewards", ended.stderr


CLIENT = "treeward; from treeward import RewardClient; RewardClient('http://localhost:1')"


@pytest.mark.parametrize("code", ["treeward", CLIENT], ids=["package", "client"])
def test_neither_the_package_nor_a_client_loads_anything_heavy(code: str) -> None:
    heavy = ["torch", "transformers", "datasets", "pyarrow", "numpy", "fastapi", "uvicorn"]
    heavy += ["pydantic"] if code == "treeward" else []
    script = f"import sys, {code}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


LOADING = """
import sys
from treeward import Scorer
Scorer.load(sys.argv[1], device="cpu")
from transformers.utils import logging
assert logging.get_verbosity() == logging.WARNING and logging.is_progress_bar_enabled()
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [LOADING, "import treeward.planning.plan"])
def test_a_script_that_loads_a_model_has_no_log_of_others_and_keeps_its_own(
    script: str, model_folder: Path
) -> None:
    """A report of missing weights, warnings of torchao's kernels and bars are of treeward's calls,
    not the script's."""
    # a command of an earlier test made it quieter
    environment = {
        **os.environ,
        "TRANSFORMERS_VERBOSITY": "warning",
    }
    command = [sys.executable, "-c", script, str(model_folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout + ended.stderr == ""


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split())
from treeward.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_a_model_scores_without_any_extra(model_folder: Path, tmp_path: Path) -> None:
    """Without extras there are no packages of a server, of adapters or of Ray."""
    extras = "bitsandbytes fastapi math_verify openai orjson peft prometheus_client ray starlette torchao uvicorn"
    data = tmp_path / "in.jsonl"
    data.write_text('{"prompt": "2 + 2?", "completions": ["4", "5"]}\n', encoding="utf-8")
    words = [
        "score",
        str(model_folder),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "out.jsonl"),
    ]
    command = [sys.executable, "-c", WITHOUT_EXTRAS, extras, *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_extra_all_is_every_extra_that_a_run_may_need() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (every,) = extras.pop("all")
    left_out = {"bench", "dev", "liger", "minilm"}  # Liger needs triton, which macOS has not
    assert (
        set(every.removeprefix("treeward[").removesuffix("]").split(",")) == set(extras) - left_out
    )


def test_make_env_installs_the_extras_that_readme_uses() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (installed,) = re.findall(r"--editable '\.\[((?!dev)[\w,]+)\]'", makefile)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    uses = {
        "serve": "treeward serve",
        "ray": "gpus_per_node=8",
        "math": "grpo_rm_1B",
        "lora": "LoRA",
    }
    assert all(text in readme for text in uses.values())
    assert set(installed.split(",")) == set(uses)


def test_no_guide_or_error_asks_an_index_for_treeward() -> None:
    guides = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    recipes = (REPOSITORY / "src" / "treeward" / "config" / "recipes").glob("*.yaml")
    sources = (
        path for path in (REPOSITORY / "src" / "treeward").rglob("*.py") if path.name != "errors.py"
    )
    for file in (*guides, *recipes, *sources):
        assert not re.search(r"pip install '?treeward", file.read_text(encoding="utf-8")), file


def test_an_extra_is_installed_from_the_clone_and_beside_a_wheel(tmp_path: Path) -> None:
    words = shlex.split(pip_install("serve", "ray"))
    assert words == [
        "pip",
        "install",
        "-c",
        f"{REPOSITORY}/constraints.txt",
        "-e",
        f"{REPOSITORY}[serve,ray]",
    ]
    shutil.copytree(REPOSITORY / "src" / "treeward", tmp_path / "treeward")
    script = "from treeward.errors import pip_install; print(pip_install('serve', 'ray'))"
    told = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=tmp_path)
    assert told == "pip install 'treeward[serve,ray]'\n"
