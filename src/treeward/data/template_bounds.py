"""`bounded`: chat templates are programs that others wrote, and a program may not end, or may fill
the memory.

    with bounded():
        # jinja2.TemplateRuntimeError beyond a bound
        text = tokenizer.apply_chat_template(messages, tokenize=False)

What a template does is counted while it does it: its steps, the characters that it makes, and now
and then its processor time. The text is what it would be without the bounds. Jinja's sandbox keeps
templates from reading the machine; it bounds `range`, and nothing else.

transformers compiles templates itself and has no argument for the environment. So its compiler is
replaced by one that compiles for a `BoundedEnvironment` within the block, and as before anywhere
else.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_STEPS = 2_000_000
"""Rounds of loops and calls of macros in one rendering: seconds. A conversation of 1,000 messages
takes thousands."""

MAX_CHARACTERS = 2**28
"""The longest text that a template may write, or make in one step."""

MAX_CHARACTERS_MADE = 2**30
"""Characters that a rendering makes in all on its way to the text; an item of a list counts as
eight."""

MAX_SECONDS = 20.0
"""Processor time of one rendering, for steps that are slow without making anything: a search in a
long text."""

_MAX_DIGITS = 1000
_MAX_BITS = 3 * _MAX_DIGITS  # of an integer: a decimal digit has between three and four bits
_MAX_INDENT = 100
_MAX_PARAGRAPHS = 1000
_STEPS_BETWEEN_CLOCKS = 64
_CONTAINERS = (list, tuple, dict)
# These make more than they are given: at most the product of the lengths and numbers among their
# arguments.
_MULTIPLYING = frozenset(
    {
        "batch",
        "center",
        "expandtabs",
        "indent",
        "ljust",
        "rjust",
        "slice",
        "translate",
        "urlize",
        "wordwrap",
        "zfill",
    }
)
# These read no more of a container than its items. Others may go through all that it holds.
_SHALLOW = frozenset(
    {"batch", "count", "d", "default", "first", "items", "join", "last", "length", "list", "map"}
    | {"reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
)
# The width and the precision of a field, which pad it: "%(name)-12.3f", "{name:>12.3f}". An
# asterisk and a brace stand for an argument: "%*d", "{:{width}}".
_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}\d]*(\d+|\{)(?:[^{}\d]*(\d+|\{))?")


class _Work(threading.local):
    """What the rendering of this thread has done since `began`, in seconds of the processor.

    No bound holds where `is_bounded` is false, outside of `bounded`.
    """

    is_bounded = False
    steps = 0
    characters = 0
    began = 0.0


_work = _Work()


@contextmanager
def bounded() -> Iterator[None]:
    """Within the block what this thread renders is bounded: `jinja2.TemplateRuntimeError` says
    which bound, and what the template did."""
    _work.steps = 0
    _work.characters = 0
    _work.began = time.thread_time()
    _work.is_bounded = True
    try:
        yield
    finally:
        _work.is_bounded = False


class _CountingCode(CodeGenerator):
    """Compiles a template to Python that calls its environment at each step, and for each value
    that may be large."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        # The body of a loop, a macro or a block, not a branch of an `if`: without one nothing runs
        # twice.
        if not frame.soft_frame:
            self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        # Templates add most of all, and Jinja's own way to intercept an operator takes three times
        # as long.
        self.write("environment.add(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        # A slice is a copy, and an index makes nothing.
        is_slice = isinstance(node.arg, nodes.Slice)
        if is_slice:
            self.write("environment.made(")
        super().visit_Getitem(node, frame)
        if is_slice:
            self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        # `{{ value }}`, for which Jinja would write `str(`, or with autoescape a call that escapes.
        # Jinja's `_output_child_post` closes the bracket.
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.text_of(")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment, which `_bounded_template` makes one of these, with the counts."""

    code_generator_class = _CountingCode
    intercepted_binops = frozenset({"*", "%", "**"})

    def step(self) -> None:
        """Count a round of a loop, or a call of a macro or block."""
        _work.steps += 1
        if _work.steps > MAX_STEPS and _work.is_bounded:
            raise _beyond(f"it takes more than {MAX_STEPS:,} steps")
        if _work.steps % _STEPS_BETWEEN_CLOCKS == 0 and _work.is_bounded:
            seconds = time.thread_time() - _work.began
            if seconds > MAX_SECONDS:
                raise _beyond(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def add(self, left: Any, right: Any) -> Any:
        """What `+` makes: at most twice what there is, so it is looked at when it is made."""
        value = left + right
        if type(value) is str:
            _work.characters += len(value)
            # One comparison for most texts: a text is no longer than all that were made, and the
            # bound of a text is below that of all.
            if _work.characters > MAX_CHARACTERS:
                _check_size(len(value))
                self.count(0)
            return value
        _check_size(_size(value))
        return self.made(value)

    def made(self, value: Any) -> Any:
        """Count a value that was made, and return it."""
        if isinstance(value, str | list | tuple | dict):
            self.count(_size(value))
        elif type(value) is int and value.bit_length() > _MAX_BITS:
            raise _beyond(f"it makes a number of more than {_MAX_DIGITS:,} digits")
        return value

    def count(self, characters: int) -> None:
        """Count characters that were made."""
        _work.characters += characters
        if _work.characters > MAX_CHARACTERS_MADE and _work.is_bounded:
            raise _beyond(f"it makes more than {MAX_CHARACTERS_MADE:,} characters")

    def text_of(self, value: Any) -> str:
        """The text of `{{ value }}`. A list may hold another many times, which is small until it is
        written."""
        if type(value) is str:
            return value
        if isinstance(value, _CONTAINERS):
            self.count(_num_values(value))
        return str(value)

    def join_texts(self, parts: Iterable[Any]) -> str:
        """What `~` makes."""
        return self.concat([self.text_of(part) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written: the one text may be in it many
        times."""
        parts = list(parts)
        length = sum(map(len, parts))
        _check_size(length)
        self.count(length)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            # A text or a list is repeated. `made` looks at the product of numbers.
            is_product = isinstance(left, int | float) and isinstance(right, int | float)
            if not is_product:
                _check_size(_magnitude(left) * _magnitude(right))
        elif operator == "**":
            # The power of floats is a float, and takes no memory.
            is_power = isinstance(left, int) and isinstance(right, int) and right > 0
            if is_power and left.bit_length() * right > _MAX_BITS:
                raise _beyond(f"it makes a number of more than {_MAX_DIGITS:,} digits")
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            self.check_format(_PERCENT_WIDTH, left, values)
        return self.made(super().call_binop(context, operator, left, right))

    # Named as Jinja names them, so that no keyword of a template's call is one of these.
    def call(  # noqa: B902
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        name = getattr(__obj, "__name__", None)
        if name in _GROWING:
            # A method of a text, as `text.center`. In place of `format` and `format_map` the
            # sandbox gives a function that wraps the method.
            method = getattr(__obj, "__wrapped__", __obj)
            text = getattr(method, "__self__", None)
            __self.check_growth(name, (text, *args), kwargs)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def check_growth(self, name: str, values: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Refuse what would make more than the bound, before it is made. `values`: the first is
        what a filter or a method is of."""
        arguments = [*values, *named.values()]
        if name == "replace" and len(arguments) > 2:
            text, old, new = (str(value) for value in arguments[:3])
            # An empty `old` is found at every place, as `count` says too.
            _check_size(len(text) + text.count(old) * len(new))
        elif name == "join":
            # A filter has the list first, a method the separator; a further text is the name of an
            # attribute: with it the sum is too high, never too low.
            separators = [len(value) for value in arguments if isinstance(value, str)]
            lists = [value for value in arguments if isinstance(value, _CONTAINERS)]
            for items in lists:
                lengths = sum(_longest(item) for item in items)
                _check_size(lengths + len(items) * sum(separators))
        elif name in ("format", "format_map"):
            text = values[0]
            if isinstance(text, str):
                # The filter is of percents, and the method of braces.
                self.check_format(_PERCENT_WIDTH, text, arguments[1:])
                self.check_format(_BRACE_WIDTH, text, arguments[1:])
        elif name == "tojson":
            numbers = [value for value in arguments[1:] if not isinstance(value, _CONTAINERS)]
            if any(_magnitude(value) > _MAX_INDENT for value in numbers):
                raise _beyond(f"it indents by more than {_MAX_INDENT}")
        elif name == "generate_lorem_ipsum":
            if any(_magnitude(value) > _MAX_PARAGRAPHS for value in arguments):
                raise _beyond(f"it makes up more than {_MAX_PARAGRAPHS:,} paragraphs")
        elif name in _MULTIPLYING:
            size = 1
            for value in arguments:
                size *= _magnitude(value)
            _check_size(size)

    def check_format(self, pattern: re.Pattern[str], text: str, arguments: Sequence[Any]) -> None:
        """Refuse a format of wide fields. `pattern` finds the widths and precisions in `text`."""
        size = 0
        for width in itertools.chain.from_iterable(pattern.findall(text)):
            if not width:
                continue
            if not width.isdigit():
                # Which argument is the width is not known: at most all of them together.
                size += sum(abs(value) for value in arguments if isinstance(value, int))
            elif len(width) < _MAX_DIGITS:
                size += int(width)
            else:
                # `int` refuses texts of thousands of digits by an error of its own.
                size += MAX_CHARACTERS + 1
        _check_size(size)
        # The values are written too.
        for value in arguments:
            if isinstance(value, _CONTAINERS):
                self.count(_num_values(value))


_GROWING = _MULTIPLYING | {
    "format",
    "format_map",
    "generate_lorem_ipsum",
    "join",
    "replace",
    "tojson",
}


def _counting(
    environment: BoundedEnvironment,
    name: str,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """A filter of Jinja's with the counts."""
    # Some filters get the environment or a context first, and say so by an attribute, which `wraps`
    # copies. `first`: the place of the value that is filtered.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        values = args[first:]
        if name in _GROWING:
            # The check reads the items before the filter does, and an iterator gives them once.
            if name == "join" and values and isinstance(values[0], Iterator):
                values = (list(values[0]), *values[1:])
                args = (*args[:first], *values)
            environment.check_growth(name, values, kwargs)
        if name not in _SHALLOW and values and isinstance(values[0], _CONTAINERS):
            environment.count(_num_values(values[0]))
        return environment.made(function(*args, **kwargs))

    return counting


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS and _work.is_bounded:
        raise _beyond(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _beyond(what: str) -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(what)


def _magnitude(value: Any) -> int:
    """A number, or a length, by which other arguments may be multiplied; at least 1."""
    if isinstance(value, int):
        return max(1, abs(value))
    return max(1, _size(value))


def _size(value: Any) -> int:
    """Characters of a text; a list has references, of eight bytes each. Numbers have no size that
    matters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, _CONTAINERS):
        return 8 * len(value)
    return 0


def _longest(item: Any) -> int:
    """Characters of an item of a list that is joined, or of the longest of an object's
    attributes."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Mapping):
        return max((len(value) for value in item.values() if isinstance(value, str)), default=0)
    if isinstance(item, list | tuple):
        return _num_values(item)
    return 1


def _num_values(container: Any) -> int:
    """How many values and characters are written where a container is, at most one more than the
    bound."""
    number = 0
    # By a list, not by recursion: a template can nest lists deeper than Python's stack.
    to_visit = [container]
    while to_visit:
        value = to_visit.pop()
        number += 1
        if isinstance(value, str):
            number += len(value)
        elif isinstance(value, dict):
            to_visit += value.values()
        elif isinstance(value, list | tuple):
            to_visit += value
        # Those that wait count too: few lists may hold very many values.
        if len(to_visit) + number > MAX_STEPS:
            raise _beyond(f"it writes a list of more than {MAX_STEPS:,} values")
    return number


@functools.lru_cache(maxsize=128)
def _bounded_template(source: str) -> jinja2.Template:
    """The template compiled by an environment with transformers' filters, functions and tags, and
    our counts."""
    # The environment is made anew for each template. With an empty one nothing of it has run:
    # constant expressions are computed while a template is compiled.
    environment: Any = chat_template_utils._cached_compile_jinja_template("").environment
    is_as_expected = type(environment) is ImmutableSandboxedEnvironment
    assert is_as_expected, "transformers renders in another environment"
    environment.__class__ = BoundedEnvironment
    for name, function in environment.filters.items():
        environment.filters[name] = _counting(environment, name, function)
    template: jinja2.Template = environment.from_string(source)
    return template


_compile_unbounded = chat_template_utils._compile_jinja_template


def _compile(source: str) -> Any:
    if _work.is_bounded:
        return _bounded_template(source)
    return _compile_unbounded(source)


# By `setattr`, because mypy knows the type of the cached function that is replaced.
setattr(chat_template_utils, "_compile_jinja_template", _compile)  # noqa: B010
