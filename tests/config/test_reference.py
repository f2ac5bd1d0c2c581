from pathlib import Path

from treeward.config.base import Strict
from treeward.config.problems import sections
from treeward.config.reference import config_reference
from treeward.config.run import RewardModelRunConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def all_sections(section: type[Strict]):
    yield section
    for field in section.model_fields.values():
        for child in sections(field.annotation):
            yield from all_sections(child)


def test_the_page_is_what_the_schema_says():
    assert PAGE.read_text(encoding="utf-8") == config_reference(), (
        "run: python -m treeward.config.reference > docs/config.md"
    )


def test_every_key_and_section_is_documented():
    found = list(all_sections(RewardModelRunConfig))
    assert len(found) > 15
    for section in found:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_every_key_is_in_the_page():
    page = config_reference()
    for section in all_sections(RewardModelRunConfig):
        for key in section.key_names():
            assert f"| `{key}` |" in page
