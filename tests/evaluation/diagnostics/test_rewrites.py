"""Each rewrite does what it says, and those of style say the same as before."""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest

from treeward.errors import ConfigError
from treeward.evaluation.diagnostics.code_rewrites import commented, minified, prose_of
from treeward.evaluation.diagnostics.rewrites import REWRITES, rewrite, rewrites_of

TEXT = "The capital is Paris. It lies on the Seine.\n\nAsk me more."


def rewritten(name: str, text: str = TEXT, seed: int = 0) -> Any:
    return rewrite(name, text, random.Random(seed))


def test_what_each_rewrite_does() -> None:
    markdown = rewritten("markdown")
    assert (
        markdown
        == "## Answer\n\n- **The capital** is Paris.\n- **It lies** on the Seine.\n- **Ask me** more."
    )
    assert rewritten("white_space").split() == TEXT.split() and "\n\n\n\n\n\nAsk" in rewritten(
        "white_space"
    )
    assert rewritten("padding").startswith(f"{TEXT} ") and len(rewritten("padding")) >= 1.5 * len(
        TEXT
    )
    assert rewritten("truncated_50") == "The capital is Paris. It lies"  # 6 of 12 words
    assert (
        rewritten("truncated_50", "Paris.") is None
        and rewritten("truncated_50", "Paris, France.") == "Paris,"
    )
    assert all(rewritten(name, "  \n ") is None for name in REWRITES)


def test_a_choice_is_sets_and_names() -> None:
    usual = rewrites_of("usual")
    reword = rewrites_of("reword")
    assert "padding" in usual and "quotes" in reword
    assert [*usual, *reword] == list(REWRITES)
    # In the order of a report, whatever the order of the choice.
    assert rewrites_of("quotes, usual") == (*usual, "quotes")
    # All say the same as before.
    assert {REWRITES[name].kind for name in reword} == {"style"}
    with pytest.raises(ConfigError, match="no such rewrite") as caught:
        rewrites_of("reword,qoutes")
    assert caught.value.fix == "did you mean quotes?"


# --- those of reWordBench ---

MIXED = """Dear Anna, there are several things that everybody should remember about this.

1. Always install `setuptools`, please: see https://example.org/some/path, or ask me.
2. The height is 3.14 metres; therefore $alpha = beta$ holds.

```python
def double(value):
    # twice
    return value * 2
```

Some further words follow, because sentences without code should change somewhere."""
EXACT = ("`setuptools`", "https://example.org/some/path", "3.14", "$alpha = beta$", "value * 2")
IN_PROSE = [
    "spaced_marks",
    "homoglyphs",
    "swapped_letters",
    "wrong_letters",
    "added_letters",
    "missing_letters",
]
CODE = {
    "python": "    total = 0\n    for n in [1, 2]:\n        total += n\n    return total\n",
    "go": "func add(a int, b int) int {\n\tsum := a + b\n\treturn sum\n}\n",
    "javascript": "const double = (value) => {\n  const other = value * 2;\n  return other;\n};\n",
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", IN_PROSE)
def test_letters_change_in_prose_and_nowhere_else(name: str, seed: int) -> None:
    changed = rewritten(name, MIXED, seed)
    assert changed is not None and rewritten(name, MIXED, seed) == changed
    for exact in EXACT:
        assert exact in changed
    # Few letters differ, so that a reader reads the same words.
    pairs = zip(changed.split(), MIXED.split(), strict=name != "spaced_marks")
    if name != "spaced_marks":
        differing = [(new, old) for new, old in pairs if new != old]
        assert 0 < len(differing) <= 18
        for new, old in differing:
            assert abs(len(new) - len(old)) <= 1
            if name != "homoglyphs":
                assert (new[0], new[-1]) == (old[0], old[-1])


@pytest.mark.parametrize("language", CODE)
def test_code_is_never_broken(language: str) -> None:
    code = CODE[language]
    assert not prose_of(code).strip()
    for name in rewrites_of("reword"):
        changed = rewritten(name, code)
        if language == "python" and changed is not None:
            assert ast.dump(ast.parse(dedented(changed))) == ast.dump(ast.parse(dedented(code)))
        else:
            assert changed is None, name


def dedented(code: str) -> str:
    return "if True:\n" + code.rstrip()


def test_what_each_reword_does() -> None:
    assert rewritten("quotes") == f'"{TEXT}"'
    said = "Hi Anna! How are you, dear? It is 3.14... at 10:30: fine.\n1. One.\n2) Two"
    assert rewritten("spaced_marks", said) == (
        "Hi Anna ! How are you , dear ? It is 3.14 ... at 10:30 : fine .\n1. One .\n2) Two"
    )
    assert rewritten("handle").startswith(f"{TEXT} @")
    assert rewritten("address").startswith(f"{TEXT} https://t.co/")
    assert rewritten("tautology").startswith(f"{TEXT} ")
    # A fence is closed before something follows.
    fenced = "Look:\n\n```python\nreturn 1\n```"
    assert rewritten("handle", fenced).startswith(f"{fenced}\n\n@")
    assert rewritten("quotes", fenced) == f'"{fenced}\n\n"'
    looks = rewritten("homoglyphs", "a peace of cake, once more and more and more again" * 3)
    assert not looks.isascii()
    assert rewritten("missing_letters", "It rains.") in ("It rins.", "It rans.")
    # Short words would become others.
    assert rewritten("swapped_letters", "a form is to be sent") is None


def test_python_keeps_what_it_does() -> None:
    code = 'def f(a,\n      b):  # why\n    """Docs."""\n\n    text = """x\n# no"""\n    return a\n'
    assert minified(code) == (
        'def f(a, b):\n    """Docs."""\n    text = \'x\\n# no\'\n    return a'
    )
    noted = commented(code, "bad")
    assert ast.dump(ast.parse(noted)) == ast.dump(ast.parse(code))
    assert noted.count("# bad") == 3 and "# why" in noted and '# no"""  # bad' in noted
    in_text = f"So:\n\n```python\n{code}```\nand\n```go\nx := 1 // # no\n```\n```python\n1 +\n```"
    assert minified(in_text).replace(minified(code), "") == in_text.replace(code.rstrip(), "")
    # Sentences and formulas that happen to be Python.
    for text in ("Answer: 42", "x = 5", "yes", "Paris", "", "\0", "(" * 500):
        assert minified(text) == commented(text, "good") == text


def test_answers_change_their_format() -> None:
    boxed = "So $x = \\boxed{\\frac{1}{2}}$ holds."
    headed = rewritten("answer_format", boxed)
    assert headed == "So $x = \\frac{1}{2}$ holds.\n\n# Answer\n\n\\frac{1}{2}"
    assert rewritten("answer_format", "We add.\n\n# Answer\n\n76^\\circ") == (
        "We add.\n\n\\boxed{76^\\circ}"
    )
    assert rewritten("answer_format", "\\boxed{1") is None
    assert rewritten("answer_format", "The answer is 5.") is None


@pytest.mark.parametrize("reasoning", ["<think>\nTwo and two?\n</think>\n\n", "Two?</think>\n"])
@pytest.mark.parametrize("name", ["padding", "truncated_50", "markdown", "flattery", "empty"])
def test_reasoning_stays_as_it_is(name: str, reasoning: str) -> None:
    """Templates leave out what is before `<think>`: flattery there would seem to do nothing."""
    answer = "The sum is four. It is even."
    alone = rewrite(name, answer, random.Random(0))
    assert alone is not None
    assert rewrite(name, reasoning + answer, random.Random(0)) == reasoning + alone
    # Cut off, or without an answer.
    for text in ("<think>Two and two", "<think>Four.</think>"):
        assert rewrite(name, text, random.Random(0)) is None


@pytest.mark.parametrize("name", ["flattery", "padding", "quotes", "handle", "tautology"])
def test_a_block_of_code_stays_one(name: str) -> None:
    block = "```python\nx = 1\n```"
    for text in (f"{block}\nThis is it.", f"This is it.\n{block}"):
        changed = rewrite(name, text, random.Random(0))
        assert changed is not None and set(block.splitlines()) <= set(changed.splitlines())
