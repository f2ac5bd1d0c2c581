"""Templates that do not end or fill the memory, and those of real families, which the bounds leave
as they are."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from messages import assistant, user
from templates import CASES, PROMPTING_CHATML, TEMPLATES, family_renderer

from treeward.data import rendering, template_bounds
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError

CHAT = [user("Hi"), assistant("Hello.")]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NAMESPACE = "{% set ns = namespace(text='abcd', items=[1], lists=[], number=3) %}"
REPEATED = NAMESPACE + "{% for i in range(60) %}{% set DOUBLED %}{% endfor %}"
LONG = "{% set long = 'x' * 60000 %}"
WITHOUT_END = {
    "loops": NESTED,
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 60 }}{% endfor %}",
}
TOO_MUCH = {
    "joins": REPEATED.replace("DOUBLED", "ns.text = ns.text ~ ns.text"),
    "adds": REPEATED.replace("DOUBLED", "ns.text = ns.text + ns.text"),
    "adds lists": REPEATED.replace("DOUBLED", "ns.items = ns.items + ns.items"),
    "captures": REPEATED.replace("DOUBLED", "ns.text %}{{ ns.text }}{{ ns.text }}{% endset"),
    "squares": REPEATED.replace("DOUBLED", "ns.number = ns.number * ns.number"),
    "nests lists": REPEATED.replace("DOUBLED", "ns.lists = [ns.lists, ns.lists]")
    + "{{ ns.lists }}",
    "nests lists for JSON": REPEATED.replace("DOUBLED", "ns.lists = [ns.lists, ns.lists]")
    + "{{ ns.lists | tojson }}",
    "repeats": "{{ 'x' * 10**9 }}",
    "repeats a list": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10**(10**10) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "format": "{{ '%1000000000s' | format('x') }}",
    "a width that is an argument": "{{ '%*d' | format(10**9, 1) }}",
    "percent": "{{ '%.1000000000f' % 1.5 }}",
    "a method's format": "{{ '{:>1000000000}'.format(1) }}",
    "a method's width": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "indent": "{{ 'x\ny' | indent(10**9) }}",
    "JSON": "{{ messages | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "replace": LONG + "{{ long | replace('x', long) }}",
    "join": LONG + "{{ range(9999) | join(long) }}",
    "a method's join": LONG + "{{ long.join(['a'] * 9999) }}",
    "a chain": "{{ range(9999) | map('string') | map('center', 9999) | list | length }}",
    "writing": LONG + "{% for i in range(9999) %}{{ long }}{% endfor %}",
    "slices": LONG + "{% for i in range(9999) %}{% set rest = long[1:] %}{% endfor %}",
    "lorem ipsum": "{{ lipsum(10**9) }}",
}


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS", 2**17)
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS_MADE", 2**20)


@pytest.mark.parametrize("name", WITHOUT_END)
def test_a_template_without_end_is_an_error(
    name: str,
    tiny_tokenizer: Any,
    low_bounds: None,
) -> None:
    with pytest.raises(ConfigError, match="more than 20,000 steps"):
        Renderer(tiny_tokenizer, chat_template=WITHOUT_END[name])


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_that_fills_the_memory_is_an_error(
    name: str,
    tiny_tokenizer: Any,
    low_bounds: None,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"more than [\d,]+ (characters|values|digits|paragraphs)|indents by more",
    ):
        Renderer(tiny_tokenizer, chat_template=TOO_MUCH[name])


def test_the_bounds_of_a_user_end_two_nested_loops(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="more than 2,000,000 steps"):
        Renderer(tiny_tokenizer, chat_template=NESTED)


def test_slow_steps_end_by_their_processor_time(
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        Renderer(tiny_tokenizer, chat_template="{% for i in range(999) %}{% endfor %}")


def test_one_conversation_that_does_not_end_leaves_the_others_alone(
    tiny_tokenizer: Any,
    low_bounds: None,
) -> None:
    source = (
        PROMPTING_CHATML + "{% if messages[0]['content'] == 'forever' %}" + NESTED + "{% endif %}"
    )
    renderer = Renderer(tiny_tokenizer, chat_template=source)
    before = renderer.render(CHAT)
    texts: list[str] = []

    def render() -> None:  # the server renders in a thread
        for _ in range(3):
            with pytest.raises(DataError, match=r"c.jsonl:7.*more than 20,000 steps") as refusal:
                renderer.render([user("forever")], where="c.jsonl:7")
            assert "chat_template" in str(refusal.value)
            texts.append(renderer.render(CHAT))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert texts == [before] * 3


def test_rendering_outside_of_treeward_has_no_bounds(tiny_tokenizer: Any, low_bounds: None) -> None:
    source = "{% for a in range(300) %}{% for b in range(300) %}{% endfor %}{% endfor %}{{ 'x' * 2**18 }}"
    with pytest.raises(ConfigError):
        Renderer(tiny_tokenizer, chat_template=source)
    assert (
        len(tiny_tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False)) == 2**18
    )


def test_operations_make_what_jinja_makes(tiny_tokenizer: Any) -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% macro twice(text) %}{{ text }}{{ text }}{% endmacro %}"
        "{% for m in messages if m.role %}{% set ns.n = ns.n + loop.index %}{{ loop.last ~ "
        "ns.n ~ none ~ [1, 'a'] }}"
        "{{ m['content'][1:] + 'x' * 3 }}{{ twice(m.content) | trim | upper }}{{ m | "
        "tojson(indent=2) }}{% endfor %}"
        "{{ '%05.2f|%s' % (1.5, 'a%') }}{{ '%(a)3s' | format(a=1700000000000) }}{{ '{:>8} "
        "{}'.format(1, 10**12) }}"
        "{{ 2**10 }}{{ 7 % 3 }}{{ [1] + [2] }}{{ ['a', 'b'] | join(', ') }}"
        "{{ messages | map(attribute='role') | join }}"
        "{{ 'a-b'.split('-') | reverse | list }}{{ ' ab ' | replace('a', 'c') | center(9) "
        "}}{{ {'a': (1, 2)} }}"
        "{% set text %}{{ 1 }}{% endset %}{{ text }}{% filter upper %}abc{% endfilter %}{{ "
        "10**12 * 10**9 }}"
    )
    expected = tiny_tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    assert Renderer(tiny_tokenizer, chat_template=source).render(CHAT) == expected


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize("name", CASES)
def test_every_real_template_writes_what_it_writes_without_bounds(
    name: str,
    real_chats: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = family_renderer(name)
    # not every one takes one
    preferences = [p for p in real_chats if all(m["role"] != "system" for m in p.context)]
    chats = [[*p.context, *p.completions[0].messages] for p in preferences[:5]]
    texts = [renderer.render(chat) for chat in chats]
    monkeypatch.setattr(rendering, "bounded", nullcontext)
    assert [renderer.render(chat) for chat in chats] == texts


@pytest.mark.parametrize("marked", [True, False])
def test_the_spans_of_a_completion_are_those_of_transformers(
    marked: bool,
    tiny_tokenizer: Any,
) -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content ~ 'x' }}{% endgeneration %}|{% endfor %}"
    options: dict[str, Any] = {
        "chat_template": source,
        "return_dict": True,
        "return_assistant_tokens_mask": marked,
    }
    expected = tiny_tokenizer.apply_chat_template(CHAT, **options)
    with template_bounds.bounded():
        assert tiny_tokenizer.apply_chat_template(CHAT, **options) == expected
