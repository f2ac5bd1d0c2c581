"""`minified`, `commented`: Python with other comments, which does the same. `prose_of`: a text
without its code.

    minified("return 1  # one")        # "return 1"
    commented("return 1", "bad")       # "return 1  # bad"
    prose_of("Use `x`, please.")       # "Use    , please.": every other letter is in its place
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable

_FENCED = re.compile(r"(```(\w*)[^\n]*\n)(.*?)(\n?```|\Z)", re.DOTALL)
"""A block of code: its opening with the language, its code, its end."""
_EXACT = re.compile(_FENCED.pattern + r"|`[^`\n]+`|\$[^$\n]+\$|https?://\S+", re.DOTALL)
"""What a changed letter would break: code, formulas, addresses."""
_SURE_ENDS = (";", "{", "}")
_CODE_ENDS = (*_SURE_ENDS, ")", ":", "]", ",")
_CODE_SHARE = 1 / 3
_STATEMENTS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Return, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Raise, ast.Assert),
)
"""What no sentence and no formula is: "Answer: 42" and "x = 5" are Python too."""


def prose_of(text: str) -> str:
    """The text with blanks in the place of its code, formulas and addresses, and of all if it looks
    like code as a whole."""
    prose = _EXACT.sub(lambda match: _blank(match.group(0)), text)
    return _blank(text) if _looks_like_code(prose) else prose


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _looks_like_code(text: str) -> bool:
    """Whether it seems to be code of any language: a third of its lines end as code does, and one
    as little else."""
    if _is_python(text):
        return True
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    num_sure = sum(line.endswith(_SURE_ENDS) for line in lines)
    num_code = sum(line.endswith(_CODE_ENDS) for line in lines)
    return num_sure > 0 and num_code >= _CODE_SHARE * len(lines)


def minified(text: str) -> str:
    """The text whose Python has no comments, and one layout."""

    def without_comments(code: str) -> str:
        try:
            return ast.unparse(ast.parse(code))
        except RecursionError:  # it is nested more deeply than can be written
            return code

    return _change_python(text, without_comments)


def commented(text: str, comment: str) -> str:
    """The text whose Python has this comment behind each statement that had none."""

    def with_comments(code: str) -> str:
        # Not `splitlines`, for which more characters end a line than for Python.
        lines = code.split("\n")
        has_comment: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            row = token.start[0]
            if token.type == tokenize.COMMENT:
                has_comment.add(row)
            # The end of a statement, and not of a line within brackets or a string.
            elif token.type == tokenize.NEWLINE and row not in has_comment:
                lines[row - 1] = f"{lines[row - 1].rstrip()}  # {comment}"
        return "\n".join(lines)

    return _change_python(text, with_comments)


def _change_python(text: str, change: Callable[[str], str]) -> str:
    """The text with its Python changed: the whole, or its fenced blocks of Python."""
    if _is_python(text):
        return _changed(text, change)

    def changed_block(block: re.Match[str]) -> str:
        opening, language, code, end = block.groups()
        if language.lower() not in ("python", "py", "python3"):
            return block.group(0)
        tree = _parsed(code)
        if tree is None or not tree.body:
            return block.group(0)
        return f"{opening}{_changed(code, change)}{end}"

    return _FENCED.sub(changed_block, text)


def _changed(code: str, change: Callable[[str], str]) -> str:
    """The code changed, at its own indentation: suites complete the body of a function."""
    first = next(line for line in code.splitlines() if line.strip())
    indentation = first[: len(first) - len(first.lstrip())]
    with warnings.catch_warnings():
        # Of escapes in strings that Python does not know.
        warnings.simplefilter("ignore")
        changed = change(textwrap.dedent(code).strip("\n"))
    return textwrap.indent(changed, indentation)


def _is_python(text: str) -> bool:
    """Whether the whole text is Python, and no sentence that happens to parse."""
    tree = _parsed(text)
    if tree is None:
        return False
    return any(isinstance(statement, _STATEMENTS) for statement in tree.body)


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(textwrap.dedent(code).strip("\n"))
        # Null bytes are a ValueError, and deep nesting the others.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
