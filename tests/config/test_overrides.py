import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.config.overrides import apply_override, merge_trees, parse_override
from treeward.errors import ConfigError

TREE = {"rm": {"seed": 42, "steps": None}, "data": {"train": [{"weight": 1.0}, {"weight": 2.0}]}, "name": "x"}

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Co", "Cn"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6)
KEYS = st.from_regex(r"[a-z_][a-z0-9_\-]{0,8}", fullmatch=True)


def apply(*texts, tree=TREE):
    tree = copy.deepcopy(tree)
    for text in texts:
        apply_override(tree, parse_override(text))
    return tree


@given(st.lists(KEYS, min_size=1, max_size=4), VALUES)
def test_a_value_in_flow_style_round_trips(path, value):
    tree = apply(f"{'.'.join(path)}={json.dumps(value, ensure_ascii=False)}", tree={})
    for key in path:
        tree = tree[key]
    assert tree == value


@given(TEXTS.filter(lambda t: t and t[0] not in "[{\"'").map(lambda t: "=" + t))
def test_bare_text_is_taken_as_it_is(text):
    assert apply(f"key={text}", tree={}) == {"key": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-5", 1e-5),
        ("a=null", None),
        ("a=true", True),
        ("a='1'", "1"),
        ('a="x = y"', "x = y"),
        ("a=''", ""),
        ("a=x=y=z", "x=y=z"),
        ("a=foo: bar # baz", "foo: bar # baz"),
        ("a=*.jsonl", "*.jsonl"),
        ("a=00:03:45:00", "00:03:45:00"),
        ("a=[1, x, null, [2]]", [1, "x", None, [2]]),
        ("a={b: 1, c: {d: 2}}", {"b": 1, "c": {"d": 2}}),
        ("a=${b.c}", "${b.c}"),
        ("a=https://example.org/x?y=1", "https://example.org/x?y=1"),
        ("a=line one\nline two", "line one\nline two"),
    ],
)
def test_values(text, value):
    assert parse_override(text).value == value


def test_setting():
    assert apply("rm.seed=7")["rm"]["seed"] == 7
    assert apply("++rm.seed=7")["rm"]["seed"] == 7
    assert apply("rm.new.key=7")["rm"]["new"] == {"key": 7}
    assert apply("+rm.new=7")["rm"]["new"] == 7
    assert apply("rm.steps.x=1")["rm"]["steps"] == {"x": 1}, "null is an empty section"
    assert apply("data.train.1.weight=3")["data"]["train"] == [{"weight": 1.0}, {"weight": 3}]
    assert apply("data.train[0].weight=3")["data"]["train"] == [{"weight": 3}, {"weight": 2.0}]
    assert apply("+data.train.2={weight: 4}")["data"]["train"][2] == {"weight": 4}
    assert apply("rm={seed: 1}")["rm"] == {"seed": 1, "steps": None}, "mappings merge"
    assert apply("data.train=[]")["data"]["train"] == [], "lists are replaced"
    assert apply("rm.seed=1", "rm.seed=2")["rm"]["seed"] == 2


def test_removing():
    assert "seed" not in apply("~rm.seed")["rm"]
    assert "seed" not in apply("~rm.seed=42")["rm"]
    assert apply("~data.train.0")["data"]["train"] == [{"weight": 2.0}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rm.seed", "has no value"),
        ("+rm.seed", "has no value"),
        ("rm.seed=", "has no value"),
        ("=1", "not understood"),
        ("rm..seed=1", "not understood"),
        ("rm seed=1", "not understood"),
        ("--rm.seed=1", "not understood"),
        ("+++rm.seed=1", "not understood"),
        ("+rm.seed=1", "has it already"),
        ("~rm.sed", "not there"),
        ("~rmm.seed", "not there"),
        ("~rm.seed=7", "has another value"),
        ("rm.seed.x=1", "not a section"),
        ("~rm.steps.x", "not a section"),
        ("data.train.2.weight=1", "which element"),
        ("data.train.x=1", "which element"),
        ("~data.train.2", "which element"),
        ("rm.seed=[1", "not valid"),
        ("rm.seed='x' y", "not valid"),
        ("rm={seed:1}", "colon"),
    ],
)
def test_mistakes_show_the_override(text, words):
    with pytest.raises(ConfigError) as caught:
        apply(text)
    assert words in caught.value.summary
    assert caught.value.got == text
    assert caught.value.where == "command line"


def test_a_failed_override_says_how_to_write_it():
    with pytest.raises(ConfigError, match=r"fix: +write rm.seed=1"):
        apply("--rm.seed=1")
    with pytest.raises(ConfigError, match=r"fix: +did you mean seed"):
        apply("~rm.sed")


def test_merging_leaves_its_arguments_alone():
    base, other = {"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}, "d": None}
    assert merge_trees(base, other) == {"a": {"b": 1, "c": [2]}, "d": None}
    assert (base, other) == ({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}, "d": None})
