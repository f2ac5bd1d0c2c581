import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.config.yaml_file import parse_scalar, read_yaml, write_yaml
from treeward.errors import ConfigError

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("yaml")


def read(folder, text):
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_is_read_back(folder, tree):
    path = folder / "tree.yaml"
    write_yaml(tree, path)
    assert read_yaml(path)[0] == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3", 3),
        ("-0.5", -0.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("010", 10),
        ("1:00:00:00", "1:00:00:00"),
        ("2026-01-01", "2026-01-01"),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("null", None),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("-", "-"),
        ("e5", "e5"),
        ("-.inf", -math.inf),
    ],
)
def test_a_word_means_the_same_in_a_file_and_in_an_override(folder, text, value):
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)
    if text != "-":
        assert read(folder, f"a: {text}\n")[0] == {"a": value}


def test_every_key_has_its_line(folder):
    _, lines = read(folder, "a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n")
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", "0"): 4,
        ("a", "c", "1"): 5,
        ("a", "c", "1", "d"): 5,
    }


def test_merge_keys_and_anchors(folder):
    tree, _ = read(folder, "a: &x {k: 1, l: 2}\nb: {<<: *x, l: 3}\n1: {}\n")
    assert tree == {"a": {"k": 1, "l": 2}, "b": {"k": 1, "l": 3}, "1": {}}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1\nc: 2\n", ":3", "expected"),
        ("a: 1\na: 2\n", ":2", "the key a is given twice"),
        ("a:\n\tb: 1\n", ":2", "cannot start any token"),
        ("a: !!python/object:os.system x\n", ":1", "could not determine a constructor"),
        ("a: &x [*x]\n", ":1", "recursive"),
        ("? [1]\n: 2\n", ":1", "a key is not a word"),
        ("a: 1\n---\nb: 2\n", ":2", "another document"),
        ("a: \x01\n", "", "not valid"),
        ("- 1\n", "", "not a mapping"),
    ],
)
def test_syntax_errors_name_file_and_line(folder, text, line, words):
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    assert caught.value.where == f"{folder / 'x.yaml'}{line}"
    assert words in caught.value.summary


def test_files_that_cannot_be_read(folder):
    (folder / "latin.yaml").write_bytes(b"a: \xe9\n")
    for path in (folder / "absent.yaml", folder, folder / "latin.yaml"):
        with pytest.raises(ConfigError, match="the configuration"):
            read_yaml(path)
