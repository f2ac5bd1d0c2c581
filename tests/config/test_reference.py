import re
import runpy
from pathlib import Path

from treeward.config.base import Strict, meaning, sections
from treeward.config.data import DataConfig, PromptDataConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.nemo_rl import further_keys
from treeward.config.reward_environments import ENVIRONMENTS
from treeward.config.run import RewardModelRunConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def all_sections(section: type[Strict]):
    yield section
    for field in section.model_fields.values():
        for child in sections(field.annotation):
            yield from all_sections(child)


ROOTS = (RewardModelRunConfig, GRPORunConfig, *(kind.section for kind in ENVIRONMENTS.values()))


def test_the_page_is_what_the_schema_says():
    page = PAGE.read_text(encoding="utf-8")
    made = runpy.run_path(str(PAGE.with_name("config_tables.py")))["config_reference"]
    assert made(page) == page, "run: python docs/config_tables.py"


def test_the_page_on_data_is_what_the_table_says():
    page = PAGE.with_name("data.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(PAGE.with_name("data_tables.py")))["data_tables"]
    assert made(page) == page, "run: python docs/data_tables.py"
    made = runpy.run_path(str(PAGE.with_name("data_tables.py")))["step_table"]
    page = PAGE.with_name("process_rewards.md").read_text(encoding="utf-8")
    assert made(page) == page, "run: python docs/data_tables.py"


def test_every_key_and_section_is_documented():
    found = [section for root in ROOTS for section in all_sections(root)]
    assert len(found) > 55
    for section in found:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert meaning(field), f"{section.__name__}.{name}"


def test_every_short_form_of_the_data_is_in_its_table():
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| Short form |")[2].partition("<!-- begin train -->")[0]
    left = "".join(line.split(" | ")[0] for line in table.splitlines())
    named = set(re.findall(r"`(\w+)`", left))
    forms = {*further_keys(DataConfig), *further_keys(PromptDataConfig)}
    assert len(forms) > 15 and forms <= named, forms - named
