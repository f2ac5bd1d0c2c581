"""Recipes: the configurations of the package, by their names, and the files beside a
configuration."""

import os
import tomllib
from pathlib import Path

import pytest
from config.conftest import RM

from treeward.config.load import load_config, load_grpo_config, recipe_names
from treeward.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without the repository's examples."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_its_name_and_the_path_that_it_has_in_the_repository(name):
    load = load_grpo_config if name.startswith(("grpo", "rlhf", "judge", "rubric")) else load_config
    assert load(name) == load(f"examples/configs/{name}.yaml")
    in_repository = ROOT / "examples" / "configs" / f"{name}.yaml"
    assert load(name) == load(in_repository.resolve())


def test_a_file_that_exists_comes_before_the_recipe(elsewhere):
    (elsewhere / "rm").write_text(RM, encoding="utf-8")
    assert load_config("rm").data.train[0].data_path == "t.jsonl"


def test_defaults_may_name_a_recipe(elsewhere):
    (elsewhere / "mine.yaml").write_text("defaults: rm\nrm: {seed: 7}\n", encoding="utf-8")
    assert load_config("mine.yaml") == load_config("rm", ["rm.seed=7"])


def test_an_unknown_name_says_which_recipes_there_are(elsewhere):
    with pytest.raises(
        ConfigError, match=r"quickstart, .*rm, rm_tulu3_8b, rubric_demo, small"
    ) as error:
        load_config("quickstar")
    assert error.value.fix == "did you mean quickstart?"
    (elsewhere / "mine.yaml").write_text("defaults: qickstart\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"or a recipe: .*quickstart"):
        load_config("mine.yaml")


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_prompt_file_lies_in_the_working_directory_or_beside_the_file_that_names_it(
    elsewhere, key
):
    folder = elsewhere / "configs"
    folder.mkdir()
    block = f"{{data_path: t.jsonl, {key}: texts/it.txt}}"
    base = f"policy: {{model_name: m}}\ndata: {{train: [{block}]}}\n"
    (folder / "base.yaml").write_text(base, encoding="utf-8")
    (elsewhere / "mine.yaml").write_text("defaults: configs/base.yaml\n", encoding="utf-8")
    for place in (folder, elsewhere):
        (place / "texts").mkdir()
        (place / "texts" / "it.txt").write_text("{}", encoding="utf-8")
        found = getattr(load_config("mine.yaml").data.train[0], key)
        assert os.path.samefile(found, place / "texts" / "it.txt")


def test_a_template_lies_beside_the_file_too_and_its_text_stays_what_it_is(elsewhere):
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    for text, template in (
        ("chat.jinja", "configs/chat.jinja"),
        ("'{{ messages }}'", "{{ messages }}"),
    ):
        run = RM.replace("model_name: m", f"model_name: m, tokenizer: {{chat_template: {text}}}")
        (elsewhere / "configs" / "run.yaml").write_text(run, encoding="utf-8")
        assert load_config("configs/run.yaml").policy.tokenizer.chat_template == template


def test_the_prompt_file_of_a_recipe_is_in_the_package():
    data = load_grpo_config("grpo_math_1B").data
    assert "{}" in Path(str(data.train[0].prompt_file)).read_text(encoding="utf-8")


def test_help_of_commands_and_guides_name_recipes_not_paths():
    for file in (*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert not [
            line for line in lines if "treeward " in line and "--config examples/" in line
        ], file


def test_the_wheel_has_every_file_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["treeward"]
    package = ROOT / "src" / "treeward"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    files = {
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files <= packed


def test_the_reference_names_every_recipe():
    reference = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    section = reference.partition("**Recipes.**")[2].partition("\n\n")[0]
    assert not [name for name in recipe_names() if f"`{name}`" not in section]
